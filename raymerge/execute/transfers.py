"""How bytes come to the device that computes and go back.

On a processor they are where they are wanted. On a GPU every lane has three streams: one copies loads there
from page-locked memory, one computes, one copies results back, so that all three go on at once and several
tiles are under way. Events keep the order: nothing is read before it has arrived, and no memory is used again
before what was in it has left."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

from raymerge import devices
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.execute.decoding import encode, rounded
from raymerge.execute.reading import Load, Raw, RawCodes, RawInput
from raymerge.storage.local.buffers import aligned_buffer


class Arrival(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Return when it is reached."""


class HostTransfers:
    """One lane's ways to and from its device; here the processor is the device."""

    @property
    def device(self) -> torch.device:
        """Where the arithmetic runs."""
        return torch.device("cpu")

    def buffer(self, nbytes: int) -> torch.Tensor:
        """uint8 on the host of at least so many bytes, page-aligned, fit for copies to and fro."""
        return torch.frombuffer(aligned_buffer(nbytes), dtype=torch.uint8)

    def upload(self, load: Load, raws: Sequence[Raw]) -> tuple[tuple[Raw, ...], Arrival | None]:  # noqa: ARG002
        """Begin to copy the inputs of a load's tiles to the device, but for those that are only copied.
        Returns the inputs there, not to be touched before ``arrive``, and when the host's memory is free
        again."""
        return tuple(raws), None

    def arrive(self, raws: Sequence[Raw], arrival: Arrival | None) -> None:
        """Have the computing wait for inputs."""

    def computing(self) -> AbstractContextManager[Any]:
        """What computing goes on in."""
        return nullcontext()

    def download(self, result: torch.Tensor, dtype: DType, target: torch.Tensor) -> Arrival | None:
        """Round float32 results to a dtype and copy them to the host; when they are there, None: they are."""
        encode(result, dtype, target)
        return None

    def fetch(self, data: torch.Tensor, target: torch.Tensor) -> Arrival | None:
        """Copy bytes to the host; see ``download``."""
        target.copy_(data)
        return None


class GpuTransfers(HostTransfers):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._compute, self._down = (devices.make_stream(device) for _ in range(3))

    @property
    def device(self) -> torch.device:
        return self._device

    def buffer(self, nbytes: int) -> torch.Tensor:
        return devices.pinned_buffer(nbytes)

    def upload(self, load: Load, raws: Sequence[Raw]) -> tuple[tuple[Raw, ...], Arrival]:
        """Copy stored bytes on the stream for that; rows of gathered inputs go when they are used."""
        # What several inputs are made of goes once.
        gone: dict[tuple[int, int], torch.Tensor] = {}
        with devices.on_stream(self._up):
            moved = tuple(
                raw if tile.op.expression.is_copy else [self._moved(each, gone) for each in raw]
                for tile, raw in zip(load.tiles, raws, strict=True)
            )
            arrival = devices.record_event(self._up)
        return moved, arrival

    def _moved(self, raw: RawInput, gone: dict[tuple[int, int], torch.Tensor]) -> RawInput:
        if isinstance(raw, RawCodes):
            return RawCodes(raw.read, raw.layout, *(self._copied(each, gone) for each in raw.tensors))
        return self._copied(raw, gone) if isinstance(raw, torch.Tensor) else raw

    def _copied(self, data: torch.Tensor, gone: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        place = data.data_ptr(), data.numel()
        if place not in gone:
            gone[place] = data.to(self._device, non_blocking=True)
        return gone[place]

    def arrive(self, raws: Sequence[Raw], arrival: Arrival | None) -> None:
        """Order the computing behind the copies, and the memory's reuse behind the computing."""
        if arrival is not None:
            self._compute.wait_event(cast("torch.Event", arrival))
        for raw in raws:
            for each in raw:
                parts = each.tensors if isinstance(each, RawCodes) else (each,)
                for part in parts:
                    if isinstance(part, torch.Tensor) and part.device.type != "cpu":
                        part.record_stream(self._compute)

    def computing(self) -> AbstractContextManager[Any]:
        return devices.on_stream(self._compute)

    def download(self, result: torch.Tensor, dtype: DType, target: torch.Tensor) -> Arrival:
        """Round on the GPU, and copy on the stream for that."""
        data = rounded(result, dtype)
        if dtype is DType.F32:
            # The result itself, which may lie where the next piece is put while this one is still on its way.
            data = data.clone()
        return self.fetch(data, target)

    def fetch(self, data: torch.Tensor, target: torch.Tensor) -> Arrival:
        self._down.wait_stream(self._compute)
        with devices.on_stream(self._down):
            target.copy_(data, non_blocking=True)
            data.record_stream(self._down)
            return devices.record_event(self._down)


def transfers_for(device: torch.device) -> HostTransfers:
    return HostTransfers() if device.type == "cpu" else GpuTransfers(device)
