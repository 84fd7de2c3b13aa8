"""A recipe whose models are adapters, carried out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from raymerge.architectures import describe, load_rules
from raymerge.checkpoints.adapters import Adapter
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, PlanError, Problem
from raymerge.lora.combine import CombineOptions, combine_adapters
from raymerge.lora.compatible import COMBINING
from raymerge.lora.report import Combination, OnModule
from raymerge.lora.sources import open_named_adapter
from raymerge.lora.writer import output_directory
from raymerge.methods import Method, Settings, find_method
from raymerge.planner.bind import Binder, BindError, check_parameter_names
from raymerge.planner.spans import Member
from raymerge.planner.treatments import OWN, Treatment
from raymerge.recipes import AdapterOutput, ModelReference, Recipe, Subject, did_you_mean

AdapterOpener = Callable[[ModelReference], Adapter]
"""Opens the adapter that a reference names."""

_LAYER = re.compile(r"\.([0-9]{1,9})\.")


def combine_recipe(
    recipe: Recipe,
    output: str | Path,
    *,
    opener: AdapterOpener = open_named_adapter,
    on_module: OnModule | None = None,
) -> Combination:
    """Merge the adapters of a recipe into one.

    Args:
        recipe: its ``models`` are adapters of one model; ``adapter`` says how the result becomes factors.
        output: directory of the new adapter; must be absent or empty.
        opener: how adapters are opened.
        on_module: told of progress.

    Raises:
        PlanError: the recipe cannot be carried out on these adapters; all reasons.
        NonFiniteError: a factor has NaN or infinity.
        TargetError: something is at the output place.
    """
    problems = list(_foreign(recipe))
    method = find_method(recipe.merge_method)
    if method is None:
        what = f"there is no merge_method '{recipe.merge_method}'."
        hint = did_you_mean(recipe.merge_method, COMBINING)
        remedy = f"{hint} Adapters are merged by {', '.join(COMBINING)}.".strip()
        problems.append(Problem(recipe.where("merge_method"), what, remedy))
    else:
        problems.extend(check_parameter_names(recipe, method, ()))
    adapters = _open_all(recipe, opener, problems)
    if problems or method is None:
        raise PlanError(problems)
    shape = recipe.adapter or AdapterOutput()
    options = CombineOptions(
        rank=shape.rank,
        energy=shape.energy,
        combine=shape.combine,
        seed=recipe.seed,
        dtype=recipe.out_dtype or recipe.dtype or DType.F32,
    )
    binding = _Binding(recipe, method, [each.name for each in adapters], _num_layers(adapters))
    return combine_adapters(
        adapters,
        output_directory(output),
        method=method,
        settings_of=binding.settings,
        options=options,
        where=recipe.where,
        on_module=on_module,
    )


def _foreign(recipe: Recipe) -> Iterator[Problem]:
    """Fields that mean something for models only."""
    foreign = {
        "base_model": recipe.base_model,
        "methods": recipe.methods,
        "tokenizer": recipe.tokenizer,
        "tokenizer_source": recipe.tokenizer_source,
        "chat_template": recipe.chat_template,
    }
    for key, value in foreign.items():
        if value:
            what = f"'{key}' has no meaning in a merge of adapters: their changes are merged, and no model."
            yield Problem(recipe.where(key), what, f"Remove '{key}', or name models with adapters on them.")
    if not recipe.models:
        what = "a merge of adapters lists them below 'models'."
        yield Problem(recipe.where(), what, "Write models: [{model: ADAPTER}, ...].")


def _open_all(recipe: Recipe, opener: AdapterOpener, problems: list[Problem]) -> list[Adapter]:
    adapters: list[Adapter] = []
    for index, entry in enumerate(recipe.models):
        place = recipe.where("models", index, "model")
        try:
            adapters.append(opener(entry.model))
        except CheckpointError as error:
            problems.extend(Problem(f"{place}: {p.where}", p.what, p.remedy) for p in error.problems)
    return adapters


def _num_layers(adapters: Sequence[Adapter]) -> int:
    names = [*(module for each in adapters for module in each.factors)]
    return max((layer + 1 for name in names if (layer := _layer(name)) is not None), default=1)


def _layer(name: str) -> int | None:
    found = _LAYER.search(f".{name}.")
    return int(found[1]) if found else None


class _Binding:
    """A recipe's parameters for single tensors, bound as those of a merge of models."""

    def __init__(self, recipe: Recipe, method: Method, names: Sequence[str], num_layers: int) -> None:
        members = tuple(
            Member(index, 0, entry.parameters, ("models", index)) for index, entry in enumerate(recipe.models)
        )
        treatment = Treatment(method, members, None, {}, (recipe.parameters,), OWN, ("models",))
        try:
            self._binder = Binder(recipe, treatment, names)
        except BindError as error:
            raise PlanError(error.problem) from error
        self._num_sources = len(members)
        self._num_layers = num_layers
        # An adapter does not say the family of its model; the general rules name the roles.
        self._rules = load_rules(None)

    def settings(self, name: str) -> Settings:
        """The method's parameters for a tensor of the model.

        Raises:
            PlanError: one has no value, or none that can be.
        """
        layer = _layer(name)
        info = describe(name, self._rules)
        subject = Subject(name, frozenset({str(info.role), str(info.part)}), layer)
        last = self._num_layers - 1
        t = 0.0 if layer is None else layer / last if last else 1.0
        try:
            return self._binder.settings(subject, (subject,) * self._num_sources, t, depth=t)
        except BindError as error:
            raise PlanError(error.problem) from error
