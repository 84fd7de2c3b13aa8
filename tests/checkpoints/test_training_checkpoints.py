"""Training checkpoints in chunks as sources: what is read equals what torch loads, and damage is refused."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Barrier
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.merge_cases import INLINE, merge
from kits.merges import check_close, mean_of, merge_here
from kits.s3_server import s3_server
from kits.training_checkpoint import (
    Box,
    by_ranks,
    grid,
    load_whole,
    metadata_of,
    save_chunks,
    save_shards,
    state_of,
    write_metadata,
)
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from raymerge.api import AuditOptions, audit, plan, submit, submit_sweep, verify, write_chunks
from raymerge.checkpoints.dcp.store import ChunkedStore
from raymerge.checkpoints.source import open_checkpoint
from raymerge.errors import CheckpointError, HeldError, IncompleteError, OptionError, PlanError, TargetError
from raymerge.events import Event, Started
from raymerge.merge_plan.elements import torch_dtype
from raymerge.publish.lease import LeaseFile, leased
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import open_store

BOXES: dict[str, list[Box]] = {
    "rows": grid((9, 5), (2, 5)),
    "columns": grid((6, 10), (), (3, 7)),
    "grid": grid((7, 8), (3,), (1, 6)),
    "experts": grid((4, 6, 5), (2,), (2, 3), (3,)),
}


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = {"rows": (9, 5), "columns": (6, 10), "grid": (7, 8), "experts": (4, 6, 5)}
    named = {name: torch.randn(shape) for name, shape in shapes.items()}
    return {**named, "grid": named["grid"].bfloat16(), "whole": torch.randn(3, 4), "step": torch.tensor(7)}


def opened_tensors(root: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(root, "saved")
    with open_store(checkpoint.place) as store:
        read = {
            name: bytearray(store.read(own.key, own.offset, own.nbytes))
            for name, own in checkpoint.tensors.items()
        }
    return {
        name: torch.frombuffer(data, dtype=torch_dtype(own.dtype)).reshape(own.shape)
        for (name, data), own in zip(read.items(), checkpoint.tensors.values(), strict=True)
    }


@pytest.mark.parametrize("as_safetensors", [False, True])
def test_tensors_of_chunks_are_those_that_torch_loads(as_safetensors: bool, tmp_path: Path) -> None:
    saved = tensors_of(1)
    root = save_chunks(tmp_path / "a", saved, BOXES, files=12, as_safetensors=as_safetensors)
    # torch itself does not load what it serialises as safetensors.
    expected, found = saved if as_safetensors else load_whole(root), opened_tensors(root)
    assert found.keys() == expected.keys() == saved.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, saved[name])
        assert torch.equal(found[name], tensor)


def test_any_run_of_bytes_is_assembled(tmp_path: Path) -> None:
    saved, random = tensors_of(2), Random(5)
    checkpoint = open_checkpoint(save_chunks(tmp_path / "a", saved, BOXES), "a")
    (key,) = {each.key for each in checkpoint.tensors.values()}
    expected = bytearray(checkpoint.assembled_nbytes)
    for name, own in checkpoint.tensors.items():
        data = saved[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        expected[own.offset : own.offset + own.nbytes] = data
        assert not own.offset % 8
    with open_store(checkpoint.place) as store:
        for _ in range(300):
            begin = random.randrange(len(expected))
            end = random.randrange(begin, len(expected)) + 1
            assert store.read(key, begin, end - begin) == expected[begin:end]


def test_merge_of_both_serialisations_is_torch_arithmetic(tmp_path: Path) -> None:
    state = {"lr": 0.5, "step": 3}
    roots = [
        save_chunks(
            tmp_path / f"m{seed}", tensors_of(seed), BOXES, entries=state, as_safetensors=seed == 2, files=12
        )
        for seed in (1, 2)
    ]
    merged = merge_here(mean_of(*roots, dtype="float32"), tmp_path / "out")
    one, two = load_whole(roots[0]), tensors_of(2)
    assert torch.equal(merged.pop("step"), one.pop("step"))
    check_close(
        merged, {name: tensor.float() * 0.5 + two[name].float() * 0.5 for name, tensor in one.items()}
    )
    assert audit(tmp_path / "out", AuditOptions(), INLINE).problems == ()


def test_state_of_the_training_is_left_out_by_a_named_rule(tmp_path: Path) -> None:
    saved = {
        "model.model.layers.0.w": torch.ones(2, 2),
        "model.lm_head.weight": torch.ones(3),
        "optimizer.exp_avg.model.layers.0.w": torch.zeros(2, 2),
    }
    paths = {key: (key.partition(".")[0], key.partition(".")[2]) for key in saved} | {"step": ("step",)}
    root = save_chunks(tmp_path / "a", saved, {}, paths=paths, entries={"step": 1})
    checkpoint = open_checkpoint(root, "a")
    assert set(checkpoint.tensors) == {"model.layers.0.w", "lm_head.weight"}
    dropped = {
        row["name"]: row["rule"]
        for row in plan(mean_of(root))["dispositions"].to_pylist()
        if row["disposition"] == "dropped"
    }
    assert dropped == dict.fromkeys(("optimizer.exp_avg.model.layers.0.w", "step"), "training_state")


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["model.layers.0.w", "lm_head.weight"], ["model.layers.0.w", "lm_head.weight"]),
        (["model.layers.0.w", "model.norm.weight"], ["model.layers.0.w", "model.norm.weight"]),
        (["model.model.layers.0.w", "model.lm_head.weight"], ["model.layers.0.w", "lm_head.weight"]),
    ],
)
def test_flat_names_lose_only_what_wraps_all_of_them(
    keys: Sequence[str], names: Sequence[str], tmp_path: Path
) -> None:
    root = save_chunks(tmp_path / "a", {key: torch.ones(2) for key in keys}, {})
    assert set(open_checkpoint(root, "a").tensors) == set(names)


def test_base_model_gives_config_and_tokenizer(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", 0)
    tunes = [tiny_llama(tmp_path / f"tune{seed}", seed, base=base) for seed in (1, 2)]
    saved = []
    for tune in tunes:
        tensors = {f"model.{name}": tensor for name, tensor in read_tensors(tune).items()}
        boxes = {
            name: grid(tensor.shape, (1,)) if tensor.dim() == 1 else grid(tensor.shape, (3,), (2, 5))
            for name, tensor in tensors.items()
        }
        paths = {name: ("model", name.removeprefix("model.")) for name in tensors}
        saved.append(save_chunks(tmp_path / f"{tune.name}-saved", tensors, boxes, paths=paths))
    asked = {"merge_method": "ties", "base_model": str(base), "parameters": {"weight": 0.7, "density": 0.5}}
    for name, models in (("plain", tunes), ("chunks", saved)):
        merge({**asked, "models": [{"model": str(each)} for each in models]}, tmp_path / name)
    for key in ("model.safetensors", "config.json"):
        assert (tmp_path / "chunks" / key).read_bytes() == (tmp_path / "plain" / key).read_bytes()


def test_names_of_megatron_are_kept(tmp_path: Path) -> None:
    saved = {
        "decoder.layers.self_attention.linear_qkv.weight": torch.ones(2, 4, 3),
        "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight": torch.ones(2, 4, 3),
    }
    entries = {
        "decoder.layers.self_attention.core_attention._extra_state/shard_0_2": 1,
        "rng_state/shard_0": 2,
    }
    root = save_chunks(tmp_path / "a", saved, {}, entries=entries, files=1)
    (root / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"args": 1}, root / "common.pt")
    checkpoint = open_checkpoint(root, "a")
    assert list(checkpoint.tensors) == ["decoder.layers.self_attention.linear_qkv.weight"]
    assert checkpoint.left.keys() == {*saved, *entries} - checkpoint.tensors.keys()
    left_out = {each.key: each.rule for each in checkpoint.left_out}
    assert left_out == {"common.pt": "training state", "metadata.json": "training state"}
    assert checkpoint.companions == ()


def test_shards_for_the_hub_are_read_as_whole_tensors(tmp_path: Path) -> None:
    saved = tensors_of(3)
    root = save_shards(tmp_path / "a", saved, BOXES, ranks=12)
    found = opened_tensors(root)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    (root / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="number 2 is missing"):
        open_checkpoint(root, "a")


def test_chunks_on_an_object_store_give_the_same_bytes(tmp_path: Path) -> None:
    roots = [save_chunks(tmp_path / f"m{seed}", tensors_of(seed), BOXES) for seed in (1, 2)]
    merge(mean_of(*roots), tmp_path / "near")
    with s3_server() as server:
        for root in roots:
            server.upload(root, root.name)
        options = replace(INLINE, storage=server.options)
        merge(mean_of("s3://models/m1", "s3://models/m2"), tmp_path / "far", options)
    near, far = (tmp_path / name / "model.safetensors" for name in ("near", "far"))
    assert near.read_bytes() == far.read_bytes()


class FarFiles(LocalStore):
    """Files whose blobs are only read when as many threads as there are blobs ask for one."""

    is_far = True

    def __init__(self, root: Path, begins: set[tuple[str, int]]) -> None:
        super().__init__(root)
        self._begins = begins
        self._barrier = Barrier(len(begins))

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        if (key, offset) in self._begins:
            self._barrier.wait(timeout=30)
        return super().read(key, offset, nbytes)


@pytest.mark.parametrize("as_safetensors", [False, True])
def test_chunks_of_a_far_tensor_are_located_at_the_same_time(as_safetensors: bool, tmp_path: Path) -> None:
    saved = tensors_of(1)
    root = save_chunks(tmp_path / "a", saved, BOXES, files=12, as_safetensors=as_safetensors)
    own = open_checkpoint(root, "a").tensors["experts"]
    blobs = metadata_of(root).storage_data.items()
    begins = {(info.relative_path, info.offset) for index, info in blobs if index.fqn == "experts"}
    assert len(begins) == 12
    with ChunkedStore(FarFiles(root, begins)) as store:
        data = bytearray(store.read(own.key, own.offset, own.nbytes))
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32).reshape(own.shape), saved["experts"])


def test_window_of_torch_dist_checkpoints_is_the_average_of_the_paper(tmp_path: Path) -> None:
    key, run = "decoder.layers.mlp.linear_fc1.weight", tmp_path / "run"
    saved = [torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    for number, tensor in enumerate(saved, 1):
        root = run / f"iter_{number:07d}"
        save_chunks(root, {key: tensor}, {key: grid(tensor.shape, (), (3 * number,), (number,))})
        (root / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    window = {"root": str(run), "windows": [5, 2], "schedule": "minus-sqrt"}
    results = submit_sweep({"checkpoints": window, "outputs": "last-{window}"}, tmp_path / "out", INLINE)
    assert set(results) == {"last-5", "last-2"}
    shares = [1 - (number / 5) ** 0.5 for number in range(5)]
    weights = [shares[0] - shares[1], *(shares[i] - shares[i + 1] for i in (1, 2, 3)), shares[4]]
    total = torch.zeros_like(saved[0])
    for weight, tensor in zip(weights, saved, strict=True):
        total += weight * tensor
    merged = read_tensors(tmp_path / "out" / "last-5")[key]
    torch.testing.assert_close(merged, total, rtol=2e-7, atol=1e-7)


# Written in chunks


@pytest.mark.parametrize("as_safetensors", [False, True])
def test_a_merge_is_written_as_the_training_saved_it(as_safetensors: bool, tmp_path: Path) -> None:
    entries = {"optimizer": {"lr": 0.5}}
    form: dict[str, Any] = {"entries": entries, "files": 12, "as_safetensors": as_safetensors}
    roots = [save_chunks(tmp_path / f"m{seed}", tensors_of(seed), BOXES, **form) for seed in (1, 2)]
    (roots[0] / "common.pt").write_bytes(b"common")
    merged = merge_here(mean_of(*roots), tmp_path / "merged")
    done = write_chunks(tmp_path / "merged", roots[0], tmp_path / "out")
    assert (done.tensors, done.left) == (len(merged), 1)
    found = opened_tensors(tmp_path / "out") if as_safetensors else load_whole(tmp_path / "out")
    assert found.keys() == merged.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in merged.items())
    for key in (".metadata", "common.pt"):
        assert (tmp_path / "out" / key).read_bytes() == (roots[0] / key).read_bytes()
    sizes = [
        {each.name: each.stat().st_size for each in root.iterdir()} for root in (roots[0], tmp_path / "out")
    ]
    assert sizes[0] == sizes[1]
    assert verify(tmp_path / "out").problems == ()


def test_shards_for_the_hub_are_written_too(tmp_path: Path) -> None:
    roots = [save_shards(tmp_path / f"m{seed}", tensors_of(seed), BOXES, ranks=12) for seed in (1, 2)]
    merged = merge_here(mean_of(*roots), tmp_path / "merged")
    write_chunks(tmp_path / "merged", roots[1], tmp_path / "out")
    found = opened_tensors(tmp_path / "out")
    assert found.keys() == merged.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in merged.items())
    assert {each.name for each in (tmp_path / "out").iterdir()} == {each.name for each in roots[1].iterdir()}


def test_written_archives_have_right_checksums(tmp_path: Path) -> None:
    root = save_chunks(tmp_path / "a", tensors_of(1), BOXES)
    merge(mean_of(root, save_chunks(tmp_path / "b", tensors_of(2), BOXES)), tmp_path / "merged")
    write_chunks(tmp_path / "merged", root, tmp_path / "out")
    for info in metadata_of(root).storage_data.values():
        data = (tmp_path / "out" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None


def test_another_model_is_not_written(tmp_path: Path) -> None:
    saved = tensors_of(1)
    root = save_chunks(tmp_path / "a", saved, BOXES)
    merge(mean_of(root, dtype="float16"), tmp_path / "merged")
    with pytest.raises(PlanError, match=r"columns is F16 \[6, 10\], and F32 \[6, 10\] in"):
        write_chunks(tmp_path / "merged", root, tmp_path / "out")
    with pytest.raises(OptionError, match="no directory of a training checkpoint"):
        write_chunks(tmp_path / "merged", tmp_path / "merged", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_chunks_are_not_written_into_a_source_or_where_another_process_writes(tmp_path: Path) -> None:
    root = save_chunks(tmp_path / "a", tensors_of(1), BOXES)
    merge(mean_of(root), tmp_path / "merged")
    before = sorted(tmp_path.rglob("*"))
    for place, verb in ((root / "out", "lies inside"), (root, "is"), (tmp_path, "holds")):
        with pytest.raises(TargetError, match=f"the output place {verb} the source"):
            write_chunks(tmp_path / "merged", root, place)
    assert sorted(tmp_path.rglob("*")) == before
    left = tmp_path / ".out.raymerge-chunks-0123456789ab"
    left.mkdir()
    with leased(LeaseFile(tmp_path / "out"), "another"), pytest.raises(HeldError):
        write_chunks(tmp_path / "merged", root, tmp_path / "out")
    assert left.exists()
    write_chunks(tmp_path / "merged", root, tmp_path / "out")
    assert {each.name for each in tmp_path.iterdir()} == {"a", "merged", "out"}


def test_tensors_that_share_a_blob_are_written_only_if_they_are_equal(tmp_path: Path) -> None:
    both = {"first": torch.ones(2, 3), "second": torch.zeros(2, 3)}
    root = save_chunks(tmp_path / "a", both, {})
    merge(mean_of(root), tmp_path / "apart")
    metadata = metadata_of(root)
    one, two = metadata.storage_data
    metadata.storage_data[two] = metadata.storage_data[one]
    write_metadata(root, metadata)
    with pytest.raises(PlanError, match="stores first and second as the same bytes, and they differ"):
        write_chunks(tmp_path / "apart", root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge(mean_of(root), tmp_path / "tied")
    write_chunks(tmp_path / "tied", root, tmp_path / "out")
    assert all(torch.equal(each, both["first"]) for each in load_whole(tmp_path / "out").values())


# Damage


class Runs:
    """What runs code as soon as it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def _moved(change: Callable[[Any], dict[str, Any]], key: str = "rows") -> Callable[[Path], None]:
    """Change the first chunk's place of a tensor."""

    def damage(root: Path) -> None:
        metadata = metadata_of(root)
        index = next(each for each in metadata.storage_data if each.fqn == key)
        info = metadata.storage_data[index]
        metadata.storage_data[index] = replace(info, **change(info))
        write_metadata(root, metadata)

    return damage


def _described(change: Callable[[Any], Any], key: str = "rows") -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        metadata = metadata_of(root)
        change(metadata.state_dict_metadata[key])
        write_metadata(root, metadata)

    return damage


def _wrong_blob(root: Path) -> None:
    """Two chunks of equal length exchange their places; the first is of another dtype."""
    metadata = metadata_of(root)
    one, two = (next(i for i in metadata.storage_data if i.fqn == key) for key in ("grid", "whole"))
    stored = metadata.storage_data
    stored[one], stored[two] = stored[two], stored[one]
    write_metadata(root, metadata)


def _saved_as(tensor: torch.Tensor) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        metadata = metadata_of(root)
        index = next(each for each in metadata.storage_data if each.fqn == "whole")
        path = root / "other.distcp"
        torch.save(tensor, path)
        info = metadata.storage_data[index]
        metadata.storage_data[index] = replace(
            info, relative_path=path.name, offset=0, length=path.stat().st_size
        )
        write_metadata(root, metadata)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an offset that lies": (_moved(lambda info: {"offset": info.offset + 1}), "overlap|not stored as"),
    "a length beyond the file": (_moved(lambda _: {"length": 1 << 40}), "ends at byte"),
    "a file that is missing": (
        lambda root: (root / "__1_0.distcp").unlink(),
        "'__1_0.distcp', which is not there",
    ),
    "a file elsewhere": (_moved(lambda _: {"relative_path": "../../x"}), "which is not there"),
    "an encoded stream": (_moved(lambda _: {"transform_descriptors": ["zstd"]}), "compressed or encoded"),
    "a chunk too few": (_described(lambda own: own.chunks.pop()), "in none of its chunks"),
    "a chunk twice": (_described(lambda own: own.chunks.append(own.chunks[0])), "overlap"),
    "another shape": (
        _described(lambda own: setattr(own, "size", torch.Size([9, 4]))),
        "not within its shape",
    ),
    "another dtype": (
        _described(lambda own: setattr(own.properties, "dtype", torch.float16)),
        "holds F32 .*, the metadata says F16",
    ),
    "another tensor's chunk": (_wrong_blob, "the metadata says"),
    "a transposed chunk": (_saved_as(torch.ones(4, 3).T), "do not lie one after the other"),
    "a cut file": (lambda root: (root / "__0_0.distcp").write_bytes(b""), "ends at byte"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_before_anything_is_read(name: str, tmp_path: Path) -> None:
    root = save_chunks(tmp_path / "a", tensors_of(1), BOXES)
    damage, what = DAMAGES[name]
    damage(root)
    with pytest.raises(CheckpointError, match=what):
        open_checkpoint(root, "a")


@pytest.mark.parametrize("where", ["metadata", "chunk", "entry"])
def test_no_code_of_a_checkpoint_is_run(where: str, tmp_path: Path) -> None:
    mark, root = tmp_path / "mark", tmp_path / "a"
    save_chunks(
        root, {"w": torch.ones(2)}, {}, entries={"lr": Runs(mark)} if where == "entry" else {}, files=1
    )
    if where == "metadata":
        metadata = metadata_of(root)
        metadata.planner_data = {"w": Runs(mark)}
        write_metadata(root, metadata)
    if where == "chunk":
        _saved_as_code(root, Runs(mark))
    if where == "entry":
        assert list(open_checkpoint(root, "a").tensors) == ["w"]
    else:
        with pytest.raises(CheckpointError, match="would run"):
            open_checkpoint(root, "a")
    assert not mark.exists()


def _saved_as_code(root: Path, value: Runs) -> None:
    torch.save(value, root / "__0_0.distcp")
    _point_at_all_of(root)


def _point_at_all_of(root: Path) -> None:
    """Let the only chunk be all of its file."""
    metadata = metadata_of(root)
    ((index, info),) = metadata.storage_data.items()
    nbytes = (root / info.relative_path).stat().st_size
    metadata.storage_data[index] = replace(info, offset=0, length=nbytes)
    write_metadata(root, metadata)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04}", b"\x80\x04.", b"garbage", pickle.dumps([1] * 9), b"\x85" * 99]
)
def test_metadata_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    root = save_chunks(tmp_path / "a", {"w": torch.ones(2)}, {})
    (root / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as the description"):
        open_checkpoint(root, "a")


NESTED = {
    "shared": b")" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(60)),
    "deep": b")" + b"\x85" * 100_000,
}
"""Values, as instructions of a pickle, that take ages or the whole stack to be hashed, compared or shown."""


def _as_text(text: str) -> bytes:
    return b"\x8c%c%s" % (len(text), text.encode())


def _metadata(described: bytes, places: bytes = b"}", paths: bytes = b"}") -> bytes:
    fields = {"state_dict_metadata": described, "storage_data": places, "planner_data": paths}
    state = b"".join(_as_text(name) + value for name, value in fields.items())
    return b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(" + state + b"ub."


@pytest.mark.parametrize("nested", NESTED)
def test_nested_values_in_metadata_are_refused_at_once(nested: str, tmp_path: Path) -> None:
    root, value = save_chunks(tmp_path / "a", {"w": torch.ones(2)}, {}), NESTED[nested]
    size, name = b"ctorch\nSize\n" + value + b"\x85R", _as_text("w")
    many = b"ctorch\nSize\n(" + b"K\x01" * 100_000 + b"t\x85R"
    tensor = b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n)\x81}"
    for content, what in (
        (b"\x80\x02}" + value + b"K\x01s.", "a tuple as a key"),
        (_metadata(b"}" + size + b"Ns"), "a key that is no text"),
        (_metadata(b"}" + name + value + b"s"), "something else in the place of"),
        (_metadata(b"}" + name + tensor + _as_text("size") + size + b"sbs"), "'w': .* lacks 'properties'"),
        (_metadata(b"}", b"}" + size + b"Ns"), "something else in the place of"),
        (_metadata(b"}", paths=b"}" + name + value + b"s"), "names no tensor"),
        (_metadata(b"}" + many + b"Ns"), "a key that is no text"),
    ):
        (root / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=what):
            open_checkpoint(root, "a")


def test_chunks_that_many_tensors_share_are_refused_at_once(tmp_path: Path) -> None:
    root = save_chunks(tmp_path / "a", {"w": torch.ones(2)}, {}, files=1)
    metadata = metadata_of(root)
    own, (info,) = metadata.state_dict_metadata["w"], metadata.storage_data.values()
    own.chunks *= 20_000
    names = [f"w{number}" for number in range(2000)]
    metadata.state_dict_metadata = dict.fromkeys(names, own)
    metadata.storage_data = {MetadataIndex(name, torch.Size((0,))): info for name in names}
    write_metadata(root, metadata)
    with pytest.raises(CheckpointError, match="more chunks than it has bytes for"):
        open_checkpoint(root, "a")


@pytest.mark.parametrize("nested", NESTED)
def test_nested_values_in_a_blob_are_refused_at_once(nested: str, tmp_path: Path) -> None:
    root, whole, value = tmp_path / "a", b"K\x02\x85", NESTED[nested]
    save_chunks(root, {"w": torch.ones(2)}, {}, files=1)
    many = b"(" + b"\x8a\xff" + b"\x7f" * 255 + b"q\xff" + b"h\xff" * 200_000 + b"t"
    for key, shape, what in (
        (value, whole, "storage is named by what is no text"),
        (_as_text("0"), value, "shape or strides"),
        (_as_text("0"), many, "at most 32 dimensions"),
    ):
        storage = _as_text("storage") + b"ctorch\nFloatStorage\n" + key + _as_text("cpu") + b"K\x02"
        tensor = b"(" + storage + b"tQK\x00" + shape + b"K\x01\x85\x89}"
        with zipfile.ZipFile(root / "__0_0.distcp", "w") as archive:
            archive.writestr("a/data.pkl", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + tensor + b"tR.")
        _point_at_all_of(root)
        with pytest.raises(CheckpointError, match=what):
            open_checkpoint(root, "a")


def test_unfinished_save_is_named_as_such(tmp_path: Path) -> None:
    root = save_chunks(tmp_path / "a", {"w": torch.ones(2)}, {})
    torch.save({"args": 1}, root / "common.pt")
    (root / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"without \.metadata.* the save did not finish"):
        open_checkpoint(root, "a")


@pytest.mark.parametrize("form", ["chunks", "shards"])
def test_checkpoint_that_vanishes_before_it_is_read_can_come_back(form: str, tmp_path: Path) -> None:
    root, apart = tmp_path / "a", tmp_path / "apart"
    if form == "chunks":
        save_chunks(root, tensors_of(1), BOXES)
    else:
        save_shards(root, tensors_of(1), BOXES, ranks=12)
    recipe, apart_files = mean_of(root), list(root.glob("*.safetensors")) or [root / ".metadata"]

    def vanish(event: Event) -> None:
        if isinstance(event, Started) and not apart.exists():
            apart.mkdir()
            for file in apart_files:
                file.rename(apart / file.name)

    with pytest.raises(IncompleteError, match="gone since the merge was planned"):
        submit(recipe, tmp_path / "out", INLINE, on_event=vanish)
    for file in apart_files:
        (apart / file.name).rename(file)
    merged = merge_here(recipe, tmp_path / "out")
    assert all(torch.equal(merged[name], tensor) for name, tensor in tensors_of(1).items())


def test_plan_notes_chunks_beside_safetensors(tmp_path: Path) -> None:
    root = save_chunks(tmp_path / "a", {"w": torch.ones(2)}, {})
    save_file({"w": torch.zeros(2)}, root / "model.safetensors")
    (root / "config.json").write_text('{"model_type": "llama"}')
    checkpoint = open_checkpoint(root, "a")
    assert [file.key for file in checkpoint.files] == ["model.safetensors"]
    assert [note for note in checkpoint.notes if "beside model.safetensors are not read" in note]


# Saved by ranks


@pytest.fixture(scope="session")
def saved_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    by_ranks("save", 4, root, (1, 2))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("form", ["archives", "blobs", "shards"])
def test_checkpoints_of_four_ranks_are_averaged(form: str, saved_by_ranks: Path, tmp_path: Path) -> None:
    roots = [saved_by_ranks / f"{form}-{seed}" for seed in (1, 2)]
    merged = merge_here(mean_of(*roots, dtype="float32"), tmp_path / "out")
    one, two = state_of(1), state_of(2)
    check_close(merged, {name: one[name].float() * 0.5 + two[name].float() * 0.5 for name in one})


@pytest.mark.slow
def test_what_four_ranks_saved_is_merged_and_loaded_by_two(saved_by_ranks: Path, tmp_path: Path) -> None:
    roots = [saved_by_ranks / f"archives-{seed}" for seed in (1, 2)]
    merged = merge_here(mean_of(*roots), tmp_path / "merged")
    write_chunks(tmp_path / "merged", roots[0], tmp_path / "out")
    by_ranks("load", 2, tmp_path, [tmp_path / "out"])
    loaded = load_file(tmp_path / "loaded-out.safetensors")
    assert loaded.keys() == merged.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in merged.items())
