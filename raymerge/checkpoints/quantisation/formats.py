"""The known quantisation methods.

A new format is a file beside this, and a line here (or in ``compressed_tensors``, if that publishes it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raymerge.checkpoints.quantisation.block_codec import Codec
from raymerge.checkpoints.quantisation.compressed_tensors import COMPRESSED_TENSORS
from raymerge.checkpoints.quantisation.config import Declared, brief
from raymerge.checkpoints.quantisation.detect import QuantisedWeights, QuantMethod, Search
from raymerge.checkpoints.quantisation.encoding import Format
from raymerge.checkpoints.quantisation.fp8 import FP8
from raymerge.checkpoints.quantisation.mxfp4 import GPT_OSS
from raymerge.checkpoints.source import Checkpoint

_METHODS: tuple[QuantMethod, ...] = (COMPRESSED_TENSORS, FP8, GPT_OSS)


def formats() -> Mapping[Format, Codec]:
    return {form: codec for method in _METHODS for form, codec in method.formats.items()}


def format_named(name: str) -> Format:
    """Raises ValueError: no format has this name in plans."""
    named = next((form for form in formats() if form.name == name), None)
    if named is None:
        raise ValueError(f"{name!r} is no format of codes")
    return named


def codec_of(form: Format) -> Codec:
    return formats()[form]


def read_declared(tables: Sequence[Any]) -> Declared:
    """Parse the quantisation tables of a config; of several, the first counts."""
    table = next(iter(tables), None)
    if table is None:
        return Declared()
    if not isinstance(table, Mapping):
        wrong = (f"is {brief(table)!r}, not a table of fields",)
        return Declared("no table of fields", wrong=wrong, is_read=False)
    name = str(table.get("quant_method") or "")
    if not name:
        name = COMPRESSED_TENSORS.name if "config_groups" in table else "a method without a name"
    method = next((each for each in _METHODS if each.name == name), None)
    return Declared(name[:60], is_read=False) if method is None else method.read_table(table)


def packed_tensors(checkpoint: Checkpoint, tables: Sequence[Any]) -> QuantisedWeights:
    """Find what is stored as codes with scales.

    ``tables`` are the config's quantisation tables, at the top and in sections. With an unsupported method
    (GPTQ, AWQ, bitsandbytes ...) nothing is found and nothing is a fault."""
    declared = read_declared(tables)
    search = Search(checkpoint.name, checkpoint.tensors, checkpoint.shapes, declared, checkpoint.is_raw)
    return search.run(_METHODS)
