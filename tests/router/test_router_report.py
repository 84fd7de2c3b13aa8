"""What is told of finished rows."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.stages.router.results import (
    Choices,
    LayerReport,
    choices_of,
    condition_of,
    gate_report,
    layer_report,
)

INFINITE = math.inf


def summary_of(*layers: LayerReport, mode: str = "hidden") -> dict[str, Any]:
    report = json.loads(json.dumps(gate_report(mode, ("a", "b"), layers), allow_nan=False))
    return dict(report["summary"])


# Condition


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([[1.0, 2.0, 3.0]], 1.0),
        ([[1.0, 0.0], [0.0, 1.0]], 1.0),
        ([[5.0, 5.0], [5.0, 5.0]], INFINITE),
        ([[0.0, 0.0], [0.0, 0.0]], INFINITE),
        ([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], INFINITE),
        # Four rows whose differences have two dimensions.
        ([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], INFINITE),
        ([[3.0, 0.0, 0.0], [-3.0, 0.0, 0.0], [0.0, 1.0, 0.0]], 3 * math.sqrt(3)),
    ],
)
def test_condition_of_differences(rows: list[list[float]], wanted: float) -> None:
    assert condition_of(torch.tensor(rows)) == pytest.approx(wanted, rel=1e-6)


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 5), st.integers(0, 99))
def test_what_all_rows_have_in_common_does_not_count(count: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 8, generator=chance)
    common = torch.randn(8, generator=chance)
    assert condition_of(rows + common) == pytest.approx(condition_of(rows), rel=1e-4)
    assert condition_of(rows * 7) == pytest.approx(condition_of(rows), rel=1e-4)


# Choices


def test_choices_by_hand() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    inputs = torch.tensor([[3.0, 1.0], [0.0, 1.0], [1.0, 5.0]])
    found = choices_of(rows, inputs, (0, 0, 1))
    assert found.first.tolist() == [[1.0, 1.0], [0.0, 1.0]]
    assert found.margins.tolist() == [3.0, 4.0]
    told = layer_report(4, rows, found)
    assert told == LayerReport(4, 1.0, routing=(0.5, 1.0), load=(0.25, 0.75), margin=2.75)
    assert told.entropy == pytest.approx(0.25 * 2 + 0.75 * math.log2(4 / 3))


def test_experts_count_alike_however_many_tokens_they_have() -> None:
    found = Choices(torch.tensor([[90.0, 10.0], [0.0, 1.0]]).double(), torch.tensor([100.0, 3.0]).double())
    told = layer_report(0, torch.eye(2), found)
    assert told.routing == (0.9, 1.0)
    assert told.load == pytest.approx((0.45, 0.55))
    assert told.margin == pytest.approx(2.0)


# The whole


def test_layers_whose_texts_prove_nothing() -> None:
    summary = summary_of(
        LayerReport(3, 1.0, separation=2.0),
        LayerReport(4, 1.0, separation=-0.5),
        LayerReport(7, 1.0, separation=0.09),
        mode="ridge",
    )
    assert summary["unproven"] == [4, 7]
    assert summary["separation"] == pytest.approx(0.53)
    assert summary_of(LayerReport(0, 1.0))["unproven"] == []
    assert summary_of(LayerReport(0, 1.0))["separation"] is None


def test_the_summary_is_over_layers() -> None:
    summary = summary_of(
        LayerReport(0, 2.0, (0.5, 1.0), (0.5, 0.5), 1.0), LayerReport(5, 7.0, (0.7, 0.8), (1.0, 0.0), 3.0)
    )
    assert summary["condition"] == 7.0
    assert summary["ill_conditioned"] == [5]
    assert summary["routing"] == pytest.approx([0.6, 0.9])
    assert summary["entropy"] == 0.5
    assert summary["lowest_entropy"] == 0.0
    assert summary["most_entropy"] == 1.0
    assert summary["margin"] == 2.0


def test_ridge_has_a_limit_of_its_own() -> None:
    layers = LayerReport(0, 50.0), LayerReport(1, 101.0)
    assert summary_of(*layers)["ill_conditioned"] == [0, 1]
    assert summary_of(*layers, mode="ridge")["ill_conditioned"] == [1]


shares = st.lists(st.floats(0, 1), min_size=2, max_size=2).map(tuple)
layers_of = st.lists(
    st.builds(
        LayerReport,
        layer=st.integers(0, 99),
        condition=st.floats(1, 1e9) | st.just(INFINITE),
        routing=st.none() | shares,
        load=st.none() | shares,
        margin=st.none() | st.floats(0, 1e6),
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=100)
@given(layers_of, st.sampled_from(("hidden", "ridge", "random")))
def test_reports_go_through_json(layers: list[LayerReport], mode: str) -> None:
    report = gate_report(mode, ("a", "b"), layers, (3, 4), (1,))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert (report["kind"], report["mode"], report["experts"]) == ("gates", mode, ["a", "b"])
    assert (report["num_judged"], report["on_own"]) == ([3, 4], [1])
    for found, layer in zip(report["layers"], layers, strict=True):
        assert found["condition"] == (layer.condition if math.isfinite(layer.condition) else None)
        assert found["routing"] == (None if layer.routing is None else list(layer.routing))
        assert (found["layer"], found["margin"], found["entropy"]) == (
            layer.layer,
            layer.margin,
            layer.entropy,
        )
