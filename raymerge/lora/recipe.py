"""A recipe whose models are adapters, carried out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from raymerge.architectures import describe, load_rules
from raymerge.checkpoints.adapters import Adapter
from raymerge.documents.yaml_text import in_order
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, NotCachedError, PlanError, Problem
from raymerge.lora.combine import CombineOptions, combine_adapters
from raymerge.lora.compatible import COMBINING, check_adapters
from raymerge.lora.report import Combination, OnModule
from raymerge.lora.sources import open_named_adapter
from raymerge.lora.writer import output_directory
from raymerge.methods import Method, Settings, methods
from raymerge.planner.inputs.sources import pickles_read
from raymerge.planner.matching.bind import Binder, BindError, ineffective_parameters
from raymerge.planner.matching.layer_map import Member
from raymerge.planner.matching.method_assignment import OWN, Treatment
from raymerge.planner.recipe_check import check_recipe
from raymerge.recipes import AdapterOutput, Recipe, Subject, Unnamed, did_you_mean
from raymerge.storage.resolve import UNFETCHED, USUAL, Lookup

_LAYER = re.compile(r"\.([0-9]{1,9})\.")


def combine_recipe(recipe: Recipe, output: str | Path, *, on_module: OnModule | None = None) -> Combination:
    """Merge the adapters of a recipe into one.

    Args:
        recipe: its ``models`` are adapters of one model; ``adapter`` says how the result becomes factors.
        output: directory of the new adapter; must be absent or empty.
        on_module: told of progress.

    Raises:
        PlanError: the recipe cannot be carried out on these adapters; all reasons.
        NonFiniteError: a factor has NaN or infinity.
        TargetError: something is at the output place.
    """
    work = _Work(recipe, USUAL)
    if work.problems or work.method is None or work.binding is None:
        raise PlanError(in_order(work.problems))
    shape = recipe.adapter or AdapterOutput()
    options = CombineOptions(
        rank=shape.rank,
        energy=shape.energy,
        combine=shape.combine,
        seed=recipe.seed,
        dtype=recipe.out_dtype or recipe.dtype or DType.F32,
    )
    made = combine_adapters(
        work.adapters,
        output_directory(output),
        method=work.method,
        settings_of=work.binding.settings,
        options=options,
        where=recipe.where,
        on_module=on_module,
    )
    read = [f"{each.name}: {note}" for each in work.adapters for note in each.notes]
    ineffective = ineffective_parameters(recipe, work.method, ())
    return replace(made, notes=(*recipe.notes, *read, *ineffective, *made.notes))


def adapter_problems(recipe: Recipe) -> tuple[Problem, ...]:
    """Why the adapters of a recipe cannot be merged, as far as their headers and the recipe tell.

    Adapters that would have to be fetched are not looked at.
    """
    return in_order(_Work(recipe, UNFETCHED).problems)


class _Work:
    """A recipe with its adapters, and all that is wrong with them."""

    def __init__(self, recipe: Recipe, lookup: Lookup) -> None:
        self.problems = list(_foreign(recipe))
        self.method = _method_of(recipe, self.problems)
        if self.method is not None:
            recipe = self._checked(recipe)
        self.adapters = _open_all(recipe, lookup, self.problems)
        self.binding: _Binding | None = None
        are_open = len(self.adapters) == len(recipe.models)
        if self.method is None:
            return
        if are_open or len(self.adapters) > 1:
            concatenates = recipe.adapter is not None and recipe.adapter.combine == "concatenate"
            self.problems += check_adapters(
                self.adapters, self.method, concatenates=concatenates, where=recipe.where
            )
        try:
            names = [str(entry.model) for entry in recipe.models]
            self.binding = _Binding(recipe, self.method, names, _num_layers(self.adapters))
        except PlanError as error:
            self.problems += error.problems

    def _checked(self, recipe: Recipe) -> Recipe:
        try:
            checked = check_recipe(recipe)
        except PlanError as error:
            self.problems += error.problems
            return recipe
        self.problems += checked.problems
        return checked.recipe


def _method_of(recipe: Recipe, problems: list[Problem]) -> Method | None:
    method = methods().get(recipe.merge_method)
    if method is None and not isinstance(recipe.merge_method, Unnamed):
        what = f"there is no merge_method '{recipe.merge_method}'."
        hint = did_you_mean(recipe.merge_method, COMBINING)
        remedy = f"{hint} Adapters are merged by {', '.join(COMBINING)}.".strip()
        problems.append(Problem(recipe.where("merge_method"), what, remedy))
    return method


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


def _open_all(recipe: Recipe, lookup: Lookup, problems: list[Problem]) -> list[Adapter]:
    adapters: list[Adapter] = []
    pickled = pickles_read([recipe])
    for index, entry in enumerate(recipe.models):
        place = recipe.where("models", index, "model")
        try:
            adapters.append(open_named_adapter(entry.model, pickled=pickled, lookup=lookup))
        except NotCachedError:
            continue  # Nobody asked the Hub for it.
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
