"""sce, against the definition in float64 and cases worked out by hand."""

from __future__ import annotations

import pytest
import torch
from kits.method_kit import Case, MethodKit, make_settings, merge, method_named, random_inputs

from raymerge.methods import BLOCK


def run(base: torch.Tensor, sources: list[torch.Tensor], select_topk: float = 1.0) -> torch.Tensor:
    case = Case({"select_topk": select_topk}, ({},) * len(sources))
    return merge(method_named("sce"), make_settings(method_named("sce"), case, base.shape), base, sources)


class TestSce(MethodKit):
    name = "sce"
    cases = (
        Case(sources=({}, {}, {})),
        Case({"select_topk": 0.6}, ({}, {}, {})),
        Case({"select_topk": 0.05, "int8_mask": True}, ({}, {})),
        Case({"select_topk": 0.5}, ({},)),
    )


# Against the definition -------------------------------------------------------------------------------


def test_by_hand() -> None:
    """Squares 25 and 75: weights 1/4 and 3/4. Signs go to both, the second, the first and the first."""
    base = torch.full((4,), 1.0)
    first, second = torch.tensor([4.0, -1.0, -2.0, 2.0]), torch.tensor([7.0, 5.0, 1.0, 0.0])
    result = run(base, [base + first, base + second])
    assert result.tolist() == [1 + (4 + 3 * 7) / 4, 6.0, -1.0, 3.0]


def test_selection_by_hand() -> None:
    """The deltas differ in three of four elements, by 6, 2 and 4: two thirds are the first and the last."""
    base = torch.zeros(4)
    first, second = torch.tensor([3.0, 1.0, 5.0, 4.0]), torch.tensor([-3.0, 3.0, 5.0, 8.0])
    result = run(base, [first, second], select_topk=2 / 3)
    # Squares of what is selected: 9 + 16 and 9 + 64; the tie of the first element is positive.
    merged = (4 * 25 + 8 * 73) / (25 + 73)
    assert result.tolist() == pytest.approx([3.0, 0.0, 0.0, merged], rel=1e-6)


# What mergekit gets wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32,), (7, 5), (2, 3, 4), ()])
@pytest.mark.parametrize("select_topk", [0.0, 0.5])
def test_deltas_that_are_all_alike_select_nothing_and_the_shape_stays(
    shape: tuple[int, ...], select_topk: float
) -> None:
    base, [source] = random_inputs(1, shape)
    assert torch.equal(run(base, [source] * 3, select_topk), base)
    assert torch.equal(run(base, [base] * 3, select_topk), base)


def test_a_source_that_changes_more_weighs_more_however_small_the_change() -> None:
    base = torch.zeros(1000)
    result = run(base, [torch.full((1000,), 1e-6), torch.full((1000,), 3e-6)])
    torch.testing.assert_close(result, torch.full((1000,), 2.8e-6), rtol=1e-6, atol=0)


def test_a_source_alone_with_its_sign_keeps_its_delta_whole() -> None:
    """Also one of a weight far below 1e-6, which mergekit's divisor would cut down."""
    first, second = torch.zeros(1000), torch.zeros(1000)
    first[:500], second[500:] = 1e-4, 1.0
    result = run(torch.zeros(1000), [first, second])
    torch.testing.assert_close(result, first + second, rtol=1e-6, atol=0)


# Ties and passes --------------------------------------------------------------------------------------


def test_of_equal_deviations_the_right_share_is_selected() -> None:
    count = 4 * BLOCK
    result = run(torch.zeros(count), [torch.ones(count), torch.full((count,), 3.0)], 0.25)
    selected = (result != 0).double()
    assert float(selected.mean()) == pytest.approx(0.25, abs=0.005)
    assert float((selected.view(4, -1).mean(dim=1) - 0.25).abs().max()) < 0.01


def test_what_does_not_differ_is_never_selected() -> None:
    base, sources = random_inputs(2, (4000,))
    sources[0][:3000] = sources[1][:3000]
    result = run(base, sources, 0.999)
    assert torch.equal(result[:3000], base[:3000])
    assert int((result != base).sum()) == 999


@pytest.mark.parametrize(("select_topk", "passes"), [(1.0, 1), (0.999, 2), (0.0, 2)])
def test_passes(select_topk: float, passes: int) -> None:
    method = method_named("sce")
    settings = make_settings(method, Case({"select_topk": select_topk}, ({}, {})))
    assert method.kernel.passes(settings) == passes
