"""What is worth knowing of a merge of sound models, by their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from raymerge.verifier.observations.scene import (
    Observation,
    Rule,
    Scene,
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


def not_measured(scene: Scene) -> Iterator[Observation]:
    counts = {reason: count for reason, count in (scene.report.skipped or {}).items() if count}
    total = sum(counts.values())
    if total:
        what = "1 part of a tensor was" if total == 1 else f"{total} parts of tensors were"
        why = [f"{f'{count}: ' if len(counts) > 1 else ''}{reason}" for reason, count in counts.items()]
        yield note(
            "not_measured",
            sentence=f"{what} not measured ({'; '.join(why)}): what is said here is of the others.",
        )


def _parents_that_are_the_base(scene: Scene) -> Iterator[Observation]:
    if scene.report.is_base_named:
        yield note(
            "is_base",
            sentence=f"one of the models is {scene.base_name} itself, which changes nothing.",
            remedy="Leave it out, or name the model that was meant.",
        )
    for k in sorted(scene.silent):
        yield note(
            "is_base",
            sentence=f"{scene.parent(k)} is {scene.base_name}: no number differs{in_what_was_read(scene)}.",
            remedy="Check its place"
            + ("." if scene.report.kind == "diff" else "; as a parent it only draws the result back."),
            parents=(k,),
        )


def _layers_that_stand_out(scene: Scene) -> Iterator[Observation]:
    by_layer = scene.matrices.matching(lambda each: each.layer >= 0).grouped("stack", "layer")
    for k in scene.tuned if scene.has_base else []:
        changes = by_layer.relative_change[:, k]
        stand_out = outliers(changes)[1]
        layers = tensors_of(by_layer, stand_out)[1]
        if layers:
            verb = "was" if len(layers) == 1 else "were"
            yield note(
                "layer_stands_out",
                sentence=f"{layers_text(layers)} of {scene.parent(k)} {verb} changed more than its others: "
                f"relative change {range_text(changes[stand_out])}, elsewhere {median_of(changes):.2g}.",
                remedy="See whether it was trained so on purpose; methods in the recipe can treat it apart.",
                layers=layers, parents=(k,),
            )  # fmt: skip


def _conflicts(scene: Scene) -> Iterator[Observation]:
    for j, k in combinations(scene.tuned if scene.has_base else [], 2):
        conflict = float(scene.whole.pair_conflict[0, j, k])
        by_role = scene.matrices.grouped("role")
        there = {
            str(label.role): value
            for label, value in zip(by_role.labels, by_role.pair_conflict[:, j, k], strict=True)
            if value > HIGH_CONFLICT_THERE
        }
        if conflict > HIGH_CONFLICT or there:
            role = max(there, key=lambda each: there[each], default="")
            layers = _conflicting_layers(scene, role, (j, k))
            where = f", most in role {role}{f', {layers_text(layers)}' if layers else ''}" if role else ""
            yield note(
                "conflict",
                sentence=f"{scene.parents((j, k))} work against each other: weighted sign conflict "
                f"{conflict:.2f}{where} (unrelated changes of one size have 0.29).",
                remedy="Resolve signs (ties, dare_ties, sce), or weigh one less; methods in the recipe can "
                "do so for some roles or layers.",
                layers=layers, roles=tuple(there), parents=(j, k),
            )  # fmt: skip


def _conflicting_layers(scene: Scene, role: str, pair: tuple[int, int]) -> tuple[int, ...]:
    """Those that conflict, where they are not nearly all."""
    of_role = scene.measured.matching(lambda each: each.role == role)
    by_layer = of_role.grouped("layer")
    high = by_layer.pair_conflict[:, pair[0], pair[1]] > HIGH_CONFLICT_THERE
    layers = [label.layer for label, is_high in zip(by_layer.labels, high, strict=True) if is_high]
    return tuple(sorted(layers)) if 0 < len(layers) < 0.8 * len(by_layer) else ()


def _results(scene: Scene) -> Iterator[Observation]:
    """What the merged change has of each parent's."""
    tuned = scene.tuned
    if not (scene.has_base and len(scene.whole) and scene.whole.merged[0] > 0 and len(tuned) > 1):
        return
    shares, cosines = scene.whole.shares[0], scene.whole.merged_cosines[0]
    for k in tuned:
        if abs(shares[k]) < ABSENT_SHARE:
            yield note(
                "absent",
                sentence=f"almost nothing of {scene.parent(k)} is in the result: share {abs(shares[k]):.2f}.",
                remedy="Raise its weight or its density, if it is meant to count.", parents=(k,),
            )  # fmt: skip
    first, second, *_ = sorted(tuned, key=lambda k: -cosines[k])
    if cosines[first] > FOLLOWS and cosines[second] < FOLLOWS_OTHERS:
        changes, others = scene.whole.relative_change[0], [k for k in tuned if k != first]
        yield note(
            "follows",
            sentence=f"the result follows {scene.parent(first)}: the cosine of the merged change with its "
            f"change is {cosines[first]:.2f}, with any other's at most {cosines[second]:.2f}; "
            f"relative changes {changes[first]:.2g} and {range_text(changes[k] for k in others)}.",
            remedy="Give the others more weight, if they are meant to count.", parents=(first,),
        )  # fmt: skip
    norms = np.sqrt(np.diagonal(scene.whole.gram[0]))[tuned]
    shrunk = float(np.sqrt(scene.whole.merged[0]) / norms.max())
    if shrunk < SHRUNK:
        yield note(
            "shrunk",
            sentence=f"the merged change has {shrunk:.0%} of the norm of the largest parent's: "
            "much of what they learned may be too weak.",
            remedy="Raise the weights or lambda, or take a method of deltas (task_arithmetic, ties).",
        )  # fmt: skip


def _small_changes(scene: Scene) -> Iterator[Observation]:
    for k in scene.tuned if scene.has_base else []:
        present, zeros = scene.whole.present[0, k], scene.whole.zeros[0, k]
        hidden = scene.whole.invisible[0, k] / max(present - zeros, 1)
        if hidden > INVISIBLE:
            yield note(
                "invisible",
                sentence=f"{hidden:.0%} of the changes of {scene.parent(k)} are below one step of bfloat16.",
                remedy="They are rounded away unless the result is stored in float32 (dtype).",
                parents=(k,),
            )  # fmt: skip
        if zeros > SPARSE * present:
            yield note(
                "sparse",
                sentence=f"{scene.parent(k)} changed {1 - zeros / present:.1%} of the base's numbers.",
                remedy="Few changes survive a mean badly: take task_arithmetic or ties rather than linear.",
                parents=(k,),
            )  # fmt: skip


def _little_overlap(scene: Scene) -> Iterator[Observation]:
    for j, k in combinations(scene.tuned if scene.has_base else [], 2):
        overlap, conflict = scene.whole.overlaps[0, j, k], scene.whole.pair_conflict[0, j, k]
        if overlap < LITTLE_OVERLAP and conflict < LITTLE_CONFLICT:
            yield note(
                "little_overlap",
                sentence=f"{scene.parents((j, k))} changed other weights: their largest changes overlap by "
                f"{overlap:.2f}, sign conflict {conflict:.2f}.",
                remedy="They hardly disturb each other: task_arithmetic with weights near 1 keeps both.",
                parents=(j, k),
            )  # fmt: skip


def _encodings(scene: Scene) -> Iterator[Observation]:
    formats = scene.measured.grouped("stored_as")
    for label, error in zip(formats.labels, formats.encoding_error, strict=True):
        usual = ENCODING_ERROR_4_BIT if "4" in label.stored_as else ENCODING_ERROR
        if label.stored_as and error > usual:
            yield note(
                "encoding_error",
                sentence=f"encoding as {label.stored_as} changed the merged tensors by {error:.2g} of their "
                f"norm; less than {usual:g} is usual.",
                remedy="Keep the worst tensors plain by out_format in the recipe (docs/how-to/convert.md).",
            )  # fmt: skip


def _no_base(scene: Scene) -> Iterator[Observation]:
    is_merge = len(scene.names) > 1 and scene.report.kind != "diff"
    if is_merge and not scene.has_base and not scene.strangers:
        yield note(
            "no_base",
            sentence="There is no base, so what each parent changed is not known.",
            remedy="Report on a recipe of a method that takes deltas (task_arithmetic) with base_model, the "
            "model that they were trained from: it shows conflicts too.",
        )


def usual(scene: Scene) -> Observation:
    if not len(scene.whole):
        what = "Nothing was measured: no tensor is merged from several models."
        return note("nothing", sentence=what if not scene.report.skipped else "Nothing was measured.")
    changes = changes_of(scene.whole, has_base=scene.has_base)[0, scene.tuned]
    plural = "s" if len(changes) > 1 else ""
    facts = f"{measure_word(scene)}{plural} {range_text(changes)}" if np.isfinite(changes).any() else ""
    if scene.has_base and len(scene.tuned) > 1:
        pairs = tuple(np.array(list(combinations(scene.tuned, 2))).T)
        facts += f", cosines of changes {range_text(scene.whole.cosines[0][pairs])}"
        facts += f", weighted sign conflict {range_text(scene.whole.pair_conflict[0][pairs])}"
    is_part = any((scene.report.skipped or {}).values())
    what = f"Nothing unusual{' in what was measured' if is_part else ''}{f': {facts}' if facts else ''}."
    return note("usual_in_part" if is_part else "usual", sentence=what)


NOTES: tuple[Rule, ...] = (
    _parents_that_are_the_base, _layers_that_stand_out, _conflicts, _results, _little_overlap,
    _small_changes, _encodings, _no_base,
)  # fmt: skip
