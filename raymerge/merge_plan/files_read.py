"""Which files of its sources each segment of a plan reads."""

from __future__ import annotations

from dataclasses import dataclass

from raymerge.merge_plan.tables import Plan
from raymerge.storage.addresses import shown


@dataclass(frozen=True, slots=True)
class SourceFile:
    source: int
    root: str
    key: str
    nbytes: int
    version: str
    """What the driver's store says of when it was written; "" where any will do."""

    @property
    def path(self) -> str:
        return f"{shown(self.root)}/{self.key}"


Files = frozenset[tuple[int, str]]
"""Files by the source's index and the key."""


def files_read(plan: Plan) -> tuple[Files, ...]:
    """The files that each segment reads; rows that another row writes read nothing."""
    inputs = _of_inputs(plan)
    of_rows = [
        Files().union(*inputs[first : first + count]) if copy_of < 0 and made_with < 0 else Files()
        for copy_of, made_with, first, count in plan.columns(
            "rows", "copy_of", "made_with", "first_input", "num_inputs"
        )
    ]
    segments = plan.columns("segments", "first_row", "num_rows")
    return tuple(Files().union(*of_rows[first : first + count]) for first, count in segments)


def _of_inputs(plan: Plan) -> list[Files]:
    """The files that each input is read from: with its scales, and with all terms that it is assembled of."""
    assembled = _of_assemblies(plan)
    scales = list(plan.columns("scales", "key", "tensor_key"))
    files: list[Files] = []
    for source, key, assembly, own in plan.columns("inputs", "source", "key", "assembly", "scales"):
        keys = (key, *(scales[own] if own >= 0 else ()))
        read = Files((source, each) for each in keys if each)
        files.append(assembled[assembly] if assembly >= 0 else read)
    return files


def _of_assemblies(plan: Plan) -> list[Files]:
    factors = list(plan.columns("factors", "source", "key"))
    terms = [
        Files(((source, key), *factors[first : first + count]))
        for source, key, first, count in plan.columns("terms", "source", "key", "first_factor", "num_factors")
    ]
    spans = plan.columns("assemblies", "first_term", "num_terms")
    return [Files().union(*terms[first : first + count]) for first, count in spans]
