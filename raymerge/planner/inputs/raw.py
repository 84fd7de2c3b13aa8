"""Raw merges: files of tensors without a config, merged by the names of their tensors alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from raymerge.checkpoints.index import PICKLE_ENDINGS
from raymerge.checkpoints.pickles import conversion_command, read_pickled
from raymerge.checkpoints.source import Checkpoint, open_tensor_file
from raymerge.errors import CheckpointError, Problem
from raymerge.recipes import AnyRecipe, ModelReference, references
from raymerge.storage.addresses import as_path, is_remote, shown

_ENDING = ".safetensors"
_NEEDS_CONFIG = {
    "slices": "has no config that counts its layers, so none of them can be taken.",
    "experts": "has no config that tells what its tensors are.",
    "modules": "has no config that tells the parts of a model.",
    "tokenizer": "has no tokenizer.",
    "tokenizer_source": "has no tokenizer.",
    "chat_template": "has no tokenizer, so a chat template has no place.",
}
# Keys of a recipe that mean nothing where there are tensors only, and why.


def names_file(reference: ModelReference) -> bool:
    """Whether a reference names a file and no directory; elsewhere than on this machine, by its ending."""
    if is_remote(reference.path):
        return shown(reference.path).endswith((_ENDING, *PICKLE_ENDINGS))
    return os.path.isfile(os.path.expanduser(as_path(reference.path)))


def open_raw(place: str, name: str, *, revision: str | None, pickled: bool) -> Checkpoint:
    """Open a file of tensors.

    Args:
        place: the file: a path, or an address with its options.
        name: what the recipe calls it.
        revision: what is asked for, of which a file has none.
        pickled: whether it may be a pickled one.

    Raises:
        CheckpointError: it is broken, or of a kind that is not read.
    """
    place = os.path.expanduser(as_path(place))
    path = shown(place)
    is_pickle = path.endswith(PICKLE_ENDINGS)
    if revision is not None:
        what = f"revision {revision!r} is asked for, but this is a file, which has none."
        raise CheckpointError(Problem(path, what, "Take the revision out."))
    if not is_pickle and not path.endswith(_ENDING):
        what = "is a file, and its name does not end in .safetensors."
        raise CheckpointError(Problem(path, what, "Give the directory of a model, or a file of tensors."))
    if is_pickle and not pickled:
        what = "is a pickled file, and the recipe refuses those (pickled_weights: refuse)."
        remedy = "Take that out: no code of the file is run. Or convert it: "
        raise CheckpointError(Problem(path, what, remedy + conversion_command(path)))
    return open_tensor_file(place, name, read_pickle=read_pickled if is_pickle else None)


def raw_problems(recipe: AnyRecipe, opened: Mapping[ModelReference, Checkpoint]) -> Iterator[Problem]:
    """What cannot be asked of files of tensors: models beside them, and whatever needs a config."""
    raw = [checkpoint for checkpoint in opened.values() if checkpoint.is_raw]
    model = next((each for each in opened.values() if not each.is_raw), None)
    if not raw:
        return
    for path, reference in references(recipe) if model is not None else ():
        checkpoint = opened.get(reference)
        if model is not None and checkpoint is not None and checkpoint.is_raw:
            what = f"{checkpoint.name} has tensors only, while {model.name} is a model with a config."
            remedy = "Merge files of tensors with each other, or give the directory that the model is in."
            yield Problem(recipe.where(*path), what, remedy)
    for key, reason in _NEEDS_CONFIG.items():
        if getattr(recipe, key, None):
            what = f"'{key}' is given, but {raw[0].name} {reason}"
            yield Problem(recipe.where(key), what, "Remove it, or give models with their configs.")
