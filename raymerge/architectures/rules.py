"""Naming rules as data, from the tables in ``families``; and the text decoder's section of a config."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from importlib.resources import files
from math import prod
from typing import Any, Literal

_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")


def text_path(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that lead to the text decoder's section; () for the top."""
    for key in _SECTIONS:
        section = config.get(key)
        if isinstance(section, Mapping) and section:
            return (key, *text_path(section))
    return ()


def sections(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The top and each section towards the text decoder, with their keys."""
    path = text_path(config)
    yield (), config
    for depth, key in enumerate(path, start=1):
        config = config[key]
        yield path[:depth], config


def text_section(config: Mapping[str, Any]) -> Any:
    return [section for _, section in sections(config)][-1]


def value_at(section: Any, path: Iterable[str]) -> Any:
    """What is below some keys; None where a section on the way is absent."""
    for key in path:
        section = section.get(key) if isinstance(section, Mapping) else None
    return section


def first_int(section: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    for key in keys:
        value = value_at(section, key.split("."))
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def config_int(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    names = tuple(keys)
    value = first_int(text_section(config), names)
    return value if value is not None else first_int(config, names)


QUANTISATION_TABLES = ("quantization_config", "compression_config")


EXPERT_DTYPE = "expert_dtype"
"""Field that says what the experts of a table of ``quant_method: fp8`` are stored as, in it or beside it."""


def quantisation_tables(config: Mapping[str, Any]) -> list[Any]:
    """At the top and in the text section, whatever they hold, with the dtype of experts that lies beside one
    of FP8; without empty ones."""
    levels = (config, text_section(config))
    experts = next((level[EXPERT_DTYPE] for level in levels if level.get(EXPERT_DTYPE)), None)
    tables = (level.get(key) for level in levels for key in QUANTISATION_TABLES)
    return [
        {EXPERT_DTYPE: experts, **table} if experts and _is_fp8(table) else table for table in tables if table
    ]


def _is_fp8(table: Any) -> bool:
    return isinstance(table, Mapping) and table.get("quant_method") == "fp8"


def class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    stated = config.get("architectures")
    return tuple(map(str, stated)) if isinstance(stated, list) else ()


Projection = Literal["gate", "up", "down", "gate_up"]
"""A matrix of a gated feed-forward network, or two stored as one."""

LayoutKind = Literal[
    "out_in", "out_in_interleaved", "in_out", "in_out_interleaved", "rows", "rows_transposed", "unknown"
]
"""Fused experts: [E, P*F, d]; [E, d, P*F]; the same with interleaved columns; [E*F, d]; [E*F, d] whose
logical matrix is [d, F]; or undecidable from config and family."""


class Role(StrEnum):
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    SHARED_EXPERT_GATE = "shared_expert_gate"
    MTP = "mtp"
    VISION = "vision"
    BUFFER = "buffer"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Periodic:
    key: str
    shift: int = 0
    """Layer i is special if (i + shift) is a multiple of the period."""
    offset: str | None = None
    """Field of the first special layer's number, instead of ``shift``."""
    index_list: str | None = None
    """Field that can list layers where a period cannot: the ordinary ones for ``mlp_only_layers``, else the
    special ones."""
    layer_types: Sequence[str] = ()
    """Words of ``layer_types`` for a special and an ordinary layer; that list overrides the period."""


@dataclass(frozen=True, slots=True)
class DepthRules:
    counts: tuple[str, ...]
    encoder_counts: tuple[str, ...]
    decoder_counts: tuple[str, ...]
    counting_lists: tuple[str, ...]
    """Per-layer lists whose length is the number of layers if no field gives it."""
    mtp_counts: tuple[str, ...]
    not_per_layer: re.Pattern[str]
    """Never per layer, even if as long as the layers are many."""
    per_layer_strings: tuple[str, ...]
    index_lists: tuple[str, ...]
    index_lists_from_one: tuple[str, ...]
    leading_dense: tuple[str, ...]
    leading: tuple[str, ...]
    """Number of other special layers at the start."""
    last_index: tuple[str, ...]
    fixed: tuple[str, ...]
    periodic: tuple[Periodic, ...]


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Tensors that hold the rows of others one below the other."""

    pattern: re.Pattern[str]
    parts: Sequence[str]
    """What takes the place of the pattern in the name of each of the others."""
    rows: Sequence[Sequence[str]] = ()
    """For each of them the config's fields whose product is the number of its rows; () for equal numbers."""

    def heights(self, num_rows: int, config: Mapping[str, Any]) -> tuple[int, ...]:
        """The rows of each part; () where they do not make up ``num_rows`` by this config."""
        stated = [prod(config_int(config, (field,)) or 0 for field in fields) for fields in self.rows]
        heights = stated or [num_rows // len(self.parts)] * len(self.parts)
        return tuple(heights) if sum(heights) == num_rows and min(heights) > 0 else ()

    def absent_fields(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The fields for the rows of parts that a config lacks."""
        fields = dict.fromkeys(field for fields in self.rows for field in fields)
        return tuple(field for field in fields if config_int(config, (field,)) is None)


@dataclass(frozen=True, slots=True)
class Rules:
    """Naming rules of one family: the general ones behind the family's own."""

    roles: tuple[tuple[Role, re.Pattern[str]], ...]
    vision: frozenset[str]
    mtp: frozenset[str]
    layer_words: frozenset[str]
    moe_children: frozenset[str]
    projections: Mapping[str, Projection]
    fused: Mapping[str, LayoutKind]
    is_out_in: bool
    plain: re.Pattern[str]
    """Of tensors that are not quantised with others of their role."""
    expert_format: str
    """Name of the format that the family has its experts in, and nothing else; "" for none."""
    joined: Mapping[str, tuple[str, ...]]
    """By a module's word all words of those that servers join it with, in their order there."""
    sizes: Mapping[str, tuple[str, ...]]
    """Fields for ``hidden``, ``expert_rows``, ``num_experts`` and ``chosen_experts``, dotted, best first."""
    renames: tuple[tuple[re.Pattern[str], str], ...]
    """Other spellings to the canonical one, applied in order."""
    concatenated: tuple[Concatenation, ...]
    half_split: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]
    """Tensors that hold the rows of each head in two halves where others have them take turns, as rotary
    position embeddings pair them; and the config's fields for the number of heads, best first."""
    left_out: tuple[tuple[re.Pattern[str], str], ...]
    """Names that a loader which knows the published ones alone leaves out, and the loader."""
    published: Mapping[str, str]
    """Canonical words of experts and routers to those on the Hub."""
    ties: tuple[tuple[str, str], ...]
    depth: DepthRules


# A plan asks for them dozens of times.
@lru_cache(maxsize=64)
def load_rules(model_type: str | None) -> Rules:
    """The rules of a family, or the general ones."""
    general, own, family = _GENERAL, _own_table(model_type), _plain(model_type)
    spelled = partial(_gathered, _SPELLINGS, family)
    roles = (*spelled("roles"), *own.get("roles", ()), *general["roles"])
    return Rules(
        roles=tuple((Role(entry["role"]), _any(entry["patterns"])) for entry in roles),
        vision=frozenset(general["overlays"]["vision"]),
        mtp=frozenset(general["overlays"]["mtp"]),
        layer_words=frozenset(general["words"]["layers"]),
        moe_children=frozenset(general["words"]["moe_children"]),
        projections={**_by_word(general["projections"]), **_by_word(own.get("projections", {}))},
        fused={**general["fused"]["layouts"], **own.get("fused", {}).get("layouts", {})},
        is_out_in=family in general["fused"]["out_in"],
        expert_format=next(
            (entry["experts"] for entry in general["quantised"] if family in entry["families"]), ""
        ),
        plain=_any(_gathered(general["plain"], family, "patterns")),
        joined={
            word: tuple(words) for words in _gathered(general["joined"], family, "modules") for word in words
        },
        sizes={kind: tuple(keys) for kind, keys in general["sizes"].items()},
        renames=tuple((re.compile(pattern), replacement) for pattern, replacement in spelled("renames")),
        concatenated=tuple(
            Concatenation(**{**each, "pattern": re.compile(each["pattern"])})
            for each in spelled("concatenated")
        ),
        half_split=tuple((re.compile(pattern), tuple(fields)) for pattern, *fields in spelled("half_split")),
        left_out=tuple((re.compile(pattern), loader) for pattern, loader in spelled("left_out")),
        published=dict(spelled("published")),
        ties=tuple(map(tuple, (*own.get("ties", {}).get("pairs", ()), *general["ties"]["pairs"]))),
        depth=_depth({**general["depth"], **own.get("depth", {})}),
    )


def rules_of(config: Mapping[str, Any]) -> Rules:
    return load_rules(str(config.get("model_type") or "") or None)


def _own_table(model_type: str | None) -> dict[str, Any]:
    if _plain(model_type) == "general":
        return {}
    return (_table(model_type) if model_type else None) or _table(_plain(model_type)) or {}


def _gathered(entries: Sequence[Mapping[str, Any]], family: str, key: str) -> list[Any]:
    """What all entries for a family, or for any, have by a key."""
    held = (entry for entry in entries if family in entry.get("families", (family,)))
    return [each for entry in held for each in entry.get(key, ())]


def _by_word(kinds: Mapping[Projection, Iterable[str]]) -> dict[str, Projection]:
    return {word: kind for kind, words in kinds.items() for word in words}


def _plain(model_type: str | None) -> str:
    return (model_type or "").removesuffix("_text")


def _table(name: str) -> dict[str, Any] | None:
    # A model type comes out of a downloaded file: it must not lead anywhere but into the tables.
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        return None
    table = files("raymerge.architectures").joinpath("families", f"{name.replace('-', '_')}.toml")
    return tomllib.loads(table.read_text(encoding="utf-8")) if table.is_file() else None


# Read once: a plan asks for rules dozens of times, and these tables took half of its time.
_GENERAL: Mapping[str, Any] = _table("general") or {}
_SPELLINGS: Sequence[Mapping[str, Any]] = tomllib.loads(
    files("raymerge.architectures").joinpath("spellings.toml").read_text(encoding="utf-8")
)["spellings"]


def _any(patterns: Iterable[str]) -> re.Pattern[str]:
    # A pattern that ignores case says so at its own start; the group keeps that to itself.
    scoped = (f"(?i:{p.removeprefix('(?i)')})" if p.startswith("(?i)") else f"(?:{p})" for p in patterns)
    return re.compile("|".join(scoped))


def _depth(table: Mapping[str, Any]) -> DepthRules:
    lists = {key: tuple(value) for key, value in table.items() if key not in ("not_per_layer", "periodic")}
    return DepthRules(
        not_per_layer=re.compile(table["not_per_layer"]),
        periodic=tuple(Periodic(**entry) for entry in table["periodic"]),
        **lists,
    )
