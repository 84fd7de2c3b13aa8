"""The language-model head and the embedding it may share its bytes with."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raymerge.architectures.roles import NameReader
from raymerge.architectures.rules import Role, Rules, load_rules
from raymerge.architectures.sections import text_section

_NUMBER = re.compile(r"\.\d+(?![^.])")
TIE_KEY = "tie_word_embeddings"
"""The config field that says whether head and embedding are one."""


@dataclass(frozen=True, slots=True)
class TiedPair:
    """A head and an embedding that may be tied."""

    head: str
    """Name of the head; where it is not stored, the name it would have."""
    embedding: str
    """Name of the embedding, always stored."""
    declared: bool | None
    """What the config says; None where it is silent."""


def tied_pair(names: Iterable[str], config: Mapping[str, Any]) -> TiedPair | None:
    """The head and embedding of a checkpoint, or None where it has no token embedding that is known as such.

    A pair of the name table wins when both are stored, then the only embedding and the only head that names
    tell by their role, then a pair of the table whose embedding is stored.
    """
    rules = load_rules(str(config.get("model_type") or "") or None)
    # Head and embedding carry no number, and there are few names without one.
    loose = [name for name in names if not _NUMBER.search(f".{name}")]
    known = [each for each in (_by_table(frozenset(loose), rules), _by_role(loose, rules)) if each]
    pair = next((each for each in known if each[0] in loose), known[0] if known else None)
    return TiedPair(*pair, declared=declared_tie(config)) if pair else None


def declared_tie(config: Mapping[str, Any]) -> bool | None:
    """Whether a config ties head and embedding: its top level, else its text section, else None."""
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
