"""What becomes of every tensor of every source. Each has exactly one disposition, or the plan is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from raymerge.checkpoints.source import Holding


class Use(StrEnum):
    MERGED = "merged"
    COPIED = "copied"
    CONVERTED = "converted"
    DROPPED = "dropped"


class Rule(StrEnum):
    METHOD = "method"
    """The recipe's method used it."""
    ONE_SOURCE = "one_source"
    """It is the only source of its output and passes unchanged."""
    DTYPE = "dtype"
    """It is the only source of its output and keeps its values, in another dtype or layout."""
    UNNAMED_MODULE = "unnamed_module"
    """Its module is not named in the recipe, so the lead's is copied."""
    COPIED_FROM_LEAD = "copied_from_lead"
    """Integers and recomputed buffers are not averaged: the lead's are kept."""
    ADAPTED = "adapted"
    """It passes from one source with what an adapter adds to it."""
    REPLACED = "replaced"
    """An adapter that is laid over the model has another in its place."""
    LEAD_HAS_IT = "lead_has_it"
    """The lead's integers or buffers are kept instead of these."""
    RECOMPUTED_BUFFER = "recomputed_buffer"
    """A buffer that loaders recompute and the lead does not store."""
    EQUALS_EMBEDDING = "equals_embedding"
    """A stored head, byte-equal to the embedding that it is tied to."""
    OUTSIDE_SLICES = "outside_slices"
    """The recipe's slices do not take this layer or end of this source."""
    OUTSIDE_MODULES = "outside_modules"
    """The recipe's modules do not take this module of this source."""
    CONFIG_ONLY = "config_only"
    """The model gives only config, tokenizer and companion files."""
    MADE_ROWS_OF = "made_rows_of"
    """Rows for its vocabulary were made of it, in a stage before the merge."""
    ACTIVATION_SCALE = "activation_scale"
    """A scale of inputs, or of cached keys and values: the largest of those that the sources have."""
    NOT_QUANTISED = "not_quantised"
    """Such a scale, which nothing in the output's config declares any more."""
    ONLY_IN_BASE = "only_in_base"
    """Some source lacks it and the recipe says ``missing_tensors: copy_base``, so the base's is kept."""
    NOT_CHOSEN = "not_chosen"
    """The method or rule that makes the output takes it from other sources."""
    EXTRA_DROPPED = "extra_dropped"
    """The lead lacks it and the recipe says ``extra_tensors: drop``."""
    EXPERT = "expert"
    STAGE = "stage"
    REPLACED_BY_EXPERTS = "replaced_by_experts"
    """Experts take the place of this feed-forward layer of the base, and none of them is made of it."""
    ONLY_EXPERTS_TAKEN = "only_experts_taken"
    """Nothing but the feed-forward layers of this model is taken."""
    EXPERT_NOT_KEPT = "expert_not_kept"
    """It belongs to an expert that the recipe leaves out."""
    RENUMBERED = "renumbered"
    """It names experts by number, and the recipe gives these other numbers."""
    ROUTER_OF_DENSE = "router_of_dense"
    """It chooses among experts, or weighs a shared one, and the recipe makes the model dense."""
    TRAINING_STATE = "training_state"
    """Of a training checkpoint: of its optimizer, scheduler or random numbers, and of no model. Copied from
    the one whose layout the output has, unless the recipe says ``training_state: drop``."""
    LAYOUT_ONLY = "layout_only"
    """The model gives only the layout of the output, and the state of its training."""


_STRENGTH = {Use.DROPPED: 0, Use.COPIED: 1, Use.CONVERTED: 2, Use.MERGED: 3}


class Disposition(NamedTuple):
    use: Use
    rule: Rule
    output: str = ""


_STATE = Disposition(Use.DROPPED, Rule.TRAINING_STATE)
_COPIED_STATE = Disposition(Use.COPIED, Rule.TRAINING_STATE)


class Dispositions:
    """Dispositions of all tensors of sources and adapters; one that is used twice keeps its strongest."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = holdings
        self._have_parts = [holding.has_parts for holding in holdings]
        self.settled: Sequence[dict[str, Disposition]] = [{} for _ in holdings]
        """Of each holding those of its stored tensors."""
        self._copied_state: int | None = None

    def copy_state(self, source: int) -> None:
        """Record that the state of the training of this checkpoint is copied."""
        self._copied_state = source

    def settle(self, source: int, name: str, disposition: Disposition) -> None:
        """Record a use (or a named drop) of a tensor: of all that it consists of."""
        settled = self.settled[source]
        for part in self._holdings[source].parts(name) if self._have_parts[source] else (name,):
            old = settled.setdefault(part, disposition)
            if old is not disposition and _STRENGTH[disposition.use] > _STRENGTH[old.use]:
                settled[part] = disposition

    def settle_part(self, source: int, part: str, disposition: Disposition) -> None:
        """Record the use of one stored tensor, in place of what was said of all that it belongs to."""
        self.settled[source][part] = disposition

    def unsettled(self) -> Iterator[tuple[int, str]]:
        """Tensors of which nothing, or not all, has been said yet."""
        for index, (holding, dispositions) in enumerate(zip(self._holdings, self.settled, strict=True)):
            left = (holding.whole(name) for name in holding.stored if name not in dispositions)
            yield from ((index, name) for name in dict.fromkeys(left))

    def whole(self, source: int, name: str) -> str:
        """Name of the tensor that a stored one of a source is, or belongs to."""
        return self._holdings[source].whole(name)

    def entries(self) -> Iterator[tuple[int, str, Disposition]]:
        """Every settled tensor: source, name, disposition, in the checkpoints' order."""
        for source, (own, dispositions) in enumerate(zip(self._holdings, self.settled, strict=True)):
            yield from ((source, name, dispositions[name]) for name in own.stored if name in dispositions)
            state = _COPIED_STATE if source == self._copied_state else _STATE
            yield from ((source, name, state) for name in own.left)
