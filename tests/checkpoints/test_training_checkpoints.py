"""Training checkpoints in chunks as sources: what is read equals what torch loads, and damage is refused."""

from __future__ import annotations

import io
import json
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
from kits.command_line import run_command
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

from raymerge.api import (
    AuditOptions,
    audit,
    conversion,
    plan,
    plan_for,
    replay,
    stream,
    submit,
    submit_sweep,
    verify,
)
from raymerge.checkpoints.dcp.store import ChunkedStore
from raymerge.checkpoints.source import open_checkpoint
from raymerge.errors import CheckpointError, IncompleteError, OptionError, PlanError, RecipeError, TargetError
from raymerge.events import Event, Started
from raymerge.execute.receipts import UNFINISHED
from raymerge.merge_plan.elements import torch_dtype
from raymerge.merge_plan.memory import project
from raymerge.planner.explain import explain
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


def test_a_first_model_without_config_takes_that_of_another(tmp_path: Path) -> None:
    one, two = (tiny_llama(tmp_path / f"model{seed}", seed) for seed in (1, 2))
    root = save_chunks(tmp_path / "saved", read_tensors(one), {})
    merge(mean_of(root, two), tmp_path / "chunks")
    merge(mean_of(one, two), tmp_path / "plain")
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


@pytest.mark.slow
def test_chunks_on_an_object_store_give_the_same_bytes(tmp_path: Path) -> None:
    roots = [save_chunks(tmp_path / f"m{seed}", tensors_of(seed), BOXES) for seed in (1, 2)]
    merge(mean_of(*roots), tmp_path / "near")
    with s3_server() as server:
        for root in roots:
            server.upload(root, root.name)
        options = replace(INLINE, storage=server.options)
        merge(mean_of("s3://models/m1", "s3://models/m2"), tmp_path / "far", options)
        merge(mean_of(*roots, layout="s3://models/m2"), tmp_path / "far-layout", options)
    near, far = (tmp_path / name / "model.safetensors" for name in ("near", "far"))
    assert near.read_bytes() == far.read_bytes()
    merge(mean_of(*roots, layout=str(roots[1])), tmp_path / "near-layout")
    near_files, far_files = (contents(tmp_path / f"{name}-layout") for name in ("near", "far"))
    assert near_files.pop("README.md") != far_files.pop("README.md")
    assert near_files == far_files


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

STATE = {"optimizer.exp_avg": torch.arange(120.0).reshape(40, 3), "optimizer.step": torch.tensor(7)}
"""Of a training, beside ``tensors_of``."""


def saved_with_state(place: Path, *, files: int = 12) -> list[Path]:
    """Two checkpoints with the state of their training, that of the second negated."""
    roots = []
    for seed, sign in ((1, 1), (2, -1)):
        tensors = tensors_of(seed) | {key: sign * each for key, each in STATE.items()}
        boxes = BOXES | {"optimizer.exp_avg": grid((40, 3), (10, 20))}
        entries = {"optimizer.lr": 0.5 * sign}
        roots.append(save_chunks(place / f"m{seed}", tensors, boxes, entries=entries, files=files))
    return roots


def contents(root: Path) -> dict[str, bytes]:
    """Of all files but the record of the run."""
    return {each.name: each.read_bytes() for each in root.iterdir() if each.is_file()}


@pytest.mark.parametrize("as_safetensors", [False, True])
def test_a_merge_is_written_as_the_training_saved_it(as_safetensors: bool, tmp_path: Path) -> None:
    form: dict[str, Any] = {
        "entries": {"optimizer": {"lr": 0.5}},
        "files": 12,
        "as_safetensors": as_safetensors,
    }
    roots = [save_chunks(tmp_path / f"m{seed}", tensors_of(seed), BOXES, **form) for seed in (1, 2)]
    (roots[0] / "common.pt").write_bytes(b"common")
    merged = merge_here(mean_of(*roots), tmp_path / "merged")
    recipe = mean_of(*roots, layout=str(roots[0]))
    merge(recipe, tmp_path / "out")
    found = opened_tensors(tmp_path / "out") if as_safetensors else load_whole(tmp_path / "out")
    for each in (found, dict(stream(recipe, INLINE))):
        assert each.keys() == merged.keys()
        assert all(torch.equal(each[name], tensor) for name, tensor in merged.items())
    own, theirs = contents(tmp_path / "out"), contents(roots[0])
    assert own.pop("README.md")
    assert {key: len(each) for key, each in own.items()} == {key: len(each) for key, each in theirs.items()}
    assert (own[".metadata"], own["common.pt"]) == (theirs[".metadata"], theirs["common.pt"])
    assert verify(tmp_path / "out").problems == ()
    assert audit(tmp_path / "out", AuditOptions(sample=1), INLINE).problems == ()
    assert replay(tmp_path / "out").problems == ()


@pytest.mark.sample(1)
@pytest.mark.parametrize("choice", ["keep", "drop"])
def test_state_of_the_training_is_copied_or_left_out(choice: str, tmp_path: Path) -> None:
    roots = saved_with_state(tmp_path)
    merged = merge_here(mean_of(*roots), tmp_path / "merged")
    recipe = mean_of(*roots, layout=str(roots[1]), training_state=choice)
    rows = plan(recipe)["dispositions"].to_pylist()
    uses = {(row["source"], row["disposition"]) for row in rows if row["rule"] == "training_state"}
    assert uses == {(0, "dropped"), (1, "copied" if choice == "keep" else "dropped")}
    merge(recipe, tmp_path / "out")
    state = {key: -each for key, each in STATE.items()} if choice == "keep" else {}
    found = load_whole(tmp_path / "out")
    assert found.keys() == merged.keys() | state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in (merged | state).items())
    assert ("optimizer.lr" in metadata_of(tmp_path / "out").state_dict_metadata) == (choice == "keep")
    sizes = [sum(map(len, contents(root).values())) for root in (roots[1], tmp_path / "out")]
    assert sizes[1] < sizes[0] or choice == "keep"
    assert verify(tmp_path / "out").problems == audit(tmp_path / "out", AuditOptions(), INLINE).problems == ()
    assert replay(tmp_path / "out").problems == ()


@pytest.mark.sample(1)
@pytest.mark.parametrize("choice", ["keep", "drop"])
def test_shards_for_the_hub_are_written_too(choice: str, tmp_path: Path) -> None:
    roots = [save_shards(tmp_path / f"m{seed}", tensors_of(seed), BOXES, ranks=12) for seed in (1, 2)]
    state = roots[1] / "optimizer.pt"
    state.write_bytes(b"state")
    merged = merge_here(mean_of(*roots), tmp_path / "merged")
    recipe = mean_of(*roots, layout=str(roots[1]), training_state=choice)
    merge(recipe, tmp_path / "out")
    found = opened_tensors(tmp_path / "out")
    assert found.keys() == merged.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in merged.items())
    left_out = {state.name} if choice == "drop" else set()
    assert contents(tmp_path / "out").keys() - {"README.md"} == contents(roots[1]).keys() - left_out
    (planned,) = plan_for(recipe, tmp_path / "next")
    account = explain(planned.plan, planned.sources, project(planned.plan, 1 << 30))
    assert {name for line in account.left_out for name in line.examples} == left_out


@pytest.mark.parametrize("choice", ["keep", "drop"])
def test_written_archives_have_right_checksums(choice: str, tmp_path: Path) -> None:
    roots = saved_with_state(tmp_path)
    merge(mean_of(*roots, layout=str(roots[0]), training_state=choice), tmp_path / "out")
    for info in metadata_of(tmp_path / "out").storage_data.values():
        data = (tmp_path / "out" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None


@pytest.mark.slow
def test_a_model_is_converted_to_the_layout_of_a_checkpoint(tmp_path: Path) -> None:
    roots = saved_with_state(tmp_path)
    merged = merge_here(mean_of(*roots), tmp_path / "merged")
    recipe = conversion(tmp_path / "merged", layout=roots[0])
    rows = plan(recipe)["dispositions"].to_pylist()
    assert {row["rule"] for row in rows if row["source"] == 1} == {"layout_only", "training_state"}
    command = ("convert", "merged", "--like", "m1", "-o", "converted", "--inline", "--json")
    done = json.loads(run_command(*command, cwd=tmp_path).text.splitlines()[-1])
    assert [each["command"] for each in done["next"]][1] == "raymerge verify converted --level audit"
    merge(mean_of(*roots, layout=str(roots[0])), tmp_path / "out")
    converted, out = contents(tmp_path / "converted"), contents(tmp_path / "out")
    assert converted.pop("README.md") != out.pop("README.md")
    assert converted == out
    submit(conversion(tmp_path / "converted"), tmp_path / "back", INLINE)
    assert all(torch.equal(read_tensors(tmp_path / "back")[name], each) for name, each in merged.items())


def test_layouts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    root = save_chunks(tmp_path / "a", tensors_of(1), BOXES)
    less = save_chunks(tmp_path / "b", {"rows": torch.ones(3), "more": torch.ones(2)}, {})
    merge(mean_of(root), tmp_path / "merged")
    for layout, more, what in (
        (tmp_path / "merged", {}, "merged is no training checkpoint in chunks.*Name a directory of torch's"),
        (f"{root}+{root}", {}, "adapter"),
        (tmp_path / "nowhere", {}, "recipe: layout.*nowhere"),
        (root, {"dtype": "float16"}, r"columns is F16 \[6, 10\] in the output, and F32 \[6, 10\] in"),
        (less, {}, "the output has columns, .*which .*b has not.*Name one of the training"),
        (less, {}, "b has more, which the output has not"),
        (root, {"shard_size": "1GB"}, "recipe: shard_size.*'shard_size' is for safetensors"),
        (root, {"training_state": "leave"}, "recipe: training_state"),
        (None, {"training_state": "drop"}, "'layout' names, and there is none.*Add 'layout: PATH'"),
    ):
        named = {} if layout is None else {"layout": str(layout)}
        with pytest.raises((PlanError, RecipeError), match=f"(?s){what}"):
            plan(mean_of(root, **named, **more)).require()
        with pytest.raises((PlanError, RecipeError)):
            submit(mean_of(root, **named, **more), tmp_path / "out", INLINE)
    assert {each.name for each in tmp_path.iterdir()} == {"a", "b", "merged"}


def test_state_in_one_blob_with_the_model_is_not_left_out(tmp_path: Path) -> None:
    root = save_chunks(tmp_path / "a", tensors_of(1) | STATE, BOXES, as_safetensors=True, files=12)
    with pytest.raises(PlanError, match=r"one safetensors blob.*'training_state: keep'"):
        plan(mean_of(root, layout=str(root), training_state="drop")).require()


def test_layout_is_refused_where_objects_are_written_and_between_merges(tmp_path: Path) -> None:
    root = save_chunks(tmp_path / "a", tensors_of(1), BOXES)
    recipe = mean_of(root, layout=str(root))
    with pytest.raises(OptionError, match=r"s3://models/out.*'layout'.*Give a directory"):
        submit(recipe, "s3://models/out", INLINE)
    with pytest.raises(PlanError, match="first is read by this merge, and has a 'layout'"):
        submit([recipe | {"name": "first"}, mean_of("first")], tmp_path / "out", INLINE)


def test_tensors_that_share_a_blob_are_refused(tmp_path: Path) -> None:
    root = save_chunks(tmp_path / "a", {"first": torch.ones(2, 3), "second": torch.zeros(2, 3)}, {})
    metadata = metadata_of(root)
    one, two = metadata.storage_data
    metadata.storage_data[two] = metadata.storage_data[one]
    write_metadata(root, metadata)
    with pytest.raises(PlanError, match="stores first and second as the same bytes, which may differ"):
        plan(mean_of(root, layout=str(root))).require()


@pytest.mark.parametrize("as_safetensors", [False, True])
def test_chunks_of_a_tensor_that_share_a_blob_are_refused(as_safetensors: bool, tmp_path: Path) -> None:
    boxes = {"halves": grid((4, 6), (2,))}
    tensors = {"halves": torch.arange(24.0).reshape(4, 6)}
    root = save_chunks(tmp_path / "a", tensors, boxes, files=1, as_safetensors=as_safetensors)
    metadata = metadata_of(root)
    one, two = metadata.storage_data
    metadata.storage_data[two] = metadata.storage_data[one]
    write_metadata(root, metadata)
    with pytest.raises(PlanError, match="'halves' has chunks that are the same bytes"):
        plan(mean_of(root)).require()


class Killed(Exception):  # noqa: N818 - as if the process were gone
    pass


@pytest.mark.sample(2)
@pytest.mark.parametrize("when", ["segments", "one file of many", "all files"])
@pytest.mark.parametrize("choice", ["keep", "drop"])
def test_resumed_after_a_kill_it_gives_the_same_bytes(
    when: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = saved_with_state(tmp_path)
    recipe = mean_of(*roots, layout=str(roots[0]), training_state=choice)
    merge(recipe, tmp_path / "whole")
    renamed: list[str] = []
    whole = LocalStore.rename

    def rename(store: LocalStore, old: str, new: str) -> None:
        if new.endswith(".distcp"):
            if len(renamed) >= {"segments": 0, "one file of many": 5, "all files": 99}[when]:
                raise Killed
            renamed.append(new)
        whole(store, old, new)

    def gone(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr(LocalStore, "rename", rename)
    if when == "all files":
        monkeypatch.setattr("raymerge.runtime.driver.run.finish_companions", gone)
    with pytest.raises(Killed):
        submit(recipe, tmp_path / "out", INLINE)
    monkeypatch.undo()
    (staging,) = tmp_path.glob(".out.raymerge-*")
    finished = {each: each.stat().st_ino for each in map(staging.__truediv__, renamed)}
    began: list[Started] = []
    submit(
        recipe,
        tmp_path / "out",
        INLINE,
        on_event=lambda e: began.append(e) if isinstance(e, Started) else None,
    )
    assert began[0].done_segments == len(plan(recipe)["segments"])
    assert all((tmp_path / "out" / each.name).stat().st_ino == own for each, own in finished.items())
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_finished", [False, True])
def test_lost_bytes_of_chunks_are_made_again(
    is_finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = saved_with_state(tmp_path)
    recipe = mean_of(*roots, layout=str(roots[0]))
    merge(recipe, tmp_path / "whole")

    def gone(*_: object, **__: object) -> None:
        raise Killed

    step = (
        "runtime.driver.run.finish_companions"
        if is_finished
        else "publish.chunked_shards.ChunkedShards.complete"
    )
    monkeypatch.setattr(f"raymerge.{step}", gone)
    with pytest.raises(Killed):
        submit(recipe, tmp_path / "out", INLINE)
    monkeypatch.undo()
    (staging,) = tmp_path.glob(".out.raymerge-*")
    files = list(staging.glob("*.distcp*"))
    assert all(file.suffix == (".distcp" if is_finished else UNFINISHED) for file in files)
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))
    submit(recipe, tmp_path / "out", INLINE)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_audit_finds_a_changed_byte_of_the_state(tmp_path: Path) -> None:
    roots = saved_with_state(tmp_path)
    merge(mean_of(*roots, layout=str(roots[0])), tmp_path / "out")
    stored = metadata_of(tmp_path / "out").storage_data
    info = next(each for index, each in stored.items() if index.fqn == "optimizer.exp_avg")
    path = tmp_path / "out" / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.offset + info.length // 2] ^= 1
    path.write_bytes(data)
    assert verify(tmp_path / "out").problems == ()
    for problems in (
        audit(tmp_path / "out", AuditOptions(), INLINE).problems,
        replay(tmp_path / "out").problems,
    ):
        (problem,) = problems
        assert problem.where.endswith(f"out/{info.relative_path}")
        assert "beside the tensors of the model" in problem.what


def test_state_that_is_changed_meanwhile_is_noticed(tmp_path: Path) -> None:
    roots = saved_with_state(tmp_path)
    (roots[0] / "rng_state.pt").write_bytes(b"before")

    def change(event: Event) -> None:
        if isinstance(event, Started):
            (roots[0] / "rng_state.pt").write_bytes(b"behind")

    recipe = mean_of(*roots, layout=str(roots[0]))
    with pytest.raises(CheckpointError, match=r"rng_state.pt: the file was changed while"):
        submit(recipe, tmp_path / "out", INLINE, on_event=change)


def test_a_run_does_not_go_on_with_another_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = saved_with_state(tmp_path)
    state = roots[0] / "optimizer.pt"
    state.write_bytes(b"before")
    recipe = mean_of(*roots, layout=str(roots[0]))

    def gone(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr("raymerge.runtime.driver.run.finish_companions", gone)
    with pytest.raises(Killed):
        submit(recipe, tmp_path / "out", INLINE)
    monkeypatch.undo()
    state.write_bytes(b"behind")
    with pytest.raises(TargetError, match=r"layout > optimizer\.pt > 2 was"):
        submit(recipe, tmp_path / "out", INLINE)


@pytest.mark.slow
def test_sweep_gives_each_output_the_layout(tmp_path: Path) -> None:
    roots = saved_with_state(tmp_path)
    recipe = mean_of(*roots, layout=str(roots[0]))
    recipe["models"][0]["parameters"]["weight"] = "$w"
    submit_sweep({**recipe, "sweep": {"w": [0.25, 1]}, "outputs": "w{w}"}, tmp_path / "out", INLINE)
    merge(mean_of(*roots, layout=str(roots[0])), tmp_path / "alone")
    swept, alone = contents(tmp_path / "out" / "w1"), contents(tmp_path / "alone")
    assert all(swept[key] == alone[key] for key in alone.keys() - {"README.md"})
    assert contents(tmp_path / "out" / "w0.25")["__1_0.distcp"] != swept["__1_0.distcp"]
    assert verify(tmp_path / "out" / "w0.25").problems == ()


def test_output_in_chunks_is_replaced_and_resumes_nothing_else(tmp_path: Path) -> None:
    roots = saved_with_state(tmp_path)
    recipe = mean_of(*roots, layout=str(roots[0]))
    merge(recipe, tmp_path / "out")
    with pytest.raises(TargetError, match="this directory is not empty"):
        submit(recipe, tmp_path / "out", INLINE)
    submit(mean_of(roots[0]), tmp_path / "out", replace(INLINE, replace=True))
    assert contents(tmp_path / "out").keys() == {"README.md", "model.safetensors"}


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


@pytest.mark.sample(1)
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


@pytest.mark.sample(1)
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


@pytest.mark.sample(1)
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
    for choice in ("keep", "drop"):
        merge(mean_of(*roots, layout=str(roots[1]), training_state=choice), tmp_path / choice)
    by_ranks("load", 2, tmp_path, [tmp_path / "keep", tmp_path / "drop"])
    state = {"optimizer.exp": 2 * torch.ones(3), "optimizer.lr": torch.tensor(0.1)}
    for choice, expected in (("keep", merged | state), ("drop", merged)):
        loaded = load_file(tmp_path / f"loaded-{choice}.safetensors")
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
