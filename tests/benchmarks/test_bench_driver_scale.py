"""The workers of the driver's benchmark answer as real ones do."""

from __future__ import annotations

import inspect
import json

from benchmarks.driver_parts import OPS, EmptyWork, EmptyWorker

from raymerge.events import PartInHand
from raymerge.execute.receipts import Receipt
from raymerge.runtime.workers.worker import MergeWorker


def test_an_empty_worker_gives_receipts_of_true_size() -> None:
    worker = EmptyWorker("worker-0", "cpu")
    receipts = [Receipt.from_json(json.loads(json.dumps(worker.run(number)))) for number in range(3)]
    assert [each.segment for each in receipts] == [0, 1, 2]
    digests = [digest for each in receipts for digest in each.digests.values()]
    assert len({*digests}) == 3 * OPS
    assert {len(each) for each in digests} == {32}
    progress, parts = worker.heartbeat()
    assert progress == 3.0
    assert all(isinstance(each, PartInHand) for each in parts)


def _parameters(worker: type, name: str) -> list[str]:
    """Without what Ray adds where a test before has made an actor of the class."""
    return [each for each in inspect.signature(getattr(worker, name)).parameters if each != "_ray_trace_ctx"]


def test_an_empty_worker_is_called_as_a_real_one() -> None:
    for name in ("ready", "open", "run", "heartbeat"):
        assert _parameters(EmptyWorker, name) == _parameters(MergeWorker, name)
    work = EmptyWork(0.0, straggler="worker-1")
    assert work.slots > 1
