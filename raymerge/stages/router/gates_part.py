"""Router rows from what was summed up over prompts.

All arithmetic is float64, rounded once to float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from raymerge.errors import NonFiniteError, PlanError, Problem
from raymerge.planner.inputs.stages import GateSpec
from raymerge.stages.router.accumulate import FLOOR
from raymerge.stages.router.gates import Ridge, ridge_rows
from raymerge.stages.router.readings import Schedule


class Rows(NamedTuple):
    """Rows of one layer."""

    routed: torch.Tensor
    """Of the routed experts: float32 ``[E, H]``."""
    shared: torch.Tensor
    """Of the shared experts with gates: float32 ``[S, H]``."""
    separation: float | None = None
    """That of ridge's rows; None for rows of other modes."""


def rows_of(spec: GateSpec, schedule: Schedule, parts: Mapping[str, torch.Tensor], *, layer: int) -> Rows:
    """The rows of a layer.

    Args:
        spec: what is asked.
        schedule: what was read.
        parts: the sums of all units, as ``Accumulator.parts`` gives them; may be overwritten.
        layer: for messages.

    Raises:
        PlanError: ridge with so small a penalty, or with so large a scale, that rows are no sane numbers.
        NonFiniteError: the base model gave NaN or infinity.
    """
    for part in parts.values():
        check_finite(part, spec, layer)
    try:
        both, separation = _both(spec, schedule, parts)
    except ArithmeticError as error:
        raise PlanError(_open_rows(spec, layer)) from error
    routed, shared = both[: schedule.num_routed], both[schedule.num_routed :]
    rows = Rows((routed * spec.scale).float().cpu(), shared.float().cpu(), separation)
    if not _is_finite(rows.routed) or not _is_finite(rows.shared):
        raise PlanError(_too_large(spec, layer))
    return rows


def mean_rows(vectors: torch.Tensor, num_routed: int, *, centred: bool) -> torch.Tensor:
    """Vectors of length 1, float64 ``[E + S, H]``.

    Args:
        vectors: one an expert.
        num_routed: routed experts among them.
        centred: whether what all routed experts have in common is taken from theirs first.
    """
    vectors = vectors.clone()
    if centred and num_routed > 1:
        vectors[:num_routed] -= vectors[:num_routed].mean(0)
    return unit(vectors)


def difference(sums: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """Mean over positive runs less mean over negative runs: float64 ``[E + S, H]`` of ``[2, E + S, H]``."""
    runs = [schedule.num_positive, schedule.num_negative]
    counts = torch.tensor(runs, dtype=torch.float64, device=sums.device)
    means = sums / counts.clamp_min(1.0)[:, :, None]
    return means[0] - means[1]


def unit(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors ``[.., H]`` divided by their length, or by 1e-8 where they are shorter."""
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    shortened: torch.Tensor = vectors / lengths.clamp_min(FLOOR)
    return shortened


def check_finite(numbers: torch.Tensor, spec: GateSpec, layer: int) -> None:
    """Refuse what is not finite.

    Raises:
        NonFiniteError: something is NaN or infinite.
    """
    if not _is_finite(numbers):
        what = f"prompts give NaN or infinity in layer {layer}."
        remedy = (
            "Check the base model's weights, for example by `raymerge inspect`; or use gate_mode: random."
        )
        raise NonFiniteError(Problem(spec.base.name, what, remedy))


def _both(spec: GateSpec, schedule: Schedule, parts: Mapping[str, torch.Tensor]) -> Ridge:
    """Rows of routed and shared experts, and their separation where it is known."""
    match spec.mode:
        case "ridge":
            shares = schedule.shares.to(parts["gram"].device)
            return ridge_rows(parts["gram"], parts["means"], shares=shares, penalty=spec.penalty)
        case "centroid":
            return Ridge(mean_rows(unit(parts["directions"]), schedule.num_routed, centred=True), None)
        case _:
            vectors, centred = difference(parts["sums"], schedule), spec.mode == "router_input"
            return Ridge(mean_rows(vectors, schedule.num_routed, centred=centred), None)


def _is_finite(numbers: torch.Tensor) -> bool:
    """Whether all are; numbers so large that their sum overflows are refused as well."""
    # A sum takes no memory, unlike a mask: matrices may be as large as memory allows.
    return math.isfinite(float(numbers.sum(dtype=torch.float64)))


def _open_rows(spec: GateSpec, layer: int) -> Problem:
    what = f"the router inputs of layer {layer} do not determine ridge's rows with so small a penalty."
    return Problem(
        spec.base.name, what, f"Write gate_ridge: 0.1 instead of {spec.penalty:g}, or give more text."
    )


def _too_large(spec: GateSpec, layer: int) -> Problem:
    what = f"the router's rows of layer {layer} are too large for float32 with gate_scale {spec.scale:g}."
    return Problem(spec.base.name, what, "Write gate_scale: 1.0.")
