"""LoRA adapters as peft saves them: which factors belong to which module, and what is saved whole.

Config and headers only; nothing of the data is read. Papers: LoRA 2106.09685, rsLoRA 2312.03732, DoRA
2402.09353."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from raymerge.checkpoints.files import ADAPTER_CONFIG_FILE, LeftOut, linked_directories, sort_files
from raymerge.checkpoints.header import FileHeader, StoredTensor
from raymerge.checkpoints.json_files import (
    ForeignPattern,
    attempt,
    foreign_pattern,
    read_bounded,
    read_object,
)
from raymerge.checkpoints.pickles import read_pickled
from raymerge.checkpoints.source import Holding, natural_key, read_safetensors, weight_file
from raymerge.errors import CheckpointError, Problem, shortlist
from raymerge.storage.addresses import is_remote, shown
from raymerge.storage.hub import unfetched_files
from raymerge.storage.open import open_store
from raymerge.storage.store import FileInfo, ReadStore

# A pattern of words and dots alone, as ``pattern_of`` makes it; a dot stands for any one character.
_PLAIN = re.compile(r"\(\?:\.\*\\\.\)\?\(\?:[\w.]*?(\w*)\)\$")
_T = TypeVar("_T", int, float)

_TOO_LARGE = 2**63
_MEND = "Mend the file, or copy it again from the place the adapter comes from."
_MERGE_WITH_PEFT = "Merge it into its model with peft (merge_and_unload), save that and name the result."
# What changes the meaning of the factors, or adds to them what no sum of a weight and a product can say.
_VARIANTS: Mapping[str, str] = {
    "layer_replication": "it is for a model with repeated layers",
    "target_parameters": "peft's versions disagree about the order of its experts and axes",
    "trainable_token_indices": "it changes single rows of the embedding",
    "alora_invocation_tokens": "it acts only behind certain tokens",
    "arrow_config": "it is chosen token by token",
    "use_qalora": "it acts on groups of inputs",
    "use_bdlora": "its factors are cut into blocks",
    "kasa_config": "it changes the weights of its model as well",
    "velora_config": "it is a variant of LoRA that raymerge does not know",
    "monteclora_config": "it is a variant of LoRA that raymerge does not know",
}
# Beginnings that leave the model's weights as they are; the others (pissa, olora, corda, loftq) change them.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Patterns(Generic[_T]):
    """A number that holds for most modules, with exceptions by pattern."""

    default: _T
    exceptions: tuple[tuple[ForeignPattern, _T], ...]
    """Patterns for the end of a module's path, in file order; the first match counts."""
    _by_ending: Mapping[str, Sequence[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # An adapter of experts has tens of thousands of modules, and a pattern for each of its others.
        by_ending: dict[str, list[int]] = {}
        for place, (pattern, _) in enumerate(self.exceptions):
            by_ending.setdefault(_ending(pattern), []).append(place)
        object.__setattr__(self, "_by_ending", by_ending)

    def of(self, module: str) -> _T:
        places = [
            each for ending, them in self._by_ending.items() if module.endswith(ending) for each in them
        ]
        likely = (self.exceptions[place] for place in sorted(places))
        return next((value for pattern, value in likely if pattern.matches(module)), self.default)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    ranks: Patterns[int]
    alphas: Patterns[float]
    use_rslora: bool
    """Whether the scale is alpha / sqrt(rank) instead of alpha / rank."""
    use_dora: bool
    fan_in_fan_out: bool
    """Whether linear modules store their weights [in, out], as in GPT-2."""
    lora_bias: bool | None
    """Whether up factors may have a bias; None where the file has no such field."""
    base_model: str
    task_type: str | None
    fields: Mapping[str, Any]

    def scale(self, module: str) -> float:
        rank = self.ranks.of(module)
        return self.alphas.of(module) / (math.sqrt(rank) if self.use_rslora else rank)


def parse_adapter_config(raw: bytes, where: str) -> AdapterConfig:
    """Raises CheckpointError: malformed, or an adapter that raymerge cannot apply; lists all reasons."""
    fields = read_object(raw, where, _MEND)
    kind = fields.get("peft_type")
    if not isinstance(kind, str):
        raise CheckpointError(Problem(where, "is not a JSON object that names its 'peft_type'.", _MEND))
    if kind.upper() != "LORA":
        what = f"is an adapter of type {kind[:40]}; raymerge applies LoRA only."
        raise CheckpointError(Problem(where, what, _MERGE_WITH_PEFT))
    sentences = [*_foreign(fields), *_wrong(fields)]
    if sentences:
        raise CheckpointError([Problem(where, what, remedy) for what, remedy in sentences])
    return AdapterConfig(
        ranks=_patterns(fields["r"], fields.get("rank_pattern")),
        alphas=_patterns(float(fields["lora_alpha"]), fields.get("alpha_pattern")),
        use_rslora=bool(fields.get("use_rslora")),
        use_dora=bool(fields.get("use_dora")),
        fan_in_fan_out=bool(fields.get("fan_in_fan_out")),
        lora_bias=fields.get("lora_bias"),
        base_model=str(fields.get("base_model_name_or_path") or ""),
        task_type=fields.get("task_type"),
        fields=fields,
    )


def pattern_of(text: str) -> ForeignPattern:
    """A key of ``rank_pattern`` or ``alpha_pattern``: a regular expression for the end of a module's path.
    Raises ValueError: not a regular expression."""
    try:
        return foreign_pattern(rf"(?:.*\.)?(?:{text})$")
    except ValueError as error:
        raise ValueError(f"{text!r} is no regular expression ({error})") from error


def _ending(pattern: ForeignPattern) -> str:
    """The literal suffix of every path that a pattern matches; "" where that cannot be told."""
    match = _PLAIN.fullmatch(pattern.pattern)
    return match[1] if match else ""


def _foreign(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, reason in _VARIANTS.items():
        if fields.get(key):
            yield f"has '{key}', which raymerge does not apply: {reason}.", _MERGE_WITH_PEFT
    beginning = fields.get("init_lora_weights", True)
    if not any(beginning is plain or beginning == plain for plain in _PLAIN_BEGINNINGS):
        what = (
            f"has init_lora_weights {str(beginning)[:40]!r}: that changes the weights of the model as well,"
        )
        remedy = "Save it with peft's path_initial_model_for_weight_conversion, or merge it with peft first."
        yield f"{what} so the factors alone do not say the change.", remedy


def _wrong(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _wrong_number("r", fields.get("r"), whole=True)
    yield from _wrong_number("lora_alpha", fields.get("lora_alpha"), whole=False)
    yield from _wrong_patterns("rank_pattern", fields.get("rank_pattern"), whole=True)
    yield from _wrong_patterns("alpha_pattern", fields.get("alpha_pattern"), whole=False)
    for key in ("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"):
        if not isinstance(fields.get(key), bool | None):
            yield f"{key} is {_brief(fields[key])}, not true or false.", _MEND
    if not isinstance(fields.get("task_type"), str | None):
        yield f"task_type is {_brief(fields['task_type'])}, not a text.", _MEND


def _wrong_patterns(key: str, patterns: Any, *, whole: bool) -> Iterator[tuple[str, str]]:
    if patterns is None:
        return
    if not isinstance(patterns, dict):
        yield f"{key} is {_brief(patterns)}, not a map from patterns to numbers.", _MEND
        return
    for text, value in patterns.items():
        yield from _wrong_number(f"{key}[{text!r}]", value, whole=whole)
        try:
            pattern_of(text)
        except ValueError as error:
            yield f"in {key}, {error}.", _MEND


def _wrong_number(key: str, value: Any, *, whole: bool) -> Iterator[tuple[str, str]]:
    kinds: Sequence[type] = (int,) if whole else (int, float)
    # type() and not isinstance(): true is an int to Python.
    if type(value) not in kinds or not abs(value) < _TOO_LARGE or (whole and value < 1):
        expected = "a whole number from 1" if whole else "a number"
        yield f"{key} is {_brief(value)}, not {expected}.", _MEND


def _patterns(default: _T, exceptions: Mapping[str, _T] | None) -> Patterns[_T]:
    pairs = (exceptions or {}).items()
    return Patterns(default, tuple((pattern_of(text), type(default)(value)) for text, value in pairs))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix that peft adds to the name of every module."""

FactorKind = Literal["linear", "embedding"]
"""``linear``: the product has the weight's shape [out, in]; ``embedding``: that of the transposed table."""

_PICKLE = "adapter_model.bin"
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('{root}/adapter_model.bin', weights_only=True), "
    "'{root}/adapter_model.safetensors')\""
)
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(?:(?<=vector)\.weight)?"
)
_DOWN: Mapping[FactorKind, str] = {"linear": "lora_A.weight", "embedding": "lora_embedding_A"}
_UP: Mapping[FactorKind, str] = {"linear": "lora_B.weight", "embedding": "lora_embedding_B"}
_MAGNITUDE, _UP_BIAS = "lora_magnitude_vector", "lora_B.bias"
# Layers that peft wraps around what the model had, by the attribute that holds the saved part.
_WRAPPERS = frozenset({"base_layer", "modules_to_save"})
_STRANGE = re.compile(
    r"(?:^|\.)(?:lora_\w+|original_module|base_layer|modules_to_save|token_adapter)(?:\.|$)"
)
_NOT_A_MODEL = (
    "Name the directory of an adapter that peft saved "
    "(a model stands before a '+', or is listed in a recipe without 'adapter')."
)
_CHECK_PATH = "Check the path: the directory of an adapter that peft saved is expected."
_SAVE_AGAIN = "Save the adapter again with peft's save_pretrained."


@dataclass(frozen=True, slots=True)
class Factor:
    """The change of one module's weight: ``scale * up @ down``."""

    module: str
    kind: FactorKind
    down: StoredTensor
    """peft's A, [rank, in]; [rank, vocabulary] for an embedding."""
    up: StoredTensor
    """peft's B, [out, rank]; [hidden, rank] for an embedding."""
    magnitude: StoredTensor | None
    """DoRA's magnitudes [out]: rows of the changed weight, as [out, in], are scaled to these norms."""
    up_bias: StoredTensor | None
    """[out]; ``scale`` times it is added to the module's bias."""
    scale: float
    transposed: bool
    """Whether the config says that this weight is stored [in, out] (GPT-2's Conv1D).
    The config has one value for all modules and peft saves the last one it decided, so the model decides."""

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def weight_shape(self) -> tuple[int, int]:
        product = self.up.shape[0], self.down.shape[1]
        return product[::-1] if self.transposed or self.kind == "embedding" else product


@dataclass(frozen=True, slots=True)
class Adapter(Holding):
    config: AdapterConfig
    factors: Mapping[str, Factor]
    """By module, in natural order (layer 2 before layer 10)."""
    replaced: Mapping[str, StoredTensor]
    """Tensors that replace the model's, by the model's name (modules_to_save, biases, resized
    embeddings). If a module also has a factor, that is added to the replacement."""
    companions: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...] = ()


def open_adapter(root: Path | str, name: str, *, pickled: bool = False) -> Adapter:
    """Raises CheckpointError: with every problem of this adapter at once."""
    with open_store(str(root)) as store:
        files = store.files()
        infos = {info.key: info for info in files}
        weights = adapter_weights(infos, store.location("."), shown(str(root)), pickled=pickled)
        header, config, notes = _read(store, infos, weights)
        others = unfetched_files(store.location("."), files)
    factors, replaced, sentences = _account(header.tensors, config)
    if sentences:
        where = store.location(weights)
        raise CheckpointError([Problem(where, what, remedy) for what, remedy in sentences])
    sizes = {info.key: info.nbytes for info in (*files, *others)}
    companions, left_out = sort_files(sizes, {ADAPTER_CONFIG_FILE, weights}, is_adapter=True)
    if not is_remote(str(root)):
        left_out += tuple(linked_directories(Path(root)))
    return Adapter(
        name=name,
        root=str(root),
        config=config,
        files=(weight_file(header),),
        tensors={tensor.name: tensor for tensor in header.tensors},
        factors=factors,
        replaced=replaced,
        companions=tuple(key for key in companions if key in infos),
        left_out=left_out,
        notes=notes,
    )


def is_adapter(root: Path | str) -> bool:
    directory = Path(root)
    models = ("model.safetensors", "model.safetensors.index.json")
    return (directory / ADAPTER_CONFIG_FILE).is_file() and not any((directory / m).exists() for m in models)


def factor_names(module: str, kind: FactorKind) -> tuple[str, str]:
    return f"{PREFIX}{module}.{_DOWN[kind]}", f"{PREFIX}{module}.{_UP[kind]}"


def adapter_weights(infos: Mapping[str, FileInfo], where: str, root: str, *, pickled: bool) -> str:
    """Key of the file with an adapter's weights. Raises CheckpointError: no weights, or not an adapter."""
    if ADAPTER_CONFIG_FILE not in infos:
        is_model = "config.json" in infos
        what = f"is {'a model, not an' if is_model else 'no'} adapter: it has no {ADAPTER_CONFIG_FILE}."
        remedy = _NOT_A_MODEL if is_model else _CHECK_PATH
    elif ADAPTER_WEIGHTS_FILE in infos:
        return ADAPTER_WEIGHTS_FILE
    elif _PICKLE not in infos:
        what = f"holds no weights: {ADAPTER_WEIGHTS_FILE} is not there."
        remedy = "Check the path, and whether the download came to its end."
    elif pickled:
        return _PICKLE
    else:
        what = f"has its weights in {_PICKLE}, and pickled weights are refused (pickled_weights: refuse)."
        remedy = f"Take that out: no code of the file is run. Or convert it: {_CONVERT.format(root=root)}"
    raise CheckpointError(Problem(where, what, remedy))


def _read(
    store: ReadStore, infos: Mapping[str, FileInfo], weights: str
) -> tuple[FileHeader, AdapterConfig, tuple[str, ...]]:
    problems: list[Problem] = []
    info, where = infos[ADAPTER_CONFIG_FILE], store.location(ADAPTER_CONFIG_FILE)
    config = attempt(
        problems, lambda: parse_adapter_config(read_bounded(store, info.key, info.nbytes), where)
    )
    is_pickled = weights == _PICKLE
    read = attempt(
        problems, lambda: (read_pickled if is_pickled else read_safetensors)(store, infos[weights])
    )
    if read is None or config is None:
        raise CheckpointError(problems)
    header, notes = read
    note = f"its tensors are read from a pickled file: {weights}."
    return header, config, (note, *notes) if is_pickled else notes


def _account(
    tensors: Sequence[StoredTensor], config: AdapterConfig
) -> tuple[dict[str, Factor], dict[str, StoredTensor], list[tuple[str, str]]]:
    """Assign every tensor to a factor or a replacement; leftovers are sentences with remedies."""
    parts: dict[str, dict[str, StoredTensor]] = {}
    replaced: dict[str, StoredTensor] = {}
    strays: list[str] = []
    for tensor in tensors:
        name = tensor.name.removeprefix(PREFIX)
        match = _PART.fullmatch(name)
        path = match["module"] if match else _unwrapped(name)
        if name == tensor.name or _STRANGE.search(path):
            strays.append(tensor.name)
            continue
        own, key = (parts.setdefault(path, {}), match["part"]) if match else (replaced, path)
        if own.setdefault(key, tensor) is not tensor:
            strays.append(tensor.name)
    # Sorted once they are grouped: a model has up to ten thousands of experts, each with several tensors.
    modules = sorted(parts, key=natural_key)
    sentences = [sentence for module in modules for sentence in _faults(module, parts[module], config)]
    sentences += _left_over(sorted(strays, key=natural_key), len(tensors))
    factors = {} if sentences else {module: _factor(module, parts[module], config) for module in modules}
    return factors, {name: replaced[name] for name in sorted(replaced, key=natural_key)}, sentences


def _unwrapped(name: str) -> str:
    """The model's name of a saved tensor: ``lm_head.modules_to_save.weight`` is ``lm_head.weight``."""
    path = name.split(".")
    if len(path) > 2 and path[-2] in _WRAPPERS:
        del path[-2]
    return ".".join(path)


def _left_over(strays: Sequence[str], num_tensors: int) -> Iterator[tuple[str, str]]:
    if not num_tensors:
        yield "holds no tensors.", "Check whether the download came to its end."
    if strays:
        count = f"{len(strays)} tensor{'' if len(strays) == 1 else 's'} ({shortlist(strays)})"
        what = f"{count} can be neither factors of a LoRA adapter nor weights that it replaces."
        yield what, f"{_SAVE_AGAIN} Names begin with {PREFIX}, and no adapter's name stands in them."


def _kind(parts: Mapping[str, StoredTensor]) -> FactorKind:
    return "embedding" if _DOWN["embedding"] in parts or _UP["embedding"] in parts else "linear"


def _faults(
    module: str, parts: Mapping[str, StoredTensor], config: AdapterConfig
) -> Iterator[tuple[str, str]]:
    kind = _kind(parts)
    missing = [part for part in (_DOWN[kind], _UP[kind]) if part not in parts]
    if missing:
        yield f"module {module} has {', '.join(parts)} but no {' and no '.join(missing)}.", _SAVE_AGAIN
        return
    allowed = {_DOWN[kind], _UP[kind], _MAGNITUDE} | ({_UP_BIAS} if kind == "linear" else set())
    if extra := sorted(parts.keys() - allowed):
        yield f"module {module} has factors of an embedding, and {', '.join(extra)} as well.", _SAVE_AGAIN
    for tensor in parts.values():
        if not tensor.dtype.is_mergeable:
            yield f"tensor {tensor.name} is of {tensor.dtype}, not a plain float.", _SAVE_AGAIN
    yield from _misfits(module, parts, config, kind)
    yield from _undeclared(module, parts, config)


def _misfits(
    module: str, parts: Mapping[str, StoredTensor], config: AdapterConfig, kind: FactorKind
) -> Iterator[tuple[str, str]]:
    down, up, rank = parts[_DOWN[kind]], parts[_UP[kind]], config.ranks.of(module)
    shapes = f"{list(down.shape)} and {list(up.shape)}"
    if len(down.shape) > 2 or len(up.shape) > 2:
        what = f"module {module} is a convolution, with factors of shape {shapes}."
        yield what, "Merge the adapter into its model with peft and name the result."
        return
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
        yield f"the factors of {module} have the shapes {shapes}, which cannot be multiplied.", _SAVE_AGAIN
        return
    if down.shape[0] != rank:
        what = (
            f"the factors of {module} have rank {down.shape[0]}, but by {ADAPTER_CONFIG_FILE} it is {rank}."
        )
        yield what, "Correct 'r' or 'rank_pattern' there: the scale of the change hangs on it."
    for part in (_MAGNITUDE, _UP_BIAS):
        stored = parts.get(part)
        if stored is not None and stored.shape != up.shape[:1]:
            what = (
                f"tensor {stored.name} has the shape {list(stored.shape)}; {list(up.shape[:1])} is expected."
            )
            yield what, _SAVE_AGAIN


def _undeclared(
    module: str, parts: Mapping[str, StoredTensor], config: AdapterConfig
) -> Iterator[tuple[str, str]]:
    """Tensors that contradict the config, or that it declares and are missing."""
    if config.use_dora != (_MAGNITUDE in parts):
        has = "has no" if config.use_dora else "has a"
        what = f"module {module} {has} {_MAGNITUDE}, but use_dora is {str(config.use_dora).lower()}."
        yield what, f"Correct it in {ADAPTER_CONFIG_FILE}, or save the adapter again."
    if _UP_BIAS in parts and config.lora_bias is False:
        what = f"module {module} has a {_UP_BIAS}, but lora_bias is false."
        yield what, f"Correct it in {ADAPTER_CONFIG_FILE}, or save the adapter again."


def _factor(module: str, parts: Mapping[str, StoredTensor], config: AdapterConfig) -> Factor:
    kind = _kind(parts)
    return Factor(
        module=module,
        kind=kind,
        down=parts[_DOWN[kind]],
        up=parts[_UP[kind]],
        magnitude=parts.get(_MAGNITUDE),
        up_bias=parts.get(_UP_BIAS),
        scale=config.scale(module),
        transposed=kind == "linear" and config.fan_in_fan_out,
    )
