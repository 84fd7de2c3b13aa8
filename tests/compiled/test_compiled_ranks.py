"""Rows sparsified by rank: the ranks of a stable sort, whatever the row, in a time that no row stretches."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raymerge.kernels.ranks import sparsify_rows

Row = NDArray[np.float32]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, math.inf, -math.inf, math.nan, -math.nan]
values = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))


def ranks_by_numpy(rows: Row) -> NDArray[np.int64]:
    """Places in a stable sort of the magnitudes, NaN last."""
    order = np.argsort(np.abs(rows), axis=1, kind="stable")
    ranks = np.empty(rows.shape, np.int64)
    np.put_along_axis(ranks, order, np.arange(rows.shape[1])[None], axis=1)
    return ranks


def ranks_of(rows: Row) -> NDArray[np.int64]:
    """What ``sparsify_rows`` takes for the ranks: every element is kept, its factor's bits are its rank."""
    length = rows.shape[1]
    table = (np.int64(2**31 - 1) << 32) | np.arange(length)
    found = np.zeros(rows.size, np.float32)
    sparsify_rows(rows.reshape(-1), table, found)
    return found.view(np.int32).reshape(rows.shape).astype(np.int64)


def rows_of_every_kind(length: int) -> dict[str, Row]:
    """As they occur, and such as no map to buckets fits."""
    random = np.random.default_rng(4)
    even = random.standard_normal((3, length)).astype(np.float32)
    coarse = np.round(even * 64) / 64
    outlier = even.copy()
    outlier[:, length // 2] = 1e25
    return {
        "even": even,
        "small": even * np.float32(1e-30),
        "with equals": coarse,
        "mostly zero": np.where(np.abs(even) > 2, even, np.float32(0)),
        "heavy tails": random.standard_t(1.5, (3, length)).astype(np.float32),
        "an outlier": outlier,
        "exponential": np.exp2(random.uniform(-120, 120, (3, length))).astype(np.float32),
        "all zero": np.zeros((3, length), np.float32),
        "all equal": np.full((3, length), -2.5, np.float32),
        "two values": random.integers(1, 3, (3, length)).astype(np.float32),
        "denormal": (random.integers(0, 1000, (3, length)) * 1e-45).astype(np.float32),
        "rising": np.arange(3 * length, dtype=np.float32).reshape(3, length),
        "falling": np.arange(3 * length, dtype=np.float32)[::-1].reshape(3, length).copy(),
        "infinite": np.full((3, length), np.inf, np.float32),
        "no numbers": np.full((3, length), np.nan, np.float32),
    }


KINDS = sorted(rows_of_every_kind(1))


def differences(length: int, change: float, seed: int = 0) -> Row:
    """Three rows of differences of bfloat16 numbers, the second of other scales."""
    generator = np.random.default_rng((length, seed))
    base = generator.standard_normal((3, length)) * 0.02
    pair = np.stack([base, base + generator.standard_normal(base.shape) * change]).astype(np.float32)
    # Rounded half to even, as bfloat16 is.
    patterns = pair.view(np.uint32)
    short = ((patterns + 0x7FFF + (patterns >> 16 & 1)) & 0xFFFF_0000).astype(np.uint32).view(np.float32)
    short *= np.array([[1.0], [2.0**-100], [2.0**100]], np.float32)
    return np.asarray(short[1] - short[0], np.float32)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), length=st.integers(1, 40), num_rows=st.integers(0, 4))
def test_ranks_are_those_of_a_stable_sort(data: st.DataObject, length: int, num_rows: int) -> None:
    size = length * num_rows
    drawn = data.draw(st.lists(values, min_size=size, max_size=size))
    rows = np.array(drawn, np.float32).reshape(num_rows, length)
    assert np.array_equal(ranks_of(rows), ranks_by_numpy(rows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 1000, 5000])
def test_ranks_in_rows_of_every_kind(kind: str, length: int) -> None:
    rows = rows_of_every_kind(length)[kind]
    assert np.array_equal(ranks_of(rows), ranks_by_numpy(rows))


def test_nan_of_every_payload_are_equal() -> None:
    bits = np.array([0x7FC0_0001, 0xFF80_0001, 0x7FFF_FFFF, 0x7F80_0000, 0x0000_0000, 0x7FC0_0000], np.uint32)
    assert ranks_of(bits.view(np.float32)[None]).tolist() == [[2, 3, 4, 1, 0, 5]]


def test_what_is_kept_depends_on_number_and_rank() -> None:
    """Ranks 2, 0 and 1; of each the largest number that is kept, and its factor."""
    table = np.array([-100, 0, 2**31 - 1], np.int64) << 32
    table |= np.array([1.5, 2.5, 3.5], np.float32).view(np.int32)
    delta = np.array([9.0, -1.0, 4.0] * 2, np.float32)
    numbers = np.array([2**31 - 1, -100, 0, -(2**31), -99, 1], np.int32)
    found = numbers.view(np.float32)
    sparsify_rows(delta, table, found)
    assert found.tolist() == [3.5, 1.5, 2.5, 3.5, 0.0, 0.0]
    assert not np.signbit(found).any()


@pytest.mark.parametrize("change", [1e-4, 1e-3, 3e-3])
@pytest.mark.parametrize("length", [1023, 1024, 1025, 5632, 65_535, 65_536])
def test_differences_are_ranked_in_rows_of_any_length(length: int, change: float) -> None:
    rows = differences(length, change)
    assert np.array_equal(ranks_of(rows), ranks_by_numpy(rows))


def test_ranks_where_one_level_holds_many_magnitudes() -> None:
    """Too many to be counted, as many that are spread, and equal ones there or far below."""
    row = np.ones(4096, np.float32)
    row[::10] = 1.0 + np.arange(410)[::-1] * np.float32(2.0**-22)
    assert np.array_equal(ranks_of(row[None]), ranks_by_numpy(row[None]))
    row[::10] = np.exp2(np.arange(410)[::-1] / np.float32(40.0)) + np.float32(2.0**-22)
    row[5:50:10] = (1e-30, 2e-30, 1e-30, 0.0, -3e-38)
    row[55:75:10] = (math.nan, -math.nan)
    row[1::10] = -1.0
    row[7], row[17] = np.float32(1 + 2.0**-23), -np.float32(1 + 2.0**-20)
    assert np.array_equal(ranks_of(row[None]), ranks_by_numpy(row[None]))
    row[55:75:10] = 0.0
    assert np.array_equal(ranks_of(row[None]), ranks_by_numpy(row[None]))


def test_rows_of_both_kinds_in_one_call() -> None:
    few, many = differences(2048, 1e-3), rows_of_every_kind(2048)["even"]
    rows = np.concatenate([few, many, few[::-1], many[:1], few])
    assert np.array_equal(ranks_of(rows), ranks_by_numpy(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_takes_much_longer(kind: str) -> None:
    """With room for a busy machine: a sort gone quadratic would take a thousand times as long."""
    rows = {name: rows_of_every_kind(20_000)[name] for name in ("even", kind)}
    seconds = {}
    for name, own in rows.items():
        ranks_of(own[:1])
        runs = []
        for _ in range(3):
            begun = time.thread_time()
            ranks_of(own)
            runs.append(time.thread_time() - begun)
        seconds[name] = min(runs)
    assert seconds[kind] < 20 * seconds["even"]
