"""Where faults are injected: one merge, its real command in processes of its own, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import psutil
from chaos.forked import ForkedDriver
from kits.driver_process import Kin, kin_of
from kits.merge_cases import Family, digests, make_family, recipes

from raymerge.api import submit
from raymerge.execute.receipts import UNFINISHED
from raymerge.merge_plan.tables import load_plan
from raymerge.options import RunOptions
from raymerge.runtime.workers.worker import MergeWorker

PATIENCE_SECONDS = 90.0
"""How long anything that must happen may take."""
SUBMIT = (sys.executable, "-c", "from raymerge.cli.main import main; main()", "submit")
"""The command as its entry point runs it."""
Driver: TypeAlias = "subprocess.Popen[bytes] | ForkedDriver"
_WORKER = f"ray::{MergeWorker.__name__}"
_DISK = Path(__file__).parent / "disk"


class BrokenPromiseError(AssertionError):
    """Something happened that raymerge says never does."""


@dataclass(frozen=True, slots=True)
class Yard:
    """A merge of many small segments, and what an undisturbed run makes of it."""

    root: Path
    family: Family
    recipe: Path
    expected: Mapping[str, str]
    segments: int
    is_forked: bool = False
    """Whether commands without Ray are forked behind their imports; see ``chaos.forked``."""

    def place(self, name: str) -> Place:
        return Place(self, self.root / name / "out")


def make_yard(root: Path, *, layers: int = 24, is_forked: bool = False) -> Yard:
    """Make sources, write the recipe, and merge once with nothing in the way."""
    family = make_family(root / "models", hidden=64, layers=layers, files=2)
    # Shards this small hold one large tensor each, so that the segments are many.
    recipe = {**recipes(family)["dare_ties"], "shard_size": "8KB"}
    path = root / "recipe.yml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    undisturbed = submit(path, root / "undisturbed", RunOptions(inline=True))
    expected = digests(root / "undisturbed")
    return Yard(root, family, path, expected, len(undisturbed.receipts), is_forked)


@dataclass(slots=True)
class Attempt:
    """The command, given once."""

    process: Driver
    said: Path
    complained: Path
    kin: list[Kin] = field(default_factory=list)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What it has told so far, of one kind or all; a line that was cut short is left out."""
        lines = self.said.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        found = [json.loads(line) for line in lines]
        return [event for event in found if kind in (None, event["event"])]

    def ends(self, *codes: int) -> int:
        """Wait for its end; its exit code, which must be one of these."""
        try:
            code = self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise BrokenPromiseError(f"no end within {PATIENCE_SECONDS:.0f} s: {self.tail()}") from None
        if code not in codes:
            raise BrokenPromiseError(f"exit code {code} where {codes} were due: {self.tail()}")
        return code

    def tail(self) -> str:
        """The last of what it told and complained of."""
        told = self.said.read_text(encoding="utf-8", errors="replace").strip()
        complaints = self.complained.read_text(encoding="utf-8", errors="replace").strip()
        return f"{told[-600:]} {complaints[-1500:]}".strip()

    def message(self) -> str:
        """What its error said; "" for none."""
        return " ".join(str(event["message"]) for event in self.events("error"))

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def relatives(self) -> Kin:
        found = kin_of(self.process)
        self.kin.append(found)
        return found

    def workers(self) -> list[psutil.Process]:
        """The workers among them; of Ray's own processes some have names of the same kind."""
        return [each for each in self.relatives().processes if _title(each).startswith(_WORKER)]

    def raylet(self) -> psutil.Process:
        found = [
            each for each in self.relatives().processes if _title(each).split(" ")[0].endswith("/raylet")
        ]
        return found[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_everything(self) -> None:
        """SIGKILL to the driver, Ray and all workers at once, as a power cut would have it."""
        kin = self.relatives()
        self.process.kill()
        kin.end()
        self.process.wait()

    def end(self) -> None:
        """Leave nothing running, and nothing of Ray on disk."""
        self.relatives()
        self.process.kill()
        self.process.wait()
        for kin in self.kin:
            kin.end()


class Place:
    """One output place, the commands that were given for it, and what faults there have cost."""

    def __init__(self, yard: Yard, output: Path) -> None:
        output.parent.mkdir(parents=True)
        self.yard = yard
        self.output = output
        self.recipe = yard.recipe
        self.attempts = 0
        self.redone = 0
        """Segments that were made again because they were in work when a fault came."""
        self.lost_bytes = 0
        """Bytes of segments that were made again although they had a durable receipt."""
        self.is_closed = False
        """Whether no more commands are to be given."""
        self._running: list[Attempt] = []
        self.quota = output.parent / "quota"
        """As long as there is this file, every write below the yard fails with EDQUOT."""
        self._pause = output.parent / "pause"
        self._notes = output.parent / "notes"

    # The disk

    def pause(self, seconds: float) -> None:
        """From now on every read and write below the yard takes so much longer, of commands in work too."""
        self._pause.write_text(str(seconds), encoding="ascii")

    def notes(self) -> list[list[str]]:
        """What the disk has noted: time, process, kind and outcome of each transfer."""
        if not self._notes.exists():
            return []
        return [line.split() for line in self._notes.read_text(encoding="ascii").splitlines()]

    def disk(self, *, failures: float = 0.0, notes: bool = False) -> dict[str, str]:
        """The environment that puts the disk under a process."""
        path = os.pathsep.join((str(_DISK), *filter(None, sys.path)))
        found = {"PYTHONPATH": path, "CHAOS_DISK": str(self.yard.root), "CHAOS_PAUSE": str(self._pause)}
        return {
            **found,
            "CHAOS_QUOTA": str(self.quota),
            "CHAOS_FAILURES": str(failures),
            "CHAOS_NOTES": str(self._notes) if notes or failures else "",
        }

    # Commands

    @contextmanager
    def submit(
        self,
        *flags: str,
        inside: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        is_forked: bool = False,
    ) -> Iterator[Attempt]:
        """Give the command; when the block is left its processes are ended and what it did is counted.

        ``inside`` is a command that runs it elsewhere; ``environment`` is usually the disk's.
        """
        is_forked = is_forked or (self.yard.is_forked and "--inline" in flags and not inside)
        self.attempts += 1
        durable, begun = set(self.receipts()), self._begun()
        said, complained = (self.output.parent / f"{self.attempts}.{kind}" for kind in ("out", "err"))
        with said.open("wb") as out, complained.open("wb") as err:
            variables = {**os.environ, **(environment or self.disk())}
            arguments = [str(self.recipe), "-o", str(self.output), "--json", *flags]
            process: Driver = (
                ForkedDriver(["submit", *arguments], out, err, variables)
                if is_forked
                else _started([*inside, *SUBMIT, *arguments], out, err, variables)
            )
        attempt = Attempt(process, said, complained)
        self._running.append(attempt)
        try:
            yield attempt
        finally:
            self._running.remove(attempt)
            attempt.end()
        self._count(attempt, durable, begun)

    def close(self) -> None:
        """Have what another thread does here end soon."""
        self.is_closed = True
        for attempt in tuple(self._running):
            attempt.process.kill()

    def finish(self, *flags: str) -> None:
        """Give the command once more with a disk as fast as it is; it must end well."""
        self.pause(0)
        with self.submit(*(flags or ("--inline",))) as attempt:
            attempt.ends(0)

    def is_right(self) -> bool:
        """Whether what is published, and alone, is what an undisturbed run publishes."""
        beside = [path.name for path in self.output.parent.glob(f".{self.output.name}.*")]
        return not beside and digests(self.output) == self.yard.expected

    # What is on disk

    def wait_for(self, count: int, attempt: Attempt) -> bool:
        """Wait for so many receipts in the ledger; False where the driver ended before."""
        return waited(lambda: self.count() >= count, attempt)

    def count(self) -> int:
        return sum(ledger.read_text(encoding="utf-8").count('{"receipt"') for ledger in self._ledgers())

    def receipts(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for ledger in self._ledgers():
            for line in ledger.read_text(encoding="utf-8", errors="replace").split("\n"):
                # A crash or a full disk may leave a line that is not whole.
                with contextlib.suppress(ValueError):
                    receipt = json.loads(line).get("receipt")
                    if receipt is not None:
                        found[receipt["segment"]] = receipt
        return found

    def _ledgers(self) -> list[Path]:
        unfinished = self.output.parent.glob(f".{self.output.name}.raymerge-*/raymerge/ledger.jsonl")
        return [*unfinished, *self.output.glob("raymerge/ledger.jsonl")]

    def _begun(self) -> set[int]:
        """Segments that have bytes in the staging directory and no receipt."""
        found: set[int] = set()
        for ledger in self._ledgers():
            staging, receipts = ledger.parent.parent, set(self.receipts())
            plan = load_plan(staging / "raymerge" / "plan")
            shards = [shard["name"] for shard in plan["shards"].to_pylist()]
            rows = plan["ops"].to_pylist()
            for number, segment in enumerate(plan["segments"].to_pylist()):
                own = rows[segment["first_op"] : segment["first_op"] + segment["num_ops"]]
                path = staging / f"{shards[segment['shard']]}{UNFINISHED}"
                if number not in receipts and path.exists() and _has_bytes(path, own):
                    found.add(number)
        return found

    def _count(self, attempt: Attempt, durable: set[int], begun: set[int]) -> None:
        """Add up what an attempt made again, and see that all that it told of is durable."""
        made = [int(event["segment"]) for event in attempt.events("segment_done")]
        again = {segment for segment in made if segment in durable or made.count(segment) > 1}
        receipts = self.receipts()
        self.lost_bytes += sum(int(receipts[segment]["written_bytes"]) for segment in again)
        self.redone += len(begun.intersection(made))
        self.redone += sum(len(event["segments"]) for event in attempt.events("worker_lost"))
        if not receipts.keys() >= set(made) and receipts:
            raise BrokenPromiseError(f"told of and not durable: segments {set(made) - receipts.keys()}")


def _started(
    command: list[str], said: BinaryIO, complained: BinaryIO, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=complained,
        env=environment,
        start_new_session=True,
    )


def waited(happened: Callable[[], bool], attempt: Attempt, *, every: float = 0.02) -> bool:
    """Wait until something happened; False where the driver ended before it did."""
    end_at = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        if attempt.is_over():
            return False
        if time.monotonic() > end_at:
            raise BrokenPromiseError(f"nothing happened for {PATIENCE_SECONDS:.0f} s: {attempt.tail()}")
        time.sleep(every)
    return True


def _has_bytes(path: Path, rows: Sequence[Mapping[str, Any]]) -> bool:
    with path.open("rb") as file:
        for row in rows:
            file.seek(row["offset"])
            data = file.read(row["nbytes"])
            if data.count(0) < len(data):
                return True
    return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
