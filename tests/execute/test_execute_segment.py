"""A segment: the right bytes in the right place, within its memory, and nothing left behind by a failure."""

from __future__ import annotations

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from kits.checkpoint_maker import read_tensors, write_checkpoint, write_json
from kits.memory_meter import AllocationMeter
from kits.merge_cases import LEAST_MEMORY, Family, make_family, recipes
from kits.segment_bench import Bench, counted_buffers, make_bench

from raymerge.api import plan
from raymerge.checkpoints.header import TensorSpec, lay_out
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, NonFiniteError, RoomError
from raymerge.execute import lane as lane_module
from raymerge.execute.ops import Jobs
from raymerge.execute.output import UNFINISHED
from raymerge.storage.local.store import LocalStore

CONFIG = {"architectures": ["OddForCausalLM"], "model_type": "odd"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("large"), hidden=640, layers=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("small"))


def _run_all(bench: Bench) -> list[Any]:
    return [bench.runner.run(number) for number in bench.segments]


# Memory


def test_inputs_that_fit_are_read_once_for_all_passes(large: Family, tmp_path: Path) -> None:
    recipe = recipes(large)["ties"]
    once = sum(r.read_bytes for r in _run_all(make_bench(recipe, tmp_path / "a", budget=1 << 30)))
    again = sum(r.read_bytes for r in _run_all(make_bench(recipe, tmp_path / "b", budget=LEAST_MEMORY)))
    stored = sum(file.stat().st_size for file in large.base.glob("*.safetensors"))
    assert once <= 4 * stored
    assert again > 2 * once


def _shifted(root: Path, shift: int, seed: int) -> Path:
    """A checkpoint of one matrix whose elements begin so many bytes behind a multiple of eight."""
    values = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(seed)).bfloat16()
    entry = {"dtype": "BF16", "shape": [2048, 2048], "data_offsets": [0, 8 << 20]}
    header = json.dumps({"a.weight": entry}).encode()
    header += b" " * (-len(header) % 8 + shift)
    root.mkdir(parents=True)
    data = values.view(torch.uint8).numpy().tobytes()
    (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    write_json(root / "config.json", CONFIG)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("method", ["linear", "ties", "arcee_fusion"])
def test_elements_at_odd_bytes_take_no_more_memory_and_give_the_same_bytes(
    method: str, tmp_path: Path
) -> None:
    """Old files have headers of any length. All of the tensor is one load, which no copy of fits beside."""
    found = []
    for shift in (0, 1):
        base, *tunes = (_shifted(tmp_path / f"{shift}-{seed}", shift, seed) for seed in range(4))
        tunes = tunes[:1] if method == "arcee_fusion" else tunes
        recipe = recipes(Family(base, (tunes[0], tunes[-1], tunes[-1])))[method]
        need = Jobs(plan(recipe).require()).rows(0)[0].need
        lane = (need.load_bytes(1 << 22) + need.work_bytes(need.piece)) * 7 // 5
        bench = make_bench(recipe, tmp_path / f"{shift}", budget=lane)
        with counted_buffers() as buffers, AllocationMeter() as meter:
            _run_all(bench)
        assert 0 < meter.peak_bytes + buffers.most <= bench.projection.peak
        found.append(dict(bench.written()))
    assert found[0] == found[1]


# Bytes


def _pattern(spec: TensorSpec, seed: int) -> bytes:
    """Bytes that look like NaN in most formats; floats that raymerge checks get finite ones."""
    if spec.dtype.is_mergeable:
        return bytes((seed + i) % 0x38 for i in range(spec.nbytes))
    return bytes(0xFF - (seed + i) % 7 for i in range(spec.nbytes))


def _odd_checkpoint(root: Path) -> dict[str, bytes]:
    """One tensor of every dtype, codes with their scale, a 0-d one and an empty one; returns their bytes."""
    specs = [TensorSpec(f"odd.{dtype.value.lower()}.weight", dtype, (4, 6)) for dtype in DType]
    specs.append(TensorSpec("odd.f8_e4m3.weight_scale_inv", DType.F32, (1, 1)))
    specs += [TensorSpec("odd.scalar", DType.F32, ()), TensorSpec("odd.empty", DType.BF16, (0, 6))]
    layout = lay_out(specs)
    data = {spec.name: _pattern(spec, seed) for seed, spec in enumerate(specs)}
    root.mkdir()
    body = b"".join(data[tensor.name] for tensor in layout.tensors)
    (root / "model.safetensors").write_bytes(layout.header + body)
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_json(root / "config.json", {**CONFIG, "quantization_config": said})
    return data


def test_verbatim_bytes_of_every_dtype_never_meet_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a copied tensor was computed with")

    for name in ("PartComputation", "scatter"):
        monkeypatch.setattr(lane_module, name, forbidden)
    data = _odd_checkpoint(tmp_path / "odd")
    recipe = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "odd")}]}
    bench = make_bench(recipe, tmp_path / "staging")
    _run_all(bench)
    assert dict(bench.written()) == data


def _pair(
    tmp_path: Path, tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The mean of two checkpoints."""
    for name, each in (("one", tensors), ("two", others)):
        write_checkpoint(tmp_path / name, each, CONFIG)
    models = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in ("one", "two")]
    return {"merge_method": "linear", "models": models}


def test_empty_scalar_and_float64_tensors_merge(tmp_path: Path) -> None:
    one = {
        "a.weight": torch.tensor([1.0, 2.0, 1 / 3], dtype=torch.float64),
        "b.weight": torch.tensor(4.0),
        "c.weight": torch.empty(0, 3),
    }
    recipe = _pair(tmp_path, one, {name: 3 * tensor for name, tensor in one.items()})
    bench = make_bench(recipe, tmp_path / "staging")
    _run_all(bench)
    written = dict(bench.written())
    wide = torch.frombuffer(bytearray(written["a.weight"]), dtype=torch.float64)
    expected = one["a.weight"].float() * 0.5 + (3 * one["a.weight"]).float() * 0.5
    torch.testing.assert_close(wide, expected.double(), rtol=2e-7, atol=0)
    assert torch.frombuffer(bytearray(written["b.weight"]), dtype=torch.float32).tolist() == [8.0]
    assert written["c.weight"] == b""


def test_a_receipt_counts_bytes_and_digests_rows(small: Family, tmp_path: Path) -> None:
    bench = make_bench(recipes(small)["task_arithmetic"], tmp_path)
    receipts = _run_all(bench)
    rows = bench.plan["rows"].to_pylist()
    shards = bench.plan["shards"].column("name").to_pylist()
    digests = {key: digest for receipt in receipts for key, digest in receipt.digests.items()}
    assert set(digests) == {str(i) for i, row in enumerate(rows) if row["copy_of"] < 0}
    for number, digest in digests.items():
        row = rows[int(number)]
        data = bench.staging.read(shards[row["shard"]] + UNFINISHED, row["offset"], row["nbytes"])
        assert digest == xxhash.xxh3_128(data).hexdigest()
    costs = bench.plan["segments"].column("cost").to_pylist()
    assert [receipt.read_bytes + receipt.written_bytes for receipt in receipts] == costs


def test_a_row_that_repeats_another_is_computed_once_and_written_twice(small: Family, tmp_path: Path) -> None:
    span = {"model": str(small.base), "layer_range": [0, 1], "parameters": {"scale": 0.5}}
    recipe = {"merge_method": "passthrough", "slices": [{"sources": [span]}, {"sources": [span]}]}
    bench = make_bench(recipe, tmp_path)
    receipts = _run_all(bench)
    written = dict(bench.written())
    name = "self_attn.q_proj.weight"
    assert written[f"model.layers.0.{name}"] == written[f"model.layers.1.{name}"]
    expected = read_tensors(small.base)[f"model.layers.0.{name}"].float() * 0.5
    assert written[f"model.layers.0.{name}"] == bytes(
        expected.bfloat16().view(torch.uint8).flatten().tolist()
    )
    assert sum(r.read_bytes for r in receipts) < sum(r.written_bytes for r in receipts)


# Values that are no numbers


def _bad(tmp_path: Path, bad: float, dtype: torch.dtype = torch.float32) -> tuple[Bench, int]:
    """The mean of two checkpoints of which the second holds ``bad``, and the byte it lies at."""
    one = {"a.weight": torch.ones(70_000, dtype=dtype), "b.weight": torch.ones(8, dtype=dtype)}
    two = {name: tensor.clone() for name, tensor in one.items()}
    two["a.weight"][66_000] = bad
    recipe = _pair(tmp_path, one, two)
    start = lay_out_start(tmp_path / "two" / "model.safetensors")
    return make_bench(recipe, tmp_path / "staging"), start + 66_000 * one["a.weight"].element_size()


def lay_out_start(path: Path) -> int:
    """First byte of a safetensors file's data."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_source_with_a_bad_value_is_named_with_tensor_and_byte(bad: float, tmp_path: Path) -> None:
    bench, place = _bad(tmp_path, bad)
    with pytest.raises(NonFiniteError) as caught:
        _run_all(bench)
    (problem,) = caught.value.problems
    assert problem.where == f"{tmp_path / 'two'}: a.weight"
    assert f"byte {place} of model.safetensors" in problem.what


def test_a_sum_that_overflows_float16_is_named(tmp_path: Path) -> None:
    huge = {"a.weight": torch.full((4,), 60_000.0, dtype=torch.float16)}
    recipe = {**_pair(tmp_path, huge, huge), "parameters": {"normalize": False}}
    for model in recipe["models"]:
        model["parameters"]["weight"] = 1.0
    with pytest.raises(
        NonFiniteError, match=r"a\.weight: the sources are finite.* F16.* Use a wider out_dtype"
    ):
        _run_all(make_bench(recipe, tmp_path / "staging"))


def test_a_weight_of_zero_does_not_hide_a_bad_value(tmp_path: Path) -> None:
    recipe = _pair(tmp_path, {"a.weight": torch.ones(4)}, {"a.weight": torch.full((4,), float("inf"))})
    recipe["models"][1]["parameters"]["weight"] = 0.0
    with pytest.raises(NonFiniteError, match=r"two: a\.weight"):
        _run_all(make_bench(recipe, tmp_path / "staging"))


# Failures


def test_a_source_that_shrank_is_named(small: Family, tmp_path: Path) -> None:
    recipe = _pair(tmp_path, read_tensors(small.base), read_tensors(small.tunes[0]))
    bench = make_bench(recipe, tmp_path / "staging")
    file = tmp_path / "two" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(CheckpointError, match=r"two/model\.safetensors: ends at byte"):
        _run_all(bench)


def test_a_full_disk_is_an_error_with_a_remedy(
    small: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(recipes(small)["linear"], tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RoomError, match="Free space there"):
        _run_all(bench)


class _Recording:
    """A store that notes what is asked of it, and fails where it is told to."""

    def __init__(self, store: LocalStore, calls: list[str], *, fails: bool) -> None:
        self._store, self._calls, self._fails = store, calls, fails

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        self._calls.append("write")
        if self._fails:
            raise OSError(errno.EIO, "broken")
        self._store.write_extent(key, offset, buffer)

    def sync(self, key: str) -> None:
        self._calls.append(f"sync {key}")
        self._store.sync(key)


@pytest.mark.parametrize("fails", [False, True])
def test_only_a_complete_segment_is_synced_and_receipted(fails: bool, small: Family, tmp_path: Path) -> None:
    calls: list[str] = []
    bench = make_bench(
        recipes(small)["linear"], tmp_path, wrap=lambda store: _Recording(store, calls, fails=fails)
    )
    if not fails:
        bench.runner.run(0)
        assert calls[-1] == f"sync model.safetensors{UNFINISHED}"
        assert sum(call.startswith("sync") for call in calls) == 1
        return
    with pytest.raises(OSError, match="broken"):
        bench.runner.run(0)
    assert calls == ["write"]


class _SlowToSync:
    """A store whose first sync waits until another segment was written."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._syncing, self._written = threading.Event(), threading.Event()

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        self._store.write_extent(key, offset, buffer)
        if self._syncing.is_set():
            self._written.set()

    def sync(self, key: str) -> None:
        if not self._syncing.is_set():
            self._syncing.set()
            assert self._written.wait(30)
        self._store.sync(key)


def test_while_bytes_become_durable_another_segment_has_the_lane(large: Family, tmp_path: Path) -> None:
    """There is one lane, whose memory is used again."""
    recipe = recipes(large)["linear"]
    bench = make_bench(recipe, tmp_path / "a", budget=LEAST_MEMORY, wrap=_SlowToSync)
    assert bench.projection.lanes == 1
    with counted_buffers() as buffers, ThreadPoolExecutor(2) as threads:
        list(threads.map(bench.runner.run, bench.segments))
    assert 0 < buffers.most <= bench.projection.peak
    alone = make_bench(recipe, tmp_path / "b", budget=LEAST_MEMORY)
    _run_all(alone)
    assert dict(alone.written()) == dict(bench.written())


def test_a_bad_value_in_a_verbatim_copy_is_found_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", {"a.weight": torch.tensor([1.0, float("nan")])}, CONFIG)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "one")}]}
    with pytest.raises(NonFiniteError, match=r"one: a\.weight: the source holds NaN"):
        _run_all(make_bench(recipe, tmp_path / "staging"))
