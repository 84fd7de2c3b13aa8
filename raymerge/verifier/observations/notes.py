"""What is worth knowing of a merge of sound models, by their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from raymerge.verifier.observations.facts import (
    Facts,
    Observation,
    Rule,
    changes_of,
    in_what_was_read,
    layers_text,
    measure_word,
    median_of,
    note,
    outliers,
    range_text,
    tensors_of,
)

HIGH_CONFLICT, HIGH_CONFLICT_THERE = 0.35, 0.4
"""Unrelated deltas of equal size conflict by 0.29; above, they oppose each other."""
LITTLE_OVERLAP, LITTLE_CONFLICT = 0.06, 0.1
"""The largest fifths of unrelated deltas overlap by 0.11; where both are less, other weights were changed."""
SPARSE = 0.9
"""Part of the numbers that training left as they were; reinforcement learning does, with small steps."""
INVISIBLE = 0.5
ABSENT_SHARE = 0.05
FOLLOWS, FOLLOWS_OTHERS = 0.95, 0.5
SHRUNK = 0.3
"""Norm of the merged change by the largest parent's: 0.58 for the mean of three unrelated, 0.32 of ten."""
ENCODING_ERROR, ENCODING_ERROR_4_BIT = 0.06, 0.2
"""Twice what ordinary weights lose in 8 and in 4 bits."""


OF_RESULTS = frozenset({"absent", "follows", "shrunk"})
"""Notes on the result, of which nothing more is said where it is broken."""


def not_measured(facts: Facts) -> Iterator[Observation]:
    counts = {reason: count for reason, count in (facts.report.skipped or {}).items() if count}
    total = sum(counts.values())
    if total:
        what = "1 part of a tensor was" if total == 1 else f"{total} parts of tensors were"
        why = [f"{f'{count}: ' if len(counts) > 1 else ''}{reason}" for reason, count in counts.items()]
        yield note(
            "not_measured",
            sentence=f"{what} not measured ({'; '.join(why)}): what is said here is of the others.",
        )


def _parents_that_are_the_base(facts: Facts) -> Iterator[Observation]:
    if facts.report.is_base_named:
        yield note(
            "is_base",
            sentence=f"one of the models is {facts.base_name} itself, which changes nothing.",
            remedy="Leave it out, or name the model that was meant.",
        )
    for k in sorted(facts.unchanged):
        yield note(
            "is_base",
            sentence=f"{facts.parent(k)} is {facts.base_name}: no number differs{in_what_was_read(facts)}.",
            remedy="Check its place"
            + ("." if facts.report.kind == "diff" else "; as a parent it only draws the result back."),
            parents=(k,),
        )


def _layers_that_stand_out(facts: Facts) -> Iterator[Observation]:
    by_layer = facts.matrices.matching(lambda each: each.layer >= 0).grouped("stack", "layer")
    for k in facts.tuned if facts.has_base else []:
        changes = by_layer.relative_change[:, k]
        stand_out = outliers(changes)[1]
        layers = tensors_of(by_layer, stand_out)[1]
        if layers:
            verb = "was" if len(layers) == 1 else "were"
            yield note(
                "layer_stands_out",
                sentence=f"{layers_text(layers)} of {facts.parent(k)} {verb} changed more than its others: "
                f"relative change {range_text(changes[stand_out])}, elsewhere {median_of(changes):.2g}.",
                remedy="See whether it was trained so on purpose; methods in the recipe can treat it apart.",
                layers=layers, parents=(k,),
            )  # fmt: skip


def _conflicts(facts: Facts) -> Iterator[Observation]:
    for j, k in combinations(facts.tuned if facts.has_base else [], 2):
        conflict = float(facts.whole.pair_conflict[0, j, k])
        by_role = facts.matrices.grouped("role")
        there = {
            str(label.role): value
            for label, value in zip(by_role.labels, by_role.pair_conflict[:, j, k], strict=True)
            if value > HIGH_CONFLICT_THERE
        }
        if conflict > HIGH_CONFLICT or there:
            role = max(there, key=lambda each: there[each], default="")
            layers = _conflicting_layers(facts, role, (j, k))
            where = f", most in role {role}{f', {layers_text(layers)}' if layers else ''}" if role else ""
            yield note(
                "conflict",
                sentence=f"{facts.parents((j, k))} work against each other: weighted sign conflict "
                f"{conflict:.2f}{where} (unrelated changes of one size have 0.29).",
                remedy="Resolve signs (ties, dare_ties, sce), or weigh one less; methods in the recipe can "
                "do so for some roles or layers.",
                layers=layers, roles=tuple(there), parents=(j, k),
            )  # fmt: skip


def _conflicting_layers(facts: Facts, role: str, pair: tuple[int, int]) -> tuple[int, ...]:
    """Those that conflict, where they are not nearly all."""
    of_role = facts.measured.matching(lambda each: each.role == role)
    by_layer = of_role.grouped("layer")
    high = by_layer.pair_conflict[:, pair[0], pair[1]] > HIGH_CONFLICT_THERE
    layers = [label.layer for label, is_high in zip(by_layer.labels, high, strict=True) if is_high]
    return tuple(sorted(layers)) if 0 < len(layers) < 0.8 * len(by_layer) else ()


def _results(facts: Facts) -> Iterator[Observation]:
    """What the merged change has of each parent's."""
    tuned = facts.tuned
    if not (facts.has_base and len(facts.whole) and facts.whole.merged[0] > 0 and len(tuned) > 1):
        return
    shares, cosines = facts.whole.shares[0], facts.whole.merged_cosines[0]
    for k in tuned:
        if abs(shares[k]) < ABSENT_SHARE:
            yield note(
                "absent",
                sentence=f"almost nothing of {facts.parent(k)} is in the result: share {abs(shares[k]):.2f}.",
                remedy="Raise its weight or its density, if it is meant to count.", parents=(k,),
            )  # fmt: skip
    first, second, *_ = sorted(tuned, key=lambda k: -cosines[k])
    if cosines[first] > FOLLOWS and cosines[second] < FOLLOWS_OTHERS:
        changes, others = facts.whole.relative_change[0], [k for k in tuned if k != first]
        yield note(
            "follows",
            sentence=f"the result follows {facts.parent(first)}: the cosine of the merged change with its "
            f"change is {cosines[first]:.2f}, with any other's at most {cosines[second]:.2f}; "
            f"relative changes {changes[first]:.2g} and {range_text(changes[k] for k in others)}.",
            remedy="Give the others more weight, if they are meant to count.", parents=(first,),
        )  # fmt: skip
    norms = np.sqrt(np.diagonal(facts.whole.gram[0]))[tuned]
    shrunk = float(np.sqrt(facts.whole.merged[0]) / norms.max())
    if shrunk < SHRUNK:
        yield note(
            "shrunk",
            sentence=f"the merged change has {shrunk:.0%} of the norm of the largest parent's: "
            "much of what they learned may be too weak.",
            remedy="Raise the weights or lambda, or take a method of deltas (task_arithmetic, ties).",
        )  # fmt: skip


def _small_changes(facts: Facts) -> Iterator[Observation]:
    for k in facts.tuned if facts.has_base else []:
        present, zeros = facts.whole.present[0, k], facts.whole.zeros[0, k]
        hidden = facts.whole.invisible[0, k] / max(present - zeros, 1)
        if hidden > INVISIBLE:
            yield note(
                "invisible",
                sentence=f"{hidden:.0%} of the changes of {facts.parent(k)} are below one step of bfloat16.",
                remedy="They are rounded away unless the result is stored in float32 (dtype).",
                parents=(k,),
            )  # fmt: skip
        if zeros > SPARSE * present:
            yield note(
                "sparse",
                sentence=f"{facts.parent(k)} changed {1 - zeros / present:.1%} of the base's numbers.",
                remedy="Few changes survive a mean badly: take task_arithmetic or ties rather than linear.",
                parents=(k,),
            )  # fmt: skip


def _little_overlap(facts: Facts) -> Iterator[Observation]:
    for j, k in combinations(facts.tuned if facts.has_base else [], 2):
        overlap, conflict = facts.whole.overlaps[0, j, k], facts.whole.pair_conflict[0, j, k]
        if overlap < LITTLE_OVERLAP and conflict < LITTLE_CONFLICT:
            yield note(
                "little_overlap",
                sentence=f"{facts.parents((j, k))} changed other weights: their largest changes overlap by "
                f"{overlap:.2f}, sign conflict {conflict:.2f}.",
                remedy="They hardly disturb each other: task_arithmetic with weights near 1 keeps both.",
                parents=(j, k),
            )  # fmt: skip


def _encodings(facts: Facts) -> Iterator[Observation]:
    formats = facts.measured.grouped("stored_as")
    for label, error in zip(formats.labels, formats.encoding_error, strict=True):
        usual = ENCODING_ERROR_4_BIT if "4" in label.stored_as else ENCODING_ERROR
        if label.stored_as and error > usual:
            yield note(
                "encoding_error",
                sentence=f"encoding as {label.stored_as} changed the merged tensors by {error:.2g} of their "
                f"norm; less than {usual:g} is usual.",
                remedy="Keep the worst tensors plain by out_format in the recipe (docs/how-to/convert.md).",
            )  # fmt: skip


def _no_base(facts: Facts) -> Iterator[Observation]:
    is_merge = len(facts.names) > 1 and facts.report.kind != "diff"
    if is_merge and not facts.has_base and not facts.unrelated:
        yield note(
            "no_base",
            sentence="There is no base, so what each parent changed is not known.",
            remedy="Report on a recipe of a method that takes deltas (task_arithmetic) with base_model, the "
            "model that they were trained from: it shows conflicts too.",
        )


def usual(facts: Facts) -> Observation:
    if not len(facts.whole):
        what = "Nothing was measured: no tensor is merged from several models."
        return note("nothing", sentence=what if not facts.report.skipped else "Nothing was measured.")
    changes = changes_of(facts.whole, has_base=facts.has_base)[0, facts.tuned]
    plural = "s" if len(changes) > 1 else ""
    figures = f"{measure_word(facts)}{plural} {range_text(changes)}" if np.isfinite(changes).any() else ""
    if facts.has_base and len(facts.tuned) > 1:
        pairs = tuple(np.array(list(combinations(facts.tuned, 2))).T)
        figures += f", cosines of changes {range_text(facts.whole.cosines[0][pairs])}"
        figures += f", weighted sign conflict {range_text(facts.whole.pair_conflict[0][pairs])}"
    is_part = any((facts.report.skipped or {}).values())
    what = f"Nothing unusual{' in what was measured' if is_part else ''}{f': {figures}' if figures else ''}."
    return note("usual_in_part" if is_part else "usual", sentence=what)


NOTES: tuple[Rule, ...] = (
    _parents_that_are_the_base, _layers_that_stand_out, _conflicts, _results, _little_overlap,
    _small_changes, _encodings, _no_base,
)  # fmt: skip
