"""Makes the rows of assembled inputs in float32: adds products, places rows, takes means.

Every row is computed alike for any tile and any number of threads: products of matrices and sums over rows
are taken in groups of ROW_GROUP stored rows, with one thread; the rest is element by element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raymerge.device_numerics import divisor
from raymerge.execute.decoding import decode
from raymerge.execute.gathers import AssembledInput, RawRows, Taken
from raymerge.execute.threads import one_thread
from raymerge.merge_plan.expressions import Product, Term
from raymerge.methods import ROW_GROUP


class Assembler:
    """One assembled input of the row in hand."""

    def __init__(self, source: AssembledInput, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._products: tuple[LowRank | None, ...] = ()
        self._padding = _mean_of_nothing(source, device)

    def load(self, raw: RawRows) -> None:
        """Take up the factors of the products, once for all tiles."""
        self._products = tuple(
            None if term.product is None else LowRank(term.product, factors, self._device)
            for term, factors in zip(self._source.terms, raw.factors, strict=True)
        )

    def observe(self, raw: RawRows) -> None:
        """Take whole groups of rows into the mean of all rows; they come in order."""
        rows = self._rows(raw)
        with one_thread():
            for first in range(0, raw.num_rows, ROW_GROUP):
                self._padding.add_(rows[first : first + ROW_GROUP].double().sum(0))

    def conclude(self) -> None:
        """All rows were observed."""
        self._padding.div_(divisor(max(1, self._source.real_rows), self._padding))

    def elements(self, raw: RawRows) -> torch.Tensor:
        """The elements of a tile: float32 ``[count]``, memory of its own."""
        return self._rows(raw).flatten()[raw.begin : raw.begin + raw.count]

    def _rows(self, raw: RawRows) -> torch.Tensor:
        """The rows of a window: float32 ``[num_rows, columns]``."""
        # Any value added to -0.0 stays what it is, -0.0 too.
        rows = torch.full((raw.num_rows, self._source.num_columns), -0.0, device=self._device)
        for term, taken, stored, product in zip(
            self._source.terms, raw.taken, raw.stored, self._products, strict=True
        ):
            if len(taken.moves):
                self._place(rows, taken, self._stored(term, taken, stored, product))
        for first, stop, count in self._source.covers(raw.taken, raw.num_rows):
            if count == 0:
                rows[first:stop] = 0.0
            elif count > 1:
                rows[first:stop].div_(divisor(count, rows))
        if self._source.is_padded:
            rows[max(0, self._source.real_rows - raw.first_row) :] = self._padding.float()
        return rows

    def _stored(
        self, term: Term, taken: Taken, stored: torch.Tensor, product: LowRank | None
    ) -> torch.Tensor:
        """The stored rows taken of a term, with its product: float32 ``[rows taken, columns]``."""
        found = decode(stored, term.read, self._device).view(-1, self._source.num_columns)
        if product is not None:
            with one_thread():
                product.add_to(found, taken)
        return found

    @staticmethod
    def _place(rows: torch.Tensor, taken: Taken, stored: torch.Tensor) -> None:
        for to, place, count in taken.moves.tolist():
            rows[to : to + count].add_(stored[place : place + count])


class LowRank:
    """A low-rank addition with its factors in float32 on the device."""

    def __init__(self, product: Product, factors: Sequence[torch.Tensor], device: torch.device) -> None:
        up, down, *magnitude = (
            decode(raw, read, device) for raw, read in zip(factors, product.factors, strict=True)
        )
        columns_up, columns_down = up.view(-1, product.rank), down.view(product.rank, -1)
        self._left = columns_down.T if product.transposed else columns_up
        self._right = columns_up.T if product.transposed else columns_down
        self._scale = product.scale
        self._magnitude = magnitude[0] if magnitude else None

    def add_to(self, stored: torch.Tensor, taken: Taken) -> None:
        """Add to the stored rows that were taken, in place."""
        place = 0
        for first, stop in taken.ranges.tolist():
            begin = first // ROW_GROUP * ROW_GROUP
            for group in range(begin, stop, ROW_GROUP):
                low, high = max(first, group), min(stop, group + ROW_GROUP)
                rows = stored[place + low - first : place + high - first]
                self._add(rows, group, low - group)
            place += stop - first

    def _add(self, rows: torch.Tensor, group: int, offset: int) -> None:
        """Add to rows that begin at an offset within a group."""
        product = self._product(group)
        mine = slice(offset, offset + len(rows))
        if self._magnitude is None:
            rows.add_(product[mine])
            return
        whole = torch.zeros_like(product)
        whole[mine] = rows
        # In float32 first, as the sum is when no magnitude is set.
        lengths = whole.add_(product).double().square_().sum(1).sqrt_()[mine]
        wanted = self._magnitude[group + offset : group + offset + len(rows)].double()
        # A row of zeros has no direction, so it has no length to be given.
        factor = torch.where(lengths > 0, wanted / lengths, 0.0).float()
        torch.mul(whole[mine], factor.unsqueeze(1), out=rows)

    def _product(self, group: int) -> torch.Tensor:
        """The addition to a group of rows: float32 ``[ROW_GROUP, columns]``, always of that shape."""
        rows = self._left[group : group + ROW_GROUP]
        left = torch.zeros(ROW_GROUP, self._left.shape[1], device=rows.device)
        left[: len(rows)] = rows
        return torch.mm(left, self._right).mul_(self._scale)


def _mean_of_nothing(source: AssembledInput, device: torch.device) -> torch.Tensor:
    """Where the mean of all rows is gathered: float64 ``[columns]``, nothing where no row is padding."""
    columns = source.num_columns if source.is_padded else 0
    return torch.zeros(columns, dtype=torch.float64, device=device)
