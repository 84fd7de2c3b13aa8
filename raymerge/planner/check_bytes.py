"""Proves of tables that name bytes of sources that these are there, and that views stay within them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from raymerge.dtypes import DType
from raymerge.planner.columns import Ints, codes, ints, lists, products, sums
from raymerge.planner.contradictions import Contradictions
from raymerge.planner.plan import Plan


def check_bytes(plan: Plan, name: str, found: Contradictions) -> None:
    """Bytes lie within a file of their source."""
    table = plan[name]
    offset, nbytes = ints(table, "offset"), ints(table, "nbytes")
    size = _file_sizes(plan, table)
    outside = (offset < 0) | (nbytes < 0) | (offset > size) | (nbytes > size - offset)
    found.flag(name, outside, "it is not within a file of its source")


def stored_bits(table: pa.Table) -> Ints:
    """Bits of an element of each read ``[rows]``."""
    dtype, words = codes(table, "dtype")
    return np.array([DType(word).bits for word in words], dtype=np.int64)[dtype]


def _file_sizes(plan: Plan, reads: pa.Table) -> Ints:
    """Size of the file of each read; -1 where the source has no such file."""
    key, keys = codes(reads, "key")
    sources = plan.manifest["sources"]
    table = np.full((len(sources), max(len(keys), 1)), -1, dtype=np.int64)
    position = {name: index for index, name in enumerate(keys)}
    for index, source in enumerate(sources):
        for name, nbytes, _ in source["files"]:
            if name in position:
                table[index, position[name]] = nbytes
    return np.asarray(table[ints(reads, "source"), key], dtype=np.int64)


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
