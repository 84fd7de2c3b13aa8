"""Each way to get the order of a GPU's work wrong gives wrong bytes, or an error, on the simulated GPU."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from kits.marks import one_in
from kits.merge_cases import make_family, recipes
from kits.quantised_merges import entries
from kits.segment_bench import Bench, make_bench
from kits.simulated_gpu import simulated_gpu, without_gpu
from kits.tensor_scaled_models import fp8_llama

from raymerge.merge_plan import memory
from raymerge.methods import BLOCK

pytestmark = without_gpu

SEEDS = range(12)
"""Each mutant shows with three of them at least, so that other orders of the same work show it too."""
Tensors = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Mutant:
    what: str
    file: str
    """Below ``raymerge``."""
    old: str
    """Text that stands there once."""
    new: str
    case: str = "linear"


MUTANTS = (
    Mutant(
        "computing does not wait for uploads", "execute/transfers.py", "if arrival is not None:", "if False:"
    ),
    Mutant(
        "uploads wait for computing, and not the other way round",
        "execute/transfers.py",
        "self._compute.wait_event(",
        "self._up.wait_event(",
    ),
    Mutant(
        "the event of uploads is of another stream",
        "execute/transfers.py",
        "arrival = devices.record_event(self._up)",
        "arrival = devices.record_event(self._compute)",
    ),
    Mutant(
        "inputs are free while they are computed with",
        "execute/transfers.py",
        "part.record_stream(self._compute)",
        "part.record_stream(self._up)",
    ),
    Mutant(
        "codes are free while they are decoded",
        "execute/transfers.py",
        "parts = each.tensors if isinstance(each, RawCodes) else (each,)",
        "parts = (each,)",
        "decoded",
    ),
    Mutant(
        "what is computed is on no stream of its own",
        "execute/transfers.py",
        "return devices.on_stream(self._compute)",
        "return nullcontext()",
    ),
    Mutant(
        "results are computed where they are copied",
        "execute/transfers.py",
        "return devices.on_stream(self._compute)",
        "return devices.on_stream(self._down)",
    ),
    Mutant(
        "downloads do not wait for computing",
        "execute/transfers.py",
        "self._down.wait_stream(self._compute)",
        "pass",
    ),
    Mutant(
        "computing waits for downloads, and not the other way round",
        "execute/transfers.py",
        "self._down.wait_stream(self._compute)",
        "self._compute.wait_stream(self._down)",
    ),
    Mutant(
        "results are free before they are copied",
        "execute/transfers.py",
        "data.record_stream(self._down)",
        "data.record_stream(self._compute)",
    ),
    Mutant(
        "the event of downloads is of another stream",
        "execute/transfers.py",
        "return devices.record_event(self._down)",
        "return devices.record_event(self._compute)",
    ),
    Mutant(
        "the event of downloads is recorded before them",
        "execute/transfers.py",
        "self._down.wait_stream(self._compute)",
        "self._down.wait_stream(self._compute)\n        return devices.record_event(self._down)",
    ),
    Mutant(
        "downloads have no event",
        "execute/transfers.py",
        "return devices.record_event(self._down)",
        "return None",
    ),
    Mutant(
        "downloads are on the stream that computes",
        "execute/transfers.py",
        "with devices.on_stream(self._down):",
        "with devices.on_stream(self._compute):",
    ),
    Mutant(
        "results are where the next ones are made",
        "execute/transfers.py",
        "data = data.clone()",
        "pass",
        "passthrough",
    ),
    Mutant(
        "results are read by the host",
        "execute/transfers.py",
        "target.copy_(data, non_blocking=True)",
        "target.numpy()[:] = data.numpy()",
    ),
    Mutant(
        "inputs that begin at one byte are one",
        "execute/transfers.py",
        "place = data.data_ptr(), data.numel()",
        "place = 0, data.numel()",
    ),
    Mutant(
        "a load's buffer is used again at once",
        "execute/lane.py",
        "self._leaving.synchronize()",
        "pass",
        "loads",
    ),
    Mutant(
        "a load's buffer forgets what leaves it",
        "execute/lane.py",
        "self._leaving = arrival",
        "pass",
        "loads",
    ),
    Mutant(
        "a lane does not tell its buffer what leaves it",
        "execute/lane.py",
        "self._buffer.leave(arrival)",
        "self._buffer.leave(None)",
        "loads",
    ),
    Mutant(
        "a lane computes with what has not arrived",
        "execute/lane.py",
        "self._transfers.arrive(raws, arrival)",
        "self._transfers.arrive(raws, None)",
    ),
    Mutant("a lane has no stream", "execute/lane.py", "with self._transfers.computing():", "if True:"),
    Mutant(
        "blocks are written before they are there", "execute/output.py", "block.arrival.synchronize()", "pass"
    ),
    Mutant(
        "blocks are checked before they are there",
        "execute/output.py",
        "if block.arrival is None:",
        "if block.arrival is not None:",
    ),
    Mutant(
        "a block's first bytes are its last",
        "execute/output.py",
        "block.arrival = fill(done, self._memory[place : place + count]) or block.arrival",
        "block.arrival = block.arrival or fill(done, self._memory[place : place + count])",
    ),
    Mutant("the events of streams are of no stream", "devices.py", "event.record(stream)", "pass"),
    Mutant(
        "a GPU divides by numbers",
        "device_numerics.py",
        "return torch.full((), number, dtype=like.dtype, device=like.device)",
        "return number",
        "codes",
    ),
)


@pytest.fixture(scope="module", autouse=True)
def several_pieces() -> Iterator[None]:
    """Small tensors of one input are computed in several pieces, each in the memory of the one before."""

    def cut(need: memory.Need) -> memory.Need:
        is_cut = need.unit == BLOCK and need.stored_per_element == 2
        return replace(need, piece=4096) if is_cut else need

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.Need, "on_gpu", property(cut))
        yield


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Bench]:
    """Makes a case's segments ready for a device."""
    root = tmp_path_factory.mktemp("mutants")
    small, large = (make_family(root / str(size), hidden=size, layers=1) for size in (64, 128))
    plain = {"merge_method": "passthrough", "models": [{"model": str(small.base)}], "dtype": "float32"}
    matrices = {f"model.layers.0.mlp.{name}_proj.weight": (128, 64) for name in ("gate", "up")}
    # Not every division is rounded otherwise than a multiplication, and the two above have one scale.
    matrices |= {f"model.layers.0.mlp.{name}_proj.weight": (8, 64) for name in ("down", "in", "out", "to")}
    shapes = {**matrices, "model.norm.weight": (64,)}
    coded = [fp8_llama(root / name, seed, shapes=shapes) for seed, name in enumerate("ab")]
    decoded = {"models": entries(coded[:1], (1.0,)), "out_format": "bf16"}
    cases = {
        "linear": recipes(small)["linear"],
        "passthrough": plain,
        "codes": {"merge_method": "linear", "models": entries(coded, (0.3, 0.7))},
        "decoded": {"merge_method": "passthrough", **decoded},
        "loads": recipes(large)["task_arithmetic"],
    }

    def bench(case: str, device: str) -> Bench:
        # Little memory for each lane, so that segments have several loads.
        lanes = 6 if case == "loads" else 1
        return make_bench(cases[case], root / f"{case} {device}", device=device, lanes=lanes)

    return bench


@pytest.fixture(scope="module")
def expected(benches: Callable[[str, str], Bench]) -> Callable[[str], Tensors]:
    made: dict[str, Tensors] = {}

    def tensors(case: str) -> Tensors:
        if case not in made:
            made[case] = _run(benches(case, "cpu"))
        return made[case]

    return tensors


def _run(bench: Bench) -> Tensors:
    """Its tensors, and the digests that the receipts tell of their parts."""
    digests: dict[str, bytes] = {}
    for segment in bench.segments:
        receipt = bench.runner.run(segment)
        assert not receipt.note
        digests |= {f"digest of {op}": digest.encode() for op, digest in receipt.digests.items()}
    return dict(bench.written()) | digests


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", sorted({each.case for each in MUTANTS}))
@pytest.mark.parametrize("seed", one_in(4, SEEDS))
def test_every_seed_gives_the_bytes_of_the_processor(
    seed: int, case: str, benches: Any, expected: Any
) -> None:
    with simulated_gpu(seed):
        assert _run(benches(case, "cuda")) == expected(case)


@pytest.mark.sample(10)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.what)
def test_mutants_show(mutant: Mutant, benches: Any, expected: Any) -> None:
    right = expected(mutant.case)
    with mutated(mutant):
        assert any(_is_seen(mutant, seed, benches, right) for seed in SEEDS), "no seed shows it"


def _is_seen(mutant: Mutant, seed: int, benches: Callable[[str, str], Bench], right: Tensors) -> bool:
    with simulated_gpu(seed):
        try:
            return _run(benches(mutant.case, "cuda")) != right
        except Exception:
            return True


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Give the functions of a module the code that they would have with another text."""
    name = "raymerge." + mutant.file.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name)
    text = inspect.getsource(module)
    assert text.count(mutant.old) == 1, mutant.what
    whole = compile(text.replace(mutant.old, mutant.new), str(module.__file__), "exec", dont_inherit=True)
    codes = {each.co_qualname: each for each in _codes(whole)}
    with pytest.MonkeyPatch.context() as patch:
        for function in _functions(module):
            patch.setattr(function, "__code__", codes[function.__code__.co_qualname])
        yield


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Its functions and methods, but for those that a decorator stands before."""
    for value in vars(module).values():
        own = vars(value).values() if inspect.isclass(value) else (value,)
        for each in own:
            if isinstance(each, FunctionType) and each.__code__.co_filename == module.__file__:
                yield each
