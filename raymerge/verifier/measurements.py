"""What the parents of a merge do to its tensors, as sums that add up over layers, roles and samples.

Of one logical tensor (one projection of one expert) d_k is what parent k adds to the base, ``T_k - B``, or
``T_k`` itself where there is no base; M is the merged tensor. Sums over a sample are scaled to the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
SKETCH = 8
"""Numbers of a sketch."""
Kind: TypeAlias = Literal["merge", "recipe", "diff"]


@dataclass(frozen=True, slots=True)
class Label:
    """What a row is; after ``grouped`` only the fields that it was grouped by."""

    tensor: str = ""
    part: str = ""
    """The logical tensor; differs from the tensor where that holds several, such as fused experts."""
    stack: str = ""
    """Prefix of the layers, such as ``model.layers``; "" outside of layers."""
    layer: int = -1
    role: str = ""
    expert: int = -1
    method: str = ""
    stored_as: str = ""
    """The format of codes that it was encoded as; "" for plain numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Measurements:
    """Rows ``[n]`` of logical tensors, or of groups of them, for P parents.

    Where a parent has no part in a row its sums are 0."""

    labels: tuple[Label, ...]
    elements: Floats
    """``[n]``"""
    sampled: Floats
    """``[n]``: elements that were read; as many as there are where nothing is estimated."""
    present: Floats
    """``[n, P]``: elements of the tensors that the parent has a part in."""
    base: Floats
    """``[n, P]``: ``||B||^2`` of these tensors; 0 without a base."""
    gram: Floats
    """``[n, P, P]``: ``<d_j, d_k>``"""
    magnitudes: Floats
    """``[n, P]``: sum of ``|d_k|``"""
    magnitude_of_sum: Floats
    """``[n]``: sum of ``|sum_k d_k|``"""
    pair_magnitudes: Floats
    """``[n, P, P]``: sum of ``|d_j + d_k|``"""
    zeros: Floats
    """``[n, P]``: elements with ``d_k = 0``"""
    invisible: Floats
    """``[n, P]``: elements with ``0 < |d_k|`` below one step of bfloat16 at B; 0 without a base."""
    largest: Floats
    """``[n, P]``: the largest ``|d_k|`` that was read"""
    overlap: Floats
    """``[n, P, P]``: Jaccard index of the fifths with the largest ``|d|`` of what was read together, times
    elements"""
    shared: Floats
    """``[n, P, P]``: elements of the tensors that both parents have a part in"""
    shared_squares: Floats
    """``[n, P, P]``: ``||d_j||^2`` of the tensors that parent k has a part in too"""
    shared_magnitudes: Floats
    """``[n, P, P]``: sum of ``|d_j|`` over these"""
    merged: Floats
    """``[n]``: ``||M - B||^2``, or ``||M||^2`` without a base; 0 where nothing is merged yet"""
    merged_squares: Floats
    """``[n, P]``: the same of the tensors that the parent has a part in"""
    merged_dots: Floats
    """``[n, P]``: ``<M - B, d_k>``, or ``<M, d_k>``"""
    encoding_errors: Floats
    """``[n, 2]``: sums of squared errors of the encoding and of squared true values"""
    variance: Floats
    """``[n]``: estimated variance of the trace of ``gram`` by sampling; 0 where all was read."""
    sketches: Floats
    """``[n, P + 1, SKETCH]``: random projections of ``T_k``, and of B last, the same one for equally many
    elements: the cosine of two sketches is near that of the tensors, also of two layers or two experts."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_parents(self) -> int:
        return int(self.present.shape[1])

    def grouped(self, *by: str) -> Measurements:
        """Sums of the rows with equal labels ``by``, in order of first appearance."""
        rows: dict[tuple[Any, ...], int] = {}
        keys = [tuple([getattr(label, name) for name in by]) for label in self.labels]
        number = np.array([rows.setdefault(key, len(rows)) for key in keys], dtype=np.int64)
        labels = tuple(Label(**dict(zip(by, key, strict=True))) for key in rows)
        sums = {name: _folded(name, getattr(self, name), number, len(rows)) for name in ARRAYS}
        return Measurements(labels, **sums)

    def where(self, chosen: NDArray[np.bool_]) -> Measurements:
        labels = tuple(label for label, is_chosen in zip(self.labels, chosen, strict=True) if is_chosen)
        return Measurements(labels, **{name: getattr(self, name)[chosen] for name in ARRAYS})

    def matching(self, test: Callable[[Label], bool]) -> Measurements:
        return self.where(np.array([test(label) for label in self.labels], dtype=bool))

    def finite(self) -> Measurements:
        """Without the rows of tensors that hold NaN or infinity."""
        return self.where(np.asarray(np.isfinite(self.gram).all((1, 2))))

    @property
    def relative_change(self) -> Floats:
        """``||d_k|| / ||B||``: ``[n, P]``, NaN without a base."""
        return np.asarray(np.sqrt(_ratio(self._squares, self.base)))

    @property
    def cosines(self) -> Floats:
        """Of the deltas of each two parents, over what both have a part in: ``[n, P, P]``."""
        return _ratio(self.gram, np.sqrt(self.shared_squares * self.shared_squares.swapaxes(1, 2)))

    @property
    def conflict(self) -> Floats:
        """``1 - |sum d_k|_1 / sum |d_k|_1``: ``[n]``; 0: all agree, 1: all cancels."""
        return np.asarray(1 - _ratio(self.magnitude_of_sum, self.magnitudes.sum(1)))

    @property
    def pair_conflict(self) -> Floats:
        """The same of each two parents: ``[n, P, P]``; NaN where they never meet."""
        both = self.shared_magnitudes + self.shared_magnitudes.swapaxes(1, 2)
        return np.asarray(1 - _ratio(self.pair_magnitudes, both))

    @property
    def overlaps(self) -> Floats:
        """Jaccard index of the largest fifths of each two parents' changes: ``[n, P, P]``."""
        return _ratio(self.overlap, self.shared)

    @property
    def shares(self) -> Floats:
        """How much of each parent's change is in the result, ``<M - B, d_k> / ||d_k||^2``: ``[n, P]``."""
        return np.where(self.merged_squares > 0, _ratio(self.merged_dots, self._squares), np.nan)

    @property
    def merged_cosines(self) -> Floats:
        """Of the result's change and each parent's: ``[n, P]``; NaN where nothing is merged yet."""
        return _ratio(self.merged_dots, np.sqrt(self.merged_squares * self._squares))

    @property
    def encoding_error(self) -> Floats:
        """Norm of what encoding changed as a part of the true norm: ``[n]``, NaN for plain numbers."""
        return np.asarray(np.sqrt(_ratio(self.encoding_errors[:, 0], self.encoding_errors[:, 1])))

    @property
    def standard_error(self) -> Floats:
        """Of the norms of changes, as a part of them, by sampling: ``[n]``."""
        return _ratio(np.sqrt(self.variance), 2 * self._squares.sum(1))

    @property
    def _squares(self) -> Floats:
        return np.asarray(np.einsum("njj->nj", self.gram))


ARRAYS = tuple(field.name for field in fields(Measurements) if field.name != "labels")
_MAXIMA = frozenset({"largest"})


def shared_sums(arrays: Mapping[str, Floats]) -> dict[str, Floats]:
    """Those arrays of logical tensors that say what two parents have in common, from the others."""
    is_present = arrays["present"] > 0
    both = (is_present[:, :, None] & is_present[:, None, :]).astype(np.float64)
    return {
        "shared": both * arrays["elements"][:, None, None],
        "shared_squares": both * np.einsum("njj->nj", arrays["gram"])[:, :, None],
        "shared_magnitudes": both * arrays["magnitudes"][:, :, None],
        "merged_squares": is_present * arrays["merged"][:, None],
    }


def _folded(name: str, values: Floats, number: NDArray[np.int64], count: int) -> Floats:
    total = np.zeros((count, *values.shape[1:]))
    (np.maximum if name in _MAXIMA else np.add).at(total, number, values)
    return total


def _ratio(part: Floats, whole: Floats) -> Floats:
    """NaN where the whole is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(whole > 0, part / np.where(whole > 0, whole, 1), np.nan))


@dataclass(frozen=True, slots=True)
class RouterRows:
    """The rows of one router, one an expert, in two models."""

    tensor: str
    layer: int
    first: int
    """Index of a parent; -1 for the base."""
    second: int
    own: tuple[float, ...]
    """Cosine of each row of the first with the same row of the second."""
    nearest: tuple[int, ...]
    """The row of the second with the largest cosine."""
    nearest_cosines: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Speed:
    """What a kind of work moved; seconds are those of all workers together."""

    stage: str
    read_bytes: int
    written_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    name: str
    """The checkpoint, the recipe, or A and B."""
    kind: Kind
    method: str
    parents: tuple[str, ...]
    base: str | None
    measurements: Measurements
    routers: tuple[RouterRows, ...] = ()
    nbytes_by_use: Mapping[str, int] | None = None
    """Bytes of the sources by what becomes of them: the uses of dispositions."""
    speeds: tuple[Speed, ...] = ()
    is_exact: bool = False
    skipped: Mapping[str, int] | None = None
    """Tensors of which nothing is known, by reason."""
    is_base_named: bool = False
    """Whether the recipe names the base among the models too, where it adds nothing."""
    raymerge: str = ""

    def save(self, path: Path) -> None:
        """Write all numbers as one Parquet file: a row a logical tensor, other facts in its metadata."""
        facts = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _APART}
        facts |= {name: [asdict(each) for each in getattr(self, name)] for name in ("routers", "speeds")}
        table = to_table(self.measurements).replace_schema_metadata({_KEY: json.dumps(facts)})
        pq.write_table(table, path, compression="zstd")

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether there is a file that ``save`` wrote."""
        try:
            return _KEY.encode() in (pq.read_schema(path).metadata or {})
        except (OSError, pa.ArrowException):
            return False

    @staticmethod
    def load(path: Path) -> Report:
        """Inverse of ``save``. Raises OSError or pa.ArrowInvalid: it is no such file."""
        table = pq.read_table(path)
        text = (table.schema.metadata or {}).get(_KEY.encode())
        if text is None:
            raise pa.ArrowInvalid("it has no report in its metadata")
        facts = json.loads(text)
        routers = tuple(map(_router_rows, facts.pop("routers")))
        speeds = tuple(Speed(**each) for each in facts.pop("speeds"))
        facts["parents"] = tuple(facts["parents"])
        measured = from_table(table, len(facts["parents"]))
        return Report(**facts, measurements=measured, routers=routers, speeds=speeds)


def _router_rows(facts: Mapping[str, Any]) -> RouterRows:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in facts.items()}
    return RouterRows(**values)


_KEY = "raymerge_report"
_APART = frozenset({"measurements", "routers", "speeds"})


def to_table(measured: Measurements) -> pa.Table:
    """Columns are labels, sums and ratios; of each parent as a list, of pairs as a list of P * P."""
    columns: dict[str, Any] = {
        each.name: [getattr(label, each.name) for label in measured.labels] for each in fields(Label)
    }
    for name in (*ARRAYS, *_RATIOS):
        columns[name] = _column(getattr(measured, name))
    return pa.table(columns)


_RATIOS = (
    "relative_change", "cosines", "conflict", "pair_conflict", "overlaps", "shares", "merged_cosines",
    "encoding_error", "standard_error",
)  # fmt: skip


def _column(values: Floats) -> pa.Array:
    flat, size = pa.array(values.reshape(-1)), int(np.prod(values.shape[1:]))
    if values.ndim == 1:
        return flat
    if not size:  # nothing was measured, so there is no parent
        return pa.array([[]] * len(values), pa.list_(pa.float64()))
    return pa.FixedSizeListArray.from_arrays(flat, size)


def from_table(table: pa.Table, num_parents: int) -> Measurements:
    rows = zip(*(table.column(each.name).to_pylist() for each in fields(Label)), strict=True)
    labels = tuple(Label(*row) for row in rows)
    shapes = shapes_of(num_parents)
    arrays = {name: _flat(table.column(name)).reshape(len(labels), *shapes[name]) for name in ARRAYS}
    return Measurements(labels, **arrays)


def _flat(column: pa.ChunkedArray) -> Floats:
    array = column.combine_chunks()
    return np.asarray(array if pa.types.is_floating(array.type) else array.flatten(), dtype=np.float64)


def shapes_of(num_parents: int) -> Mapping[str, tuple[int, ...]]:
    """The shape of a row of each array of ``Measurements``."""
    each, pairs = (num_parents,), (num_parents, num_parents)
    return {
        "elements": (), "sampled": (), "present": each, "base": each, "gram": pairs, "magnitudes": each,
        "magnitude_of_sum": (), "pair_magnitudes": pairs, "zeros": each, "invisible": each, "largest": each,
        "overlap": pairs, "shared": pairs, "shared_squares": pairs, "shared_magnitudes": pairs, "merged": (),
        "merged_squares": each, "merged_dots": each, "encoding_errors": (2,), "variance": (),
        "sketches": (num_parents + 1, SKETCH),
    }  # fmt: skip
