"""Which parts of a plan have the same bytes on any device: those in which nothing is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.merge_cases import Family, make_family, recipes

from raymerge.api import plan
from raymerge.merge_plan.elements import computed_rows, copied_segments
from raymerge.merge_plan.plan import Plan
from raymerge.publish.segment_work import SegmentWork
from raymerge.publish.shard_work import ShardWork, shard_orders


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("copies"), hidden=256)


def _layers(family: Family, **scaled: Any) -> dict[str, Any]:
    """Layer 0 and what is no layer as they are, layer 1 with what is said of it."""
    base = str(family.base)
    return {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": base, "layer_range": [0, 1]}]},
            {"sources": [{"model": base, "layer_range": [1, 2], **scaled}]},
        ],
    }


def _texts(found: Plan, segment: int) -> set[str]:
    """What is done in the rows of a segment."""
    (span,) = found["segments"].slice(segment, 1).to_pylist()
    rows = found["rows"].slice(span["first_row"], span["num_rows"]).to_pylist()
    return {found.expressions[row["expression"]].text() for row in rows if row["copy_of"] < 0}


def test_a_segment_is_copied_if_all_of_its_rows_are(family: Family) -> None:
    found = plan(_layers(family, parameters={"scale": 0.5}))
    copied, every = copied_segments(found), range(len(found["segments"]))
    assert copied == {number for number in every if _texts(found, number) <= {"read copy"}}
    assert 0 < len(copied) < len(every)


def test_where_nothing_is_computed_all_segments_are_copied(family: Family) -> None:
    found = plan(_layers(family))
    assert copied_segments(found) == frozenset(range(len(found["segments"])))
    assert not computed_rows(found).any()


@pytest.mark.parametrize("more", [{"dtype": "float32"}, {"dtype": "float16"}])
def test_another_dtype_counts_as_computed(family: Family, more: dict[str, Any]) -> None:
    assert copied_segments(plan({**_layers(family), **more})) == frozenset()


def test_codes_and_their_scales_count_as_computed(family: Family) -> None:
    found = plan({**_layers(family), "out_format": "fp8_block"})
    encoded = {n for n in range(len(found["segments"])) if any("encode" in each for each in _texts(found, n))}
    assert encoded
    assert not encoded & copied_segments(found)


@pytest.mark.parametrize("method", ["linear", "ties", "slerp"])
def test_a_merge_of_all_tensors_has_no_copies(family: Family, method: str) -> None:
    assert copied_segments(plan(recipes(family)[method])) == frozenset()


def test_a_shard_is_copied_if_all_that_it_is_made_of_is(family: Family) -> None:
    found = plan({**_layers(family, parameters={"scale": 0.5}), "shard_size": 200_000})
    orders = shard_orders(found)
    segments: Any = SegmentWork(found, (), Path("staging"), None, 1)  # type: ignore[arg-type]
    copied = ShardWork(segments, "s3://bucket/x", None, orders).copies()
    texts = [set().union(*(_texts(found, each) for each in order.segments)) for order in orders]
    assert copied == {number for number, each in enumerate(texts) if each <= {"read copy"}}
    assert 0 < len(copied) < len(orders)
