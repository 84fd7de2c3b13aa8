"""What ``config.json`` says of quantisation: which formats it allows, and which modules it leaves plain.

Each quantisation method reads its own table into a ``Declared``. What transformers and compressed-tensors
themselves make of the fields counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from raymerge.checkpoints.json_files import ForeignPattern, foreign_pattern
from raymerge.checkpoints.quantisation.encoding import WHOLE, Format

_SHOWN = 60
_NO_PATTERN = re.compile(r"[\w.-]*")
# Groups have other numbers in a pattern that is joined from several.
_REFERENCE = re.compile(r"\\[0-9]|\(\?P|\(\?\(")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


@dataclass(frozen=True, slots=True)
class Scheme:
    """One format that a config allows for weights."""

    format: Format
    block: tuple[int, int] | None
    """Rows and columns of a block, ``WHOLE`` for as many as the matrix has; None allows any."""

    def allows(self, form: Format, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
        """Whether a tensor [..., rows, columns] of this format and these blocks is meant."""
        if form != self.format or self.block is None:
            return form == self.format
        sizes = zip(self.block, block, shape[-2:], strict=True)
        return all(size == have or (size == WHOLE and have == whole) for size, have, whole in sizes)

    def __str__(self) -> str:
        if self.block is None or WHOLE in self.block:
            return self.format.word
        return f"{self.format.word} with blocks of {self.block[0]}x{self.block[1]}"


@dataclass(frozen=True, slots=True)
class Modules:
    """Modules that a config lists."""

    exact: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    """Paths that are also meant as the beginning or the end of longer ones, in whole words."""
    patterns: tuple[ForeignPattern, ...] = ()
    """Matched from the start of a path."""

    def lists(self, module: str) -> bool:
        if module in self.exact or any(pattern.matches(module) for pattern in self.patterns):
            return True
        return bool(self.parts) and any(each in self.parts for each in _ends(module))


@dataclass(frozen=True, slots=True)
class Declared:
    """What one config says."""

    method: str = ""
    """``quant_method``; "" where there is no table."""
    schemes: tuple[Scheme, ...] = ()
    others: tuple[str, ...] = ()
    """Formats of weights that raymerge does not read, each in a few words."""
    power_of_two: bool = False
    """Whether scales are said to be powers of two (``scale_fmt: ue8m0``)."""
    plain: Modules = field(default_factory=Modules)
    is_stored: bool = True
    """Whether weights are said to be stored as codes (compressed-tensors can also describe plain ones)."""
    scales_inputs: bool = False
    """Whether each quantised module is said to store the scale of its inputs."""
    groups: tuple[Group, ...] = ()
    """What is said of some modules each; () where all that is quantised is alike."""
    wrong: tuple[str, ...] = ()
    """What cannot be meant, each as the end of a sentence that begins with ``quantization_config``."""
    is_read: bool = True
    """Whether there is no table, or one of a method that is known."""

    def of(self, module: str) -> Declared | None:
        """What it says of one module's weight, were it no plain one; None where it says nothing of it.

        A path counts before a pattern, and both before the name of a class, which is taken for that of every
        module: nothing in a checkpoint tells of classes.
        """
        if not self.groups:
            return self
        by_name = (each for each in self.groups if module in each.modules.exact)
        by_pattern = (each for each in self.groups if each.modules.lists(module))
        by_class = (each for each in self.groups if each.is_of_class)
        group = next(chain(by_name, by_pattern, by_class), None)
        return None if group is None else group.says

    def allows(self, form: Format, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
        """Whether some scheme means a tensor [..., rows, columns] of this format and these blocks."""
        return any(scheme.allows(form, block, shape) for scheme in self.schemes)

    def __str__(self) -> str:
        known = [str(scheme) for scheme in self.schemes]
        return f"{self.method} ({', '.join([*known, *self.others]) or 'no weights'})"


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that a table of compressed-tensors speaks of together."""

    modules: Modules
    is_of_class: bool
    """Whether it names a class of modules (``Linear``), and with it those that no group names."""
    says: Declared


class GroupWeights(NamedTuple):
    """What a group of compressed-tensors says of its weights, which are symmetric and in their own order."""

    kind: tuple[Any, Any]
    strategy: Any
    group: int | None
    """``group_size``, where that is a number above 0."""
    block_structure: Any


def unknown_fields(table: Mapping[str, Any], known: frozenset[str]) -> Iterator[str]:
    """What is said under fields that are not understood."""
    for key, value in table.items():
        if key not in known and not _is_empty(value):
            yield f"has {brief(key)}, which is not understood: what is stored may mean something else"


def _is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_empty(each) for each in value.values())
    return value is None or value is False or value == "" or value == []


def names_in(table: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    listed = next((table[key] for key in keys if table.get(key)), ())
    return tuple(each for each in listed if isinstance(each, str)) if isinstance(listed, list) else ()


def plain_modules(names: Iterable[str]) -> tuple[Modules, tuple[str, ...]]:
    """Names as transformers reads ``modules_to_not_convert``: paths, ends of paths, or regular expressions.

    It also takes an end that is no whole word; that is left out, because other readers take none of these.
    The second result is what cannot be meant, as in ``Declared.wrong``.
    """
    parts = frozenset(name for name in names if _NO_PATTERN.fullmatch(name))
    compiled, wrong = _compiled([name for name in names if name not in parts], boundary=_BOUNDARY)
    return Modules(parts=parts, patterns=compiled), wrong


def matched_modules(names: Iterable[str]) -> tuple[Modules, tuple[str, ...]]:
    """Names as compressed-tensors reads them: whole paths, and regular expressions behind ``re:``."""
    listed = tuple(names)
    exact = frozenset(name for name in listed if not name.startswith("re:"))
    patterns, wrong = _compiled([name.removeprefix("re:") for name in listed if name.startswith("re:")])
    return Modules(exact=exact, patterns=patterns), wrong


def _compiled(
    patterns: Sequence[str], boundary: str = ""
) -> tuple[tuple[ForeignPattern, ...], tuple[str, ...]]:
    """The patterns, and what is none; most become one, so that a long list costs a path little more."""
    alone, joined, wrong = [], [], []
    for pattern in patterns:
        # Flags for a whole pattern would be for all that it is joined with.
        scoped = f"(?i:{pattern[4:]})" if pattern.startswith("(?i)") else f"(?:{pattern})"
        text = f"{scoped}{boundary}"
        try:
            compiled = foreign_pattern(text)
        except ValueError:
            wrong.append(f"lists {brief(pattern)}, which is no regular expression")
            continue
        if _REFERENCE.search(pattern):
            alone.append(compiled)
        else:
            joined.append(text)
    together = [foreign_pattern("|".join(joined))] if joined else []
    return (*together, *alone), tuple(wrong)


def _ends(module: str) -> Iterator[str]:
    """The path, and what it begins and ends with in whole words."""
    yield module
    for place, mark in enumerate(module):
        if mark == ".":
            yield module[:place]
            yield module[place + 1 :]


def block_in(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    texts = [str(each) for each in value]
    if not all(text.isascii() and text.isdigit() and len(text) < 10 and int(text) for text in texts):
        return None
    return int(texts[0]), int(texts[1])


def brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
