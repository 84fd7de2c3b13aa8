"""What a plan reads from: the models of a recipe, opened, and results of stages that run before the merge.

Each distinct model reference is opened once, in recipe order: headers and configs only. With one exception: a
checkpoint that declares tied embeddings and stores the head all the same is compared byte for byte, because
nothing else tells whether dropping it loses weights.

Router rows for given prompts, or which experts of two models match, cannot be known from headers. A stage
computes them into a small checkpoint whose names, dtypes and shapes are known beforehand, so the merge that
reads it is planned before any stage runs."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from raymerge.architectures.moe_targets import AddedTensor
from raymerge.architectures.roles import Stack, TiedPair, module_finder, stacks, tied_pair
from raymerge.architectures.rules import Rules, class_names, rules_of, text_path, text_section, value_at
from raymerge.checkpoints.adapters import Adapter, adapter_weights, open_adapter
from raymerge.checkpoints.components import component_files, is_collection
from raymerge.checkpoints.dcp.layout import listed_files
from raymerge.checkpoints.dcp.store import ASSEMBLED_NBYTES
from raymerge.checkpoints.files import (
    ADAPTER_CONFIG_FILE,
    PICKLE_ENDINGS,
    RECORD_DIRECTORY,
    find_weights,
    sort_files,
)
from raymerge.checkpoints.header import FileLayout, TensorSpec, lay_out
from raymerge.checkpoints.pickles import conversion_command
from raymerge.checkpoints.source import (
    CONFIG_FILE,
    Checkpoint,
    Holding,
    has_only_chunks,
    open_checkpoint,
    open_tensor_file,
    planned_file,
    same_bytes,
)
from raymerge.documents.fields import FieldPath
from raymerge.dtypes import DType
from raymerge.errors import (
    CheckpointError,
    NotCachedError,
    PlanError,
    Problem,
    TransientError,
    UnreadableError,
    UserError,
    shortlist,
)
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.order import AnyRecipe, references
from raymerge.recipes.schema import Recipe
from raymerge.storage.addresses import as_path, is_remote, shown
from raymerge.storage.open import USUAL, Lookup, listed_repository, open_store, resolve_source
from raymerge.storage.store import ReadStore


@dataclass(frozen=True, slots=True)
class ExpertPrompts:
    name: str
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    text: str = ""
    held_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GateSpec:
    """Router rows of a mixture of experts to be made.

    The result has ``router.{layer}`` float32 ``[experts, hidden]`` for each layer; where shared experts have
    gates ``shared_gate.{layer}`` float32 ``[shared, hidden]``; and the constants."""

    base: Source
    mode: str
    experts: tuple[ExpertPrompts, ...]
    shared: tuple[ExpertPrompts, ...]
    layers: tuple[int, ...]
    hidden_size: int
    seed: int
    scale: float
    """Factor on every finished row of routed experts."""
    penalty: float
    """For ridge, relative to the mean of the Gram matrix's diagonal."""
    constants: tuple[AddedTensor, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.base,)

    @property
    def owner(self) -> Source:
        """The model that the result belongs to."""
        return self.base

    def over(self, opened: Callable[[Source], Source]) -> GateSpec:
        return replace(self, base=opened(self.base))


@dataclass(frozen=True, slots=True)
class AlignSpec:
    """Experts of one model to be permuted into the order of another's.

    The result has every expert's matrices and biases, the router's rows and its biases, layer by layer, by
    their canonical names and in the other model's dtypes."""

    reference: Source
    other: Source
    layers: tuple[int, ...]
    neurons: bool

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.reference, self.other)

    @property
    def owner(self) -> Source:
        return self.other

    def over(self, opened: Callable[[Source], Source]) -> AlignSpec:
        return replace(self, reference=opened(self.reference), other=opened(self.other))


EMBEDDING_ROWS, HEAD_ROWS = "embedding", "head"
"""Names of the tensors in the result of a transplant."""


@dataclass(frozen=True, slots=True)
class RowMatrix:
    """A matrix with a row for each token: its name in the result of a stage, and its logical names."""

    name: str
    base: str
    donor: str
    """"" where the donor's rows are not read."""
    base_shape: tuple[int, int]
    donor_shape: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class TransplantSpec:
    """Rows of a base for tokens that only a donor's tokenizer has.

    The result has a float32 ``[targets, width]`` for each matrix, by its name."""

    base: Source
    donor: Source
    approximation: str
    k: int
    matrices: tuple[RowMatrix, ...]
    shared: npt.NDArray[np.int64]
    """Rows of the tokens that both have, in donor and base: ``[2, shared]``, by the donor's."""
    targets: npt.NDArray[np.int64]
    """The donor's row of each token to be made, or -1 where it has none: ``[targets]``."""
    pieces: tuple[tuple[int, ...], ...]
    """For ``subword`` the base's rows that each is the mean of; none for the mean of all."""
    known: npt.NDArray[np.int64]
    """The base's rows that have a token, whose mean stands for what nothing else is known of."""

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.base, self.donor)

    @property
    def owner(self) -> Source:
        return self.base

    def over(self, opened: Callable[[Source], Source]) -> TransplantSpec:
        return replace(self, base=opened(self.base), donor=opened(self.donor))


StatisticsKind: TypeAlias = Literal["experts", "inputs", "fisher"]


CHAT_ENDING = ".jsonl"
"""Of a file of conversations; any other is text."""


@dataclass(frozen=True, slots=True)
class CalibrationText:
    path: str
    digest: str
    """Of the bytes of the file."""

    @property
    def is_chat(self) -> bool:
        return self.path.endswith(CHAT_ENDING)


@dataclass(frozen=True, slots=True)
class CalibrationSpec:
    """Statistics of what a model computes for texts.

    ``planner/calibration.py`` says what each kind's result holds."""

    model: Source
    kind: StatisticsKind
    texts: tuple[CalibrationText, ...]
    num_tokens: int
    """Most tokens of each text."""
    length: int | None
    """Tokens of a window; None for the usual number."""
    only: tuple[str, ...] = ()
    """What statistics are made of, by its name without the figure; empty for all that the model has."""

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.model,)

    @property
    def owner(self) -> Source:
        return self.model

    def over(self, opened: Callable[[Source], Source]) -> CalibrationSpec:
        return replace(self, model=opened(self.model))


@dataclass(frozen=True, slots=True)
class RouterPlace:
    """A linear router by its logical names."""

    layer: int
    weight: str
    bias: str
    """"" for a router without one."""
    shape: tuple[int, int]
    """``[E, D]``."""


@dataclass(frozen=True, slots=True)
class RepairSpec:
    """Routers of a merge to be solved for what those of its sources do with texts of their domains.

    The result has the routers' weights and biases, by canonical names and in the merge's own dtypes."""

    merged: Source
    models: tuple[Source, ...]
    texts: tuple[tuple[CalibrationText, ...], ...]
    """Of each model."""
    routers: tuple[RouterPlace, ...]
    num_tokens: int
    """Most tokens of each text."""
    length: int | None
    """Tokens of a window; None for the usual number."""

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.merged, *self.models)

    @property
    def owner(self) -> Source:
        return self.merged

    def over(self, opened: Callable[[Source], Source]) -> RepairSpec:
        return replace(self, merged=opened(self.merged), models=tuple(map(opened, self.models)))


@dataclass(frozen=True, slots=True)
class MixedMatrices:
    """Matrices of an output that one set of Gram matrices is for; several sources have them."""

    name: str
    """Logical name of the first of them."""
    members: tuple[str, ...]
    """Logical names of all."""
    models: tuple[int, ...]
    """The sources that take part, among those of the stage."""
    grams: tuple[str, ...]
    """What the input is called in each of them."""
    width: int
    layer: int
    is_turned: bool
    """Whether they are stored ``[in, out]``."""
    alpha: float
    ridge: float

    def mix(self, position: int) -> str:
        """The tensor of the result for one of the sources, by its place among those that take part."""
        return f"{self.name}.{position}"


@dataclass(frozen=True, slots=True)
class RegMeanSpec:
    """What the matrices of sources are multiplied with before they are added (RegMean, arXiv 2212.09849).

    The result has ``N A_i - I`` float32 ``[in, in]`` for each source of each of ``matrices``, transposed
    where these are stored ``[in, out]``."""

    statistics: tuple[Stage, ...]
    """One for each source, of its inputs."""
    matrices: tuple[MixedMatrices, ...]
    is_sequential: bool
    """Whether inputs are those behind merged layers (RegMean++, arXiv 2508.03121)."""
    dtype: DType | None
    """Of the merged layers; None for that of each tensor in the first source."""

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(source for stage in self.statistics for source in stage.spec.sources)

    @property
    def owner(self) -> Source:
        return self.sources[0]

    def over(self, opened: Callable[[Source], Source]) -> RegMeanSpec:
        stages = [replace(stage, spec=stage.spec.over(opened)) for stage in self.statistics]
        return replace(self, statistics=tuple(stages))


StageSpec: TypeAlias = GateSpec | AlignSpec | TransplantSpec | CalibrationSpec | RepairSpec | RegMeanSpec


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    title: str
    place: str
    spec: StageSpec
    layout: FileLayout
    digest: str
    """Of everything that determines the result, as far as headers tell."""
    made_at: str = ""
    """Absolute path of a result that was made before, with which the stage is not carried out."""

    @property
    def directory(self) -> str:
        """Where its result lies among those of other stages and merges: one place for equal stages. Absolute
        for one that was made before."""
        return self.made_at or f"{self.name}-{self.digest[:16]}"


@dataclass(frozen=True, slots=True)
class Prepared(Holding):
    """The result of a stage: one file, without a version until it is made."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class Source:
    index: int
    reference: ModelReference
    checkpoint: Checkpoint
    adapter: Adapter | None
    rules: Rules
    stacks: tuple[Stack, ...]
    pair: TiedPair | None
    stored_head_is_embedding: bool
    """Whether the stored head is byte-equal to the embedding that the config ties it to."""
    prepared: tuple[Prepared, ...] = ()

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def model_type(self) -> str:
        return str(self.checkpoint.config.get("model_type") or "")

    @property
    def architectures(self) -> tuple[str, ...]:
        """From the config, or the recipe's override."""
        override = self.reference.override_architecture
        return (override,) if override else class_names(self.checkpoint.config)

    def layer_stack(self, module: str | None) -> Stack | None:
        """The stack of layers that a slice of this module counts, or None where it is not unique."""
        if module in (None, "default"):
            return next((stack for stack in self.stacks if stack.is_main), None)
        find = module_finder(self.checkpoint.config, self.stacks)
        own = [stack for stack in self.stacks if find(f"{stack.prefix}.0.weight") == module]
        return own[0] if len(own) == 1 else None


def holdings(sources: Sequence[Source]) -> tuple[Holding, ...]:
    """Everything that a plan may read from, by index: models, then adapters, then results of stages."""
    models: list[Holding] = [source.checkpoint for source in sources]
    adapters = (source.adapter for source in sources if source.adapter is not None)
    return (*models, *adapters, *(each for source in sources for each in source.prepared))


def reads_far(sources: Sequence[Source]) -> bool:
    return any(is_remote(each.root) for each in holdings(sources))


RESULT_FILE = "model.safetensors"
STAGE_RECORD = f"{RECORD_DIRECTORY}/stage.json"
"""Beside the result: title and digest of the stage, size and digest of the result, the report."""

_TOKENIZER = (
    *("token*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("*.tiktoken", "tekken.json", "chat_template*", "additional_chat_templates*"),
)


def make_stage(
    *, name: str, title: str, place: str, spec: StageSpec, tensors: Sequence[TensorSpec], version: str
) -> Stage:
    layout = lay_out(tensors)
    asked = {"raymerge": version, "spec": _plain(spec), "header": layout.header.hex()}
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return Stage(name, title, place, spec, layout, xxhash.xxh3_128_hexdigest(text.encode()))


def prepared_of(stage: Stage, root: Path) -> Prepared:
    layout = stage.layout
    tensors = {each.name: each for each in sorted(layout.stored(RESULT_FILE))}
    file = planned_file(RESULT_FILE, layout.nbytes, layout.header)
    if stage.made_at:
        file = replace(file, version=stage.digest)
    return Prepared(stage.title, str(root / stage.directory), tensors, (file,), stage=stage)


def fingerprint(holding: Holding) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": holding.name,
        "num_tensors": len(holding.stored) + len(holding.left),
        "files": [[file.key, file.nbytes, file.header_digest] for file in holding.files],
    }
    if holding.assembled_nbytes:
        facts[ASSEMBLED_NBYTES] = holding.assembled_nbytes
    return facts | {"made_by": holding.stage.digest} if isinstance(holding, Prepared) else facts


def _plain(spec: StageSpec) -> dict[str, Any]:
    if isinstance(spec, AlignSpec):
        sources = [_fingerprints(spec.reference), _fingerprints(spec.other)]
        return {"kind": "align", "sources": sources, "layers": spec.layers, "neurons": spec.neurons}
    if isinstance(spec, TransplantSpec):
        return _plain_transplant(spec)
    if isinstance(spec, RegMeanSpec):
        made_of = [stage.digest for stage in spec.statistics]
        matrices = [asdict(each) for each in spec.matrices]
        way = [spec.is_sequential, None if spec.dtype is None else spec.dtype.value]
        return {"kind": "regmean", "of": made_of, "matrices": matrices, "way": way}
    if isinstance(spec, CalibrationSpec):
        texts = [[each.digest, each.is_chat] for each in spec.texts]
        asked = {"texts": texts, "tokens": spec.num_tokens, "length": spec.length, "only": spec.only}
        return {"kind": "calibration", "statistics": spec.kind, "model": _fingerprints(spec.model), **asked}
    if isinstance(spec, RepairSpec):
        domains = [[[each.digest, each.is_chat] for each in own] for own in spec.texts]
        asked = {"texts": domains, "tokens": spec.num_tokens, "length": spec.length}
        sources = [_fingerprints(each) for each in spec.sources]
        return {"kind": "repair", "sources": sources, **asked}
    plain = {each.name: getattr(spec, each.name) for each in fields(spec)}
    experts, shared = ([asdict(each) for each in prompts] for prompts in (spec.experts, spec.shared))
    constants = [[e.name, e.dtype.value, e.shape, e.value] for e in spec.constants]
    read = {"kind": "gates", "base": _fingerprints(spec.base)}
    return {**plain, **read, "experts": experts, "shared": shared, "constants": constants}


def _plain_transplant(spec: TransplantSpec) -> dict[str, Any]:
    rows = {name: getattr(spec, name).tolist() for name in ("shared", "targets", "known")}
    return {
        "kind": "transplant",
        "sources": [_fingerprints(each) for each in spec.sources],
        "approximation": [spec.approximation, spec.k],
        "matrices": [asdict(each) for each in spec.matrices],
        "rows": rows | {"pieces": spec.pieces},
    }


def _fingerprints(source: Source) -> list[Any]:
    return [[fingerprint(holding) for holding in holdings([source])], *beside_weights(source)]


def beside_weights(source: Source) -> list[Any]:
    """What else decides what a model makes of a text: config, tokenizer and the scales of an adapter."""
    factors = source.adapter.factors if source.adapter is not None else {}
    scales = [[module, factor.scale, factor.transposed] for module, factor in factors.items()]
    return [source.checkpoint.config, _tokenizer_digests(source), scales]


def _tokenizer_digests(source: Source) -> dict[str, str]:
    checkpoint, promised = source.checkpoint, source.checkpoint.unwritten
    keys = [key for key in checkpoint.companions if any(fnmatchcase(key, each) for each in _TOKENIZER)]
    written = promised.written if promised is not None else {}
    digests = {key: xxhash.xxh3_128_hexdigest(written[key]) for key in keys if key in written}
    with open_store(checkpoint.root if promised is None else promised.companions_root) as store:
        for key in keys:
            info = store.info(key) if key not in digests else None
            if info is not None:
                digests[key] = xxhash.xxh3_128_hexdigest(store.read(key, 0, info.nbytes))
    return digests


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses garbage collection: planning makes millions of small objects and no cycles; it takes a third of
    the time."""
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            gc.enable()


_ENDING = ".safetensors"
_NEEDS_CONFIG = {
    "slices": "has no config that counts its layers, so none of them can be taken.",
    "experts": "has no config that tells what its tensors are.",
    "modules": "has no config that tells the parts of a model.",
    "tokenizer": "has no tokenizer.",
    "tokenizer_source": "has no tokenizer.",
    "chat_template": "has no tokenizer, so a chat template has no place.",
}
# Keys of a recipe that mean nothing where there are tensors only, and why.


def names_file(reference: ModelReference) -> bool:
    if is_remote(reference.path):
        return shown(reference.path).endswith((_ENDING, *PICKLE_ENDINGS))
    return os.path.isfile(os.path.expanduser(as_path(reference.path)))


def open_raw(place: str, name: str, *, revision: str | None, pickled: bool) -> Checkpoint:
    """Open a file of tensors, a path or an address with its options.

    Raises:
        CheckpointError: it is broken, or of a kind that is not read; or a revision is given."""
    place = os.path.expanduser(as_path(place))
    path = shown(place)
    is_pickle = path.endswith(PICKLE_ENDINGS)
    if revision is not None:
        what = f"revision {revision!r} is asked for, but this is a file, which has none."
        raise CheckpointError(Problem(path, what, "Take the revision out."))
    if not is_pickle and not path.endswith(_ENDING):
        what = "is a file, and its name does not end in .safetensors."
        raise CheckpointError(Problem(path, what, "Give the directory of a model, or a file of tensors."))
    if is_pickle and not pickled:
        what = "is a pickled file, and the recipe refuses those (pickled_weights: refuse)."
        remedy = "Take that out: no code of the file is run. Or convert it: "
        raise CheckpointError(Problem(path, what, remedy + conversion_command(path)))
    return open_tensor_file(place, name, pickled=is_pickle)


def raw_problems(recipe: AnyRecipe, opened: Mapping[ModelReference, Checkpoint]) -> Iterator[Problem]:
    raw = {
        each: checkpoint for each, checkpoint in opened.items() if checkpoint.is_raw and checkpoint.tensors
    }
    model = next((each for each in opened.values() if not each.is_raw), None)
    if not raw:
        return
    for path, reference in references(recipe):
        checkpoint = raw.get(reference)
        if model is not None and checkpoint is not None:
            what = f"{checkpoint.name} has tensors only, while {model.name} is a model with a config."
            remedy = "Merge files of tensors with each other, or give the directory that the model is in."
            yield Problem(recipe.where(*path), what, remedy)
    for key, reason in _NEEDS_CONFIG.items():
        if getattr(recipe, key, None):
            what = f"'{key}' is given, but {next(iter(raw.values())).name} {reason}"
            yield Problem(recipe.where(key), what, "Remove it, or give models with their configs.")


_NEEDED = frozenset({"hidden_size", "num_hidden_layers"})
# All others may be null, which stands for a default or for nothing of the kind.
_COUNTS = ("vocab_size", "num_attention_heads", "num_key_value_heads")
_MAX_SHOWN = 60


def value_problems(config: Mapping[str, Any], rules: Rules, where: str) -> Iterator[Problem]:
    widths = rules.sizes["hidden"]
    experts = (*rules.sizes["num_experts"], *rules.sizes["chosen_experts"])
    counts = (*rules.depth.counts, *experts, *_COUNTS)
    path = text_path(config)
    for prefix, section in {(): config, path: text_section(config)}.items():
        for field in dict.fromkeys((*widths, *counts)):
            least = 1 if field in widths else 0
            is_needed = field in _NEEDED and prefix == path
            if not _can_be(section, field.split("."), least, is_needed=is_needed):
                key = f"{'.'.join((*prefix, field))} is {_shown(section, field)}"
                what = f"{key}; expected a whole number of at least {least}."
                remedy = "Correct it, or take config.json from the place the weights come from."
                yield Problem(where, what, remedy)


def _can_be(section: Mapping[str, Any], path: list[str], least: int, *, is_needed: bool) -> bool:
    for key in path[:-1]:
        inside = section.get(key)
        section = inside if isinstance(inside, Mapping) else {}
    if path[-1] not in section:
        return True
    value = section[path[-1]]
    if value is None:
        return not is_needed
    # Some families have a list of one number for each layer.
    numbers = value if isinstance(value, list) else [value]
    return all(each is None or (type(each) is int and each >= least) for each in numbers)


def _shown(section: Mapping[str, Any], field: str) -> str:
    text = json.dumps(value_at(section, field.split(".")), default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


_CHOOSING = frozenset({"methods", "router"})
# Keys below which models are chosen that are named elsewhere.
_NOT_MERGED = _CHOOSING | {"tokenizer", "tokenizer_source", "layout"}
# Keys below which models are named that are merged only if they are named elsewhere too.
Opener = Callable[[ModelReference], Checkpoint]


def open_reference(
    reference: ModelReference,
    *,
    pickled: bool = True,
    lookup: Lookup = USUAL,
    is_merged: bool = False,
    needs_weights: bool = True,
    with_components: bool = False,
) -> Checkpoint:
    """Open the model that a reference names, without its adapter: a directory, Hub name, file or address.

    ``pickled`` allows pickled weights where there are no safetensors. ``is_merged``: all its weights are
    merged, so that a model with others is refused before it is fetched. ``needs_weights`` is false for a
    donor of a tokenizer. ``with_components``: weights beside the model's own are read too.

    Raises:
        CheckpointError: it is absent, broken, or of a kind that cannot be read."""
    if names_file(reference) and not is_remote(reference.path):
        return open_raw(reference.path, str(reference), revision=reference.revision, pickled=pickled)
    if is_merged:
        refuse_unread(reference, pickled=pickled, lookup=lookup, with_components=with_components)
    root = resolve_source(reference.path, reference.revision, pickled=pickled, lookup=lookup)
    if is_remote(root) and names_file(ModelReference(root)):
        return open_raw(root, str(reference), revision=None, pickled=pickled)
    return open_checkpoint(
        root, str(reference), pickled=pickled, needs_weights=needs_weights, with_components=with_components
    )


def open_adapter_reference(
    reference: ModelReference, *, pickled: bool = True, lookup: Lookup = USUAL
) -> Adapter:
    refuse_unread(reference, pickled=pickled, lookup=lookup, is_adapter=True)
    root = resolve_source(reference.path, reference.revision, lookup=lookup)
    return open_adapter(root, str(reference), pickled=pickled)


def pickles_read(recipes: Iterable[AnyRecipe]) -> bool:
    return all(recipe.pickled_weights == "read" for recipe in recipes)


def models_with_components(recipes: Iterable[AnyRecipe]) -> frozenset[ModelReference]:
    """Models of which weights are merged wherever they lie."""
    merges = [each for each in recipes if isinstance(each, Recipe) and each.adapter is None]
    return frozenset(reference for recipe in merges for _, reference in model_references(recipe))


Opened = MutableMapping[tuple[object, ...], Checkpoint]
"""Models that several plans share, each opened once."""


def opener_of(recipe: AnyRecipe, lookup: Lookup = USUAL, opened: Opened | None = None) -> Opener:
    merged = {reference for _, reference in model_references(recipe)}
    pickled = pickles_read([recipe])
    donor = _tokenizer_alone(recipe)
    whole = models_with_components([recipe])

    def open_one(reference: ModelReference) -> Checkpoint:
        needs = reference != donor or reference in merged
        is_merged = reference in merged
        with_components = reference in whole
        key = (
            reference,
            pickled,
            is_merged,
            needs,
            with_components,
            lookup.fetches,
            *sorted(lookup.commits.items()),
        )
        if opened is not None and key in opened:
            return opened[key]
        checkpoint = open_reference(
            reference,
            pickled=pickled,
            lookup=lookup,
            is_merged=is_merged,
            needs_weights=needs,
            with_components=with_components,
        )
        if opened is not None:
            opened[key] = checkpoint
        return checkpoint

    return open_one


def _tokenizer_alone(recipe: AnyRecipe) -> object:
    """The model of which nothing but the tokenizer is read, or None."""
    block = recipe.tokenizer if isinstance(recipe, Recipe) else None
    return None if block is None or block.approximation in (None, "omp") else block.source


def _layout_alone(recipe: AnyRecipe) -> ModelReference | None:
    """The model of which nothing but the layout of its files is taken, or None."""
    layout = recipe.layout if isinstance(recipe, Recipe) else None
    return None if layout in {reference for _, reference in model_references(recipe)} else layout


@dataclass(frozen=True, slots=True)
class OpenedModels:
    sources: tuple[Source, ...]
    """In recipe order. A model that cannot be opened is replaced by another under its name, so that the rest
    can be planned to find its problems; empty where there is none to replace it."""
    problems: tuple[Problem, ...] = ()
    absent: tuple[tuple[FieldPath, ModelReference], ...] = ()
    cause: UserError | None = None
    """The first error, whose type tells whether another attempt may pass."""

    def require(self) -> tuple[Source, ...]:
        """Raises PlanError with every problem unless all are open."""
        if self.problems or self.absent:
            raise PlanError(self.problems) from self.cause
        return self.sources


def open_models(recipe: AnyRecipe, *, opener: Opener | None = None, lookup: Lookup = USUAL) -> OpenedModels:
    """Open every distinct model of a recipe, in recipe order, reporting all failures at once.

    Models of which only the tokenizer is taken come last. ``opener`` None opens in the recipe's own way."""
    with collector_paused():
        opened_sources, failures = _opened(recipe, opener or opener_of(recipe, lookup), lookup)
    problems = [_placed(each, recipe.where(*path)) for path, error in failures for each in error.problems]
    sound = [each for each in opened_sources.values() if each is not None]
    alone = _layout_alone(recipe)
    merged = {source.reference: source.checkpoint for source in sound if source.reference != alone}
    raw = tuple(raw_problems(recipe, merged))
    return OpenedModels(
        sources=() if raw or not sound else tuple(_complete(opened_sources, sound[0])),
        problems=(*problems, *raw),
        absent=tuple([each for each in references(recipe) if opened_sources.get(each[1], sound) is None]),
        cause=next((error for _, error in failures), None),
    )


def _complete(opened: Mapping[ModelReference, Source | None], other: Source) -> Iterator[Source]:
    for index, (reference, source) in enumerate(opened.items()):
        if source is None:
            checkpoint = replace(other.checkpoint, name=str(reference))
            source = replace(other, reference=reference, checkpoint=checkpoint, adapter=None)
        yield replace(source, index=index)


def _opened(
    recipe: AnyRecipe, opener: Opener, lookup: Lookup
) -> tuple[dict[ModelReference, Source | None], list[tuple[FieldPath, UserError]]]:
    opened: dict[ModelReference, Source | None] = {}
    failures: list[tuple[FieldPath, UserError]] = []
    pickled = pickles_read([recipe])
    for path, reference in list(references(recipe)):
        # Rules choose among models that are named elsewhere; others are refused in planning.
        is_chosen = path[0] in _CHOOSING and path[:2] != ("router", "repair")
        if reference in opened or is_chosen or path[:2] == ("trunk", "methods"):
            continue
        opened[reference] = None
        try:
            source = source_of(len(opened) - 1, reference, opener(reference))
            opened[reference] = with_adapter(source, pickled=pickled, lookup=lookup)
        except (UserError, TransientError) as error:
            # Where nothing is fetched, nothing is known of these models: that is no fault of the recipe.
            if not lookup.fetches and isinstance(error, (NotCachedError, TransientError)):
                continue
            if isinstance(error, TransientError):
                raise
            failures.append((path, error))
    return _with_configs(opened, _layout_alone(recipe)), failures


def _with_configs(
    opened: Mapping[ModelReference, Source | None], layout: ModelReference | None
) -> dict[ModelReference, Source | None]:
    """Training checkpoints, which have tensors alone, with the config of the first model that has one, but
    that of which nothing but the ``layout`` is taken."""
    sources = [each for each in opened.values() if each is not None and each.reference != layout]
    lead = next((each for each in sources if not each.checkpoint.is_raw), None)

    def completed(source: Source) -> Source:
        checkpoint = source.checkpoint
        if lead is None or checkpoint.chunks is None or not checkpoint.is_raw:
            return source
        # What a training saves is not quantised, whatever that model is.
        config = {key: value for key, value in lead.checkpoint.config.items() if key != "quantization_config"}
        note = f"{checkpoint.name} has no config.json: that of {lead.name} is taken for it."
        checkpoint = replace(checkpoint, config=config, notes=(*checkpoint.notes, note))
        return replace(source_of(source.index, source.reference, checkpoint), adapter=source.adapter)

    return {key: None if source is None else completed(source) for key, source in opened.items()}


def model_references(recipe: AnyRecipe) -> list[tuple[FieldPath, ModelReference]]:
    named = [(path, each) for path, each in references(recipe) if path[0] not in _NOT_MERGED]
    return [(path, each) for path, each in named if path[:2] != ("trunk", "methods")]


def unread_problems(recipe: AnyRecipe, sources: Sequence[Source]) -> Iterator[Problem]:
    by_reference = {source.reference: source for source in sources}
    for path, reference in model_references(recipe):
        source = by_reference.pop(reference, None)
        if source is None:
            continue
        for each in (source.checkpoint, source.adapter):
            unknown = [] if each is None else [file.key for file in each.left_out if file.rule is None]
            if each is not None and unknown:
                yield unread_problem(f"{recipe.where(*path)}: {each.name}", unknown)


def with_adapter(source: Source, *, pickled: bool = True, lookup: Lookup = USUAL) -> Source:
    """The source with the adapter that its reference names, if it names one; raises as ``open_reference``."""
    reference = source.reference
    if reference.lora_path is None:
        return source
    named = ModelReference(reference.lora_path, reference.lora_revision)
    return replace(source, adapter=open_adapter_reference(named, pickled=pickled, lookup=lookup))


def source_of(index: int, reference: ModelReference, checkpoint: Checkpoint) -> Source:
    rules = rules_of(checkpoint.config)
    impossible = [*value_problems(checkpoint.config, rules, f"{checkpoint.name}/{CONFIG_FILE}")]
    if impossible:
        raise CheckpointError(impossible)
    # What has no config ties nothing: in a file of tensors a head is a tensor like any other.
    pair = None if checkpoint.is_raw else tied_pair(checkpoint.model_tensors, checkpoint.config)
    return Source(
        index=index,
        reference=reference,
        checkpoint=checkpoint,
        adapter=None,
        rules=rules,
        stacks=stacks(checkpoint.model_tensors, checkpoint.config),
        pair=pair,
        stored_head_is_embedding=_stored_head_is_embedding(checkpoint, pair),
    )


def _stored_head_is_embedding(checkpoint: Checkpoint, pair: TiedPair | None) -> bool:
    if pair is None or not pair.declared or pair.head not in checkpoint.tensors:
        return False
    head, embedding = checkpoint.tensors[pair.head], checkpoint.tensors.get(pair.embedding)
    if embedding is None or (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return False
    return same_bytes(checkpoint, head, embedding)


def _placed(problem: Problem, place: str) -> Problem:
    where = problem.where if problem.where.startswith(place) else f"{place}: {problem.where}"
    return Problem(where, problem.what, problem.remedy)


def unread_problem(where: str, keys: Sequence[str]) -> Problem:
    what = f"holds weights that are not merged, and that the result would lack: {shortlist(keys, 4)}."
    remedy = (
        "Safetensors are merged wherever they lie in a model, for adapters and mixtures its own alone; links "
        " to directories are not followed. If the result can do without the others, move them into a "
        "directory whose name begins with a dot, which is left out, or merge a copy that has none of them; "
        "small files that are none can be copied to the output afterwards."
    )
    return Problem(where, what, remedy)


def refuse_unread(
    reference: ModelReference,
    *,
    pickled: bool,
    lookup: Lookup,
    is_adapter: bool = False,
    with_components: bool = False,
) -> None:
    """Refuse a model of the Hub by the names of its files, before any of its weights is fetched.

    Does nothing for other places, nor where the Hub does not list its files: fetching them reports why.

    Raises:
        CheckpointError: it has no weights that can be read, or others that no rule leaves out."""
    store = listed_repository(reference.path, reference.revision, lookup)
    if store is None:
        return
    place = store.location(".")
    with store:
        sizes = {info.key: info.nbytes for info in store.files()}
        try:
            read = _weight_files(store, pickled=pickled, is_adapter=is_adapter)
        except (TransientError, UnreadableError):
            return
        except CheckpointError as error:
            if not (with_components and is_collection(sizes)):
                problems = [_named(each, place, str(reference)) for each in error.problems]
                raise CheckpointError(problems) from error
            # Its weights may all be in directories.
            read = ()
    _, left_out = sort_files(sizes, read, is_adapter=is_adapter)
    components = component_files(left_out, pickled=pickled) if with_components else {}
    merged = {key for keys in components.values() for key in keys}
    if unknown := [each.key for each in left_out if each.rule is None and each.key not in merged]:
        raise CheckpointError(unread_problem(str(reference), unknown))


def _weight_files(store: ReadStore, *, pickled: bool, is_adapter: bool) -> Collection[str]:
    if is_adapter:
        infos, place = {info.key: info for info in store.files()}, store.location(".")
        return {ADAPTER_CONFIG_FILE, adapter_weights(infos, place, place, pickled=pickled)}
    files = store.files()
    if has_only_chunks(files, pickled=pickled):
        return listed_files(info.key for info in files)
    index = find_weights(store, files, pickled=pickled)
    return {*index.keys, index.names.index}


def _named(problem: Problem, place: str, name: str) -> Problem:
    return Problem(*(text.replace(place, name) for text in (problem.where, problem.what, problem.remedy)))
