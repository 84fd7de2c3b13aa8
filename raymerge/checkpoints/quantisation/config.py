"""What ``config.json`` says of quantisation: which formats it allows, and which modules it leaves plain.

Three methods are read: ``fp8`` (DeepSeek-V3's fields), ``mxfp4`` (gpt-oss) and ``compressed-tensors``
(``config_groups``). What transformers and compressed-tensors themselves make of the fields counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from raymerge.checkpoints.patterns import ForeignPattern, foreign_pattern
from raymerge.checkpoints.quantisation.encoding import Format

READ_METHODS = frozenset({"fp8", "mxfp4", "compressed-tensors"})
"""Values of ``quant_method`` whose tables are read."""
USUAL_FP8_BLOCK = (128, 128)
"""Rows and columns of a block where transformers is told of none."""

_FP8_KEYS = frozenset(
    [
        *("quant_method", "fmt", "weight_block_size", "scale_fmt", "activation_scheme", "expert_dtype"),
        *("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore", "kv_cache_scheme"),
        *("weight_per_tensor", "act_per_tensor", "dequantize"),
    ]
)
_MXFP4_KEYS = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})
_GROUPS_KEYS = frozenset(
    [
        *("quant_method", "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status"),
        *("global_compression_ratio", "version", "run_compressed", "dequantize", "use_optimized_inference"),
    ]
)
_GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_WEIGHT_KEYS = frozenset(
    [
        *(
            "num_bits",
            "type",
            "symmetric",
            "strategy",
            "group_size",
            "block_structure",
            "dynamic",
            "actorder",
        ),
        *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    ]
)
"""Fields that are understood, or change nothing of what stored codes mean. Others are empty, or refused: one
of them may say that the weights are rotated, or permuted."""
_FORMATS = frozenset(
    [
        *("dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized"),
        *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
    ]
)
"""Values of ``format`` of compressed-tensors that say how codes are stored in one way only."""
_E4M3 = frozenset({"e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn"})
_SCALE_FORMATS = (None, "float", "ue8m0")
_WHOLE = 0
_SHOWN = 60
_COMPRESSED = "compressed-tensors"
_CLASS = re.compile(r"[A-Z]\w*")
_NO_PATTERN = re.compile(r"[\w.-]*")
# Groups have other numbers in a pattern that is joined from several.
_REFERENCE = re.compile(r"\\[0-9]|\(\?P|\(\?\(")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


@dataclass(frozen=True, slots=True)
class Scheme:
    """One format that a config allows for weights."""

    format: Format
    """What it is."""
    block: tuple[int, int] | None
    """Rows and columns of a block; 0 is as many as the matrix has, and None allows any."""

    def allows(self, form: Format, block: tuple[int, int], shape: tuple[int, ...]) -> bool:
        """Whether a tensor [..., rows, columns] of this format and these blocks is meant."""
        if form is not self.format or self.block is None:
            return form is self.format
        sizes = zip(self.block, block, shape[-2:], strict=True)
        return all(said == have or (said == _WHOLE and have == whole) for said, have, whole in sizes)

    def __str__(self) -> str:
        if self.block is None or _WHOLE in self.block:
            return self.format.word
        return f"{self.format.word} with blocks of {self.block[0]}x{self.block[1]}"


@dataclass(frozen=True, slots=True)
class Modules:
    """Modules that a config lists."""

    exact: frozenset[str] = frozenset()
    """Paths that are meant whole."""
    parts: frozenset[str] = frozenset()
    """Paths that are also meant as the beginning or the end of longer ones, in whole words."""
    patterns: tuple[ForeignPattern, ...] = ()
    """Matched from the start of a path."""

    def lists(self, module: str) -> bool:
        """Whether the module of this path is listed."""
        if module in self.exact or any(pattern.matches(module) for pattern in self.patterns):
            return True
        return bool(self.parts) and any(each in self.parts for each in _ends(module))


@dataclass(frozen=True, slots=True)
class Declared:
    """What one config says."""

    method: str = ""
    """``quant_method``; "" where there is no table."""
    schemes: tuple[Scheme, ...] = ()
    """Formats that weights may have."""
    others: tuple[str, ...] = ()
    """Formats of weights that raymerge does not read, each in a few words."""
    power_of_two: bool = False
    """Whether scales are said to be powers of two (``scale_fmt: ue8m0``)."""
    plain: Modules = field(default_factory=Modules)
    """Modules that are said to be plain."""
    is_stored: bool = True
    """Whether weights are said to be stored as codes (compressed-tensors can also describe plain ones)."""
    scales_inputs: bool = False
    """Whether each quantised module is said to store the scale of its inputs."""
    groups: tuple[Group, ...] = ()
    """What is said of some modules each; () where all that is quantised is alike."""
    wrong: tuple[str, ...] = ()
    """What cannot be meant, each as the end of a sentence that begins with ``quantization_config``."""

    @property
    def is_read(self) -> bool:
        """Whether there is no table, or one of a method that is known."""
        return not self.method or self.method in READ_METHODS

    @property
    def fp8_blocks(self) -> tuple[tuple[int, int], ...]:
        """Blocks of FP8 that are named, in the order of the table; the usual one where none is."""
        named = (each.block for each in self.schemes if each.format is Format.FP8_BLOCK)
        return tuple(dict.fromkeys(block for block in named if block)) or (USUAL_FP8_BLOCK,)

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
        found = next(chain(by_name, by_pattern, by_class), None)
        return None if found is None else found.says

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
    """Those that it names."""
    is_of_class: bool
    """Whether it names a class of modules (``Linear``), and with it those that no group names."""
    says: Declared
    """What it says of them: one scheme at most."""


def read_declared(tables: Sequence[Any]) -> Declared:
    """What the quantisation tables of a config say; of several, the first counts.

    Args:
        tables: ``quantization_config`` or ``compression_config``, from the top and from sections.
    """
    table = next(iter(tables), None)
    if table is None:
        return Declared()
    if not isinstance(table, Mapping):
        return Declared("no table of fields", wrong=(f"is {_brief(table)!r}, not a table of fields",))
    method = str(table.get("quant_method") or "")
    if not method:
        method = _COMPRESSED if "config_groups" in table else "a method without a name"
    if method == "fp8":
        return _read_fp8(table)
    if method == "mxfp4":
        plain, wrong = _plain_modules(_names(table, "modules_to_not_convert"))
        wrong = (*wrong, *_unknown(table, _MXFP4_KEYS))
        return Declared(method, (Scheme(Format.MXFP4, None),), plain=plain, wrong=wrong)
    if method == _COMPRESSED:
        return _read_groups(table)
    return Declared(method[:_SHOWN])


def _read_fp8(table: Mapping[str, Any]) -> Declared:
    plain, wrong = _plain_modules(_names(table, "modules_to_not_convert", "ignored_layers", "ignore"))
    block = _pair(table.get("weight_block_size"))
    schemes: tuple[Scheme, ...] = (Scheme(Format.FP8_BLOCK, block),)
    if table.get("weight_block_size") is None:
        # Scales of whole tensors and rows are told from their shapes alone.
        schemes = (
            *(Scheme(Format.FP8_TENSOR, None), Scheme(Format.FP8_CHANNEL, None)),
            Scheme(Format.FP8_BLOCK, USUAL_FP8_BLOCK),
        )
    elif block is None:
        said = _brief(table["weight_block_size"])
        wrong = (*wrong, f"gives weight_block_size as {said}, not as two whole numbers above 0")
    if table.get("fmt", "e4m3") not in _E4M3:
        wrong = (*wrong, f"gives fmt as {_brief(table['fmt'])}; only e4m3 is read")
    if table.get("scale_fmt") not in _SCALE_FORMATS:
        wrong = (*wrong, f"gives scale_fmt as {_brief(table['scale_fmt'])}; only ue8m0 and float are read")
    wrong = (*wrong, *_unknown(table, _FP8_KEYS))
    return Declared(
        "fp8",
        schemes,
        power_of_two=table.get("scale_fmt") == "ue8m0",
        plain=plain,
        scales_inputs=table.get("activation_scheme") == "static",
        wrong=wrong,
    )


def _read_groups(table: Mapping[str, Any]) -> Declared:
    groups = table.get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    told = [each for each in found if isinstance(each, Mapping) and isinstance(each.get("weights"), Mapping)]
    plain, wrong = _matched(_names(table, "ignore"))
    wrong = (*wrong, *_unknown(table, _GROUPS_KEYS | {"sparsity_config"}), *_unread_sparsity(table))
    wrong = (*wrong, *_unknown_format(table))
    read = [_group(each, plain) for each in told]
    parts = [group.says for group, _ in read]
    return Declared(
        _COMPRESSED,
        tuple(dict.fromkeys(scheme for each in parts for scheme in each.schemes)),
        others=tuple(dict.fromkeys(words for each in parts for words in each.others)),
        plain=plain,
        is_stored=table.get("format") != "dense",
        scales_inputs=any(each.scales_inputs for each in parts),
        groups=tuple(group for group, _ in read),
        wrong=(*wrong, *(sentence for _, sentences in read for sentence in sentences)),
    )


def _group(group: Mapping[str, Any], plain: Modules) -> tuple[Group, tuple[str, ...]]:
    """What one group says, and what of it cannot be meant."""
    targets, weights = _names(group, "targets"), group["weights"]
    classes = [each for each in targets if _CLASS.fullmatch(each)]
    modules, wrong = _matched(each for each in targets if each not in classes)
    scheme = _scheme(weights)
    says = Declared(
        _COMPRESSED,
        (scheme,) if scheme else (),
        others=() if scheme else (_in_words(weights),),
        plain=plain,
        scales_inputs=_scales_inputs(group.get("input_activations")),
    )
    wrong = (*wrong, *_unknown(group, _GROUP_KEYS), *_unknown(weights, _WEIGHT_KEYS), *_unknown_format(group))
    return Group(modules, bool(classes) or not targets, says), wrong


def _unknown(table: Mapping[str, Any], known: frozenset[str]) -> Iterator[str]:
    """What is said under fields that are not understood."""
    for key, value in table.items():
        if key not in known and not _is_empty(value):
            yield f"has {_brief(key)}, which is not understood: what is stored may mean something else"


def _is_empty(value: Any) -> bool:
    """Whether a field says nothing: a table of empty tables, too."""
    if isinstance(value, Mapping):
        return all(_is_empty(each) for each in value.values())
    return value is None or value is False or value == "" or value == []


def _unknown_format(table: Mapping[str, Any]) -> Iterator[str]:
    if table.get("format") is not None and str(table["format"]) not in _FORMATS:
        yield f"gives format as {_brief(table['format'])}, which is not read"


def _unread_sparsity(table: Mapping[str, Any]) -> Iterator[str]:
    """Weights of which only those that are not 0 are stored."""
    sparsity = table.get("sparsity_config")
    form = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if form not in (None, "dense"):
        yield f"says in sparsity_config that weights are stored as {_brief(form)}, which is not read"


def _scales_inputs(activations: Any) -> bool:
    """Whether inputs have a stored scale; a dynamic one is "local" where each block has its own beside it."""
    return isinstance(activations, Mapping) and activations.get("dynamic", False) is not True


def _scheme(weights: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a group's weights, or None where raymerge does not read such."""
    if weights.get("symmetric", True) is not True or _is_reordered(weights):
        return None
    kind = (weights.get("type", "int"), weights.get("num_bits", 8))
    strategy, size = weights.get("strategy"), weights.get("group_size")
    group = size if isinstance(size, int) and size > 0 else None
    strategy = strategy or ("group" if group else "channel" if size == -1 else "tensor")
    if kind == ("float", 8):
        return _fp8_scheme(strategy, group, weights.get("block_structure"))
    if kind == ("int", 4) and strategy == "group" and group:
        return Scheme(Format.INT4, (1, group))
    if kind == ("int", 4) and strategy == "channel":
        return Scheme(Format.INT4, (1, _WHOLE))
    if kind == ("float", 4) and group in (16, 32):
        return Scheme(Format.NVFP4 if group == 16 else Format.MXFP4_ROWS, None)
    return None


def _is_reordered(weights: Mapping[str, Any]) -> bool:
    """Whether groups are not runs of neighbours. The other orders of quantising leave columns in place."""
    return weights.get("actorder") not in (None, "weight", "static")


def _fp8_scheme(strategy: Any, group: int | None, structure: Any) -> Scheme | None:
    if strategy == "tensor":
        return Scheme(Format.FP8_TENSOR, None)
    if strategy == "channel":
        return Scheme(Format.FP8_CHANNEL, None)
    if strategy == "group" and group:
        return Scheme(Format.FP8_BLOCK, (1, group))
    # Older files write "128x128".
    block = _pair(structure.split("x") if isinstance(structure, str) else structure)
    return Scheme(Format.FP8_BLOCK, block) if strategy == "block" and block else None


def _in_words(weights: Mapping[str, Any]) -> str:
    symmetry = "" if weights.get("symmetric", True) is True else "asymmetric "
    order = ", in another order of columns" if _is_reordered(weights) else ""
    kind = f"{_brief(weights.get('num_bits', 8))}-bit {_brief(weights.get('type', 'int'))}"
    return f"{symmetry}{kind} by {_brief(weights.get('strategy'))}{order}"


def _names(table: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    listed = next((table[key] for key in keys if table.get(key)), ())
    return tuple(each for each in listed if isinstance(each, str)) if isinstance(listed, list) else ()


def _plain_modules(names: Iterable[str]) -> tuple[Modules, tuple[str, ...]]:
    """Names as transformers reads ``modules_to_not_convert``: paths, ends of paths, or regular expressions.

    It also takes an end that is no whole word; that is left out, because other readers take none of these.
    """
    parts = frozenset(name for name in names if _NO_PATTERN.fullmatch(name))
    compiled, wrong = _compiled([name for name in names if name not in parts], boundary=_BOUNDARY)
    return Modules(parts=parts, patterns=compiled), wrong


def _matched(names: Iterable[str]) -> tuple[Modules, tuple[str, ...]]:
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
            wrong.append(f"lists {_brief(pattern)}, which is no regular expression")
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


def _pair(found: Any) -> tuple[int, int] | None:
    if not isinstance(found, list) or len(found) != 2:
        return None
    texts = [str(each) for each in found]
    if not all(text.isascii() and text.isdigit() and len(text) < 10 and int(text) for text in texts):
        return None
    return int(texts[0]), int(texts[1])


def _brief(found: Any) -> str:
    text = str(found)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
