"""The recipe: mergekit's YAML, with the choices that change bytes added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, ValidationInfo

from raymerge.documents.fields import (
    Fault,
    FaultError,
    between,
    by,
    choice_of,
    closest,
    did_you_mean,
    number_within,
    read_positive,
    read_switch,
    refusal,
    show,
)
from raymerge.documents.grammar import Grammar, accepts, any_of, exactly_one, filled, given, never_both
from raymerge.recipes.calibration import Calibrate
from raymerge.recipes.entry import (
    DEFAULT_SHARD_SIZE,
    Document,
    Entry,
    MergeDType,
    ModelReference,
    Parameters,
    Reference,
    ShardSize,
    Text,
    misplaced_keys,
    plain_reference,
    plain_word_or_reference,
    read_reference,
    reading_of,
    word_or_reference,
)
from raymerge.recipes.router_repair import RouterSource, repair_faults
from raymerge.recipes.settings import (
    SELECTOR_KEYS,
    OutFormat,
    Selector,
    plain_layers,
    read_layers,
    read_roles,
)

_KINDS = ("zero", "model_token")


class ZeroRow(Entry):
    kind: Literal["zero"]


class TokenRow(Entry):
    shape: ClassVar[str] = "a map like {kind: model_token, model: PATH, token: TEXT}"

    kind: Literal["model_token"]
    model: Reference
    token: Text | None = None
    token_id: Annotated[int, by(between(0))] | None = None

    grammar: ClassVar[Grammar] = {"oneOf": [given("token"), given("token_id")]}

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        given = [key for key in ("token", "token_id") if data.get(key) is not None]
        if len(given) != 1:
            both = "a model_token is named both by 'token' and by 'token_id'."
            what = both if given else "the model_token is not named."
            yield Fault((), what, "Give exactly one of 'token' and 'token_id'.")


@accepts({})
def _read_row(value: object, info: ValidationInfo) -> ModelReference | ZeroRow | TokenRow:
    if isinstance(value, (ZeroRow, TokenRow)):
        return value
    if not isinstance(value, Mapping) or "kind" not in value:
        return read_reference(value, reading_of(info.context).exists)
    kind = value["kind"]
    if kind not in _KINDS:
        raise FaultError(Fault(("kind",), f"{show(kind)} is not known.", "Write zero or model_token."))
    return (ZeroRow if kind == "zero" else TokenRow).model_validate(value, context=info.context)


def _plain_row(row: ModelReference | ZeroRow | TokenRow) -> object:
    if isinstance(row, ModelReference):
        return plain_reference(row)
    return row.model_dump(mode="json", exclude_none=True)


TOKENIZER_WORDS = ("union", "base")
TokenizerSource: TypeAlias = Annotated[
    Literal["union", "base"] | ModelReference,
    PlainValidator(word_or_reference(*TOKENIZER_WORDS)),
    PlainSerializer(plain_word_or_reference(*TOKENIZER_WORDS)),
]
RowSource: TypeAlias = Annotated[
    Reference | ZeroRow | TokenRow, PlainValidator(_read_row), PlainSerializer(_plain_row)
]


class TokenEntry(Entry):
    shape: ClassVar[str] = "a map like {source: PATH, force: true}"

    source: RowSource | None = None
    """A source that has the token, zeros, or another row; None for the default."""
    force: Annotated[bool, by(read_switch)] = False
    """Whether sources that have the token take this row too."""


APPROXIMATIONS = ("omp", "subword", "mean")
DEFAULT_ATOMS = 64


class Tokenizer(Entry):
    shape: ClassVar[str] = "a map like {source: union}"

    source: TokenizerSource = "union"
    """``union`` of all vocabularies, the ``base``'s, or that of one source."""
    tokens: Mapping[str, TokenEntry] = {}
    """Rows by token; missing tokens are added in this order."""
    pad_to_multiple_of: Annotated[int, by(between(1))] | None = None
    approximation: Annotated[str, by(choice_of(*APPROXIMATIONS))] | None = None
    """How rows are made for tokens of the source that the model lacks: ``omp`` of the shared tokens that make
    up the source's row (arXiv 2506.06607), ``subword`` of its own tokens that the text is split into, or the
    ``mean`` of all; None takes other models' rows as they are."""
    k: Annotated[int, by(between(1))] | None = None
    """Shared tokens that ``omp`` makes a row of; None for 64."""

    @property
    def num_atoms(self) -> int:
        return DEFAULT_ATOMS if self.k is None else self.k

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        approximation = data.get("approximation")
        if data.get("k") is not None and approximation != "omp":
            what = "'k' is the number of tokens that omp makes a row of."
            yield Fault(("k",), what, "Remove it, or take omp.")
        if approximation is None:
            return
        if data.get("source", "union") in TOKENIZER_WORDS:
            what = "'approximation' makes rows for the tokens of another model."
            yield Fault(("source",), what, "Name that model: 'source: PATH'.")
        if data.get("tokens"):
            what = "'tokens' chooses rows by token, and with 'approximation' all are made alike."
            yield Fault(("tokens",), what, "Remove one of the two.")


_energy = number_within(
    {"exclusiveMinimum": 0, "maximum": 1},
    "is not a share of the energy.",
    "Write a number above 0 and up to 1, like 0.99.",
)


class AdapterOutput(Entry):
    shape: ClassVar[str] = "a map like {rank: 16}"

    rank: Annotated[int, by(between(1))] | None = None
    """Largest rank of a matrix; None for the largest of the sources."""
    combine: Annotated[Literal["svd", "concatenate"], by(choice_of("svd", "concatenate"))] = "svd"
    """``svd``: the best factors of that rank; ``concatenate``: the sources' factors side by side, which is
    exact and adds up their ranks."""
    energy: Annotated[float, by(_energy)] | None = None
    """Sufficient share of the squared singular values, for smaller ranks; None for all."""

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        if data.get("combine") != "concatenate":
            return
        for key in ("rank", "energy"):
            if data.get(key) is not None:
                what = f"'{key}' limits the rank, which 'combine: concatenate' does not do."
                yield Fault((key,), what, f"Remove '{key}', or write 'combine: svd'.")


_WORDS = ("experts", "none")
_MAP = "a map like {experts: true, neurons: false}"


class Align(Entry):
    shape: ClassVar[str] = _MAP

    experts: Annotated[bool, by(read_switch)] = True
    """Whether the experts of a layer are matched, with their router rows; always so."""
    neurons: Annotated[bool, by(read_switch)] = True

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        if data.get("experts") is False:
            what = "'experts' is false, and neurons are matched within matched experts only."
            yield Fault(("experts",), what, "Remove it, or write 'align: none'.")


@accepts({"enum": [*_WORDS, False]})
def _read_align(value: object) -> object:
    if value == "experts":
        return {}
    if value is False or value == "none":
        return None
    if isinstance(value, (Mapping, Align)):
        return value
    remedy = f"{did_you_mean(str(value), _WORDS)} Write experts, none, or {_MAP}."
    raise refusal(f"{show(value)} is not known here.", remedy.lstrip())


Alignment: TypeAlias = Annotated[Align | None, BeforeValidator(_read_align)]


_CHANGES = ("merge_method", "sources", "parameters")


class MethodRule(Entry):
    shape: ClassVar[str] = "a map like {role: attention, merge_method: slerp}"

    filter: Text | None = None
    glob: Text | None = None
    role: Annotated[tuple[str, ...], by(read_roles), PlainSerializer(list)] = ()
    layers: Annotated[tuple[tuple[int, int], ...], by(read_layers), PlainSerializer(plain_layers)] = ()
    """Inclusive ranges of layers, of which one must contain the tensor."""
    merge_method: Text | None = None
    sources: tuple[Reference, ...] = ()
    """The models that take part; empty for all."""
    parameters: Parameters = {}

    grammar: ClassVar[Grammar] = {
        "allOf": [any_of(*map(given, SELECTOR_KEYS)), any_of(*map(filled, _CHANGES))]
    }

    @property
    def selector(self) -> Selector:
        return Selector(self.filter, self.glob, self.role, self.layers)

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        if all(data.get(key) is None for key in SELECTOR_KEYS):
            remedy = f"Add one of: {', '.join(SELECTOR_KEYS)}."
            yield Fault((), "the rule does not say which tensors it is for.", remedy)
        if not any(data.get(key) for key in _CHANGES):
            yield Fault((), "the rule changes nothing.", f"Add one of: {', '.join(_CHANGES)}.")
        elif data.get("sources") in ([], ()):
            yield Fault(("sources",), "the list is empty.", "Name models, or remove it: all take part then.")


MAX_SEED = 2**64 - 1


def flag_advice(advice: Mapping[str, str]) -> dict[str, str]:
    flags = {key: f"--{key.replace('_', '-')}" for key in advice}
    return {key: f"In mergekit that is the flag {flags[key]}; {advice[key]}" for key in advice}


FLAG_ADVICE: Mapping[str, str] = flag_advice(
    {
        "clone_tensors": "it is not needed here, since every tensor gets its own bytes. Remove the key.",
        "allow_crimes": "it is not needed here, since checkpoints merge when names, shapes and dtypes agree. "
        "Remove the key.",
        "lazy_unpickle": "it changes no result. Remove the key.",
        "cuda": "here the device is the run option --device. Remove the key.",
        "low_cpu_memory": "here memory is bounded by the run option --memory. Remove the key.",
        "out_shard_size": "here write 'shard_size: 5GB'.",
        "random_seed": "here write 'seed: 7'.",
        "copy_tokenizer": "here the tokenizer is always copied. Remove the key.",
        "trust_remote_code": "code that comes with a model is never run here. Remove the key.",
        "write_model_card": "here the card is always written. Remove the key.",
    }
)
"""Command-line flags of mergekit found in recipes; ``-`` and ``_`` are the same."""

REVISION_ADVICE = "A revision stands behind the name of its model, as in 'model: PATH@REVISION'."

_RECIPE_ADVICE: Mapping[str, str] = {
    "sweep": "It has named axes, like sweep: {t: [0.3, 0.5]}.",
    "checkpoints": "It averages those of a training run.",
    **FLAG_ADVICE,
    "revision": REVISION_ADVICE,
    "pad_to_multiple_of": "Write it as tokenizer: {source: union, pad_to_multiple_of: 64}, "
    "whose 'source' takes the place of 'tokenizer_source'.",
}

Seed = Annotated[int, by(between(0, MAX_SEED))]
Duplicates = Annotated[Literal["keep", "share"], by(choice_of("keep", "share"))]
MissingTensors = Annotated[Literal["error", "copy_base"], by(choice_of("error", "copy_base"))]
ExtraTensors = Annotated[Literal["error", "drop"], by(choice_of("error", "drop"))]
EmbeddingSizes = Annotated[Literal["error", "common", "pad"], by(choice_of("error", "common", "pad"))]
PickledWeights = Annotated[Literal["read", "refuse"], by(choice_of("read", "refuse"))]
TrainingState = Annotated[Literal["keep", "drop"], by(choice_of("keep", "drop"))]


class _Part(Entry):
    """A map below the top of a recipe, where some users write top-level keys."""

    @classmethod
    def _unknown(cls, key: str) -> Fault:
        known = (*cls.model_fields, *cls.advice)
        if key in Recipe.model_fields and key != "name" and closest(key, known) is None:
            what = f"'{key}' is a key of the whole recipe."
            return Fault((key,), what, "Move it to the top of the recipe.")
        return super()._unknown(key)


class ModelEntry(_Part):
    shape: ClassVar[str] = "a map like {model: PATH, parameters: {weight: 0.5}}"
    advice: ClassVar[Mapping[str, str]] = {
        "layer_range": "mergekit ignores it here. Layers are chosen below 'slices': "
        "slices: [{sources: [{model: PATH, layer_range: [0, 8]}]}].",
        "revision": REVISION_ADVICE,
    }

    model: Reference
    parameters: Parameters = {}
    texts: tuple[Text, ...] = ()
    """Files that this model is calibrated on, in place of those of ``calibrate``."""
    statistics: Text | None = None
    """Directory that ``raymerge calibrate`` made of this model, which is then not run again."""

    grammar: ClassVar[Grammar] = never_both("texts", "statistics")

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        if data.get("texts") and data.get("statistics") is not None:
            what = "'statistics' were made of texts already, and 'texts' says to make them again."
            yield Fault(("texts",), what, "Remove one of the two.")


@accepts(
    {
        "type": "array",
        "prefixItems": [{"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 1}],
        "minItems": 2,
        "maxItems": 2,
    }
)
def _read_range(value: object, info: ValidationInfo) -> tuple[int, int]:
    model = info.data.get("model", "the source")
    match value:
        case [int(start), int(end)] if not isinstance(start, bool) and not isinstance(end, bool):
            return _ordered(start, end, model)
    what = f"layer_range {show(value)} of {model} is not a pair of whole numbers."
    raise refusal(what, "Write [first layer, layer after the last], like [0, 8].")


class SliceSource(_Part):
    shape: ClassVar[str] = "a map like {model: PATH, layer_range: [0, 8]}"
    advice: ClassVar[Mapping[str, str]] = {"revision": REVISION_ADVICE}

    model: Reference
    layer_range: Annotated[tuple[int, int], PlainValidator(_read_range), PlainSerializer(list)]
    parameters: Parameters = {}


class OutputSlice(_Part):
    """Consecutive layers of the output, merged from as many layers of each source."""

    shape: ClassVar[str] = "a map like {sources: [{model: PATH, layer_range: [0, 8]}]}"
    advice: ClassVar[Mapping[str, str]] = {
        "residual_weight": "mergekit reads it and never uses it: it never had an effect. Remove the key."
    }

    sources: tuple[SliceSource, ...]
    base_model: Reference | None = None
    parameters: Parameters = {}

    grammar: ClassVar[Grammar] = filled("sources")

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        if data.get("sources") in ([], ()):
            yield Fault(("sources",), "the slice has no sources.", "Add {model: PATH, layer_range: [0, 8]}.")


class ModuleEntry(_Part):
    shape: ClassVar[str] = "a map with 'models' or 'slices'"

    slices: tuple[OutputSlice, ...] = ()
    models: tuple[ModelEntry, ...] = ()
    parameters: Parameters = {}

    grammar: ClassVar[Grammar] = exactly_one("models", "slices")

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        return _exactly_one(data, ("models", "slices"))


class Recipe(Document):
    """A merge. Every field can change output bytes unless its docstring says otherwise.

    Python callers may build it from plain values; a text also gives positions for messages."""

    shape: ClassVar[str] = "a map like {merge_method: linear, models: [...]}"
    advice: ClassVar[Mapping[str, str]] = _RECIPE_ADVICE

    merge_method: Text
    models: tuple[ModelEntry, ...] = ()
    """Sources merged whole. Exactly one of models, slices and modules is not empty."""
    slices: tuple[OutputSlice, ...] = ()
    modules: Mapping[str, ModuleEntry] = {}
    methods: tuple[MethodRule, ...] = ()
    """Exceptions by tensor; without a rule ``merge_method`` holds."""
    base_model: Reference | None = None
    """What deltas are taken from; gives config, tokenizer and companion files."""
    dtype: MergeDType | None = None
    """dtype of the merged tensors, unless ``out_dtype`` is given; None keeps the checkpoint's own."""
    out_dtype: MergeDType | None = None
    out_format: OutFormat = None
    """How the output stores its numbers, plain or as codes with scales; None goes by dtype and checkpoint."""
    warn_encoding_error: Annotated[float, by(read_positive)] | None = None
    """Relative error that encoding may add without a warning; None for any. Changes no byte."""
    parameters: Parameters = {}
    tokenizer_source: TokenizerSource | None = None
    """Short form of ``tokenizer: {source: ...}``."""
    tokenizer: Tokenizer | None = None
    chat_template: Text | None = None
    """``auto``, the name of a template, or its text."""
    seed: Seed = 0
    """Chooses the random masks, together with names and element numbers."""
    shard_size: ShardSize = DEFAULT_SHARD_SIZE
    """Bytes that one output file may have; 0 for a single file."""
    duplicates: Duplicates = "keep"
    """``keep``: each name has its own bytes; ``share``: equal ones may share storage."""
    layout: Reference | None = None
    """Training checkpoint in whose files and chunks the output is written; None for safetensors."""
    training_state: TrainingState = "keep"
    """What becomes of that checkpoint's optimizer and other state: ``keep`` copies it, ``drop`` leaves it
    out."""
    missing_tensors: MissingTensors = "error"
    """A tensor that some source lacks: ``error``, or ``copy_base`` to keep the base's as it is."""
    extra_tensors: ExtraTensors = "error"
    """A tensor that the base lacks: ``error``, or ``drop`` to leave it out."""
    embedding_sizes: EmbeddingSizes = "error"
    """Embeddings with different numbers of rows: ``error``, ``common`` to keep the rows that all have, or
    ``pad`` to keep every row."""
    pickled_weights: PickledWeights = "read"
    """Pickled weights, where there are no safetensors: ``read`` without running code, or ``refuse``."""
    router: RouterSource = "merge"
    """``merge`` as other tensors, the ``base``'s own rows and biases, or those of a model; ``repair`` solves
    for routers that do with texts of each model's domain what its own do."""
    align: Alignment = None
    """Matching of independently trained mixtures; None if their experts are in one order."""
    calibrate: Calibrate | None = None
    """What models are run on where a method needs statistics of their activations."""
    adapter: AdapterOutput | None = None
    """Given if models and output are adapters."""

    grammar: ClassVar[Grammar] = {
        "allOf": [
            exactly_one("models", "slices", "modules"),
            never_both("tokenizer", "tokenizer_source"),
            *(never_both("adapter", key) for key in ("router", "align")),
        ]
    }

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        yield from misplaced_keys(cls, data)
        yield from _exactly_one(data, ("models", "slices", "modules"))
        yield from _layout_faults(data)
        yield from repair_faults(data)
        if data.get("adapter") is not None:
            yield from _adapter_faults(data)
        if data.get("tokenizer") is not None and data.get("tokenizer_source") is not None:
            what = "'tokenizer_source' and 'tokenizer' both choose the vocabulary."
            yield Fault(("tokenizer_source",), what, "Write 'tokenizer: {source: ...}' only.")


def _ordered(start: int, end: int, model: object) -> tuple[int, int]:
    if 0 <= start < end:
        return start, end
    fault = "starts below layer 0." if start < 0 else "is empty." if start == end else "runs backwards."
    what = f"layer_range [{start}, {end}] of {model} {fault}"
    remedy = f"Write [{end}, {start}]." if 0 <= end < start else "Write [first layer, layer after the last]."
    raise refusal(what, remedy)


def _adapter_faults(data: Mapping[str, Any]) -> Iterable[Fault]:
    if data.get("slices") or data.get("modules"):
        what = "'adapter' merges adapters, which are merged as wholes."
        yield Fault(("adapter",), what, "List them below 'models', or remove 'adapter'.")
    for key in ("router", "align"):
        if data.get(key) is not None:
            what = f"'{key}' has no meaning beside 'adapter': adapters have no router of their own."
            yield Fault((key,), what, f"Remove '{key}', or name models with adapters on them.")
    if data.get("layout") is not None:
        what = "'layout' has no meaning beside 'adapter': an adapter is one file."
        yield Fault(("layout",), what, "Remove 'layout', or name models with adapters on them.")


def _layout_faults(data: Mapping[str, Any]) -> Iterable[Fault]:
    if data.get("layout") is None:
        if data.get("training_state") is not None:
            what = (
                "'training_state' is what is kept of the checkpoint that 'layout' names, and there is none."
            )
            yield Fault(("training_state",), what, "Add 'layout: PATH', or remove it.")
        return
    for key in ("shard_size", "duplicates"):
        if data.get(key) is not None:
            what = f"'{key}' is for safetensors, and 'layout' gives the output other files."
            yield Fault((key,), what, f"Remove '{key}' or 'layout'.")


def _exactly_one(data: Mapping[str, Any], keys: tuple[str, ...]) -> Iterable[Fault]:
    given = [key for key in keys if data.get(key)]
    if len(given) > 1:
        both = " and ".join(f"'{key}'" for key in given)
        yield Fault((given[1],), f"{both} are both given.", f"Keep one of: {', '.join(keys)}.")
    if not given:
        empty = next((key for key in keys if key in data), None)
        what = "nothing says what to merge." if empty is None else f"'{empty}' is empty."
        yield Fault((empty,) if empty else (), what, f"Fill one of: {', '.join(keys)}.")
