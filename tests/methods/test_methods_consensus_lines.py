"""consensus_ta and lines, against float64 formulas written from the papers and cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kits.method_kit import Case, MethodKit, make_settings, merge, method_named, random_inputs, sources_of

SHAPE = (23, 41)


def run(
    name: str, case: Case, base: torch.Tensor, sources: list[torch.Tensor], position: float = 0.0
) -> torch.Tensor:
    method = method_named(name)
    settings = replace(make_settings(method, case, base.shape), position=position)
    return merge(method, settings, base, sources)


class TestConsensus(MethodKit):
    name = "consensus_ta"
    cases = (
        Case(sources=sources_of(1.0, 1.0, 1.0)),
        Case({"lambda": 0.7}, sources_of(0.5, 0.3, -0.2, mask_lambda=0.2)),
        Case({"consensus": 1}, sources_of(0.5)),
        Case({"consensus": 0}, sources_of(0.5, 0.0)),
    )


class TestLines(MethodKit):
    name = "lines"
    cases = (
        Case(sources=sources_of(1.0, 1.0, 1.0)),
        Case({"alpha": 0.2, "beta": 0.5}, sources_of(0.5, -0.3)),
        Case(sources=sources_of(0.5)),
    )


# consensus_ta -----------------------------------------------------------------------------------------


def test_consensus_by_hand() -> None:
    """Terms (1, 1, 1) are used by all; (4, 0, 0) by one; (3, 1, 0) by the first alone; (2, 2, 0) by two."""
    base = torch.tensor([10.0, 10.0, 10.0, 10.0])
    deltas = [[1.0, 4.0, 3.0, 2.0], [1.0, 0.0, 1.0, 2.0], [1.0, 0.0, 0.0, 0.0]]
    sources = [base + torch.tensor(delta) for delta in deltas]
    entries = sources_of(1.0, 1.0, 1.0, mask_lambda=0.4)
    two = run("consensus_ta", Case(sources=entries), base, sources)
    assert two.tolist() == [13.0, 10.0, 10.0, 14.0]
    one = run("consensus_ta", Case({"consensus": 1, "lambda": 0.5}, entries), base, sources)
    assert one.tolist() == [11.5, 12.0, 12.0, 12.0]
    three = run("consensus_ta", Case({"consensus": 3}, entries), base, sources)
    assert three.tolist() == [13.0, 10.0, 10.0, 10.0]


def test_an_element_as_near_to_the_base_as_to_the_merged_model_is_not_used() -> None:
    """The paper's inequality is strict: with factor 1, two equal deltas are half of their sum."""
    base = torch.tensor([10.0, 10.0])
    sources = [base + torch.tensor([2.0, 3.0]), base + torch.tensor([2.0, 1.0])]
    entries = sources_of(1.0, 1.0, mask_lambda=1.0)
    result = run("consensus_ta", Case({"consensus": 1}, entries), base, sources)
    assert result.tolist() == [10.0, 14.0]


def test_no_consensus_asked_for_is_task_arithmetic() -> None:
    base, sources = random_inputs(3, SHAPE)
    entries = sources_of(0.6, 0.3, -0.5)
    plain = run("task_arithmetic", Case({"lambda": 0.7}, entries), base, sources)
    free = run("consensus_ta", Case({"lambda": 0.7, "consensus": 0}, entries), base, sources)
    assert torch.equal(free, plain)


def test_lambda_has_no_part_in_the_masks() -> None:
    base, sources = torch.zeros(SHAPE), [delta - 0.5 for delta in random_inputs(3, SHAPE)[1]]
    full = run("consensus_ta", Case(sources=sources_of(1.0, 1.0, 1.0)), base, sources)
    half = run("consensus_ta", Case({"lambda": 0.5}, sources_of(1.0, 1.0, 1.0)), base, sources)
    assert torch.equal(half, full * 0.5)


def test_a_source_of_weight_0_uses_nothing() -> None:
    base, sources = random_inputs(2, SHAPE)
    result = run("consensus_ta", Case(sources=sources_of(1.0, 0.0)), base, sources)
    assert torch.equal(result, base)


@pytest.mark.parametrize(("wanted", "fits"), [(0, True), (2, True), (3, False)])
def test_a_consensus_of_more_than_there_are_is_refused(wanted: int, fits: bool) -> None:
    method = method_named("consensus_ta")
    sentence = method.check(make_settings(method, Case({"consensus": wanted}, sources_of(1.0, 1.0))))
    expected = "consensus is 3, but only 2 of the sources merge here, so nothing would be kept"
    assert sentence == (None if fits else expected)


# lines ------------------------------------------------------------------------------------------------


def test_lines_by_hand() -> None:
    """Two sources: 1/2 in the first of three layers, 3/4 in the second, the whole sum in the third."""
    base = torch.tensor([1.0, -2.0])
    sources = [base + torch.tensor([4.0, 0.0]), base + torch.tensor([4.0, -8.0])]
    case = Case(sources=sources_of(1.0, 1.0))
    layers = [run("lines", case, base, sources, position).tolist() for position in (0.0, 0.5, 1.0)]
    assert layers == [[5.0, -6.0], [7.0, -8.0], [9.0, -10.0]]


def test_one_source_is_scaled_by_what_alpha_says() -> None:
    base, sources = torch.zeros(4), [torch.ones(4)]
    case = Case({"alpha": 0.25}, sources_of(1.0))
    assert run("lines", case, base, sources).tolist() == [0.25] * 4
    assert run("lines", case, base, sources, 1.0).tolist() == [1.0] * 4


def test_the_last_layer_of_lines_is_task_arithmetic() -> None:
    base, sources = random_inputs(3, SHAPE)
    entries = sources_of(0.6, 0.3, -0.5)
    plain = run("task_arithmetic", Case(sources=entries), base, sources)
    assert torch.equal(run("lines", Case({"alpha": 0.5}, entries), base, sources, 1.0), plain)
