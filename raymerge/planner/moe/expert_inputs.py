"""Where the experts of an output come from: the base and the models whose experts are added to it.

What is wanted and is not there, or has another shape, becomes a finding; what is used, a fate.
"""

from __future__ import annotations

from raymerge.architectures import Role
from raymerge.architectures.expert_fields import expert_fields
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import main_dtype
from raymerge.dtypes import DType
from raymerge.merge_plan.dispositions import Disposition, Fate, Fates, Rule
from raymerge.merge_plan.expressions import Output, Part, Read, Row, conversion_expression
from raymerge.planner.findings import Findings
from raymerge.planner.inputs.quantised import PlainNumbers
from raymerge.planner.inputs.source import holdings
from raymerge.planner.matching.input_resolver import InputResolver, ResolvedInput
from raymerge.planner.matching.logical import Block
from raymerge.planner.moe.expert_blocks import ExpertBlock, Kind
from raymerge.planner.moe.expert_moves import Origin
from raymerge.planner.moe.expert_rows import Share, fate_of, share_row
from raymerge.planner.outputs.rows import RowMaker, output_dtype

BASE = 0


class ExpertInputs:
    """The tensors of the models of one recipe; findings and fates collect on the way."""

    def __init__(self, resolver: InputResolver, dtype: DType | None, findings: Findings) -> None:
        self.findings = findings
        self.fates = Fates(holdings(resolver.sources))
        self.base = resolver.sources[BASE]
        self.logical = resolver.logical[BASE]
        self.plain = PlainNumbers(resolver.sources, findings)
        self._resolver = resolver
        self._sources = resolver.sources
        self._maker = RowMaker(resolver, self.plain, findings, self.fates)
        self._wanted = dtype
        self._main = main_dtype(self.base.checkpoint)
        fields = [expert_fields(each.checkpoint.config, each.rules) for each in resolver.sources]
        self._counts = [each.count.value if each is not None else 0 for each in fields]
        self._dense = [_dense_matrices(resolver, source.index) for source in resolver.sources]

    def num_experts(self, source: int) -> int:
        return self._counts[source]

    def name(self, source: int) -> str:
        return self._sources[source].name

    def dtype_of(self, tensor: StoredTensor, role: Role) -> DType:
        """What an output with the role of one of the base's tensors is written in."""
        return output_dtype(self._wanted, tensor, role, self._main)

    def kept(self, name: str) -> Output | None:
        """A tensor of the base as it is, with what an adapter adds to it; None with a finding."""
        tensor = self.base.checkpoint.tensors[name]
        role = self.logical.part(name)
        is_plain = role is not Role.BUFFER and not self.plain.is_integer(BASE, tensor)
        dtype = self.dtype_of(tensor, role) if is_plain else tensor.dtype
        if self._resolver.is_changed(BASE, name):
            return self._adapted(tensor, dtype)
        whole = Share(BASE, tensor, 0, tensor.num_elements)
        if not self.may_write(whole, dtype):
            return None
        row, fate = share_row(whole, tensor.shape, name, dtype)
        self.fates.settle(BASE, name, fate)
        return Output(name, dtype, tensor.shape, (row,), dtype.is_mergeable and role is not Role.BUFFER)

    def share(self, kind: Kind, origin: Origin) -> Share | None:
        """What an expert has in a tensor that is stored as the base's; None where it has it otherwise."""
        source = self._sources[origin.source]
        if origin.expert is None or source.model_type != self.base.model_type:
            return None
        name = kind.name(origin.expert)
        tensor = source.checkpoint.tensors.get(name)
        if tensor is None or self._resolver.is_changed(origin.source, name):
            return None
        count = self._counts[origin.source]
        if tensor.shape != kind.shape(count):
            return None
        # A bias that lies as [1, experts] has one element for each.
        length = tensor.num_elements // (count if kind.start(1) else 1)
        return Share(origin.source, tensor, kind.start(origin.expert), length)

    def may_write(self, share: Share, dtype: DType) -> bool:
        """Whether bytes may be copied, or numbers converted; a finding where they are codes to convert."""
        is_code = self.plain.is_quantised(share.source, share.tensor)
        if share.tensor.dtype is dtype and not (is_code and self._wanted is not None):
            return True
        return self.plain.check(share.source, share.tensor)

    def matrix(self, block: ExpertBlock, origin: Origin, logical: str) -> ResolvedInput | None:
        """Where an expert's model has the matrix that expert 0 of the block calls so; None with a finding."""
        if origin.expert is None:
            name = self._dense_name(block, origin.source, logical)
        else:
            name = renumbered(logical, origin.expert)
        found = self._resolver.find(origin.source, name, name)
        if found is None:
            self.missing(origin.source, name)
        return found

    def _dense_name(self, block: ExpertBlock, source: int, logical: str) -> str:
        """What a dense model calls a matrix; the expert's own name where it has no such one."""
        projection, _, leaf = logical.rpartition(marked(0))[2].partition("_proj.")
        if block.is_mtp or leaf not in ("weight", "bias"):
            return logical
        return self._dense[source].get((block.name_layer, projection, leaf == "bias"), logical)

    def is_plain(self, tensor: StoredTensor) -> bool:
        return self.plain.check(BASE, tensor)

    def named(self, source: int, logical: str) -> ResolvedInput | None:
        return self._resolver.find(source, logical, logical)

    def fits(self, source: int, resolved: ResolvedInput, shape: tuple[int, ...], logical: str) -> bool:
        if resolved.place.shape == shape:
            return self.plain.check(source, resolved.place.tensor)
        name = self._sources[source].name
        self.findings.tensor(
            ("shape", name),
            where=name,
            what=f"{{count}} matrices have other shapes than the experts of {self.base.name}",
            remedy="Take experts of the same width and hidden size.",
            example=f"{logical} is {list(resolved.place.shape)} here and {list(shape)} there",
        )
        return False

    def settle(self, resolved: ResolvedInput, source: int, fate: Fate) -> None:
        if resolved.factor is not None and fate.disposition is not Disposition.MERGED:
            fate = fate._replace(disposition=Disposition.MERGED, rule=Rule.ADAPTED)
        self._maker.settle(resolved, source, fate)

    def unknown_layout(self, name: str) -> None:
        self.findings.tensor(
            ("layout", self.base.name),
            where=self.base.name,
            what=f"{{count}} tensors hold several experts in an order that model_type "
            f"'{self.base.model_type}' does not tell, and single matrices are needed here",
            remedy="'keep' and 'drop' work on them, as does adding experts that are stored alike.",
            example=name,
        )

    def _adapted(self, tensor: StoredTensor, dtype: DType) -> Output | None:
        blocks = self.logical.blocks(tensor.name)
        if blocks is None:
            self.unknown_layout(tensor.name)
            return None
        found = [self._adapted_row(tensor, block, dtype) for block in blocks]
        rows = tuple(row for row in found if row is not None)
        return Output(tensor.name, dtype, tensor.shape, rows, True) if len(rows) == len(found) else None

    def _adapted_row(self, tensor: StoredTensor, block: Block, dtype: DType) -> Row | None:
        parts: list[Part] = []
        reads: list[Read] = []
        for logical, place in block.members:
            found = self._resolver.find(BASE, tensor.name, logical)
            if found is None or not self.fits(BASE, found, place.shape, logical):
                return None
            self.settle(found, BASE, fate_of(1, tensor.name))
            reads.append(found.read(len(parts)))
            parts.append(Part(logical, place.shape, place.view))
        return Row(block.num_elements, conversion_expression(dtype), tuple(parts), tuple(reads))

    def missing(self, source: int, name: str) -> None:
        where = self._sources[source].name
        self.findings.tensor(
            ("missing", where),
            where=where,
            what=f"it lacks {{count}} matrices that the experts of {self.base.name} have",
            remedy="It must have them for every layer of experts in base_model, also for "
            "multi-token-prediction layers.",
            example=name,
        )


def marked(expert: int) -> str:
    return f".experts.{expert}."


def renumbered(logical: str, expert: int, *, of: int = 0) -> str:
    """The canonical name of a matrix of one expert as that of another."""
    return marked(expert).join(logical.rsplit(marked(of), 1))


def _dense_matrices(resolver: InputResolver, source: int) -> dict[tuple[int, str, bool], str]:
    """The feed-forward matrices of a dense model by layer, projection, and whether they are biases."""
    main = resolver.sources[source].layer_stack(None)
    found: dict[tuple[int, str, bool], str] = {}
    for name, info in resolver.logical[source].infos.items():
        if main is None or info.stack != main.prefix or info.layer is None or info.projection is None:
            continue
        if info.part is Role.MLP and name.endswith((".weight", ".bias")):
            found[info.layer, info.projection, info.is_bias] = name
    return found
