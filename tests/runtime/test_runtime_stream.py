"""Tensors of a merge without files: the bytes of ``submit``, in bounded memory, and what is refused."""

from __future__ import annotations

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
from raymerge.errors import CheckpointError, NonFiniteError, OptionError
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


@pytest.mark.ray
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
