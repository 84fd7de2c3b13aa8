"""Tells plain numbers from codes of quantised formats, and reports codes where numbers are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint
from raymerge.planner.findings import Findings
from raymerge.planner.quantised import quantised_formats
from raymerge.planner.sources import Source


class PlainNumbers:
    """What is quantised in the sources of one recipe."""

    def __init__(self, sources: Sequence[Source], findings: Findings) -> None:
        self._sources = sources
        self._findings = findings
        self._forms = [_forms(source.checkpoint) for source in sources]
        self._packed = [packs.packed if (packs := each.checkpoint.packs) else {} for each in sources]

    def is_quantised(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a tensor belongs to a quantised format, as code or as scale."""
        return tensor.name in self._forms[source] or tensor.name in self._packed[source]

    def is_integer(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a tensor holds integers that are no codes: indices, masks, tables."""
        return not tensor.dtype.is_mergeable and not self.is_quantised(source, tensor)

    def check(self, source: int, tensor: StoredTensor) -> bool:
        """Whether arithmetic on a tensor of a source means something; if not, a finding says why."""
        form = self._forms[source].get(tensor.name)
        if tensor.name in self._packed[source] or (form is None and tensor.dtype.is_mergeable):
            return True
        return self._refuse(source, tensor, form or f"{tensor.dtype.value} integers")

    def is_stored_plain(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a tensor is stored as plain numbers, as rows by token must be; else a finding says why."""
        packed = self._packed[source].get(tensor.name)
        if packed is None:
            return self.check(source, tensor)
        return self._refuse(source, tensor, packed.packing.format.value, "row by token ")

    def _refuse(self, source: int, tensor: StoredTensor, form: str, how: str = "") -> bool:
        name = self._sources[source].name
        self._findings.tensor(
            ("quantised", name, form),
            where=name,
            what=f"{{count}} tensors are quantised as {form}, which raymerge can {how}neither combine nor "
            "convert: their raw codes mean nothing by themselves",
            remedy="Use a checkpoint converted to bfloat16, or a recipe that takes these tensors from one "
            "source unchanged (merge_method: passthrough, without dtype).",
            example=f"{tensor.name} {tensor.dtype.value}{list(tensor.shape)}",
        )
        return False


def _forms(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Formats of what is quantised in a way that is not read, by tensor."""
    return quantised_formats(checkpoint) if checkpoint.packs is None else checkpoint.packs.unknown
