"""Tables of integers that give each token its experts, as the first layers of DeepSeek-V4 have them.

Numbers of experts have no mean. Routers that are taken from one model bring its tables along; where several
are merged their tables must be equal, as experts of equal numbers were trained on other tokens otherwise. No
header tells, so that planning reads these tables, a few megabytes each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from raymerge.architectures.rules import Role
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint
from raymerge.errors import Findings
from raymerge.merge_plan.expressions import Output, make_expression
from raymerge.methods import Settings
from raymerge.methods.internal import RENUMBER
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.input_resolver import whole_read
from raymerge.planner.matching.method_assignment import BoundOutput
from raymerge.planner.outputs.ops import matrix_op

_LEAST_BITS = 16


def is_routing_table(tensor: StoredTensor, part: Role) -> bool:
    """Whether a tensor that holds no codes is numbers of experts, ``[tokens, experts of a token]``."""
    is_number = tensor.dtype.is_mergeable or tensor.dtype.bits < _LEAST_BITS
    return part is Role.ROUTER and not is_number and len(tensor.shape) == 2


def renumbered(table: StoredTensor, numbers: Sequence[int], store: int) -> Output:
    """The output of a table whose experts have these numbers now."""
    settings = Settings(values={}, sources=({},), numbers=tuple(numbers))
    expression = make_expression(RENUMBER, settings, has_base=False, cast=table.dtype)
    op = matrix_op([whole_read(store, table)], table.shape, table.name, expression)
    return Output(table.name, table.dtype, table.shape, (op,), False)


def has_unknown_experts(checkpoint: Checkpoint, table: StoredTensor, num_experts: int) -> bool:
    """Whether a table names experts that are not there; False where it is not written yet."""
    if checkpoint.unwritten is not None:
        return False
    entries = _entries(checkpoint, table)
    return bool(((entries < 0) | (entries >= num_experts)).any())


def _entries(checkpoint: Checkpoint, table: StoredTensor) -> npt.NDArray[np.integer]:
    with checkpoint.open() as store:
        data = store.read(table.key, table.offset, table.nbytes)
    return np.frombuffer(data, table.dtype.numpy_name).reshape(table.shape)


class RoutingTables:
    def __init__(self, sources: Sequence[Source], findings: Findings) -> None:
        self._sources = sources
        self._findings = findings
        self._unwritten: dict[str, str] = {}

    def compare(self, chosen: BoundOutput, *, may_lack: bool) -> None:
        """Report each model that is merged whose table differs from the lead's, which the output gets, by
        its numbers; and each that has none."""
        lead = self._sources[chosen.aligned.span.lead.source]
        own = lead.checkpoint.tensors[chosen.aligned.lead]
        for member, name in chosen.members:
            source = self._sources[member.source]
            table = source.checkpoint.tensors.get(name)
            if source is lead:
                continue
            if table is None:
                if not may_lack:
                    self._report_lack(source, own)
                continue
            missing = next((each for each in (source, lead) if each.checkpoint.unwritten is not None), None)
            if missing is not None:
                self._unwritten.setdefault(missing.name, own.name)
            elif not np.array_equal(_entries(lead.checkpoint, own), _entries(source.checkpoint, table)):
                self._report(source, lead, table)

    def notes(self) -> Iterator[str]:
        for name, table in self._unwritten.items():
            yield (
                f"{name} is not made yet, so its tables of experts by token (such as {table}) are not "
                "compared with those of the others; the output gets the lead's"
            )

    def _report_lack(self, source: Source, own: StoredTensor) -> None:
        self._findings.tensor(
            source.name,
            "it lacks {count} tables that give tokens their experts, so that its routers may have been "
            "trained on other tokens",
            "Use a complete model, or take routers and tables from one that has both: 'router: MODEL'.",
            example=f"{own.name} {own.dtype.value}{list(own.shape)}",
        )

    def _report(self, source: Source, lead: Source, table: StoredTensor) -> None:
        self._findings.tensor(
            source.name,
            f"{{count}} tables that give tokens their experts are not those of {lead.name}, so that experts "
            "of equal numbers were trained on other tokens",
            "Merge models with equal tables, or take routers and tables from one of them: 'router: base', "
            "or 'router: MODEL'.",
            example=f"{table.name} {table.dtype.value}{list(table.shape)}",
        )
