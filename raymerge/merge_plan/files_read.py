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
    """The files that each segment reads; ops that another op writes read nothing."""
    inputs = _of_inputs(plan)
    of_ops = [
        Files().union(*inputs[first : first + count]) if copy_of < 0 and made_with < 0 else Files()
        for copy_of, made_with, first, count in plan.columns(
            "ops", "copy_of", "made_with", "first_input", "num_inputs"
        )
    ]
    segments = plan.columns("segments", "first_op", "num_ops")
    return tuple(Files().union(*of_ops[first : first + count]) for first, count in segments)


def _of_inputs(plan: Plan) -> list[Files]:
    """The files that each input is read from: with its scales, and with all inputs that it is gathered
    from."""
    gathered = _of_gathers(plan)
    scales = list(plan.columns("scales", "key", "tensor_key", "zeros_key"))
    files: list[Files] = []
    for source, key, gather, own in plan.columns("inputs", "source", "key", "gather", "scales"):
        keys = (key, *(scales[own] if own >= 0 else ()))
        read = Files((source, each) for each in keys if each)
        files.append(gathered[gather] if gather >= 0 else read)
    return files


def _of_gathers(plan: Plan) -> list[Files]:
    factors = list(plan.columns("factors", "source", "key"))
    gather_inputs = [
        Files(((source, key), *factors[first : first + count]))
        for source, key, first, count in plan.columns(
            "gather_inputs", "source", "key", "first_factor", "num_factors"
        )
    ]
    spans = plan.columns("gathers", "first_gather_input", "num_gather_inputs")
    return [Files().union(*gather_inputs[first : first + count]) for first, count in spans]
