"""What is wrong with the models of a merge, by their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from raymerge.architectures.rules import Role
from raymerge.verifier.observations.correspondence import Moved
from raymerge.verifier.observations.facts import (
    FAR,
    NAMED,
    UNRELATED,
    Facts,
    Observation,
    Rule,
    changes_of,
    counted,
    in_what_was_read,
    joined,
    layers_text,
    listed,
    median_of,
    problem,
    range_text,
    tensors_of,
)

_AT_ONE = 0.7
"""Cosine of the weights of parents that have one role in common."""
ALL_PARENTS = "all parents, which agree"


def _not_finite(facts: Facts) -> Iterator[Observation]:
    everything = facts.report.measurements
    count = len(facts.names)
    broken = np.asarray(~np.isfinite(everything.sketches).all(-1))
    broken[:, :count] |= ~np.isfinite(np.einsum("njj->nj", everything.gram)) & ~broken[:, count:]
    for k in range(count + facts.has_base):
        whose, parents = (facts.parent(k), (k,)) if k < count else (facts.base_name, ())
        names, layers = tensors_of(everything, broken[:, k])
        if names:
            yield problem(
                "not_finite",
                sentence=f"{counted(names)} of {whose} with NaN or infinity: {listed(names)}.",
                remedy="Fetch the checkpoint anew: a merge would spread them.",
                layers=layers, parents=parents, tensors=names,
            )  # fmt: skip


def _not_of_the_base(facts: Facts) -> Iterator[Observation]:
    unrelated = sorted(facts.unrelated)
    if not unrelated:
        return
    cosine = range_text([facts.weight_cosines[k, facts.reference] for k in unrelated])
    if not facts.has_base:
        verb = "has" if len(unrelated) == 1 else "have"
        whose = f"{facts.parents(unrelated)} {verb} not the same base as {facts.parent(0)}"
        both = "these two have not the same base" if len(facts.names) == 2 else whose
        sentence = f"{both}: the cosine of their weights is {cosine}."
    else:
        change = range_text(median_of(facts.matrices.relative_change[:, k]) for k in unrelated)
        verb = "does" if len(unrelated) == 1 else "do"
        base = facts.base_name
        sentence = (
            f"{facts.parents(unrelated)} {verb} not come from {base}: relative change about {change}, "
            f"cosine of the weights with those of {base} {cosine}.{_common_base(facts, unrelated)}"
        )
    remedy = (
        "Merge models that were trained from one base, and name that one; the mean of weights that were "
        "trained apart computes nothing."
    )
    yield problem("unrelated", sentence=sentence, remedy=remedy, parents=tuple(unrelated))


def _common_base(facts: Facts, unrelated: Sequence[int]) -> str:
    """What models that are unrelated to the base are to each other."""
    if len(unrelated) == 1:
        return " These two have not the same base." if len(facts.names) == 2 else ""
    is_one = min(facts.weight_cosines[j, k] for j, k in combinations(unrelated, 2)) > UNRELATED
    return " They have another one in common." if is_one else " These have not the same base either."


def _moved_layers(facts: Facts) -> Iterator[Observation]:
    own = facts.sound_parents
    if own and all(facts.moved.get(k) == facts.moved.get(own[0], {}) for k in own):
        for moved in facts.moved[own[0]].values():
            there = {b: a for a, b in moved.items()}
            yield problem(
                "layers_moved",
                sentence=f"{_movement(there, facts.base_name, ALL_PARENTS)}.",
                remedy="Fetch or convert the base anew, or name the one that they were trained from.",
                layers=tuple(sorted({*moved, *there})), parents=own,
            )  # fmt: skip
        return
    for k, stacks in facts.moved.items():
        for stack, moved in stacks.items():
            where = f"{f'{stack} of ' if len(stacks) > 1 else ''}{facts.parent(k)}"
            yield problem(
                "layers_moved",
                sentence=f"{_movement(moved, where, facts.reference_name)}.",
                remedy="Fetch or convert the checkpoint anew, or order its layers by slices in the recipe: "
                "as it is, each is merged with another. Slices that pair them on purpose can stay.",
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
        verb = "is" if len(moved) == 1 else "are"
        return f"{here} of {where} {verb} {there} of {reference}: shifted by {abs(steps.pop())}"
    listed = joined([f"layer {a} is its {b}" for a, b in list(moved.items())[:NAMED]])
    return f"{here} of {where} stand in another order than those of {reference}: {listed}"


def _permuted_experts(facts: Facts) -> Iterator[Observation]:
    own = facts.sound_parents
    is_base = bool(own) and all(facts.permuted[k] == facts.permuted[own[0]] for k in own)
    for parents in [own] if is_base else [(k,) for k in facts.others]:
        k = parents[0]
        names = (facts.base_name, ALL_PARENTS) if is_base else (facts.parent(k), facts.reference_name)
        elsewhere = {layer for stack in facts.moved.get(k, {}).values() for layer in stack}
        moved = {layer: each for layer, each in facts.permuted[k].items() if layer not in elsewhere}
        if moved:
            count = range_text([len(each) for each in moved.values()])
            yield problem(
                "experts_permuted",
                sentence=f"the experts of {names[0]} are in another order than those of "
                f"{names[1]}: in {layers_text(moved)}, {count} a layer are others.",
                remedy="Write align: experts in the recipe (docs/how-to/align-experts.md): as they are, each "
                "is merged with another.",
                layers=tuple(sorted(moved)), roles=(str(Role.EXPERT), str(Role.ROUTER)), parents=parents,
            )  # fmt: skip


_UNLIKE = "Check whether they were trained anew, and from which model."
_UNLIKE_EXPERTS = "Trained apart, or neurons in another order: see docs/how-to/align-experts.md."


def _unlike_roles(facts: Facts) -> Iterator[Observation]:
    """Parents whose tensors of one role have nothing to do with the base's, while others have."""
    by_role = facts.matrices.grouped("role")
    changes = changes_of(by_role, has_base=facts.has_base)
    for label, change in zip(by_role.labels, changes, strict=True):
        cosines = facts.roles.get(label.role, np.full_like(facts.weight_cosines, np.nan))
        unlike = tuple(k for k in facts.others if cosines[k, facts.reference] < UNRELATED and change[k] > FAR)
        pairs = combinations(unlike, 2)
        is_base = unlike and unlike == facts.sound_parents and all(cosines[pair] > _AT_ONE for pair in pairs)
        for parents in [unlike] if is_base else [(k,) for k in unlike]:
            k = parents[0]
            names = (facts.base_name, ALL_PARENTS) if is_base else (facts.parent(k), facts.reference_name)
            yield problem(
                "role_unlike",
                sentence=f"the tensors of role {label.role} in {names[0]} have nothing in common with those "
                f"of {names[1]}: their cosine is {cosines[k, facts.reference]:.2f}.",
                remedy=_UNLIKE_EXPERTS if label.role == Role.EXPERT else _UNLIKE,
                roles=(label.role,), parents=parents,
            )  # fmt: skip


def _equal_parents(facts: Facts) -> Iterator[Observation]:
    sketches = facts.measured.sketches
    for j, k in combinations(range(len(facts.names)), 2):
        is_same = np.allclose(sketches[:, j], sketches[:, k], rtol=1e-9, atol=0)
        if is_same and len(sketches) and not {j, k} <= facts.unchanged:
            yield problem(
                "parents_equal",
                sentence=f"{facts.parents((j, k))} are equal{in_what_was_read(facts)}.",
                remedy="Check both places, or leave one out: the same model counts twice.",
                parents=(j, k),
            )


FAULTS: tuple[Rule, ...] = (
    _not_finite, _not_of_the_base, _moved_layers, _permuted_experts, _unlike_roles, _equal_parents,
)  # fmt: skip
