"""What the rules of observations look at, and the words that they say it in."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.verifier.measurements import Floats, Measurements, Report
from raymerge.verifier.observations.correspondence import (
    Moved,
    is_matrix,
    moved_experts,
    moved_layers,
    moved_rows,
    related,
    weight_cosines,
)

Severity: TypeAlias = Literal["problem", "note"]

UNRELATED = 0.3
"""Cosine of the weights of two models: of those trained apart it is near 0, of a heavy fine-tune 0.9."""
FAR = 0.5
"""Relative changes below it are of training: heavy training gives 0.3, but zeros 1 and noise 1.4."""
FARTHER, DEVIATIONS = 2.5, 5.0
"""A damaged layer or tensor is as many times the median of its like away, and as many standard deviations of
their logarithms, as the median absolute deviation gives them, which outliers leave alone."""
STANDS_OUT, STANDS_OUT_CHANGE = 8.0, 0.05
"""Times the median, and relative change, from where a layer is named though training can explain it."""
FEWEST = 4
"""Layers or tensors from which a median says what is usual."""
NAMED = 3


@dataclass(frozen=True, slots=True)
class Observation:
    kind: str
    severity: Severity
    sentence: str
    remedy: str = ""
    layers: tuple[int, ...] = ()
    roles: tuple[str, ...] = ()
    parents: tuple[int, ...] = ()
    """Indices, from 0."""
    tensors: tuple[str, ...] = ()


problem = partial(Observation, severity="problem")
note = partial(Observation, severity="note")


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    report: Report
    measured: Measurements
    """Rows of finite numbers."""
    whole: Measurements
    """One row, the sum of all matrices; none where nothing was measured."""
    matrices: Measurements
    names: tuple[str, ...]
    roles: Mapping[str, Floats]
    """``related``"""
    weight_cosines: Floats
    """Of the weights of each two models, the base last: ``[P + 1, P + 1]``."""
    unchanged: frozenset[int]
    """Parents that are the base."""
    unrelated: frozenset[int]
    """Parents that do not come from the base, or from the first parent where there is none."""
    permuted: Mapping[int, Mapping[int, Moved]]
    """Experts in other places, by parent and layer; by router rows, else by the experts themselves."""
    faulty: frozenset[int] = frozenset()
    """Parents of which a problem is known: other numbers of theirs are not worth a note."""
    moved: Mapping[int, Mapping[str, Moved]] = field(default_factory=dict)
    """Layers in other places, by parent and stack."""

    @property
    def has_base(self) -> bool:
        return self.report.base is not None

    @property
    def reference(self) -> int:
        """What the others are compared with, as sketches number it."""
        return len(self.names) if self.has_base else 0

    @property
    def reference_name(self) -> str:
        return self.base_name if self.has_base else self.parent(0)

    @property
    def base_name(self) -> str:
        return "A" if self.report.kind == "diff" else "the base"

    @property
    def tuned(self) -> list[int]:
        """Parents that were trained from the base, the first one where there is none among them."""
        return [k for k in range(len(self.names)) if k not in self.unchanged | self.unrelated | self.faulty]

    @property
    def others(self) -> list[int]:
        """Those that can be compared with the reference."""
        return [k for k in self.tuned if k != self.reference]

    @property
    def sound_parents(self) -> tuple[int, ...]:
        """Parents that can show, if they are at one, that it is the base that is damaged."""
        sound = tuple(self.tuned)
        is_all = len(sound) + len(self.unchanged) == len(self.names)
        return sound if self.has_base and is_all and len(sound) > 1 else ()

    def parent(self, k: int) -> str:
        """What a sentence calls it at first; of two models that are compared, the second is B."""
        return f"{'B' if self.report.kind == 'diff' else f'parent {k + 1}'} ({self.names[k]})"

    def parents(self, chosen: Iterable[int]) -> str:
        return joined([self.parent(k) for k in chosen])


def gather_facts(report: Report) -> Facts:
    measured = report.measurements.finite()
    matrices = measured.matching(is_matrix)
    whole = (matrices if len(matrices) else measured).grouped()
    count = len(report.parents)
    changed = np.einsum("njj->nj", measured.gram).sum(0)
    unchanged = {k for k in range(count) if report.base and measured.present[:, k].any() and not changed[k]}
    roles = related(measured)
    names, reference = short_names(report.parents), count if report.base is not None else 0
    permuted = {k: _permuted(report, measured, k, reference) for k in range(count)}
    facts = Facts(
        report, measured, whole, matrices, names, roles, weight_cosines(measured, roles),
        frozenset(unchanged), frozenset(), permuted,
    )  # fmt: skip
    moved = {k: moved_layers(measured, k, reference) for k in range(count) if k != reference}
    facts = replace(facts, moved={k: stacks for k, stacks in moved.items() if stacks})
    return replace(facts, unrelated=frozenset(k for k in range(count) if _is_unrelated(facts, k)))


def _permuted(report: Report, measured: Measurements, k: int, reference: int) -> Mapping[int, Moved]:
    pair = {k, -1 if report.base is not None else 0}
    by_router = {
        each.layer: moved_rows(each.own, each.nearest, each.nearest_cosines)
        for each in report.routers
        if {each.first, each.second} == pair
    }
    by_matrix = moved_experts(measured, k, reference) if k != reference else {}
    return {**by_matrix, **{layer: moved for layer, moved in by_router.items() if moved}}


def _is_unrelated(facts: Facts, k: int) -> bool:
    # Layers and experts that only are in another order are no others.
    if k == facts.reference or not len(facts.whole) or k in facts.moved or facts.permuted[k]:
        return False
    # Of most matrices: a few can be much larger than all others.
    is_away = not facts.has_base or median_of(facts.matrices.relative_change[:, k]) > FAR
    return bool(is_away and facts.weight_cosines[k, facts.reference] < UNRELATED)


def short_names(places: Sequence[str]) -> tuple[str, ...]:
    """The last parts of the places, as many of each as make it unique."""
    paths = [[part for part in re.split(r"[/\\]+", each) if part] or [each] for each in places]
    return tuple(_short(path, [other for other in paths if other is not path]) for path in paths)


def _short(path: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    for count in range(1, len(path) + 1):
        if all(other[-count:] != path[-count:] for other in others):
            return "/".join(path[-count:])
    return path[-1]


def changes_of(measured: Measurements, *, has_base: bool) -> Floats:
    """Relative change, or without a base the distance to the nearest other parent in norms: ``[n, P]``."""
    if has_base:
        return measured.relative_change
    squares = np.einsum("njj->nj", measured.gram)
    distances = squares[:, :, None] + squares[:, None, :] - 2 * measured.gram
    here = measured.present > 0
    known = here[:, :, None] & here[:, None, :] & ~np.eye(measured.num_parents, dtype=bool)
    norms = np.maximum(squares[:, :, None], squares[:, None, :])
    ratios = np.where(known & (norms > 0), np.maximum(distances, 0) / np.where(norms > 0, norms, 1), np.inf)
    nearest = ratios.min(2, initial=np.inf)
    return np.asarray(np.sqrt(np.where(np.isfinite(nearest), nearest, np.nan)))


def measure_word(facts: Facts) -> str:
    return "relative change" if facts.has_base else "relative distance"


def outliers(values: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which are far off the others that are not 0, and which merely stand out."""
    known = values > 0
    if known.sum() < FEWEST:
        return np.zeros_like(known), np.zeros_like(known)
    logs = np.log(np.where(known, values, 1))
    median = np.median(logs[known])
    spread = DEVIATIONS * 1.4826 * np.median(np.abs(logs[known] - median))
    above = np.where(known, logs - median, 0)
    far = (values > FAR) & (above > max(np.log(FARTHER), spread))
    stands_out = ~far & (values > STANDS_OUT_CHANGE) & (above > max(np.log(STANDS_OUT), spread))
    return far, stands_out


def median_of(values: Floats) -> float:
    known = values[values > 0]
    return float(np.median(known)) if len(known) else 0.0


def tensors_of(measured: Measurements, rows: NDArray[np.bool_]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names of these rows, and their layers."""
    labels = [measured.labels[row] for row in np.flatnonzero(rows)]
    layers = {label.layer for label in labels if label.layer >= 0}
    return tuple(label.part or label.tensor for label in labels), tuple(sorted(layers))


def in_what_was_read(facts: Facts) -> str:
    return "" if facts.report.is_exact else " in what was read"


def counted(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return joined([*names[:NAMED], *([f"{more} more"] if more > 0 else [])])


def joined(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def layers_text(numbers: Iterable[int]) -> str:
    """``layers 3, 5 to 9 and 12``"""
    ordered = sorted(set(numbers))
    starts = [each for each in ordered if each - 1 not in ordered]
    ends = [each for each in ordered if each + 1 not in ordered]
    runs = [
        f"{a}" if a == b else f"{a} and {b}" if b == a + 1 else f"{a} to {b}"
        for a, b in zip(starts, ends, strict=True)
    ]
    shown = runs if len(runs) <= 6 else [*runs[:5], f"{len(runs) - 5} more runs"]
    return f"layer{'s' if len(ordered) > 1 else ''} {joined(shown)}"


def range_text(values: Iterable[float]) -> str:
    known = [float(each) for each in values if np.isfinite(each)]
    if not known:
        return "unknown"
    low, high = (_two_digits(each) for each in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"


def _two_digits(value: float) -> str:
    """Of the value, or of what it lacks to 1."""
    if 0.9 < abs(value) < 1:
        return f"{value:.{min(9, 1 - math.floor(math.log10(1 - abs(value))))}f}"
    return f"{value:.2g}"


Rule: TypeAlias = Callable[[Facts], Iterator[Observation]]
