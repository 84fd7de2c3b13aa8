"""Damage: layers and tensors of models, of the base or of the result that no training or merge explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raymerge.architectures.rules import Role
from raymerge.verifier.measurements import Floats, Measurements
from raymerge.verifier.observations.correspondence import is_matrix, kind_of
from raymerge.verifier.observations.facts import (
    FAR,
    FARTHER,
    FEWEST,
    Facts,
    Observation,
    changes_of,
    counted,
    layers_text,
    listed,
    measure_word,
    median_of,
    outliers,
    problem,
    range_text,
    tensors_of,
)

MOST = 0.7
"""Part of a layer's matrices from which it is the layer that is far off, and not some tensors."""
APART, COSINE_APART = 0.9, 0.5
"""Relative change from which, and cosine of the weights below which, a matrix is another one than before:
the cosine of one sketch is this inexact, and one that moved by its own norm is still at 0.7."""
AT_ONE = 0.9
"""Cosine of the changes of parents that differ from the base in one and the same way."""
WILD = 10.0
"""The merged change by those of all parents together, from where no method or weight explains it."""


_DAMAGED = "A file may be damaged: compare its digest with the publisher's, or fetch it anew."
_OTHER_VOCABULARY = (
    "Its vocabulary may be in another order (docs/how-to/tokenizers.md), or a file damaged: fetch it anew."
)


@dataclass(frozen=True, slots=True)
class _Suspect:
    parents: tuple[int, ...]
    whom: str
    away: str = ""
    """From what it is far off, where that is not the base."""


def far_off(facts: Facts, faults: Sequence[Observation]) -> Iterator[Observation]:
    """Layers and tensors far off where no other sentence says why: damaged files."""
    measured = facts.measured
    changes = changes_of(measured, has_base=facts.has_base)
    is_weight = np.array([not each.part.endswith("bias") for each in measured.labels], dtype=bool)
    is_zero = _zeros(facts) & is_weight[:, None]
    is_far = is_weight[:, None] & (_far_among_like(facts, changes) | _apart(facts, changes))
    is_base = _of_the_base(facts, is_far, is_zero, faults)
    usual = [median_of(values[~far]) for values, far in zip(changes.T, is_far.T, strict=True)]
    yield from _damaged_base(facts, is_base, is_zero[:, -1], usual)
    for suspect in _suspects(facts):
        far = is_far[:, suspect.parents[-1]] & ~is_base
        if not facts.has_base:
            # Who is near nobody is the one that is off; others merely lost their nearest.
            far &= changes[:, suspect.parents[-1]] >= np.nan_to_num(changes).max(1)
        for each in [e for e in faults if set(suspect.parents) & set(e.parents) or not facts.has_base]:
            far &= ~_is_about(each, measured)
        for k in suspect.parents:
            rows = is_zero[:, k]
            yield from _damaged(facts, rows, (k,), f"of {facts.parent(k)} {_are(rows)} all zeros")
            far &= ~rows
        yield from _damaged_layers(facts, suspect, far, usual)


def _zeros(facts: Facts) -> NDArray[np.bool_]:
    """Tensors that are all zeros in one model and in another are not: ``[n, P + 1]``, the base last."""
    sketches, count = facts.measured.sketches, len(facts.names)
    is_here = np.hstack([facts.measured.present > 0, np.full((len(sketches), 1), facts.has_base)])
    is_zero = np.asarray(is_here & ~sketches.any(-1))
    compared = sketches[:, count:] if facts.has_base else sketches[:, :count]
    is_zero[:, :count] &= np.asarray(compared.any((1, 2)))[:, None]
    return is_zero


def _apart(facts: Facts, changes: Floats) -> NDArray[np.bool_]:
    """Matrices that have nothing in common with those that they are compared with: ``[n, P]``."""
    measured, count = facts.measured, len(facts.names)
    matrices = np.array([is_matrix(each) for each in measured.labels], dtype=bool)
    if facts.has_base:
        norms = np.linalg.norm(measured.sketches, axis=-1, keepdims=True)
        units = measured.sketches / np.where(norms > 0, norms, 1) * matrices[:, None, None]
        cosines = np.einsum("nkc,nc->nk", units[:, :count], units[:, -1])
        # Of one sketch it is inexact; of a layer's together it is not.
        layer = np.unique([f"{e.stack} {e.layer}" for e in measured.labels], return_inverse=True)[1]
        sums = np.zeros((len(layer), count))
        np.add.at(sums, layer, cosines)
        sizes = np.bincount(layer, weights=matrices)[layer, None]
        is_apart = (cosines < COSINE_APART) | (sums[layer] < COSINE_APART * sizes)
        is_apart &= norms[:, count:, 0] > 0
    else:
        others = np.where(np.eye(count, dtype=bool), -np.inf, np.nan_to_num(measured.cosines, nan=-np.inf))
        is_apart = others.max(2, initial=-np.inf) < COSINE_APART
    is_apart = matrices[:, None] & is_apart & (changes > APART)
    usual = [median_of(values[~apart]) for values, apart in zip(changes.T, is_apart.T, strict=True)]
    return np.asarray(is_apart & (changes > FARTHER * np.array(usual)))


def _of_the_base(
    facts: Facts, is_far: NDArray[np.bool_], is_zero: NDArray[np.bool_], faults: Sequence[Observation]
) -> NDArray[np.bool_]:
    """Tensors in which the base is far off from all parents, and these are not from each other: ``[n]``."""
    own = list(facts.sound_parents)
    if not own or any(each.kind == "parents_equal" for each in faults):
        return np.zeros(len(is_far), dtype=bool)
    is_at_one = facts.measured.cosines[:, own][:, :, own].min((1, 2)) > AT_ONE
    is_off = is_far[:, own].all(1) | is_zero[:, -1]
    for each in [each for each in faults if set(own) & set(each.parents)]:
        is_off &= ~_is_about(each, facts.measured)
    return np.asarray(is_at_one & is_off & ~is_zero[:, own].any(1))


def _damaged_base(
    facts: Facts, rows: NDArray[np.bool_], is_zero: NDArray[np.bool_], usual: Sequence[float]
) -> Iterator[Observation]:
    suspect = _Suspect(facts.sound_parents, facts.base_name, " from all parents, which agree")
    zeros = rows & is_zero
    what = f"of {suspect.whom} {_are(zeros)} all zeros, but of no parent"
    yield from _damaged(facts, zeros, suspect.parents, what)
    if suspect.parents:
        yield from _damaged_layers(facts, suspect, rows & ~zeros, usual)


def _damaged_layers(
    facts: Facts, suspect: _Suspect, far: NDArray[np.bool_], usual: Sequence[float]
) -> Iterator[Observation]:
    """A sentence for layers that are far off as a whole, and one for all other tensors."""
    labels = facts.measured.labels
    changes = changes_of(facts.measured, has_base=facts.has_base)[:, suspect.parents[-1]]
    there = usual[suspect.parents[-1]]
    elsewhere = f", elsewhere about {there:.2g}" if there else ""
    places = [(each.stack, each.layer) for each in labels]
    matrices = np.array([is_matrix(each) and each.layer >= 0 for each in labels], dtype=bool)
    whole = np.zeros(len(labels), dtype=bool)
    for place in dict.fromkeys(places[row] for row in np.flatnonzero(far & matrices)):
        rows = np.array([each == place for each in places], dtype=bool)
        whole |= rows & bool(far[rows & matrices].mean() > MOST)
    if whole.any():
        layers = tensors_of(facts.measured, whole)[1]
        verb = "is" if len(layers) == 1 else "are"
        yield problem(
            "layer_far",
            sentence=f"{layers_text(layers)} of {suspect.whom} {verb} far off{suspect.away}: "
            f"{measure_word(facts)} {range_text(changes[whole & far & matrices])}{elsewhere}.",
            remedy=_DAMAGED, layers=layers, parents=suspect.parents,
        )  # fmt: skip
    rest = far & ~whole
    figures = f"{measure_word(facts)} {range_text(changes[rest])}{elsewhere}"
    what = f"of {suspect.whom} {_are(rest)} far off{suspect.away}, {figures}"
    yield from _damaged(facts, rest, suspect.parents, what)


def _damaged(
    facts: Facts, rows: NDArray[np.bool_], parents: tuple[int, ...], what: str
) -> Iterator[Observation]:
    names, layers = tensors_of(facts.measured, rows)
    roles = {facts.measured.labels[row].role for row in np.flatnonzero(rows)}
    if names:
        yield problem(
            "tensors_damaged",
            sentence=f"{counted(names)} {what}: {listed(names)}.",
            remedy=_OTHER_VOCABULARY if roles <= {Role.EMBEDDING, Role.HEAD} else _DAMAGED,
            layers=layers, parents=parents, tensors=names,
        )  # fmt: skip


def _are(rows: NDArray[np.bool_]) -> str:
    return "is" if rows.sum() == 1 else "are"


def _is_about(each: Observation, measured: Measurements) -> NDArray[np.bool_]:
    labels = measured.labels
    return np.array(
        [
            (not each.layers or label.layer in each.layers) and (not each.roles or label.role in each.roles)
            for label in labels
        ],
        dtype=bool,
    )


def _suspects(facts: Facts) -> list[_Suspect]:
    """Parents that can be far off; of two without a base nobody knows which one is."""
    if not facts.has_base and len(facts.tuned) == 2:
        return [_Suspect(tuple(facts.tuned), " or ".join(map(facts.parent, facts.tuned)))]
    return [_Suspect((k,), facts.parent(k)) for k in facts.tuned]


def _far_among_like(facts: Facts, changes: Floats) -> NDArray[np.bool_]:
    """By parent: ``[n, P]``."""
    labels = facts.measured.labels
    like = np.unique([f"{each.stack} {kind_of(each)}" for each in labels], return_inverse=True)[1]
    order = np.argsort(like, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(like[order])) + 1)
    far = np.zeros(changes.shape, dtype=bool)
    # What has few of its like is compared with all.
    small = np.concatenate([each for each in groups if len(each) < FEWEST] or [order[:0]])
    for k, values in enumerate(changes.T):
        far[small, k] = outliers(values)[0][small]
        for each in groups:
            if len(each) >= FEWEST:
                far[each, k] = outliers(values[each])[0]
    return far


RESULT_BROKEN = "result_broken"
_BROKEN_RESULT = "Do not use it: see what 'raymerge verify' says of it, and merge anew."


def broken_result(facts: Facts) -> Iterator[Observation]:
    measured = facts.report.measurements
    merged, base = measured.merged, measured.base.max(1, initial=0)
    squares = np.einsum("njj->nj", measured.gram).sum(1)
    is_zero = (base > 0) & np.isclose(merged, base, rtol=1e-9, atol=0)
    if not facts.has_base:
        is_zero = (merged == 0) & (facts.report.kind == "merge")
    is_zero &= measured.sketches[:, : len(facts.names)].any((1, 2))
    is_wild = (base > 0) & ~is_zero & (merged > FAR**2 * base) & (merged > WILD**2 * squares)
    for rows, what in (
        (~np.isfinite(merged), "with NaN or infinity"),
        (is_zero, f"{_are(is_zero)} all zeros"),
        (is_wild, f"changed more than {WILD:.0f} times as much as all parents together"),
    ):
        names, layers = tensors_of(measured, rows)
        if names:
            yield problem(
                RESULT_BROKEN, sentence=f"{counted(names)} of the result {what}: {listed(names)}.",
                remedy=_BROKEN_RESULT, layers=layers, tensors=names,
            )  # fmt: skip
