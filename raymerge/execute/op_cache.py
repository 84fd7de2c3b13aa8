"""The bytes of single ops, made when they are asked for, and kept for whoever asks again: also for another
plan over the same sources, as far as it makes the same of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import TypeAlias

import numpy as np

from raymerge.execute.in_memory import Bytes, OpMaker, Window
from raymerge.merge_plan.expressions import GatherInput, Read
from raymerge.merge_plan.jobs import GatheredInput, Input, Jobs, OpJob
from raymerge.merge_plan.plan import expression_to_json, ints, made_bytes
from raymerge.merge_plan.tables import Plan

Products: TypeAlias = tuple[Bytes, ...]
"""The bytes of an op, and of the scales that are made with it."""


class OpCache:
    """Bytes of ops by what determines them, the least recently used dropped first. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes that it holds at most."""
        self._limit = limit
        self._lock = threading.Lock()
        self._products: OrderedDict[bytes, Products] = OrderedDict()
        self.nbytes = 0

    def get(self, key: bytes) -> Products | None:
        with self._lock:
            if key in self._products:
                self._products.move_to_end(key)
            return self._products.get(key)

    def put(self, key: bytes, products: Products) -> None:
        nbytes = _size(products)
        if nbytes > self._limit:
            return
        with self._lock:
            if key in self._products:
                return
            while self.nbytes + nbytes > self._limit:
                self.nbytes -= _size(self._products.popitem(last=False)[1])
            self._products[key] = products
            self.nbytes += nbytes


def _size(products: Products) -> int:
    return sum(each.nbytes for each in products)


class MadeOps:
    """The bytes of the ops of a plan. One at a time asks; what is missing is made side by side."""

    def __init__(
        self, plan: Plan, maker: OpMaker, cache: OpCache, *, identities: Sequence[str], together: int
    ) -> None:
        """``identities``: what tells the contents of each source apart from others, "" where nothing does.
        ``together``: bytes that are made at once, unless one op makes more."""
        self._maker = maker
        self._cache = cache
        self._identities = identities
        self._together = together
        self._seed = int(plan.manifest["seed"])
        self._jobs = Jobs(plan)
        ops = plan["ops"]
        shards = plan["shards"].column("name").to_pylist()
        self._shards = [shards[each] for each in ints(ops, "shard").tolist()]
        self._offsets, self._sizes = ints(ops, "offset").tolist(), ints(ops, "nbytes").tolist()
        self._copy_of, self._made_bytes = ints(ops, "copy_of").tolist(), made_bytes(plan)
        self._keys: dict[int, tuple[bytes | None, tuple[int, ...]]] = {}
        self._lock = threading.Lock()

    def read(self, ops: Sequence[int]) -> Iterator[tuple[int, Bytes]]:
        """Each op's number and bytes, some at a time. Raises as ``OpMaker.submit``."""
        with self._lock:
            for batch in self._batches(ops):
                made = self._products(dict.fromkeys(map(self._maker.maker, batch)))
                for op in batch:
                    yield op, made[op if self._copy_of[op] < 0 else self._copy_of[op]]

    def _batches(self, ops: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        nbytes = 0
        for op in ops:
            size = int(self._made_bytes[self._maker.maker(op)])
            if batch and nbytes + size > self._together:
                yield batch
                batch, nbytes = [], 0
            batch.append(op)
            nbytes += size
        if batch:
            yield batch

    def _products(self, made_by: Iterable[int]) -> dict[int, Bytes]:
        """The bytes of what these ops make, by the number of the op that has them."""
        found: dict[int, Bytes] = {}
        missing: list[tuple[bytes | None, tuple[int, ...], Products]] = []
        for op in made_by:
            key, members = self._key(op)
            products = None if key is None else self._cache.get(key)
            if products is None:
                products = tuple(np.empty(self._sizes[each], np.uint8) for each in members)
                missing.append((key, members, products))
            found |= zip(members, products, strict=True)
        self._make([(members, products) for _, members, products in missing])
        for key, _, products in missing:
            if key is not None:
                self._cache.put(key, products)
        return found

    def _make(self, missing: Sequence[tuple[tuple[int, ...], Products]]) -> None:
        share = -(-len(missing) // self._maker.lanes)
        futures = []
        for first in range(0, len(missing), max(1, share)):
            own = missing[first : first + share]
            windows = [
                Window(self._shards[op], self._offsets[op], target)
                for members, products in own
                for op, target in zip(members, products, strict=True)
            ]
            ops = [op for members, _ in own for op in members]
            futures.append(self._maker.submit(ops, windows))
        for future in futures:
            future.result()

    def _key(self, op: int) -> tuple[bytes | None, tuple[int, ...]]:
        """What determines the bytes that an op makes, None where nothing does for sure; and the ops that have
        them."""
        if op not in self._keys:
            (job,) = self._jobs.these([(op, (op,))])
            members = (job, job.scales, job.tensor_scale, job.zero_points)
            numbers = tuple(each.index for each in members if each is not None)
            self._keys[op] = self._digest(job), numbers
        return self._keys[op]

    def _digest(self, job: OpJob) -> bytes | None:
        sources = sorted({read.source for each in (job, *job.joined_with) for read in _reads(each)})
        if not all(self._identities[each] for each in sources):
            return None
        read = [(each, self._identities[each]) for each in sources]
        content = (self._seed, self._maker.numerics, read, _content(job))
        return blake2b(repr(content).encode(), digest_size=20).digest()


def _reads(job: OpJob) -> Iterator[Read]:
    for each in job.inputs:
        if isinstance(each, Read):
            yield each
        else:
            yield from chain.from_iterable((own.read, *own.factors) for own in each.inputs)


def _content(job: OpJob) -> Hashable:
    parts = [
        (part.logical, part.shape, part.view, [_input(each) for each in part.inputs]) for part in job.parts
    ]
    expression = sorted(expression_to_json(job.expression).items())
    size = job.first_element, job.num_elements, job.is_flat, job.check_finite
    return repr((expression, size, parts, [_content(each) for each in job.joined_with]))


def _input(source: Input) -> Hashable:
    if isinstance(source, GatheredInput):
        inputs: tuple[GatherInput, ...] = source.inputs
        return source.num_rows, source.num_columns, source.real_rows, inputs, source.runs.tobytes()
    return source
