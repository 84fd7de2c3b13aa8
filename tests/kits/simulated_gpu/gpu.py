"""The memory of a simulated GPU, its tensors, and how an operation of torch is carried out on them."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from kits.simulated_gpu.timeline import DEVICE, Stream, Timeline

POISON = 0xCB
_BLOCK = 512
"""Bytes: CUDA's allocator counts whole blocks of them."""
_aten = torch.ops.aten
Operation = Any
"""An overload of an operator of torch."""

_DECOMPOSITIONS = ("_linalg_eigh", "_linalg_svd", "linalg_cholesky_ex", "linalg_lstsq", "linalg_qr")
_WITH_VALUES = frozenset(
    (*_DECOMPOSITIONS, "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select")
) | frozenset(("nonzero", "repeat_interleave", "unique_consecutive", "unique_dim"))
"""Operations whose outputs' shapes, or whose libraries, need values: the host waits for them."""
_INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"))
_EMPTY = frozenset(["empty_like", "new_empty", "new_empty_strided"])


@dataclass(frozen=True, slots=True)
class Layout:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        if 0 in self.size:
            return 0
        last = sum((count - 1) * step for count, step in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


def layout_of(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.size()), tensor.stride(), tensor.dtype)


class Allocation:
    """Some memory of the GPU. When nothing on the host refers to it, it is free."""

    def __init__(self, gpu: SimulatedGpu, nbytes: int) -> None:
        self.gpu = gpu
        # Of whole elements of any dtype.
        self.data = torch.full((max(-(-nbytes // 16) * 16, 16),), POISON, dtype=torch.uint8)
        self.nbytes = -(-nbytes // _BLOCK) * _BLOCK
        self.users: set[Stream] = set()
        """Streams that use it, beside the one that it was allocated on."""
        self._stream = gpu.timeline.current

    def free(self) -> None:
        data = self.data

        def poison() -> None:
            data.fill_(POISON)

        others = self.users - {self._stream}
        if others:
            marks = [each.mark for each in (self._stream, *others)]
            self.gpu.timeline.reclaim(poison, marks)
        else:
            self._stream.queue(poison)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the process the modules that this needs are gone.
        if is_ending():
            return
        with self.gpu.timeline.lock:
            self.gpu.allocated_bytes -= self.nbytes
            self.free()


class DeviceTensor(torch.Tensor):
    """A tensor whose bytes nothing on the host reaches; ``data_on_device`` is for the simulation."""

    gpu: ClassVar[SimulatedGpu | None] = None
    """The one that there is at the moment; what a cache has of an earlier one, it takes as its own."""
    data_on_device: torch.Tensor
    allocation: Allocation

    @staticmethod
    def __new__(cls, data: torch.Tensor, allocation: Allocation) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=DEVICE,
        )
        made.data_on_device, made.allocation = data, allocation
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Operation, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if cls.gpu is None:
            raise RuntimeError("CUDA error: the simulated GPU of this tensor is gone")
        return cls.gpu.carry_out(func, args, kwargs or {})

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def numpy(self, **_: object) -> Any:  # type: ignore[override]
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_: object, **__: object) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        """Aligned as it would be on the GPU; nothing lies there."""
        return self.data_on_device.data_ptr() | 1 << 62

    def record_stream(self, stream: Stream) -> None:
        with stream.timeline.lock:
            self.allocation.users.add(stream)


def never(name: str) -> None:
    """No operation fails."""


class SimulatedGpu:
    def __init__(self, seed: int, memory_bytes: int) -> None:
        self.timeline = Timeline(seed, lambda: self._count("synchronize"))
        self.memory_bytes = memory_bytes
        self.allocated_bytes = self.peak_bytes = 0
        self.operations = 0
        """How many were begun so far, allocations among them."""
        self.fault: Callable[[str], Exception | None] = never
        """What an operation fails with, by its name. Beside those of torch there are ``allocate``, ``pin``
        (memory of the host) and ``synchronize``, where a GPU tells of failures."""
        self._layouts: dict[Any, Any] = {}
        """Of results, by an operation and its arguments' layouts: to ask torch takes long."""
        self._pinned: dict[int, weakref.ref[Any]] = {}

    # Memory

    def empty(self, layout: Layout) -> DeviceTensor:
        allocation = self._allocate(layout.nbytes)
        data = torch.as_strided(allocation.data.view(layout.dtype), layout.size, layout.stride)
        return DeviceTensor(data, allocation)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """uint8 on the host that copies read and write when they are carried out."""
        self._count("pin")
        memory = np.full(nbytes, POISON, np.uint8)
        place = memory.ctypes.data
        self._pinned[place] = weakref.ref(memory, lambda _: self._pinned.pop(place, None))
        return torch.from_numpy(memory)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory that are in use."""
        return sum(memory.nbytes for each in self._pinned.values() if (memory := each()) is not None)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _allocate(self, nbytes: int) -> Allocation:
        self._count("allocate")
        with self.timeline.lock:
            if self.allocated_bytes + nbytes > self.memory_bytes:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {nbytes} bytes. GPU 0 has a total capacity of "
                    f"{self.memory_bytes} bytes of which {self.memory_bytes - self.allocated_bytes} is free."
                )
            made = Allocation(self, nbytes)
            self.allocated_bytes += made.nbytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
            return made

    def _count(self, name: str) -> None:
        error = self.fault(name)
        self.operations += 1
        if error is not None:
            raise error

    # Operations

    def carry_out(self, func: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Queue an operation that has tensors of the GPU among its arguments; its result."""
        traits = _traits(func)
        self._count(traits.name)
        with self.timeline.lock:
            if traits.name == "copy_":
                return self.copy(*args, **kwargs)
            if traits.name == "_to_copy" and kwargs.get("device", DEVICE).type != "cuda":
                return self._copy_to_host(*args, **kwargs)
            if traits.is_view:
                return self._view(func, args, kwargs)
            args, kwargs = _map(self._taken(traits), args), _map(self._taken(traits), kwargs)
            if traits.needs_values or (traits.is_indexed and _has_mask(args[1])):
                return self._with_values(func, args, kwargs)
            if traits.divides and not kwargs:
                func, args = _as_on_cuda(func, traits, args)
            return self._write(func, args, kwargs) if traits.written else self._make(func, args, kwargs)

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy within the GPU, to it or from it."""
        is_plain = target.dtype is source.dtype and target.is_contiguous() and source.is_contiguous()
        if isinstance(target, DeviceTensor):
            if not isinstance(source, DeviceTensor) and not (is_plain and self.is_pinned(source)):
                # What is converted goes by memory that is not pinned, and the driver has read that at once.
                source = source.clone()
            self._queue(target.data_on_device.copy_, (_data(source),), {})
        else:
            self._queue(target.copy_, (_data(source),), {})
            non_blocking = non_blocking and is_plain and self.is_pinned(target)
        if not (non_blocking or (isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor))):
            self.timeline.current.synchronize()
        return target

    def _copy_to_host(self, source: DeviceTensor, **options: Any) -> torch.Tensor:
        made = torch.empty_like(source.data_on_device, dtype=options.get("dtype"))
        return self.copy(made, source, options.get("non_blocking", False))

    def _view(self, func: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        allocation = args[0].allocation
        made = func(*_map(_data, args), **_map(_data, kwargs))
        return _map(lambda each: DeviceTensor(each, allocation) if _is_tensor(each) else each, made)

    def _taken(self, traits: _Traits) -> Callable[[Any], Any]:
        """Arguments as CUDA takes them: of the host's tensors single numbers and indices."""

        def taken(each: Any) -> Any:
            if not _is_tensor(each) or _is_on_device(each):
                return each
            if not each.dim():
                return each.clone()
            if traits.is_indexed:
                return self._placed(each)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"cpu! ({traits.name} of {tuple(each.shape)} {each.dtype})"
            )

        return taken

    def _placed(self, data: torch.Tensor) -> DeviceTensor:
        return self.copy(self.empty(layout_of(data)), data)

    def _with_values(self, func: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.timeline.current.synchronize()
        made = func(*_map(_data, args), **_map(_data, kwargs))
        if func._schema.is_mutable:
            return args[0]
        return _map(lambda each: self._placed(each) if _is_tensor(each) else each, made)

    def _write(self, func: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        written = [kwargs[name] if name in kwargs else args[n] for n, name in _traits(func).written]
        if not all(map(_is_on_device, written)):
            raise RuntimeError(f"Expected out tensor of {func} to be on cuda:0, but it is on cpu")
        self._queue(func, _map(_data, args), _map(_data, kwargs))
        return written[0] if len(written) == 1 else tuple(written)

    def _make(self, func: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        signature = func, _signature(args), _signature(kwargs)
        layouts = self._layouts.get(signature)
        if layouts is None:
            shapes = func(*_map(_on_meta, args), **_map(_on_meta, kwargs))
            layouts = _map(lambda each: layout_of(each) if _is_tensor(each) else each, shapes)
            self._layouts[signature] = layouts
        made = _map(lambda each: self.empty(each) if isinstance(each, Layout) else each, layouts)
        if not _traits(func).is_empty:
            # The memory alone: results may be dropped before they are there.
            self._queue(_into, (func, _map(_data, made), _map(_data, args), _map(_data, kwargs)), {})
        return made

    def _queue(self, run: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.timeline.current.queue(lambda: run(*args, **kwargs))


@dataclass(frozen=True, slots=True)
class _Traits:
    """What is to be known of an operation before it is carried out."""

    name: str
    is_view: bool
    needs_values: bool
    is_indexed: bool
    is_empty: bool
    divides: bool
    written: tuple[tuple[int, str], ...]
    """Places and names of the arguments that it writes to."""


@cache
def _traits(func: Operation) -> _Traits:
    name, schema = func.overloadpacket.__name__, func._schema
    returned, arguments = [each.alias_info for each in schema.returns], enumerate(schema.arguments)
    return _Traits(
        name,
        is_view=bool(returned) and all(each and not each.is_write for each in returned),
        needs_values=name in _WITH_VALUES,
        is_indexed=name in _INDEXED,
        is_empty=name in _EMPTY,
        divides=name in ("div", "div_"),
        written=tuple((n, each.name) for n, each in arguments if _is_written(each)),
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Arguments or results with each of them changed."""
    if isinstance(value, (tuple, list)):
        return [_map(change, each) if isinstance(each, (tuple, list)) else change(each) for each in value]
    if isinstance(value, dict):
        return {name: _map(change, each) for name, each in value.items()}
    return change(value)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_on_device(value: object) -> bool:
    return isinstance(value, DeviceTensor)


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(_is_on_device(each) and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _data(each: Any) -> Any:
    """An argument for torch's kernels of the processor."""
    if isinstance(each, DeviceTensor):
        return each.data_on_device
    return torch.device("cpu") if isinstance(each, torch.device) else each


def _on_meta(each: Any) -> Any:
    if isinstance(each, DeviceTensor):
        data = each.data_on_device
        return torch.empty_strided(data.size(), data.stride(), dtype=data.dtype, device="meta")
    return torch.device("meta") if isinstance(each, torch.device) else each


def _signature(value: Any) -> Any:
    """What the layout of a result depends on."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((name, _signature(each)) for name, each in value.items())
    if isinstance(value, torch.Tensor):
        return tuple(value.size()), value.stride(), value.dtype, _is_on_device(value)
    return float if isinstance(value, float) else (type(value), value)


def _into(func: Operation, made: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    result = func(*args, **kwargs)
    pairs = [(made, result)] if _is_tensor(made) else zip(made, result, strict=True)
    for target, source in pairs:
        if _is_tensor(target):
            target.copy_(source)


def _as_on_cuda(func: Operation, traits: _Traits, args: Any) -> tuple[Operation, Any]:
    """Division by a number as CUDA's kernel makes it: of halves the reciprocal is taken in float32."""
    of, number = args
    if _is_on_device(number) or not of.is_floating_point() or not math.isfinite(number) or not number:
        return func, args
    wide = torch.float64 if of.dtype is torch.float64 else torch.float32
    reciprocal = torch.ones((), dtype=wide) / torch.tensor(float(number), dtype=wide)
    return getattr(_aten, traits.name.replace("div", "mul")).Tensor, (of, reciprocal.item())
