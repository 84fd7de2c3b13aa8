"""A device that computes on the processor and counts how often the host waits for it.

Its tensors say that they are elsewhere (on torch's ``meta`` device, which needs no driver), so that methods
go the way that they go on a GPU. Whoever reads a number of them waits until all that was begun before is
done, and meanwhile begins nothing new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("meta")
_CPU = torch.device("cpu")

_WAITING = frozenset(
    ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "bincount")
)
"""Operations whose result, or its size, the host knows only when the device is done."""
_INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
"""They wait where an index is a mask, for how many elements that are."""


class _Distant(torch.Tensor):
    """A tensor that is elsewhere."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> _Distant:
        far: _Distant = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=GPU
        )
        far.near = near
        return far

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} on the device outside of a count")

    def record_stream(self, stream: Any) -> None: ...

    def tolist(self) -> Any:
        return self.cpu().tolist()


class _Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name.partition("::")[2]
        far = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Distant)]
        is_far = bool(far)
        if kwargs.get("device") is not None:
            is_far, kwargs["device"] = torch.device(kwargs["device"]) == GPU, _CPU
        elif name == "copy_":
            is_far = isinstance(args[0], _Distant)
        if far:
            self.waits[name] += _waits(name, args, is_far=is_far)
        result = func(*tree_map(_near, args), **tree_map(_near, kwargs))
        if not is_far:
            return result
        # What was changed in place is still the same tensor.
        known = {id(each.near): each for each in far}
        return tree_map(lambda each: known[id(each)] if id(each) in known else _away(each), result)


def _waits(name: str, args: Any, *, is_far: bool) -> bool:
    masks = [each for each in tree_leaves(args[1:2]) if getattr(each, "dtype", None) is torch.bool]
    is_begun_only = name == "copy_" and len(args) > 2 and args[2]
    is_brought = name in ("copy_", "_to_copy") and not is_far and not is_begun_only
    return name in _WAITING or is_brought or (name in _INDEXING and bool(masks))


def _near(each: Any) -> Any:
    return each.near if isinstance(each, _Distant) else each


def _away(each: Any) -> Any:
    return _Distant(each) if isinstance(each, torch.Tensor) else each


class _Made(TorchFunctionMode):
    """Tensors of given numbers, which torch makes on a processor and then copies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.tensor or not kwargs or kwargs.get("device") != GPU:
            return func(*args, **(kwargs or {}))
        return torch.tensor(*args, **{**kwargs, "device": _CPU}).to(GPU)


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """What makes the host wait for ``GPU`` within, by operation; tensors get there by ``to``."""
    with _Waits() as counted, _Made():
        yield counted.waits
