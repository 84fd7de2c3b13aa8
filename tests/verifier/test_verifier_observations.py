"""What a report says in words: planted faults are named, and ordinary merges are not called broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from kits.measured_arrays import router_rows
from kits.measured_reports import (
    BASE,
    EXPERTS,
    FIRST,
    SECOND,
    Shape,
    changed,
    make_report,
    permuted,
    swapped,
    synthetic_report,
    usual,
)
from kits.tiny_parents import Model, dense, mean, mixture, tuned, with_layers

from raymerge.verifier.measurements import Report
from raymerge.verifier.observations import Observation, observations, short_names
from raymerge.verifier.observations.correspondence import moved_rows

OTHER = dense(7)
NOISE = np.random.default_rng(99)
QUERY = "model.layers.3.self_attn.q_proj.weight"
LARGE = 1e3 * BASE[QUERY]
BIASES = {f"model.layers.{layer}.self_attn.q_proj.bias": np.full(16, 1e-5) for layer in range(12)}
SHORT = dense(layers=2)
TURNED = {layer: (layer + 1) % 12 for layer in range(12)}
ZERO = np.zeros_like(BASE[QUERY])
UNUSED = BASE | {QUERY: ZERO}
"""With a matrix that only training fills."""
TRAINED_BIASES = {name: value * (99 if ".5." in name else 1.01) for name, value in BIASES.items()}


def _noise(value: np.ndarray) -> np.ndarray:
    return NOISE.standard_normal(value.shape) * 0.02


def _layers(model: Model) -> Model:
    return {name: value for name, value in model.items() if "layers" in name}


def _second_half(how: Callable[[np.ndarray], np.ndarray]) -> Model:
    found = SECOND
    for layer in range(6, 12):
        found = changed(found, f"layers.{layer}.", how)
    return found


FAULTS = {
    "swapped": (
        lambda: make_report(FIRST, swapped(SECOND, {3: 9})),
        "layers 3 and 9 of parent 2 (two) are swapped",
    ),
    "swapped, no base": (
        lambda: make_report(FIRST, swapped(SECOND, {3: 9}), base=None),
        "3 and 9 of parent 2",
    ),
    "swapped, heavy": (
        lambda: make_report(swapped(tuned(BASE, 3, 0.3), {3: 9}), FIRST),
        "3 and 9 of parent 1",
    ),
    "shifted": (
        lambda: make_report(FIRST, with_layers(SECOND, {5: 4, 6: 5, 7: 6})),
        "layers 5 to 7 of parent 2 (two) are layers 4 to 6 of the base: shifted by 1",
    ),
    "experts": (
        lambda: make_report(tuned(EXPERTS, 1), permuted(tuned(EXPERTS, 2)), base=EXPERTS),
        "experts of parent 2 (two) are in another order than those of the base: in layers 0 to 3",
    ),
    "base of one": (lambda: make_report(FIRST, OTHER), "parent 2 (two) does not come from the base"),
    "base, but for one large matrix": (
        lambda: make_report(FIRST | {QUERY: LARGE}, OTHER | {QUERY: LARGE}, base=BASE | {QUERY: LARGE}),
        "parent 2 (two) does not come from the base",
    ),
    "base of both": (lambda: make_report(OTHER, tuned(OTHER, 1)), "they have another one in common"),
    "bases": (lambda: make_report(FIRST, OTHER, base=None), "these two have not the same base"),
    "one of three": (
        lambda: make_report(FIRST, SECOND, OTHER, base=None),
        "parent 3 (three) has not the same base",
    ),
    "damaged layer": (
        lambda: make_report(changed(FIRST, "layers.7.", _noise), SECOND),
        "layer 7 of parent 1 (one) is far off",
    ),
    "damaged layer, no base": (
        lambda: make_report(changed(FIRST, "layers.7.", _noise), SECOND, base=None),
        "layer 7 of parent 1 (one) or parent 2",
    ),
    "damaged layer of three": (
        lambda: make_report(changed(FIRST, "layers.7.", _noise), SECOND, tuned(BASE, 3, 0.6), base=None),
        "layer 7 of parent 1 (one) is far off",
    ),
    "zeros": (
        lambda: make_report(FIRST, changed(SECOND, "layers.7.mlp", np.zeros_like)),
        "3 tensors of parent 2 (two) are all zeros: model.layers.7.mlp.gate_proj.weight",
    ),
    "constant": (
        lambda: make_report(changed(FIRST, "layers.7.mlp.up", lambda each: each * 0 + 0.02), SECOND),
        "1 tensor of parent 1 (one) is far off",
    ),
    "embedding": (
        lambda: make_report(changed(FIRST, "embed", _noise), SECOND),
        "far off, relative change 1.4",
    ),
    "nan": (
        lambda: make_report(changed(FIRST, "layers.2.mlp.up", lambda each: each * np.nan), SECOND),
        "1 tensor of parent 1 (one) with nan or infinity: model.layers.2.mlp.up_proj.weight",
    ),
    "base nan": (
        lambda: make_report(FIRST, SECOND, base=changed(BASE, "layers.3.mlp.up", lambda each: each * np.nan)),
        "1 tensor of the base with nan or infinity: model.layers.3.mlp.up_proj.weight",
    ),
    "base of zeros": (
        lambda: make_report(FIRST, SECOND, base=changed(BASE, "layers.3.mlp", np.zeros_like)),
        "3 tensors of the base are all zeros, but of no parent",
    ),
    "base with noise": (
        lambda: make_report(FIRST, SECOND, base=changed(BASE, "layers.3.", _noise)),
        "layer 3 of the base is far off from all parents, which agree",
    ),
    "base without attention": (
        lambda: make_report(FIRST, SECOND, base=changed(BASE, "self_attn", _noise)),
        "the tensors of role attention in the base have nothing in common with those of all parents",
    ),
    "base with experts in another order": (
        lambda: make_report(tuned(EXPERTS, 1), tuned(EXPERTS, 2), base=permuted(EXPERTS)),
        "the experts of the base are in another order than those of all parents, which agree: in",
    ),
    "base swapped": (
        lambda: make_report(FIRST, SECOND, base=with_layers(BASE, {5: 4, 6: 5, 7: 6})),
        "layers 6 and 7 of the base are layers 5 and 6 of all parents, which agree: shifted by 1",
    ),
    "half of zeros": (
        lambda: make_report(FIRST, _second_half(np.zeros_like)),
        "48 tensors of parent 2 (two) are",
    ),
    "half of noise": (
        lambda: make_report(FIRST, _second_half(_noise)),
        "layers 6 to 11 of parent 2 (two) are far off",
    ),
    "half of noise, no base": (
        lambda: make_report(FIRST, _second_half(_noise), base=None),
        "layers 6 to 11 of parent 1 (one) or parent 2 (two) are far off",
    ),
    "all of zeros": (
        lambda: make_report(changed(FIRST, "", np.zeros_like), SECOND),
        "98 tensors of parent 1",
    ),
    "all of zeros, no base": (
        lambda: make_report(changed(FIRST, "", np.zeros_like), SECOND, base=None),
        "98 tensors of parent 1 (one) are all zeros",
    ),
    "noise in one of two layers": (
        lambda: make_report(changed(tuned(SHORT, 1), "layers.1.", _noise), base=SHORT),
        "layer 1 of parent 1 (one) is far off",
    ),
    "rotated": (
        lambda: make_report(with_layers(FIRST, TURNED), SECOND),
        "layers 0 to 11 of parent 1 (one) stand in another order",
    ),
    "rotated, without embedding": (
        lambda: make_report(_layers(with_layers(FIRST, TURNED)), _layers(SECOND), base=_layers(BASE)),
        "layers 0 to 11 of parent 1 (one) stand in another order",
    ),
    "duplicated": (
        lambda: make_report(with_layers(FIRST, {3: 2}), SECOND),
        "layer 3 of parent 1 (one) is layer 2 of the base",
    ),
    "result nan": (
        lambda: make_report(FIRST, SECOND, merged=changed(FIRST, "3.mlp.up", lambda each: each * np.nan)),
        "1 tensor of the result with nan or infinity: model.layers.3.mlp.up_proj.weight",
    ),
    "result of zeros": (
        lambda: make_report(FIRST, SECOND, merged=changed(FIRST, "", np.zeros_like)),
        "98 tensors of the result are all zeros",
    ),
    "result of zeros, no base": (
        lambda: make_report(FIRST, SECOND, base=None, merged=changed(FIRST, "", np.zeros_like)),
        "98 tensors of the result are all zeros",
    ),
    "result with noise": (
        lambda: make_report(FIRST, SECOND, merged=changed(mean(FIRST, SECOND), "3.mlp", _noise)),
        "3 tensors of the result changed more than 10 times as much",
    ),
    "equal": (lambda: make_report(FIRST, FIRST), "parent 1 (one) and parent 2 (two) are equal"),
}


@pytest.mark.sample(13)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_the_one_problem_that_is_named(fault: str) -> None:
    make, sentence = FAULTS[fault]
    problems = [each for each in observations(make()) if each.severity == "problem"]
    assert len(problems) == 1, problems
    assert sentence in problems[0].sentence.lower()
    assert problems[0].remedy


SOUND = {
    "usual": usual,
    "no base": lambda: make_report(FIRST, SECOND, base=None, merged=mean(FIRST, SECOND)),
    "heavy": lambda: make_report(tuned(BASE, 3, 0.3), FIRST, tuned(BASE, 4, 0.3)),
    "very heavy": lambda: make_report(tuned(BASE, 3, 0.5), tuned(BASE, 4, 0.5)),
    "heavy, no base": lambda: make_report(tuned(BASE, 3, 0.3), FIRST, base=None),
    "sparse": lambda: make_report(tuned(BASE, 1, density=0.02), tuned(BASE, 2, density=0.02)),
    "one layer trained hard": lambda: make_report(
        changed(FIRST, "layers.11.", lambda each: each * 1.35), SECOND
    ),
    "a bias trained": lambda: make_report(FIRST | TRAINED_BIASES, base=BASE | BIASES),
    "one layer trained": lambda: make_report(
        BASE | changed(BASE, "layers.11.", lambda each: each * 1.1), FIRST
    ),
    "mixtures": lambda: make_report(tuned(EXPERTS, 1), tuned(EXPERTS, 2), base=EXPERTS),
    "the base": lambda: make_report(FIRST, BASE, merged=mean(FIRST, BASE)),
    "a matrix filled by training": lambda: make_report(
        FIRST | {QUERY: 0.1 * _noise(ZERO)}, SECOND | {QUERY: 0.1 * _noise(ZERO)}, base=UNUSED
    ),
    "large weights": lambda: make_report(
        FIRST, SECOND, merged={name: value + 4 * (FIRST[name] - value) for name, value in BASE.items()}
    ),
    "many": lambda: make_report(*(tuned(BASE, seed) for seed in range(4))),
    "tiny": lambda: make_report(tuned(dense(layers=1), 1), tuned(dense(layers=1), 2), base=dense(layers=1)),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_parents_are_not_called_broken(case: str) -> None:
    assert [each for each in observations(SOUND[case]()) if each.severity == "problem"] == []


def _sentence(report: Report, kind: str) -> str:
    return _one(report, kind).sentence


def _one(report: Report, kind: str) -> Observation:
    (found,) = [each for each in observations(report) if each.kind == kind]
    return found


def test_what_is_usual_is_said_in_one_sentence_with_its_numbers() -> None:
    (only,) = observations(usual())
    assert only.sentence.startswith("Nothing unusual: relative changes 0.015, cosines of changes")


def test_zeros_of_all_parents_are_theirs_and_not_the_base() -> None:
    found = observations(make_report(FIRST | {QUERY: ZERO}, SECOND | {QUERY: ZERO}))
    assert [(each.parents, each.tensors) for each in found] == [((0,), (QUERY,)), ((1,), (QUERY,))]


def test_a_report_on_a_part_says_so_first_and_does_not_call_the_whole_sound() -> None:
    first, second = observations(replace(usual(), skipped={"it cannot be read": 7, "it is gone": 2, "": 0}))
    assert first.sentence.startswith(
        "9 parts of tensors were not measured (7: it cannot be read; 2: it is gone)"
    )
    assert second.sentence.startswith("Nothing unusual in what was measured: relative changes")
    assert second.kind != "usual"


def test_experts_that_moved_with_their_neurons_are_known_by_their_router_rows() -> None:
    first, second = tuned(EXPERTS, 1), permuted(tuned(EXPERTS, 2))
    turned = changed(second, "experts", lambda each: each[NOISE.permutation(len(each))])
    models = {0: first, 1: turned, -1: EXPERTS}
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(4)]
    rows = [each for layer, name in enumerate(names) for each in router_rows(name, layer, models)]
    found = _one(make_report(first, turned, base=EXPERTS, routers=tuple(rows)), "experts_permuted")
    assert "a layer are others" in found.sentence
    assert "align: experts" in found.remedy


def test_experts_that_are_copies_of_one_are_not_in_another_order() -> None:
    assert moved_rows((0.1, 0.2, 0.9), (2, 2, 2), (0.95, 0.9, 0.9)) == {}
    assert moved_rows((0.1, 0.2, 0.9), (1, 0, 2), (0.95, 0.9, 0.9)) == {0: 1, 1: 0}
    assert moved_rows((0.1, 0.2, 0.1, 0.1), (1, 0, 0, 0), (0.95, 0.9, 0.3, 0.3)) == {}
    copies = tuned(EXPERTS, 1)
    for place in (0, 1, 2):
        for word in ("gate", "up", "down"):
            name = f"model.layers.1.mlp.experts.{{}}.{word}_proj.weight"
            copies[name.format(place)] = copies[name.format(5)]
    kinds = {each.kind for each in observations(make_report(copies, tuned(EXPERTS, 2), base=EXPERTS))}
    assert "experts_permuted" not in kinds


def test_hundreds_of_strange_experts_have_no_order_by_chance() -> None:
    report = synthetic_report(Shape(3, experts=384, parents=1))
    sketches = report.measurements.sketches
    sketches[:, 0] = NOISE.standard_normal(sketches[:, 0].shape)
    report.measurements.gram[:] = report.measurements.base[:, :, None] * 2
    assert [each.kind for each in observations(report) if each.severity == "problem"] == ["unrelated"]


def test_parents_with_problems_have_no_notes_beside() -> None:
    damaged = permuted(tuned(EXPERTS, 2))
    report = make_report(tuned(EXPERTS, 1), damaged, base=EXPERTS, merged=damaged)
    assert [each.kind for each in observations(report)] == ["experts_permuted"]


def test_experts_of_another_model_are_unlike_but_not_permuted() -> None:
    others = {
        name: mixture(5)[name] if ".mlp." in name else value for name, value in tuned(EXPERTS, 1).items()
    }
    kinds = {each.kind for each in observations(make_report(others, tuned(EXPERTS, 2), base=EXPERTS))}
    assert "experts_permuted" not in kinds
    assert "role_unlike" in kinds


def test_a_parent_that_is_the_base_is_named_as_a_note() -> None:
    report = make_report(FIRST, BASE, merged=mean(FIRST, BASE))
    assert _sentence(report, "is_base") == "Parent 2 (two) is the base: no number differs."


def test_of_two_models_that_are_compared_the_second_is_called_b() -> None:
    report = make_report(swapped(FIRST, {3: 9}), kind="diff")
    assert _sentence(report, "layers_moved") == "Layers 3 and 9 of B (one) are swapped against A."
    equal = _one(make_report(BASE, kind="diff"), "is_base")
    assert (equal.sentence, equal.remedy) == ("B (one) is A: no number differs.", "Check its place.")


def test_parents_that_oppose_each_other_are_named_with_where() -> None:
    against = {
        name: 2 * BASE[name] - value if "self_attn" in name and ".4." in name else SECOND[name]
        for name, value in FIRST.items()
    }
    against = {name: value + 0.02 * (SECOND[name] - BASE[name]) for name, value in against.items()}
    assert [each for each in observations(make_report(FIRST, against)) if each.kind == "conflict"] == []
    opposed = changed(against, "self_attn", lambda each: each)
    for layer in range(4, 9):
        for word in "qkvo":
            name = f"model.layers.{layer}.self_attn.{word}_proj.weight"
            opposed[name] = 2 * BASE[name] - FIRST[name]
    found = _one(make_report(FIRST, opposed), "conflict")
    assert "most in role attention, layers 4 to 8" in found.sentence
    assert (found.layers, found.roles) == ((4, 5, 6, 7, 8), ("attention",))


def test_a_result_that_is_one_parent_follows_it_and_lacks_the_other() -> None:
    report = make_report(FIRST, SECOND, merged=SECOND)
    assert "follows parent 2 (two)" in _sentence(report, "follows").replace(
        "follows two", "follows parent 2 (two)"
    )
    assert _sentence(report, "absent").startswith("Almost nothing of parent 1 (one)")


def test_changes_below_a_step_of_bfloat16_and_a_mean_of_many_are_noted() -> None:
    invisible = _one(make_report(tuned(BASE, 1, 0.0005)), "invisible")
    assert "below one step of bfloat16" in invisible.sentence
    assert "unless the result is stored in float32" in invisible.remedy
    parents = [tuned(BASE, seed) for seed in range(8)]
    weak = make_report(*parents[:4], merged=mean(*parents, *([BASE] * 4)))
    assert "of the norm of the largest parent's" in _sentence(weak, "shrunk")


def test_few_changes_in_other_places_are_noted() -> None:
    report = make_report(tuned(BASE, 1, density=0.02), tuned(BASE, 2, density=0.02))
    kinds = [each.kind for each in observations(report)]
    assert kinds == ["little_overlap", "sparse", "sparse"]
    assert "changed 1.9% of the base's numbers" in [each.sentence for each in observations(report)][1]


def test_a_layer_that_was_trained_much_more_is_a_note() -> None:
    report = make_report(changed(FIRST, "layers.11.", lambda each: each * 1.35), SECOND)
    found = _one(report, "layer_stands_out")
    assert found.sentence.startswith("Layer 11 of parent 1 (one) was changed more than its others")
    assert (found.layers, found.parents) == ((11,), (0,))


@pytest.mark.parametrize(("error", "named"), [(0.026, False), (0.11, True)])
def test_an_encoding_that_loses_much_is_noted(error: float, named: bool) -> None:
    report = synthetic_report(Shape(2))
    errors = report.measurements.encoding_errors
    errors[:, 0] = errors[:, 1] * error**2
    labels = [replace(label, stored_as="fp8_block") for label in report.measurements.labels]
    encoded = replace(report, measurements=replace(report.measurements, labels=tuple(labels)))
    found = [each.sentence for each in observations(encoded) if each.kind == "encoding_error"]
    assert (
        found
        == [
            "Encoding as fp8_block changed the merged tensors by 0.11 of their norm; less than 0.06 is usual."
        ]
        * named
    )


def test_short_names_are_as_long_as_they_must_be() -> None:
    assert short_names(("a/x/model", "a/y/model", "hub/other")) == ("x/model", "y/model", "other")
    assert short_names(("same", "same")) == ("same", "same")
