"""Tells plain numbers from codes of quantised formats, and reports codes where numbers are needed."""

from __future__ import annotations

from collections.abc import Sequence

from raymerge.checkpoints.header import StoredTensor
from raymerge.planner.findings import Findings
from raymerge.planner.quantised import quantised_formats
from raymerge.planner.sources import Source


class PlainNumbers:
    """What is quantised in the sources of one recipe."""

    def __init__(self, sources: Sequence[Source], findings: Findings) -> None:
        self._sources = sources
        self._findings = findings
        self._forms = [quantised_formats(source.checkpoint) for source in sources]

    def is_quantised(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a tensor belongs to a quantised format, as code or as scale."""
        return tensor.name in self._forms[source]

    def is_integer(self, source: int, tensor: StoredTensor) -> bool:
        """Whether a tensor holds integers that are no codes: indices, masks, tables."""
        return not tensor.dtype.is_mergeable and tensor.name not in self._forms[source]

    def check(self, source: int, tensor: StoredTensor) -> bool:
        """Whether arithmetic on a tensor of a source means something; if not, a finding says why."""
        form = self._forms[source].get(tensor.name)
        if form is None and tensor.dtype.is_mergeable:
            return True
        form = form or f"{tensor.dtype.value} integers"
        name = self._sources[source].name
        self._findings.tensor(
            ("quantised", name, form),
            where=name,
            what=f"{{count}} tensors are quantised as {form}, and raymerge does not combine or convert "
            "quantised tensors yet; their raw codes mean nothing without their scales",
            remedy="Use a checkpoint converted to bfloat16, or a recipe that takes these tensors from one "
            "source unchanged (merge_method: passthrough, without dtype).",
            example=f"{tensor.name} {tensor.dtype.value}{list(tensor.shape)}",
        )
        return False
