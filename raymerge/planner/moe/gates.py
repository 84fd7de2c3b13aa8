"""The stage that makes router rows for a mixture of experts, as it is decided from the recipe."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from raymerge.checkpoints.layout import TensorSpec
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.source import ExpertPrompts, GateSpec, Stage
from raymerge.planner.inputs.stages import make_stage
from raymerge.planner.moe.shape import MoeShape
from raymerge.recipes import Expert, MoeRecipe

_MOST_TEXT_BYTES = 64 * 2**20


def gate_stage(recipe: MoeRecipe, shape: MoeShape, *, version: str) -> Stage:
    """The stage of a recipe's router rows.

    Args:
        recipe: what is asked.
        shape: what is built; its base reads the prompts, and all its layers get rows.
        version: raymerge's version.

    Raises:
        PlanError: a file of prompts cannot be read.
    """
    routed, shared = _all_prompts(recipe)
    spec = GateSpec(
        base=shape.base,
        mode=recipe.gate_mode,
        experts=routed,
        shared=shared if shape.shared_have_gates else (),
        layers=tuple(range(shape.num_layers)),
        hidden_size=shape.hidden_size,
        seed=recipe.seed,
        scale=recipe.gate_scale,
        penalty=recipe.gate_ridge,
        constants=shape.constants,
    )
    return make_stage(
        # No merge's name begins so.
        name=f"@router-{recipe.name}" if recipe.name is not None else "@router",
        title=f"router rows ({recipe.gate_mode})",
        place=recipe.where("gate_mode"),
        spec=spec,
        tensors=tuple(_tensors(spec)),
        version=version,
    )


def router_tensor(layer: int) -> str:
    """Name of a layer's router rows in the stage's result."""
    return f"router.{layer}"


def shared_gate_tensor(layer: int) -> str:
    """Name of a layer's gates of shared experts in the stage's result."""
    return f"shared_gate.{layer}"


def _tensors(spec: GateSpec) -> Iterator[TensorSpec]:
    for layer in spec.layers:
        yield TensorSpec(router_tensor(layer), DType.F32, (len(spec.experts), spec.hidden_size))
        if spec.shared:
            yield TensorSpec(shared_gate_tensor(layer), DType.F32, (len(spec.shared), spec.hidden_size))
    for each in spec.constants:
        yield TensorSpec(each.name, each.dtype, each.shape)


def _all_prompts(recipe: MoeRecipe) -> tuple[tuple[ExpertPrompts, ...], tuple[ExpertPrompts, ...]]:
    """Of the routed experts, and of the shared ones.

    Raises:
        PlanError: files cannot be read; all of them.
    """
    problems: list[Problem] = []
    routed = tuple(_prompts(recipe, "experts", recipe.experts, problems))
    shared = tuple(_prompts(recipe, "shared_experts", recipe.shared_experts, problems))
    if problems:
        raise PlanError(problems)
    return routed, shared


def _prompts(
    recipe: MoeRecipe, key: str, experts: Sequence[Expert], problems: list[Problem]
) -> Iterator[ExpertPrompts]:
    """The prompts of each expert, those of copies one after the other."""
    for index, expert in enumerate(experts):
        text = _read(recipe, (key, index, "prompt_file"), expert.prompt_file, problems)
        name = f"{'expert' if key == 'experts' else 'shared expert'} {index} ({expert.source_model})"
        for copy in range(expert.copies):
            yield ExpertPrompts(
                name=name if expert.copies == 1 else f"{name}, copy {copy}",
                positive=expert.positive_prompts,
                negative=expert.negative_prompts,
                text=text,
                held_out=expert.held_out_prompts,
            )


def _read(recipe: MoeRecipe, path: tuple[str | int, ...], file: str | None, problems: list[Problem]) -> str:
    if file is None:
        return ""
    place = Path(os.path.expanduser(file))
    try:
        if place.exists() and not place.is_file():
            what = f"{file} is no ordinary file."
            problems.append(Problem(recipe.where(*path), what, "Give the path of a text file."))
            return ""
        if place.stat().st_size > _MOST_TEXT_BYTES:
            what = f"{file} has more than {_MOST_TEXT_BYTES} bytes."
            problems.append(Problem(recipe.where(*path), what, "Take a part of it: a few pages are enough."))
            return ""
        text = place.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        problems.append(Problem(recipe.where(*path), f"{file} is not UTF-8 ({error}).", "Save it as UTF-8."))
        return ""
    except OSError as error:
        what = f"{file} cannot be read: {error.strerror}."
        problems.append(Problem(recipe.where(*path), what, "Correct the path of the text file."))
        return ""
    if not text.strip():
        problems.append(Problem(recipe.where(*path), f"{file} is empty.", "Give text of the expert's kind."))
    return text
