"""What of a model goes into an adapter, and in which form: decided from names, shapes and options alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from raymerge.architectures import (
    NameReader,
    Role,
    Rules,
    TensorInfo,
    fused_layout,
    load_rules,
    stacks,
    tied_pair,
)
from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint, same_bytes
from raymerge.errors import Problem
from raymerge.planner.inputs.quantised import CONVERT_FIRST, quantised_tensors, stored_formats

Form = Literal["linear", "embedding", "bias", "whole", "out"]
"""``linear`` and ``embedding``: as factors; ``bias``: saved beside a module that has factors; ``whole``: the
module is saved as it is; ``out``: left out."""
Embeddings = Literal["adapter", "full", "skip"]
"""What becomes of embedding and head: factors, saved whole, or left out."""
Rest = Literal["full", "skip"]
"""What becomes of what no factors can say: saved whole, or left out."""

_MAX_LISTED = 3
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
    """What the user wants in the adapter."""

    include: tuple[str, ...] = ()
    """Globs for names of tensors; empty for all."""
    exclude: tuple[str, ...] = ()
    """Globs for names of tensors that stay out, whatever ``include`` says."""
    embeddings: Embeddings = "full"
    """What becomes of embedding and head."""
    rest: Rest = "full"
    """What becomes of norms, biases, routers and fused experts."""

    def wants(self, name: str) -> bool:
        """Whether a tensor of this name may be in the adapter."""
        included = not self.include or any(fnmatchcase(name, glob) for glob in self.include)
        return included and not any(fnmatchcase(name, glob) for glob in self.exclude)


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of one module, and what becomes of their changes."""

    path: str
    """Its path in the model."""
    form: Form
    """What becomes of its weight, or of all of it."""
    reason: str
    """Why it is left out; empty for what is not."""
    tensors: tuple[str, ...]
    """Names of its tensors that both models have."""
    group: str
    """Path of the experts that it is one of: all of a group have factors, or none; "" for others."""
    is_container: bool
    """Whether there are modules within it, so that peft cannot save it whole."""

    @property
    def weight(self) -> str:
        """Name of its weight."""
        return f"{self.path}.weight"


def is_transposed(config: Mapping[str, Any]) -> bool:
    """Whether the linear modules of such a model store their weights [in, out]."""
    return config.get("model_type") in _CONV1D_FAMILIES


def expert_group(path: str) -> str:
    """Path of the experts that a module belongs to one of; "" for other modules."""
    found = _EXPERT_PATH.fullmatch(path)
    return found[1] if found else ""


def choose(base: Checkpoint, selection: Selection) -> tuple[Module, ...]:
    """What becomes of each module of ``base``, in the order of its names.

    Left out whole are modules of which the selection wants no tensor; one that it wants in part is there
    with those tensors.
    """
    rules = load_rules(str(base.config.get("model_type") or "") or None)
    reader = NameReader(rules, stacks=stacks(base.tensors, base.config))
    members: dict[str, list[str]] = {}
    for name in base.tensors:
        members.setdefault(name.rpartition(".")[0], []).append(name)
    parents = {end for path in members for end in _parents(path)}
    modules: list[Module] = []
    for path, names in members.items():
        wanted = [name for name in names if selection.wants(name)]
        modules += [_excluded(path, name) for name in names if name not in wanted]
        for form, reason, own in _forms(base, wanted, selection, rules, reader):
            group = expert_group(path) if form == "linear" else ""
            modules.append(Module(path, form, reason, tuple(own), group, path in parents or not path))
    return tuple(modules)


def compare(
    model: Checkpoint, base: Checkpoint, modules: Sequence[Module], selection: Selection
) -> list[Problem]:
    """What keeps the changes of these modules from being said by an adapter.

    Headers decide, and the bytes of a head that only ``model`` has.
    """
    if quantised := [*_quantised(model, modules), *_quantised(base, modules)]:
        return quantised
    problems = list(_lonely(model, base, selection))
    for module in modules:
        for name in module.tensors if module.form != "out" else ():
            if name in model.tensors:
                problems.extend(_misfit(module, model, base, name))
    return problems


def _quantised(checkpoint: Checkpoint, modules: Sequence[Module]) -> Iterator[Problem]:
    """Codes with scales: what two of them differ by cannot be told from either alone."""
    formats = stored_formats(quantised_tensors(checkpoint))
    names = [name for module in modules if module.form != "out" for name in module.tensors if name in formats]
    if names:
        told = f"{len(names)} of its tensors are quantised, such as {names[0]} ({formats[names[0]]})"
        what = f"{told}; an adapter says changes of plain numbers."
        yield Problem(checkpoint.name, what, f"{CONVERT_FIRST} Or --exclude them.")


def _parents(path: str) -> Iterator[str]:
    words = path.split(".")
    return (".".join(words[:end]) for end in range(1, len(words)))


def _excluded(path: str, name: str) -> Module:
    return Module(path, "out", "excluded", (name,), "", False)


def _forms(
    base: Checkpoint, names: Sequence[str], selection: Selection, rules: Rules, reader: NameReader
) -> Iterator[tuple[Form, str, list[str]]]:
    """What becomes of the tensors of one module: one form for its weight and one for what is beside it."""
    if not names:
        return
    infos = {name: reader.describe(name) for name in names}
    weight = next((name for name in names if name.endswith(".weight")), names[0])
    form, reason = _form(base, weight, infos[weight], selection, rules)
    beside = [name for name in names if name != weight]
    # A module with factors may have a bias; anything else in it and peft could not say it.
    if form in ("linear", "embedding") and all(name.endswith(".bias") for name in beside):
        yield form, "", [weight]
        kept, reason = _rest(selection)
        if beside:
            yield ("bias" if kept == "whole" else kept), reason, beside
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
    if info.part in (Role.EMBEDDING, Role.HEAD):
        return _embedding_form(name, info, len(base.tensors[name].shape), selection)
    shape = base.tensors[name].shape
    is_fused = fused_layout(name, shape, base.config, rules) is not None
    plain = name.endswith(".weight") and len(shape) == 2 and not is_fused
    in_layer = info.layer is not None and info.part in _MATRICES
    if plain and in_layer and not _NO_MATRIX.search(name.split(".")[-2]):
        return "linear", ""
    return _rest(selection)


def _embedding_form(name: str, info: TensorInfo, num_axes: int, selection: Selection) -> tuple[Form, str]:
    if selection.embeddings == "skip":
        return "out", "an embedding or head, and --embeddings is skip"
    if selection.embeddings == "full" or num_axes != 2 or not name.endswith(".weight"):
        return "whole", ""
    return ("embedding" if info.part is Role.EMBEDDING else "linear"), ""


def _rest(selection: Selection) -> tuple[Form, str]:
    return ("whole", "") if selection.rest == "full" else ("out", "not a matrix, and --rest is skip")


def _lonely(model: Checkpoint, base: Checkpoint, selection: Selection) -> Iterator[Problem]:
    """Tensors that only one of the two models has, but for a head that is the tied embedding again."""
    for one, other in ((model, base), (base, model)):
        names = [name for name in one.tensors if name not in other.tensors and selection.wants(name)]
        names = [name for name in names if one is base or not _is_tied_copy(model, base, name)]
        if names:
            listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
            count = f"{len(names)} tensor{'' if len(names) == 1 else 's'}"
            what = f"{count} ({listed}) not in {other.name}, so no adapter can say the change."
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
    if new.shape != old.shape and not (module.form == "whole" and _is_resized(new, old)):
        what = f"tensor {name} has the shape {list(new.shape)}, but {list(old.shape)} in {base.name}."
        yield Problem(model.name, what, _shape_remedy(new, old))


def _is_resized(new: StoredTensor, old: StoredTensor) -> bool:
    """Whether the two differ in their rows alone, as vocabularies do."""
    return len(new.shape) == len(old.shape) == 2 and new.shape[1] == old.shape[1]


def _shape_remedy(new: StoredTensor, old: StoredTensor) -> str:
    if _is_resized(new, old):
        return "Save it whole (--embeddings full), or --exclude it."
    return "Check that one was trained from the other, or --exclude it."
