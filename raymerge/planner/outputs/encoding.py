"""How each output tensor is stored: its dtype, or the packing that makes codes with scales of it.

What goes in comes out: without ``out_format`` and ``dtype`` a tensor is stored as the lead checkpoint has it.
A ``dtype`` alone asks for plain numbers of that dtype, also of what the lead has as codes.

The dtype of each output tensor.

What goes in comes out: without a ``dtype`` in the recipe every tensor keeps the lead checkpoint's. With one,
it replaces the checkpoint's main dtype; tensors that were kept in float32 on purpose stay so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raymerge.architectures import Role, TensorInfo
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.numbers import code_dtype
from raymerge.checkpoints.quantisation.encoding import Format, Packing, encoding_of, usual_packing
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.planner.findings import Findings
from raymerge.planner.matching.align import Aligned
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.outputs.bound_output import output_subject, output_subjects
from raymerge.recipes import Recipe
from raymerge.recipes.settings import FormatChoice


def output_dtype(wanted: DType | None, tensor: StoredTensor, role: Role, main: DType) -> DType:
    """Dtype in which an output tensor is written.

    Args:
        wanted: what the recipe asks for; None for the checkpoint's own.
        tensor: the lead checkpoint's tensor.
        role: its role; a router's selection bias stays float32 whatever the recipe says.
        main: dtype of most of the lead checkpoint's bytes.
    """
    if wanted is None or not tensor.dtype.is_mergeable:
        return tensor.dtype
    kept_on_purpose = tensor.dtype is DType.F32 and (main is not DType.F32 or role is Role.ROUTER_BIAS)
    return tensor.dtype if kept_on_purpose else wanted


_USUAL = frozenset({Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT})
"""Parts whose matrices publishers quantise; embeddings, heads, norms and routers stay plain."""
_OF_MODULES = frozenset(Format) - {Format.FP8_BLOCK, Format.MXFP4}
"""Formats of compressed-tensors, which packs the weight of one module at a time."""
_BY_OUTPUTS = frozenset({"out_in", "out_in_interleaved"})
"""How stacks of experts lie whose matrices have a row for each output."""
_GPT_OSS = "gpt_oss"
_SAME, _PLAIN = "same", "bf16"
"""Words of ``out_format`` that are no format of codes."""
_WEIGHT = ".weight"


class Written(NamedTuple):
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
        self._held: set[FormatChoice] = set()

    def of(self, aligned: Aligned, lead: StoredTensor, role: Role) -> Written:
        """How an output is stored.

        Args:
            aligned: the output.
            lead: the lead's tensor.
            role: what it does within its layer.
        """
        source = aligned.span.lead.source
        own = self._logical[source].packing(lead.name)
        choice = self._choice(aligned, lead)
        if choice is None or choice.value == _SAME:
            if own is not None and (choice is not None or self._wanted is None):
                return Written(code_dtype(own), own)
            return self._plain(lead, role, source, is_freed=own is not None)
        if choice.value != _PLAIN and own is not None and own.format is self._format(choice, source):
            return Written(code_dtype(own), own)
        if choice.value != _PLAIN and not self._speaks_of(choice, lead, source):
            return self._plain(lead, role, source, is_freed=own is not None)
        is_unread = own is None and not lead.dtype.is_mergeable
        packing = None if choice.value == _PLAIN or is_unread else self._packing(aligned, lead, choice)
        if packing is None:
            asked = DType.BF16 if choice.value == _PLAIN else None
            return self._plain(lead, role, source, is_freed=own is not None or is_unread, asked=asked)
        return Written(code_dtype(packing), packing)

    def dtype_of_rows(self, aligned: Aligned, lead: StoredTensor, written: Written) -> DType:
        """The dtype of a tensor that is put together by token, which is no codes; else a finding says so."""
        if written.packing is None:
            return written.dtype
        self._findings.tensor(
            ("format by token",),
            where=self._recipe.where("out_format"),
            what="{count} tensors have other rows than those that are stored, as the tokens are others, and "
            f"cannot be stored as {written.packing.format.word}",
            remedy="Keep them as plain numbers, or convert the merged model.",
            example=aligned.output,
        )
        return lead.dtype

    def report_unused(self) -> None:
        """Report every line that held for no tensor: most likely it is misspelled."""
        asked = self._recipe.out_format
        for index, choice in enumerate(asked.choices if asked is not None else ()):
            if choice.selector is not None and choice not in self._held:
                self._findings.add(
                    Problem(
                        self._recipe.where("out_format", index),
                        "this line holds for no tensor of the output.",
                        "Correct its filter, glob, role or layers, put it before the lines that speak of the "
                        "same tensors, or remove it.",
                    )
                )

    def _choice(self, aligned: Aligned, lead: StoredTensor) -> FormatChoice | None:
        """The line that holds for an output: the first that speaks of it, or the one without a selector."""
        asked, source = self._recipe.out_format, aligned.span.lead.source
        if asked is None:
            return None
        subjects = output_subjects(aligned, self._logical) if asked.is_by_name else ()
        for choice in asked.matching(subjects or (output_subject(aligned, self._logical),)):
            if not choice.is_for(subjects):
                self._partly_named(aligned, choice)
                return None
            is_for_all = choice.selector is None or choice.value in (_SAME, _PLAIN)
            if is_for_all or self._speaks_of(choice, lead, source):
                self._held.add(choice)
                return choice
        return None

    def _partly_named(self, aligned: Aligned, choice: FormatChoice) -> None:
        """Report a line that names some matrices of a tensor, which has one format."""
        self._held.add(choice)
        self._findings.tensor(
            ("format of a part", choice.value),
            where=self._recipe.where("out_format"),
            what=f"a line with the value {choice.value} names some of the matrices that {{count}} tensors "
            "hold, and a tensor has one format",
            remedy="Name all matrices of these tensors.",
            example=aligned.output,
        )

    def _speaks_of(self, choice: FormatChoice, lead: StoredTensor, source: int) -> bool:
        """Whether a line that asks for codes is meant for a tensor.

        One that names tensors is meant for all of them. Any other is for the matrices that modules multiply
        with; of those, without a role, for what publishers quantise.
        """
        selector = choice.selector
        if selector is not None and selector.is_by_name:
            return True
        info = self._logical[source].infos[lead.name]
        if not self._is_multiplied(info, lead, source):
            return False
        if selector is not None and selector.roles:
            return info.part in _USUAL or info.part in selector.roles
        if info.part not in _USUAL or info.role is Role.VISION:
            return False
        # gpt-oss has no codes but its experts', and its loader takes no others.
        return not self._is_gpt_oss(choice, source) or self._is_turned_stack(lead, source)

    def _is_multiplied(self, info: TensorInfo, lead: StoredTensor, source: int) -> bool:
        """Whether a tensor is a matrix of a module, or of many, that is not kept in float32 on purpose."""
        if lead.dtype is DType.F32 and self._main[source] is not DType.F32:
            return False
        is_weight = lead.name.endswith(_WEIGHT) or info.part is Role.EXPERT
        return is_weight and not info.is_bias and len(lead.shape) > 1 and min(lead.shape[-2:]) > 1

    def _is_gpt_oss(self, choice: FormatChoice, source: int) -> bool:
        return choice.value == Format.MXFP4 and self._logical[source].model_type == _GPT_OSS

    def _is_turned_stack(self, lead: StoredTensor, source: int) -> bool:
        return self._logical[source].is_turned(lead.name, Format.MXFP4)

    def _plain(
        self, lead: StoredTensor, role: Role, source: int, *, is_freed: bool, asked: DType | None = None
    ) -> Written:
        """How plain numbers are stored; ``is_freed`` where they were codes, ``asked`` where no dtype is.

        Of codes that are not read the maker of the rows says so. Other integers never come here.
        """
        wanted = self._wanted or asked
        if is_freed or (wanted is not None and not lead.dtype.is_mergeable):
            return Written(wanted or DType.BF16)
        return Written(output_dtype(wanted, lead, role, self._main[source]))

    def _packing(self, aligned: Aligned, lead: StoredTensor, choice: FormatChoice) -> Packing | None:
        """What makes codes of a tensor as a line asks; None with a finding."""
        source = aligned.span.lead.source
        form = self._format(choice, source)
        shape = self._logical[source].shape_in(lead.name, form)
        fault, reason = self._fault(form, lead, source), ""
        if not fault:
            try:
                return self._fresh(lead.name, form, shape, source)
            except ValueError as error:
                reason = str(error).rstrip(".")
        self._findings.tensor(
            ("format", choice.value, fault or ""),
            where=self._recipe.where("out_format"),
            what=f"{{count}} tensors cannot be stored as {choice.value}: {fault or reason}",
            remedy=f"Put a line before it that speaks of them, such as {{glob: '{aligned.output}', value: "
            f"{_PLAIN}}}, or choose another format.",
            example=f"{aligned.output} {list(shape)}",
        )
        return None

    def _format(self, choice: FormatChoice, source: int) -> Format:
        form = Format(choice.value)
        if form is Format.MXFP4 and not self._is_gpt_oss(choice, source):
            return Format.MXFP4_ROWS
        return form

    def _fault(self, form: Format, lead: StoredTensor, source: int) -> str | None:
        """Why no loader takes a tensor in a format, or None."""
        if form is Format.MXFP4 and not self._is_turned_stack(lead, source):
            return "gpt-oss has its experts in it and nothing else"
        if self._logical[source].infos[lead.name].part is Role.EMBEDDING:
            return "loaders take codes for the weights of linear layers alone, and embeddings are none"
        is_of_module = lead.name.endswith(_WEIGHT) and len(lead.shape) == 2
        if form in _OF_MODULES and not is_of_module:
            return "compressed-tensors packs the weight of one module, a matrix, and no stack of them"
        if form is Format.FP8_BLOCK and not is_of_module and len(lead.shape) > 1:
            return self._wrong_stack(lead, source)
        return None

    def _wrong_stack(self, lead: StoredTensor, source: int) -> str | None:
        """Why no loader takes what is not the weight of one module in block FP8, or None."""
        kind = self._logical[source].kind(lead.name)
        if kind is None or len(lead.shape) < 3:
            return "loaders take the weights of modules in it and stacks of experts, and nothing else"
        if kind not in _BY_OUTPUTS:
            known = "config and family do not tell that these do" if kind == "unknown" else "these do not"
            return f"loaders take experts in it that lie [experts, out, in], and {known}"
        return None

    def _fresh(self, name: str, form: Format, shape: tuple[int, ...], source: int) -> Packing:
        """As other tensors of the source are stored that are in this format, or else as publishers do it."""
        like = self._logical[source].packed_like(name, form)
        return usual_packing(form, shape) if like is None else encoding_of(like.packing).packing(shape)
