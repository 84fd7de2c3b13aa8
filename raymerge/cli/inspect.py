"""``raymerge inspect``: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from raymerge.cli.messages import guarded
from raymerge.cli.options import ProfileFile, reached
from raymerge.cli.render.screen import (
    MODEL_HELP,
    counted,
    heading,
    make_console,
    make_table,
    named,
    own_stdout,
    put_json,
)
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.planner.inspection import ExpertLayout, Group, Inspection, QuantisedGroup, Tie

_FILES_SHOWN = 8


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    *,
    profile: ProfileFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Give everything as JSON.")] = False,
) -> None:
    """Show what a checkpoint holds: roles, dtypes, layers, experts."""
    raise typer.Exit(guarded(lambda: _inspect(reached(model, profile), as_json=as_json), as_json=as_json))


def _inspect(model: str, *, as_json: bool) -> int:
    with heavy_imports():
        from raymerge.api import inspect

    with own_stdout() as stdout:
        found = inspect(model)
    if as_json:
        put_json(stdout, found.to_json())
    else:
        _show(make_console(stdout), found)
    return 0


def _show(console: Console, found: Inspection) -> None:

    kind = ", ".join(found.architectures) or found.model_type or "of no named architecture"
    console.print(heading(found.name, note=kind))
    files = counted(len(found.files), "file")
    console.print(f"{counted(found.tensors, 'tensor')}, {format_size(found.nbytes)} in {files}")
    for title, groups in (("role", found.roles), ("dtype", found.dtypes)):
        if groups:
            console.print()
            console.print(_group_table(title, groups))
    if found.quantised:
        console.print()
        console.print(_quantised_table(found.quantised))
    console.print()
    console.print(make_table(("", ""), list(_facts(found))))


def _group_table(title: str, groups: Sequence[Group]) -> Table:

    rows = [(group.name, str(group.tensors), format_size(group.nbytes)) for group in groups]
    return make_table((title, "tensors", "bytes"), rows, numbers=(1, 2))


def _quantised_table(groups: Sequence[QuantisedGroup]) -> Table:
    rows = [
        (
            group.name, _block(group.block), _scales(group), str(group.tensors), format_size(group.nbytes),
            "" if group.bits_per_weight is None else f"{group.bits_per_weight:.4g}",
        )
        for group in groups
    ]  # fmt: skip
    titles = ("quantised as", "block", "scales", "tensors", "bytes", "bits a weight")
    return make_table(titles, rows, numbers=(3, 4, 5))


def _block(block: tuple[int, int] | None) -> str:
    """The rows and columns that share a scale, in few words."""
    if block is None:
        return "not read"
    rows, columns = block
    if not columns:
        return "a row" if rows else "all"
    return f"{rows}x{columns}"


def _scales(group: QuantisedGroup) -> str:
    return f"{group.scales}, 2^n" if group.power_of_two else group.scales


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    """Everything that is no table, with its label once."""
    for position, stack in enumerate(found.stacks):
        main = " (the decoder's)" if stack.is_main else ""
        yield "" if position else "layers", f"{stack.num_layers} in {stack.prefix or 'the top'}{main}"
    if found.experts:
        for position, layout in enumerate(found.experts):
            yield "" if position else "experts", _experts(layout)
        yield "shared experts", _in_layers(found.shared_expert_layers)
    yield "head", _tie(found.tie)
    yield "quantisation", _quantisation(found)
    yield "MTP", _in_layers(found.mtp_layers)
    yield from _file_facts(found)
    yield "companions", ", ".join(found.companions) or "none"
    yield from _left_out_facts(found)
    for position, note in enumerate(found.notes):
        yield "" if position else "notes", note


def _file_facts(found: Inspection) -> Iterator[tuple[str, str]]:

    shown = found.files if len(found.files) <= _FILES_SHOWN else found.files[: _FILES_SHOWN - 1]
    for position, file in enumerate(shown):
        yield "" if position else "files", f"{file.key}  {format_size(file.nbytes)}"
    if len(shown) < len(found.files):
        yield "", f"and {len(found.files) - len(shown)} more"


def _left_out_facts(found: Inspection) -> Iterator[tuple[str, str]]:
    """Files that a merge does without, by rule."""
    from raymerge.planner.explain import left_out_lines

    for position, line in enumerate(left_out_lines(found.left_out, 0)):
        what = (
            f"{line.rule} ({line.reason})" if line.rule else "weights that no rule is about, a merge refuses"
        )
        size = f"{named(line.examples, line.files)}, {format_size(line.nbytes)}"
        yield "" if position else "left out", f"{what}: {size}"


def _experts(layout: ExpertLayout) -> str:
    counts = " or ".join(map(str, layout.num_experts))
    stored = {
        "per_expert": "one by one (per_expert)",
        "unknown": "fused in a way that cannot be told from config and family (unknown)",
    }.get(layout.kind, f"fused ({layout.kind})")
    return (
        f"{counts} in {counted(layout.layers, 'layer')}, stored {stored}, {counted(layout.tensors, 'tensor')}"
    )


def _tie(tie: Tie | None) -> str:
    if tie is None:
        return "no token embedding is known"
    declared = {True: "tied", False: "not tied", None: "silent on ties"}[tie.declared]
    stored = "stored" if tie.stored else "not stored"
    return f"{tie.head} is {stored}; the config says {declared}; embedding {tie.embedding}"


def _quantisation(found: Inspection) -> str:
    formats = ", ".join(dict.fromkeys(group.name for group in found.quantised)) or "none"
    declared = found.declared_quantisation
    return f"{formats}; the config declares {declared}" if declared else formats


def _in_layers(count: int) -> str:
    return f"in {counted(count, 'layer')}" if count else "none"
