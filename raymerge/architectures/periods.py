"""Config fields that say "every so-many-th layer", for layers in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raymerge.architectures.parents import LAYER_TYPES, ORDINARY, Origin, period
from raymerge.architectures.rules import DepthRules, Periodic


def restack_periods(section: dict[str, Any], origins: Sequence[Origin], depth: DepthRules) -> tuple[str, ...]:
    """Change the periodic fields of a section in place; a sentence for each that cannot say the new order."""
    return tuple(sentence for rule in depth.periodic if (sentence := _restack(section, origins, rule)))


def _restack(section: dict[str, Any], origins: Sequence[Origin], rule: Periodic) -> str | None:
    own = period(section, rule)
    theirs = next((value for each in origins if (value := period(each.said.section, rule))), None)
    wanted = own or theirs
    if wanted is None or _is_overridden(section, rule):
        return None
    special = [origin.is_special(rule) for origin in origins]
    silent = next((origin.said.name for origin in origins if origin.is_special(rule) is None), None)
    if silent is not None or (own is None and section.get(rule.key) is not None):
        return (
            f"{rule.key} is {wanted} in one model, but {silent or 'the donor'} does not say with a period "
            "which layers are of that kind, and one config has to say it for all layers."
        )
    return _fold(section, rule, [flag is True for flag in special], wanted)


def _is_overridden(section: dict[str, Any], rule: Periodic) -> bool:
    """Whether a list says it layer by layer; such a list was restacked with the others."""
    if rule.layer_types and section.get(LAYER_TYPES):
        return True
    listed = rule.index_list is not None and rule.index_list != ORDINARY
    return listed and section.get(str(rule.index_list)) is not None


def _fold(section: dict[str, Any], rule: Periodic, special: list[bool], wanted: int) -> str | None:
    if _as_period(section, rule, special, wanted):
        return None
    if rule.layer_types:
        section[LAYER_TYPES] = [rule.layer_types[0 if flag else 1] for flag in special]
        return None
    if rule.index_list:
        _as_list(section, rule, rule.index_list, special)
        return None
    return (
        f"{rule.key} is {wanted}, but in the new order the layers of that kind are "
        f"{[index for index, flag in enumerate(special) if flag]}, which no period gives."
    )


def _as_period(section: dict[str, Any], rule: Periodic, special: Sequence[bool], wanted: int) -> bool:
    """Say the new order with a period, the old one if possible; False if none says it."""
    for candidate in (wanted, *range(1, len(special) + 2)):
        for offset in range(candidate) if rule.offset else (-rule.shift,):
            if all(((index - offset) % candidate == 0) == flag for index, flag in enumerate(special)):
                section[rule.key] = candidate
                if rule.offset:
                    section[rule.offset] = offset
                return True
    return False


def _as_list(section: dict[str, Any], rule: Periodic, key: str, special: Sequence[bool]) -> None:
    if key != ORDINARY:
        section[key] = [index for index, flag in enumerate(special) if flag]
        return
    ordinary = {index for index, flag in enumerate(special) if not flag}
    section[key] = sorted(ordinary | set(section.get(key) or ()))
    section[rule.key] = 1
