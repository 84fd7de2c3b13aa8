"""The shards of a run whose output is in an object store: each is absent, or a whole object."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from raymerge.errors import IncompleteError, Problem, VerificationError
from raymerge.events import OnEvent, ShardDone
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.tables import Plan
from raymerge.publish.ledger import Ledger
from raymerge.publish.shard_work import ShardOrder
from raymerge.storage.local.store import LocalStore
from raymerge.storage.objects.writer import ObjectInfo, ObjectWriter
from raymerge.storage.retry import KEPT


class RemoteShards:
    """Shards come under their final names, one whole object after the other."""

    def __init__(
        self, plan: Plan, orders: tuple[ShardOrder, ...], store: LocalStore, writer: ObjectWriter
    ) -> None:
        """
        Args:
            plan: what is made.
            orders: how each shard is made.
            store: the control directory.
            writer: of the output place.
        """
        self._plan = plan
        self._orders = orders
        self._store = store
        self._writer = writer
        self._stamps: dict[str, str] = {}

    def take_up(self, ledger: Ledger) -> dict[int, Receipt]:
        """The receipts of earlier runs whose shards are there as they were when they were complete.

        The store keeps what it has taken, and says whether it is that: nothing is read again.
        """
        before, said = ledger.receipts(), ledger.shards()
        there = self._writer.infos([order.name for order in self._orders if order.name in said])
        kept: dict[int, Receipt] = {}
        for order in self._orders:
            stamp = said.get(order.name, "")
            if _bears(there.get(order.name), order, stamp) and all(
                segment in before for segment in order.segments
            ):
                self._stamps[order.name] = stamp
                kept |= {segment: before[segment] for segment in order.segments}
        if kept.keys() != before.keys() or self._stamps.keys() != said.keys():
            ledger.begin({})
            for order in self._orders:
                if order.name in self._stamps:
                    own = [kept[segment] for segment in order.segments]
                    ledger.record_shard(order.name, self._stamps[order.name], own)
        return kept

    def parts(self, receipts: Mapping[int, Receipt]) -> list[int]:  # noqa: ARG002 - stamps say the same
        """Numbers of the shards to make, the largest first."""
        wanted = [n for n, order in enumerate(self._orders) if order.name not in self._stamps]
        return sorted(wanted, key=lambda n: (-self._orders[n].nbytes, n))

    def record(self, ledger: Ledger, batch: Iterable[Receipt]) -> tuple[Receipt, ...]:
        """Have it durable that shards are made; the receipts of their segments."""
        made: list[Receipt] = []
        for receipt in batch:
            order, stamp = self._orders[receipt.segment], str(receipt.report["stamp"])
            own = [Receipt.from_json(each) for each in receipt.report["receipts"]]
            if own and receipt.retries:
                own[-1] = Receipt.from_json({**own[-1].to_json(), "retries": receipt.retries})
            ledger.record_shard(order.name, stamp, own)
            self._stamps[order.name] = stamp
            made += own
        return tuple(made)

    def complete(self, on_event: OnEvent) -> int | None:
        """See that every shard is there as it was made, and have its header in the control directory, in a
        file without bytes behind it, so that what is made can be verified by its headers.

        Returns:
            Bytes that share storage, which objects never do; None where that is not asked for.

        Raises:
            IncompleteError: one is gone or is another; the next run makes it again.
            VerificationError: one does not begin as planned.
        """
        self.check()
        for order in self._orders:
            header = self._writer.get_range(order.name, len(order.header))
            if header != order.header:
                where, what = self._writer.location(order.name), "the object does not begin as was planned."
                raise VerificationError(Problem(where, what, "Delete it, and give the same command again."))
            self._store.write_atomic(order.name, header)
            os.truncate(self._store.location(order.name), order.nbytes)
            on_event(ShardDone(order.name, order.nbytes))
        return 0 if self._plan.manifest["duplicates"] == "share" else None

    def check(self) -> None:
        """See that every shard is there as it was made; raises as ``complete`` does."""
        there = self._writer.infos([order.name for order in self._orders])
        for order in self._orders:
            if not _bears(info := there[order.name], order, self._stamps[order.name]):
                what = "is gone" if info is None else "is not the object that was written"
                raise IncompleteError(f"{self._writer.location(order.name)}: {what}. {KEPT}")


def _bears(info: ObjectInfo | None, order: ShardOrder, stamp: str) -> bool:
    """Whether an object is a shard that was made: it bears what all bear that have its bytes. The store's
    tag does not say so: some give another each time."""
    return info is not None and (info.nbytes, info.stamp) == (order.nbytes, stamp)
