"""Router rows from what was summed up over prompts.

All arithmetic is float64, rounded once to float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from raymerge.errors import NonFiniteError, PlanError, Problem
from raymerge.planner.stages import GateSpec
from raymerge.router.accumulate import FLOOR
from raymerge.router.readings import Schedule


class Rows(NamedTuple):
    """Rows of one layer."""

    routed: torch.Tensor
    """Of the routed experts: float32 ``[E, H]``."""
    shared: torch.Tensor
    """Of the shared experts with gates: float32 ``[S, H]``."""


def rows_of(spec: GateSpec, plan: Schedule, parts: Mapping[str, torch.Tensor], *, layer: int) -> Rows:
    """The rows of a layer.

    Args:
        spec: what is asked.
        plan: what was read.
        parts: the sums of all units, as ``Accumulator.parts`` gives them; may be overwritten.
        layer: for messages.

    Raises:
        PlanError: ridge without a penalty, on inputs that leave rows open.
        NonFiniteError: the base model gave NaN or infinity.
    """
    for part in parts.values():
        check_finite(part, spec, layer)
    try:
        both = _both(spec, plan, parts)
    except ArithmeticError as error:
        raise PlanError(_open_rows(spec, layer)) from error
    routed, shared = both[: plan.num_routed], both[plan.num_routed :]
    return Rows((routed * spec.scale).float().cpu(), shared.float().cpu())


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


def difference(sums: torch.Tensor, plan: Schedule) -> torch.Tensor:
    """Mean over positive runs less mean over negative runs: float64 ``[E + S, H]`` of ``[2, E + S, H]``."""
    counts = torch.tensor([plan.num_positive, plan.num_negative], dtype=torch.float64, device=sums.device)
    means = sums / counts.clamp_min(1.0)[:, :, None]
    return means[0] - means[1]


def unit(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors ``[.., H]`` divided by their length, or by 1e-8 where they are shorter."""
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    shortened: torch.Tensor = vectors / lengths.clamp_min(FLOOR)
    return shortened


def ridge_rows(gram: torch.Tensor, means: torch.Tensor, *, num_routed: int, penalty: float) -> torch.Tensor:
    """Ridge regression from router inputs to the expert whose text they are in (DUME, 2603.29765).

    With G the mean of ``x x^T`` and m_e the mean of expert e's inputs, the routed rows are proportional to
    ``(m_e - m) (G + lambda I)^-1``: the targets are centred, which takes from all rows what they have in
    common, and changes no choice. One factor for all routed rows makes their differences log-odds: for two
    classes of inputs with one covariance S these are ``(m_a - m_b) S^-1``, so that ``v (m_a - m_b) = v S v``
    for the difference v of two rows. The factor is the ratio of the two sums over all pairs, S taken with the
    penalty: without it the softmax over the chosen experts would be nearly flat.

    A shared expert's row is the density of its inputs over that of the routed experts' as the same regression
    estimates it (uLSIF; Kanamori, Hido and Sugiyama, JMLR 2009): ``m_s (G + lambda I)^-1``.

    Args:
        gram: G over the routed experts' inputs, each expert's weighing 1 / E in all: float64 ``[H, H]``;
            overwritten.
        means: float64 ``[E + S, H]``.
        num_routed: E.
        penalty: lambda, relative to the mean of the Gram matrix's diagonal.

    Returns:
        float64 ``[E + S, H]``.

    Raises:
        ArithmeticError: the matrix cannot be inverted.
    """
    diagonal = gram.diagonal()
    diagonal += penalty * diagonal.mean()
    routed = means[:num_routed]
    targets = means.clone()
    if num_routed > 1:
        targets[:num_routed] = (routed - routed.mean(0)) / num_routed
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):
        raise ArithmeticError("the Gram matrix with its penalty is not positive definite")
    rows = torch.cholesky_solve(targets.T, factor).T.contiguous()
    if num_routed > 1:
        rows[:num_routed] *= _log_odds(rows[:num_routed] @ routed.T)
    return rows


def check_finite(numbers: torch.Tensor, spec: GateSpec, layer: int) -> None:
    """Refuse what is not finite.

    Raises:
        NonFiniteError: something is NaN or infinite.
    """
    if not bool(torch.isfinite(numbers).all()):
        what = f"prompts give NaN or infinity in layer {layer}."
        remedy = (
            "Check the base model's weights, for example by `raymerge inspect`; or use gate_mode: random."
        )
        raise NonFiniteError(Problem(spec.base.name, what, remedy))


def _both(spec: GateSpec, plan: Schedule, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    match spec.mode:
        case "ridge":
            routed = plan.num_routed
            return ridge_rows(parts["gram"], parts["means"], num_routed=routed, penalty=spec.penalty)
        case "centroid":
            return mean_rows(unit(parts["directions"]), plan.num_routed, centred=True)
        case _:
            vectors = difference(parts["sums"], plan)
            return mean_rows(vectors, plan.num_routed, centred=spec.mode == "router_input")


def _log_odds(scores: torch.Tensor) -> float:
    """The factor on ridge's rows; ``scores`` float64 ``[E, E]`` has each row times each expert's mean.

    For the difference v of rows a and b, ``E v (G + lambda I) v`` is ``v (m_a - m_b)``; what the means of the
    classes make up of it is no spread within a class.
    """
    count = scores.shape[0]
    gaps = count * scores.trace() - scores.sum()
    between = count * scores.square().sum() - scores.sum(0).square().sum()
    within = gaps - between
    # Nothing to scale where all rows are equal, as with the same texts for every expert.
    return float(count * gaps / within) if float(gaps) > 0 and float(within) > 0 else 1.0


def _open_rows(spec: GateSpec, layer: int) -> Problem:
    what = f"the router inputs of layer {layer} do not determine ridge's rows without a penalty."
    return Problem(
        spec.base.name, what, f"Write gate_ridge: 0.1 instead of {spec.penalty:g}, or give more text."
    )
