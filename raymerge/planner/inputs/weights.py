"""Whole logical tensors of one source in memory, for stages rather than merges by tile.

Codes with scales are read as the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby

from raymerge.checkpoints.quantisation.block_codec import Encoded, load_scales
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.deferred import torch
from raymerge.errors import CheckpointError, Problem
from raymerge.merge_plan.elements import strided, torch_dtype
from raymerge.merge_plan.expressions import Product, Read, Scales
from raymerge.planner.inputs.quantised import in_numbers
from raymerge.planner.inputs.sources import Source, holdings
from raymerge.planner.matching.input_resolver import InputResolver, ResolvedInput
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.storage.store import ReadStore


class Weights:
    """Reads logical tensors of one source by canonical name, adapter included.

    Close it, or use it as a context. ``keeps_run`` keeps the last bytes read, so that several matrices in one
    run of bytes, read in sequence, are read once."""

    def __init__(self, source: Source, *, keeps_run: bool = False) -> None:
        alone = replace(in_numbers(source), index=0, prepared=())
        self._logical = LogicalTensors(alone)
        self._resolver = InputResolver([alone], [self._logical])
        self._source = alone
        self._keeps_run = keeps_run
        self._run: tuple[Read, torch.Tensor] | None = None
        self._stores: list[ReadStore] = [each.open() for each in holdings([alone])]

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def names(self) -> Collection[str]:
        return self._logical.names()

    def shape(self, logical: str) -> tuple[int, ...]:
        """Shape of a logical tensor; KeyError where it is absent."""
        return self._find_input(logical).place.shape

    def nbytes(self, logical: str) -> int:
        """Stored bytes that loading reads; KeyError where it is absent."""
        resolved = self._find_input(logical)
        gather_input = resolved.gather_input()
        factors = gather_input.product.factors if gather_input.product is not None else ()
        return sum(read.bytes_for(0) for read in (gather_input.read, *factors))

    def has_codes(self, logical: str) -> bool:
        return self._find_input(logical).place.scales is not None

    def reads_rows(self, logical: str) -> bool:
        """Whether rows of a matrix are read without the others; KeyError where it is absent."""
        resolved = self._find_input(logical)
        place = resolved.place
        return place.view is None and place.scales is None and resolved.factor is None

    def load(self, logical: str, *, device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensor, adapter included: float32, memory of its own; KeyError where absent. Raises
        CheckpointError: it holds no plain numbers, or cannot be read."""
        resolved = self._find_input(logical)
        gather_input = resolved.gather_input()
        values = self._elements(gather_input.read, resolved.place.shape).to(device, torch.float32, copy=True)
        return values if gather_input.product is None else self._added(values, gather_input.product)

    def raw(self, logical: str) -> torch.Tensor:
        """The tensor as stored, in its own dtype; KeyError where it is absent. Raises CheckpointError: an
        adapter changes it, it holds no plain numbers, or cannot be read."""
        resolved = self._find_input(logical)
        if resolved.place.scales is not None:
            raise CheckpointError(self._no_numbers(resolved.gather_input().read))
        if resolved.factor is not None:
            what = f"an adapter adds to {logical}, so there are no stored values of it."
            raise CheckpointError(Problem(self._source.name, what, "Merge the adapter into the model first."))
        return self._elements(resolved.gather_input().read, resolved.place.shape).clone()

    def read_rows(self, logical: str, indices: Sequence[int], *, at_once: int = 1) -> torch.Tensor:
        """Rows of a matrix: float32 ``[len(indices), columns]``; KeyError where absent. Runs of at most
        ``at_once`` rows are read, and only those that hold some of them."""
        resolved = self._find_input(logical)
        read, (_, columns) = resolved.gather_input().read, resolved.place.shape
        if not self.reads_rows(logical):
            return self.load(logical)[list(indices)]
        width, out = read.dtype.nbytes(columns), torch.empty(len(indices), columns)
        order = sorted(range(len(indices)), key=lambda place: indices[place])
        for _, run in groupby(order, key=lambda place: indices[place] // at_once):
            places = list(run)
            first, last = indices[places[0]], indices[places[-1]]
            some = read._replace(offset=read.offset + first * width, nbytes=(last + 1 - first) * width)
            rows = self._elements(some, (last + 1 - first, columns))
            out[places] = rows[[indices[place] - first for place in places]].float()
        return out

    def _find_input(self, logical: str) -> ResolvedInput:
        resolved = self._resolver.find(0, logical, logical)
        if resolved is None:
            raise KeyError(logical)
        return resolved

    def _elements(self, read: Read, shape: tuple[int, ...]) -> torch.Tensor:
        run = read._replace(part=0, view=None)
        if self._run is not None and self._run[0] == run:
            flat = self._run[1]
        else:
            flat = self._plain(read) if read.scales is None else self._decoded(read, read.scales)
            self._run = (run, flat) if self._keeps_run else None
        return flat.view(shape) if read.view is None else strided(flat, read.view)

    def _plain(self, read: Read) -> torch.Tensor:
        if not read.dtype.is_mergeable:
            raise CheckpointError(self._no_numbers(read))
        return self._bytes(read, read.key, read.offset, read.nbytes).view(torch_dtype(read.dtype))

    def _decoded(self, read: Read, scales: Scales) -> torch.Tensor:
        """Codes as float32 ``[n]``, in the order in which they are stored."""
        rows = read.nbytes * 8 // read.dtype.bits // scales.columns
        encoding, whole, zeros = scales.encoding, None, None
        if encoding.tensor_scale_dtype is not None:
            stored = self._bytes(read, scales.tensor_key, scales.tensor_offset, scales.tensor_nbytes)
            whole = load_scales(encoding.tensor_scale_dtype, stored).squeeze(0)
        if encoding.format.zero_points is not None:
            zeros = self._bytes(read, scales.zeros_key, scales.zeros_offset, scales.zeros_nbytes)
        encoded = Encoded(
            self._bytes(read, read.key, read.offset, read.nbytes),
            self._bytes(read, scales.key, scales.offset, scales.nbytes),
            zeros,
            whole,
        )
        quant_spec = encoding.quant_spec((rows, scales.columns))
        return codec_of(quant_spec.format).decode(quant_spec, encoded).flatten()

    def _bytes(self, read: Read, key: str, offset: int, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._stores[read.source].read_into(key, offset, buffer.numpy().data)
        return buffer

    def _no_numbers(self, read: Read) -> Problem:
        what = f"it holds {read.dtype.value} where plain numbers are needed ({read.key})."
        return Problem(self._source.name, what, "Use a checkpoint in bfloat16 or float32.")

    def _added(self, weight: torch.Tensor, product: Product) -> torch.Tensor:
        down = self._factor(product.down).to(weight.device).view(product.rank, -1)
        up = weight if product.up is None else self._factor(product.up).to(weight.device)
        delta = (up.view(-1, product.rank) @ down).mul_(product.scale)
        weight += delta.T if product.transposed else delta
        if product.magnitude is not None:
            lengths = weight.norm(dim=1, keepdim=True)
            magnitudes = self._factor(product.magnitude).to(weight.device).view(-1, 1)
            weight *= torch.where(lengths > 0, magnitudes / lengths, 0.0)
        return weight

    def _factor(self, read: Read) -> torch.Tensor:
        return self._elements(read, (read.nbytes // read.dtype.nbytes(1),)).float()
