"""Adapters merged into one, on the products of their factors.

The base of every change is zero: a module that an adapter lacks is unchanged by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from raymerge.architectures.roles import describe
from raymerge.architectures.rules import load_rules
from raymerge.checkpoints.adapters import PREFIX, Adapter, Factor, FactorKind
from raymerge.device_numerics import one_thread
from raymerge.documents.fields import did_you_mean
from raymerge.documents.positions import in_order
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, NotCachedError, OptionError, PlanError, Problem
from raymerge.lora.extract import expert_group
from raymerge.lora.matrices import (
    Factors,
    Limits,
    check_finite,
    factorise,
    factorise_product,
    first_of,
    open_named_adapter,
    read_tensor,
)
from raymerge.lora.writer import (
    AdapterFacts,
    AdapterWriter,
    Combination,
    ModuleReport,
    OnModule,
    output_directory,
    relative_error,
)
from raymerge.merge_plan.memory import too_little_memory
from raymerge.methods import Method, Settings, Takes, Tile, gather, methods, sample_of
from raymerge.methods.random import random_key
from raymerge.planner.inputs.sources import pickles_read
from raymerge.planner.matching.align import Member
from raymerge.planner.matching.method_assignment import OWN, AssignedMethod, Binder, BindError
from raymerge.planner.recipe_check import check_recipe, ineffective_parameters
from raymerge.recipes.load import MissingMethod
from raymerge.recipes.schema import AdapterOutput, Recipe
from raymerge.recipes.settings import Subject
from raymerge.storage.open import UNFETCHED, USUAL, Lookup, open_store
from raymerge.storage.store import ReadStore

ADDITIVE = ("linear", "task_arithmetic")
"""Methods whose result is a weighted sum of the sources."""
COMBINING = (*ADDITIVE, "ties", "dare_linear", "dare_ties")


def check_adapters(adapters: Sequence[Adapter], method: Method, recipe: Recipe) -> Iterator[Problem]:
    yield from _too_few(adapters, recipe.where("models"))
    yield from _method_problems(method, recipe)
    yield from _misfits(adapters)
    for adapter in adapters:
        yield from _unmergeable(adapter, method)
    yield from _lacking(adapters)
    yield from _replacements(adapters, method, recipe.where("merge_method"))


def _too_few(adapters: Sequence[Adapter], place: str) -> Iterator[Problem]:
    if len(adapters) < 2:
        what = f"{len(adapters)} adapter{' is' if len(adapters) == 1 else 's are'} given."
        yield Problem(place, what, "A merge of adapters needs two or more.")
    elif not any(adapter.factors for adapter in adapters):
        yield Problem(place, "no adapter has factors.", "Merge the models themselves.")


def _method_problems(method: Method, recipe: Recipe) -> Iterator[Problem]:
    concatenates = recipe.adapter is not None and recipe.adapter.combine == "concatenate"
    if method.name not in COMBINING:
        what = f"{method.name} does not merge adapters."
        yield Problem(recipe.where("merge_method"), what, f"Take one of {', '.join(COMBINING)}.")
    elif concatenates and method.name not in ADDITIVE:
        what = f"{method.name} changes single elements, which factors side by side cannot say."
        remedy = "Write 'combine: svd', or take merge_method linear."
        yield Problem(recipe.where("adapter", "combine"), what, remedy)


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
    """Tensors that only some save whole: in the others they are the model's own, which is unknown here."""
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
    """Tensors that all save whole can be averaged; other operations need the model's own."""
    names = dict.fromkeys(name for adapter in adapters for name in adapter.replaced)
    whole: list[str] = []
    for name in names:
        replaced = [adapter.replaced[name] for adapter in adapters if name in adapter.replaced]
        shapes = {tensor.shape for tensor in replaced}
        if len(replaced) < len(adapters):
            continue
        if len(shapes) > 1:
            what = f"{name} has the shapes {', '.join(str(list(shape)) for shape in sorted(shapes))}."
            yield Problem(name, what, "Merge adapters of one vocabulary only.")
        elif method.name != "linear":
            whole.append(name)
        elif any(not tensor.dtype.is_mergeable for tensor in replaced):
            what = f"{name} does not hold plain numbers."
            yield Problem(name, what, "Save the adapters with it in a float dtype.")
    if whole:
        is_or_are = "is" if len(whole) == 1 else "are"
        what = f"{_listed(whole)} {is_or_are} saved whole: {method.name} cannot merge that without the model."
        yield Problem(place, what, "Take linear, or merge the models with their adapters.")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}, ... ({len(names)} tensors)"


class _Decision:
    def __init__(self, recipe: Recipe, lookup: Lookup) -> None:
        self.problems = list(_foreign(recipe))
        self.method = _method_of(recipe, self.problems)
        self.recipe = recipe = recipe if self.method is None else self._checked(recipe)
        self.shape = recipe.adapter or AdapterOutput()
        self.dtype = recipe.out_dtype or recipe.dtype or DType.F32
        self.adapters = _open_all(recipe, lookup, self.problems)
        self.modules = tuple(dict.fromkeys(module for each in self.adapters for module in each.factors))
        ranks = (factor.rank for each in self.adapters for factor in each.factors.values())
        self.rank = self.shape.rank or max(ranks, default=1)
        self.settings: dict[str, Settings] = {}
        if self.method is None:
            return
        are_all_open = len(self.adapters) == len(recipe.models)
        if are_all_open or len(self.adapters) > 1:
            self.problems += check_adapters(self.adapters, self.method, recipe)
        try:
            settings_of = _binding(recipe, self.method, self.modules)
        except BindError as error:
            self.problems.append(error.problem)
            return
        if are_all_open and not self.problems:
            self._bind(settings_of)

    def _checked(self, recipe: Recipe) -> Recipe:
        try:
            checked = check_recipe(recipe)
        except PlanError as error:
            self.problems += error.problems
            return recipe
        self.problems += checked.problems
        return checked.recipe

    def _bind(self, settings_of: Callable[[str], Settings]) -> None:
        for name in (*(f"{module}.weight" for module in self.modules), *self.adapters[0].replaced):
            try:
                self.settings[name] = settings_of(name)
            except BindError as error:
                self.problems.append(error.problem)
        self.problems = list(dict.fromkeys(self.problems))

    def limits_of(self, module: str) -> Limits:
        """Limits of a module's factors: experts of one block share a rank."""
        return Limits(self.rank, None if expert_group(module) else self.shape.energy)

    def peak_bytes(self, method: Method) -> dict[str, int]:
        peaks: dict[str, int] = {}
        for module in self.modules:
            factors = [each.factors[module] for each in self.adapters if module in each.factors]
            rows, columns = factors[0].up.shape[0], factors[0].down.shape[1]
            stored = 2 * sum(each.up.nbytes + each.down.nbytes for each in factors)
            rank = sum(each.rank for each in factors)
            # In float64: both sides, side by side, and what QR and SVD make of them.
            work = 8 * (8 * rank * (rows + columns) + 8 * rank**2)
            if method.name not in ADDITIVE:
                least = min(rows, columns)
                work += self._elements_bytes(method, rows * columns)
                # The matrix once more, its singular vectors, and LAPACK's own.
                work += 4 * (2 * rows * columns + 2 * least * (rows + columns) + 4 * least**2 + 7 * least)
            peaks[f"{module}.weight"] = stored + work
        for name, tensor in self.adapters[0].replaced.items():
            stored = 2 * sum(each.replaced[name].nbytes for each in self.adapters)
            peaks[name] = stored + self._elements_bytes(method, tensor.num_elements)
        return peaks

    def _elements_bytes(self, method: Method, num_elements: int) -> int:
        """All sources in float32 twice, their product, the base, and the method's temporaries."""
        count = len(self.adapters)
        scratch = method.scratch + method.scratch_per_source * count
        return math.ceil(num_elements * (8 * count + 16 + 4 * scratch))

    def num_threads(self, method: Method, threads: int, memory: int, *, is_limit: bool) -> int:
        """Tensors to merge at once, at most ``threads``, within ``memory`` bytes. Raises OptionError if that
        is a limit and one tensor alone takes more.
        """
        name, least = max(self.peak_bytes(method).items(), key=lambda item: item[1])
        if is_limit and memory < least:
            raise OptionError(too_little_memory("--memory", memory, least, f"{name} with {method.name}"))
        return max(1, min(threads, memory // least))


_Merged: TypeAlias = tuple[FactorKind, Factors, torch.Tensor | None]
"""The factors of a module, and the bias of its left one."""


class _Source(NamedTuple):
    adapter: Adapter
    store: ReadStore

    def matrices(self, factor: Factor) -> tuple[torch.Tensor, torch.Tensor]:
        """Up and down, float64; raises NonFiniteError."""
        up, down = (read_tensor(self.store, tensor).double() for tensor in (factor.up, factor.down))
        for matrix in (up, down):
            check_finite(matrix, f"{self.adapter.name}: {factor.module}")
        return up, down


def _merged(method: Method, deltas: Sequence[torch.Tensor], settings: Settings) -> torch.Tensor:
    """The method's result on whole changes of one shape, float32, with a base of zeros."""
    shape = deltas[0].shape
    settings = replace(settings, shape=tuple(shape))
    flat = torch.stack([delta.float().flatten() for delta in deltas])
    base = torch.zeros_like(flat[0]) if method.takes is Takes.DELTAS else None
    tile = Tile(base, flat, 0)
    state = gather(
        method, settings, flat.shape[1], flat.device, tiles=lambda: (tile,), sample=lambda: sample_of(tile)
    )
    return method.kernel.apply(tile, settings, state).view(shape)


@dataclass(frozen=True, slots=True)
class _Combiner:
    """``linear`` and ``task_arithmetic`` add scaled products on the factors, exact but for the cut to the
    rank. ``ties`` and the ``dare`` methods look at single elements, so they materialise each product.
    """

    decision: _Decision
    method: Method
    sources: Sequence[_Source]
    writer: AdapterWriter

    def carry_out(self, threads: int, on_module: OnModule | None) -> Combination:
        reports: list[ModuleReport] = []
        modules, dtype, has_bias = self.decision.modules, self.decision.dtype, False
        for module, (kind, factors, bias) in zip(modules, self._merged_modules(threads), strict=True):
            self.writer.add_factors(module, kind, factors, dtype)
            if bias is not None:
                has_bias = True
                self.writer.add_tensor(f"{PREFIX}{module}.lora_B.bias", bias, dtype)
            reports.append(ModuleReport.of(module, factors))
            if on_module is not None:
                on_module(reports[-1], len(modules))
        replaced = self.sources[0].adapter.replaced
        for name, tensor in replaced.items():
            self._merge_replaced(name, tensor.dtype)
        adapter = self.writer.publish(_facts(self.decision.adapters, modules, lora_bias=has_bias))
        missing = sum(each.total - each.kept for each in reports)
        return Combination(
            output=adapter.root,
            nbytes=adapter.files[0].nbytes,
            modules=tuple(reports),
            saved=tuple(replaced),
            relative_error=relative_error(missing, sum(each.total for each in reports)),
            notes=tuple(_notes(self.decision.adapters, modules)),
        )

    def _merged_modules(self, threads: int) -> Iterator[_Merged]:
        """All modules in order, several at a time, each on one thread: the number changes no byte."""
        with one_thread():
            pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
            try:
                yield from pool.map(self._merge_module, self.decision.modules)
            finally:
                pool.shutdown(cancel_futures=True)

    def _merge_module(self, module: str) -> _Merged:
        settings = self.decision.settings[f"{module}.weight"]
        factors = [
            (index, source, source.adapter.factors[module])
            for index, source in enumerate(self.sources)
            if module in source.adapter.factors
        ]
        if self.method.name in ADDITIVE:
            # How many times each source counts is what becomes of a 1 in it alone.
            ones = torch.eye(len(settings.sources))
            times = _merged(self.method, list(ones), settings).tolist()
            counted = [(source, factor, times[index] * factor.scale) for index, source, factor in factors]
            return factors[0][2].kind, self._added(module, counted), _added_bias(counted)
        rows, columns = factors[0][2].up.shape[0], factors[0][2].down.shape[1]
        deltas = [torch.zeros(rows, columns) for _ in self.sources]
        for index, source, factor in factors:
            up, down = source.matrices(factor)
            deltas[index] = (up @ down).mul_(factor.scale).float()
        merged = _merged(self.method, deltas, settings)
        made = factorise(merged, self.decision.limits_of(module), where=module)
        return factors[0][2].kind, made, None

    def _added(self, module: str, factors: Sequence[tuple[_Source, Factor, float]]) -> Factors:
        ups, downs = [], []
        for source, factor, times in factors:
            up, down = source.matrices(factor)
            # Both sides get the root, and the left one the sign: neither is then much larger than the other.
            root = math.sqrt(abs(times))
            ups.append(up.mul_(math.copysign(root, times)))
            downs.append(down.mul_(root))
        up, down = torch.cat(ups, dim=1), torch.cat(downs)
        if self.decision.shape.combine == "svd":
            return factorise_product(up, down, self.decision.limits_of(module), where=module)
        total = float((up.T @ up * (down @ down.T)).sum())
        return Factors(down.float(), up.float(), total, total)

    def _merge_replaced(self, name: str, dtype: DType) -> None:
        tensors = [read_tensor(each.store, each.adapter.replaced[name]) for each in self.sources]
        merged = _merged(self.method, tensors, self.decision.settings[name])
        module, _, leaf = name.rpartition(".")
        stored = f"{module}.base_layer.{leaf}" if module in self.decision.modules else name
        self.writer.add_tensor(PREFIX + stored, merged, dtype)


def _added_bias(factors: Sequence[tuple[_Source, Factor, float]]) -> torch.Tensor | None:
    biases = [
        read_tensor(source.store, factor.up_bias).double() * times
        for source, factor, times in factors
        if factor.up_bias is not None
    ]
    return torch.stack(biases).sum(dim=0) if biases else None


def _facts(adapters: Sequence[Adapter], modules: Sequence[str], *, lora_bias: bool) -> AdapterFacts:
    first = adapters[0].config
    fields = [each.config.fields for each in adapters]
    saved = [str(name) for each in fields for name in each.get("modules_to_save") or ()]
    return AdapterFacts(
        base_model=first.base_model,
        target_modules=_targets(adapters, modules),
        modules_to_save=tuple(dict.fromkeys(saved)),
        task_type=first.task_type,
        fan_in_fan_out=first.fan_in_fan_out,
        replaces_biases=any(each.get("bias") == "all" for each in fields),
        lora_bias=lora_bias,
        ties_weights=any(each.get("ensure_weight_tying") for each in fields),
    )


def _targets(adapters: Sequence[Adapter], modules: Sequence[str]) -> tuple[str, ...]:
    """The adapters' common list, if they agree on their modules too; else every path."""
    lists: list[Mapping[str, None]] = []
    for adapter in adapters:
        targets = adapter.config.fields.get("target_modules")
        names = targets if isinstance(targets, list) and adapter.factors.keys() == set(modules) else ()
        lists.append(dict.fromkeys(str(name) for name in sorted(names)))
    agree = bool(lists[0]) and all(each == lists[0] for each in lists)
    return tuple(lists[0]) if agree else tuple(modules)


def _notes(adapters: Sequence[Adapter], modules: Sequence[str]) -> Iterator[str]:
    bases = dict.fromkeys(each.config.base_model for each in adapters)
    if len(bases) > 1:
        yield f"The adapters name different models ({', '.join(bases)}); the result names the first."
    for adapter in adapters:
        missing = [module for module in modules if module not in adapter.factors]
        if missing:
            yield f"{adapter.name} does not change {first_of(missing)}: it counts there as a change of zero."


def combine_recipe(
    recipe: Recipe,
    output: str | Path,
    *,
    threads: int = 1,
    memory: int | None = None,
    room: int = 0,
    on_module: OnModule | None = None,
) -> Combination:
    """Merge the adapters of a recipe into one, and write it for peft to ``output``, absent or empty; raises
    what ``api.merge_adapters`` raises, and OptionError if one module alone takes more than ``memory``.

    At most ``threads`` modules are merged at once, which changes no byte, in ``memory`` bytes together; None:
    as much as ``room``, the available bytes.
    """
    decision = _Decision(recipe, USUAL)
    if decision.problems or decision.method is None:
        raise PlanError(in_order(decision.problems))
    limit = room if memory is None else memory
    threads = decision.num_threads(decision.method, threads, limit, is_limit=memory is not None)
    with ExitStack() as stack:
        sources = [_Source(each, stack.enter_context(open_store(each.root))) for each in decision.adapters]
        writer = stack.enter_context(AdapterWriter(output_directory(output)))
        made = _Combiner(decision, decision.method, sources, writer).carry_out(threads, on_module)
    read = [f"{each.name}: {note}" for each in decision.adapters for note in each.notes]
    ineffective = ineffective_parameters(recipe, decision.method, ())
    return replace(made, notes=(*recipe.notes, *read, *ineffective, *made.notes))


def adapter_problems(recipe: Recipe) -> tuple[Problem, ...]:
    """Why the adapters of a recipe cannot be merged, from headers and recipe; remote ones are not opened."""
    return in_order(_Decision(recipe, UNFETCHED).problems)


def _method_of(recipe: Recipe, problems: list[Problem]) -> Method | None:
    method = methods().get(recipe.merge_method)
    if method is None and not isinstance(recipe.merge_method, MissingMethod):
        what = f"there is no merge_method '{recipe.merge_method}'."
        hint = did_you_mean(recipe.merge_method, COMBINING)
        remedy = f"{hint} Adapters are merged by {', '.join(COMBINING)}.".strip()
        problems.append(Problem(recipe.where("merge_method"), what, remedy))
    return method


def _foreign(recipe: Recipe) -> Iterator[Problem]:
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


_LAYER = re.compile(r"\.([0-9]{1,9})\.")


def _layer(name: str) -> int | None:
    match = _LAYER.search(f".{name}.")
    return int(match[1]) if match else None


def _binding(recipe: Recipe, method: Method, modules: Iterable[str]) -> Callable[[str], Settings]:
    """What gives the method's parameters for a tensor of the model, with the keys of its random masks, as in
    a merge of models. It raises BindError, as this does, where a parameter has no value or an invalid one.
    """
    sources = range(len(recipe.models))
    last = max((layer for name in modules if (layer := _layer(name)) is not None), default=0)
    members = tuple(
        Member(index, 0, entry.parameters, ("models", index)) for index, entry in enumerate(recipe.models)
    )
    assignment = AssignedMethod(method, members, None, {}, (recipe.parameters,), OWN, ("models",))
    binder = Binder(recipe, assignment, [str(entry.model) for entry in recipe.models])
    # An adapter does not say the family of its model; the general rules name the roles.
    rules = load_rules(None)

    def settings(name: str) -> Settings:
        layer, info = _layer(name), describe(name, rules)
        subject = Subject(name, frozenset({str(info.role), str(info.part)}), layer)
        t = 0.0 if layer is None else layer / last if last else 1.0
        bound = binder.settings(subject, (subject,) * len(sources), t, depth=t)
        if method.random:
            bound = replace(bound, keys=tuple(random_key(recipe.seed, name, index) for index in sources))
        reason = method.check(bound)
        if reason is not None:
            raise BindError(Problem(name, f"{reason}.", "Correct the recipe's parameters."), "", name)
        return bound

    return settings
