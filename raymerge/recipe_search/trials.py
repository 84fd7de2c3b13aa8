"""The trials of a search, in a small database beside the output; each evaluation in it is durable."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from raymerge.errors import HeldError, OptionError, Problem, TargetError
from raymerge.options import RunOptions
from raymerge.publish.output_place import steps_directory
from raymerge.recipes.search import Values
from raymerge.storage.addresses import is_remote, shown

DATABASE = "trials.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS search (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trials (number INTEGER PRIMARY KEY, parameters TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (
    number INTEGER NOT NULL REFERENCES trials, share REAL NOT NULL,
    metrics TEXT, score REAL, error TEXT, seconds REAL NOT NULL, PRIMARY KEY (number, share)
);
"""

State = Literal["done", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    metrics: Mapping[str, float]
    score: float | None
    """None where it failed."""
    error: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Trial:
    number: int
    values: Values
    state: State
    """``stopped``: evaluated on a share, and not among the better ones."""
    metrics: Mapping[str, float]
    score: float | None
    """None unless it is done."""
    error: str
    seconds: float


def search_directory(output: Path | str, options: RunOptions) -> Path:
    """Beside a local output, or below ``options.steps``. Raises OptionError: neither is there."""
    if options.steps is not None:
        place = steps_directory(output, options.steps)
        return place.with_name(f"{place.name}.search")
    if is_remote(str(output)):
        what = "a search keeps its trials in a directory, and an object store has none."
        raise OptionError(Problem(shown(str(output)), what, "Give --steps DIR."))
    place = Path(os.path.realpath(output))
    return place.parent / f".{place.name}.raymerge.search"


class TrialStore:
    """Use it as a context; it is held by one process at a time."""

    def __init__(self, directory: Path, identity: Mapping[str, str], *, replace: bool = False) -> None:
        """``identity``: by what is compared, a digest. Raises TargetError: the trials there are of another
        search, unless they are to be replaced; HeldError: another process goes on with them."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(directory / DATABASE, timeout=0, isolation_level=None)
        try:
            self._open(identity, replace=replace)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> TrialStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def ask(self, number: int, values: Values) -> None:
        """Record what a trial is to try. Raises TargetError: it has tried something else."""
        text = _plain(values)
        before = self._connection.execute(
            "SELECT parameters FROM trials WHERE number = ?", (number,)
        ).fetchone()
        if before is None:
            self._connection.execute("INSERT INTO trials VALUES (?, ?)", (number, text))
        elif before[0] != text:
            what = (
                f"trial {number} tried {before[0]}, and now it would try {text}: another version of a library"
            )
            what += " chooses otherwise."
            raise TargetError(
                Problem(str(self._directory), what, "Install that version, or remove the directory.")
            )

    def evaluation(self, number: int, share: float) -> Evaluation | None:
        row = self._connection.execute(
            "SELECT metrics, score, error, seconds FROM evaluations WHERE number = ? AND share = ?",
            (number, share),
        ).fetchone()
        return None if row is None else Evaluation(json.loads(row[0]), row[1], row[2], row[3])

    def twin(self, number: int, share: float) -> int | None:
        """An earlier trial of the same values."""
        row = self._connection.execute(
            "SELECT min(e.number) FROM evaluations e JOIN trials t ON t.number = e.number"
            " WHERE e.share = ? AND e.number < ?"
            " AND t.parameters = (SELECT parameters FROM trials WHERE number = ?)",
            (share, number, number),
        ).fetchone()
        return None if row[0] is None else int(row[0])

    def record(self, number: int, share: float, evaluation: Evaluation) -> None:
        each = evaluation
        row = (number, share, _plain(each.metrics), each.score, each.error, each.seconds)
        self._connection.execute("INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?)", row)

    def forget(self, numbers: Sequence[int]) -> None:
        """Have these evaluated again."""
        self._connection.executemany(
            "DELETE FROM evaluations WHERE number = ?", [(each,) for each in numbers]
        )

    def trials(self) -> tuple[Trial, ...]:
        """All that were evaluated at least on a share, by number."""
        rows = self._connection.execute(
            "SELECT t.number, t.parameters, e.share, e.metrics, e.score, e.error, e.seconds"
            " FROM trials t JOIN evaluations e ON e.number = t.number ORDER BY t.number, e.share"
        ).fetchall()
        by_number: dict[int, Trial] = {}
        for number, parameters, share, metrics, score, error, seconds in rows:
            before = by_number[number].seconds if number in by_number else 0.0
            state: State = "failed" if error else "done" if share == 1.0 else "stopped"
            whole = score if state == "done" else None
            values = json.loads(parameters)
            by_number[number] = Trial(
                number, values, state, json.loads(metrics), whole, error, before + seconds
            )
        return tuple(by_number.values())

    def _open(self, identity: Mapping[str, str], *, replace: bool) -> None:
        try:
            # Held until it is closed, by the lock of a file, which ends with the process.
            self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("BEGIN EXCLUSIVE")
            self._connection.execute("COMMIT")
            self._connection.executescript(_TABLES)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            what = "another process goes on with this search now."
            raise HeldError(Problem(str(self._directory), what, "Wait until it has ended.")) from error
        except sqlite3.DatabaseError as error:
            what = f"{DATABASE} cannot be read ({error})."
            raise TargetError(Problem(str(self._directory), what, "Remove the directory.")) from error
        before = dict(self._connection.execute("SELECT key, value FROM search").fetchall())
        others = [key for key in identity if before and before.get(key) != identity[key]]
        if others and not replace:
            what = f"the trials here are of another search; what differs: {', '.join(others)}."
            remedy = "Choose another -o, or give --replace to begin anew."
            raise TargetError(Problem(str(self._directory), what, remedy))
        with self._connection:
            self._connection.execute("BEGIN")
            if others:
                for table in ("evaluations", "trials", "search"):
                    self._connection.execute(f"DELETE FROM {table}")
            self._connection.executemany("INSERT OR IGNORE INTO search VALUES (?, ?)", identity.items())


def _plain(values: Mapping[str, object]) -> str:
    return json.dumps(values, ensure_ascii=False)


def best_first(trials: Sequence[Trial]) -> list[Trial]:
    """Those that are done, the first of equals before the others."""
    done = [each for each in trials if each.score is not None]
    return sorted(done, key=lambda each: (-(each.score or 0.0), each.number))
