"""``raymerge verify``: prove a checkpoint; the exit code is the verdict."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.text import Text

from raymerge.cli.messages import command, show_problems
from raymerge.cli.options import (
    Address,
    Inline,
    Memory,
    ProfileFile,
    Threads,
    Workers,
    reached,
    read_memory,
    read_sources,
)
from raymerge.cli.render.screen import Output, counted, make_console, own_stdout, printable
from raymerge.cli.running import examining, terminable
from raymerge.errors import OptionError, Problem
from raymerge.options import RunOptions
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.api import AuditOptions, LoadVerdict, ReplayVerdict, Verdict
    from raymerge.verifier.audit import AuditVerdict

_Pieces: TypeAlias = tuple[str | tuple[str, str], ...]
_LEVEL_HELP = (
    "structure: at once. audit: every byte, and samples recomputed from the sources. load: transformers "
    "takes it with strict keys."
)
_STEPS_HELP = "audit: what submit was given, where it kept what it made on the way."
_SCRATCH_HELP = "load: directory for a copy of what lies in an object store."
_NAMES_SHOWN = 3
_SOUND = ("sound", "bold green")
_NOT_SOUND = ("NOT SOUND", "bold red")


class Level(StrEnum):
    STRUCTURE = "structure"
    AUDIT = "audit"
    LOAD = "load"


@command
def verify(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Directory or address of a checkpoint.")],
    *,
    level: Annotated[Level, typer.Option(help=_LEVEL_HELP)] = Level.STRUCTURE,
    sample: Annotated[
        float,
        typer.Option(metavar="SHARE", help="audit: share of each tensor that is recomputed; 1 for all."),
    ] = 0.01,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="audit: chooses what is recomputed; another each time.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="audit, --replay: where a source of the recipe is now."),
    ] = None,
    show: Annotated[int, typer.Option(metavar="N", help="audit: problems told in words; all count.")] = 20,
    replay: Annotated[
        bool, typer.Option("--replay", help="Derive the provenance anew from recipe and sources instead.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="load: run Python files of OUT for an unknown model.")
    ] = False,
    steps: Annotated[str | None, typer.Option(metavar="DIR", help=_STEPS_HELP)] = None,
    scratch: Annotated[str | None, typer.Option(metavar="DIR", help=_SCRATCH_HELP)] = None,
    workers: Workers = None,
    threads: Threads = None,
    memory: Memory = None,
    address: Address = None,
    inline: Inline = False,
    profile: ProfileFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Give the verdict as JSON.")] = False,
) -> int:
    """Check a checkpoint; the exit code is the verdict."""
    place = reached(out, profile)
    places = {name: reached(where, profile) for name, where in read_sources(source)}
    if replay and level is not Level.STRUCTURE:
        what = f"it is a check of its own, and so is --level {level.value}."
        raise OptionError(Problem("--replay", what, "Give one after the other."))
    # Code of the checkpoint, if it is run, and libraries may print.
    with own_stdout(as_json=as_json) as stdout:
        if replay:
            return _replay(place, places, stdout)
        if level is Level.STRUCTURE:
            return _structure(place, stdout)
        if level is Level.LOAD:
            return _load(place, read_memory(memory), scratch, stdout, trust=trust_remote_code)
        options = RunOptions(workers, read_memory(memory), "cpu", address, inline, threads=threads)
        with heavy_imports():
            from raymerge.api import AuditOptions
        return _audit(place, AuditOptions(sample, seed, places, show, steps), options, stdout)


def _structure(place: str, out: Output) -> int:
    with heavy_imports():
        from raymerge.api import verify

    verdict = verify(place)
    plan = ", as its plan says" if verdict.against_plan else "; it keeps no plan to compare with"
    size = f"{counted(verdict.tensors, 'tensor')}, {format_size(verdict.nbytes)}"
    good = ("is ", _SOUND, f": {size} in {counted(verdict.files, 'file')}{plan}.")
    return _show(out, verdict, verdict.path, good, ("is ", _NOT_SOUND), verdict.notes)


def _load(place: str, memory: int | None, scratch: str | None, out: Output, *, trust: bool) -> int:
    with heavy_imports():
        from raymerge.api import verify_load

    # A copy is not to stay.
    with terminable():
        verdict = verify_load(place, memory=memory, trust_remote_code=trust, scratch=scratch)
    good, bad = (("loads", "bold green"), "."), (("DOES NOT LOAD", "bold red"),)
    return _show(out, verdict, verdict.path, good, bad, _load_lines(verdict))


def _load_lines(verdict: LoadVerdict) -> Iterator[str]:
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


def _replay(place: str, sources: Mapping[str, str], out: Output) -> int:
    with heavy_imports():
        from raymerge.api import replay

    verdict = replay(place, sources)
    lines = list(verdict.notes)
    if verdict.plan:
        read, tensors = counted(verdict.sources, "source"), counted(verdict.tensors, "tensor")
        digested = f"{format_size(verdict.digested_nbytes)} compared with their digests"
        lines.insert(0, f"plan {verdict.plan}, {read}, {tensors}; {digested}")
    good, bad = ("is what its record says", "bold green"), ("IS NOT WHAT ITS RECORD SAYS", "bold red")
    total = max(verdict.num_problems, len(verdict.problems))
    return _show(out, verdict, verdict.path, (good, "."), (bad,), lines, total=total)


def _audit(place: str, audited: AuditOptions, options: RunOptions, out: Output) -> int:
    from raymerge.api import audit

    with examining("auditing", out) as show:
        verdict = audit(place, audited, options, on_event=show)
    tensors, total = counted(verdict.tensors, "tensor"), verdict.num_problems
    good: _Pieces = ("is ", _SOUND, f": {tensors}.")
    if verdict.is_by_bytes_alone:
        unproven = f": {tensors}. Whether they are right was not audited."
        good = ("is ", ("as it was written", "bold yellow"), unproven)
    bad, lines, more = ("is ", _NOT_SOUND), _audit_lines(verdict), f"; --show {total} shows them"
    return _show(out, verdict, verdict.structure.path, good, bad, lines, total=total, more=more)


def _audit_lines(verdict: AuditVerdict) -> Sequence[str]:
    if not verdict.structure.are_tensors_sound:
        return ["Its structure is not sound, so nothing else was looked at."]
    near = f", {verdict.near} of them near a threshold, where either side was taken" if verdict.near else ""
    codes = f"; codes are at most {verdict.farthest:.3g} of a code step off" if verdict.farthest else ""
    lines = [
        f"{format_size(verdict.digested)} read again and compared with the digests of the ledger; "
        f"{format_size(verdict.compared)} of it with the bytes of sources",
        f"{counted(verdict.recomputed, 'tensor')} recomputed from the sources ({verdict.sample:.3g} of each, "
        f"seed {verdict.seed}): {counted(verdict.judged, 'element')}{near}{codes}",
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


def _show(
    out: Output,
    verdict: Verdict | AuditVerdict | LoadVerdict | ReplayVerdict,
    path: str,
    good: _Pieces,
    bad: _Pieces,
    lines: Iterable[str] = (),
    *,
    total: int | None = None,
    more: str = "",
) -> int:
    """Give a verdict, of which ``total`` counts the problems if it lacks some; returns the exit code."""
    problems = verdict.problems
    total = len(problems) if total is None else total
    if out.as_json:
        out.json({"sound": not total, **asdict(verdict)})
        return 2 if total else 0
    pieces = (*bad, f": {counted(total, 'problem')}.") if total else good
    out.console.print(Text.assemble((printable(path), "bold"), " ", *pieces), soft_wrap=True)
    for line in lines:
        out.console.print(Text(printable(line)), soft_wrap=True)
    if not total:
        return 0
    out.console.print()
    errors = make_console(sys.stderr)
    show_problems(errors, problems)
    if total > len(problems):
        errors.print(f"\n{total - len(problems)} more are not shown{more}.")
    return 2
