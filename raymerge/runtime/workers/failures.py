"""What workers were lost over: which parts they had in hand, where they were, and when it is enough."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from raymerge.errors import IncompleteError
from raymerge.units import format_size

ATTEMPTS = 3
"""Workers that a part may take down, or that may fail to start in a row, before the run gives up."""
_NODE_ATTEMPTS = 3
"""Workers that a node may lose without one receipt between, before no more are started there."""
_LEAST_SPARE, _SPARE = 12, 3
"""Workers that may be lost without one receipt between: so many, or so many for each that there is."""
_KEPT = "What is done is kept: the same command goes on there"


class Cause(StrEnum):
    """Why a worker is lost."""

    ENDED = "ended"
    """Its process ended, and nobody knows better."""
    MEMORY = "memory"
    """It was ended because memory ran out."""
    STILL = "still"
    """None of its parts got on for too long."""
    UNREACHABLE = "unreachable"
    """A call to it failed; it may be alive, and its parts are not to blame."""
    NODE = "node"
    """Its node is gone; its parts are not to blame."""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """The end of one worker."""

    cause: Cause
    reason: str
    numbers: tuple[int, ...]
    node: str
    """Where it was; "" where that is not known."""

    @property
    def is_blamed(self) -> bool:
        """Whether the parts in hand may be what it was lost over."""
        return self.cause in (Cause.ENDED, Cause.STILL)


class WorkerFailures:
    """Counts failures of workers in one call of ``Pool.run``."""

    def __init__(self, part: str, workers: int) -> None:
        self._part = part
        self._most = max(_LEAST_SPARE, _SPARE * workers)
        self._took_down: Counter[int] = Counter()
        self._budgets: dict[int, int] = {}
        self._short: set[int] = set()
        self._on_nodes: Counter[str] = Counter()
        self._since_receipt = 0

    def is_alone(self, number: int) -> bool:
        """Whether a part is to be in hand alone: for the blame to be clear, or the memory enough."""
        return self._took_down[number] > 0 or number in self._short

    def budget(self, number: int) -> int | None:
        """Bytes of memory that a part may use; None for what the work says."""
        return self._budgets.get(number)

    @property
    def shunned(self) -> frozenset[str]:
        """Nodes on which workers die, one after the other."""
        return frozenset(node for node, count in self._on_nodes.items() if count >= _NODE_ATTEMPTS)

    def progress(self, node: str) -> None:
        self._since_receipt = 0
        del self._on_nodes[node]

    def add(self, failure: WorkerFailure) -> None:
        """Count a failure.

        Raises:
            IncompleteError: a part has taken down too many workers, or too many were lost without a receipt.
        """
        self._since_receipt += 1
        if failure.node and failure.cause is not Cause.NODE:
            self._on_nodes[failure.node] += 1
        for number in failure.numbers if failure.is_blamed else ():
            self._took_down[number] += 1
        worn = next((number for number in failure.numbers if self._took_down[number] >= ATTEMPTS), None)
        if worn is not None:
            raise IncompleteError(
                f"{self._part} {worn} took down {ATTEMPTS} workers, the last with: {failure.reason}. "
                f"{_KEPT}, perhaps with a smaller --memory or fewer --workers."
            )
        if self._since_receipt >= self._most:
            raise IncompleteError(
                f"{self._since_receipt} workers were lost, and nothing was made between, the last with: "
                f"{failure.reason}. {_KEPT}."
            )

    def lessen(self, number: int, budget: int | None, reason: str) -> None:
        """Have a part that ran out of memory done alone, with a smaller budget if there is one.

        Raises:
            IncompleteError: there is none, and it was alone already.
        """
        if budget is not None:
            self._budgets[number] = budget
        elif number in self._short:
            raise IncompleteError(no_memory(self._part, number, self._budgets.get(number), reason))
        self._short.add(number)


def no_memory(part: str, number: int, budget: int | None, reason: str) -> str:
    """What is said when a part runs out of the least memory that it can be done with."""
    had = "" if budget is None else f" of {format_size(budget)}"
    return (
        f"{part} {number} ran out of memory, alone on a worker and with the least budget{had} that it can be "
        f"made with ({reason}). {_KEPT}, with fewer --workers, or where more memory is free."
    )
