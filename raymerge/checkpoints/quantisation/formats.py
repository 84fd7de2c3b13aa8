"""The known quantisation methods.

A new format is a file beside this, and a line here (or in ``compressed_tensors``, if that publishes it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raymerge.checkpoints.quantisation.block_codec import Codec
from raymerge.checkpoints.quantisation.compressed_tensors import COMPRESSED_TENSORS
from raymerge.checkpoints.quantisation.config import Declared, brief
from raymerge.checkpoints.quantisation.detect import HF_QUANT_CONFIG, QuantisedWeights, QuantMethod, Search
from raymerge.checkpoints.quantisation.encoding import Format, QuantSpec
from raymerge.checkpoints.quantisation.modelopt import MODELOPT, NVIDIA_FP8, contradiction, plain_beside
from raymerge.checkpoints.quantisation.mxfp4 import DEEPSEEK_V4, GPT_OSS
from raymerge.checkpoints.source import Checkpoint

_MEND_BOTH = "Mend the one that is wrong, or take both files from the place the weights come from."
_METHODS: tuple[QuantMethod, ...] = (COMPRESSED_TENSORS, NVIDIA_FP8, DEEPSEEK_V4, GPT_OSS, MODELOPT)


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
        fault = f"is {brief(table)!r}, not a table of fields"
        return Declared("no table of fields", contradictions=(fault,), is_read=False)
    method = method_of(table)
    if method is None:
        return Declared(str(table.get("quant_method") or "a method without a name")[:60], is_read=False)
    return method.read_table(table)


def method_of(table: Any) -> QuantMethod | None:
    """The method that a table is of; None where it is not read."""
    if not isinstance(table, Mapping):
        return None
    name = str(table.get("quant_method") or "")
    if not name and "config_groups" in table:
        return COMPRESSED_TENSORS
    return next((each for each in _METHODS if each.owns(name)), None)


def fresh_table(
    quant_specs: Mapping[str, QuantSpec], cache: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The table for modules that are stored so, of whichever method has one; None where none says all."""
    made = (each.fresh_table(quant_specs, cache) for each in _METHODS)
    return next(filter(None, made), None)


def packed_tensors(checkpoint: Checkpoint, tables: Sequence[Any]) -> QuantisedWeights:
    """Find what is stored as codes with scales.

    ``tables`` are the config's quantisation tables, at the top and in sections. With an unsupported method
    (GPTQ, AWQ, bitsandbytes ...) nothing is found and nothing is a fault."""
    declared = read_declared(tables)
    table = next((each for each in tables[:1] if isinstance(each, Mapping)), {})
    beside = plain_beside(table, checkpoint.hf_quant_config)
    search = Search(
        checkpoint.name, checkpoint.tensors, checkpoint.shapes, declared, checkpoint.is_raw, beside
    )
    if sentence := contradiction(table, checkpoint.hf_quant_config):
        search.report(HF_QUANT_CONFIG, f"{HF_QUANT_CONFIG} {sentence}.", _MEND_BOTH)
    return search.run(_METHODS)
