"""Models and adapters as people name them: a directory, or a Hub name with or without a revision."""

from __future__ import annotations

import os

from raymerge.checkpoints.adapters import Adapter, open_adapter
from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.documents.faults import FaultError
from raymerge.errors import CheckpointError, Problem
from raymerge.recipes import ModelReference, parse_reference
from raymerge.storage.resolve import resolve_source


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
    return open_checkpoint(resolve_source(reference.path, reference.revision), str(reference))


def open_named_adapter(reference: ModelReference) -> Adapter:
    """The adapter that a recipe's reference names, headers only.

    Raises:
        CheckpointError: it is absent, broken, or of a kind that cannot be read.
    """
    if reference.lora_path is not None:
        what = "this names an adapter on a model, in a merge of adapters."
        raise CheckpointError(Problem(str(reference), what, "Name the adapter alone."))
    return open_adapter(resolve_source(reference.path, reference.revision), str(reference))


def _parsed(text: str) -> ModelReference:
    try:
        return parse_reference(text, exists=os.path.isdir)
    except FaultError as error:
        raise CheckpointError([Problem(text, fault.what, fault.remedy) for fault in error.faults]) from error
