"""Duplicates and encoding errors of an output, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from raymerge.cli.render.screen import counted
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.events import DuplicatesFound, EncodingErrorsFound
    from raymerge.merge_plan.report import DuplicateGroup, ErrorsAbove


_SHOWN = 2
"""Groups that are shown of a finished run."""


def sized(tensors: int, nbytes: int) -> str:
    """``2 tensors (4.10 kB)``."""
    return f"{counted(tensors, 'tensor')} ({format_size(nbytes)})"


def group_lines(groups: Sequence[DuplicateGroup], *, shown: int) -> Iterator[str]:
    """A line for each of the first groups, and one for all others."""
    for group in groups[:shown]:
        yield f"{group.pattern}: {counted(group.tensors, 'tensor')}, {format_size(group.nbytes)}"
    hidden = len(groups) - shown
    if hidden > 0:
        yield f"and {counted(hidden, 'group')} more"


def duplicate_lines(event: DuplicatesFound) -> Iterator[str]:
    """What a finished run says of duplicates."""
    if event.tensors:
        size = sized(event.tensors, event.nbytes)
        yield f"duplicates: {size} equal others, made once and written to each place{_shared(event)}"
        for line in group_lines(event.groups, shown=_SHOWN):
            yield f"  {line}"
    if event.unforeseen:
        tensors = sum(group.tensors for group in event.unforeseen)
        size = sized(tensors, sum(group.nbytes for group in event.unforeseen))
        yield f"duplicates: {size} turned out equal to others, which the plan could not know"
        for line in group_lines(event.unforeseen, shown=_SHOWN):
            yield f"  {line}"


def _shared(event: DuplicatesFound) -> str:
    if event.shared_bytes is None:
        return ""
    if not event.shared_bytes:
        return "; the file system cannot have them share storage"
    return f"; {format_size(event.shared_bytes)} share storage"


def encoding_lines(event: EncodingErrorsFound) -> Iterator[str]:
    """What a finished run says of its codes: a line a role."""
    tensors = sum(line.tensors for line in event.roles)
    yield f"encoded: {counted(tensors, 'tensor')} as codes with scales; relative error that this added:"
    for line in event.roles:
        most = f"at most {line.worst.relative_error:g} in {line.worst.name}"
        yield f"  {line.role}: {line.relative_error:g} in {counted(line.tensors, 'tensor')}, {most}"


def encoding_warning(found: ErrorsAbove) -> str:
    """What to say of tensors whose error is above the recipe's limit."""
    worst, counts = found.worst, counted(found.tensors, "tensor")
    return (
        f"warning: encoding changed {counts} by more than {found.limit:g} (warn_encoding_error), "
        f"{worst.name} most of all, by {worst.relative_error:g}; "
        f"'{{role: {worst.role}, value: bf16}}' as the first line of out_format keeps that role in bfloat16"
    )
