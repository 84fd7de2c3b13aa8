"""Stacks of layers, found from the numbers in tensor names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymerge.architectures.rules import Rules, load_rules
from raymerge.architectures.sections import config_int

_MOST_DIGITS = 9
"""Longer numbers count no layers; Python refuses to read one of thousands of digits."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A run of numbered layers under one prefix."""

    prefix: str
    """Path before the layer number, such as ``model.layers``."""
    num_layers: int
    """Layers 0 to ``num_layers - 1``; multi-token-prediction layers behind them are not counted."""
    is_main: bool
    """Whether it is the text decoder that the config's number of layers speaks of."""


@dataclass(slots=True)
class _Seen:
    numbers: set[int]
    mtp_numbers: set[int]


def stacks(names: Iterable[str], config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """The layer stacks of a checkpoint in order of first appearance; at most one of them is the main one.

    A prefix is one when the word before the number says so, or when its numbers run from 0 without a hole.
    """
    rules = load_rules(str(config.get("model_type") or "") or None)
    found = {
        prefix: seen
        for prefix, seen in _numbers(names, rules).items()
        if _is_named(prefix, rules) or seen.numbers == set(range(len(seen.numbers)))
    }
    main = _main(found, config, rules)
    return tuple(
        Stack(prefix, main[1], True)
        if main and main[0] == prefix
        else Stack(prefix, max(seen.numbers) + 1, False)
        for prefix, seen in found.items()
    )


def layer_place(path: Sequence[str]) -> int | None:
    """Index of the layer number in a name's path: its first number, unless that counts experts."""
    for index, word in enumerate(path):
        if word.isdecimal() and word.isascii() and len(word) <= _MOST_DIGITS:
            return None if index and path[index - 1] == "experts" else index
    return None


def rename_layer(name: str, stack_prefix: str, new_layer: int) -> str:
    """The name of the same tensor in another layer of its stack.

    Raises:
        ValueError: the tensor is in no layer of that stack.
    """
    head = f"{stack_prefix}." if stack_prefix else ""
    number, dot, rest = name.removeprefix(head).partition(".")
    if not name.startswith(head) or not (number.isdecimal() and number.isascii()):
        raise ValueError(f"{name} is in no layer of {stack_prefix or 'the top'}")
    return f"{head}{new_layer}{dot}{rest}"


def _numbers(names: Iterable[str], rules: Rules) -> dict[str, _Seen]:
    found: dict[str, _Seen] = {}
    for name in names:
        path = name.split(".")
        place = layer_place(path)
        if place is None:
            continue
        seen = found.setdefault(".".join(path[:place]), _Seen(set(), set()))
        number = int(path[place])
        seen.numbers.add(number)
        if number not in seen.mtp_numbers and not rules.mtp.isdisjoint(path):
            seen.mtp_numbers.add(number)
    return found


def _is_named(prefix: str, rules: Rules) -> bool:
    return prefix.rpartition(".")[2] in rules.layer_words


def _main(found: Mapping[str, _Seen], config: Mapping[str, Any], rules: Rules) -> tuple[str, int] | None:
    """Prefix and number of layers of the main stack."""
    fitting: list[tuple[str, int]] = []
    # In a vision or audio encoder on its own nothing stands beside its layers.
    others = [prefix for prefix in found if not _is_aside(prefix, rules)] or list(found)
    plain = [prefix for prefix in others if _is_named(prefix, rules)] or others
    for prefix in plain:
        count = _declared(prefix, config, rules)
        beyond = {number for number in found[prefix].numbers if count is not None and number >= count}
        if count is None and len(plain) == 1:
            fitting.append((prefix, max(found[prefix].numbers) + 1))
        elif (
            count is not None
            and max(found[prefix].numbers) + 1 - len(beyond) == count
            and (not beyond or _are_mtp(beyond, found[prefix], config, rules))
        ):
            fitting.append((prefix, count))
    decoders = [each for each in fitting if "encoder" not in each[0].split(".")] or fitting
    return decoders[0] if len(decoders) == 1 else None


def _is_aside(prefix: str, rules: Rules) -> bool:
    """Vision, audio and multi-token-prediction layers are beside the text decoder."""
    path = prefix.split(".")
    is_text = rules.vision.isdisjoint(path) and rules.mtp.isdisjoint(path)
    return not is_text or any(word.startswith(("audio", "speech", "talker")) for word in path)


def _declared(prefix: str, config: Mapping[str, Any], rules: Rules) -> int | None:
    words, depth = prefix.split("."), rules.depth
    if "decoder" in words:
        return config_int(config, (*depth.decoder_counts, *depth.counts))
    if "encoder" in words:
        return config_int(config, (*depth.encoder_counts, *depth.counts))
    return config_int(config, depth.counts)


def _are_mtp(beyond: set[int], seen: _Seen, config: Mapping[str, Any], rules: Rules) -> bool:
    declared = config_int(config, rules.depth.mtp_counts)
    return beyond <= seen.mtp_numbers or declared == len(beyond)
