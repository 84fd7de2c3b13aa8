"""The stage that makes router rows for a mixture of experts, as it is decided from the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from raymerge.checkpoints.layout import TensorSpec
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.planner.sources import Source
from raymerge.planner.stages import Constant, ExpertPrompts, GateSpec, Stage, make_stage
from raymerge.recipes import Expert, MoeRecipe

_MOST_TEXT_BYTES = 64 * 2**20


def gate_stage(
    recipe: MoeRecipe,
    base: Source,
    *,
    layers: Sequence[int],
    hidden_size: int,
    shared_have_gates: bool,
    constants: Sequence[Constant],
    version: str,
) -> Stage:
    """The stage of a recipe's router rows.

    Args:
        recipe: what is asked.
        base: the model that reads prompts.
        layers: those that get rows.
        hidden_size: elements of a row.
        shared_have_gates: whether shared experts get rows too.
        constants: tensors of one value that the output needs beside the rows.
        version: raymerge's version.

    Raises:
        PlanError: a file of prompts cannot be read.
    """
    problems: list[Problem] = []
    routed = tuple(_prompts(recipe, "experts", recipe.experts, problems))
    shared = tuple(_prompts(recipe, "shared_experts", recipe.shared_experts, problems))
    if problems:
        raise PlanError(problems)
    spec = GateSpec(
        base=base,
        mode=recipe.gate_mode,
        experts=routed,
        shared=shared if shared_have_gates else (),
        layers=tuple(layers),
        hidden_size=hidden_size,
        seed=recipe.seed,
        scale=recipe.gate_scale,
        penalty=recipe.gate_ridge,
        constants=tuple(constants),
    )
    return make_stage(
        name=f"{recipe.name or 'output'}-router",
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
    place = Path(file).expanduser()
    try:
        if place.stat().st_size > _MOST_TEXT_BYTES:
            what = f"{file} has more than {_MOST_TEXT_BYTES} bytes."
            problems.append(Problem(recipe.where(*path), what, "Take a part of it: a few pages are enough."))
            return ""
        text = place.read_text(encoding="utf-8")
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
