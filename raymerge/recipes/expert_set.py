"""A recipe that changes the experts of one checkpoint, or makes a dense model of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from raymerge.recipes.entry import DEFAULT_SHARD_SIZE, Document, MergeDType, Reference, ShardSize
from raymerge.recipes.expert_change import ExpertChange
from raymerge.recipes.schema import FLAG_ADVICE, Duplicates, PickledWeights, Seed

_NOT_BUILT = (
    "A map of 'experts' changes the experts of one checkpoint. To build a mixture of experts, write a list: "
    "experts: [{source_model: PATH}, ...]."
)
_NOT_MERGED = (
    "A map of 'experts' changes the experts of one checkpoint, 'base_model'. To merge first, put that merge "
    "into a document of its own before this one, give it a name, and name it as base_model."
)


class ExpertSetRecipe(Document):
    """Other experts for one checkpoint: fewer, more, merged ones, or none; all else stays as it is."""

    shape: ClassVar[str] = "a map like {base_model: PATH, experts: {keep: [0, 1, 5]}}"
    advice: ClassVar[Mapping[str, str]] = {
        **FLAG_ADVICE,
        "model": "Here the key is 'base_model'.",
        **dict.fromkeys(("gate_mode", "shared_experts", "experts_per_token", "architecture"), _NOT_BUILT),
        **dict.fromkeys(("merge_method", "models", "slices", "parameters"), _NOT_MERGED),
    }

    base_model: Reference
    """The mixture of experts; gives everything that is not changed."""
    experts: ExpertChange
    """What becomes of its experts."""
    dtype: MergeDType | None = None
    """dtype of the output; None keeps each tensor's own."""
    seed: Seed = 0
    """As in other recipes; no change of experts draws random numbers."""
    shard_size: ShardSize = DEFAULT_SHARD_SIZE
    """Bytes that one output file may have; 0 for a single file."""
    duplicates: Duplicates = "keep"
    """``keep``: each name has its own bytes; ``share``: equal ones may share storage."""
    pickled_weights: PickledWeights = "read"
    """Pickled weights, where there are no safetensors: ``read`` without running code, or ``refuse``."""
