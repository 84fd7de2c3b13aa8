"""The rows of a plan as an audit reads them: what each was made of, where its bytes are, what they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.merge_plan.expressions import Assembly, Expression, Part, Read, Scales
from raymerge.merge_plan.gathers import read_term, read_view
from raymerge.merge_plan.plan import Plan
from raymerge.merge_plan.tables import read_scales


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of the output."""

    key: str
    """The file."""
    offset: int
    """First byte in it."""
    nbytes: int
    """How many."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One row of the plan."""

    index: int
    """Its number."""
    tensor: str
    """The output tensor that it is a run of."""
    tensor_shape: tuple[int, ...]
    """Shape of that tensor in its file."""
    tensor_offset: int
    """First byte of that tensor in its file."""
    expression: Expression
    """What is computed."""
    first_element: int
    """Index of its first element within the logical tensor."""
    num_elements: int
    """Its elements."""
    place: Place
    """Where its bytes are."""
    made_by: int
    """The row whose receipt has its digest: itself, or the first one of the same content."""
    made_for: str
    """The output tensor that that row is a run of."""
    parts: tuple[Part, ...]
    """Its logical tensors."""
    reads: tuple[Read, ...]
    """Their inputs, by part, the base first where there is one."""
    scales: Scales | None
    """Where its bytes are codes: the scales that were made with them, as places of the output."""
    is_joined: bool
    """Whether it shares the one scale of its matrix with other rows, which may hold larger numbers."""

    @property
    def is_made(self) -> bool:
        """Whether it was computed, and not copied from another row."""
        return self.made_by == self.index

    @property
    def sources(self) -> frozenset[int]:
        """Everything that is read for it, by its index."""
        terms = (term for read in self.reads if read.assembly is not None for term in read.assembly.terms)
        deep = {
            each.source
            for term in terms
            for each in (term.read, *(term.product.factors if term.product is not None else ()))
        }
        return frozenset({*(read.source for read in self.reads), *deep})

    def reads_of(self, part: int) -> tuple[Read, ...]:
        """The inputs of one part."""
        return tuple(read for read in self.reads if read.part == part)


class PlanRows:
    """Reads rows out of a plan's tables."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._expressions: Sequence[Expression] = plan.expressions
        self._encodings = plan.encodings
        self._shards: Sequence[str] = plan["shards"].column("name").to_pylist()

    def segment(self, number: int) -> Iterator[PlanRow]:
        """The rows of a segment, in order."""
        (segment,) = self._plan["segments"].slice(number, 1).to_pylist()
        rows = self._plan["rows"].slice(segment["first_row"], segment["num_rows"]).to_pylist()
        for index, row in enumerate(rows, segment["first_row"]):
            yield self._row(index, row)

    def _row(self, index: int, row: Mapping[str, Any]) -> PlanRow:
        (tensor,) = self._plan["tensors"].slice(row["tensor"], 1).to_pylist()
        expression = self._expressions[row["expression"]]
        parts = tuple(self._parts(row))
        made_by = index if row["copy_of"] < 0 else row["copy_of"]
        return PlanRow(
            index=index,
            tensor=tensor["name"],
            tensor_shape=tuple(tensor["shape"]),
            tensor_offset=tensor["offset"],
            expression=expression,
            first_element=row["first_element"],
            num_elements=row["num_elements"],
            place=self._place(row),
            made_by=made_by,
            made_for=tensor["name"] if made_by == index else self._tensor_of(made_by),
            parts=parts,
            reads=tuple(self._reads(row)),
            scales=self._scales_made(row, expression, parts),
            is_joined=bool(row["joined_with"]),
        )

    def _tensor_of(self, index: int) -> str:
        (row,) = self._plan["rows"].slice(index, 1).to_pylist()
        (tensor,) = self._plan["tensors"].slice(row["tensor"], 1).to_pylist()
        return str(tensor["name"])

    def _place(self, row: Mapping[str, Any]) -> Place:
        return Place(self._shards[row["shard"]], row["offset"], row["nbytes"])

    def _parts(self, row: Mapping[str, Any]) -> Iterator[Part]:
        for part in self._plan["parts"].slice(row["first_part"], row["num_parts"]).to_pylist():
            shape = tuple(part["shape"])
            yield Part(part["logical"], shape, read_view(part["view_offset"], shape, part["view_strides"]))

    def _reads(self, row: Mapping[str, Any]) -> Iterator[Read]:
        for each in self._plan["inputs"].slice(row["first_input"], row["num_inputs"]).to_pylist():
            scales = None
            if each["scales"] >= 0:
                (found,) = self._plan["scales"].slice(each["scales"], 1).to_pylist()
                scales = read_scales(list(found.values()), self._encodings)
            yield Read(
                each["part"],
                each["source"],
                each["key"],
                each["offset"],
                each["nbytes"],
                DType(each["dtype"]),
                read_view(each["view_offset"], each["view_shape"], each["view_strides"]),
                assembly=self._assembly(each["assembly"]),
                scales=scales,
            )

    def _assembly(self, number: int) -> Assembly | None:
        if number < 0:
            return None
        (row,) = self._plan["assemblies"].slice(number, 1).to_pylist()
        terms = self._plan["terms"].slice(row["first_term"], row["num_terms"]).to_pylist()
        runs = self._plan["runs"].slice(row["first_run"], row["num_runs"]).to_pylist()
        factors = [
            self._plan["factors"].slice(term["first_factor"], term["num_factors"]).to_pylist()
            for term in terms
        ]
        return Assembly(
            num_rows=row["num_rows"],
            num_columns=row["num_columns"],
            terms=tuple(read_term(term, own) for term, own in zip(terms, factors, strict=True)),
            runs=tuple((run["to_row"], run["from_row"], run["count"], run["term"]) for run in runs),
            real_rows=row["real_rows"],
        )

    def _scales_made(
        self, row: Mapping[str, Any], expression: Expression, parts: Sequence[Part]
    ) -> Scales | None:
        """The scales that were written with a row of codes, as those of an input are described."""
        if expression.encode is None:
            return None
        places = [
            self._place(self._plan["rows"].slice(row[kind], 1).to_pylist()[0]) if row[kind] >= 0 else None
            for kind in ("scales", "tensor_scale")
        ]
        own, whole = places
        return Scales(
            encoding=expression.encode,
            columns=parts[0].columns,
            key="" if own is None else own.key,
            offset=0 if own is None else own.offset,
            nbytes=0 if own is None else own.nbytes,
            tensor_key="" if whole is None else whole.key,
            tensor_offset=0 if whole is None else whole.offset,
        )


def written(row: PlanRow, view: View | None) -> Read:
    """The bytes of a row as an input that an audit reads; of one part, by its view."""
    place = row.place
    return Read(0, 0, place.key, place.offset, place.nbytes, row.expression.cast, view, scales=row.scales)
