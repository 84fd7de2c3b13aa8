"""Inject every fault into merges that really run, and print what it cost: ``make chaos``, or
``python tests/chaos``.

Ends by itself after fifteen minutes; two cores that do nothing else suffice. Ends with 1 if a promise was
broken, if there was no time for all of it, or if fewer than 200 processes in 20 runs were killed at random,
unless only a part was asked for. What cannot be injected here is left out, and its line says so.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos.faults import FAULTS, Fault, tried
from chaos.nodes import NODE_FAULTS
from chaos.storage import STORAGE_FAULTS
from chaos.table import Row, table, total
from chaos.yard import make_yard

_LIMIT_SECONDS = 15 * 60


class _TimeIsUpError(BaseException):
    """Not caught by what catches failures of a fault."""


def main() -> int:
    """Run it, print the table; 1 if a promise was broken, or too little was tried."""
    asked = _asked()
    # As Ctrl-C does: what was begun, and mounted, is not to stay.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as place, _limited(asked.minutes * 60):
        yard = make_yard(Path(place))
        for fault in asked.faults:
            times = fault.sample if asked.sample else fault.times
            rows.append(tried(fault, yard, times=times, seed=asked.seed))
            print(f"{fault.title}: {rows[-1].verdict}", file=sys.stderr, flush=True)
    rows += [Row(fault.title, broken="there was no time for it") for fault in asked.faults[len(rows) :]]
    found = total(rows)
    print(f"{table(rows)}\n\n{found}", flush=True)
    is_part = asked.sample or asked.only
    return int(bool(found.broken) if is_part else not found.is_enough)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", action="store_true", help="only what make test injects, as seldom")
    parser.add_argument("--only", metavar="WORDS", help="only faults whose line in the table has these words")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims; 0 by itself")
    parser.add_argument("--minutes", type=float, default=_LIMIT_SECONDS / 60, help="after which it ends")
    asked = parser.parse_args()
    listed: tuple[Fault, ...] = (*FAULTS, *STORAGE_FAULTS, *NODE_FAULTS)
    asked.faults = [
        fault
        for fault in listed
        if (fault.sample or not asked.sample) and (asked.only or "").lower() in fault.title.lower()
    ]
    if not asked.faults:
        parser.error(f"no fault has {asked.only!r} in its line")
    return asked


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End what runs after so long, with everything that it has begun."""

    def end(_: int, __: object) -> None:
        raise _TimeIsUpError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TimeIsUpError:
        print(f"stopped after {seconds / 60:.0f} minutes", file=sys.stderr, flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
