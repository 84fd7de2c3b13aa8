"""Layer stacks, found from the numbers in tensor names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raymerge.architectures.rules import Rules, load_rules
from raymerge.architectures.sections import config_int

# Longer numbers count no layers; Python refuses to read one of thousands of digits.
_NUMBER = re.compile(r"\.([0-9]{1,9})(?![^.])")


@dataclass(frozen=True, slots=True)
class Stack:
    prefix: str
    num_layers: int
    """Without the multi-token-prediction layers behind them."""
    is_main: bool


@dataclass(slots=True)
class _Seen:
    numbers: set[int]
    mtp_numbers: set[int]


def stacks(names: Iterable[str], config: Mapping[str, Any]) -> tuple[Stack, ...]:
    """The layer stacks of a checkpoint in order of first appearance; at most one is the main one.

    A prefix counts if the word before the number says so, or if its numbers run from 0 without a hole.
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


def layer_of(name: str) -> tuple[str, int] | None:
    """Prefix and layer number of a name: its first number that does not count experts."""
    dotted = f".{name}"
    found = _NUMBER.search(dotted)
    if found is None or dotted.endswith(".experts", 0, found.start()):
        return None
    return dotted[1 : found.start()], int(found[1])


def with_layers(names: Iterable[str]) -> Iterator[tuple[str, tuple[str, int] | None]]:
    """Each name with its ``layer_of``; of consecutive names of one layer only the first is parsed."""
    place: tuple[str, int] | None = None
    begin = ""
    for name in names:
        if not (begin and name.startswith(begin)):
            place = layer_of(name)
            end = name.find(".", 0 if place is None else len(place[0]) + 1)
            begin = "" if place is None or end < 0 else name[: end + 1]
        yield name, place


def rename_layer(name: str, stack_prefix: str, new_layer: int) -> str:
    """The name of the same tensor in another layer of its stack; ValueError if it is not in that stack."""
    head = f"{stack_prefix}." if stack_prefix else ""
    number, dot, rest = name.removeprefix(head).partition(".")
    if not name.startswith(head) or not (number.isdecimal() and number.isascii()):
        raise ValueError(f"{name} is in no layer of {stack_prefix or 'the top'}")
    return f"{head}{new_layer}{dot}{rest}"


def _numbers(names: Iterable[str], rules: Rules) -> dict[str, _Seen]:
    found: dict[str, _Seen] = {}
    for name, place in with_layers(names):
        if place is None:
            continue
        prefix, number = place
        if prefix not in found:
            found[prefix] = _Seen(set(), set())
        seen = found[prefix]
        seen.numbers.add(number)
        if number not in seen.mtp_numbers and not rules.mtp.isdisjoint(name.split(".")):
            seen.mtp_numbers.add(number)
    return found


def _is_named(prefix: str, rules: Rules) -> bool:
    return prefix.rpartition(".")[2] in rules.layer_words


def _main(found: Mapping[str, _Seen], config: Mapping[str, Any], rules: Rules) -> tuple[str, int] | None:
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
