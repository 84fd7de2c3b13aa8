"""Input made by somebody who means harm: values and bytes that were changed, and an end to waiting for it."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from raymerge.errors import RaymergeError

HANG_SECONDS = 60

DEEP: Any = []
for _ in range(80):
    DEEP = [DEEP]

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 31, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**70), 10**400),
    *(0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "x", "0", "-1", "1e9", "\0", "../../x", "/etc/passwd"),
    *("é", "\U0001f600", "\x1b[2J", "[red]", "a" * 300),
    *("re:(a+)+$", "re:[", "*", "{}", "null", "model.layers.0.self_attn.q_proj", "weight"),
    *([], [[]], [0], [-1], [1, 2, 3], ["a", 1]),
    *({}, {"": None}, {"a": {"b": []}}, {"0": 1}, [{}], [None], DEEP),
)


class Hung(BaseException): ...


def bounded(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=timedelta(seconds=HANG_SECONDS),
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def ends() -> Iterator[None]:

    def give_up(_: int, __: FrameType | None) -> None:
        raise Hung(f"still at it after {HANG_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refuses_or_takes(read: Callable[[], object]) -> bool:
    """Whether input is taken, or refused by an error of ours with a sentence. Anything else is raised."""
    with ends():
        try:
            read()
        except RaymergeError as error:
            if not str(error).strip():
                raise AssertionError("refused without a word") from error
            return False
    return True


@st.composite
def changed_values(draw: st.DrawFn, sample: Any, *, most: int = 3, names: Sequence[str] = ()) -> Any:
    """``sample``, plain JSON values, with up to ``most`` places changed, some to have keys of ``names``."""
    value = copy.deepcopy(sample)
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(value))
        if not places:
            return draw(st.sampled_from(VALUES))
        holder, key = draw(st.sampled_from(places))
        _change(draw, holder, key, (places, (*_NAMES, *names)))
    return value


@st.composite
def changed_bytes(draw: st.DrawFn, sample: bytes) -> bytes:
    data = bytearray(sample)
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.sampled_from([1, 1, 2, 4, 8, 30]))
        match draw(st.sampled_from(["write", "flip", "take", "put", "repeat", "cut"])):
            case "write":
                new = draw(st.sampled_from(_RUNS))
                data[at : at + len(new)] = new
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "take":
                del data[at : at + length]
            case "put":
                data[at:at] = draw(st.sampled_from(_RUNS))
            case "repeat":
                data[at:at] = data[at : at + length]
            case "cut" if draw(st.booleans()):
                del data[at:]
    return bytes(data)


_RUNS = (
    *(b"\0", b"\xff", b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7),
    *(b"[", b"{", b"}", b'"', b",", b":", b"-", b"\n"),
    *(b"1e999", b"NaN", b"9" * 30, b"null", b"\\ud800", b"\xed\xa0\x80"),
    *(b"!!python/object", b"*a", b"&a ", b"<<"),
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _change(draw: st.DrawFn, holder: Any, key: Any, given: tuple[Sequence[Any], Sequence[str]]) -> None:
    places, names = given
    match draw(st.sampled_from(["put", "put", "put", "move", "take", "add", "rename"])):
        case "put":
            holder[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        case "move":
            other, at = draw(st.sampled_from(places))
            holder[key] = copy.deepcopy(other[at])
        case "take":
            del holder[key]
        case "add" if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(draw(st.sampled_from([*VALUES, holder[key]]))))
        case "add":
            new = copy.deepcopy(draw(st.sampled_from([*VALUES, holder[key]])))
            holder[draw(st.sampled_from(names))] = new
        case "rename" if isinstance(holder, dict):
            holder[draw(st.sampled_from(names))] = holder.pop(key)


_NAMES = (
    *("", "x", "0", "-1", "9" * 20, "__metadata__", "../x", "é", "\0"),
    *("weight", "model", "text_config", "num_hidden_layers"),
)
