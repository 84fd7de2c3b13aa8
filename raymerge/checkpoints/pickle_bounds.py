"""How large what a pickle describes would be, found out before anything is built of it.

A pickle of a few hundred bytes can describe a tuple that holds another one twice, and that one a third one
twice, forty levels deep. It takes next to no memory; but whoever takes it for the key of a map goes through
all 2**40 ends of it, and one that is a million levels deep exhausts the stack, which ends the process.
"""

from __future__ import annotations

import pickletools
from typing import Any, TypeAlias

_MAX_DEPTH = 200
_MAX_STACK = 100_000
_MAX_SIZE = 50_000_000
# pickle adds to maps by the thousand, which is what it has on its stack; the largest models have a hundred
# thousand tensors, of thirty values each.

_Extent: TypeAlias = tuple[int, int]
"""Values in a value, those that it holds several times counted as often, and levels of them."""

_ONE: _Extent = (1, 1)
_STORES = {"PUT", "BINPUT", "LONG_BINPUT"}
_ADDITIONS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_FETCHES = {"GET", "BINGET", "LONG_BINGET"}


def check_extent(description: bytes) -> None:
    """Go through the steps of a pickle without doing them.

    Raises:
        ValueError: it is no pickle, or what it describes is larger or deeper than a map of tensors.
    """
    stack: list[_Extent | None] = []
    memo: dict[int, _Extent] = {}
    for step, argument, _ in pickletools.genops(description):
        place = int(argument) if isinstance(argument, int) else 0
        if step.name in _STORES or step.name == "MEMOIZE":
            memo[len(memo) if step.name == "MEMOIZE" else place] = _top(stack)
        elif step.name in _FETCHES:
            stack.append(memo.get(place, _ONE))
        else:
            _do(step, stack)


def _do(step: Any, stack: list[_Extent | None]) -> None:
    """Take from the stack what a step takes, and put there what it makes of it."""
    taken = _taken(step, stack)
    *inner, outer = taken or [_ONE]
    size, depth = 1 + sum(each[0] for each in taken), 1 + max((each[1] for each in inner), default=0)
    # What is added to does not get deeper by that; what is made of values does.
    depth = max(depth, outer[1] + (step.name not in _ADDITIONS))
    if size > _MAX_SIZE or depth > _MAX_DEPTH:
        raise ValueError("it describes what is far larger than the file")
    if len(stack) > _MAX_STACK:
        raise ValueError("it holds back too many values at once")
    stack.extend(None if each is pickletools.markobject else (size, depth) for each in step.stack_after)


def _taken(step: Any, stack: list[_Extent | None]) -> list[_Extent]:
    wanted = list(step.stack_before)
    taken: list[_Extent] = []
    if pickletools.markobject in wanted:
        # Everything down to the last mark, the mark, and what stands before it in the list.
        while (each := _popped(stack)) is not None:
            taken.append(each)
        wanted = wanted[: wanted.index(pickletools.markobject)]
    for _ in wanted:
        each = _popped(stack)
        if each is None:
            raise ValueError("it has a mark where a value is wanted")
        taken.append(each)
    return taken


def _popped(stack: list[_Extent | None]) -> _Extent | None:
    if not stack:
        raise ValueError("it takes more values than there are")
    return stack.pop()


def _top(stack: list[_Extent | None]) -> _Extent:
    return (stack[-1] if stack else None) or _ONE
