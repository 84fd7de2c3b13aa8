"""Sources whose codes and scales are seen as the numbers that they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raymerge.checkpoints.numbers import as_numbers
from raymerge.errors import PlanError, UserError
from raymerge.planner.inputs.quantised import quantised_tensors
from raymerge.planner.inputs.source import Source


def with_numbers(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The sources with each packed tensor as one.

    Raises:
        PlanError: in some of them codes and scales, or they and the config, do not go together.
    """
    found: list[Source] = []
    failures: list[UserError] = []
    for source in sources:
        try:
            numbers = as_numbers(source.checkpoint, quantised_tensors(source.checkpoint))
        except UserError as error:
            failures.append(error)
        else:
            found.append(replace(source, checkpoint=numbers))
    if failures:
        raise PlanError(problem for error in failures for problem in error.problems) from failures[0]
    return tuple(found)
