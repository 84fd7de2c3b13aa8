"""Tells plain numbers from codes of quantised formats, and reports codes where numbers are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.detect import Packed
from raymerge.checkpoints.source import Checkpoint
from raymerge.planner.findings import Findings
from raymerge.planner.inputs.quantised import CONVERT_FIRST, quantised_tensors, stored_formats
from raymerge.planner.inputs.sources import Source


class PlainNumbers:
    """What is quantised in the sources of one recipe."""

    def __init__(self, sources: Sequence[Source], findings: Findings) -> None:
        self._sources = sources
        self._findings = findings
        self._quantised = [_quantised(source.checkpoint) for source in sources]
        self._is_plain = [not (own.numbers or own.stored or own.unknown) for own in self._quantised]

    @property
    def are_all(self) -> bool:
        """Whether nothing in any source is quantised."""
        return all(self._is_plain)

    def is_quantised(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a tensor belongs to a quantised format, as code or as scale."""
        own = self._quantised[source]
        return any(tensor.name in each for each in (own.numbers, own.stored, own.unknown))

    def is_integer(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a tensor holds integers that are no codes: indices, masks, tables."""
        return not tensor.dtype.is_mergeable and not self.is_quantised(source, tensor)

    def check(self, source: int, tensor: StoredTensor) -> bool:
        """Whether arithmetic on a tensor of a source means something; if not, a finding says why."""
        own = self._quantised[source]
        if (self._is_plain[source] and tensor.dtype.is_mergeable) or tensor.name in own.numbers:
            return True
        if (form := own.stored.get(tensor.name)) is not None:
            what = "and recipes that build mixtures or change experts only copy such tensors"
            return self._refuse(source, tensor, form, what, CONVERT_FIRST)
        form = own.unknown.get(tensor.name)
        if form is None and tensor.dtype.is_mergeable:
            return True
        what = "which raymerge can neither combine nor convert: their raw codes mean nothing by themselves"
        remedy = (
            "Use a checkpoint converted to bfloat16, or a recipe that takes these tensors from one "
            "source unchanged (merge_method: passthrough, without dtype)."
        )
        return self._refuse(source, tensor, form or f"{tensor.dtype.value} integers", what, remedy)

    def is_stored_plain(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a tensor is stored as plain numbers, as rows by token must be; else a finding says why."""
        packed = self._quantised[source].numbers.get(tensor.name)
        if packed is None:
            return self.check(source, tensor)
        what = "and rows by token are only put together of plain numbers"
        return self._refuse(source, tensor, packed.packing.format.word, what, CONVERT_FIRST)

    def _refuse(self, source: int, tensor: StoredTensor, form: str, what: str, remedy: str) -> bool:
        name = self._sources[source].name
        self._findings.tensor(
            ("quantised", name, form),
            where=name,
            what=f"{{count}} tensors are quantised as {form}, {what}",
            remedy=remedy,
            example=f"{tensor.name} {tensor.dtype.value}{list(tensor.shape)}",
        )
        return False


@dataclass(frozen=True, slots=True)
class _Quantised:
    """What of one source is quantised, by the names that its tensors are seen by."""

    numbers: Mapping[str, Packed] = field(default_factory=dict)
    """Codes with scales that are seen as their numbers."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """Codes and scales that are seen as they are stored: what to call the format."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """What is quantised in a way that is not read: what to call that."""


def _quantised(checkpoint: Checkpoint) -> _Quantised:
    if checkpoint.packs is not None:
        return _Quantised(numbers=checkpoint.packs.packed, unknown=checkpoint.packs.unknown)
    found = quantised_tensors(checkpoint)
    return _Quantised(stored=stored_formats(found), unknown=found.unknown)
