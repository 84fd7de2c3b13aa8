"""With what a model calls its layers: found by calling it with layers that only note how they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, str, torch.dtype)


@dataclass(frozen=True, slots=True)
class Call:
    """How one layer is called."""

    hidden: torch.Tensor
    """What goes through the layers: ``[1, T, hidden]``."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_named: bool
    """Whether ``hidden`` is given by name as well."""

    def make(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Call a layer so, with other hidden states of the same shape; returns the states behind it."""
        given = {"hidden_states": hidden} if self.is_named else {}
        found = layer(*(() if self.is_named else (hidden,)), *self.args, **given, **self.kwargs)
        states: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return states

    def leaves(self) -> Iterator[Any]:
        """Everything in it but the hidden states; an empty mapping counts as something."""
        yield from _leaves((self.args, dict(self.kwargs)))

    @property
    def is_plain(self) -> bool:
        """Whether it holds nothing in which layers could leave something for one another."""
        return all(isinstance(leaf, (*_PLAIN, torch.Tensor)) for leaf in self.leaves())


def recorded(run: Callable[[], object], layers: Sequence[nn.Module], *, as_tuple: bool) -> tuple[Call, ...]:
    """How ``run`` calls layers, none of which does anything but to hand on its hidden states.

    Args:
        as_tuple: whether the layers answer with a tuple of the states, as older families expect.
    """
    calls: list[Call] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        is_named = not args
        hidden = kwargs.pop("hidden_states") if is_named else args[0]
        calls.append(Call(hidden, args[1:], kwargs, is_named))
        return (hidden,) if as_tuple else hidden

    with _replaced(layers, note):
        run()
    return tuple(calls)


def is_chain(calls: Sequence[Call], num_layers: int) -> bool:
    """Whether every layer was called once, with just what the layer before it handed on."""
    return len(calls) == num_layers and all(call.hidden is calls[0].hidden for call in calls)


def are_alike(calls: Sequence[Call], others: Sequence[Call]) -> bool:
    """Whether layers are called with equal arguments, the hidden states not counted."""
    return all(
        _same(list(call.leaves()), list(other.leaves())) for call, other in zip(calls, others, strict=True)
    )


def tensors_of(calls: Sequence[Call]) -> Sequence[torch.Tensor]:
    """The tensors among the arguments, each once, the hidden states not counted."""
    found = {id(leaf): leaf for call in calls for leaf in call.leaves() if isinstance(leaf, torch.Tensor)}
    return tuple(found.values())


@contextmanager
def _replaced(layers: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Have layers do something else. They stay in their place, as models ask them for their attributes."""
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict) and value:
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
