"""Which tensors of a training checkpoint are the model's, and what they are called there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raymerge.checkpoints.dcp.metadata import SavedState, SavedTensor
from raymerge.checkpoints.header import METADATA_KEY, is_text
from raymerge.errors import CheckpointError, Problem, shortlist

_STATE = frozenset(
    {
        *("optimizer", "optim", "optimizers", "lr_scheduler", "scheduler", "opt_param_scheduler"),
        *("rng", "rng_state", "rerun_state_machine", "dataloader", "train_state"),
    }
)
"""What the state of a training is kept under, beside the model's."""
_MODELS = frozenset({"model", "module", "state_dict", "app"})
_EXTRA = "_extra_state"
_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class ModelTensors:
    tensors: Mapping[str, SavedTensor]
    """By their names in the model."""
    left: Mapping[str, int]
    """Bytes of what is not the model's, by key in the checkpoint; 0 of what is no tensor."""


def model_tensors(state: SavedState, *, keeps_names: bool, where: str) -> ModelTensors:
    """``keeps_names``: keys are names, as in Megatron's checkpoints. Raises CheckpointError: names are no
    names of a safetensors file, or stand for two tensors."""
    paths = {key: state.paths.get(key, (key,)) for key in (*state.tensors, *state.entries)}
    # Where a model has a place of its own, whatever is beside it is not the model's.
    within = {path[0] for path in paths.values() if len(path) > 1} & _MODELS
    own = [
        key
        for key in state.tensors
        if not _is_state(key, paths[key]) and (keeps_names or not within or paths[key][0] in within)
    ]
    names = own if keeps_names else _names([paths[key] for key in own])
    tensors = {name: state.tensors[key] for name, key in zip(names, own, strict=True)}
    taken = frozenset(own)
    left = {key: each.nbytes for key, each in state.tensors.items() if key not in taken}
    unfit = [name for name in names if name == METADATA_KEY or not is_text(name)]
    if unfit or len(tensors) < len(own) or not tensors.keys().isdisjoint(left):
        named = shortlist(unfit or sorted(names))
        what = f"has names that cannot be told apart in the model, or written ({named})."
        raise CheckpointError(Problem(where, what, "Save the model's state by names of its own."))
    return ModelTensors(tensors, left | dict.fromkeys(state.entries, 0))


def _is_state(key: str, path: tuple[str, ...]) -> bool:
    if len(path) == 1:
        path = tuple(key.split(".")[:1])
    return _EXTRA in key or not _STATE.isdisjoint(path)


def _names(paths: Iterable[tuple[str, ...]]) -> list[str]:
    """Paths without the places that all of them are in: the model's state in the state of a training.

    ``model.`` is a part of most names on the Hub: of flat keys it is taken off where what is behind it begins
    so again."""
    paths = list(paths)
    common = 0
    while paths and all(len(path) > common + 1 for path in paths):
        places = {path[common] for path in paths}
        if len(places) > 1 or places.isdisjoint(_MODELS):
            break
        common += 1
    names = [".".join(path[common:]) for path in paths]
    if all(name.startswith(_PREFIX) for name in names) and any(
        name.startswith(2 * _PREFIX) for name in names
    ):
        return [name.removeprefix(_PREFIX) for name in names]
    return names
