"""What the driver takes for 100,000 segments on 64 workers of a real Ray.

    python tests/benchmarks/driver_scale.py [--segments N] [--workers N] [--rate NUMBER] [--profile]

The workers are actors that do nothing with a segment but wait, and answer with a receipt of true size: so 64
of them fit on a small machine. One is twenty times slower than the others; an eighth of them is killed after
a third of the run, and those that take their places join the others at work. The driver is the real one:
pool, dispatcher, heartbeats, durable ledger, journal, live display. Last, the same actors are called without
any of it: what Ray itself takes for a call. It prints the driver's processor time for a segment and its
memory, by tenths of the run, and with ``--profile`` where the time of its thread goes.

A driver that is behind takes many receipts at once, which costs less for each; so the rate is set to what 64
workers would really make together.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import resource
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.driver_parts import SLOTS, EmptyWork, EmptyWorker
from benchmarks.measure import machine, status_bytes

from raymerge.cli.render.progress import LiveProgress
from raymerge.events import Event, Planned, SegmentDone, Started, WorkerLost
from raymerge.execute.receipts import Receipt
from raymerge.options import RunOptions
from raymerge.publish.record import Journal, Ledger
from raymerge.runtime.driver.run import do_parts
from raymerge.runtime.workers.pool import Receipts
from raymerge.runtime.workers.ray_pool import RayPool

_TENTHS = 10
_KILLED = 8
"""One in so many workers."""


@dataclass(slots=True)
class Meter:
    """What the driver had taken by each tenth of the segments."""

    segments: int
    marks: list[tuple[int, float, float, float, int]] = field(default_factory=list)
    """Segments done, seconds, seconds of processor time of the process and of its main thread, and bytes."""

    def look(self, done: int) -> None:
        if done * _TENTHS >= len(self.marks) * self.segments:
            own = status_bytes(os.getpid())
            nbytes = own["RssAnon"] + own["RssShmem"]
            self.marks.append((done, time.monotonic(), time.process_time(), time.thread_time(), nbytes))

    def show(self) -> None:
        _say("| segments | a second | CPU a segment, ms | of it the main thread | memory, MiB |")
        _say("|---:|---:|---:|---:|---:|")
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        for before, after in [*pairs, (self.marks[0], self.marks[-1])]:
            done, seconds, cpu, own = (b - a for a, b in zip(before[:4], after[:4], strict=True))
            cost = f"{1e3 * cpu / done:.3f} | {1e3 * own / done:.3f}"
            what = f"{after[0]:,}" if (before, after) in pairs else "all"
            _say(f"| {what} | {done / seconds:,.0f} | {cost} | {after[4] / 2**20:,.0f} |")


def main() -> None:
    asked = _asked()
    seconds = SLOTS * asked.workers / asked.rate
    options = RunOptions(workers=asked.workers, threads=1, device="cpu", memory=1 << 30)
    lost: list[str] = []
    # Where workers look for the class of the actor.
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])

    def count(event: Event) -> None:
        if isinstance(event, WorkerLost):
            lost.append(event.worker)
        live(event)

    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shown = stack.enter_context((place / "terminal").open("w"))
        console = Console(file=shown, force_terminal=True, width=120, height=40)
        live = stack.enter_context(LiveProgress(console, "out"))
        emit = stack.enter_context(Journal(count))
        emit.open(place)
        began = time.monotonic()
        pool = RayPool(options, emit, worker=EmptyWorker, ready_seconds=900)
        stack.callback(pool.close)
        pool.start()
        _say(f"{len(pool.workers)} workers were ready after {time.monotonic() - began:.0f} s; {machine()}")
        nbytes = 517 << 20
        emit(Planned("0" * 40, 1, 1, asked.segments * nbytes, asked.segments, 1 << 30))
        emit(Started(pool.workers, "cpu", 0, 0))
        work = EmptyWork(seconds, straggler=pool.workers[1])
        meter, ledger, receipts = (
            Meter(asked.segments),
            Ledger(place / "ledger.jsonl", {}),
            dict[int, Receipt](),
        )
        kills = [asked.segments // 3]

        def take(batch: Receipts) -> None:
            if not receipts and batch:
                _say(f"first receipt {time.monotonic() - began:.1f} s after the work was given out")
            ledger.record(*batch)
            receipts.update((each.segment, each) for each in batch)
            for each in batch:
                read, written = each.read_bytes, each.written_bytes
                emit(
                    SegmentDone(each.segment, each.worker, read, written, nbytes, each.seconds, each.peak_rss)
                )
            meter.look(len(receipts))
            if kills and len(receipts) > kills[0]:
                kills.clear()
                for actor in pool.group.actors[-max(1, asked.workers // _KILLED) :]:
                    pool.group.ray.kill(actor.handle)

        profile = cProfile.Profile() if asked.profile else None
        began = time.monotonic()
        meter.look(0)
        if profile:
            profile.enable()
        do_parts(pool, work, range(asked.segments), take, on_event=emit)
        if profile:
            profile.disable()
        live.close()
        assert receipts.keys() == set(range(asked.segments))
        makers = {each.worker for each in receipts.values()}
        slow = sum(each.worker == work.straggler for each in receipts.values())
        late = len(makers) - asked.workers
        _say(f"{len(lost)} workers were killed, {late} joined late; the slow one made {slow}")
        meter.show()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        nbytes = (place / "ledger.jsonl").stat().st_size
        _say(f"peak of its memory {peak:,.0f} MiB with mapped files; a ledger of {nbytes / 1e6:,.1f} MB")
        cpu, own = bare_calls(pool, work.straggler, asked.segments // _TENTHS)
        _say(f"Ray alone, for a call with such an answer: {cpu:.3f} ms, {own:.3f} of it in the main thread")
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def bare_calls(pool: RayPool, straggler: str, number: int) -> tuple[float, float]:
    """Milliseconds of processor time that calls of the same workers take with nothing around them, of the
    process and of its main thread; as many are under way as before."""
    ray, actors = pool.group.ray, [each.handle for each in pool.group.actors if each.name != straggler]
    begun, under_way = 0, []
    before = time.process_time(), time.thread_time()
    while begun < number or under_way:
        missing = min(number - begun, SLOTS * len(actors) - len(under_way))
        under_way += [actors[each % len(actors)].run.remote(each) for each in range(begun, begun + missing)]
        begun += missing
        ready, under_way = ray.wait(under_way, num_returns=1)
        more, under_way = (
            ray.wait(under_way, num_returns=len(under_way), timeout=0) if under_way else ([], [])
        )
        for answer in (*ready, *more):
            ray.get(answer)
    after = time.process_time(), time.thread_time()
    cpu, own = (1e3 * (b - a) / number for a, b in zip(before, after, strict=True))
    return cpu, own


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--segments", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rate", type=float, default=400.0, help="segments a second of all workers together")
    parser.add_argument("--profile", action="store_true", help="also show where the time goes")
    return parser.parse_args()


def _say(text: str) -> None:
    # The live display takes what is printed elsewhere.
    print(text, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
