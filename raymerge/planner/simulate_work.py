"""What each segment of a plan asks of storage and of threads: the work that is simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from raymerge.dtypes import DType
from raymerge.merge_plan.columns import Ints, codes, gather, ints, lists, starts
from raymerge.merge_plan.expressions import Expression
from raymerge.merge_plan.gathers import input_bytes, joined_sums
from raymerge.merge_plan.memory import Lane, expression_passes
from raymerge.merge_plan.plan import Plan
from raymerge.methods import methods
from raymerge.planner.simulate_speeds import MethodSpeeds

Floats: TypeAlias = npt.NDArray[np.float64]


def stays_resident(kept_bytes: Ints, lane: Lane) -> npt.NDArray[np.bool_]:
    """Of rows with so many bytes of inputs, whether a lane reads them once and keeps them over all passes.

    Args:
        kept_bytes: ``[rows]``.
        lane: a lane's share of the worker's budget. What computing takes is not counted: it is small beside
            rows that are near the bound.
    """
    return np.asarray(kept_bytes <= lane.budget - lane.write_bytes)


@dataclass(frozen=True, slots=True)
class SegmentLoads:
    """What segments take, an entry for each of them ``[segments]``."""

    cost: Ints
    """By which they are handed out, largest first."""
    read_bytes: Ints
    """Bytes read, those that statistics read again counted again."""
    write_bytes: Ints
    """Bytes written, to every place."""
    source_bytes: Ints
    """Bytes of sources that are computed with, counted once; what is copied is not among them."""
    thread_seconds: Floats
    """Time that one thread computes, at the measured speeds."""
    copy_seconds: Floats
    """The part of it that copies take."""
    guessed: tuple[str, ...] = ()
    """Methods whose speed was not measured."""
    num_tensors: int = 0
    """Tensors of the output."""

    def __len__(self) -> int:
        """Segments."""
        return len(self.cost)

    def compute_seconds(self, speed: float | None) -> Floats:
        """Time that one thread computes for each segment.

        Args:
            speed: bytes of sources per second, in place of what was measured.
        """
        return self.thread_seconds if speed is None else self.copy_seconds + self.source_bytes / speed


def segment_loads(plan: Plan, lane: Lane, speeds: MethodSpeeds) -> SegmentLoads:
    """What the segments of a plan take.

    Args:
        plan: an executable plan.
        lane: a lane's share of the worker's budget: what it does not keep is read again for every pass.
        speeds: how fast methods compute.
    """
    rows, expressions = plan["rows"], plan.expressions
    number, made = ints(rows, "expression"), (ints(rows, "copy_of") < 0) & (ints(rows, "made_with") < 0)
    copies = np.array([each.is_copy for each in expressions], dtype=np.bool_)[number]
    once = _run_sums(ints(rows, "num_inputs"), input_bytes(plan)).astype(np.int64) * made
    passes, resident = _passes(plan, expressions), stays_resident(once, lane)
    copied = np.where(copies, once * speeds.copied_byte, 0.0)
    computing = _computing(plan, expressions, speeds)
    # Rows that share a scale are made once more by each of the others, to find the largest magnitude of all.
    computing += joined_sums(plan, computing)
    seconds = copied + np.where(copies, 0.0, computing) * made
    by_row = (
        once * (1 + np.where(resident, 0, passes)) + joined_sums(plan, once).astype(np.int64),
        ints(rows, "nbytes") * (1 + lists(rows, "also")[0]) * made,
        once * ~copies,
        seconds,
        copied,
    )
    # A segment's rows lie side by side, so sums over runs are sums over segments.
    segments = plan["segments"]
    sums = [_run_sums(ints(segments, "num_rows"), each) for each in by_row]
    read, written, computed = (each.astype(np.int64) for each in sums[:3])
    used = {each.method for each in expressions} & methods().keys()
    return SegmentLoads(
        cost=ints(segments, "cost"),
        read_bytes=read,
        write_bytes=written,
        source_bytes=computed,
        thread_seconds=sums[3],
        copy_seconds=sums[4],
        guessed=tuple(sorted(name for name in used if not speeds.knows(name))),
        num_tensors=len(plan["tensors"]),
    )


def _computing(plan: Plan, expressions: tuple[Expression, ...], speeds: MethodSpeeds) -> Floats:
    """Seconds that one thread computes for each row, were it not a copy ``[rows]``."""
    rows = plan["rows"]
    dtypes, names = codes(plan["inputs"], "dtype")
    bits = np.array([DType(name).bits for name in names], dtype=np.float64)
    elements = _run_sums(ints(rows, "num_inputs"), input_bytes(plan) * 8 / bits[dtypes])
    per_element = np.array([speeds.per_element(each.method) for each in expressions])
    per_tensor = np.array([speeds.per_tensor(each.method) for each in expressions])
    which = ints(rows, "expression")
    is_encoded = np.array([each.encode is not None for each in expressions], dtype=np.bool_)
    is_packed = ints(plan["inputs"], "scales") >= 0
    coded = ints(plan["inputs"], "nbytes") * 8 / bits[dtypes] * is_packed
    decoded = _run_sums(ints(rows, "num_inputs"), coded) * speeds.decoded
    encoded = ints(rows, "num_elements") * is_encoded[which] * speeds.encoded
    computed = elements * per_element[which] + ints(rows, "num_parts") * per_tensor[which]
    return np.asarray(computed + decoded + encoded)


def _passes(plan: Plan, expressions: tuple[Expression, ...]) -> Ints:
    """Statistics passes that each row makes before the last one ``[rows]``."""
    lengths, sizes = lists(plan["parts"], "shape")
    first = ints(plan["rows"], "first_part")
    begins, counts = starts(lengths)[first], lengths[first]
    shapes = np.split(sizes[gather(begins, counts)], np.cumsum(counts)[:-1]) if len(first) else []
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    passes = np.zeros(len(first), dtype=np.int64)
    for row, (number, shape) in enumerate(
        zip(ints(plan["rows"], "expression").tolist(), shapes, strict=True)
    ):
        key = (number, tuple(shape.tolist()))
        if key not in found:
            found[key] = expression_passes(expressions[number], key[1])
        passes[row] = found[key]
    return passes


def _run_sums(lengths: Ints, values: npt.NDArray[np.generic]) -> Floats:
    """Sum of each of some consecutive runs, from their lengths; exact below 2**53."""
    ends = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    begins = starts(lengths)
    return np.asarray(ends[begins + lengths] - ends[begins], dtype=np.float64)
