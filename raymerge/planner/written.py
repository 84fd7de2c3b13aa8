"""How each output tensor is stored: its dtype, or the packing that makes codes with scales of it.

What goes in comes out: without ``out_format`` and ``dtype`` a tensor is stored as the lead checkpoint has it.
A ``dtype`` alone asks for plain numbers of that dtype, also of what the lead has as codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raymerge.architectures import Role
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.numbers import code_dtype
from raymerge.checkpoints.packing import Format, Packing, usual_packing
from raymerge.dtypes import DType
from raymerge.planner.align import Aligned
from raymerge.planner.chosen import output_subject
from raymerge.planner.findings import Findings
from raymerge.planner.logical import LogicalTensors
from raymerge.planner.precision import output_dtype
from raymerge.recipes import Recipe

_USUAL = frozenset({Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT})
"""Parts whose matrices publishers quantise; embeddings, heads, norms and routers stay plain."""


@dataclass(frozen=True, slots=True)
class Written:
    """How one output tensor is stored."""

    dtype: DType
    """Its dtype; of codes, what one code is."""
    packing: Packing | None = None
    """What makes codes with scales of it; None where its numbers are stored as they are."""


class OutFormats:
    """Decides how the tensors of one recipe are stored."""

    def __init__(
        self, recipe: Recipe, logical: Sequence[LogicalTensors], main: Sequence[DType], findings: Findings
    ) -> None:
        """
        Args:
            recipe: what is asked.
            logical: the tensors of each source.
            main: dtype of most bytes of each source.
            findings: told of tensors that cannot be stored as asked.
        """
        self._recipe = recipe
        self._logical = logical
        self._main = main
        self._findings = findings
        self._wanted = recipe.out_dtype or recipe.dtype

    def of(self, aligned: Aligned, lead: StoredTensor, role: Role) -> Written:
        """How an output is stored.

        Args:
            aligned: the output.
            lead: the lead's tensor.
            role: what it does within its layer.
        """
        source = aligned.span.lead.source
        own = self._logical[source].packing(lead.name)
        asked = self._recipe.out_format
        choice = None if asked is None else asked.of(output_subject(aligned, self._logical))
        if choice is None or choice.value == "same":
            if own is not None and (choice is not None or self._wanted is None):
                return Written(code_dtype(own), own)
            return self._plain(lead, role, source, is_packed=own is not None)
        if choice.value == "bf16":
            return self._plain(lead, role, source, is_packed=own is not None)
        form = Format(choice.value)
        if own is not None and own.format is form:
            return Written(code_dtype(own), own)
        if choice.selector is None and role not in _USUAL:
            return self._plain(lead, role, source, is_packed=own is not None)
        packing = self._fresh(aligned, lead, form, is_named=choice.selector is not None)
        if packing is None:
            return self._plain(lead, role, source, is_packed=own is not None)
        return Written(code_dtype(packing), packing)

    def _plain(self, lead: StoredTensor, role: Role, source: int, *, is_packed: bool) -> Written:
        if is_packed:
            return Written(self._wanted or DType.BF16)
        if self._wanted is not None and not lead.dtype.is_mergeable:
            # Codes that are not read, of which the maker of the rows says so. Other integers never come here.
            return Written(self._wanted)
        return Written(output_dtype(self._wanted, lead, role, self._main[source]))

    def _fresh(self, aligned: Aligned, lead: StoredTensor, form: Format, *, is_named: bool) -> Packing | None:
        """A packing for what the lead has as plain numbers, or in another format."""
        if not is_named and (len(lead.shape) < 2 or min(lead.shape[-2:]) < 2):
            return None
        try:
            return usual_packing(form, lead.shape)
        except ValueError as error:
            self._findings.tensor(
                ("format", form.value),
                where=self._recipe.where("out_format"),
                what=f"{{count}} tensors cannot be stored as {form.value}: {str(error).rstrip('.')}",
                remedy="Leave them out by a filter, a glob or a role.",
                example=f"{aligned.output} {list(lead.shape)}",
            )
            return None
