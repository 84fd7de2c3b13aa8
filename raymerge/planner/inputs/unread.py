"""Weights of a source that a merge would not read: refused by name, of the Hub before they are fetched."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from raymerge.checkpoints.adapter_config import ADAPTER_CONFIG_FILE
from raymerge.checkpoints.adapters import adapter_weights
from raymerge.checkpoints.files import sort_files
from raymerge.checkpoints.index import find_weights
from raymerge.errors import CheckpointError, Problem, TransientError, UnreadableError
from raymerge.recipes import ModelReference
from raymerge.storage.open import Lookup, listed_repository
from raymerge.storage.store import ReadStore

_NUM_NAMED = 4


def unread_problem(where: str, keys: Sequence[str]) -> Problem:
    """Weights that would not be in a result."""
    others = len(keys) - _NUM_NAMED
    named = ", ".join(keys[:_NUM_NAMED]) + (f" and {others} more" if others > 0 else "")
    what = f"holds weights that are not merged, and that the result would lack: {named}."
    remedy = (
        "Only the weights that model.safetensors or its index holds are read, and links to directories are "
        "not followed. If the result can do without the others, move them into a directory whose name begins "
        "with a dot, which is left out, or merge a copy that has none of them; small files that are none "
        "can be copied to the output afterwards."
    )
    return Problem(where, what, remedy)


def refuse_unread(
    reference: ModelReference, *, pickled: bool, lookup: Lookup, is_adapter: bool = False
) -> None:
    """Refuse a model of the Hub by the names of its files, before any of its weights is fetched.

    Nothing for other places; nor where the Hub does not tell its files: fetching them says why.

    Args:
        reference: a Hub name, or any other place.
        pickled: whether pickled weights are read where there are no safetensors.
        lookup: how it is found.
        is_adapter: whether it names an adapter.

    Raises:
        CheckpointError: it has no weights that can be read, or others that no rule leaves out.
    """
    store = listed_repository(reference.path, reference.revision, lookup)
    if store is None:
        return
    place = store.location(".")
    with store:
        sizes = {info.key: info.nbytes for info in store.files()}
        try:
            read = _adapter_files(store, pickled) if is_adapter else _model_files(store, pickled)
        except (TransientError, UnreadableError):
            return
        except CheckpointError as error:
            raise CheckpointError([_named(each, place, str(reference)) for each in error.problems]) from error
    _, left_out = sort_files(sizes, read, is_adapter=is_adapter)
    if unknown := [each.key for each in left_out if each.rule is None]:
        raise CheckpointError(unread_problem(str(reference), unknown))


def _model_files(store: ReadStore, pickled: bool) -> Collection[str]:
    index = find_weights(store, store.files(), pickled=pickled)
    return {*index.keys, index.names.index}


def _adapter_files(store: ReadStore, pickled: bool) -> Collection[str]:
    infos, place = {info.key: info for info in store.files()}, store.location(".")
    return {ADAPTER_CONFIG_FILE, adapter_weights(infos, place, place, pickled=pickled)}


def _named(problem: Problem, place: str, name: str) -> Problem:
    """A problem of the address of a commit as one of the name that the user has for it."""
    return Problem(*(text.replace(place, name) for text in (problem.where, problem.what, problem.remedy)))
