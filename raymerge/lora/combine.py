"""Adapters merged into one, on the products of their factors.

The base of every change is zero: a module that an adapter lacks is unchanged by it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from raymerge.architectures.roles import describe
from raymerge.architectures.rules import load_rules
from raymerge.checkpoints.adapters import PREFIX, Adapter, Factor, factor_names
from raymerge.checkpoints.header import StoredTensor, TensorSpec
from raymerge.checkpoints.json_files import attempt
from raymerge.deferred import torch
from raymerge.documents.fields import did_you_mean
from raymerge.documents.positions import in_order
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, NotCachedError, PlanError, Problem, shortlist
from raymerge.lora.extract import expert_group
from raymerge.lora.matrices import (
    Factors,
    Limits,
    check_finite,
    factorise,
    factorise_product,
    open_named_adapter,
    read_tensor,
)
from raymerge.lora.writer import (
    AdapterFacts,
    Combination,
    ModuleReport,
    as_stored,
    relative_error,
    write_adapter,
)
from raymerge.merge_plan.plan import FORMAT, Plan, make_plan
from raymerge.methods import Method, Settings, Takes, Tile, gather, methods, sample_of
from raymerge.methods.random import random_key
from raymerge.planner.inputs.sources import fingerprint, pickles_read
from raymerge.planner.matching.align import Member
from raymerge.planner.matching.method_assignment import OWN, AssignedMethod, Binder, BindError
from raymerge.planner.parameter_check import check_recipe, ineffective_parameters
from raymerge.recipes.load import MissingMethod, canonical
from raymerge.recipes.schema import AdapterOutput, Recipe
from raymerge.recipes.settings import Subject
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import USUAL, Lookup, open_store
from raymerge.storage.store import Range, ReadStore

ADDITIVE = ("linear", "task_arithmetic")
"""Methods whose result is a weighted sum of the sources."""
COMBINING = (*ADDITIVE, "ties", "dare_linear", "dare_ties")
_UP_BIAS = ".lora_B.bias"


@dataclass(frozen=True, slots=True)
class AdapterMerge:
    plan: Plan
    """Without tables: ranks may be known only once the singular values are."""
    adapters: tuple[Adapter, ...]
    work: CombineWork
    """Of use only where the plan has no problems."""


def plan_adapters(recipe: Recipe, lookup: Lookup = USUAL, *, version: str = "") -> AdapterMerge:
    """Reads headers; the problems are the plan's."""
    problems = list(_foreign(recipe))
    method = _method_of(recipe, problems)
    if method is not None:
        checked = attempt(problems, partial(check_recipe, recipe), PlanError)
        if checked is not None:
            problems += checked.problems
            recipe = checked.recipe
    adapters = _open_all(recipe, lookup, problems)
    are_all_open = len(adapters) == len(recipe.models)
    modules = tuple(dict.fromkeys(module for each in adapters for module in each.factors))
    work = CombineWork(recipe, adapters)
    if method is not None:
        if are_all_open or len(adapters) > 1:
            problems += check_adapters(adapters, method, recipe)
        try:
            settings_of = _binding(recipe, method, modules)
        except BindError as error:
            problems.append(error.problem)
        else:
            if are_all_open and not problems:
                work = replace(work, units=_units(work.tasks(modules, settings_of, problems)))
    notes = [*recipe.notes, *(f"{each.name}: {note}" for each in adapters for note in each.notes)]
    if method is not None:
        notes += [*ineffective_parameters(recipe, method, ()), *_notes(adapters, modules)]
    manifest = {
        "format": FORMAT,
        "raymerge": version,
        "recipe": json.loads(canonical(recipe)),
        "recipe_text": recipe.text,
        "sources": [{**fingerprint(each), "config": dict(each.config.fields)} for each in adapters],
        "notes": notes,
    }
    return AdapterMerge(make_plan(manifest, {}, in_order(problems)), adapters, work)


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


@dataclass(frozen=True, slots=True)
class _Source:
    index: int
    adapter: Adapter
    store: ReadStore

    def matrices(self, factor: Factor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Up and down, float64; raises NonFiniteError."""
        up, down = (
            read_tensor(self.store, tensor).to(device).double() for tensor in (factor.up, factor.down)
        )
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
    return method.kernel_with(settings).apply(tile, settings, state).view(shape)


_UNIT_BYTES = 64 << 20
"""Memory of the tasks of one unit together; a larger one is alone."""


@dataclass(frozen=True, slots=True)
class Task:
    """A module to merge, or a tensor that is saved whole."""

    name: str
    """Of the tensor, or of the module's weight."""
    module: str
    """"" for a tensor that is saved whole."""
    settings: Settings
    rank: int
    """Largest rank of the module; 0 for a tensor."""
    read_bytes: int
    made_bytes: int
    """At most."""
    peak_bytes: int
    """Of memory."""


def _units(tasks: Iterable[Task]) -> tuple[tuple[Task, ...], ...]:
    """Small tasks share a unit, as each unit has files of its own on disk."""
    units: list[list[Task]] = []
    left = 0
    for task in tasks:
        if not units or task.peak_bytes > left:
            units.append([])
            left = _UNIT_BYTES
        units[-1].append(task)
        left -= task.peak_bytes
    return tuple(map(tuple, units))


@dataclass(frozen=True, slots=True)
class CombineWork:
    """``linear`` and ``task_arithmetic`` add scaled products on the factors, exact but for the cut to the
    rank. ``ties`` and the ``dare`` methods look at single elements, so they materialise each product."""

    recipe: Recipe
    adapters: tuple[Adapter, ...]
    units: tuple[tuple[Task, ...], ...] = ()

    @property
    def method(self) -> Method:
        return methods()[self.recipe.merge_method]

    @property
    def is_additive(self) -> bool:
        return self.recipe.merge_method in ADDITIVE

    @property
    def shape(self) -> AdapterOutput:
        return self.recipe.adapter or AdapterOutput()

    @property
    def dtype(self) -> DType:
        return self.recipe.out_dtype or self.recipe.dtype or DType.F32

    @property
    def num_units(self) -> int:
        return len(self.units)

    def costs(self) -> tuple[int, ...]:
        return tuple(sum(task.read_bytes for task in unit) for unit in self.units)

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        return {f"unit-{number}.data": (), f"unit-{number}.json": ()}

    def least_budget(self) -> int:
        units = self.units
        return max(max(each.peak_bytes for each in u) + sum(each.made_bytes for each in u) for u in units)

    def staging_nbytes(self) -> int:
        """Most bytes of disk for what units leave and for the result."""
        return 2 * sum(task.made_bytes for unit in self.units for task in unit)

    def tasks(
        self, modules: Sequence[str], settings_of: Callable[[str], Settings], problems: list[Problem]
    ) -> Iterator[Task]:
        ranks = (factor.rank for each in self.adapters for factor in each.factors.values())
        rank = self.shape.rank or max(ranks, default=1)
        replaced = self.adapters[0].replaced
        weights = [(f"{each}.weight", each) for each in modules]
        for name, module in (*weights, *((each, "") for each in replaced)):
            try:
                settings = settings_of(name)
            except BindError as error:
                problems.append(error.problem)
                continue
            if module:
                yield self._module_task(name, module, settings, rank)
            else:
                read = sum(each.replaced[name].nbytes for each in self.adapters)
                peak = 2 * read + self._elements_bytes(replaced[name].num_elements)
                yield Task(name, "", settings, 0, read, replaced[name].nbytes, peak)

    def _module_task(self, name: str, module: str, settings: Settings, rank: int) -> Task:
        factors = [each.factors[module] for each in self.adapters if module in each.factors]
        rows, columns = factors[0].up.shape[0], factors[0].down.shape[1]
        whole, least = sum(each.rank for each in factors), min(rows, columns)
        stored = [tensor for each in factors for tensor in (each.up, each.down, each.up_bias)]
        read = sum(tensor.nbytes for tensor in stored if tensor is not None)
        # In float64: both sides, side by side, and what QR and SVD make of them.
        peak = 2 * read + 8 * (8 * whole * (rows + columns) + 8 * whole**2)
        if not self.is_additive:
            peak += self._elements_bytes(rows * columns)
            # The matrix once more, its singular vectors, and LAPACK's own.
            peak += 4 * (2 * rows * columns + 2 * least * (rows + columns) + 4 * least**2 + 7 * least)
        most = min(rank, least) if self.shape.combine == "svd" else whole
        made = self.dtype.nbytes(most * (rows + columns) + rows)
        return Task(name, module, settings, rank, read, made, peak)

    def _elements_bytes(self, num_elements: int) -> int:
        """All sources in float32 twice, their product, the base, and the method's temporaries."""
        count, method = len(self.adapters), self.method
        scratch = method.scratch + method.scratch_per_source * count
        return math.ceil(num_elements * (8 * count + 16 + 4 * scratch))

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        """Takes the memory of ``least_budget``, however large ``budget`` is. Raises NonFiniteError."""
        del budget
        read, reports, tensors = 0, list[ModuleReport](), list[tuple[str, torch.Tensor, DType]]()
        with ExitStack() as stack:
            stores = (stack.enter_context(open_store(each.place)) for each in self.adapters)
            sources = [_Source(n, *each) for n, each in enumerate(zip(self.adapters, stores, strict=True))]
            for task in self.units[number]:
                tell(read)
                if task.module:
                    report, factors = self._merged_module(task, sources, device)
                    reports.append(report)
                    tensors += [(name, tensor, self.dtype) for name, tensor in factors.items()]
                else:
                    tensors.append(self._merged_whole(task, sources, device))
                read += task.read_bytes
        tell(read)
        data, facts = self.files(number)
        specs = [TensorSpec(name, dtype, tuple(tensor.shape)) for name, tensor, dtype in tensors]
        written = sum(spec.nbytes for spec in specs)
        listed = [(spec.name, spec.dtype.value, spec.shape) for spec in specs]
        text = json.dumps({"tensors": listed, "modules": [asdict(each) for each in reports]})
        with LocalStore(staging) as store:
            store.create(data, written)
            offset = 0
            for spec, (_, tensor, dtype) in zip(specs, tensors, strict=True):
                store.write_at(data, offset, as_stored(tensor, dtype))
                offset += spec.nbytes
            store.sync(data)
            store.write_atomic(facts, text.encode())
        return read, written

    def conclude(self, root: Path, units: str, *, output: str, notes: Sequence[str]) -> Combination:
        """Write the adapter into ``root`` from what all units left in its directory ``units``."""
        reports: list[ModuleReport] = []
        tensors: list[StoredTensor] = []
        for unit in range(self.num_units):
            data, facts = (f"{units}/{name}" for name in self.files(unit))
            left, offset = json.loads((root / facts).read_bytes()), 0
            for name, dtype, shape in left["tensors"]:
                spec = TensorSpec(name, DType(dtype), tuple(shape))
                tensors.append(StoredTensor(name, spec.dtype, spec.shape, data, offset, spec.nbytes))
                offset += spec.nbytes
            reports += [ModuleReport(**each) for each in left["modules"]]
        has_bias = any(each.name.endswith(_UP_BIAS) for each in tensors)
        ranks = {each.name: each.rank for each in reports}
        config = _facts(self.adapters, tuple(ranks), lora_bias=has_bias)
        nbytes = write_adapter(root, tensors, config, ranks, name=output)
        missing = sum(each.total - each.kept for each in reports)
        return Combination(
            output=output,
            nbytes=nbytes,
            modules=tuple(reports),
            saved=tuple(self.adapters[0].replaced),
            relative_error=relative_error(missing, sum(each.total for each in reports)),
            notes=tuple(notes),
        )

    def _merged_module(
        self, task: Task, sources: Sequence[_Source], device: torch.device
    ) -> tuple[ModuleReport, dict[str, torch.Tensor]]:
        module, settings = task.module, task.settings
        factors = [(each, each.adapter.factors[module]) for each in sources if module in each.adapter.factors]
        # Experts of one block share a rank.
        limits = Limits(task.rank, None if expert_group(module) else self.shape.energy)
        bias: torch.Tensor | None = None
        if self.is_additive:
            # How many times each source counts is what becomes of a 1 in it alone.
            times = _merged(self.method, list(torch.eye(len(settings.sources))), settings).tolist()
            counted = [(source, factor, times[source.index] * factor.scale) for source, factor in factors]
            up, down = _side_by_side(counted, device)
            if self.shape.combine == "svd":
                made = factorise_product(up, down, limits, where=module)
            else:
                total = float((up.T @ up * (down @ down.T)).sum())
                made = Factors(down.float(), up.float(), total, total)
            bias = _added_bias(counted)
        else:
            shape = factors[0][1].up.shape[0], factors[0][1].down.shape[1]
            deltas = [torch.zeros(shape, device=device) for _ in sources]
            for source, factor in factors:
                up, down = source.matrices(factor, device)
                deltas[source.index] = (up @ down).mul_(factor.scale).float()
            whole = _merged(self.method, deltas, settings)
            del deltas
            made = factorise(whole, limits, where=module)
        down_name, up_name = factor_names(module, factors[0][1].kind)
        biases = {} if bias is None else {f"{PREFIX}{module}{_UP_BIAS}": bias}
        return ModuleReport.of(module, made), {down_name: made.down, up_name: made.up, **biases}

    def _merged_whole(
        self, task: Task, sources: Sequence[_Source], device: torch.device
    ) -> tuple[str, torch.Tensor, DType]:
        stored = [each.adapter.replaced[task.name] for each in sources]
        tensors = [
            read_tensor(each.store, tensor).to(device) for each, tensor in zip(sources, stored, strict=True)
        ]
        name, (module, _, leaf) = task.name, task.name.rpartition(".")
        if any(module in each.factors for each in self.adapters):
            name = f"{module}.base_layer.{leaf}"
        return PREFIX + name, _merged(self.method, tensors, task.settings), stored[0].dtype


def _side_by_side(
    factors: Sequence[tuple[_Source, Factor, float]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    ups, downs = [], []
    for source, factor, times in factors:
        up, down = source.matrices(factor, device)
        # Both sides get the root, and the left one the sign: neither is then much larger than the other.
        root = math.sqrt(abs(times))
        ups.append(up.mul_(math.copysign(root, times)))
        downs.append(down.mul_(root))
    return torch.cat(ups, dim=1), torch.cat(downs)


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
            yield f"{adapter.name} does not change {shortlist(missing)}: it counts there as a change of zero."


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


def _open_all(recipe: Recipe, lookup: Lookup, problems: list[Problem]) -> tuple[Adapter, ...]:
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
    return tuple(adapters)


_LAYER = re.compile(r"\.([0-9]{1,9})\.")


def _layer(name: str) -> int | None:
    match = _LAYER.search(f".{name}.")
    return int(match[1]) if match else None


def _binding(recipe: Recipe, method: Method, modules: Iterable[str]) -> Callable[[str], Settings]:
    """What gives the method's parameters for a tensor of the model, with the keys of its random masks, as in
    a merge of models. It raises BindError, as this does, where a parameter has no value or an invalid one."""
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
