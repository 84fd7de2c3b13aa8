"""What the output's config says of quantisation: the same as the tensors that are written."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raymerge.architectures.sections import text_path
from raymerge.checkpoints.packing import Format
from raymerge.planner.expressions import Output
from raymerge.planner.sources import Source

_TABLES = ("quantization_config", "compression_config")
_LISTS = ("modules_to_not_convert", "ignore")
"""Fields that list modules which are not quantised; compressed-tensors has the second."""
_WEIGHT = ".weight"


def quantisation_config(
    config: Mapping[str, Any], donor: Source, outputs: Sequence[Output]
) -> Mapping[str, Any]:
    """The config with tables of quantisation that fit the output: none where nothing is quantised.

    Args:
        config: the donor's, with what else the merge changes.
        donor: which source it comes from.
        outputs: every tensor of the output.
    """
    packs = donor.checkpoint.packs
    known = packs.packed if packs is not None else {}
    formats = {output.packed.packing.format for output in outputs if output.packed is not None}
    if packs is None or not (known or formats):
        return config
    result = copy.deepcopy(dict(config))
    if not formats or not formats <= {each.packing.format for each in known.values()}:
        result = _without_tables(config)
        fresh = _fresh_table(formats, outputs)
        return {**result, **({_TABLES[0]: fresh} if fresh else {})}
    plain = [_module(each) for each in outputs if each.packed is None and each.name in known]
    for table, section in _tables(result) if plain else ():
        _list_plain(section[table], plain)
    return result


def config_of_copies(config: Mapping[str, Any], outputs: Sequence[Output]) -> Mapping[str, Any]:
    """The config without tables of quantisation where no tensor of the output can be codes.

    Args:
        config: as the donor has it, with what else changes.
        outputs: every tensor of the output; codes among them are copied as they are stored.
    """
    return _without_tables(config) if all(output.dtype.is_mergeable for output in outputs) else config


def _without_tables(config: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    for table, section in _tables(result):
        del section[table]
    return result


def _tables(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of each table of quantisation, and the section that it is in."""
    section, path = config, text_path(config)
    for depth in range(len(path) + 1):
        section = section[path[depth - 1]] if depth else config
        yield from ((table, section) for table in _TABLES if section.get(table))


def _fresh_table(formats: set[Format], outputs: Sequence[Output]) -> dict[str, Any]:
    """A table for what no source was quantised as; {} where one table cannot say it, or need not."""
    if formats != {Format.FP8_BLOCK}:
        return {}
    blocks = [output.packed.packing.block for output in outputs if output.packed is not None]
    matrices = (each for each in outputs if each.packed is None and len(each.shape) == 2)
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(blocks[0]),
        "modules_to_not_convert": [_module(each) for each in matrices if each.name.endswith(_WEIGHT)],
    }


def _list_plain(table: dict[str, Any], modules: Sequence[str]) -> None:
    """Add modules to those that a table leaves plain."""
    usual = "ignore" if "config_groups" in table else "modules_to_not_convert"
    key = next((each for each in _LISTS if each in table), usual)
    listed = list(table.get(key) or ())
    table[key] = [*listed, *(each for each in modules if each not in listed)]


def _module(output: Output) -> str:
    return output.name.removesuffix(_WEIGHT)
