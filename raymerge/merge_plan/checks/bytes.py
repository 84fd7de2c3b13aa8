"""Proves that the bytes and views that tables name are there; collects contradictions."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.merge_plan.columns import Flags, Ints, codes, ints, lists, products, sums
from raymerge.merge_plan.plan import Plan

_REMEDY = (
    "Make the plan anew; if this comes again, it is a bug in raymerge: please report it with the recipe."
)


class Contradictions:
    """Contradictions in the order found."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []

    def __bool__(self) -> bool:
        return bool(self._problems)

    def say(self, where: str, what: str) -> None:
        """One contradiction."""
        self._problems.append(Problem(f"plan, {where}", f"{what}.", _REMEDY))

    def flag(self, table: str, broken: Flags, what: str) -> None:
        """A rule that the flagged rows of a table ``[rows]`` break, if there are any."""
        count = int(np.count_nonzero(broken))
        if count:
            more = f" ({count - 1} more rows alike)" if count > 1 else ""
            self.say(f"table {table}, row {int(np.argmax(broken))}", what + more)

    def problems(self) -> tuple[Problem, ...]:
        """Everything found."""
        return tuple(self._problems)


def check_bytes(plan: Plan, name: str, found: Contradictions) -> None:
    """Bytes lie within a file of their source."""
    table = plan[name]
    source, offset, nbytes = (ints(table, column) for column in ("source", "offset", "nbytes"))
    outside = outside_files(plan, source, codes(table, "key"), offset, nbytes)
    found.flag(name, outside, "it is not within a file of its source")


def outside_files(plan: Plan, source: Ints, key: tuple[Ints, list[str]], offset: Ints, nbytes: Ints) -> Flags:
    """Whether bytes ``[n]`` are not within a file of their source; keys as ``codes`` gives them."""
    size = _file_sizes(plan, source, *key)
    return np.asarray(
        (offset < 0) | (nbytes < 0) | (offset > size) | (nbytes > size - offset), dtype=np.bool_
    )


def stored_bits(table: pa.Table) -> Ints:
    """Bits of an element of each read ``[rows]``."""
    dtype, words = codes(table, "dtype")
    return np.array([DType(word).bits for word in words], dtype=np.int64)[dtype]


def _file_sizes(plan: Plan, source: Ints, key: Ints, keys: list[str]) -> Ints:
    """Size of the file of each read; -1 where the source has no such file."""
    sources = plan.manifest["sources"]
    table = np.full((len(sources), max(len(keys), 1)), -1, dtype=np.int64)
    position = {name: index for index, name in enumerate(keys)}
    for index, entry in enumerate(sources):
        for name, nbytes, _ in entry["files"]:
            if name in position:
                table[index, position[name]] = nbytes
    return np.asarray(table[source, key], dtype=np.int64)


def check_views(
    name: str, table: pa.Table, shape: tuple[Ints, Ints], found: Contradictions, *, span: Ints, rank: Ints
) -> None:
    """Views of ``table`` stay within ``span`` elements ``[rows]``."""
    lengths, strides = lists(table, "view_strides")
    viewed = lengths > 0
    found.flag(name, viewed & (lengths != rank), "its view has another rank than its shape")
    offset = ints(table, "view_offset")
    found.flag(name, ~viewed & (offset != 0), "it has an offset and no view")
    if found or not viewed.any():
        return
    sizes = shape[1][np.repeat(viewed, shape[0])]
    reach = sums(lengths, np.maximum(sizes - 1, 0) * strides)
    empty = (products(*shape) == 0) & viewed
    beyond = (offset < 0) | (reach < 0) | ((offset + reach >= span) & ~empty)
    found.flag(name, viewed & beyond, "its view leaves its region")
