"""What is wrong with the models of a merge, by their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from raymerge.architectures.rules import Role
from raymerge.verifier.measurements import Floats, Measurements
from raymerge.verifier.observations.correspondence import Moved, is_matrix, kind_of
from raymerge.verifier.observations.scene import (
    FAR,
    FEWEST,
    NAMED,
    UNRELATED,
    Observation,
    Rule,
    Scene,
    changes_of,
    counted,
    in_what_was_read,
    joined,
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


def _not_finite(scene: Scene) -> Iterator[Observation]:
    everything = scene.report.measurements
    squares = np.einsum("njj->nj", everything.gram)
    for k in range(len(scene.names)):
        names, layers = tensors_of(everything, ~np.isfinite(squares[:, k]))
        if names:
            yield problem(
                "not_finite",
                sentence=f"{counted(names)} of {scene.parent(k)} with NaN or infinity: {listed(names)}.",
                remedy="Fetch the checkpoint anew: a merge would spread them.",
                layers=layers, parents=(k,), tensors=names,
            )  # fmt: skip


def _not_of_the_base(scene: Scene) -> Iterator[Observation]:
    strangers = sorted(scene.strangers)
    if not strangers:
        return
    cosine = range_text([scene.kinship[k, scene.reference] for k in strangers])
    if not scene.has_base:
        verb = "has" if len(strangers) == 1 else "have"
        whose = f"{scene.parents(strangers)} {verb} not the same base as {scene.parent(0)}"
        both = "these two have not the same base" if len(scene.names) == 2 else whose
        sentence = f"{both}: the cosine of their weights is {cosine}."
    else:
        change = range_text(median_of(scene.matrices.relative_change[:, k]) for k in strangers)
        verb = "does" if len(strangers) == 1 else "do"
        base = scene.base_name
        sentence = (
            f"{scene.parents(strangers)} {verb} not come from {base}: relative change about {change}, "
            f"cosine of the weights with those of {base} {cosine}.{_common_base(scene, strangers)}"
        )
    remedy = (
        "Merge models that were trained from one base, and name that one; the mean of weights that were "
        "trained apart computes nothing."
    )
    yield problem("strangers", sentence=sentence, remedy=remedy, parents=tuple(strangers))


def _common_base(scene: Scene, strangers: Sequence[int]) -> str:
    """What strangers to the base are to each other."""
    if len(strangers) == 1:
        return " These two have not the same base." if len(scene.names) == 2 else ""
    is_one = min(scene.kinship[j, k] for j, k in combinations(strangers, 2)) > UNRELATED
    return " They have another one in common." if is_one else " These have not the same base either."


def _moved_layers(scene: Scene) -> Iterator[Observation]:
    for k, stacks in scene.moved.items():
        for stack, moved in stacks.items():
            where = f"{f'{stack} of ' if len(stacks) > 1 else ''}{scene.parent(k)}"
            yield problem(
                "layers_moved",
                sentence=f"{_movement(moved, where, scene.reference_name)}.",
                remedy="Fetch or convert the checkpoint anew, or order its layers by slices in the recipe: "
                "as it is, each is merged with another.",
                layers=tuple(sorted(moved)), parents=(k,),
            )  # fmt: skip


def _movement(moved: Moved, where: str, reference: str) -> str:
    swapped = [(a, b) for a, b in moved.items() if a < b and moved.get(b) == a]
    if 2 * len(swapped) == len(moved):
        pairs = joined([f"{a} and {b}" for a, b in swapped])
        return f"layers {pairs} of {where} are swapped against {reference}"
    here, there = layers_text(moved), layers_text(moved.values())
    steps = {there - here for here, there in moved.items()}
    if len(steps) == 1:
        return f"{here} of {where} are {there} of {reference}: shifted by {abs(steps.pop())}"
    listed = joined([f"layer {a} is its {b}" for a, b in list(moved.items())[:NAMED]])
    return f"{here} of {where} stand in another order than those of {reference}: {listed}"


def _permuted_experts(scene: Scene) -> Iterator[Observation]:
    for k in scene.others:
        elsewhere = {layer for stack in scene.moved.get(k, {}).values() for layer in stack}
        moved = {layer: each for layer, each in scene.permuted[k].items() if layer not in elsewhere}
        if moved:
            count = range_text([len(each) for each in moved.values()])
            yield problem(
                "experts_permuted",
                sentence=f"the experts of {scene.parent(k)} are in another order than those of "
                f"{scene.reference_name}: in {layers_text(moved)}, {count} a layer are others.",
                remedy="Write align: experts in the recipe (docs/how-to/align-experts.md): as they are, each "
                "is merged with another.",
                layers=tuple(sorted(moved)), roles=(str(Role.EXPERT),), parents=(k,),
            )  # fmt: skip


_UNLIKE = "Check whether they were trained anew, and from which model."
_UNLIKE_EXPERTS = "Trained apart, or neurons in another order: see docs/how-to/align-experts.md."


def _unlike_roles(scene: Scene) -> Iterator[Observation]:
    """Parents whose tensors of one role have nothing to do with the base's, while others have."""
    by_role = scene.matrices.grouped("role")
    changes = changes_of(by_role, has_base=scene.has_base)
    for label, change in zip(by_role.labels, changes, strict=True):
        for k in scene.others if label.role in scene.roles else []:
            cosine = scene.roles[label.role][k, scene.reference]
            if cosine < UNRELATED and change[k] > FAR:
                what = f"of role {label.role} in {scene.parent(k)} have nothing in common with those of"
                yield problem(
                    "role_unlike",
                    sentence=f"the tensors {what} {scene.reference_name}: their cosine is {cosine:.2f}.",
                    remedy=_UNLIKE_EXPERTS if label.role == Role.EXPERT else _UNLIKE,
                    roles=(label.role,), parents=(k,),
                )  # fmt: skip


_DAMAGED = "A file may be damaged: compare its digest with the publisher's, or fetch it anew."
_OTHER_VOCABULARY = (
    "Its vocabulary may be in another order (docs/how-to/tokenizers.md), or a file damaged: fetch it anew."
)


def far_off(scene: Scene, found: Sequence[Observation]) -> Iterator[Observation]:
    """Layers and tensors far off from their like where no other sentence says why: damaged files."""
    measured = scene.measured
    changes = changes_of(measured, has_base=scene.has_base)
    like = np.unique([f"{each.stack} {kind_of(each)}" for each in measured.labels], return_inverse=True)[1]
    is_weight = np.array([not each.part.endswith("bias") for each in measured.labels], dtype=bool)
    is_zero = (measured.present > 0) & ~measured.sketches[:, : len(scene.names)].any(-1)
    for parents, whom in _suspects(scene):
        far = is_weight & _far_among_like(changes[:, parents[-1]], like)
        if not scene.has_base:
            # Who is near nobody is the one that is off; others merely lost their nearest.
            far &= changes[:, parents[-1]] >= np.nan_to_num(changes).max(1)
        for each in [each for each in found if set(parents) & set(each.parents) or not scene.has_base]:
            far &= ~_is_about(each, measured)
        usual = median_of(changes[~far, parents[-1]])
        for k in parents:
            rows = far & is_zero[:, k]
            yield from _damaged(scene, rows, (k,), f"of {scene.parent(k)} {_are(rows)} all zeros")
            far &= ~is_zero[:, k]
        yield from _damaged_layers(scene, (parents, whom), far, usual)


def _damaged_layers(
    scene: Scene, suspects: tuple[tuple[int, ...], str], far: NDArray[np.bool_], usual: float
) -> Iterator[Observation]:
    """A sentence for layers that are far off as a whole, and one for all other tensors."""
    parents, whom = suspects
    labels = scene.measured.labels
    changes = changes_of(scene.measured, has_base=scene.has_base)[:, parents[-1]]
    places = [(each.stack, each.layer) for each in labels]
    matrices = np.array([is_matrix(each) and each.layer >= 0 for each in labels], dtype=bool)
    whole = np.zeros(len(labels), dtype=bool)
    for place in dict.fromkeys(places[row] for row in np.flatnonzero(far & matrices)):
        rows = np.array([each == place for each in places], dtype=bool)
        whole |= rows & bool(far[rows & matrices].mean() > MOST)
    if whole.any():
        layers = tensors_of(scene.measured, whole)[1]
        verb = "is" if len(layers) == 1 else "are"
        yield problem(
            "layer_far",
            sentence=f"{layers_text(layers)} of {whom} {verb} far off: {measure_word(scene)} "
            f"{range_text(changes[whole & far & matrices])}, elsewhere about {usual:.2g}.",
            remedy=_DAMAGED, layers=layers, parents=parents,
        )  # fmt: skip
    rest = far & ~whole
    figures = f"{measure_word(scene)} {range_text(changes[rest])}, elsewhere about {usual:.2g}"
    yield from _damaged(scene, rest, parents, f"of {whom} {_are(rest)} far off, {figures}")


def _damaged(
    scene: Scene, rows: NDArray[np.bool_], parents: tuple[int, ...], what: str
) -> Iterator[Observation]:
    names, layers = tensors_of(scene.measured, rows)
    roles = {scene.measured.labels[row].role for row in np.flatnonzero(rows)}
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


def _suspects(scene: Scene) -> list[tuple[tuple[int, ...], str]]:
    """Parents that can be far off; of two without a base nobody knows which one is."""
    if not scene.has_base and len(scene.tuned) == 2:
        return [(tuple(scene.tuned), " or ".join(map(scene.parent, scene.tuned)))]
    return [((k,), scene.parent(k)) for k in scene.tuned]


def _far_among_like(values: Floats, like: NDArray[np.int64]) -> NDArray[np.bool_]:
    order = np.argsort(like, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(like[order])) + 1)
    far = np.zeros(len(values), dtype=bool)
    # What has few of its like is compared with all.
    small = np.concatenate([each for each in groups if len(each) < FEWEST] or [order[:0]])
    far[small] = outliers(values)[0][small]
    for each in groups:
        if len(each) >= FEWEST:
            far[each] = outliers(values[each])[0]
    return far


def _equal_parents(scene: Scene) -> Iterator[Observation]:
    sketches = scene.measured.sketches
    for j, k in combinations(range(len(scene.names)), 2):
        is_same = np.allclose(sketches[:, j], sketches[:, k], rtol=1e-9, atol=0)
        if is_same and len(sketches) and not {j, k} <= scene.silent:
            yield problem(
                "parents_equal",
                sentence=f"{scene.parents((j, k))} are equal{in_what_was_read(scene)}.",
                remedy="Check both places, or leave one out: the same model counts twice.",
                parents=(j, k),
            )


FAULTS: tuple[Rule, ...] = (
    _not_finite, _not_of_the_base, _moved_layers, _permuted_experts, _unlike_roles, _equal_parents,
)  # fmt: skip
