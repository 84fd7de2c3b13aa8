"""Tensors of a merge without files: the bytes of ``submit``, in bounded memory, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_config, read_tensors, tiny_llama, write_checkpoint
from kits.memory_meter import AllocationMeter
from kits.merge_cases import INLINE, Family, recipes
from kits.merges import STACK, make_models, mean_of, write_recipe
from kits.quantised_merges import MAKERS, entries
from kits.tensor_scaled_models import fp8_mixture, nvfp4_llama

import raymerge
from raymerge.errors import CheckpointError, NonFiniteError, OptionError, PlanError
from raymerge.events import Event, Planned, SegmentDone

MIB = 1 << 20
LEAST = raymerge.RunOptions(inline=True, memory=32 * MIB)


def _bytes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (each.dtype, tuple(each.shape), each.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, each in tensors.items()
    }


def _check(recipe: Any, out: Path, options: raymerge.RunOptions = INLINE) -> None:
    """Whether a stream has what ``submit`` writes, as safetensors reads it."""
    stream = raymerge.stream(recipe, options)
    streamed = list(stream)
    published = read_tensors(Path(raymerge.submit(recipe, out, INLINE).output))
    assert _bytes_of(dict(streamed)) == _bytes_of(published)
    named = [(name, each.dtype, tuple(each.shape)) for name, each in streamed]
    assert named == [tuple(each) for each in stream.metadata()]
    assert len(named) == len(published) == len(stream)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["linear", "ties", "passthrough", "model_stock", "dare_ties"])
def test_a_stream_of_a_dense_merge_has_the_bytes_of_submit(
    medium: Family, tmp_path: Path, method: str
) -> None:
    _check(recipes(medium)[method], tmp_path / "out", LEAST)


def test_layers_that_repeat_are_streamed_in_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_models(tmp_path))
    _check(write_recipe(tmp_path, STACK), tmp_path / "out")


QUANTISED: Mapping[str, Callable[[Path, int], Any]] = {
    **{name: MAKERS[name] for name in ("DeepSeek-V3 F8_E8M0", "gpt-oss", "three formats")},
    "FP8 mixture": fp8_mixture,
    "NVFP4": nvfp4_llama,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", QUANTISED)
def test_codes_and_scales_are_streamed_as_submit_writes_them(tmp_path: Path, name: str) -> None:
    parents = [QUANTISED[name](tmp_path / each, seed) for seed, each in enumerate(("one", "two"))]
    recipe = {"merge_method": "linear", "models": entries(parents, (0.618034, 0.381966))}
    _check(recipe, tmp_path / "out", LEAST)


def test_each_iteration_begins_anew(small: Family) -> None:
    stream = raymerge.stream(recipes(small)["linear"], INLINE)
    first = {name: each.clone() for name, each in stream}
    # What the caller does to tensors is no matter of the next round.
    for _, each in stream:
        each.zero_()
    assert _bytes_of(dict(stream)) == _bytes_of(first)


def test_a_stream_that_is_closed_early_ends_its_threads(medium: Family) -> None:
    before = threading.active_count()
    iterator = iter(raymerge.stream(recipes(medium)["ties"], LEAST))
    next(iterator)
    iterator.close()
    assert threading.active_count() == before


def test_the_memory_that_is_stated_is_kept_by_a_model_of_twice_as_much(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "one", 1, hidden=512, layers=12)
    tiny_llama(tmp_path / "two", 2, hidden=512, layers=12, base=base)
    stream = raymerge.stream(mean_of(base, tmp_path / "two"), LEAST)
    nbytes = (base / "model.safetensors").stat().st_size
    assert nbytes > 2 * stream.projected_peak
    assert stream.projected_peak <= 32 * MIB
    # What loops compile and threads take, once.
    next(iter(stream))
    with AllocationMeter() as meter:
        streamed = sum(each.nbytes for _, each in stream)
    assert nbytes - streamed < MIB
    assert meter.peak_bytes <= stream.projected_peak


def test_progress_adds_up_to_what_was_planned(medium: Family) -> None:
    seen: list[Event] = []
    for _ in raymerge.stream(recipes(medium)["linear"], INLINE, on_event=seen.append):
        pass
    (plan,) = (each for each in seen if isinstance(each, Planned))
    parts = [each for each in seen if isinstance(each, SegmentDone)]
    assert [each.segment for each in parts] == list(range(plan.segments))
    assert sum(each.planned_bytes for each in parts) == plan.total_bytes
    assert sum(each.written_bytes for each in parts) == plan.output_bytes - 4096


def test_a_stream_ends_with_what_is_wrong(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "one", 1)
    tensors = read_tensors(base)
    tensors["model.norm.weight"][3] = float("nan")
    spoilt = write_checkpoint(tmp_path / "two", tensors, read_config(base))
    with pytest.raises(NonFiniteError, match=r"two.*model\.norm\.weight"):
        list(raymerge.stream(mean_of(base, spoilt), INLINE))
    stream = raymerge.stream(mean_of(base, base), INLINE)
    write_checkpoint(base, {**tensors, "lm_head.weight": torch.zeros(3)}, read_config(base))
    with pytest.raises(CheckpointError, match="changed"):
        list(stream)


def test_what_no_stream_can_do_is_refused_before_it_begins(small: Family) -> None:
    recipe = recipes(small)["linear"]
    for options, what in (
        (raymerge.RunOptions(workers=2), "one worker, not 2"),
        (raymerge.RunOptions(address="far:6379"), "no cluster takes part"),
        (raymerge.RunOptions(memory=MIB), "The smallest that works is"),
    ):
        with pytest.raises(OptionError, match=what):
            raymerge.stream(recipe, options)


def test_a_recipe_whose_stage_needs_files_is_refused_by_its_name(small: Family) -> None:
    experts = [{"source_model": str(each), "positive_prompts": ["a"]} for each in small.tunes[:2]]
    recipe = {"base_model": str(small.base), "gate_mode": "random", "experts": experts}
    with pytest.raises(
        OptionError, match=r"other results are computed, which need files: .*rout.* Submit it"
    ):
        raymerge.stream(recipe)


@pytest.mark.ray
@pytest.mark.slow
def test_a_stream_runs_inside_an_actor(small: Family, ray_cluster: Any, tmp_path: Path) -> None:
    recipe = recipes(small)["ties"]

    class Trainer:
        def merged(self) -> dict[str, torch.Tensor]:
            import raymerge

            return dict(raymerge.stream(recipe))

    actor = ray_cluster.remote(Trainer).remote()
    streamed = ray_cluster.get(actor.merged.remote())
    published = read_tensors(Path(raymerge.submit(recipe, tmp_path / "out", INLINE).output))
    assert _bytes_of(streamed) == _bytes_of(published)


def _in_memory(root: Path) -> raymerge.InMemoryModel:
    files = {path.name: path.read_bytes() for path in root.glob("*token*")}
    return raymerge.InMemoryModel(read_tensors(root), read_config(root), files)


def test_parents_in_memory_are_merged_like_those_on_disk(small: Family, tmp_path: Path) -> None:
    published = raymerge.submit(recipes(small)["ties"], tmp_path / "out", INLINE)
    models = {f"live{number}": _in_memory(root) for number, root in enumerate(small.tunes)}
    # As trainers have them: parameters, and matrices that are not contiguous.
    for number, (name, model) in enumerate(models.items()):
        tensors = dict(model.tensors)
        if number:
            tensors |= {key: each.T.contiguous().T for key, each in tensors.items() if each.dim() == 2}
        tensors["lm_head.weight"] = torch.nn.Parameter(tensors["lm_head.weight"])
        models[name] = raymerge.InMemoryModel(tensors, model.config, model.files)
    text = json.dumps(recipes(small)["ties"])
    for number, root in enumerate(small.tunes):
        text = text.replace(json.dumps(str(root)), json.dumps(f"live{number}"))
    stream = raymerge.stream(json.loads(text), LEAST, models=models)
    assert _bytes_of(dict(stream)) == _bytes_of(read_tensors(Path(published.output)))
    expected = {key: (Path(published.output) / key).read_bytes() for key in stream.files()}
    assert stream.files() == expected


def test_quantised_parents_in_memory_keep_their_codes(tmp_path: Path) -> None:
    roots = [MAKERS["DeepSeek-V3 F32"](tmp_path / each, seed).root for seed, each in enumerate(("a", "b"))]
    published = raymerge.submit(mean_of(*roots), tmp_path / "out", INLINE)
    models = {root.name: _in_memory(root) for root in roots}
    streamed = dict(raymerge.stream(mean_of("a", "b"), INLINE, models=models))
    assert _bytes_of(streamed) == _bytes_of(read_tensors(Path(published.output)))


def test_what_a_trainer_changed_counts_in_the_next_iteration(small: Family) -> None:
    live = _in_memory(small.base)
    recipe = {"merge_method": "passthrough", "models": [{"model": "live"}]}
    stream = raymerge.stream(recipe, INLINE, models={"live": live})
    before = dict(stream)["model.norm.weight"].clone()
    live.tensors["model.norm.weight"].add_(1)
    assert torch.equal(dict(stream)["model.norm.weight"], before + 1)


def test_tensors_of_another_dtype_or_shape_than_when_planned_are_refused(small: Family) -> None:
    live, name = _in_memory(small.base), "model.norm.weight"
    tensors = dict(live.tensors)
    recipe = {"merge_method": "passthrough", "models": [{"model": "live"}]}
    models = {"live": raymerge.InMemoryModel(tensors, live.config)}
    stream = raymerge.stream(recipe, INLINE, models=models)
    planned = tensors.pop(name)
    for now in (planned.float(), planned[:5], planned[None], None):
        tensors |= {} if now is None else {name: now}
        with pytest.raises(CheckpointError, match=rf"live/{name}: it was bfloat16 \[\d+\] when"):
            list(stream)
        tensors.pop(name, None)


def test_tensors_without_a_config_are_merged_with_their_like() -> None:
    models = {
        each: raymerge.InMemoryModel({"w": torch.full((3, 5), 1.0 + n)}) for n, each in enumerate("abc")
    }
    between = {**mean_of("a", "b"), "name": "between"}
    (name, tensor), *others = raymerge.stream([between, mean_of("between", "c")], INLINE, models=models)
    assert (name, tensor.tolist(), others) == ("w", [[2.25] * 5] * 3, [])


def test_tensors_that_no_file_could_hold_are_named(small: Family) -> None:
    live = _in_memory(small.base)
    tensors = {**live.tensors, "a": torch.empty(3, device="meta"), "b": torch.eye(3).to_sparse()}
    recipe = {"merge_method": "passthrough", "models": [{"model": "live"}]}
    with pytest.raises(CheckpointError) as caught:
        raymerge.stream(recipe, models={"live": raymerge.InMemoryModel(tensors, live.config)})
    assert [each.where for each in caught.value.problems] == ["live: a", "live: b"]
    whole = raymerge.InMemoryModel({"w": torch.ones(3, dtype=torch.int8)})
    with pytest.raises(PlanError, match=r"^live: no tensor is of F16, BF16, F32 or F64; there is I8"):
        raymerge.stream(recipe, models={"live": whole})
    with pytest.raises(PlanError, match=r"no recipe names a model 'lives'\. Did you mean 'live'"):
        raymerge.stream(recipe, models={"lives": live, "live": live})
