"""``duplicates: share``: equal parts of shards share storage extents, where the filesystem can."""

from __future__ import annotations

from raymerge.execute.output import UNFINISHED
from raymerge.merge_plan.tables import Plan
from raymerge.storage.store import WriteStore


def share_duplicates(plan: Plan, store: WriteStore) -> int:
    """Share the extents of rows that repeat an earlier one, in shards that are written and not yet named.

    Returns:
        Bytes that share storage. Each name keeps bytes of its own for every reader.
    """
    shards = plan["shards"].column("name").to_pylist()
    rows = plan["rows"].select(["shard", "offset", "nbytes", "copy_of"]).to_pylist()
    shared = 0
    for row in rows:
        if row["copy_of"] < 0:
            continue
        first = rows[row["copy_of"]]
        shared += store.share(
            shards[row["shard"]] + UNFINISHED,
            row["offset"],
            with_key=shards[first["shard"]] + UNFINISHED,
            with_offset=first["offset"],
            nbytes=row["nbytes"],
        )
    return shared
