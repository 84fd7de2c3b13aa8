"""``raymerge verify`` beside structure and audit: loading a checkpoint, deriving its record anew."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text

from raymerge.cli.messages import show_problems
from raymerge.cli.render.screen import counted, make_console, own_stdout, printable, put_json
from raymerge.cli.running import terminable
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.units import format_size

if TYPE_CHECKING:
    from typing import IO

    from raymerge.errors import Problem
    from raymerge.runtime.driver.replay import ReplayVerdict
    from raymerge.verifier.load import LoadVerdict

_NAMES_SHOWN = 3


def load(out: str, memory: int | None, scratch: str | None, *, trust_remote_code: bool, as_json: bool) -> int:
    """Verify that transformers loads a checkpoint, and show the verdict; returns the exit code."""
    with heavy_imports():
        from raymerge.api import verify_load

    # Code of the checkpoint, if it is run, and libraries may print. A copy is not to stay.
    with own_stdout() as stdout, terminable():
        verdict = verify_load(out, memory=memory, trust_remote_code=trust_remote_code, scratch=scratch)
        if as_json:
            put_json(stdout, {"sound": not verdict.problems, **asdict(verdict)})
        else:
            _show(stdout, verdict.path, "loads", "DOES NOT LOAD", verdict.problems, _load_lines(verdict))
    return 2 if verdict.problems else 0


def replay(out: str, sources: Mapping[str, str], *, as_json: bool) -> int:
    """Derive a checkpoint's provenance anew, and show the verdict; returns the exit code."""
    with heavy_imports():
        from raymerge.api import replay

    with own_stdout() as stdout:
        verdict = replay(out, sources)
        if as_json:
            put_json(stdout, {"sound": not verdict.problems, **asdict(verdict)})
        else:
            good, bad = "is what its record says", "IS NOT WHAT ITS RECORD SAYS"
            lines = _replay_lines(verdict)
            _show(stdout, verdict.path, good, bad, verdict.problems, lines, num_problems=verdict.num_problems)
    return 2 if verdict.problems else 0


def _show(
    stdout: IO[str],
    path: str,
    good: str,
    bad: str,
    problems: tuple[Problem, ...],
    lines: Iterable[str],
    *,
    num_problems: int = 0,
) -> None:
    """Show a verdict; ``num_problems`` where not all are told."""
    total = max(num_problems, len(problems))
    said = (f"{bad}: {counted(total, 'problem')}.", "bold red") if problems else (f"{good}.", "bold green")
    console = make_console(stdout)
    console.print(Text.assemble((printable(path), "bold"), " ", said), soft_wrap=True)
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)
    if problems:
        console.print()
        errors = make_console(sys.stderr)
        show_problems(errors, problems)
        if total > len(problems):
            errors.print(f"\n{total - len(problems)} more are not shown.")


def _load_lines(verdict: LoadVerdict) -> Iterable[str]:
    """What was looked at, and what was not."""
    if verdict.model_class:
        yield (
            f"{verdict.model_class} of transformers {verdict.transformers}: {counted(verdict.keys, 'key')}, "
            f"{counted(verdict.tensors, 'stored tensor')}"
        )
    for passed in verdict.passed:
        names = ", ".join(passed.names[:_NAMES_SHOWN])
        yield f"not compared: {len(passed.names)} {passed.why} (such as {names})"
    if verdict.ran:
        answer = f"; the tokens {', '.join(map(str, verdict.tokens))} followed" if verdict.tokens else ""
        yield f"it was loaded and run, with {format_size(verdict.needed_nbytes)} of memory at most{answer}"
    if verdict.note:
        yield verdict.note


def _replay_lines(verdict: ReplayVerdict) -> Iterable[str]:
    if verdict.plan:
        sources, tensors = counted(verdict.sources, "source"), counted(verdict.tensors, "tensor")
        read = format_size(verdict.digested_nbytes)
        yield f"plan {verdict.plan}, {sources}, {tensors}; {read} compared with their digests"
    yield from verdict.notes
