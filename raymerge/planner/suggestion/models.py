"""What headers, configs and model cards tell of a model that a recipe is to be written for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

import yaml

from raymerge.architectures.roles import tied_pair
from raymerge.architectures.rules import class_names
from raymerge.checkpoints.adapters import Adapter, is_adapter, open_adapter
from raymerge.checkpoints.json_files import attempt, read_bounded
from raymerge.checkpoints.source import Checkpoint, main_dtype
from raymerge.checkpoints.tokenizer import TokenizerFiles, read_tokenizer
from raymerge.documents.fields import FaultError
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, NotCachedError, Problem, TransientError
from raymerge.planner.inputs.quantised import quantised_tensors, stored_formats
from raymerge.planner.inputs.sources import open_adapter_reference, open_reference
from raymerge.planner.inspection import inspect_checkpoint
from raymerge.planner.tokenizer.vocabulary import convert_slow_tokenizer
from raymerge.recipes.entry import ModelReference, parse_reference
from raymerge.storage.addresses import is_remote, shown
from raymerge.storage.hub import is_hub_name
from raymerge.storage.open import Lookup, open_store, resolve_source


class Trust(IntEnum):
    """How far a word about the base may be believed."""

    GUESS = 0
    LIKELY = 1
    SURE = 2


@dataclass(frozen=True, slots=True)
class Claim:
    """What a model's own files say is its base."""

    base: str
    """As it is written there: a Hub name or a path."""
    told_by: str
    trust: Trust


@dataclass(frozen=True, slots=True)
class NamedModel:
    reference: ModelReference
    names: frozenset[str]
    """What others may call it, in lower case: its path, the last part of it, its repository on the Hub."""
    claims: tuple[Claim, ...]
    checkpoint: Checkpoint | None = None
    """None for an adapter by itself."""
    adapter: Adapter | None = None
    family: str = ""
    num_layers: int = 0
    num_experts: int = 0
    """Of a layer; 0 for a dense model."""
    dtype: DType | None = None
    formats: tuple[str, ...] = ()
    """Quantised formats that are read."""
    tokenizer: TokenizerFiles | None = None
    num_rows: int | None = None
    """Of the embedding."""
    fetched_nbytes: int = 0
    """Bytes that a plan will fetch from the Hub, whose cache lacks them."""

    @property
    def name(self) -> str:
        return str(self.reference)

    @property
    def title(self) -> str:
        """A short name for sentences."""
        adapter = self.reference.lora_path
        return _last(self.reference.path) + (f"+{_last(adapter)}" if adapter is not None else "")

    @property
    def is_adapter(self) -> bool:
        return self.checkpoint is None

    @property
    def is_raw(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.is_raw


def read_models(references: Sequence[ModelReference], lookup: Lookup) -> tuple[NamedModel, ...]:
    """Raises CheckpointError: some are absent, broken or unsupported; with the problems of all."""
    problems: list[Problem] = []
    read = (attempt(problems, partial(read_model, each, lookup)) for each in references)
    models = tuple(each for each in read if each is not None)
    if problems:
        raise CheckpointError(problems)
    return models


def find_base(name: str, lookup: Lookup) -> NamedModel | None:
    """A model that others say they come from: a directory, or on the Hub; None where it cannot be read."""
    if is_remote(name):
        return None  # It is the word of strangers: no other server is asked.
    try:
        base = read_model(parse_reference(name, exists=os.path.isdir), lookup)
    except (FaultError, CheckpointError, TransientError):
        return None
    return None if base.is_adapter else base


def read_model(reference: ModelReference, lookup: Lookup) -> NamedModel:
    """Read headers, configs and the model card; of a Hub model that is not in the cache too, by ranges.

    Raises CheckpointError: it is absent, broken or unsupported."""
    place = _place(reference, lookup)
    if reference.lora_path is None and _is_adapter(place):
        adapter = open_adapter(place, shown(str(reference)), pickled=True)
        return NamedModel(reference, _names(reference.path, place), tuple(_claims(adapter)), adapter=adapter)
    checkpoint = replace(open_reference(ModelReference(place), lookup=lookup), name=shown(str(reference)))
    is_fetched = is_remote(place) and not is_remote(reference.path)
    named = _model(reference, checkpoint, sum(file.nbytes for file in checkpoint.files) if is_fetched else 0)
    if reference.lora_path is None:
        return named
    open_adapter_reference(ModelReference(reference.lora_path, reference.lora_revision), lookup=lookup)
    base = Claim(reference.path, "the name", Trust.SURE)
    return replace(named, claims=(base,), names=frozenset())


def with_adapter(model: NamedModel, adapter: NamedModel) -> NamedModel:
    """The model with an adapter on it, which a recipe names ``MODEL+ADAPTER``."""
    named = ModelReference(
        model.reference.path, model.reference.revision, adapter.reference.path, adapter.reference.revision
    )
    base = Claim(model.name, "the adapter", Trust.SURE)
    return replace(model, reference=named, names=frozenset(), claims=(base,))


def _place(reference: ModelReference, lookup: Lookup) -> str:
    """Where to read it: a Hub model that the cache lacks stays on the Hub, and only headers are fetched."""
    path = os.path.expanduser(reference.path)
    is_on_hub = not is_remote(path) and not os.path.exists(path) and is_hub_name(path)
    if not is_on_hub:
        is_file = not is_remote(path) and os.path.isfile(path) and reference.revision is None
        return path if is_file else resolve_source(reference.path, reference.revision, lookup=lookup)
    try:
        return resolve_source(path, reference.revision, lookup=replace(lookup, fetches=False), pickled=True)
    except NotCachedError as absent:
        try:
            return resolve_source(f"hf://{path}", reference.revision, lookup=lookup)
        except (CheckpointError, TransientError):
            # In the words for a name that may be a directory's.
            raise CheckpointError(absent.problems) from absent


def _is_adapter(place: str) -> bool:
    if not is_remote(place):
        return is_adapter(os.path.expanduser(place))
    with open_store(place) as store:
        keys = ("adapter_config.json", "model.safetensors", "model.safetensors.index.json")
        config, *models = store.infos(keys).values()
    return config is not None and not any(models)


def _model(reference: ModelReference, checkpoint: Checkpoint, fetched_nbytes: int) -> NamedModel:
    inspected, quantised = inspect_checkpoint(checkpoint), quantised_tensors(checkpoint)
    pair = tied_pair(checkpoint.tensors, checkpoint.config)
    embedding = checkpoint.tensors.get(pair.embedding) if pair is not None else None
    try:
        dtype: DType | None = main_dtype(checkpoint)
    except CheckpointError:
        dtype = None
    return NamedModel(
        reference=reference,
        names=_names(reference.path, checkpoint.root),
        claims=tuple(_claims(checkpoint)),
        checkpoint=checkpoint,
        family=inspected.model_type or ", ".join(class_names(checkpoint.config)) or "tensors",
        num_layers=next((each.num_layers for each in inspected.stacks if each.is_main), 0),
        num_experts=max((max(each.num_experts) for each in inspected.experts), default=0),
        dtype=None if quantised.unknown else dtype,
        formats=tuple(sorted(set(stored_formats(quantised).values()))),
        tokenizer=_tokenizer(checkpoint),
        num_rows=None if embedding is None else embedding.shape[0],
        fetched_nbytes=fetched_nbytes,
    )


def _tokenizer(checkpoint: Checkpoint) -> TokenizerFiles | None:
    try:
        return read_tokenizer(checkpoint.root, checkpoint.companions, convert=convert_slow_tokenizer)
    except CheckpointError:
        return None  # Of a merge that reads tokenizers, the plan tells.


_CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")


def _names(path: str, root: str) -> frozenset[str]:
    names = {path, path.partition("://")[2] or path, os.path.realpath(os.path.expanduser(path)), _last(path)}
    names |= {"/".join(match.groups()) for match in [_CACHED.search(root)] if match}
    return frozenset(name.rstrip("/").lower() for name in names if name)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


_BASE_FIELD = re.compile(r"_?(?:base|parent|source)_model(?:_id|_name)?(?:_name_or_path|_name|_path)?")
_CARD = "README.md"
_MERGED = "mergekit_config.yml"
_MOST_NBYTES = 1 << 20
_MOST_LETTERS = 300


def _claims(holding: Checkpoint | Adapter) -> Iterator[Claim]:
    """What its files say is its base, the most trustworthy first."""
    if isinstance(holding, Adapter):
        for base in _texts(holding.config.base_model):
            yield Claim(base, "the adapter_config.json", Trust.SURE)
    if isinstance(holding, Checkpoint) and holding.is_single_file:
        return
    card = _front_matter(_text(holding.root, _CARD))
    for base in _bases(card):
        yield Claim(base, "the model card", Trust.LIKELY)
    if isinstance(merged := _yaml(_text(holding.root, _MERGED)), Mapping):
        for base in _texts(merged.get("base_model")):
            yield Claim(base, f"the {_MERGED}", Trust.LIKELY)
    if isinstance(holding, Checkpoint):
        for key, value in holding.config.items():
            for base in _texts(value) if _BASE_FIELD.fullmatch(key) else ():
                yield Claim(base, f"'{key}' in the config", Trust.LIKELY)
        for loaded in _texts(holding.config.get("_name_or_path")):
            yield Claim(loaded, "'_name_or_path' in the config", Trust.GUESS)


def _bases(card: Mapping[str, Any]) -> Iterator[str]:
    """A card that names several models is one of a merge, and the base of a quantised copy is the model."""
    named = _texts(card.get("base_model"))
    if len(named) == 1 and card.get("base_model_relation") in (None, "finetune", "adapter"):
        yield from named


def _texts(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    texts = [each.strip() for each in values if isinstance(each, str)]
    # They come from others, and stand in comments of the recipe.
    return [each for each in texts if each and each.isprintable() and len(each) <= _MOST_LETTERS]


def _front_matter(text: str) -> Mapping[str, Any]:
    match = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    parsed = _yaml(match[1]) if match else None
    return parsed if isinstance(parsed, Mapping) else {}


def _yaml(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _text(root: str, key: str) -> str:
    try:
        with open_store(root) as store:
            info = store.info(key)
            raw = b"" if info is None else read_bounded(store, key, info.nbytes, most=_MOST_NBYTES)
    except (CheckpointError, TransientError):
        return ""
    return raw.decode("utf-8", "replace")
