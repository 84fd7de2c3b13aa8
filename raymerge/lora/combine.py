"""Adapters merged into one adapter, on what their factors multiply to.

The base of every change is zero: a module that an adapter does not have is one that it does not change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from raymerge.architectures import describe, load_rules
from raymerge.checkpoints.adapters import PREFIX, Adapter, Factor
from raymerge.documents.yaml_text import in_order
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, NotCachedError, PlanError, Problem
from raymerge.lora.choose import expert_group
from raymerge.lora.matrices import Factors, Limits, check_finite, factorise, factorise_product, read_tensor
from raymerge.lora.report import Combination, ModuleReport, OnModule, relative_error
from raymerge.lora.sources import open_named_adapter
from raymerge.lora.writer import AdapterFacts, AdapterWriter, output_directory
from raymerge.methods import Method, Settings, Takes, Tile, gather, methods, sample_of
from raymerge.methods.random import random_key
from raymerge.planner.inputs.sources import pickles_read
from raymerge.planner.matching.align import Member
from raymerge.planner.matching.method_assignment import OWN, AssignedMethod, Binder, BindError
from raymerge.planner.recipe_check import check_recipe, ineffective_parameters
from raymerge.recipes import AdapterOutput, Recipe, Subject, Unnamed, did_you_mean
from raymerge.storage.open import UNFETCHED, USUAL, Lookup, open_store
from raymerge.storage.store import ReadStore

ADDITIVE = ("linear", "task_arithmetic")
"""Methods whose result is a sum of the sources, each times a number."""
Where: TypeAlias = Callable[..., str]
"""Names the place of a recipe's field, given as the steps to it."""
COMBINING = (*ADDITIVE, "ties", "dare_linear", "dare_ties")
"""Methods that merge adapters."""


def field_path(*path: str | int) -> str:
    """``adapter.combine``: the place of a field where there is no recipe's text."""
    return ".".join(map(str, path))


def check_adapters(
    adapters: Sequence[Adapter], method: Method, *, concatenates: bool, where: Where = field_path
) -> list[Problem]:
    """Everything that keeps these adapters from being merged.

    Args:
        adapters: what shall be merged.
        method: by which method.
        concatenates: whether factors are laid side by side.
        where: names the places of a recipe's fields.
    """
    problems = [*_too_few(adapters, where("models"))]
    problems.extend(_method_problems(method, where, concatenates=concatenates))
    problems.extend(_misfits(adapters))
    for adapter in adapters:
        problems.extend(_unmergeable(adapter, method))
    problems.extend(_lacking(adapters))
    problems.extend(_replacements(adapters, method, where("merge_method")))
    return problems


def _too_few(adapters: Sequence[Adapter], place: str) -> Iterator[Problem]:
    if len(adapters) < 2:
        what = f"{len(adapters)} adapter{' is' if len(adapters) == 1 else 's are'} given."
        yield Problem(place, what, "A merge of adapters needs two or more.")
    elif not any(adapter.factors for adapter in adapters):
        yield Problem(place, "no adapter has factors.", "Merge the models themselves.")


def _method_problems(method: Method, where: Where, *, concatenates: bool) -> Iterator[Problem]:
    if method.name not in COMBINING:
        what = f"{method.name} does not merge adapters."
        yield Problem(where("merge_method"), what, f"Take one of {', '.join(COMBINING)}.")
    elif concatenates and method.name not in ADDITIVE:
        what = f"{method.name} changes single elements, which factors side by side cannot say."
        remedy = "Write 'combine: svd', or take merge_method linear."
        yield Problem(where("adapter", "combine"), what, remedy)


def _misfits(adapters: Sequence[Adapter]) -> Iterator[Problem]:
    first: dict[str, tuple[str, Factor]] = {}
    for adapter in adapters:
        if adapter.config.fan_in_fan_out != adapters[0].config.fan_in_fan_out:
            what = f"fan_in_fan_out is {adapter.config.fan_in_fan_out}, unlike in {adapters[0].name}."
            yield Problem(adapter.name, what, "Merge adapters of one model only.")
        for module, factor in adapter.factors.items():
            name, known = first.setdefault(module, (adapter.name, factor))
            if _sides(known) != _sides(factor):
                what = f"module {module} has {_sides(factor)}, but {_sides(known)} in {name}."
                yield Problem(adapter.name, what, "Merge adapters of one model only.")


def _sides(factor: Factor) -> str:
    """What must agree between factors of one module, as a phrase."""
    return f"{factor.kind} factors of {factor.up.shape[0]} x {factor.down.shape[1]}"


def _unmergeable(adapter: Adapter, method: Method) -> Iterator[Problem]:
    dora = [factor.module for factor in adapter.factors.values() if factor.magnitude is not None]
    if dora:
        what = f"has DoRA's magnitudes ({dora[0]}, ...): its change hangs on the model's own weights."
        remedy = "Merge it into its model, and merge the models."
        yield Problem(adapter.name, what, remedy)
    biased = [factor.module for factor in adapter.factors.values() if factor.up_bias is not None]
    if biased and method.name not in ADDITIVE:
        what = f"changes the bias of {biased[0]}, which {method.name} does not merge."
        yield Problem(adapter.name, what, f"Take one of {', '.join(ADDITIVE)}.")


def _lacking(adapters: Sequence[Adapter]) -> Iterator[Problem]:
    """Tensors that only some save whole: in the others they are the model's own, which is not known here."""
    names = dict.fromkeys(name for adapter in adapters for name in adapter.replaced)
    for adapter in {adapter.name: adapter for adapter in adapters}.values():
        lacking = [name for name in names if name not in adapter.replaced]
        if lacking:
            they_are = "it is" if len(lacking) == 1 else "they are"
            what = f"holds no {_listed(lacking)}, which others hold whole, and what {they_are} in the model"
            remedy = "Merge the models with their adapters instead (MODEL+ADAPTER), "
            remedy += "or extract with --embeddings skip --rest skip."
            yield Problem(adapter.name, f"{what} is not known here.", remedy)


def _replacements(adapters: Sequence[Adapter], method: Method, place: str) -> Iterator[Problem]:
    """Tensors that all save whole can be averaged; what else a method does needs the model's own."""
    names = dict.fromkeys(name for adapter in adapters for name in adapter.replaced)
    whole: list[str] = []
    for name in names:
        found = [adapter.replaced[name] for adapter in adapters if name in adapter.replaced]
        shapes = {tensor.shape for tensor in found}
        if len(found) < len(adapters):
            continue
        if len(shapes) > 1:
            what = f"{name} has the shapes {', '.join(str(list(shape)) for shape in sorted(shapes))}."
            yield Problem(name, what, "Merge adapters of one vocabulary only.")
        elif method.name != "linear":
            whole.append(name)
        elif any(not tensor.dtype.is_mergeable for tensor in found):
            what = f"{name} does not hold plain numbers."
            yield Problem(name, what, "Save the adapters with it in a float dtype.")
    if whole:
        is_or_are = "is" if len(whole) == 1 else "are"
        what = f"{_listed(whole)} {is_or_are} saved whole: {method.name} cannot merge that without the model."
        yield Problem(place, what, "Take linear, or merge the models with their adapters.")


def _listed(names: Sequence[str]) -> str:
    """The one name, or the first and how many there are."""
    return names[0] if len(names) == 1 else f"{names[0]}, ... ({len(names)} tensors)"


SettingsOf: TypeAlias = Callable[[str], Settings]
"""Settings of the method for the tensor of that name; they know the parameters of every adapter."""


@dataclass(frozen=True, slots=True)
class CombineOptions:
    """How the merged changes become factors."""

    rank: int | None = None
    """Largest rank; None for the largest that an adapter has."""
    energy: float | None = None
    """Share of the sum of squared singular values that is enough; None for no limit but the rank."""
    combine: Literal["svd", "concatenate"] = "svd"
    """``svd``: the best factors of that rank; ``concatenate``: all factors side by side, exact."""
    seed: int = 0
    """Chooses the random masks."""
    dtype: DType = DType.F32
    """What factors are rounded to."""


def combine_adapters(
    adapters: Sequence[Adapter],
    output: Path,
    *,
    method: Method,
    settings_of: SettingsOf,
    options: CombineOptions | None = None,
    where: Where = field_path,
    on_module: OnModule | None = None,
) -> Combination:
    """Merge adapters of one model into one, and write it for peft.

    ``linear`` and ``task_arithmetic`` add scaled products, which is done on the factors without error but
    the cut to the rank. ``ties`` and the ``dare`` methods look at single elements, so each product is made.

    Args:
        adapters: two or more, in recipe order.
        output: directory of the new adapter; must be absent or empty.
        method: how changes are merged.
        settings_of: its parameters for each tensor.
        options: how the merged changes become factors.
        where: names the places of a recipe's fields in messages.
        on_module: told of progress.

    Raises:
        PlanError: the adapters do not fit together, or the method cannot merge them; all reasons.
        NonFiniteError: a factor has NaN or infinity.
        TargetError: something is at the output place.
    """
    chosen = options or CombineOptions()
    concatenates = chosen.combine == "concatenate"
    if problems := check_adapters(adapters, method, concatenates=concatenates, where=where):
        raise PlanError(problems)
    largest = max((factor.rank for each in adapters for factor in each.factors.values()), default=1)
    limits = Limits(chosen.rank or largest, chosen.energy)
    with ExitStack() as stack:
        stores = [stack.enter_context(open_store(adapter.root)) for adapter in adapters]
        writer = stack.enter_context(AdapterWriter(output))
        parts = [_Part(adapter, store) for adapter, store in zip(adapters, stores, strict=True)]
        work = _Combiner(parts, writer, _Rule(method, settings_of, limits, chosen), on_module)
        return work.carry_out()


@dataclass(frozen=True, slots=True)
class _Part:
    """One adapter with its files open."""

    adapter: Adapter
    store: ReadStore

    def factor(self, module: str) -> Factor | None:
        return self.adapter.factors.get(module)

    def matrices(self, factor: Factor) -> tuple[torch.Tensor, torch.Tensor]:
        """Up and down, float64.

        Raises:
            NonFiniteError: one has NaN or infinity.
        """
        up, down = (read_tensor(self.store, tensor).double() for tensor in (factor.up, factor.down))
        for matrix in (up, down):
            check_finite(matrix, f"{self.adapter.name}: {factor.module}")
        return up, down


@dataclass(frozen=True, slots=True)
class _Rule:
    """How modules are merged."""

    method: Method
    settings_of: SettingsOf
    limits: Limits
    options: CombineOptions

    def settings(self, names: Iterable[str]) -> dict[str, Settings]:
        """Settings for tensors by their names, with the keys of their random masks.

        Raises:
            PlanError: some cannot be computed with; all reasons.
        """
        found: dict[str, Settings] = {}
        problems: dict[Problem, None] = {}
        for name in names:
            try:
                found[name] = self._settings(name)
            except PlanError as error:
                problems |= dict.fromkeys(error.problems)
        if problems:
            raise PlanError(problems)
        return found

    def _settings(self, name: str) -> Settings:
        settings = self.settings_of(name)
        if self.method.random:
            keys = tuple(random_key(self.options.seed, name, index) for index in range(len(settings.sources)))
            settings = replace(settings, keys=keys)
        reason = self.method.check(settings)
        if reason is not None:
            raise PlanError(Problem(name, f"{reason}.", "Correct the recipe's parameters."))
        return settings

    def limits_of(self, module: str) -> Limits:
        """How large the factors of a module may become: experts of one block all have the same rank."""
        return Limits(self.limits.rank) if expert_group(module) else self.limits

    def merged(self, deltas: Sequence[torch.Tensor], settings: Settings) -> torch.Tensor:
        """The method's result on whole changes of one shape, float32, with a base of zeros."""
        shape = deltas[0].shape
        settings = replace(settings, shape=tuple(shape))
        flat = torch.stack([delta.float().flatten() for delta in deltas])
        base = torch.zeros_like(flat[0]) if self.method.takes is Takes.DELTAS else None
        tile = Tile(base, flat, 0)
        state = gather(
            self.method,
            settings,
            flat.shape[1],
            flat.device,
            tiles=lambda: (tile,),
            sample=lambda: sample_of(tile),
        )
        return self.method.kernel.apply(tile, settings, state).view(shape)

    def coefficients(self, settings: Settings) -> list[float]:
        """How many times each source counts in a method that adds: what becomes of a 1 in it alone."""
        ones = torch.eye(len(settings.sources))
        return [float(value) for value in self.merged(list(ones), settings)]


@dataclass(slots=True)
class _Combiner:
    """One merge of adapters: what was written so far."""

    parts: Sequence[_Part]
    writer: AdapterWriter
    rule: _Rule
    on_module: OnModule | None
    reports: list[ModuleReport] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    has_bias: bool = False

    def carry_out(self) -> Combination:
        """Merge every module and publish."""
        modules = dict.fromkeys(module for part in self.parts for module in part.adapter.factors)
        replaced = self.parts[0].adapter.replaced
        settings = self.rule.settings([*(f"{module}.weight" for module in modules), *replaced])
        for module in modules:
            self._merge_module(module, settings[f"{module}.weight"])
            if self.on_module is not None:
                self.on_module(self.reports[-1], len(modules))
        for name, tensor in replaced.items():
            self._merge_replaced(name, tensor.dtype, settings[name])
        adapter = self.writer.publish(self._facts(tuple(modules)))
        missing = sum(each.total - each.kept for each in self.reports)
        return Combination(
            output=adapter.root,
            nbytes=adapter.files[0].nbytes,
            modules=tuple(self.reports),
            saved=tuple(self.replaced),
            relative_error=relative_error(missing, sum(each.total for each in self.reports)),
            notes=tuple(self._notes(tuple(modules))),
        )

    def _merge_module(self, module: str, settings: Settings) -> None:
        having = [(i, f) for i, part in enumerate(self.parts) if (f := part.factor(module)) is not None]
        if self.rule.method.name in ADDITIVE:
            coefficients = self.rule.coefficients(settings)
            factors = self._added(module, having, coefficients)
            self._merge_bias(module, having, coefficients)
        else:
            factors = self._computed(module, having, settings)
        self.writer.add_factors(module, having[0][1].kind, factors, self.rule.options.dtype)
        self.reports.append(ModuleReport(module, factors.rank, factors.kept, factors.total))

    def _added(
        self, module: str, having: Sequence[tuple[int, Factor]], coefficients: Sequence[float]
    ) -> Factors:
        """The sum of the products, from the factors laid side by side."""
        ups, downs = [], []
        for index, factor in having:
            up, down = self.parts[index].matrices(factor)
            times = coefficients[index] * factor.scale
            # Both sides get the root, and the left one the sign: neither is then much larger than the other.
            root = math.sqrt(abs(times))
            ups.append(up.mul_(math.copysign(root, times)))
            downs.append(down.mul_(root))
        up, down = torch.cat(ups, dim=1), torch.cat(downs)
        if self.rule.options.combine == "svd":
            return factorise_product(up, down, self.rule.limits_of(module), where=module)
        total = float((up.T @ up * (down @ down.T)).sum())
        return Factors(down.float(), up.float(), total, total)

    def _computed(self, module: str, having: Sequence[tuple[int, Factor]], settings: Settings) -> Factors:
        """The factors of what a method makes of the products' elements."""
        rows, columns = having[0][1].up.shape[0], having[0][1].down.shape[1]
        deltas = [torch.zeros(rows, columns) for _ in self.parts]
        for index, factor in having:
            up, down = self.parts[index].matrices(factor)
            deltas[index] = (up @ down).mul_(factor.scale).float()
        return factorise(self.rule.merged(deltas, settings), self.rule.limits_of(module), where=module)

    def _merge_bias(
        self, module: str, having: Sequence[tuple[int, Factor]], coefficients: Sequence[float]
    ) -> None:
        biases = [
            read_tensor(self.parts[index].store, factor.up_bias).double()
            * (factor.scale * coefficients[index])
            for index, factor in having
            if factor.up_bias is not None
        ]
        if biases:
            self.has_bias = True
            name = f"{PREFIX}{module}.lora_B.bias"
            self.writer.add_tensor(name, torch.stack(biases).sum(dim=0), self.rule.options.dtype)

    def _merge_replaced(self, name: str, dtype: DType, settings: Settings) -> None:
        tensors = [read_tensor(part.store, part.adapter.replaced[name]) for part in self.parts]
        merged = self.rule.merged(tensors, settings)
        module, _, leaf = name.rpartition(".")
        wrapped = any(module in part.adapter.factors for part in self.parts)
        stored = f"{module}.base_layer.{leaf}" if wrapped else name
        self.writer.add_tensor(PREFIX + stored, merged, dtype)
        self.replaced.append(name)

    def _facts(self, modules: Sequence[str]) -> AdapterFacts:
        first = self.parts[0].adapter.config
        saved = [
            name for part in self.parts for name in part.adapter.config.fields.get("modules_to_save") or ()
        ]
        return AdapterFacts(
            base_model=first.base_model,
            target_modules=self._targets(modules),
            modules_to_save=tuple(dict.fromkeys(map(str, saved))),
            task_type=first.task_type,
            fan_in_fan_out=first.fan_in_fan_out,
            replaces_biases=any(part.adapter.config.fields.get("bias") == "all" for part in self.parts),
            lora_bias=self.has_bias,
            ties_weights=any(part.adapter.config.fields.get("ensure_weight_tying") for part in self.parts),
        )

    def _targets(self, modules: Sequence[str]) -> tuple[str, ...]:
        """The list that the adapters agree on, where they agree on their modules too; else every path."""
        lists: list[Mapping[str, None]] = []
        for part in self.parts:
            found = part.adapter.config.fields.get("target_modules")
            names = found if isinstance(found, list) and part.adapter.factors.keys() == set(modules) else ()
            lists.append(dict.fromkeys(str(name) for name in sorted(names)))
        agree = bool(lists[0]) and all(each == lists[0] for each in lists)
        return tuple(lists[0]) if agree else tuple(modules)

    def _notes(self, modules: Sequence[str]) -> Iterator[str]:
        bases = dict.fromkeys(part.adapter.config.base_model for part in self.parts)
        if len(bases) > 1:
            yield f"The adapters name different models ({', '.join(bases)}); the result names the first."
        for part in self.parts:
            missing = [module for module in modules if module not in part.adapter.factors]
            if missing:
                listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
                yield f"{part.adapter.name} does not change {listed}: it counts there as a change of zero."


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
        assignment = AssignedMethod(method, members, None, {}, (recipe.parameters,), OWN, ("models",))
        try:
            self._binder = Binder(recipe, assignment, names)
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
