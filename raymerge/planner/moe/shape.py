"""What a mixture of experts will be, from recipe and headers: family, experts, sizes, routers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raymerge.architectures.moe_targets import (
    AddedTensor,
    DenseModel,
    Mixture,
    MoeTarget,
    Refusal,
    added_tensors,
    dense_model,
    moe_config,
    named_targets,
    refusals,
    shared_gate_name,
    targets,
)
from raymerge.checkpoints.header import TensorSpec
from raymerge.checkpoints.source import main_dtype
from raymerge.dtypes import DType, config_name
from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.consistency import declared_dtype
from raymerge.planner.inputs.quantised import CONVERT_FIRST, USE_PLAIN, quantised_tensors, stored_formats
from raymerge.planner.inputs.sources import ExpertPrompts, GateSpec, Source, Stage, make_stage
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.moe import RANDOM_GATES, Expert, MoeRecipe

DenseNames = Mapping[tuple[int, str], str]


@dataclass(frozen=True, slots=True)
class Upcycled:
    source: int
    tensors: Mapping[tuple[int, str], str]
    number: int
    """The expert that it is a part of, counted without slices; seeds its random numbers."""
    slice: int
    """Which of ``slices`` equal runs of its neurons it is."""
    slices: int
    noise_scale: float
    reinit_fraction: float
    down_scale: float

    @property
    def is_random(self) -> bool:
        return self.noise_scale != 0 or self.reinit_fraction != 0


@dataclass(frozen=True, slots=True)
class MoeShape:
    target: MoeTarget
    others: tuple[MoeTarget, ...]
    base: Source
    dense: tuple[DenseNames, ...]
    num_layers: int
    hidden_size: int
    experts: tuple[Upcycled, ...]
    """Routed experts in the order of the router's rows, slices of one side by side."""
    shared: tuple[Upcycled, ...]
    shared_have_gates: bool
    dtype: DType
    constants: tuple[AddedTensor, ...]
    config: Mapping[str, Any]

    def notes(self, recipe: MoeRecipe) -> Iterator[str]:
        cut = f", each of {recipe.granularity} pieces of a model's" if recipe.granularity > 1 else ""
        shared = f" and {len(self.shared)} shared" if self.shared else ""
        chosen = recipe.experts_per_token * recipe.granularity
        yield (
            f"a {self.target.title} of {len(self.experts)} experts{cut}{shared}, {chosen} of them for each "
            f"token; router rows by gate_mode {recipe.gate_mode}"
        )
        if self.others and recipe.architecture is None:
            names = ", ".join(other.name for other in self.others)
            yield f"the models fit other families as well, which 'architecture' chooses: {names}"
        everyone = (*recipe.experts, *recipe.shared_experts)
        has_prompts = any(each.positive_prompts or each.negative_prompts for each in everyone)
        if recipe.gate_mode in RANDOM_GATES and has_prompts:
            yield f"prompts are not read by gate_mode {recipe.gate_mode}"
        if recipe.trunk is None:
            yield f"everything but the experts is that of {self.base.name}"


def shape_of(recipe: MoeRecipe, sources: Sequence[Source]) -> MoeShape:
    if problems := list(_quantised(sources)):
        raise PlanError(problems)
    by_reference = {source.reference: source for source in sources}
    base = by_reference[recipe.base_model]
    models = tuple(map(_dense_model, sources))
    dense = tuple(model.matrices for model in models)
    target, others = _target(recipe, sources, models)
    base_config = base.checkpoint.config
    dtype, num_experts = recipe.dtype or main_dtype(base.checkpoint), _num_experts(recipe)
    copies = [each for each in recipe.experts for _ in range(each.copies)]
    factor, made = _routing_factor(recipe, target), partial(_upcycled, by_reference, dense)
    is_stated = recipe.dtype is None and declared_dtype(base_config) in (None, config_name(dtype))
    config = moe_config(
        target,
        base_config,
        num_experts=num_experts,
        experts_per_token=recipe.experts_per_token * recipe.granularity,
        expert_width=_gate(by_reference[recipe.experts[0].source_model], dense)[0] // recipe.granularity,
        shared_width=sum(_gate(by_reference[each.source_model], dense)[0] for each in recipe.shared_experts),
        dtype_name=None if is_stated else config_name(dtype),
    )
    return MoeShape(
        target=target,
        others=others,
        base=base,
        dense=dense,
        num_layers=1 + max(layer for layer, _ in dense[base.index]),
        hidden_size=_gate(base, dense)[1],
        experts=tuple(
            made(each, number, factor, piece=piece, pieces=recipe.granularity)
            for number, each in enumerate(copies)
            for piece in range(recipe.granularity)
        ),
        shared=tuple(made(each, number) for number, each in enumerate(recipe.shared_experts, len(copies))),
        shared_have_gates=bool(recipe.shared_experts) and shared_gate_name(target, 0) is not None,
        dtype=dtype,
        constants=added_tensors(target, models[base.index], num_experts, dtype),
        config=config,
    )


def _quantised(sources: Sequence[Source]) -> Iterator[Problem]:
    for source in sources:
        weights = quantised_tensors(source.checkpoint)
        formats = sorted({*stored_formats(weights).values(), *weights.unknown.values()})
        if formats:
            what = f"it is quantised ({', '.join(formats)}), and mixtures are built of plain numbers."
            yield Problem(source.name, what, USE_PLAIN if weights.unknown else CONVERT_FIRST)


def _target(
    recipe: MoeRecipe, sources: Sequence[Source], models: Sequence[DenseModel]
) -> tuple[MoeTarget, tuple[MoeTarget, ...]]:
    candidates = tuple(targets().values())
    if recipe.architecture is not None:
        candidates = named_targets(recipe.architecture)
        if not candidates:
            known = ", ".join(targets())
            what = f"there is no family of mixtures of experts called '{recipe.architecture}'."
            raise PlanError(Problem(recipe.where("architecture"), what, f"raymerge builds: {known}."))
    parents = {source.reference: models[source.index] for source in sources}
    refused = {target.name: _refusals(recipe, target, parents) for target in candidates}
    fitting = [target for target in candidates if not refused[target.name]]
    if not fitting:
        raise PlanError(_no_family(recipe, candidates, refused))
    return fitting[0], tuple(fitting[1:])


def _refusals(
    recipe: MoeRecipe, target: MoeTarget, parents: Mapping[ModelReference, DenseModel]
) -> tuple[Refusal, ...]:
    have_prompts = any(each.positive_prompts or each.prompt_file for each in recipe.shared_experts)
    mixture = Mixture(
        experts=tuple(parents[each.source_model] for each in recipe.experts),
        shared=tuple(parents[each.source_model] for each in recipe.shared_experts),
        shared_have_gates=None if recipe.gate_mode in RANDOM_GATES else have_prompts,
        num_experts=_num_experts(recipe),
        granularity=recipe.granularity,
        layout=recipe.layout,
    )
    return refusals(target, parents[recipe.base_model], mixture)


def _num_experts(recipe: MoeRecipe) -> int:
    return sum(expert.copies for expert in recipe.experts) * recipe.granularity


def _no_family(
    recipe: MoeRecipe, candidates: Sequence[MoeTarget], refused: Mapping[str, Sequence[Refusal]]
) -> list[Problem]:
    place = recipe.where("experts" if recipe.architecture is None else "architecture")
    reasons = {
        target.name: [f"{each.parent}: {each.reason}" for each in refused[target.name]]
        for target in candidates
    }
    every = [each for each in reasons[candidates[0].name] if all(each in other for other in reasons.values())]
    if every and len(candidates) > 1:
        what = f"no family of mixtures can be built of these models: {' '.join(every)}"
        return [Problem(place, what, "Correct that first; then families are looked at one by one.")]
    return [
        Problem(
            place,
            f"{target.title} ({target.name}) cannot be built of these models: "
            f"{' '.join(reasons[target.name])}",
            "Use models that fit one family, or another 'architecture'.",
        )
        for target in candidates
    ]


def _dense_model(source: Source) -> DenseModel:
    shapes = {name: tensor.shape for name, tensor in source.checkpoint.tensors.items()}
    return dense_model(source.name, source.checkpoint.config, shapes)


def _gate(source: Source, dense: Sequence[DenseNames]) -> tuple[int, ...]:
    return source.checkpoint.tensors[dense[source.index][0, "gate"]].shape


def _upcycled(
    by_reference: Mapping[ModelReference, Source],
    dense: Sequence[DenseNames],
    expert: Expert,
    number: int,
    factor: float = 1.0,
    *,
    piece: int = 0,
    pieces: int = 1,
) -> Upcycled:
    source = by_reference[expert.source_model]
    return Upcycled(
        source=source.index,
        tensors=dense[source.index],
        number=number,
        slice=piece,
        slices=pieces,
        noise_scale=expert.noise_scale or 0.0,
        reinit_fraction=expert.reinit_fraction or 0.0,
        down_scale=factor * (1.0 if expert.residual_scale is None else expert.residual_scale),
    )


def _routing_factor(recipe: MoeRecipe, target: MoeTarget) -> float:
    """What makes up for routing weights that do not sum to 1 over the models chosen for a token.

    The slices of one expert share its weight. With the factor the mixture of one model's slices is that
    model, when all slices of an expert are chosen together (virtual groups, arXiv 2410.07524); so is that of
    whole copies. Where weights are a softmax over all experts, used as it is, this holds for a router without
    preferences. All of it goes into the down projection, which is exact for gated units."""
    if not recipe.weight_scaling:
        return 1.0
    if target.weights_sum_to_one:
        return float(recipe.granularity)
    whole = sum(expert.copies for expert in recipe.experts)
    return recipe.granularity * whole / recipe.experts_per_token


_MOST_TEXT_BYTES = 64 * 2**20


def gate_stage(recipe: MoeRecipe, shape: MoeShape, *, version: str) -> Stage:
    problems: list[Problem] = []
    routed, shared = (tuple(_prompts(recipe, key, problems)) for key in ("experts", "shared_experts"))
    if problems:
        raise PlanError(problems)
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
    return f"router.{layer}"


def shared_gate_tensor(layer: int) -> str:
    return f"shared_gate.{layer}"


def _tensors(spec: GateSpec) -> Iterator[TensorSpec]:
    for layer in spec.layers:
        yield TensorSpec(router_tensor(layer), DType.F32, (len(spec.experts), spec.hidden_size))
        if spec.shared:
            yield TensorSpec(shared_gate_tensor(layer), DType.F32, (len(spec.shared), spec.hidden_size))
    for each in spec.constants:
        yield TensorSpec(each.name, each.dtype, each.shape)


def _prompts(recipe: MoeRecipe, key: str, problems: list[Problem]) -> Iterator[ExpertPrompts]:
    experts: Sequence[Expert] = getattr(recipe, key)
    for index, expert in enumerate(experts):
        text = ""
        if expert.prompt_file is not None:
            try:
                text = _text(expert.prompt_file)
            except _TextError as error:
                problems.append(Problem(recipe.where(key, index, "prompt_file"), *error.args))
        name = f"{'expert' if key == 'experts' else 'shared expert'} {index} ({expert.source_model})"
        for copy in range(expert.copies):
            yield ExpertPrompts(
                name=name if expert.copies == 1 else f"{name}, copy {copy}",
                positive=expert.positive_prompts,
                negative=expert.negative_prompts,
                text=text,
                held_out=expert.held_out_prompts,
            )


class _TextError(ValueError):
    """What is wrong with a file, and the remedy."""


def _text(file: str) -> str:
    place = Path(os.path.expanduser(file))
    try:
        if place.exists() and not place.is_file():
            raise _TextError(f"{file} is no ordinary file.", "Give the path of a text file.")
        if place.stat().st_size > _MOST_TEXT_BYTES:
            what = f"{file} has more than {_MOST_TEXT_BYTES} bytes."
            raise _TextError(what, "Take a part of it: a few pages are enough.")
        text = place.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _TextError(f"{file} is not UTF-8 ({error}).", "Save it as UTF-8.") from error
    except OSError as error:
        what = f"{file} cannot be read: {error.strerror}."
        raise _TextError(what, "Correct the path of the text file.") from error
    if not text.strip():
        raise _TextError(f"{file} is empty.", "Give text of the expert's kind.")
    return text
