"""``raymerge inspect``: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from raymerge.cli.messages import looking
from raymerge.cli.options import MODEL_HELP, AllAsJson, ProfileFile, reached
from raymerge.cli.render.screen import counted, heading, named, own_stdout, show_table
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.planner.inspection import ExpertLayout, Inspection, QuantisedGroup, Tie

_FILES_SHOWN = 8


@looking
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    *,
    profile: ProfileFile = None,
    as_json: AllAsJson = False,
) -> int:
    """Show what a checkpoint holds: roles, dtypes, layers, experts."""
    with heavy_imports():
        from raymerge.api import inspect

    with own_stdout(as_json=as_json) as out:
        inspection = inspect(reached(model, profile))
        if as_json:
            out.json(inspection.to_json())
        else:
            _show(out.console, inspection)
    return 0


def _show(console: Console, inspection: Inspection) -> None:
    kind = ", ".join(inspection.architectures) or inspection.model_type or "of no named architecture"
    console.print(heading(inspection.name, note=kind))
    files = counted(len(inspection.files), "file")
    console.print(f"{counted(inspection.tensors, 'tensor')}, {format_size(inspection.nbytes)} in {files}")
    for title, groups in (("role", inspection.roles), ("dtype", inspection.dtypes)):
        if groups:
            rows = [(group.name, str(group.tensors), format_size(group.nbytes)) for group in groups]
            show_table(console, (title, "tensors", "bytes"), rows, numbers=(1, 2))
    if inspection.quantised:
        titles = ("quantised as", "block", "scales", "tensors", "bytes", "bits a weight")
        show_table(console, titles, map(_quantised, inspection.quantised), numbers=(3, 4, 5))
    show_table(console, ("", ""), _facts(inspection))


def _quantised(group: QuantisedGroup) -> tuple[str, ...]:
    scales = f"{group.scales}, 2^n" if group.power_of_two else group.scales
    bits = "" if group.bits_per_weight is None else f"{group.bits_per_weight:.4g}"
    return group.name, _block(group.block), scales, str(group.tensors), format_size(group.nbytes), bits


def _block(block: tuple[int, int] | None) -> str:
    if block is None:
        return "not read"
    rows, columns = block
    if not columns:
        return "a row" if rows else "all"
    return f"{rows}x{columns}"


def _facts(inspection: Inspection) -> Iterator[tuple[str, str]]:
    main = {True: " (the decoder's)", False: ""}
    stacks = (f"{s.num_layers} in {s.prefix or 'the top'}{main[s.is_main]}" for s in inspection.stacks)
    yield from _labelled("layers", stacks)
    if inspection.experts:
        yield from _labelled("experts", map(_experts, inspection.experts))
        yield "shared experts", _in_layers(inspection.shared_expert_layers)
    yield "head", _tie(inspection.tie)
    formats = ", ".join(dict.fromkeys(group.name for group in inspection.quantised)) or "none"
    declared = inspection.declared_quantisation
    yield "quantisation", f"{formats}; the config declares {declared}" if declared else formats
    yield "MTP", _in_layers(inspection.mtp_layers)
    yield from _labelled("files", _files(inspection))
    yield "companions", ", ".join(inspection.companions) or "none"
    yield from _labelled("left out", _left_out(inspection))
    yield from _labelled("notes", inspection.notes)


def _labelled(label: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    return (("" if number else label, line) for number, line in enumerate(lines))


def _files(inspection: Inspection) -> Iterator[str]:
    files = inspection.files
    num_shown = len(files) if len(files) <= _FILES_SHOWN else _FILES_SHOWN - 1
    yield from (f"{file.key}  {format_size(file.nbytes)}" for file in files[:num_shown])
    if num_shown < len(files):
        yield f"and {len(files) - num_shown} more"


def _left_out(inspection: Inspection) -> Iterator[str]:
    from raymerge.planner.explain import left_out_lines

    for line in left_out_lines(inspection.left_out, 0):
        refused = "weights that no rule is about, a merge refuses"
        what = f"{line.rule} ({line.reason})" if line.rule else refused
        yield f"{what}: {named(line.examples, line.files)}, {format_size(line.nbytes)}"


def _experts(layout: ExpertLayout) -> str:
    counts, tensors = " or ".join(map(str, layout.num_experts)), counted(layout.tensors, "tensor")
    stored = {
        "per_expert": "one by one (per_expert)",
        "unknown": "fused in a way that cannot be told from config and family (unknown)",
    }.get(layout.kind, f"fused ({layout.kind})")
    return f"{counts} in {counted(layout.layers, 'layer')}, stored {stored}, {tensors}"


def _tie(tie: Tie | None) -> str:
    if tie is None:
        return "no token embedding is known"
    declared = {True: "tied", False: "not tied", None: "silent on ties"}[tie.declared]
    stored = "stored" if tie.stored else "not stored"
    return f"{tie.head} is {stored}; the config says {declared}; embedding {tie.embedding}"


def _in_layers(count: int) -> str:
    return f"in {counted(count, 'layer')}" if count else "none"
