"""What encoding changed in the numbers of an output, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raymerge.cli.render.screen import counted

if TYPE_CHECKING:
    from raymerge.events import EncodingErrorsFound
    from raymerge.merge_plan.encoding_errors import ErrorsAbove


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
