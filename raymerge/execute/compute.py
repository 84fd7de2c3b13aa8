"""What is computed of a logical tensor: its float32 inputs, gathered rows, deltas, the method's kernel.

Makes the rows of gathered inputs in float32: adds products, places rows, takes means.

Every row is computed alike for any tile and any number of threads: products of matrices and sums over rows
are taken in groups of ROW_GROUP stored rows, with one thread; the rest is element by element."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import numpy as np

from raymerge import methods
from raymerge.deferred import torch
from raymerge.device_numerics import divisor, torch_threads
from raymerge.dtypes import DType
from raymerge.execute.decoding import decode, is_aligned, numbers, take_elements, typed
from raymerge.execute.reading import Raw, RawCodes, RawInput, RawRows
from raymerge.merge_plan.expressions import Expression, GatherInput, Product, Read
from raymerge.merge_plan.jobs import GatheredInput, Input, JobPart, Taken
from raymerge.storage.local.buffers import aligned_buffer


class Gatherer:
    def __init__(self, source: GatheredInput, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._products: tuple[Addition | None, ...] = ()
        columns = source.num_columns if source.is_padded else 0
        self._padding = torch.zeros(columns, dtype=torch.float64, device=device)
        """The mean of all rows: float64 ``[columns]``, nothing where no row is padding."""

    def load(self, raw: RawRows) -> None:
        """Take up the factors of the products, once for all tiles."""
        self._products = tuple(
            None if gather_input.product is None else Addition(gather_input.product, factors, self._device)
            for gather_input, factors in zip(self._source.inputs, raw.factors, strict=True)
        )

    def observe(self, raw: RawRows) -> None:
        """Take whole groups of rows into the mean of all rows; they come in order."""
        rows = self._rows(raw)
        with torch_threads(1):
            for first in range(0, raw.num_rows, methods.ROW_GROUP):
                self._padding.add_(rows[first : first + methods.ROW_GROUP].double().sum(0))

    def conclude(self) -> None:
        self._padding.div_(divisor(max(1, self._source.real_rows), self._padding))

    def elements(self, raw: RawRows) -> torch.Tensor:
        """The elements of a tile: float32 ``[count]``, memory of its own."""
        return self._rows(raw).flatten()[raw.begin : raw.begin + raw.count]

    def _rows(self, raw: RawRows) -> torch.Tensor:
        """The rows of a window: float32 ``[num_rows, columns]``."""
        # Any value added to -0.0 stays what it is, -0.0 too.
        rows = torch.full((raw.num_rows, self._source.num_columns), -0.0, device=self._device)
        for gather_input, taken, stored, product in zip(
            self._source.inputs, raw.taken, raw.stored, self._products, strict=True
        ):
            if len(taken.moves):
                self._place(rows, taken, self._stored(gather_input, taken, stored, product))
        for first, stop, count in self._source.covers(raw.taken, raw.num_rows):
            if count == 0:
                rows[first:stop] = 0.0
            elif count > 1:
                rows[first:stop].div_(divisor(count, rows))
        if self._source.is_padded:
            rows[max(0, self._source.real_rows - raw.first_row) :] = self._padding.float()
        return rows

    def _stored(
        self, gather_input: GatherInput, taken: Taken, stored: torch.Tensor, product: Addition | None
    ) -> torch.Tensor:
        values = decode(stored, gather_input.read, self._device).view(-1, self._source.num_columns)
        if product is not None:
            with torch_threads(1):
                product.add_to(values, taken)
        return values

    @staticmethod
    def _place(rows: torch.Tensor, taken: Taken, stored: torch.Tensor) -> None:
        for to, place, count in taken.moves.tolist():
            rows[to : to + count].add_(stored[place : place + count])


class Addition:
    """What a product adds to rows, with its factors in float32 on the device."""

    def __init__(self, product: Product, factors: Sequence[torch.Tensor], device: torch.device) -> None:
        decoded = iter(
            [decode(raw, read, device) for raw, read in zip(factors, product.factors, strict=True)]
        )
        up = None if product.up is None else next(decoded).view(-1, product.rank)
        down = next(decoded).view(product.rank, -1)
        self._left = down.T if product.transposed else up
        """None for the rows themselves."""
        self._right = up.T if product.transposed and up is not None else down
        self._scale = product.scale
        self._magnitude = next(decoded, None)

    def add_to(self, stored: torch.Tensor, taken: Taken) -> None:
        place = 0
        for first, stop in taken.ranges.tolist():
            begin = first // methods.ROW_GROUP * methods.ROW_GROUP
            for group in range(begin, stop, methods.ROW_GROUP):
                low, high = max(first, group), min(stop, group + methods.ROW_GROUP)
                rows = stored[place + low - first : place + high - first]
                self._add(rows, group, low - group)
            place += stop - first

    def _add(self, rows: torch.Tensor, group: int, offset: int) -> None:
        product = self._product(rows, group, offset)
        mine = slice(offset, offset + len(rows))
        if self._magnitude is None:
            rows.add_(product[mine])
            return
        whole = torch.zeros_like(product)
        whole[mine] = rows
        # In float32 first, as the sum is when no magnitude is set.
        lengths = whole.add_(product).double().square_().sum(1).sqrt_()[mine]
        magnitudes = self._magnitude[group + offset : group + offset + len(rows)].double()
        # A row of zeros has no direction, so it has no length to be given.
        factor = torch.where(lengths > 0, magnitudes / lengths, 0.0).float()
        torch.mul(whole[mine], factor.unsqueeze(1), out=rows)

    def _product(self, own: torch.Tensor, group: int, offset: int) -> torch.Tensor:
        """The addition to a group of rows, of which it has its ``own`` from ``offset`` on: float32
        ``[ROW_GROUP, columns]``, always of that shape."""
        left = torch.zeros(methods.ROW_GROUP, self._right.shape[0], device=own.device)
        if self._left is None:
            left[offset : offset + len(own)] = own
        else:
            rows = self._left[group : group + methods.ROW_GROUP]
            left[: len(rows)] = rows
        return torch.mm(left, self._right).mul_(self._scale)


_HELD_MOST = 1 << 22
"""Elements of the largest scratch that a processor keeps; what is larger is worth the time of getting it."""


class Scratch:
    """Memory for the float32 inputs of a piece, used for one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held = torch.empty(0, device=device)

    def rows(self, count: int, length: int) -> torch.Tensor:
        """float32 ``[count, length]``, contiguous; what it held before may be gone."""
        size = count * length
        is_cpu = self.device.type == "cpu"
        if size > _HELD_MOST and is_cpu:
            return torch.empty(count, length)
        if self._held.numel() < size and is_cpu:
            # On pages that are worth their entry in the processor's tables.
            self._held = torch.frombuffer(aligned_buffer(4 * size), dtype=torch.float32)
        elif self._held.numel() < size:
            self._held = torch.empty(size, device=self.device)
        return self._held[:size].view(count, length)

    def leave(self, nbytes: int) -> None:
        """Have no more than so many bytes of a processor's memory, as something else is to have the rest."""
        if self.device.type == "cpu" and self._held.nbytes > nbytes:
            self._held = torch.empty(0)


class PartComputation:
    """The statistics and the application of one expression on one logical tensor."""

    def __init__(
        self, expression: Expression, part: JobPart, *, num_elements: int, seed: int, scratch: Scratch
    ) -> None:
        method = methods.find_method(expression.method)
        if method is None:
            raise ValueError(
                f"the plan names a method '{expression.method}' that this raymerge does not have"
            )
        self._method: methods.Method = method
        self._has_base = expression.has_base
        self._part = part
        self._scratch = scratch
        self._num_elements = num_elements
        self._gatherers = [
            Gatherer(each, scratch.device) if isinstance(each, GatheredInput) else None
            for each in part.inputs
        ]
        num_drawn = len(part.inputs) - expression.has_base if method.random else 0
        keys = tuple([methods.random_key(seed, part.logical, source) for source in range(num_drawn)])
        self._settings = expression.bind(keys=keys, shape=part.shape)
        self._kernel = method.kernel_with(self._settings)
        self._is_loaded = False
        self._state: object = None

    def load(self, raw: Raw) -> None:
        """Take up what each tile of an op brings alike: the first time alone."""
        if not self._is_loaded:
            self._is_loaded = True
            for gatherer, rows in self._gathered(raw):
                gatherer.load(rows)

    def pad(self, raw: Raw) -> None:
        """Take one tile into the mean rows of padded inputs."""
        for gatherer, rows in self._gathered(raw):
            if rows.num_rows:
                gatherer.observe(rows)

    def end_padding(self) -> None:
        for gatherer in filter(None, self._gatherers):
            gatherer.conclude()

    def gather(
        self,
        tiles: Callable[[], Iterable[methods.Tile | methods.Stored]],
        sample: Callable[[], methods.Tile] | None,
    ) -> None:
        """Take the statistics, from as many passes over the tiles as the method asks for."""
        self._state = methods.gather(
            self._method, self._settings, self._num_elements, self._scratch.device, tiles=tiles, sample=sample
        )

    @property
    def form(self) -> Hashable:
        """What computations have in common that take the same tiles of the same inputs."""
        return self._method.name, type(self._kernel), self._has_base, self._part.shape

    @property
    def observed(self) -> Hashable:
        return self._kernel.observed(self._settings)

    def gathering(self, alike: Sequence[PartComputation]) -> methods.Gathering:
        """Takes the statistics of computations that observe alike, this one the first of them."""
        settings, device = [each._settings for each in alike], self._scratch.device
        return methods.Gathering(self._method, settings, self._num_elements, device)

    def take(self, state: object) -> None:
        self._state = state

    def forget(self) -> None:
        self._state = None

    def apply(self, tile: methods.Tile) -> torch.Tensor:
        """The result of one piece: float32 ``[n]`` on the device; it may be the piece's own memory."""
        return self._kernel.apply(tile, self._settings, self._state)

    def anchored(self) -> methods.AnchoredSum | None:
        """The sum of the sources that ``apply`` gives, on the processor; None where it is no such sum."""
        if self._has_base or self._scratch.device.type != "cpu":
            return None
        return self._kernel.anchored(self._settings)

    def tiles(self, raw: Raw, start: int, length: int) -> Iterable[methods.Tile | methods.Stored]:
        """A tile for the statistics: as it is stored where that can be, else its pieces; see ``pieces``."""
        stored = self.stored(raw, start)
        return self.pieces(raw, start, length) if stored is None else (stored,)

    def stored(self, raw: Raw, start: int) -> methods.Stored | None:
        """A tile as it is stored; None where the method takes pieces, or where the inputs are not all
        bfloat16 in one load on the processor."""
        if not isinstance(self._kernel, methods.StoredKernel) or self._scratch.device.type != "cpu":
            return None
        tensors = [each for each in raw if isinstance(each, torch.Tensor)]
        plain = [each for each in self._part.inputs if isinstance(each, Read) and each.view is None]
        if not len(tensors) == len(plain) == len(raw) or any(each.dtype is not DType.BF16 for each in plain):
            return None
        memory, count = tensors[0].untyped_storage(), tensors[0].numel() // 2
        offsets = [each.storage_offset() for each in tensors]
        is_together = all(each.untyped_storage().data_ptr() == memory.data_ptr() for each in tensors)
        if not is_together or any(offset % 2 for offset in offsets) or memory.nbytes() % 2:
            return None
        words = torch.as_strided(tensors[0], (memory.nbytes(),), (1,), 0).numpy().view(np.uint16)
        return methods.Stored(words, np.array(offsets, dtype=np.int64) // 2, count, start)

    def marked(self, stored: methods.Stored) -> Iterator[methods.Stored]:
        """A tile in parts with what computations have in common that observe alike; whole without that."""
        kernel, whole = self._kernel, max(1, stored.count)
        assert isinstance(kernel, methods.StoredKernel)
        length = kernel.marks_at_once or whole
        for begin in range(0, whole, length):
            part = stored.part(begin, min(length, stored.count - begin))
            yield kernel.marked(part, self._settings, self._state)

    @property
    def unit_bytes(self) -> int:
        """Bytes of bfloat16 results that must be made at once: an op's where the method goes by rows."""
        by_row = self._method.access_with(self._settings) is methods.Access.ROW
        return 2 * (self._settings.row_length if by_row else 1)

    def apply_stored(self, stored: methods.Stored, target: torch.Tensor) -> None:
        """Write the results of a tile as bfloat16 into uint8 ``[nbytes]``."""
        if isinstance(self._kernel, methods.StoredKernel):
            out = target.numpy().view(np.uint16)
            self._kernel.apply_stored(stored, self._settings, self._state, out)

    def pieces(self, raw: Raw, start: int, length: int) -> Iterator[methods.Tile]:
        """The pieces of a tile, each in the memory of the one before."""
        for first, aligned in self._aligned(raw, length):
            inputs = self._typed(aligned)
            count = inputs[0].numel()
            for begin in range(0, max(1, count), length):
                end = min(begin + length, count)
                rows = self._scratch.rows(len(inputs), end - begin)
                for row, elements in zip(rows, inputs, strict=True):
                    row.copy_(elements[begin:end])
                yield self._tile(rows, start + first + begin)

    def _aligned(self, raw: Raw, length: int) -> Iterator[tuple[int, Raw]]:
        """A tile's bytes with the first element that they are of: all of them, or each piece's by itself.

        By itself where elements do not begin at multiples of their size, as such bytes have to be moved: a
        copy of a whole tile is no part of what a lane may use."""
        inputs = self._plain(raw)
        if all(is_aligned(each, source.dtype) for each, source in inputs):
            yield 0, raw
            return
        count = inputs[0][0].numel() * 8 // inputs[0][1].dtype.bits
        for begin in range(0, max(1, count), length):
            end = min(begin + length, count)
            yield begin, [each[s.dtype.nbytes(begin) : s.dtype.nbytes(end)].clone() for each, s in inputs]

    def elements(self, raw: Raw, begin: int, count: int) -> methods.Tile:
        """Some elements of a part that may lie across others, as one piece; where the one before was."""
        rows = self._scratch.rows(len(raw), count)
        for row, each, source in zip(rows, raw, self._part.inputs, strict=True):
            assert isinstance(source, Read)
            take_elements(each, source, self._part.shape, begin, row)
        return self._tile(rows, begin)

    def whole(self, raw: Raw, start: int) -> methods.Tile:
        """A tile as one piece, whatever its inputs are; in the memory of the one before."""
        rows: torch.Tensor | None = None
        inputs = zip(raw, self._part.inputs, self._gatherers, strict=True)
        for number, (each, source, gatherer) in enumerate(inputs):
            if isinstance(each, RawCodes) and each.read.view is None:
                rows = self._scratch.rows(len(raw), each.count) if rows is None else rows
                numbers(each, out=rows[number])
                continue
            values = self._values(each, source, gatherer)
            rows = self._scratch.rows(len(raw), values.numel()) if rows is None else rows
            rows[number].copy_(values)
        assert rows is not None
        return self._tile(rows, start)

    def sample(self, raw: Sequence[torch.Tensor]) -> methods.Tile:
        inputs = self._typed(raw)
        rows = torch.empty(len(inputs), inputs[0].numel(), device=self._scratch.device)
        for row, elements in zip(rows, inputs, strict=True):
            row.copy_(elements)
        return self._tile(rows, 0)

    def sample_within(self, raw: Raw) -> methods.Tile:
        return self.sample([methods.sampled(each, self._num_elements) for each, _ in self._plain(raw)])

    def _typed(self, raw: Raw) -> list[torch.Tensor]:
        return [typed(each, source, self._scratch.device) for each, source in self._plain(raw)]

    def _plain(self, raw: Raw) -> list[tuple[torch.Tensor, Read]]:
        return [
            (each, source)
            for each, source in zip(raw, self._part.inputs, strict=True)
            if isinstance(each, torch.Tensor) and isinstance(source, Read)
        ]

    def _tile(self, rows: torch.Tensor, start: int) -> methods.Tile:
        if not self._has_base:
            return methods.Tile(None, rows, start)
        base, sources = rows[0], rows[1:]
        if self._method.takes is methods.Takes.DELTAS:
            sources.sub_(base)
        return methods.Tile(base, sources, start)

    def _gathered(self, raw: Raw) -> Iterator[tuple[Gatherer, RawRows]]:
        for gatherer, rows in zip(self._gatherers, raw, strict=True):
            if gatherer is not None and isinstance(rows, RawRows):
                yield gatherer, rows

    def _values(self, raw: RawInput, source: Input, gatherer: Gatherer | None) -> torch.Tensor:
        if isinstance(raw, torch.Tensor) and isinstance(source, Read):
            return typed(raw, source, self._scratch.device)
        if isinstance(raw, RawRows) and gatherer is not None:
            return gatherer.elements(raw)
        if isinstance(raw, RawCodes):
            return numbers(raw)
        raise TypeError(f"an input of {self._part.logical} was read as another kind of input")
