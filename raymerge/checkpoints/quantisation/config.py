"""What ``config.json`` says of quantisation: the allowed formats, and the modules left unquantised.

Each quantisation method parses its own table into a ``Declared``, reading fields as transformers and
compressed-tensors do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from raymerge.checkpoints.json_files import ForeignPattern, foreign_pattern
from raymerge.checkpoints.quantisation.encoding import WHOLE, Format

_SHOWN = 60
_GLOB = re.compile(r"[*?]")
_NO_PATTERN = re.compile(r"[\w.-]*")
# Groups have other numbers in a pattern that is joined from several.
_REFERENCE = re.compile(r"\\[0-9]|\(\?P|\(\?\(")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


@dataclass(frozen=True, slots=True)
class Scheme:
    format: Format
    block: tuple[int, int] | None
    """Rows and columns of a block, ``WHOLE`` for the matrix's size; None allows any."""
    is_stated: bool = True
    """Whether the config states it, and does not only leave it open."""

    def allows(self, form: Format, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
        """Whether this allows a tensor [..., rows, columns] of the format and blocks."""
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
    exact: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    """Paths; each also matches as the beginning or the end of a longer path, in whole words."""
    patterns: tuple[ForeignPattern, ...] = ()
    """Matched from the start of a path."""

    def __bool__(self) -> bool:
        return bool(self.exact or self.parts or self.patterns)

    def lists(self, module: str) -> bool:
        if module in self.exact or any(pattern.matches(module) for pattern in self.patterns):
            return True
        return bool(self.parts) and any(each in self.parts for each in _ends(module))


@dataclass(frozen=True)
class Declared:
    method: str = ""
    """``quant_method``; "" without a table."""
    schemes: tuple[Scheme, ...] = ()
    others: tuple[str, ...] = ()
    """Unsupported formats of weights, as phrases."""
    power_of_two: bool = False
    """Whether scales are declared powers of two (``scale_fmt: ue8m0``)."""
    plain: Modules = field(default_factory=Modules)
    is_stored: bool = True
    """Whether weights are stored as codes (compressed-tensors can also describe unquantised ones)."""
    scales_inputs: bool = False
    """Whether each quantised module stores the scale of its inputs."""
    groups: tuple[Group, ...] = ()
    """Per-module declarations; () where all quantised modules are alike."""
    contradictions: tuple[str, ...] = ()
    """Invalid fields, each as the end of a sentence that begins with ``quantization_config``."""
    not_understood: tuple[str, ...] = ()
    """Fields by which codes may mean something else than they usually do, so that they can only be copied;
    each as in ``contradictions``."""
    is_read: bool = True
    """Whether there is no table, or one of a known method."""

    def of(self, module: str) -> Declared | None:
        """The declaration for one module's weight, if it is quantised; None where there is none.

        A path goes before a pattern, and both before a class name, which is taken for every module, since a
        checkpoint does not name classes."""
        if not self._naming:
            return self._of_others
        by_name = (each.says for each in self._naming if module in each.modules.exact)
        by_pattern = (each.says for each in self._naming if each.modules.lists(module))
        return next(by_name, None) or next(by_pattern, self._of_others)

    @cached_property
    def _naming(self) -> tuple[Group, ...]:
        return tuple(each for each in self.groups if each.modules)

    @cached_property
    def _of_others(self) -> Declared | None:
        """The declaration for modules that no group names."""
        by_class = (each.says for each in self.groups if each.is_of_class)
        return next(by_class, None) if self.groups else self

    def allows(self, form: Format, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
        """Whether some scheme allows a tensor [..., rows, columns] of the format and blocks."""
        return any(scheme.allows(form, block, shape) for scheme in self.schemes)

    def __str__(self) -> str:
        known = [str(scheme) for scheme in self.schemes if scheme.is_stated]
        return f"{self.method} ({', '.join([*known, *self.others]) or 'no weights'})"


@dataclass(frozen=True, slots=True)
class Group:
    modules: Modules
    is_of_class: bool
    """Whether it names a class of modules (``Linear``), and so every module that no other group names."""
    says: Declared


class GroupWeights(NamedTuple):
    """A compressed-tensors group's weights; columns not reordered."""

    kind: tuple[Any, Any]
    strategy: Any
    group: int | None
    """``group_size`` if above 0."""
    block_structure: Any
    scale_dtype: Any
    is_symmetric: bool = True
    """Whether 0 has the same code in all blocks."""


def unknown_fields(table: Mapping[str, Any], known: frozenset[str]) -> Iterator[str]:
    for key, value in table.items():
        if key not in known and not _is_empty(value):
            yield f"has {brief(key)}"


def unknown_values(table: Mapping[str, Any], known: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Fields with another value than those that are known of them."""
    for key, values in known.items():
        if table.get(key) is not None and table[key] not in values:
            yield f"gives {key} as {brief(table[key])}"


def _is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_empty(each) for each in value.values())
    return value is None or value is False or value == "" or value == []


def names_in(table: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    listed = next((table[key] for key in keys if table.get(key)), ())
    return tuple(each for each in listed if isinstance(each, str)) if isinstance(listed, list) else ()


def plain_modules(names: Iterable[str]) -> tuple[Modules, tuple[str, ...]]:
    """Names as transformers reads ``modules_to_not_convert``: paths, ends of paths, or regular expressions.

    Ends that are not whole words, which only transformers accepts, are ignored. The second result is the
    invalid entries, as in ``Declared.contradictions``."""
    parts = frozenset(name for name in names if _NO_PATTERN.fullmatch(name))
    compiled, wrong = _compiled([name for name in names if name not in parts], boundary=_BOUNDARY)
    return Modules(parts=parts, patterns=compiled), wrong


def matched_modules(names: Iterable[str]) -> tuple[Modules, tuple[str, ...]]:
    """Names as compressed-tensors reads them: whole paths, and regular expressions behind ``re:``."""
    listed = tuple(names)
    exact = frozenset(name for name in listed if not name.startswith("re:"))
    patterns, wrong = _compiled([name.removeprefix("re:") for name in listed if name.startswith("re:")])
    return Modules(exact=exact, patterns=patterns), wrong


def glob_modules(names: Iterable[str]) -> tuple[Modules, tuple[str, ...]]:
    """Names as ModelOpt reads them: whole paths, and globs, whose ``*`` stands for dots too."""
    listed = tuple(names)
    globs = [name for name in listed if _GLOB.search(name)]
    as_patterns = (re.escape(each).replace(r"\*", ".*").replace(r"\?", ".") for each in globs)
    patterns, wrong = _compiled([f"{each}$" for each in as_patterns])
    return Modules(exact=frozenset(listed) - frozenset(globs), patterns=patterns), wrong


def _compiled(
    patterns: Sequence[str], boundary: str = ""
) -> tuple[tuple[ForeignPattern, ...], tuple[str, ...]]:
    """The patterns and the invalid ones; most are joined into one, so that long lists match fast."""
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
    """The path, its beginnings and its ends in whole words."""
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
