"""Models and adapters as people name them: a directory, or a Hub name with or without a revision."""

from __future__ import annotations

import os

from raymerge.checkpoints.adapters import Adapter
from raymerge.checkpoints.pickles import read_pickled
from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.documents.fields import FaultError
from raymerge.errors import CheckpointError, Problem
from raymerge.planner.inputs.sources import open_adapter_reference, refuse_unread, unread_problem
from raymerge.recipes import ModelReference, parse_reference
from raymerge.storage.open import USUAL, Lookup, resolve_source


def open_named_model(text: str) -> Checkpoint:
    """The model that ``text`` names, headers only.

    Raises:
        CheckpointError: it is absent, broken, or of a kind that cannot be read.
    """
    reference = _parsed(text)
    if reference.lora_path is not None:
        what = "this names an adapter on a model, and an adapter is made from two models."
        raise CheckpointError(
            Problem(text, what, "Merge the adapter into its model first, and name the result.")
        )
    refuse_unread(reference, pickled=True, lookup=USUAL)
    root = resolve_source(reference.path, reference.revision, pickled=True)
    found = open_checkpoint(root, str(reference), read_pickle=read_pickled)
    _check_read(found)
    return found


def open_named_adapter(reference: ModelReference, *, pickled: bool = True, lookup: Lookup = USUAL) -> Adapter:
    """The adapter that a recipe's reference names, headers only.

    Args:
        reference: a directory, a Hub name or an address.
        pickled: whether pickled weights are read where there are no safetensors.
        lookup: how it is found.

    Raises:
        CheckpointError: it is absent, broken, or of a kind that cannot be read.
    """
    if reference.lora_path is not None:
        what = "this names an adapter on a model, in a merge of adapters."
        raise CheckpointError(Problem(str(reference), what, "Name the adapter alone."))
    found = open_adapter_reference(reference, pickled=pickled, lookup=lookup)
    _check_read(found)
    return found


def _check_read(opened: Checkpoint | Adapter) -> None:
    """See that every weight file is read, or left out by a rule; raises CheckpointError."""
    unknown = [each.key for each in opened.left_out if each.rule is None]
    if unknown:
        raise CheckpointError(unread_problem(opened.name, unknown))


def _parsed(text: str) -> ModelReference:
    try:
        return parse_reference(text, exists=os.path.isdir)
    except FaultError as error:
        raise CheckpointError([Problem(text, fault.what, fault.remedy) for fault in error.faults]) from error
