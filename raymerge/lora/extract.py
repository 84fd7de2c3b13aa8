"""The difference of two models as an adapter: ``raymerge extract-lora``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal

from raymerge import devices
from raymerge.architectures.roles import NameReader, TensorInfo, fused_layout, stacks, tied_pair
from raymerge.architectures.rules import Role, Rules, class_names, rules_of
from raymerge.checkpoints.adapters import PREFIX, FactorKind
from raymerge.checkpoints.header import TensorSpec
from raymerge.checkpoints.json_files import attempt
from raymerge.checkpoints.source import Checkpoint, same_bytes
from raymerge.deferred import torch
from raymerge.device_numerics import Fallback, full_float32
from raymerge.errors import CheckpointError, NonFiniteError, OptionError, PlanError, Problem, shortlist
from raymerge.lora.matrices import (
    Factors,
    Limits,
    factorise,
    open_named_model,
    read_pieces,
    read_tensor,
    squared_difference,
)
from raymerge.lora.writer import (
    AdapterFacts,
    AdapterWriter,
    Extraction,
    LeftOut,
    ModuleReport,
    OnModule,
    output_directory,
    relative_error,
    short_targets,
)
from raymerge.options import Device
from raymerge.planner.inputs.quantised import CONVERT_FIRST, quantised_tensors, stored_formats
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore

Form = Literal["linear", "embedding", "bias", "whole", "out"]
"""``linear`` and ``embedding``: as factors; ``bias``: saved beside a module that has factors; ``whole``: the
module is saved as it is; ``out``: left out."""
Embeddings = Literal["adapter", "full", "skip"]
Rest = Literal["full", "skip"]
"""What factors cannot express: saved whole, or left out."""

_MATRICES = frozenset(
    {Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT, Role.SHARED_EXPERT_GATE, Role.OTHER}
)
# Tables and kernels that stand among the matrices of a layer; peft has no linear factors for them.
_NO_MATRIX = re.compile(r"embed|position|relative|bias|norm|conv", re.IGNORECASE)
# Families whose linear modules store their weights [in, out].
_CONV1D_FAMILIES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_EXPERT_PATH = re.compile(r"(.+\.experts)\.[0-9]+\..+")


@dataclass(frozen=True, slots=True)
class Selection:
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    embeddings: Embeddings = "full"
    rest: Rest = "full"

    def wants(self, name: str) -> bool:
        included = not self.include or any(fnmatchcase(name, glob) for glob in self.include)
        return included and not any(fnmatchcase(name, glob) for glob in self.exclude)


@dataclass(frozen=True, slots=True)
class Module:
    path: str
    form: Form
    reason: str
    tensors: tuple[str, ...]
    """Names of its tensors that both models have."""
    group: str
    """Path of the experts that it belongs to, of which all have factors or none; "" for others."""
    is_container: bool
    """Whether it contains modules, so that peft cannot save it whole."""

    @property
    def weight(self) -> str:
        return f"{self.path}.weight"


def expert_group(path: str) -> str:
    """Path of the experts that a module belongs to; "" for others."""
    match = _EXPERT_PATH.fullmatch(path)
    return match[1] if match else ""


def choose(base: Checkpoint, selection: Selection) -> tuple[Module, ...]:
    """The form of each module of ``base``, in name order.

    Modules without a selected tensor are absent; partly selected ones have the selected tensors."""
    rules = rules_of(base.config)
    reader = NameReader(rules, stacks=stacks(base.tensors, base.config))
    members: dict[str, list[str]] = {}
    for name in base.tensors:
        members.setdefault(name.rpartition(".")[0], []).append(name)
    parents = {end for path in members for end in _parents(path)}
    modules: list[Module] = []
    for path, names in members.items():
        selected = [name for name in names if selection.wants(name)]
        modules += [
            Module(path, "out", "excluded", (name,), "", False) for name in names if name not in selected
        ]
        for form, reason, own in _forms(base, selected, selection, rules, reader):
            group = expert_group(path) if form == "linear" else ""
            modules.append(Module(path, form, reason, tuple(own), group, path in parents or not path))
    return tuple(modules)


def compare(
    model: Checkpoint, base: Checkpoint, modules: Sequence[Module], selection: Selection
) -> list[Problem]:
    """What keeps an adapter from expressing the changes of these modules.

    Decided from headers, and the bytes of a head that only ``model`` has."""
    if quantised := [*_quantised(model, modules), *_quantised(base, modules)]:
        return quantised
    problems = list(_lonely(model, base, selection))
    for module in modules:
        for name in module.tensors if module.form != "out" else ():
            if name in model.tensors:
                problems.extend(_misfit(module, model, base, name))
    return problems


def _quantised(checkpoint: Checkpoint, modules: Sequence[Module]) -> Iterator[Problem]:
    formats = stored_formats(quantised_tensors(checkpoint))
    names = [name for module in modules if module.form != "out" for name in module.tensors if name in formats]
    if names:
        quantised = f"{len(names)} of its tensors are quantised, such as {names[0]} ({formats[names[0]]})"
        what = f"{quantised}; an adapter says changes of plain numbers."
        yield Problem(checkpoint.name, what, f"{CONVERT_FIRST} Or --exclude them.")


def _parents(path: str) -> Iterator[str]:
    words = path.split(".")
    return (".".join(words[:end]) for end in range(1, len(words)))


def _forms(
    base: Checkpoint, names: Sequence[str], selection: Selection, rules: Rules, reader: NameReader
) -> Iterator[tuple[Form, str, list[str]]]:
    if not names:
        return
    infos = {name: reader.describe(name) for name in names}
    weight = next((name for name in names if name.endswith(".weight")), names[0])
    form, reason = _form(base, weight, infos[weight], selection, rules)
    beside = [name for name in names if name != weight]
    # A module with factors may have a bias; anything else in it and peft could not say it.
    if form in ("linear", "embedding") and all(name.endswith(".bias") for name in beside):
        yield form, "", [weight]
        rest_form, reason = _rest(selection)
        if beside:
            yield ("bias" if rest_form == "whole" else rest_form), reason, beside
        return
    if form in ("linear", "embedding"):
        form, reason = _rest(selection)
    buffers = [name for name in names if infos[name].role is Role.BUFFER]
    if buffers:
        yield "out", "a buffer, which models make anew", buffers
    if others := [name for name in names if name not in buffers]:
        yield form, reason, others


def _form(
    base: Checkpoint, name: str, info: TensorInfo, selection: Selection, rules: Rules
) -> tuple[Form, str]:
    shape = base.tensors[name].shape
    is_matrix = name.endswith(".weight") and len(shape) == 2
    if info.part in (Role.EMBEDDING, Role.HEAD):
        if selection.embeddings == "skip":
            return "out", "an embedding or head, and --embeddings is skip"
        if selection.embeddings == "full" or not is_matrix:
            return "whole", ""
        return ("embedding" if info.part is Role.EMBEDDING else "linear"), ""
    is_in_layer = info.layer is not None and info.part in _MATRICES
    is_fused = fused_layout(name, shape, base.config, rules) is not None
    if is_matrix and is_in_layer and not is_fused and not _NO_MATRIX.search(name.split(".")[-2]):
        return "linear", ""
    return _rest(selection)


def _rest(selection: Selection) -> tuple[Form, str]:
    return ("whole", "") if selection.rest == "full" else ("out", "not a matrix, and --rest is skip")


def _lonely(model: Checkpoint, base: Checkpoint, selection: Selection) -> Iterator[Problem]:
    """Tensors of only one model, except a head that equals the tied embedding."""
    for one, other in ((model, base), (base, model)):
        names = [name for name in one.tensors if name not in other.tensors and selection.wants(name)]
        names = [name for name in names if one is base or not _is_tied_copy(model, base, name)]
        if names:
            count = f"{len(names)} tensor{'' if len(names) == 1 else 's'}"
            what = f"{count} ({shortlist(names)}) not in {other.name}, so no adapter can say the change."
            yield Problem(one.name, what, "Check that one was trained from the other, or --exclude them.")


def _is_tied_copy(model: Checkpoint, base: Checkpoint, name: str) -> bool:
    pair = tied_pair(base.tensors, base.config)
    if pair is None or not pair.declared or name != pair.head or pair.embedding not in model.tensors:
        return False
    return same_bytes(model, model.tensors[name], model.tensors[pair.embedding])


def _misfit(module: Module, model: Checkpoint, base: Checkpoint, name: str) -> Iterator[Problem]:
    new, old = model.tensors[name], base.tensors[name]
    if module.form in ("linear", "embedding") and not (new.dtype.is_mergeable and old.dtype.is_mergeable):
        what = f"tensor {name} is of {new.dtype}, {old.dtype} in {base.name}: codes, not plain numbers."
        yield Problem(model.name, what, "Take both models in a plain float dtype.")
    # As vocabularies do.
    have_other_rows_alone = len(new.shape) == len(old.shape) == 2 and new.shape[1] == old.shape[1]
    if new.shape != old.shape and not (module.form == "whole" and have_other_rows_alone):
        what = f"tensor {name} has the shape {list(new.shape)}, but {list(old.shape)} in {base.name}."
        way = "Save it whole (--embeddings full)"
        if not have_other_rows_alone:
            way = "Check that one was trained from the other"
        yield Problem(model.name, what, f"{way}, or --exclude it.")


_TASKS = (
    ("ForCausalLM", "CAUSAL_LM"),
    ("LMHeadModel", "CAUSAL_LM"),
    ("ForConditionalGeneration", "CAUSAL_LM"),
    ("ForSequenceClassification", "SEQ_CLS"),
    ("ForTokenClassification", "TOKEN_CLS"),
    ("ForQuestionAnswering", "QUESTION_ANS"),
)


@dataclass(frozen=True, slots=True)
class ExtractOptions:
    limits: Limits = field(default_factory=lambda: Limits(32))
    """Largest rank, and the sufficient energy; experts of one block all have the largest rank."""
    selection: Selection = field(default_factory=Selection)
    device: Device = "auto"


def extract_lora(
    model: str | Path,
    base: str | Path,
    output: str | Path,
    options: ExtractOptions | None = None,
    *,
    on_module: OnModule | None = None,
) -> Extraction:
    """Write an adapter on ``base`` that approximates ``model`` within its rank.

    LoRA: arXiv 2106.09685. ``output`` must be absent or empty. One module at a time is in memory: its two
    weights and their decomposition.

    Raises CheckpointError for a model that cannot be read, PlanError where the models do not match, are equal
    or differ in what an adapter cannot express, NonFiniteError, OptionError, and TargetError."""
    problems: list[Problem] = []
    new, old = (attempt(problems, partial(open_named_model, str(each))) for each in (model, base))
    if new is None or old is None:
        raise CheckpointError(problems)
    directory, chosen = output_directory(output), options or ExtractOptions()
    device = _check_options(chosen)
    modules = choose(old, chosen.selection)
    if problems := compare(new, old, modules, chosen.selection):
        raise PlanError(problems)
    with (
        full_float32(),
        open_store(new.place) as new_store,
        open_store(old.place) as old_store,
        AdapterWriter(directory) as writer,
    ):
        work = _Extractor(new, old, new_store, old_store, writer, chosen, Fallback(device), on_module)
        work.check_containers(modules)
        work.carry_out(modules)
        return work.publish()


def _check_options(options: ExtractOptions) -> torch.device:
    problems = []
    if options.limits.rank < 1:
        what = f"the rank is {options.limits.rank}."
        problems.append(Problem("--rank", what, "Give a whole number from 1."))
    energy = options.limits.energy
    if energy is not None and not 0 < energy <= 1:
        problems.append(Problem("--energy", f"{energy} is not a share.", "Give a number above 0, up to 1."))
    gpu = None if options.device == "cpu" else devices.find_gpu()
    if options.device == "cuda" and gpu is None:
        problems.append(Problem("--device", "torch finds no GPU here.", "Take --device cpu."))
    if problems:
        raise OptionError(problems)
    return gpu or torch.device("cpu")


@dataclass(slots=True)
class _Extractor:
    model: Checkpoint
    base: Checkpoint
    new: ReadStore
    old: ReadStore
    writer: AdapterWriter
    options: ExtractOptions
    fallback: Fallback
    on_module: OnModule | None
    failures: dict[str, str] = field(default_factory=dict)
    """Why a module's matrix was decomposed on the processor."""
    reports: dict[str, ModuleReport] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    biases: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    num_unchanged: int = 0
    total: float = 0.0

    @property
    def is_transposed(self) -> bool:
        return self.base.config.get("model_type") in _CONV1D_FAMILIES

    def check_containers(self, modules: Sequence[Module]) -> None:
        """Refuse changed parameters of modules that contain modules: peft cannot save them."""
        names = [name for module in modules if module.form == "whole" and module.is_container
                 for name in module.tensors if self._difference(name) is not None]  # fmt: skip
        if names:
            what = f"{len(names)} changed tensors ({shortlist(names)}) lie beside other modules, where peft "
            what += "saves nothing."
            remedy = "--exclude them, and know that the adapter lacks their change; or merge whole models."
            raise PlanError(Problem(self.model.name, what, remedy))

    def carry_out(self, modules: Sequence[Module]) -> None:
        num_factors = sum(module.form in ("linear", "embedding") for module in modules)
        for module in modules:
            match module.form:
                case "linear" | "embedding":
                    self._add_factors(module, num_factors)
                case "whole" | "bias":
                    self._add_whole(module)
                case "out":
                    self._leave_out(module)
        self._drop_equal_experts(modules)
        self._save_namesakes(modules)

    def publish(self) -> Extraction:
        if not self.reports:
            raise PlanError(self._nothing())
        ties = self._ties_weights()
        paths = [path for name in self.base.tensors for path in _parents(name)]
        adapter = self.writer.publish(
            AdapterFacts(
                base_model=self.base.name,
                target_modules=short_targets(self.writer.ranks, paths),
                modules_to_save=tuple(self.saved),
                task_type=_task(self.base),
                fan_in_fan_out=self.is_transposed,
                replaces_biases=bool(self.biases),
                ties_weights=ties,
            )
        )
        missing = sum(each.total - each.kept for each in self.reports.values())
        missing += sum(each.total for each in self.left_out)
        return Extraction(
            output=adapter.root,
            nbytes=adapter.files[0].nbytes,
            modules=tuple(self.reports.values()),
            saved=tuple(self.saved),
            biases=tuple(self.biases),
            left_out=tuple(self.left_out),
            num_unchanged=self.num_unchanged,
            relative_error=relative_error(missing, self.total),
            notes=tuple(self._notes(ties=ties)),
        )

    def _difference(self, name: str) -> float | None:
        """Squared norm of a tensor's change; None for no change, 0 for another shape. Raises NonFiniteError
        for NaN or infinity in one model and not the same bytes in the other."""
        new, old = self.model.tensors.get(name), self.base.tensors[name]
        if new is None:
            return None
        if new.shape != old.shape:
            return 0.0
        difference = squared_difference(self.new, new, self.old, old)
        if difference is not None and not math.isfinite(difference):
            what = "has elements that are NaN or infinite, so its change cannot be measured."
            where = f"{self.model.name}: {name}"
            raise NonFiniteError(Problem(where, what, "Take checkpoints without such elements."))
        return difference

    def _add_factors(self, module: Module, num_factors: int) -> None:
        factors = self.fallback.run(partial(self._factors, module))
        if factors is None:
            self.num_unchanged += 1
            return
        kind: FactorKind = "embedding" if module.form == "embedding" else "linear"
        self.writer.add_factors(module.path, kind, factors)
        self.reports[module.path] = ModuleReport.of(module.path, factors)
        self.total += factors.total
        if self.on_module is not None:
            self.on_module(self.reports[module.path], num_factors)

    def _factors(self, module: Module, device: torch.device, failure: str) -> Factors | None:
        """None where there is no change, unless other experts need factors."""
        if failure:
            self.failures[module.path] = failure
        new, old = self.model.tensors[module.weight], self.base.tensors[module.weight]
        delta = read_tensor(self.new, new).to(device, torch.float32)
        delta -= read_tensor(self.old, old).to(device, torch.float32)
        if self.is_transposed or module.form == "embedding":
            delta = delta.T
        limits = self.options.limits
        if bool(delta.count_nonzero()):
            limits = Limits(limits.rank) if module.group else limits
            return factorise(delta, limits, where=f"{self.model.name}: {module.weight}")
        if not module.group:
            return None
        rank = min(limits.rank, *delta.shape)
        return Factors(torch.zeros(rank, delta.shape[1]), torch.zeros(delta.shape[0], rank), 0.0, 0.0)

    def _drop_equal_experts(self, modules: Sequence[Module]) -> None:
        """Remove the zero factors of blocks in which no expert changed."""
        groups: dict[str, list[str]] = {}
        for module in modules:
            if module.group and module.form == "linear":
                groups.setdefault(module.group, []).append(module.path)
        for paths in groups.values():
            if not any(self.reports[path].total for path in paths):
                for path in paths:
                    self.writer.drop(path, "linear")
                    del self.reports[path]
                self.num_unchanged += len(paths)

    def _save_namesakes(self, modules: Sequence[Module]) -> None:
        """Also save equal modules whose paths end like a saved one's: peft expects all of them."""
        endings = tuple(self.saved)
        for module in modules:
            is_equal = module.form == "whole" and module.path not in endings
            if is_equal and module.path.endswith(endings):
                for name in module.tensors:
                    self._copy(name, PREFIX + name)
                self.saved.append(module.path)
                self.num_unchanged -= 1

    def _add_whole(self, module: Module) -> None:
        changes = {name: self._difference(name) for name in module.tensors}
        if all(change is None for change in changes.values()):
            self.num_unchanged += module.form == "whole"
            return
        self.total += sum(change or 0.0 for change in changes.values())
        for name in module.tensors:
            if module.form == "whole" or changes[name] is not None:
                self._copy(name, self._name_in_file(module, name))
        if module.form == "whole":
            self.saved.append(module.path)
        else:
            self.biases.extend(name for name in module.tensors if changes[name] is not None)

    def _name_in_file(self, module: Module, name: str) -> str:
        """peft wraps a module that has factors, so the model's own tensors are one level deeper."""
        if module.form == "bias" and module.path in self.reports:
            return f"{PREFIX}{module.path}.base_layer.{name.rpartition('.')[2]}"
        return PREFIX + name

    def _copy(self, name: str, stored_name: str) -> None:
        tensor = self.model.tensors[name]
        spec = TensorSpec(stored_name, tensor.dtype, tensor.shape)
        self.writer.add_bytes(spec, read_pieces(self.new, tensor))

    def _leave_out(self, module: Module) -> None:
        for name in module.tensors:
            change = self._difference(name)
            if change is not None:
                self.left_out.append(LeftOut(name, module.reason, change))
                self.total += change

    def _ties_weights(self) -> bool:
        pair = tied_pair(self.base.tensors, self.base.config)
        changed = {*self.saved, *self.reports}
        return pair is not None and bool(pair.declared) and pair.embedding.rpartition(".")[0] in changed

    def _nothing(self) -> Problem:
        if not self.saved and not self.biases and not self.left_out:
            return Problem(
                self.model.name,
                f"every tensor is equal to that of {self.base.name}: there is no change to extract.",
                "Check that the two paths are not the same model.",
            )
        changed = ", ".join([*self.saved, *self.biases, *(each.name for each in self.left_out)][:3])
        return Problem(
            self.model.name,
            f"no matrix of a layer differs from {self.base.name} but {changed}, and peft loads no adapter "
            "without factors.",
            "Merge the whole models, or widen --include.",
        )

    def _notes(self, *, ties: bool) -> Iterator[str]:
        old, new = self.base.tensors, self.model.tensors
        resized = [name for name in new if name in old and new[name].shape != old[name].shape]
        if resized:
            yield (
                f"{', '.join(resized)} have other numbers of rows than in {self.base.name}: resize its "
                "embeddings to those of the adapter before peft loads it."
            )
        if ties:
            yield (
                "The head is tied to the embedding, which the adapter changes; it needs peft 0.18 "
                "(ensure_weight_tying) to change the head as well."
            )
        for failure in dict.fromkeys(self.failures.values()):
            count = sum(each == failure for each in self.failures.values())
            yield f"{count} of the matrices were decomposed on the processor: {failure}"


def _task(base: Checkpoint) -> str | None:
    names = class_names(base.config)
    named = next((task for name in names for ending, task in _TASKS if name.endswith(ending)), None)
    is_pair = bool(base.config.get("is_encoder_decoder"))
    return "SEQ_2_SEQ_LM" if is_pair and named == "CAUSAL_LM" else named
