"""Makes the output tensors that change with the experts, in the layout of the checkpoint they belong to.

Where an expert stays what it is and lies as it will lie, its bytes are copied, whatever they mean: codes and
scales of quantised experts too. Only where experts become one, or lie otherwise in the model that they come
from, or an adapter adds to them, are their matrices looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from raymerge.architectures import logical_name
from raymerge.checkpoints.header import StoredTensor
from raymerge.merge_plan.expressions import Assembly, Output, Part, Read, Row, assembled
from raymerge.planner.matching.logical import Block
from raymerge.planner.moe.expert_blocks import ExpertBlock, Kind, Numbered, Stacked
from raymerge.planner.moe.expert_inputs import BASE, ExpertSupplies, marked, renumbered
from raymerge.planner.moe.expert_moves import NewExpert, Origin
from raymerge.planner.moe.expert_shares import Share, fate_of, matrix_row, mean_expression, share_row


class ExpertOutputs:
    """Makes the outputs of blocks of experts."""

    def __init__(self, supplies: ExpertSupplies) -> None:
        self._supplies = supplies

    def outputs(self, block: ExpertBlock, experts: Sequence[NewExpert]) -> Iterator[Output]:
        """All outputs of a block: matrices of experts, and what belongs to them in the router.

        One that cannot be made is left out, with a finding.
        """
        for stacked in block.stacked:
            work = _Work(self._supplies, block, stacked, stacked.tensor)
            rows = self._stacked(work, experts)
            shape, name = stacked.shape(len(experts)), stacked.tensor.name
            if rows is not None:
                yield Output(name, work.dtype, shape, rows, work.dtype.is_mergeable)
        for numbered in block.numbered:
            yield from self._numbered(block, numbered, experts)

    def _numbered(
        self, block: ExpertBlock, numbered: Numbered, experts: Sequence[NewExpert]
    ) -> Iterator[Output]:
        """A tensor for each expert, in the dtype of its own; where only some have one, for those."""
        is_complete = len(numbered.tensors) == block.num_experts
        for number, expert in enumerate(experts):
            if not is_complete and not any(self._has(numbered, origin) for origin in expert.origins):
                continue
            work = _Work(self._supplies, block, numbered, self._like(numbered, expert.origins[0]))
            found = work.alone(expert)
            rows = work.combined(expert, number) if found is None else work.unchanged([found], number)
            if rows is not None:
                dtype = work.dtype
                yield Output(numbered.name(number), dtype, numbered.share, rows, dtype.is_mergeable)

    def _has(self, kind: Numbered, origin: Origin) -> bool:
        """Whether an expert has such a tensor."""
        if origin.source == BASE:
            return origin.expert in kind.tensors
        return self._supplies.share(kind, origin) is not None

    def _like(self, kind: Numbered, origin: Origin) -> StoredTensor:
        """The tensor of the base whose dtype an expert is written in: its own, or the first of that dtype."""
        own = kind.tensors.get(origin.expert) if origin.expert is not None else None
        if origin.source == BASE and own is not None:
            return own
        share = self._supplies.share(kind, origin)
        same = (each for each in kind.tensors.values() if share and each.dtype is share.tensor.dtype)
        return next(same, kind.tensors[kind.first])

    def _stacked(self, work: _Work, experts: Sequence[NewExpert]) -> tuple[Row, ...] | None:
        """The rows of a tensor with a share for each expert; shares that lie together become one row."""
        made: list[tuple[Row, ...] | None] = []
        waiting: list[Share] = []
        for number, expert in enumerate(experts):
            found = work.alone(expert)
            if waiting and (found is None or waiting[-1].joined(found) is None):
                made.append(work.unchanged(waiting, number))
                waiting = []
            if found is None:
                made.append(work.combined(expert, number))
            else:
                waiting.append(found)
        if waiting:
            made.append(work.unchanged(waiting, len(experts)))
        rows = tuple(row for each in made if each is not None for row in each)
        return rows if None not in made else None


class _Work:
    """One kind of tensor of one block, written in the dtype of ``like``, a tensor of the base."""

    def __init__(self, supplies: ExpertSupplies, block: ExpertBlock, kind: Kind, like: StoredTensor) -> None:
        self._supplies = supplies
        self._block = block
        self._kind = kind
        self._like = like
        self.dtype = supplies.dtype_of(like, kind.part)

    def alone(self, expert: NewExpert) -> Share | None:
        """What an expert that is not merged has, where it has it stored as the base has it; else None."""
        origins = self._origins(expert)
        return self._supplies.share(self._kind, origins[0]) if len(origins) == 1 else None

    def unchanged(self, shares: Sequence[Share], number: int) -> tuple[Row, ...] | None:
        """One row of shares that lie one behind the other, the last of which is of expert ``number - 1``."""
        first = shares[0]
        if first.tensor.dtype is not self.dtype and not self._is_plain():
            return None
        if not self._supplies.may_write(first, self.dtype):
            return None
        whole = replace(first, num_elements=sum(share.num_elements for share in shares))
        shape = (len(shares), *self._kind.share) if isinstance(self._kind, Stacked) else self._kind.share
        row, fate = share_row(whole, shape, self._kind.name(number), self.dtype)
        self._supplies.fates.settle(first.source, first.tensor.name, fate)
        return (row,)

    def combined(self, expert: NewExpert, number: int) -> tuple[Row, ...] | None:
        """The rows of an expert that takes some arithmetic; None with findings."""
        if not self._is_plain():
            return None
        shares = [self._supplies.share(self._kind, origin) for origin in self._origins(expert)]
        if None not in shares:
            return self._mean_of_shares(expert, number, [share for share in shares if share is not None])
        if isinstance(self._kind, Stacked) and self._kind.is_router:
            return self._router_row(expert, self._kind)
        own = self._kind.name(self._kind.first)
        blocks = self._supplies.logical.blocks(own)
        if blocks is None:
            self._supplies.unknown_layout(own)
            return None
        mark = marked(self._kind.first)
        rows = [self._matrices(expert, number, each) for each in blocks if mark in each.members[0][0]]
        found = tuple(row for row in rows if row is not None)
        return found if len(found) == len(rows) else None

    def _is_plain(self) -> bool:
        """Whether the base has numbers here, so that numbers may be written; else a finding says so."""
        return self._supplies.is_plain(self._like)

    def _origins(self, expert: NewExpert) -> Sequence[Origin]:
        return expert.rows if self._kind.is_router else expert.origins

    def _weights(self, expert: NewExpert) -> Sequence[float]:
        return (1.0,) if len(self._origins(expert)) == 1 else expert.weights

    def _mean_of_shares(
        self, expert: NewExpert, number: int, shares: Sequence[Share]
    ) -> tuple[Row, ...] | None:
        """The mean of what several experts have, element by element: all of them are stored alike."""
        name = self._kind.name(number)
        plain = [self._supplies.plain.check(share.source, share.tensor) for share in shares]
        if not all(plain):
            return None
        for share in shares:
            self._supplies.fates.settle(share.source, share.tensor.name, fate_of(len(shares), name))
        expression = mean_expression(self._weights(expert), self.dtype)
        shape = self._kind.share or (1,)
        return (matrix_row([share.read() for share in shares], shape, f"{name}#{number}", expression),)

    def _matrices(self, expert: NewExpert, number: int, place: Block) -> Row | None:
        """A run of an expert's matrices, laid as the base lays expert 0's, each found by its name."""
        parts: list[Part] = []
        reads: list[Read] = []
        complete = True
        fate = fate_of(len(expert.origins), self._kind.name(number))
        for called, inside in place.members:
            logical = renumbered(called, 0, of=self._kind.first)
            for origin in expert.origins:
                found = self._supplies.matrix(self._block, origin, logical)
                if found is None or not self._supplies.fits(origin.source, found, inside.shape, logical):
                    complete = False
                    continue
                self._supplies.settle(found, origin.source, fate)
                reads.append(found.read(len(parts)))
            parts.append(Part(renumbered(logical, number), inside.shape, inside.view))
        if not complete:
            return None
        expression = mean_expression(expert.weights, self.dtype)
        return Row(place.num_elements, expression, tuple(parts), tuple(reads))

    def _router_row(self, expert: NewExpert, stacked: Stacked) -> tuple[Row, ...] | None:
        """One expert's row in a router, or its element of a bias, found by the router's canonical name."""
        logical = logical_name(stacked.tensor.name, self._supplies.base.rules)
        origins = expert.rows
        found = [self._row_of(stacked, origin, logical, len(origins)) for origin in origins]
        reads = [read for read in found if read is not None]
        if len(reads) < len(found):
            return None
        expression = mean_expression(self._weights(expert), self.dtype)
        return (matrix_row(reads, (1, *stacked.share), f"{logical}#{expert.row_of}", expression),)

    def _row_of(self, stacked: Stacked, origin: Origin, logical: str, count: int) -> Read | None:
        found = self._supplies.named(origin.source, logical)
        if found is None or origin.expert is None:
            self._no_row(origin.source, logical)
            return None
        held = self._supplies.num_experts(origin.source)
        if not self._supplies.fits(origin.source, found, stacked.shape(held), logical):
            return None
        self._supplies.settle(found, origin.source, fate_of(count, stacked.tensor.name))
        # A bias that lies as [1, experts] is taken element by element as well.
        term = replace(found.term(), num_rows=held)
        return assembled(0, Assembly(1, prod(stacked.share), (term,), ((0, origin.expert, 1, 0),), 1))

    def _no_row(self, source: int, logical: str) -> None:
        self._supplies.findings.tensor(
            ("no row", str(source)),
            where=self._supplies.name(source),
            what="it lacks {count} tensors that the router has a row of for each expert",
            remedy="Add 'row_of: N' to copy router rows and biases of an expert of base_model.",
            example=logical,
        )
