"""Rows for tokens that a model lacks: each a combination of the model's rows of tokens that it has.

Orthogonal matching pursuit (arXiv 2506.06607) writes a token's row in the donor as a sum of few rows of
shared tokens; the same sum of the base's rows of these tokens is the new row. Blocks of tokens are fixed by
their number, so that no byte depends on workers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raymerge.deferred import torch
from raymerge.errors import NonFiniteError, Problem
from raymerge.planner.inputs.sources import RESULT_FILE, RowMatrix, Source, Stage, TransplantSpec
from raymerge.planner.inputs.weights import Weights
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range

KIND = "transplant"

BLOCK = 1024
"""Tokens of a unit."""
BATCH = 64
"""Tokens that are approximated at once."""
_ATOMS_AT_ONCE = 16384
_ROWS_AT_ONCE = 4096
_DEPENDENT = 1e-10
"""Of an atom's length: what is left of one that lies among those already chosen."""
_SLACK_NBYTES = 128 * 2**20
# For libraries, and for freed memory that the process keeps.


def matching_pursuit(
    atoms: torch.Tensor, targets: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each target as a combination of ``k`` atoms.

    They are chosen one by one by the largest product with what is left, which is then projected anew.

    Correlations are float32, projections float64: Gram-Schmidt, whose triangle gives the coefficients.
    An atom that lies in the span of those before it gets the coefficient 0.

    ``atoms``: float32 ``[n, width]``; ``targets``: float64 ``[m, width]``. Returns the chosen atoms int64
    ``[m, k]``, their coefficients float64 ``[m, k]``, and the length of what is left over that of the target
    ``[m]``."""
    count, width = targets.shape
    basis = targets.new_zeros(count, k, width)
    triangle, products = targets.new_zeros(count, k, k), targets.new_zeros(count, k, 1)
    chosen = torch.zeros(count, k, dtype=torch.int64, device=targets.device)
    left = targets.clone()
    for step in range(k):
        chosen[:, step] = _best(atoms, left.float())
        direction = atoms[chosen[:, step]].double()
        least = direction.norm(dim=1) * _DEPENDENT
        before = basis[:, :step]
        shares = before @ direction[:, :, None]
        direction = direction - (before.mT @ shares)[:, :, 0]
        triangle[:, :step, step] = shares[:, :, 0]
        length = direction.norm(dim=1)
        is_new = length > least
        triangle[:, step, step] = torch.where(is_new, length, 1.0)
        basis[:, step] = torch.where(is_new[:, None], direction / length[:, None], 0.0)
        products[:, step] = (basis[:, step] * left).sum(1, keepdim=True)
        left -= products[:, step] * basis[:, step]
    coefficients = torch.linalg.solve_triangular(triangle, products, upper=True)[:, :, 0]
    lengths = targets.norm(dim=1)
    return chosen, coefficients, left.norm(dim=1) / torch.where(lengths > 0, lengths, 1.0)


def _best(atoms: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """The atom with the largest product with each row that is left. One that was chosen before has a product
    near 0: it comes again only where nothing is left, and counts for nothing."""
    values, indices = [], []
    for begin in range(0, len(atoms), _ATOMS_AT_ONCE):
        sizes = (left @ atoms[begin : begin + _ATOMS_AT_ONCE].T).abs_()
        value, index = sizes.max(dim=1)
        values.append(value)
        indices.append(index + begin)
    best = torch.stack(values).argmax(dim=0)
    return torch.stack(indices).gather(0, best[None])[0]


def combined(rows: torch.Tensor, chosen: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """The sum of the chosen rows times their coefficients: float64 ``[m, width]``. ``rows``: float32 ``[n,
    width]``."""
    total = torch.zeros(len(chosen), rows.shape[1], dtype=torch.float64, device=rows.device)
    for step in range(chosen.shape[1]):
        total += coefficients[:, step, None] * rows[chosen[:, step]].double()
    return total


def transplant_work(stage: Stage) -> TransplantWork:
    assert isinstance(stage.spec, TransplantSpec)
    return TransplantWork(stage, stage.spec)


Rows = npt.NDArray[np.int64]


class TransplantWork:
    """One transplant; a unit is a block of tokens of one matrix. Pickles without open files and rows."""

    def __init__(self, stage: Stage, spec: TransplantSpec) -> None:
        self._stage = stage
        self._spec = spec
        self._placed = {tensor.name: tensor for tensor in stage.layout.tensors}
        self._maker: tuple[tuple[str, str], MeanRows] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maker": None}

    @property
    def num_units(self) -> int:
        return len(self._spec.matrices) * self._num_blocks

    def costs(self) -> tuple[int, ...]:
        """Bytes of float32 that each unit is made of, with its part of those that a worker reads once."""
        return tuple(self._cost(*self._at(number)) for number in range(self.num_units))

    def _cost(self, matrix: RowMatrix, block: int) -> int:
        shared = _shared_nbytes(self._spec, matrix) // self._num_blocks
        return shared + self._rows_of(block).size * matrix.base_shape[1] * 4

    def least_budget(self) -> int:
        """Bytes for the rows that one matrix's blocks share, and for a batch."""
        return _SLACK_NBYTES + max(
            _shared_nbytes(self._spec, each) + _work_nbytes(self._spec, each) for each in self._spec.matrices
        )

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        del budget, busy
        return self._stage.layout.nbytes

    def check(self) -> None:
        """All is checked where the stage is planned."""

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        """Make one block of rows.

        Takes the memory of ``least_budget``, however large ``budget`` is. Raises NonFiniteError: a row that
        is read has NaN or infinity."""
        del budget
        matrix, block = self._at(number)
        places = self._rows_of(block)
        placed, width, cost = self._placed[matrix.name], matrix.base_shape[1] * 4, self._cost(matrix, block)
        left: list[float] = []
        with LocalStore(staging) as store, _Reader(self._spec, matrix, device) as reader:
            maker = self._rows_maker(matrix, reader)
            store.create(RESULT_FILE, self._stage.layout.nbytes)
            for begin in range(0, len(places), BATCH):
                rows, shares = maker.make(places[begin : begin + BATCH], reader)
                raw = rows.cpu().float().contiguous().view(-1).view(torch.uint8).numpy().data
                offset = placed.offset + (int(places[0]) + begin) * width
                store.write_at(RESULT_FILE, offset, raw)
                left += shares
                tell(cost * (begin + len(rows)) // len(places))
            store.sync(RESULT_FILE)
            store.write_atomic(_report_key(number), json.dumps(left).encode())
        return reader.nbytes, len(places) * width

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        matrix, block = self._at(number)
        placed, width = self._placed[matrix.name], matrix.base_shape[1] * 4
        first, count = block * BLOCK, self._rows_of(block).size
        place = Range(placed.offset + first * width, count * width)
        return {RESULT_FILE: (place,), _report_key(number): ()}

    def conclude(self, staging: Path) -> Mapping[str, Any]:
        """Write the header, which completes the file. Returns for each matrix how much of the donor's rows
        is not in the span of those chosen, as the mean share of their length; None where none is projected.
        """
        left: dict[str, list[float]] = {matrix.name: [] for matrix in self._spec.matrices}
        with LocalStore(staging) as store:
            store.create(RESULT_FILE, self._stage.layout.nbytes)
            store.write_at(RESULT_FILE, 0, self._stage.layout.header)
            store.sync(RESULT_FILE)
            for number in range(self.num_units):
                left[self._at(number)[0].name] += json.loads((staging / _report_key(number)).read_bytes())
            store.sync_directory()
        shares = {name: math.fsum(each) / len(each) if each else None for name, each in left.items()}
        spec = self._spec
        return {
            "kind": KIND,
            "approximation": spec.approximation,
            "tokens": len(spec.targets),
            "shared": spec.shared.shape[1],
            "left": shares,
        }

    @property
    def _num_blocks(self) -> int:
        return -(-len(self._spec.targets) // BLOCK)

    def _at(self, number: int) -> tuple[RowMatrix, int]:
        matrix, block = divmod(number, self._num_blocks)
        return self._spec.matrices[matrix], block

    def _rows_of(self, block: int) -> Rows:
        return np.arange(block * BLOCK, min((block + 1) * BLOCK, len(self._spec.targets)))

    def _rows_maker(self, matrix: RowMatrix, reader: _Reader) -> MeanRows:
        """What makes a matrix's rows, kept for the next unit."""
        key = matrix.name, str(reader.device)
        if self._maker is not None and self._maker[0] == key:
            return self._maker[1]
        # Not both at once.
        self._maker = None
        kinds = {"omp": PursuitRows, "subword": SubwordRows, "mean": MeanRows}
        maker = kinds[self._spec.approximation](self._spec, reader)
        self._maker = key, maker
        return maker


def _report_key(number: int) -> str:
    return f"left-{number}.json"


def _shared_nbytes(spec: TransplantSpec, matrix: RowMatrix) -> int:
    """Bytes of the rows that stay in memory for all blocks of a matrix."""
    width = matrix.base_shape[1]
    if spec.approximation == "omp":
        return int(spec.shared.shape[1]) * (width + matrix.donor_shape[1]) * 4
    return matrix.base_shape[0] * width * 4 if spec.approximation == "subword" else 0


def _work_nbytes(spec: TransplantSpec, matrix: RowMatrix) -> int:
    """Bytes of a batch in hand, and of the rows being read."""
    own, other = matrix.base_shape[1], matrix.donor_shape[1]
    reading = _ROWS_AT_ONCE * max(own, other) * 16
    rows = BATCH * own * 24
    if spec.approximation != "omp":
        return reading + rows
    products = min(_ATOMS_AT_ONCE, int(spec.shared.shape[1])) * 12
    pursuit = BATCH * (spec.k * (other * 8 + spec.k * 16) + other * 64 + products)
    return max(reading, pursuit) + rows


class _Reader:
    """Rows of a matrix in base and donor, float32 ``[n, width]`` on a device. Use it as a context: what it
    opens is open for a unit."""

    def __init__(self, spec: TransplantSpec, matrix: RowMatrix, device: torch.device) -> None:
        self.device = device
        self.width = matrix.base_shape[1]
        self.nbytes = 0
        self._spec = spec
        self._matrix = matrix
        self._opened: dict[tuple[str, str], Weights] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for weights in self._opened.values():
            weights.close()

    def base_rows(self, rows: Rows) -> torch.Tensor:
        return self._read(self._spec.base, self._matrix.base, rows).to(self.device)

    def donor_rows(self, rows: Rows) -> torch.Tensor:
        return self._read(self._spec.donor, self._matrix.donor, rows).to(self.device)

    def mean(self) -> torch.Tensor:
        """The mean of all of the base's rows that have a token: float64 ``[width]``."""
        known, total = self._spec.known, torch.zeros(self.width, dtype=torch.float64)
        for begin in range(0, len(known), _ROWS_AT_ONCE):
            some = self._read(self._spec.base, self._matrix.base, known[begin : begin + _ROWS_AT_ONCE])
            total += some.double().sum(0)
        return (total / max(1, len(known))).to(self.device)

    def _read(self, source: Source, name: str, rows: Rows) -> torch.Tensor:
        """On the CPU; ``rows`` in any order."""
        # A name may stand for two revisions.
        place = source.checkpoint.root, source.name
        if place not in self._opened:
            self._opened[place] = Weights(source)
        read = self._opened[place].read_rows(name, rows.tolist(), at_once=_ROWS_AT_ONCE)
        self.nbytes += read.numel() * 4
        # Both ends are NaN where any element is, and unlike a mask they take no memory.
        if read.numel() and not all(bool(end.isfinite()) for end in torch.aminmax(read)):
            what = f"{name} has elements that are NaN or infinite, and no row can be made of them."
            raise NonFiniteError(Problem(source.name, what, "Take a checkpoint without such elements."))
        return read


class MeanRows:
    """Makes rows of one matrix on a device: here the mean of all for every token."""

    def __init__(self, spec: TransplantSpec, reader: _Reader) -> None:
        del reader
        self.spec = spec
        self._mean: torch.Tensor | None = None

    def make(self, places: Rows, reader: _Reader) -> tuple[torch.Tensor, list[float]]:
        """The rows of some targets, float64 ``[n, width]``; and for each that is projected the share of its
        length that is left."""
        return self.means(len(places), reader), []

    def means(self, count: int, reader: _Reader) -> torch.Tensor:
        """So many rows of the mean, which is read when it is first needed."""
        if self._mean is None:
            self._mean = reader.mean()
        return self._mean.repeat(count, 1)


class SubwordRows(MeanRows):
    def __init__(self, spec: TransplantSpec, reader: _Reader) -> None:
        super().__init__(spec, reader)
        used = sorted({row for pieces in spec.pieces for row in pieces})
        self._places = {row: place for place, row in enumerate(used)}
        self._own = reader.base_rows(np.array(used, dtype=np.int64))

    def make(self, places: Rows, reader: _Reader) -> tuple[torch.Tensor, list[float]]:
        made = torch.empty(len(places), reader.width, dtype=torch.float64, device=reader.device)
        for at, place in enumerate(places.tolist()):
            pieces = [self._places[row] for row in self.spec.pieces[place]]
            made[at] = self._own[pieces].double().mean(0) if pieces else self.means(1, reader)[0]
        return made, []


class PursuitRows(MeanRows):
    def __init__(self, spec: TransplantSpec, reader: _Reader) -> None:
        super().__init__(spec, reader)
        theirs, own = spec.shared
        self._atoms, self._own = reader.donor_rows(theirs), reader.base_rows(own)

    def make(self, places: Rows, reader: _Reader) -> tuple[torch.Tensor, list[float]]:
        asked = self.spec.targets[places]
        has_row = np.flatnonzero(asked >= 0)
        if not len(has_row):
            return self.means(len(places), reader), []
        targets = reader.donor_rows(asked[has_row]).double()
        chosen, coefficients, left = matching_pursuit(self._atoms, targets, self.spec.k)
        rows = combined(self._own, chosen, coefficients)
        if len(has_row) == len(places):
            return rows, left.tolist()
        made = self.means(len(places), reader)
        made[torch.from_numpy(has_row).to(reader.device)] = rows
        return made, left.tolist()
