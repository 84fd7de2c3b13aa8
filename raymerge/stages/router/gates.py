"""Router rows from sums over the tokens that a layer sees, directly or by ridge regression.

Sums are additive: those of several units add up to those of all. All arithmetic is float64, rounded once to
float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from raymerge.deferred import torch
from raymerge.errors import NonFiniteError, PlanError, Problem
from raymerge.planner.inputs.sources import GateSpec
from raymerge.stages.router.prompts import Schedule, Use

FLOOR = 1e-8

_TILE_TOKENS = 1024


def accumulator(mode: str, schedule: Schedule, hidden_size: int, device: torch.device) -> Sums | Moments:
    """Adds runs to sums by name, float64, with the shapes of ``part_shapes``."""
    if mode == "ridge":
        return Moments(schedule, hidden_size, device)
    return Sums(mode, schedule, hidden_size, device)


def part_shapes(mode: str, num_experts: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a gate mode's sums; experts are the routed ones and then the shared ones."""
    if mode == "ridge":
        return {"gram": (2, hidden_size, hidden_size), "means": (2, num_experts, hidden_size)}
    return {"sums": (2, num_experts, hidden_size)}


def work_nbytes(mode: str, num_experts: int, hidden_size: int) -> int:
    """Peak memory in bytes for the sums of one layer and their rows, also when units are added up."""
    sums = num_experts * hidden_size
    numbers = 12 * sums
    if mode == "ridge":
        # The matrices of both halves; then as many that are read to be added, or one half's with the penalty
        # and its factor; one more that the allocator may hold on to. And the tiles, with the tokens of a run
        # beside them.
        numbers += 5 * hidden_size**2 + 4 * _TILE_TOKENS * hidden_size
    return numbers * torch.float64.itemsize


class Sums:
    """Sums over runs of one vector a run: ``sums[0]`` of positive runs, ``sums[1]`` of negative ones."""

    def __init__(self, mode: str, schedule: Schedule, hidden_size: int, device: torch.device) -> None:
        self._mode = mode
        self._sums = torch.zeros(2, schedule.num_experts, hidden_size, dtype=torch.float64, device=device)

    def add(self, use: Use, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        """Add a run for or against an expert: float32 ``[T, H]`` both."""
        match self._mode:
            case "router_input":
                vector = router_input.double().mean(0)
            case "hidden_avg":
                vector = hidden.double().mean(0)
            case "centroid":
                directions = router_input.double()
                directions /= directions.norm(dim=1, keepdim=True).clamp_min_(FLOOR)
                vector = directions.sum(0)
            case _:
                vector = hidden[-1].double()
        self._sums[0 if use.sign > 0 else 1, use.expert] += vector

    def parts(self) -> Mapping[str, torch.Tensor]:
        return {"sums": self._sums}


class Moments:
    """Sums of the router inputs by expert, and their Gram matrix in which every routed expert counts alike.

    Both by halves of the experts' texts, each token weighted as in the whole: the halves add up to the means
    and the matrix of all texts."""

    def __init__(self, schedule: Schedule, hidden_size: int, device: torch.device) -> None:
        self._schedule = schedule
        self._gram = torch.zeros(2, hidden_size, hidden_size, dtype=torch.float64, device=device)
        self._means = torch.zeros(2, schedule.num_experts, hidden_size, dtype=torch.float64, device=device)
        self._tiles = [_Tile(gram) for gram in self._gram]

    def add(self, use: Use, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        """Add the run's router inputs, weighted so that every expert's tokens have weight 1 in all."""
        del hidden
        weight = 1.0 / self._schedule.num_tokens[use.expert]
        for half, vectors in enumerate((router_input[: use.first], router_input[use.first :])):
            self._means[half, use.expert].add_(vectors.double().sum(0), alpha=weight)
            if use.expert < self._schedule.num_routed:
                self._tiles[half].add(vectors, (weight / self._schedule.num_routed) ** 0.5)

    def parts(self) -> Mapping[str, torch.Tensor]:
        """Add nothing afterwards."""
        for tile in self._tiles:
            tile.multiply()
        return {"gram": self._gram, "means": self._means}


class _Tile:
    """Collects tokens for a Gram matrix: one product for many short runs."""

    def __init__(self, gram: torch.Tensor) -> None:
        self._gram = gram
        self._tokens = gram.new_empty(_TILE_TOKENS, gram.shape[1])
        self._filled = 0

    def add(self, vectors: torch.Tensor, factor: float) -> None:
        done = 0
        while done < vectors.shape[0]:
            count = min(vectors.shape[0] - done, _TILE_TOKENS - self._filled)
            place = self._tokens[self._filled : self._filled + count]
            place.copy_(vectors[done : done + count]).mul_(factor)
            done, self._filled = done + count, self._filled + count
            if self._filled == _TILE_TOKENS:
                self.multiply()

    def multiply(self) -> None:
        tokens = self._tokens[: self._filled]
        self._gram.addmm_(tokens.T, tokens)
        self._filled = 0


UNPROVEN = 0.1
"""Separation below which rows learnt from one half of the texts do not hold for the other."""

_MOST_LOG_ODDS = 100.0
# Nothing is surer than that, whatever few tokens say.
_SAME = 1e-12
# Means that differ by less of their length differ by rounding.


class Ridge(NamedTuple):
    rows: torch.Tensor
    """float64 ``[E + S, H]``."""
    separation: float | None
    """Distance of two experts' texts along the difference of their rows, in standard deviations within a
    text, on texts that the rows were not made of; at most 10. None for a single expert."""


class _Trial(NamedTuple):
    """Rows of one half on the tokens of the other; means over the pairs of experts."""

    gap: float
    """Difference of the two experts' mean logits' differences."""
    spread: float
    """Variance of the difference of logits within an expert's texts."""


def ridge_rows(gram: torch.Tensor, means: torch.Tensor, *, shares: torch.Tensor, penalty: float) -> Ridge:
    """Ridge regression from router inputs to the expert whose text they are in (DUME, 2603.29765).

    With G the mean of ``x x^T`` and m_e the mean of expert e's inputs, the routed rows are proportional to
    ``(m_e - m) (G + lambda I)^-1``: the targets are centred, which removes what all rows have in common and
    changes no choice. One factor for all of them makes their differences log-odds, without which the softmax
    over the chosen experts would be nearly flat. For two classes of inputs with one covariance S log-odds are
    ``(m_a - m_b) S^-1``, so that ``v (m_a - m_b) = v S v`` for the difference v of two rows.

    The tokens that rows were made of cannot give the factor: with fewer than H tokens, rows separate even
    noise. So rows of either half of the texts are tried on the other half; both sides of the equation are
    sums of squares that the other half's G and m give. The factor gives the rows of all texts the length that
    both trials ask for, over all pairs. If the trials show no difference between experts, logits differ by
    about ``UNPROVEN``.

    A shared expert's row is the density ratio of its inputs to the routed experts', estimated by the same
    regression (uLSIF; Kanamori, Hido and Sugiyama, JMLR 2009): ``m_s (G + lambda I)^-1``.

    ``gram``: G over the routed experts' inputs, each expert weighing 1 / E in all, by halves of the texts
    that add up to the whole: float64 ``[2, H, H]``; overwritten. ``means``: the means in the same way:
    float64 ``[2, E + S, H]``. ``shares``: the share of each routed expert's tokens that is in each half:
    float64 ``[2, E]``. ``penalty``: lambda, relative to the mean of the Gram matrix's diagonal. Raises
    ArithmeticError: the matrix cannot be inverted in float64."""
    num_routed = shares.shape[1]
    trials = [_tried(gram, means, shares, half=half, penalty=penalty) for half in (0, 1)]
    every, targets = gram[0].add_(gram[1]), means[0] + means[1]
    if num_routed == 1:
        return Ridge(_solved(every, targets, penalty), None)
    targets[:num_routed] = _centred(targets[:num_routed])
    rows = _solved(every, targets, penalty)
    routed = _normed(rows[:num_routed])
    gap, spread = (math.fsum(each) / 2 for each in zip(*trials, strict=True))
    spread = max(spread, gap * gap / _MOST_LOG_ODDS)
    separation = gap / math.sqrt(spread) if spread > 0 else 0.0
    if separation < UNPROVEN:
        size = _over_pairs(routed @ every @ routed.T)
        length = UNPROVEN / math.sqrt(size) if size > 0 else 0.0
    else:
        length = gap / spread
    rows[:num_routed] = routed * length
    return Ridge(rows, separation)


def _tried(
    gram: torch.Tensor, means: torch.Tensor, shares: torch.Tensor, *, half: int, penalty: float
) -> _Trial:
    """Try rows of one half on the other, scaled so that two differ by 1 in the mean."""
    other, num_routed = 1 - half, shares.shape[1]
    known = (shares > 0).all(0)
    if int(known.sum()) < 2:
        return _Trial(0.0, 0.0)
    learnt, tried = (means[each, :num_routed][known] / shares[each][known][:, None] for each in (half, other))
    rows = _normed(_solved(gram[half].clone(), _centred(learnt), penalty))
    # Within experts: the mean square less that of the experts' means, which weigh as much as their tokens.
    there = shares[other] > 0
    means_there = means[other, :num_routed][there] / shares[other][there].sqrt()[:, None]
    between = rows @ means_there.T
    within = rows @ gram[other] @ rows.T - between @ between.T / num_routed
    return _Trial(_over_pairs(rows @ tried.T), _over_pairs(within) / float(shares[other].mean()))


def _solved(gram: torch.Tensor, targets: torch.Tensor, penalty: float) -> torch.Tensor:
    """``targets (gram + lambda I)^-1``; the penalty is added to ``gram`` in place."""
    diagonal = gram.diagonal()
    diagonal += penalty * diagonal.mean()
    factor, failed = torch.linalg.cholesky_ex(gram)
    pivots = factor.diagonal().square()
    # A matrix of lower rank has a factor all the same where its last pivots are rounding errors above zero.
    rounding = torch.finfo(gram.dtype).eps * len(gram)
    if int(failed) or not float(pivots.min()) > rounding * float(pivots.max()):
        raise ArithmeticError("the Gram matrix with its penalty is not positive definite")
    return torch.cholesky_solve(targets.T, factor).T.contiguous()


def _centred(means: torch.Tensor) -> torch.Tensor:
    """Differences from the mean of all; exactly 0 if all are the same."""
    differences = means - means[0]
    differences -= differences.mean(0)
    is_same = float(differences.norm()) <= _SAME * float(means.norm())
    return torch.zeros_like(differences) if is_same else differences


def _normed(rows: torch.Tensor) -> torch.Tensor:
    """Rows centred and scaled so that the mean square of their differences is 1."""
    length = float(rows.norm()) * math.sqrt(2 / (len(rows) - 1))
    return rows / length if length > 0 else rows


def _over_pairs(products: torch.Tensor) -> float:
    """Mean over all pairs a, b of ``p_aa + p_bb - p_ab - p_ba``: of products of differences."""
    count = len(products)
    return float(count * products.trace() - products.sum()) / (count * (count - 1) / 2)


class Rows(NamedTuple):
    routed: torch.Tensor
    """float32 ``[E, H]``."""
    shared: torch.Tensor
    """Shared experts with gates: float32 ``[S, H]``."""
    separation: float | None = None


def rows_of(spec: GateSpec, schedule: Schedule, parts: Mapping[str, torch.Tensor], *, layer: int) -> Rows:
    """Raises PlanError: ridge with too small a penalty or too large a scale; NonFiniteError: the base model
    gave NaN or infinity."""
    for part in parts.values():
        check_finite(part, spec, layer)
    try:
        both, separation = _both(spec, schedule, parts)
    except ArithmeticError as error:
        what = f"the router inputs of layer {layer} do not determine ridge's rows with so small a penalty."
        remedy = f"Write gate_ridge: 0.1 instead of {spec.penalty:g}, or give more text."
        raise PlanError(Problem(spec.base.name, what, remedy)) from error
    routed, shared = both[: schedule.num_routed], both[schedule.num_routed :]
    rows = Rows((routed * spec.scale).float().cpu(), shared.float().cpu(), separation)
    if not _is_finite(rows.routed) or not _is_finite(rows.shared):
        what = f"the router's rows of layer {layer} are too large for float32 with gate_scale {spec.scale:g}."
        raise PlanError(Problem(spec.base.name, what, "Write gate_scale: 1.0."))
    return rows


def difference(sums: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """Mean over positive runs less mean over negative runs: float64 ``[E + S, H]`` of ``[2, E + S, H]``."""
    runs = [schedule.num_positive, schedule.num_negative]
    counts = torch.tensor(runs, dtype=torch.float64, device=sums.device)
    means = sums / counts.clamp_min(1.0)[:, :, None]
    return means[0] - means[1]


def unit(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors ``[.., H]`` divided by their length, or by 1e-8 if they are shorter."""
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    shortened: torch.Tensor = vectors / lengths.clamp_min(FLOOR)
    return shortened


def check_finite(numbers: torch.Tensor, spec: GateSpec, layer: int) -> None:
    if not _is_finite(numbers):
        what = f"prompts give NaN or infinity in layer {layer}."
        remedy = (
            "Check the base model's weights, for example by `raymerge inspect`; or use gate_mode: random."
        )
        raise NonFiniteError(Problem(spec.base.name, what, remedy))


def _both(spec: GateSpec, schedule: Schedule, parts: Mapping[str, torch.Tensor]) -> Ridge:
    if spec.mode == "ridge":
        shares = schedule.shares.to(parts["gram"].device)
        return ridge_rows(parts["gram"], parts["means"], shares=shares, penalty=spec.penalty)
    is_centroid, num_routed = spec.mode == "centroid", schedule.num_routed
    vectors = unit(parts["sums"][0]) if is_centroid else difference(parts["sums"], schedule)
    if spec.mode in ("centroid", "router_input") and num_routed > 1:
        vectors[:num_routed] -= vectors[:num_routed].mean(0)
    return Ridge(unit(vectors), None)


def _is_finite(numbers: torch.Tensor) -> bool:
    """Whether all are; also refuses numbers so large that their sum overflows."""
    # A sum takes no memory, unlike a mask: matrices may be as large as memory allows.
    return math.isfinite(float(numbers.sum(dtype=torch.float64)))
