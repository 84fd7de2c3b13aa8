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
from raymerge.methods import Method, Parameter, Settings, Value, find_method
from raymerge.planner.bind import check_parameter_names
from raymerge.recipes import AdapterOutput, ModelReference, Recipe, Setting, Subject, did_you_mean, evaluate

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
    binding = _Binding(recipe, method, _num_layers(adapters))
    return combine_adapters(
        adapters,
        Path(output),
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
    """A recipe's parameters for single tensors: the adapter's entry, then the recipe, then the default."""

    def __init__(self, recipe: Recipe, method: Method, num_layers: int) -> None:
        self._recipe = recipe
        self._method = method
        self._num_layers = num_layers
        # An adapter does not say the family of its model; the general rules name the roles.
        self._rules = load_rules(None)

    def settings(self, name: str) -> Settings:
        """The method's parameters for a tensor of the model.

        Raises:
            PlanError: one has no value, or none that can be; all reasons.
        """
        layer = _layer(name)
        info = describe(name, self._rules)
        subject = Subject(name, frozenset({str(info.role), str(info.part)}), layer)
        last = self._num_layers - 1
        t = 0.0 if layer is None else layer / last if last else 1.0
        problems: list[Problem] = []
        shared: dict[str, Value] = {}
        sources: list[dict[str, Value]] = [{} for _ in self._recipe.models]
        for parameter in self._method.parameters:
            outer = self._recipe.parameters.get(parameter.name)
            if parameter.scope == "global":
                shared[parameter.name] = self._value(parameter, (outer,), subject, t, problems)
                continue
            for own, entry in zip(sources, self._recipe.models, strict=True):
                chain = (entry.parameters.get(parameter.name), outer)
                own[parameter.name] = self._value(parameter, chain, subject, t, problems)
        if problems:
            raise PlanError(problems)
        return Settings(values=shared, sources=tuple(sources), position=t if self._method.positional else 0.0)

    def _value(
        self,
        parameter: Parameter,
        chain: Sequence[Setting | None],
        subject: Subject,
        t: float,
        problems: list[Problem],
    ) -> Value:
        found = (evaluate(setting, subject, t) for setting in chain if setting is not None)
        value = next((number for number in found if number is not None), None)
        if value is None:
            if parameter.required:
                what = f"an adapter has no value of '{parameter.name}', which {self._method.name} requires."
                remedy = f"Add '{parameter.name}' to its parameters, or to those of the recipe."
                problems.append(Problem(self._recipe.where("models"), what, remedy))
            return parameter.default
        try:
            return parameter.coerce(value)
        except ValueError as error:
            problems.append(Problem(self._recipe.where("parameters"), f"{error}.", "Correct the value."))
            return parameter.default
