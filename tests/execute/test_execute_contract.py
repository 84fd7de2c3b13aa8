"""The memory contract, also of codes and of bands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import sparse_checkpoint, write_checkpoint
from kits.gather_maker import Stock, expression, make_stock, plan_of, whole
from kits.marks import slow_but
from kits.memory_meter import AllocationMeter
from kits.merge_cases import Family, recipes
from kits.recipe_maker import linear
from kits.segment_bench import Bench, counted_buffers, make_bench

from raymerge.api import plan
from raymerge.checkpoints.header import TensorSpec
from raymerge.checkpoints.quantisation.encoding import Format, QuantSpec, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4_ROWS
from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.errors import NonFiniteError
from raymerge.execute import encoding, lane
from raymerge.execute.decoding import numbers
from raymerge.execute.lane import pieces
from raymerge.execute.reading import RawCodes, TileJob
from raymerge.merge_plan.expressions import (
    Expression,
    Gather,
    Op,
    Output,
    Part,
    Read,
    Scales,
    conversion_expression,
    gathered,
)
from raymerge.merge_plan.jobs import JobPart, OpJob
from raymerge.merge_plan.memory import SMALLEST_BUDGET, expression_passes, project
from raymerge.merge_plan.tables import Plan
from raymerge.methods import SAMPLE_LENGTH, SAMPLE_RUNS, BaseUse, Method, StoredKernel, methods
from raymerge.storage.local.store import LocalStore

MIB = 1 << 20
BUDGET = 16 * MIB
"""What most methods are measured with: the smallest that there is."""
ROOMY = 48 * MIB
"""The same for inputs that are not read as they are stored, whose tiles take all that there is."""
LARGE = 256 * MIB
"""Where most of what is measured are loads, which are mapped."""
THREADS, LANES = 2, 4
COLUMNS = 4096
BIG, NUM_BIG = 2560, 4
"""Ops of a big tensor, and how many there are, so that all lanes have one. Three inputs of one are 15 times
the share of a lane, all inputs and the output 20 times the budget."""
SLACK = 24 * MIB
OBJECTS = 128 << 10
"""Bytes of Python's own objects, which are counted too: a copy has nothing but its buffers stated."""

ROWS_KINDS = ("rows", "adapter", "views")
"""Inputs that are not read as they are stored."""
WISE = {"nuslerp": {"nuslerp_flatten": False, "nuslerp_row_wise": True}, "model_stock": {"filter_wise": True}}
"""What makes methods of whole tensors methods of rows."""


def _kind(name: str) -> tuple[object, ...]:
    """What the executor asks of a method: two methods of one kind are carried out alike."""
    method = methods()[name]
    is_stored = isinstance(method.kernel, StoredKernel)
    return method.access, _passes(method) > 0, method.takes, method.sampler is not None, is_stored


def _passes(method: Method) -> int:
    has_base = method.base is BaseUse.REQUIRED
    return expression_passes(expression(method, sources=min(2, method.max_sources or 2), has_base=has_base))


def _need(name: str) -> tuple[int, float]:
    method = methods()[name]
    return method.state_bytes, method.scratch + 2 * method.scratch_per_source


QUICK = ("linear", "slerp", "ties", "model_stock", "passthrough", "copy")
WATCHED = tuple({_kind(name): name for name in sorted(methods(), key=_need)}.values())
"""Of each kind of methods the one that takes most."""
CASES = (*WATCHED, *(f"{name} by row" for name in WISE), "copy", "large loads", *ROWS_KINDS)


def _weights(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(max(1, rows // 16), COLUMNS, generator=generator).bfloat16().repeat(16, 1)[:rows]


def _model(root: Path, rows: int, seed: int, *, count: int = NUM_BIG) -> Path:
    tensors = {f"model.mlp{number}.weight": _weights(rows, seed + number) for number in range(count)}
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    return write_checkpoint(root, tensors, {"architectures": ["Odd"], "model_type": "odd"})


def _matrices(root: Path, count: int, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    shape = (8192, 16)
    tensors = {
        f"m{index}.weight": torch.randn(shape, generator=generator).bfloat16() for index in range(count)
    }
    return write_checkpoint(root, tensors, {"architectures": ["Odd"], "model_type": "odd"})


def _of_two(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {**recipe, "models": recipe["models"][:2]}


def _recipes(models: tuple[Path, Path, Path], matrices: tuple[Path, Path, Path]) -> dict[str, dict[str, Any]]:
    base, one, two = models
    found = recipes(Family(base, (one, two, two)))
    alone = [{"model": str(one)}]
    found["passthrough"] = {
        "merge_method": "passthrough",
        "models": [{**alone[0], "parameters": {"scale": 0.5}}],
    }
    found["large loads"] = found["ties"]
    found["copy"] = {"merge_method": "passthrough", "models": alone}
    for name, values in WISE.items():
        found[f"{name} by row"] = {**found[name], "parameters": values}
        found[name] = {**found[name], "parameters": {}}
    narrow = recipes(Family(matrices[0], (*matrices[1:], matrices[2])))
    found |= {name: narrow[name] for name in ("iso_c", "tsv_m")}
    return {name: _of_two(recipe) for name, recipe in found.items()}


def _watched(recipes_by_name: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: recipe for name, recipe in recipes_by_name.items() if name in CASES}


_MEASURED = """
import json, shutil, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import test_execute_contract as contract
import torch
from kits.gather_maker import bench_of
from raymerge.device_numerics import return_free_memory
from raymerge.api import plan, submit
from raymerge.merge_plan.memory import expression_passes
from raymerge.merge_plan.memory import SMALLEST_BUDGET, project
from raymerge.runtime.workers.sizing import fit_budget
from raymerge.options import RunOptions

job = json.load(sys.stdin)
root = Path(job["root"])

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

def measured(run):
    return_free_memory()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started = time.monotonic()
    receipts = run()
    return {
        "measured": status("VmHWM") - before,
        "receipt": max(each["peak_rss"] for each in receipts),
        "read": sum(each["read_bytes"] for each in receipts),
        "seconds": time.monotonic() - started,
    }

def merged(recipe, memory):
    options = RunOptions(inline=True, device="cpu", threads=contract.THREADS, memory=memory, replace=True)
    receipts = submit(recipe, root / "out", options).receipts
    shutil.rmtree(root / "out")
    return [each.to_json() for each in receipts]

def stored(made):
    return sum(made["inputs"].column("nbytes").to_pylist())

for name, recipe in job["big"].items():
    small, small_plan = merged(job["small"][name], None), plan(job["small"][name])
    made = plan(recipe)
    least = project(made, SMALLEST_BUDGET).least_budget
    wanted = contract.LARGE if name == "large loads" else contract.BUDGET
    budget = max(wanted, -(-least // contract.MIB) * contract.MIB)
    options = RunOptions(inline=True, device="cpu", threads=contract.THREADS, memory=budget)
    projected = fit_budget(made, options)
    found = measured(lambda: merged(recipe, budget))
    shape = (contract.BIG, contract.COLUMNS)
    found |= {
        "small_read": sum(each["read_bytes"] for each in small),
        "small_stored": stored(small_plan),
        "stored": stored(made),
        "inputs": len(made["inputs"]),
        "passes": max(expression_passes(each, shape) for each in made.expressions),
        "budget": budget,
    }
    print(json.dumps({"name": name, "projected": projected.peak, "lanes": projected.lanes, **found}))

torch.set_num_threads(1)
for name in contract.ROWS_KINDS:
    for rows in (64, contract.BIG):
        stock, made = contract.gathered_plan(name, root / f"{name}{rows}", rows)
        bench = bench_of(stock, made, root / "out", budget=contract.ROOMY, lanes=contract.LANES)
        def run():
            with ThreadPoolExecutor(bench.projection.lanes) as threads:
                return [each.to_json() for each in threads.map(bench.runner.run, bench.segments)]
        found = measured(run)
        shutil.rmtree(root / "out")
    found |= {"projected": bench.projection.peak, "lanes": bench.projection.lanes, "passes": 0}
    print(json.dumps({"name": name, **found}))
"""


def gathered_plan(kind: str, root: Path, rows: int) -> tuple[Stock, Plan]:
    """Checkpoints below ``root``, and a plan whose big tensors are made of them in one of ROWS_KINDS."""
    tensors = {f"w{number}": _weights(rows, number) for number in range(NUM_BIG)}
    tensors |= {"l.up": torch.randn(rows, 16), "l.down": torch.randn(16, COLUMNS)}
    stock = make_stock(root, tensors, {name: each for name, each in tensors.items() if name[0] == "w"})
    return stock, plan_of(stock, [_output(stock, kind, number, rows) for number in range(NUM_BIG)])


def _output(stock: Stock, kind: str, number: int, rows: int) -> Output:
    shape, name = (rows, COLUMNS), f"w{number}"
    made_of = expression("linear", sources=2, weight=0.5, cast=DType.BF16)
    if kind == "views":
        return Output(name, DType.BF16, shape, tuple(_fused(stock, name, made_of, rows)), True)
    if kind == "adapter":
        gather_inputs = [stock.term(name, source, product=stock.product("l", 16)) for source in (0, 1)]
        inputs = [whole(gather_input, COLUMNS) for gather_input in gather_inputs]
    else:
        # As by token: runs of a few rows, in another order in each source.
        runs = [_shuffled(rows, seed) for seed in (1, 2)]
        gather_inputs = [stock.term(name, source) for source in (0, 1)]
        inputs = [
            Gather(rows, COLUMNS, (gather_input,), run, rows)
            for gather_input, run in zip(gather_inputs, runs, strict=True)
        ]
    reads = tuple(gathered(0, each) for each in inputs)
    part = Part(name, shape, None)
    return Output(name, DType.BF16, shape, (Op(rows * COLUMNS, made_of, (part,), reads),), True)


def _shuffled(rows: int, seed: int) -> tuple[tuple[int, int, int, int], ...]:
    order = torch.randperm(rows // 8, generator=torch.Generator().manual_seed(seed)).tolist()
    return tuple((8 * to, 8 * start, 8, 0) for to, start in enumerate(order))


def _fused(stock: Stock, name: str, made_of: Expression, rows: int) -> Iterator[Op]:
    """Experts of which two projections take turns column by column, as in fused tensors of some families."""
    experts = 60 if rows > 64 else 1
    height, size = rows // experts, rows // experts * COLUMNS
    views = [View(offset, (height, COLUMNS // 2), (COLUMNS, 2)) for offset in (0, 1)]
    parts = tuple(Part(f"p{each.offset}", each.shape, each) for each in views)
    for expert in range(experts):
        reads = tuple(
            read._replace(part=part, offset=read.offset + 2 * expert * size, nbytes=2 * size)
            for part, view in enumerate(views)
            for read in (stock.read(name, source, view=view) for source in (0, 1))
        )
        yield Op(size, made_of, parts, reads)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one process measured of itself in every case."""
    if sys.platform != "linux":
        pytest.skip("the peak is asked of Linux")
    root = tmp_path_factory.mktemp("contract")
    job: dict[str, Any] = {"root": str(root)}
    for name, rows, count in (("small", 64, 1), ("big", BIG, 100)):
        models = [_model(root / f"{name}{seed}", rows, seed) for seed in (1, 2, 3)]
        matrices = [_matrices(root / f"{name}-matrices{seed}", count, seed) for seed in (1, 2, 3)]
        job[name] = _watched(
            _recipes((models[0], models[1], models[2]), (matrices[0], matrices[1], matrices[2]))
        )
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED],
        input=json.dumps(job),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(root)
    cases = {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}
    _print_table(cases)
    return cases


def _print_table(cases: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{'':22}lanes  stated  measured  receipt  MiB; seconds")
    for name, each in cases.items():
        stated, measured, receipt = (each[key] / MIB for key in ("projected", "measured", "receipt"))
        print(f"{name:22}{each['lanes']:5}{stated:8.0f}{measured:10.0f}{receipt:9.0f}{each['seconds']:14.1f}")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_process_grows_by_no_more_than_was_stated(name: str, found: dict[str, dict[str, Any]]) -> None:
    each = found[name]
    assert each["projected"] > 0
    assert each["measured"] <= 1.3 * each["projected"] + SLACK, each
    assert each["receipt"] <= 1.3 * each["projected"] + SLACK, each
    assert each["receipt"] <= each["measured"] + SLACK, each
    # Those of rows watch themselves from before they are measured.
    assert name in ROWS_KINDS or each["receipt"] >= each["measured"] - SLACK, each


SAMPLE_BYTES = 2 * SAMPLE_RUNS * SAMPLE_LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in ROWS_KINDS])
def test_no_more_is_read_than_every_pass_needs(name: str, found: dict[str, dict[str, Any]]) -> None:
    """What no lane holds is read once for each pass, and its sample beforehand; what fits is read once."""
    each = found[name]
    assert each["small_read"] == each["small_stored"]
    samples = each["inputs"] * SAMPLE_BYTES
    assert each["stored"] <= each["read"] <= (1 + each["passes"]) * each["stored"] + samples


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A recipe for each method, of a matrix that the smallest lane does not hold, or narrow ones for
    decompositions."""
    root = tmp_path_factory.mktemp("streamed")
    models = [_model(root / f"{seed}", 1024, seed, count=1) for seed in (1, 2, 3)]
    matrices = [_matrices(root / f"matrices{seed}", 2, seed) for seed in (1, 2, 3)]
    found = _recipes((models[0], models[1], models[2]), (matrices[0], matrices[1], matrices[2]))
    # Loops are compiled when a segment is first made; that is no part of what is measured.
    _made(make_bench(found["copy"], root / "any"))
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", slow_but([*methods(), *(f"{name} by row" for name in WISE), "copy"], *QUICK))
def test_every_method_has_no_more_in_use_than_was_stated(
    name: str, streamed: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Buffers, pieces, tables and temporaries of one lane, to the byte: tile by tile, and all at once."""
    least = project(plan(streamed[name]).require(), SMALLEST_BUDGET).least_budget
    for number, budget in enumerate((least, least + 24 * MIB)):
        bench = make_bench(streamed[name], tmp_path / f"{number}", budget=budget)
        with counted_buffers() as buffers, AllocationMeter() as meter:
            _made(bench)
        assert 0 < bench.projection.peak <= budget
        assert meter.peak_bytes > 0
        assert meter.peak_bytes + buffers.most <= bench.projection.peak + (OBJECTS if name == "copy" else 0)


def _made(bench: Bench) -> Bench:
    for segment in bench.segments:
        bench.runner.run(segment)
    return bench


EXPERTS = (256, 4096, 10_240)
"""Fused gate and up projections of 256 experts: 21.5 GB in bfloat16."""


def _sparse(self: LocalStore, key: str, nbytes: int) -> None:
    """Makes a file as ``LocalStore.create`` does, without any space for it."""
    with open(Path(self.location(key)), "wb") as stream:
        stream.truncate(nbytes)


@pytest.mark.slow
def test_a_part_of_a_tensor_of_21_gb_is_made_within_a_few_mib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "create", _sparse)
    spec = TensorSpec("model.experts.gate_up_proj", DType.BF16, EXPERTS)
    config = {"architectures": ["Odd"], "model_type": "odd"}
    models = [sparse_checkpoint(tmp_path / name, [[spec]], config) for name in ("one", "two")]
    bench = make_bench(linear(*models), tmp_path / "staging", budget=BUDGET)
    assert sum(bench.plan["shards"].column("nbytes").to_pylist()) > 21 * 10**9
    assert bench.projection.least_budget == SMALLEST_BUDGET
    assert bench.projection.peak <= BUDGET
    segment = bench.segments[len(bench.segments) // 2]
    with counted_buffers() as buffers, AllocationMeter() as meter:
        receipt = bench.runner.run(segment)
    assert receipt.written_bytes > BUDGET
    assert receipt.read_bytes == 2 * receipt.written_bytes
    assert 0 < meter.peak_bytes + buffers.most <= bench.projection.peak


ROWS, CODED_COLUMNS = 2048, 4096
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TABLE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NAME = "model.layers.0.mlp.up_proj.weight"


def _coded_model(
    root: Path,
    seed: int,
    shape: tuple[int, int] = (ROWS, CODED_COLUMNS),
    *,
    is_packed: bool = True,
    nan_at: tuple[int, int] | None = None,
) -> Path:
    """A checkpoint with one matrix of this shape, as codes of block FP8 or in bfloat16."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    norm = {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}
    if not is_packed:
        return write_checkpoint(root, {**norm, NAME: values.bfloat16()}, CONFIG)
    quant_spec = usual_quant_spec(FP8_BLOCK, shape)
    codes, scales, *_ = codec_of(FP8_BLOCK).encode(quant_spec, values)
    if nan_at is not None:
        codes.view(shape)[nan_at] = 0x7F
    coded = {NAME: codes.view(torch.float8_e4m3fn).view(shape)}
    coded[f"{NAME}_scale_inv"] = scales.view(torch.float32).view(quant_spec.grid)
    return write_checkpoint(root, {**norm, **coded}, {**CONFIG, "quantization_config": TABLE})


@pytest.fixture(scope="module")
def coded_recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Merges of a matrix that the smallest lane does not hold, from codes, into codes, or both."""
    root = tmp_path_factory.mktemp("codes")
    one, two = (_coded_model(root / f"fp8-{seed}", seed) for seed in (1, 2))
    plain, other = (_coded_model(root / f"bf16-{seed}", seed, is_packed=False) for seed in (3, 4))

    base, t = str(one), {"t": 0.4}
    found = {
        "codes": linear(one, two),
        "codes with numbers": linear(one, plain),
        "ties of codes": {**linear(two, plain), "merge_method": "ties", "base_model": base},
        "slerp of codes": {**linear(two), "merge_method": "slerp", "base_model": base, "parameters": t},
        "to numbers": linear(one, two, out_format="bf16"),
        "to codes": linear(plain, other, out_format="fp8_block"),
    }
    return found


CODED = ("codes", "codes with numbers", "ties of codes", "slerp of codes", "to numbers", "to codes")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", slow_but(CODED, "codes", "ties of codes", "to codes"))
def test_codes_have_no_more_in_use_than_was_stated(
    name: str, coded_recipes: Mapping[str, Mapping[str, Any]], tmp_path: Path
) -> None:
    """Buffers, pieces, codes and temporaries of one lane: in the smallest tiles, and in larger ones."""
    # Loops are compiled when a segment is first made; that is no part of what is measured.
    _made(make_bench(coded_recipes[name], tmp_path / "any", budget=64 * MIB))
    least = project(plan(coded_recipes[name]).require(), SMALLEST_BUDGET).least_budget
    for number, budget in enumerate((least, least + 24 * MIB)):
        bench = make_bench(coded_recipes[name], tmp_path / f"{number}", budget=budget)
        with counted_buffers(with_pieces=True) as buffers, AllocationMeter() as meter:
            _made(bench)
        assert 0 < bench.projection.peak <= budget
        assert meter.peak_bytes + buffers.most <= bench.projection.peak + OBJECTS


BANDED = BAND_ROWS, BAND_COLUMNS = 300, 384


def _tile(quant_spec: QuantSpec, codes_nbytes: int, *, piece: int) -> TileJob:
    """A tile that is a whole matrix, read from the beginning of a file."""
    dtype = DType.F8_E4M3 if quant_spec.format.is_fp8 else DType.F4
    scales = Scales(
        quant_spec.encoding, quant_spec.columns, "f", 1 << 20, quant_spec.scales_nbytes(quant_spec.rows)
    )
    read = Read(0, 0, "f", 0, codes_nbytes, dtype, None, scales=scales)
    part = JobPart("t", quant_spec.shape, None, (read,))
    count = quant_spec.rows * quant_spec.columns
    op = OpJob(0, "t", True, conversion_expression(DType.F32), 0, count, True, (part,), (("f", 0),))
    return TileJob(op, 0, count, piece)


@pytest.mark.parametrize("form", [FP8_BLOCK, FP8_CHANNEL, INT4, MXFP4_ROWS])
@pytest.mark.parametrize("scale_rows", [1, 2, 100])
def test_pieces_are_decoded_as_the_whole(form: Format, scale_rows: int) -> None:
    quant_spec = usual_quant_spec(form, (BAND_ROWS, BAND_COLUMNS))
    values = torch.randn(BAND_ROWS, BAND_COLUMNS, generator=torch.Generator().manual_seed(1))
    codes, scales, *_ = codec_of(form).encode(quant_spec, values)
    tile = _tile(quant_spec, codes.numel(), piece=scale_rows * quant_spec.scale_row_height * BAND_COLUMNS)
    source = tile.op.parts[0].inputs[0]
    assert isinstance(source, Read)
    assert source.scales is not None
    nothing = torch.empty(0, dtype=torch.uint8)
    whole = RawCodes(source, source.scales, codes, scales, nothing, nothing)
    found, starts = [], []
    for piece, (raw,) in pieces(tile, (whole,)):
        assert isinstance(raw, RawCodes)
        assert not piece.piece
        starts.append((piece.start, piece.count))
        found.append(numbers(raw))
    assert torch.equal(torch.cat(found), numbers(whole))
    assert [start for start, _ in starts] == list(range(0, BAND_ROWS * BAND_COLUMNS, tile.piece))
    assert sum(count for _, count in starts) == tile.count


def _banded(recipe: Mapping[str, Any], place: Path, budget: int) -> dict[str, bytes]:
    return dict(_made(make_bench(recipe, place, budget=budget)).written())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bands")
    seeds = {"one": 1, "two": 2, "plain": 3}
    return {n: _coded_model(root / n, seed, BANDED, is_packed=n != "plain") for n, seed in seeds.items()}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each tile of codes was made in one call."""
    found: list[bool] = []
    original = encoding.coded_sum

    def noting(tile: TileJob, *others: Any) -> encoding.CodedSum | None:
        made = original(tile, *others)
        if tile.op.has_codes:
            found.append(made is not None)
        return made

    monkeypatch.setattr(lane, "coded_sum", noting)
    return found


def test_bytes_are_the_same_in_one_call_and_in_pieces(
    models: Mapping[str, Path], tmp_path: Path, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = linear(models["one"], models["two"])
    found = [_banded(recipe, tmp_path / f"{budget}", budget << 20) for budget in (16, 256)]
    assert calls
    assert all(calls)
    monkeypatch.setattr(lane, "coded_sum", lambda *_: None)
    found += [_banded(recipe, tmp_path / f"pieces-{budget}", budget << 20) for budget in (16, 256)]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(
    ("method", "others", "more"),
    [
        ("linear", ("plain",), {}),
        ("linear", ("two",), {"out_format": "bf16"}),
        ("linear", ("two",), {"parameters": {"weight": 0.5, "normalize": False}}),
        ("multislerp", ("two",), {}),
    ],
)
def test_what_is_no_mean_of_codes_is_made_in_pieces(
    method: str,
    others: tuple[str, ...],
    more: Any,
    models: Mapping[str, Path],
    tmp_path: Path,
    calls: list[bool],
) -> None:
    recipe = linear(models["one"], *(models[name] for name in others))
    recipe = {**recipe, "merge_method": method, **more}
    _banded(recipe, tmp_path, 16 << 20)
    assert calls
    assert not any(calls)


def test_nan_in_codes_is_named(models: Mapping[str, Path], tmp_path: Path) -> None:
    broken = _coded_model(tmp_path / "broken", 3, BANDED, nan_at=(299, 5))
    with pytest.raises(NonFiniteError, match=rf"{NAME}.*NaN"):
        _banded(linear(models["one"], broken), tmp_path / "out", 16 << 20)
