"""What is stored against what is expected: as near as the dtype or the format can come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from raymerge.checkpoints.quantisation.encoding import Format
from raymerge.errors import Problem
from raymerge.merge_plan.expressions import Part
from raymerge.methods import Expected
from raymerge.verifier.findings import AGAIN, Findings
from raymerge.verifier.numbers import Floats, nearest_coded_distance, nearest_distance
from raymerge.verifier.plan_ops import PlanRow, written
from raymerge.verifier.stored import CodeFacts, Reader, elements_of

_TOO_OPEN = 2.0**-6
"""Share of the largest magnitudes of a run that a doubt must stay below for an element to be judged."""


@dataclass(frozen=True, slots=True)
class Coding:
    """Of a run of codes."""

    steps: Floats
    """What each is multiplied by."""
    is_filled: NDArray[np.bool_]
    """Whether its block needs so much: a block has the scale that was made for its largest number, or one in
    which every number of it is exactly a code."""

    def at(self, places: NDArray[np.int64]) -> Coding:
        """Some of them."""
        return Coding(self.steps[places], self.is_filled[places])


class Written:
    """The stored elements of one logical tensor of a row."""

    def __init__(self, row: PlanRow, part: Part, reader: Reader, *, first: int) -> None:
        """
        Args:
            row: whose bytes they are.
            part: the logical tensor.
            reader: of the output.
            first: index of the row's first element within the logical tensor.
        """
        self._row, self._part = row, part
        read = written(row, part.view)
        self._elements = elements_of(read, reader, first=first)
        self._facts = None
        if read.scales is not None:
            self._facts = CodeFacts(
                read, read.scales, reader, first=first, total=prod(part.shape), is_joined=row.is_joined
            )
        self.held = self._elements.held * (1 if self._facts is None else 3)
        """Bytes of memory that it takes beside a run."""

    @property
    def form(self) -> Format | None:
        """The format of codes; None where elements are plain numbers."""
        encode = self._row.expression.encode
        return None if encode is None else encode.format

    @property
    def block_width(self) -> int:
        """Columns that share a scale; 1 where elements are plain numbers."""
        return 1 if self._facts is None else self._facts.width

    def peaks(self, start: int, stop: int) -> list[int]:
        """A largest element of every block that a run touches; see ``CodeFacts.peaks``."""
        return [] if self._facts is None else self._facts.peaks(start, stop)

    def read(self, start: int, stop: int) -> tuple[Floats, Coding | None]:
        """A run of elements, and what is to be known of codes."""
        values, _ = self._elements.read(start, stop)
        if self._facts is None:
            return values, None
        steps, filled = (each.read(start, stop)[0] for each in (self._facts.steps, self._facts.is_filled))
        return values, Coding(steps, filled > 0)

    def distance(self, values: Floats, coding: Coding | None) -> Floats:
        """How far what can be stored is from values; negative where they are beyond it."""
        if self.form is None or coding is None:
            return nearest_distance(self._row.expression.cast, values)
        near = nearest_coded_distance(self.form, values, coding.steps)
        # Under a scale that its block has no need of, every number is a code times it, or the scale is wrong.
        return np.where(coding.is_filled | (near < 0), near, 0.0)

    def where(self, index: int) -> str:
        """What messages call an element."""
        place = ", ".join(map(str, np.unravel_index(index, self._part.shape))) if self._part.shape else ""
        logical = self._part.logical
        inside = "" if logical == self._row.tensor else f" ({logical})"
        return f"{self._row.tensor}{inside}[{place}]"


def judge(
    expected: Expected,
    output: Written,
    span: tuple[int, int],
    findings: Findings,
    name: str,
    *,
    only: Sequence[int] | None = None,
) -> int:
    """Compare a run of stored elements with what is expected.

    Every element is compared for which anything can be said; those count as judged of which enough can.

    Args:
        expected: of the run.
        output: what is stored.
        span: first element and stop.
        findings: take what is wrong.
        name: what messages call the checkpoint.
        only: indices of the elements that are compared; None for all.

    Returns:
        How many were judged.
    """
    found, coding = output.read(*span)
    allowed = _allowed(expected.values, expected.doubt, output, coding, found)
    is_right = _agrees(found, expected.values, allowed)
    is_near = np.zeros(found.shape, dtype=bool)
    for places, values in expected.others:
        own = None if coding is None else coding.at(places)
        also = _allowed(values, expected.doubt[places], output, own, found[places])
        is_near[places] = True
        is_right[places] |= _agrees(found[places], values, also)
    is_asked = np.full(found.shape, only is None)
    if only is not None:
        is_asked[np.asarray(only, dtype=np.int64) - span[0]] = True
    largest = max(float(np.abs(expected.values).max(initial=0.0)), 2.0**-126)
    with np.errstate(invalid="ignore"):
        is_open = ~(expected.doubt <= _TOO_OPEN * largest)
    judged = int((is_asked & ~is_open).sum())
    findings.open += int((is_asked & is_open).sum())
    findings.judged += judged
    findings.near += int((is_near & is_asked & ~is_open).sum())
    wrong = np.flatnonzero(~is_right & is_asked & np.isfinite(expected.doubt))
    if len(wrong):
        findings.add(_problem(wrong, expected, output, (found, allowed), coding, span, name))
    return judged


def _allowed(values: Floats, doubt: Floats, output: Written, coding: Coding | None, found: Floats) -> Floats:
    """How far a stored element may be from a value: no farther than the nearest that can be stored, and twice
    what the value itself may be off. Negative where it cannot be stored at all."""
    near = output.distance(values, coding)
    rounding = 2.0**-23 * np.abs(found) if coding is not None else 0.0
    return np.where(near < 0, -1.0, near + 2 * doubt + rounding)


def _agrees(found: Floats, values: Floats, allowed: Floats) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        is_equal = (found == values) | (np.isnan(found) & np.isnan(values))
        return np.asarray(is_equal | (np.abs(found - values) <= allowed))


def _problem(
    wrong: NDArray[np.int64],
    expected: Expected,
    output: Written,
    stored: tuple[Floats, Floats],
    coding: Coding | None,
    span: tuple[int, int],
    name: str,
) -> Problem:
    """The worst of what is wrong in a run."""
    found, allowed = stored
    with np.errstate(invalid="ignore"):
        excess = np.nan_to_num(np.abs(found - expected.values)[wrong], nan=np.inf)
    worst = int(wrong[int(np.argmax(excess))])
    more = f", and so are {len(wrong) - 1} others near it" if len(wrong) > 1 else ""
    is_near = allowed[worst] >= 0
    limit = f"give or take {allowed[worst]:.3g}" if is_near else "which is beyond what its scale reaches"
    if is_near and coding is not None and not coding.is_filled[worst]:
        limit += ", as the scale of its block is larger than the block needs"
    what = (
        f"it is {found[worst]:.9g}, but recomputed from the sources {expected.values[worst]:.9g}, "
        f"{limit}{more}."
    )
    return Problem(f"{name}: {output.where(span[0] + worst)}", what, AGAIN)
