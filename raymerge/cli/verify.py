"""``raymerge verify``: prove a checkpoint; the exit code is the verdict."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.text import Text

from raymerge.cli import proofs
from raymerge.cli.messages import guarded, show_problems
from raymerge.cli.options import ProfileFile, reached, read_memory
from raymerge.cli.render.screen import counted, make_console, own_stdout, printable, put_json
from raymerge.cli.render.tally import Tally
from raymerge.cli.running import Address, Ending, Inline, Memory, Threads, Workers, terminable
from raymerge.errors import OptionError, Problem
from raymerge.options import RunOptions
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.units import format_duration, format_size

if TYPE_CHECKING:
    from typing import IO

    from raymerge.events import Event, OnEvent
    from raymerge.verifier.findings import AuditVerdict
    from raymerge.verifier.structure import Verdict

Sources: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=DIR", help="audit, --replay: where a source of the recipe is now."),
]
Steps: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="audit: what submit was given, where it kept what it made on the way."),
]
Scratch: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="load: directory for a copy of what lies in an object store."),
]


class Level(StrEnum):
    """How far a verification goes."""

    STRUCTURE = "structure"
    AUDIT = "audit"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked of an audit."""

    sample: float
    seed: int | None
    sources: Mapping[str, str]
    """Where sources are, by their names, as the storage options of a profile reach them."""
    steps: str | None
    show: int


def verify(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Directory or address of a checkpoint.")],
    *,
    level: Annotated[
        Level,
        typer.Option(
            help="structure: at once. audit: every byte, and samples recomputed from the sources. load: "
            "transformers takes it with strict keys."
        ),
    ] = Level.STRUCTURE,
    sample: Annotated[
        float,
        typer.Option(metavar="SHARE", help="audit: share of each tensor that is recomputed; 1 for all."),
    ] = 0.01,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="audit: chooses what is recomputed; another each time.")
    ] = None,
    source: Sources = None,
    show: Annotated[int, typer.Option(metavar="N", help="audit: problems told in words; all count.")] = 20,
    replay: Annotated[
        bool, typer.Option("--replay", help="Derive the provenance anew from recipe and sources instead.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="load: run Python files of OUT for an unknown model.")
    ] = False,
    steps: Steps = None,
    scratch: Scratch = None,
    workers: Workers = None,
    threads: Threads = None,
    memory: Memory = None,
    address: Address = None,
    inline: Inline = False,
    profile: ProfileFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Give the verdict as JSON.")] = False,
) -> None:
    """Check a checkpoint; the exit code is the verdict."""

    def verb() -> int:
        place = reached(out, profile)
        places = {name: reached(where, profile) for name, where in map(_place, source or ())}
        if replay and level is not Level.STRUCTURE:
            what = f"it is a check of its own, and so is --level {level.value}."
            raise OptionError(Problem("--replay", what, "Give one after the other."))
        if replay:
            return proofs.replay(place, places, as_json=as_json)
        if level is Level.STRUCTURE:
            return _verify(place, as_json=as_json)
        if level is Level.LOAD:
            limit = read_memory(memory)
            return proofs.load(place, limit, scratch, trust_remote_code=trust_remote_code, as_json=as_json)
        options = RunOptions(workers, read_memory(memory), "cpu", address, inline, threads=threads)
        asked = Asked(sample, seed, places, steps, show)
        with own_stdout() as stdout, terminable() as ending:
            return _audit(place, asked, options, stdout, ending, as_json=as_json)

    raise typer.Exit(guarded(verb, as_json=as_json))


def _verify(out: str, *, as_json: bool) -> int:
    with heavy_imports():
        from raymerge.api import verify

    verdict = verify(out)
    if as_json:
        put_json(sys.stdout, {"sound": not verdict.problems, **asdict(verdict)})
    else:
        _show(verdict)
    return 2 if verdict.problems else 0


def _show(verdict: Verdict) -> None:

    if verdict.problems:
        said = ("NOT SOUND", "bold red"), f": {counted(len(verdict.problems), 'problem')}."
    else:
        plan = ", as its plan says" if verdict.against_plan else "; it keeps no plan to compare with"
        files = counted(verdict.files, "file")
        size = f"{counted(verdict.tensors, 'tensor')}, {format_size(verdict.nbytes)} in {files}"
        said = ("sound", "bold green"), f": {size}{plan}."
    console = make_console(sys.stdout)
    console.print(Text.assemble((printable(verdict.path), "bold"), " is ", *said))
    if verdict.problems:
        console.print()
        show_problems(make_console(sys.stderr), verdict.problems)


def _audit(
    out: str, asked: Asked, options: RunOptions, stdout: IO[str], ending: Ending, *, as_json: bool
) -> int:
    with heavy_imports():
        from raymerge.api import AuditOptions, audit

    ending.json_to, ending.remedy = stdout if as_json else None, "Give the same command again."
    wanted = AuditOptions(asked.sample, asked.seed, asked.sources, asked.show, asked.steps)
    with _progress(ending) as show:
        verdict = audit(out, wanted, options, on_event=show)
    if as_json:
        put_json(stdout, {"sound": not verdict.num_problems, **asdict(verdict)})
    else:
        _show_audit(verdict, stdout)
    return 2 if verdict.num_problems else 0


def _place(text: str) -> tuple[str, str]:
    """A source's name and where it is."""
    name, equals, place = text.partition("=")
    if not (name and equals and place):
        what = f"'{text}' does not say which source is where."
        raise OptionError(Problem("--source", what, "Write NAME=DIRECTORY, with the name from the recipe."))
    return name, place


@contextmanager
def _progress(ending: Ending) -> Iterator[OnEvent]:
    """Shows on a terminal how far the audit is, and ends it in time when that is asked for."""
    tally = Tally()
    with make_console(sys.stderr).status("auditing") as status:

        def show(event: Event) -> None:
            ending.heed(event)
            tally.take(event)
            left = tally.seconds_left
            more = "" if left is None else f", {format_duration(left)} to go"
            status.update(f"auditing: {tally.fraction:.0%}{more}")

        yield show


def _show_audit(verdict: AuditVerdict, stdout: IO[str]) -> None:
    console = make_console(stdout)
    bad = verdict.num_problems
    tensors = counted(verdict.tensors, "tensor")
    if bad:
        said = ("NOT SOUND", "bold red"), f": {counted(bad, 'problem')}."
    elif verdict.is_by_bytes_alone:
        said = ("as it was written", "bold yellow"), f": {tensors}. Whether they are right was not audited."
    else:
        said = ("sound", "bold green"), f": {tensors}."
    console.print(Text.assemble((printable(verdict.structure.path), "bold"), " is ", *said), soft_wrap=True)
    for line in _audit_lines(verdict):
        console.print(Text(printable(line)), soft_wrap=True)
    if bad:
        console.print()
        errors = make_console(sys.stderr)
        show_problems(errors, verdict.problems)
        if bad > len(verdict.problems):
            errors.print(f"\n{bad - len(verdict.problems)} more are not shown; --show {bad} shows them.")


def _audit_lines(verdict: AuditVerdict) -> Sequence[str]:
    """What was looked at, and what was not."""
    if not verdict.structure.are_tensors_sound:
        return ["Its structure is not sound, so nothing else was looked at."]
    near = f", {verdict.near} of them near a threshold, where either side was taken" if verdict.near else ""
    lines = [
        f"{format_size(verdict.digested)} read again and compared with the digests of the ledger; "
        f"{format_size(verdict.compared)} of it with the bytes of sources",
        f"{counted(verdict.recomputed, 'tensor')} recomputed from the sources ({verdict.sample:.3g} of each, "
        f"seed {verdict.seed}): {counted(verdict.judged, 'element')}{near}",
        f"{counted(verdict.copied, 'tensor')} copied byte by byte",
    ]
    if verdict.open:
        lines.append(
            f"{counted(verdict.open, 'element')} compared within wide bounds or not at all, as float32 "
            "arithmetic leaves them open"
        )
    for each in verdict.skipped:
        example = f" ({each.example})" if each.tensors == 1 else f" (such as {each.example})"
        lines.append(f"not audited: {counted(each.tensors, 'tensor')}{example}: {each.reason}")
    return lines
