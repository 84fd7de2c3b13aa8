"""Adapters made: extracted from two models, or merged from other adapters."""

from __future__ import annotations

from pathlib import Path

from raymerge.errors import CheckpointError, Problem
from raymerge.lora.choose import Selection
from raymerge.lora.combine import CombineOptions, adapter_problems, combine_adapters, combine_recipe
from raymerge.lora.extract import ExtractOptions, extract
from raymerge.lora.matrices import Limits
from raymerge.lora.report import Combination, Extraction, LeftOut, ModuleReport, OnModule
from raymerge.lora.sources import open_named_model
from raymerge.lora.writer import output_directory

__all__ = [
    "Combination",
    "CombineOptions",
    "ExtractOptions",
    "Extraction",
    "LeftOut",
    "Limits",
    "ModuleReport",
    "OnModule",
    "Selection",
    "adapter_problems",
    "combine_adapters",
    "combine_recipe",
    "extract_lora",
]


def extract_lora(
    model: str | Path,
    base: str | Path,
    output: str | Path,
    options: ExtractOptions | None = None,
    *,
    on_module: OnModule | None = None,
) -> Extraction:
    """Write what ``model`` changed of ``base`` as a LoRA adapter that peft loads (arXiv 2106.09685).

    Args:
        model: the trained model, a directory or a Hub name.
        base: what it was trained from.
        output: directory of the adapter; must be absent or empty.
        options: what goes in; by default rank 32, and norms and embeddings whole.
        on_module: told of progress.

    Raises:
        CheckpointError: a model cannot be read.
        OptionError: an option cannot be used.
        PlanError: the two models do not fit together, are equal, or differ in what no adapter can say.
        NonFiniteError: a changed matrix has NaN or infinity.
        TargetError: something is at the output place.
    """
    problems: list[Problem] = []
    opened = []
    for text in (str(model), str(base)):
        try:
            opened.append(open_named_model(text))
        except CheckpointError as error:
            problems.extend(error.problems)
    if problems:
        raise CheckpointError(problems)
    new, old = opened
    return extract(new, old, output_directory(output), options or ExtractOptions(), on_module=on_module)
