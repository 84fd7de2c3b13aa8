"""Config fields that say "every so-many-th layer", for layers in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raymerge.architectures.rules import DepthRules, Periodic
from raymerge.architectures.sections import first_int

# The one list that names the ordinary (dense) layers. It works with the period and does not override it.
_ORDINARY = "mlp_only_layers"


def restack_periods(section: dict[str, Any], layers: tuple[int, ...], depth: DepthRules) -> tuple[str, ...]:
    """Change the periodic fields of a section in place; a sentence for each that cannot say the new order."""
    return tuple(sentence for rule in depth.periodic if (sentence := _restack(section, layers, rule)))


def _restack(section: dict[str, Any], layers: tuple[int, ...], rule: Periodic) -> str | None:
    period = section.get(rule.key)
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        return None
    # A list that says it layer by layer overrides the period, and was restacked with the other lists.
    if rule.layer_types and section.get("layer_types"):
        return None
    if rule.index_list and rule.index_list != _ORDINARY and section.get(rule.index_list) is not None:
        return None
    offset = (first_int(section, [rule.offset]) or 0) if rule.offset else -rule.shift
    special = [(layer - offset) % period == 0 for layer in layers]
    if _as_period(section, rule, special, period):
        return None
    if rule.layer_types:
        section["layer_types"] = [rule.layer_types[0 if flag else 1] for flag in special]
        return None
    if rule.index_list:
        _as_list(section, rule, rule.index_list, special)
        return None
    return (
        f"{rule.key} is {period}, but in the new order the layers of that kind are "
        f"{[index for index, flag in enumerate(special) if flag]}, which no period gives."
    )


def _as_period(section: dict[str, Any], rule: Periodic, special: Sequence[bool], period: int) -> bool:
    """Say the new order with a period, the old one if possible; False if none says it."""
    for candidate in (period, *range(1, len(special) + 2)):
        for offset in range(candidate) if rule.offset else (-rule.shift,):
            if all(((index - offset) % candidate == 0) == flag for index, flag in enumerate(special)):
                section[rule.key] = candidate
                if rule.offset:
                    section[rule.offset] = offset
                return True
    return False


def _as_list(section: dict[str, Any], rule: Periodic, key: str, special: Sequence[bool]) -> None:
    if key != _ORDINARY:
        section[key] = [index for index, flag in enumerate(special) if flag]
        return
    ordinary = {index for index, flag in enumerate(special) if not flag}
    section[key] = sorted(ordinary | set(section.get(key) or ()))
    section[rule.key] = 1
