"""What each tensor of a checkpoint is, from its name: its layer, role, canonical name, what it is tied to.

The canonical spelling of experts is ``{block}.experts.{e}.{gate,up,down}_proj.weight`` with a block ending in
``mlp``; that of a router ``{block}.gate.weight``, and of its selection bias
``{block}.gate.e_score_correction_bias``. Other tensors keep their names but for the family's renames."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from raymerge.architectures.rules import (
    LayoutKind,
    Projection,
    Role,
    Rules,
    config_int,
    rules_of,
    text_path,
    text_section,
)

# Longer numbers count no layers; Python refuses to read one of thousands of digits.
_LAYER_NUMBER = re.compile(r"\.([0-9]{1,9})(?![^.])")


@dataclass(frozen=True, slots=True)
class Stack:
    prefix: str
    num_layers: int
    """Without the multi-token-prediction layers behind them."""
    is_main: bool


@dataclass(slots=True)
class _Seen:
    numbers: set[int]
    mtp_numbers: set[int]


def stacks(names: Iterable[str], config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """The layer stacks of a checkpoint in order of first appearance; at most one is the main one.

    A prefix counts if the word before the number says so, or if its numbers run from 0 without a hole."""
    rules = rules_of(config)
    by_prefix = {
        prefix: seen
        for prefix, seen in _numbers(names, rules).items()
        if _is_named(prefix, rules) or seen.numbers == set(range(len(seen.numbers)))
    }
    main = _main(by_prefix, config, rules)
    return tuple(
        Stack(prefix, main[1], True)
        if main and main[0] == prefix
        else Stack(prefix, max(seen.numbers) + 1, False)
        for prefix, seen in by_prefix.items()
    )


def layer_of(name: str) -> tuple[str, int] | None:
    dotted = f".{name}"
    match = _LAYER_NUMBER.search(dotted)
    if match is None or dotted.endswith(".experts", 0, match.start()):
        return None
    return dotted[1 : match.start()], int(match[1])


def layers_of(names: Iterable[str]) -> Iterator[tuple[str, tuple[str, int] | None]]:
    """Each name with its layer, which is worked out once for all experts of a block."""
    known: dict[str, tuple[str, int] | None] = {}
    for name in names:
        block = name.partition(".experts.")[0]
        if block not in known:
            known[block] = layer_of(block)
        yield name, known[block] or layer_of(name)


def rename_layer(name: str, stack_prefix: str, new_layer: int) -> str:
    """The name of the same tensor in another layer of its stack; ValueError if it is not in that stack."""
    head = f"{stack_prefix}." if stack_prefix else ""
    number, dot, rest = name.removeprefix(head).partition(".")
    if not name.startswith(head) or not (number.isdecimal() and number.isascii()):
        raise ValueError(f"{name} is in no layer of {stack_prefix or 'the top'}")
    return f"{head}{new_layer}{dot}{rest}"


def _numbers(names: Iterable[str], rules: Rules) -> dict[str, _Seen]:
    by_prefix: dict[str, _Seen] = defaultdict(lambda: _Seen(set(), set()))
    # The experts of all blocks have the same words behind theirs.
    is_mtp = cache(lambda text: not rules.mtp.isdisjoint(text.split(".")))
    for name, place in layers_of(names):
        if place is None:
            continue
        prefix, number = place
        seen = by_prefix[prefix]
        seen.numbers.add(number)
        block, _, end = name.partition(".experts.")
        if is_mtp(block) or is_mtp(end):
            seen.mtp_numbers.add(number)
    return by_prefix


def _is_named(prefix: str, rules: Rules) -> bool:
    return prefix.rpartition(".")[2] in rules.layer_words


def _main(by_prefix: Mapping[str, _Seen], config: Mapping[str, Any], rules: Rules) -> tuple[str, int] | None:
    fitting: list[tuple[str, int]] = []
    num_mtp = config_int(config, rules.depth.mtp_counts)
    # In a vision or audio encoder on its own nothing stands beside its layers.
    others = [prefix for prefix in by_prefix if not _is_aside(prefix, rules)] or list(by_prefix)
    plain = [prefix for prefix in others if _is_named(prefix, rules)] or others
    for prefix in plain:
        count = _declared(prefix, config, rules)
        beyond = {number for number in by_prefix[prefix].numbers if count is not None and number >= count}
        if count is None and len(plain) == 1:
            fitting.append((prefix, max(by_prefix[prefix].numbers) + 1))
        elif (
            count is not None
            and max(by_prefix[prefix].numbers) + 1 - len(beyond) == count
            and (beyond <= by_prefix[prefix].mtp_numbers or num_mtp == len(beyond))
        ):
            fitting.append((prefix, count))
    decoders = [each for each in fitting if "encoder" not in each[0].split(".")] or fitting
    return decoders[0] if len(decoders) == 1 else None


def _is_aside(prefix: str, rules: Rules) -> bool:
    path = prefix.split(".")
    is_text = rules.vision.isdisjoint(path) and rules.mtp.isdisjoint(path)
    return not is_text or any(word.startswith(("audio", "speech", "talker")) for word in path)


def _declared(prefix: str, config: Mapping[str, Any], rules: Rules) -> int | None:
    words, depth = prefix.split("."), rules.depth
    if "decoder" in words:
        return config_int(config, (*depth.decoder_counts, *depth.counts))
    if "encoder" in words:
        return config_int(config, (*depth.encoder_counts, *depth.counts))
    return config_int(config, depth.counts)


MOE_ROLES = frozenset(
    {Role.EXPERT, Role.SHARED_EXPERT, Role.ROUTER, Role.ROUTER_BIAS, Role.SHARED_EXPERT_GATE}
)
_GATED = frozenset({Role.EXPERT, Role.SHARED_EXPERT, Role.MLP})
# Expert numbers are path components of their own, or, in the Switch family, part of one.
EXPERT_NUMBER = re.compile(r"(?:^|\.)experts\.(?:expert_)?([0-9]{1,9})(?=\.)")
# What quantisers and bias parameters append to the word that names a fused matrix.
_APPENDED = re.compile(r"_(bias|blocks|scales|scale|scale_inv|packed|qweight)$")


class TensorInfo(NamedTuple):
    role: Role
    """Every tensor of an MTP layer is MTP, every one of the vision side VISION."""
    part: Role
    """The role within its layer, also in MTP layers and the vision side."""
    stack: str
    """Prefix of its layer stack, such as ``model.layers``; "" outside layers."""
    layer: int | None
    expert: int | None
    projection: Projection | None
    is_bias: bool
    block: str | None
    """Path of its mixture-of-experts block; else None."""


class NameReader:
    def __init__(self, rules: Rules, num_layers: int | None = None, *, stacks: Sequence[Stack] = ()) -> None:
        """``num_layers``: layers of the main stack; those beyond are multi-token-prediction layers.

        With ``stacks`` they decide which numbers are layers, and give ``num_layers``; else the word before
        the number decides."""
        main = next((each for each in stacks if each.is_main), None)
        self._rules = rules
        self._prefixes = frozenset(each.prefix for each in stacks)
        self._main = None if main is None else main.prefix
        self._limit = num_layers if main is None else main.num_layers
        self._experts: dict[tuple[str, str], TensorInfo] = {}

    def describe(self, name: str) -> TensorInfo:
        """Cached across experts that differ in their number alone."""
        numbered = EXPERT_NUMBER.search(name)
        if numbered is None:
            return self._describe(name, None)
        key = name[: numbered.start(1)], name[numbered.end(1) :]
        first = self._experts.get(key)
        if first is None:
            first = self._experts[key] = self._describe(name, numbered)
        return first._replace(expert=int(numbered[1]))

    def _describe(self, name: str, numbered: re.Match[str] | None) -> TensorInfo:
        rules, path = self._rules, name.split(".")
        stack, layer = self._layer(name)
        named = (role for role, pattern in rules.roles if pattern.search(name))
        part = Role.EXPERT if numbered else next(named, Role.OTHER)
        word = projection_word(path, rules) if part in _GATED else None
        is_beyond = layer is not None and self._limit is not None and layer >= self._limit
        return TensorInfo(
            role=_role(path, part, rules, beyond=is_beyond and self._main in (None, stack)),
            part=part,
            stack=stack,
            layer=layer,
            expert=int(numbered[1]) if numbered else None,
            projection=rules.projections[word] if word else None,
            is_bias=path[-1] == "bias" or path[-1].endswith("_bias") or part is Role.ROUTER_BIAS,
            block=_block(path, rules) if part in MOE_ROLES else None,
        )

    def _layer(self, name: str) -> tuple[str, int | None]:
        place = layer_of(name)
        if place is None:
            return "", None
        prefix = place[0]
        if self._prefixes:
            is_layer = prefix in self._prefixes
        else:
            is_layer = prefix.rpartition(".")[2] in self._rules.layer_words
        return place if is_layer else ("", None)


def describe(
    name: str, rules: Rules, num_layers: int | None = None, *, stacks: Sequence[Stack] = ()
) -> TensorInfo:
    return NameReader(rules, num_layers, stacks=stacks).describe(name)


def projection_word(path: Sequence[str], rules: Rules) -> str | None:
    """The word of a path that names the projection, without quantisers' suffixes."""
    for word in reversed(path):
        plain = word if word in rules.projections or "_" not in word else _APPENDED.sub("", word)
        if plain in rules.projections:
            return plain
    return None


def _role(path: Sequence[str], part: Role, rules: Rules, *, beyond: bool) -> Role:
    if part is Role.BUFFER:
        return part
    if not rules.vision.isdisjoint(path):
        return Role.VISION
    return part if not beyond and rules.mtp.isdisjoint(path) else Role.MTP


def _block(path: Sequence[str], rules: Rules) -> str | None:
    places = (index for index, word in enumerate(path) if word in rules.moe_children)
    place = next(places, None)
    return ".".join(path[:place]) if place is not None else None


class JoinedMatrix(NamedTuple):
    """A matrix that servers make of several: q, k and v of an attention, or gate and up of an expert."""

    module: str
    words: tuple[str, ...]
    """Of those that may be its parts, in order."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(f"{self.module}.{word}" for word in self.words)


def joined_matrix(name: str, rules: Rules) -> JoinedMatrix | None:
    """The matrix into which servers join a module's ``weight``; None for none."""
    parent, _, word = name.removesuffix(".weight").rpartition(".")
    words = rules.joined.get(word)
    return JoinedMatrix(parent, words) if words is not None and name.endswith(".weight") else None


DEFAULT = "default"

# First match wins. The mergers inside Qwen's vision tower project into the text model.
_BESIDE_TEXT = (
    (
        "multi_modal_projector",
        re.compile(
            r"^(\w+\.)?(multi_modal_projector|mm_projector|vision_projector|connector|aligner)\."
            r"|^image_(start|end|newline|pad)$"
        ),
    ),
    ("multi_modal_projector", re.compile(r"^(\w+\.)?visual\.(merger|deepstack_merger_list)\.")),
    ("vision_model", re.compile(r"^(model\.)?vision_model\.")),
    ("vision_tower", re.compile(r"^(\w+\.)?(visual|vision_tower|vision|vision_encoder|image_encoder|vpm)\.")),
    ("audio_tower", re.compile(r"^(\w+\.)?(audio_tower|audio_model|speech_encoder)\.")),
)
_TEXT = "text_decoder"
_ENCODER = re.compile(r"^(\w+\.)?encoder\.")
_SHARED = re.compile(r"^(\w+\.)?shared\.")
_OTHER_SECTIONS = ("vision_config", "audio_config", "visual", "vision_tower_config")


def module_finder(config: Mapping[str, Any], stacks: Sequence[Stack]) -> Callable[[str], str]:
    """The module that a tensor belongs to, by its name.

    Models of text and images have ``text_decoder`` (with embeddings and head), ``vision_tower`` or
    ``vision_model``, ``multi_modal_projector`` and ``audio_tower``; encoder-decoders have ``encoder``,
    ``decoder`` (with the head) and ``shared``; all others are one module, ``default``."""
    if _is_multimodal(config, stacks):
        return lambda name: next((module for module, each in _BESIDE_TEXT if each.match(name)), _TEXT)
    words = [stack.prefix.split(".") for stack in stacks]
    has_both = all(any(word in each for each in words) for word in ("encoder", "decoder"))
    return _of_encoder_decoder if has_both else lambda _: DEFAULT


def _of_encoder_decoder(name: str) -> str:
    if _SHARED.match(name):
        return "shared"
    return "encoder" if _ENCODER.match(name) else "decoder"


def _is_multimodal(config: Mapping[str, Any], stacks: Sequence[Stack]) -> bool:
    if text_path(config) or any(key in config for key in _OTHER_SECTIONS):
        return True
    prefixes = [f"{stack.prefix}." for stack in stacks]
    return any(pattern.match(prefix) for prefix in prefixes for _, pattern in _BESIDE_TEXT)


_NUMBER = re.compile(r"\.\d+(?![^.])")
TIE_KEY = "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class TiedPair:
    head: str
    embedding: str
    declared: bool | None
    """By the config; None if silent."""


def tied_pair(names: Iterable[str], config: Mapping[str, Any]) -> TiedPair | None:
    """The head and embedding of a checkpoint, or None without a known token embedding.

    Preferred: a stored pair of the name table, then the only embedding and head by role, then a pair of the
    table whose embedding is stored."""
    rules = rules_of(config)
    # Head and embedding carry no number, and there are few names without one.
    loose = [name for name in names if not _NUMBER.search(f".{name}")]
    known = [each for each in (_by_table(frozenset(loose), rules), _by_role(loose, rules)) if each]
    pair = next((each for each in known if each[0] in loose), known[0] if known else None)
    return TiedPair(*pair, declared=declared_tie(config)) if pair else None


def declared_tie(config: Mapping[str, Any]) -> bool | None:
    """``tie_word_embeddings`` of a config: at the top, else in the text section, else None."""
    for section in (config, text_section(config)):
        value = section.get(TIE_KEY)
        if isinstance(value, bool):
            return value
    return None


def _by_table(names: Collection[str], rules: Rules) -> tuple[str, str] | None:
    pairs = [(head, embedding) for head, embedding in rules.ties if embedding in names]
    return next((pair for pair in pairs if pair[0] in names), pairs[0] if pairs else None)


def _by_role(names: Iterable[str], rules: Rules) -> tuple[str, str] | None:
    reader = NameReader(rules)
    infos = {name: reader.describe(name) for name in names if name.endswith("weight")}
    heads = [name for name, info in infos.items() if info.role is Role.HEAD]
    embeddings = [name for name, info in infos.items() if info.role is Role.EMBEDDING]
    if len(embeddings) != 1 or len(heads) > 1:
        return None
    return (heads[0] if heads else "lm_head.weight"), embeddings[0]


_BLOCK_WORDS = frozenset({"block_sparse_moe", "feed_forward", "ffn", "moe"})
_BLOCKS_NOT_RENAMED = frozenset({"feed_forward"})
# What transformers 5 leaves as it is, for dense layers and mixtures alike.
_MAY_BE_STACKED = frozenset({Role.EXPERT, Role.MLP, Role.OTHER})
_OF_CODES = re.compile(r"(scales?(_inv)?|blocks|packed|q?zeros|qweight|g_idx)$")
_ROUTER_WRAPPERS = frozenset({"gate", "router", "wg", "layer", "classifier"})


@dataclass(frozen=True, slots=True)
class FusedLayout:
    kind: LayoutKind
    """``unknown`` if neither family nor config tells."""
    block: str
    projections: tuple[str, ...]
    """Matrices of each expert stored together: ("gate", "up"), ("gate",), ("up",) or ("down",)."""
    num_experts: int
    is_bias: bool
    parts: tuple[str, ...] = ()
    """Canonical names of tensors of which this one has the rows; () for experts."""
    heights: tuple[int, ...] = ()
    """Rows of each of these."""


def logical_name(name: str, rules: Rules, *, info: TensorInfo | None = None) -> str:
    """The canonical name of a tensor that is not fused; a fused one keeps its own, in a canonical block."""
    return CanonicalNames(rules).of(name, info or describe(name, rules))


_RENAMED_ALREADY = frozenset({Role.EXPERT, Role.ROUTER, Role.ROUTER_BIAS})
# What stands behind the block is canonical by the role alone.


class CanonicalNames:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._blocks: dict[str, str] = {}

    def of(self, name: str, info: TensorInfo) -> str:
        own = info.block
        if own is None:
            return _renamed(name, self._rules)
        if own not in self._blocks:
            self._blocks[own] = canonical_block(own, self._rules)
        block = self._blocks[own]
        rest = name[len(own) + 1 :] if own else name
        inner = _inside_block(info, rest.split("."), self._rules)
        canonical = f"{block}.{inner}" if block else inner
        return canonical if info.part in _RENAMED_ALREADY else _renamed(canonical, self._rules)


def canonical_block(block: str, rules: Rules) -> str:
    # The dot lets those renames match that look for one behind the block.
    parent, dot, word = _renamed(f"{block}.", rules)[:-1].rpartition(".")
    return f"{parent}{dot}{'mlp' if word in _BLOCK_WORDS else word}"


def other_names(name: str, logical: str, info: TensorInfo, rules: Rules) -> tuple[str, ...]:
    if info.block is None:
        return (logical,) if logical != name else ()
    block, inner = canonical_block(info.block, rules), logical
    if block:
        inner = logical[len(block) + 1 :]
    word = info.block.rpartition(".")[2]
    if word in _BLOCKS_NOT_RENAMED:
        block = block.removesuffix("mlp") + word
    elif info.part in (Role.ROUTER, Role.ROUTER_BIAS) and word not in _BLOCK_WORDS:
        inner = name[len(info.block) + 1 :] if info.block else name
    alone = f"{block}.{inner}" if block else inner
    stacked = _stacked_name(block, inner.split(".")) if info.part is Role.EXPERT else alone
    published = ".".join(rules.published.get(part, part) for part in alone.split("."))
    return tuple(each for each in dict.fromkeys((alone, stacked, published)) if each != name)


def _stacked_name(block: str, inner: Sequence[str]) -> str:
    words = [word for word in inner if not word.isdecimal()]
    if words[-1] in ("weight", "bias"):
        pair = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
        matrix = pair.get(words[-2], words[-2])
        words = [*words[:-2], matrix if words[-1] == "weight" else f"{matrix}_bias"]
    return ".".join([block, *words] if block else words)


def fused_layout(
    name: str, shape: tuple[int, ...], config: Mapping[str, Any], rules: Rules
) -> FusedLayout | None:
    """How a tensor holds the matrices of many experts; None if it does not.

    A stack of as many matrices as the config has experts is one, of unknown layout, whatever its name. The
    orientation comes from the family, else from sizes in the config, never from which side is longer."""
    path = name.split(".")
    word = projection_word(path, rules)
    if EXPERT_NUMBER.search(name) or (word is not None and not _is_plain(path, word)):
        return None
    info = describe(name, rules)
    if word is None or info.part is not Role.EXPERT:
        return _unrecognised(path[-1], info, shape, config, rules)
    kind, num_experts = _placed(word, info, shape, config, rules)
    projection = info.projection or ""
    return FusedLayout(
        kind=kind,
        block=canonical_block(info.block or "", rules),
        projections=("gate", "up") if projection == "gate_up" else (projection,),
        num_experts=num_experts,
        is_bias=info.is_bias,
    )


def concatenated_layout(
    name: str, shape: tuple[int, ...], config: Mapping[str, Any], rules: Rules
) -> FusedLayout | None:
    """How a tensor holds the rows of several others, which may be stored apart; None if it does not."""
    for each in rules.concatenated:
        heights = each.heights(shape[0], config) if shape and each.pattern.search(name) else ()
        if heights:
            names = tuple(logical_name(each.pattern.sub(part, name), rules) for part in each.parts)
            return FusedLayout("rows", "", ("",), 1, is_bias=False, parts=names, heights=heights)
    return None


def logical_names(layout: FusedLayout) -> tuple[str, ...]:
    """Canonical names of the parts: expert by expert, in each projection by projection."""
    if layout.parts:
        return layout.parts
    leaf = "bias" if layout.is_bias else "weight"
    head = f"{layout.block}.experts" if layout.block else "experts"
    return tuple(
        f"{head}.{expert}.{projection}_proj.{leaf}"
        for expert in range(layout.num_experts)
        for projection in layout.projections
    )


def _renamed(name: str, rules: Rules) -> str:
    for pattern, replacement in rules.renames:
        name = pattern.sub(replacement, name)
    return name


def _inside_block(info: TensorInfo, path: list[str], rules: Rules) -> str:
    if info.part is Role.ROUTER:
        return ".".join(["gate", *(word for word in path if word not in _ROUTER_WRAPPERS)])
    if info.part is Role.ROUTER_BIAS:
        # One that is for the tokens of images lies beside that for all others.
        return "gate.e_score_correction_bias" + ("_vl" if path[-1].endswith("_vl") else "")
    word = projection_word(path, rules)
    if info.expert is None or info.part is not Role.EXPERT or word not in path:
        return ".".join(path)
    tail = path[path.index(word) + 1 :]
    return ".".join(["experts", str(info.expert), f"{info.projection}_proj", *tail])


def _unrecognised(
    word: str, info: TensorInfo, shape: tuple[int, ...], config: Mapping[str, Any], rules: Rules
) -> FusedLayout | None:
    if len(shape) != 3 or min(shape) < 2 or info.layer is None or info.role is Role.VISION:
        return None
    is_stack = shape[0] == config_int(config, rules.sizes["num_experts"]) or info.part is Role.EXPERT
    if info.part not in _MAY_BE_STACKED or not is_stack or _OF_CODES.search(word):
        return None
    return FusedLayout("unknown", canonical_block(info.block or "", rules), (), shape[0], info.is_bias)


def _is_plain(path: list[str], word: str) -> bool:
    """Whether a name means plain values, not a quantiser's codes or scales."""
    return path[-1] in (word, f"{word}_bias") or (path[-1] in ("weight", "bias") and path[-2] == word)


def _placed(
    word: str, info: TensorInfo, shape: tuple[int, ...], config: Mapping[str, Any], rules: Rules
) -> tuple[LayoutKind, int]:
    declared = rules.fused.get(word) or ("out_in" if rules.is_out_in else None)
    if declared in ("rows", "rows_transposed"):
        experts = config_int(config, rules.sizes["num_experts"]) or 0
        fits = len(shape) == 2 and experts > 0 and shape[0] % experts == 0
        return (declared, experts) if fits else ("unknown", max(experts, 1))
    experts = shape[0] if shape else 1
    if len(shape) != (2 if info.is_bias else 3) or not experts:
        return "unknown", max(experts, 1)
    if info.projection == "gate_up" and shape[1 if info.is_bias or declared == "out_in" else 2] % 2:
        return "unknown", experts
    return (
        _bias_kind(declared, info) if info.is_bias else _matrix_kind(declared, info, shape, config, rules)
    ), experts


def _bias_kind(declared: LayoutKind | None, info: TensorInfo) -> LayoutKind:
    if info.projection != "gate_up":
        return "out_in"
    if declared is None:
        return "unknown"
    return declared if declared == "in_out_interleaved" else "out_in"


def _matrix_kind(
    declared: LayoutKind | None,
    info: TensorInfo,
    shape: tuple[int, ...],
    config: Mapping[str, Any],
    rules: Rules,
) -> LayoutKind:
    fitting = _fitting(info, shape, config, rules)
    if fitting is None:
        return declared or "unknown"
    if declared is not None and any(declared.startswith(kind) for kind in fitting):
        return declared
    # Contradicted by the config's sizes, or of a family not known: sizes decide where they leave no choice.
    # A pair stored (in, out) leaves one: side by side, or taking turns.
    if fitting == {"out_in"} or (fitting == {"in_out"} and info.projection != "gate_up"):
        return "out_in" if fitting == {"out_in"} else "in_out"
    return "unknown"


def _fitting(
    info: TensorInfo, shape: tuple[int, ...], config: Mapping[str, Any], rules: Rules
) -> set[LayoutKind] | None:
    hidden = config_int(config, rules.sizes["hidden"])
    rows = config_int(config, rules.sizes["expert_rows"])
    if hidden is None or rows is None:
        return None
    outputs, inputs = (hidden, rows) if info.projection == "down" else (rows, hidden)
    joined = outputs * (2 if info.projection == "gate_up" else 1)
    sides: dict[LayoutKind, tuple[int, int]] = {"out_in": (joined, inputs), "in_out": (inputs, joined)}
    return {kind for kind, side in sides.items() if shape[1:] == side}
