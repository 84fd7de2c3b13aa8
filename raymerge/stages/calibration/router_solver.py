"""One router of a merge from those of its sources, by what each of them does with its domain's tokens (HARC,
arXiv 2606.03391).

A router's choice follows from ``z = W x``. Near a source's own router W_i the loss of another one W grows
with ``(z - z_i) H (z - z_i)``, where H is how the source's scores answer to its logits: ``diag(r) - r r^T``
for a softmax r. Summed over all tokens of all domains that is least where

    sum_i Sigma_i W = sum_i Sigma_i W_i,    Sigma_i Z = 1 / N_i sum_t H_t Z x_t x_t^T,

a linear system in all of W's elements, which is solved by conjugate gradients without its matrix. The paper
is about softmax. For sigmoid routers, whose experts do not compete, ``H = diag(s (1 - s))`` follows in the
same way; that derivation is ours.

All sums are float64, over blocks of tokens in a fixed order: the bytes of the result depend on the number of
torch's threads, which the caller sets to one, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from raymerge.deferred import torch

Scoring: TypeAlias = Literal["softmax", "sigmoid"]

GAMMA = 0.9
"""Share of the curvature itself in the system; the rest is its diagonal, which makes the solution unique."""
TOLERANCE = 1e-6
"""Of the residual, relative to the right side."""
MOST_ITERATIONS = 1000
BLOCK_TOKENS = 1024


class Domain(NamedTuple):
    """What a source's router does with its domain's tokens."""

    inputs: Sequence[torch.Tensor]
    """float32 ``[n, D]`` each, one after the other; a router with a bias has a last column of ones."""
    router: torch.Tensor
    """float64 ``[E, D]``."""

    @property
    def num_tokens(self) -> int:
        return sum(len(each) for each in self.inputs)


@dataclass(frozen=True, slots=True)
class Solution:
    router: torch.Tensor
    """float64 ``[E, D]``."""
    num_iterations: int
    residual: float
    """Length of what is left of the right side, relative to it."""

    @property
    def is_converged(self) -> bool:
        return self.residual <= TOLERANCE


def solve_router(
    domains: Sequence[Domain],
    start: torch.Tensor,
    scoring: Scoring,
    *,
    gamma: float = GAMMA,
    most_iterations: int = MOST_ITERATIONS,
) -> Solution:
    """The router of all domains, from ``start``, float64 ``[E, D]``: without the diagonal (``gamma`` 1) what
    is added to all rows alike changes no softmax, and stays as it is there."""
    systems = [_Curvature(domain, scoring, gamma) for domain in domains]
    target = _added([each.times(each.router) for each in systems])
    length = float(target.norm())
    router = start.clone()
    left = target - _added([each.times(router) for each in systems])
    direction, square = left.clone(), float(left.square().sum())
    iterations = 0
    while iterations < most_iterations and square**0.5 > TOLERANCE * length:
        answer = _added([each.times(direction) for each in systems])
        step = square / float((direction * answer).sum())
        router.add_(direction, alpha=step)
        left.sub_(answer, alpha=step)
        before, square = square, float(left.square().sum())
        direction.mul_(square / before).add_(left)
        iterations += 1
    return Solution(router, iterations, square**0.5 / length if length else 0.0)


def solver_nbytes(num_experts: int, width: int, num_tokens: int, num_domains: int) -> int:
    """Peak memory in bytes beside the inputs: scores of all tokens, a block of them, and matrices."""
    block = BLOCK_TOKENS * (2 * width + 6 * num_experts)
    # A router, a diagonal and a product of each domain, and those of the system.
    matrices = (8 + 4 * num_domains) * num_experts * width
    return torch.float64.itemsize * (num_tokens * num_experts + block + matrices)


class _Curvature:
    """Sigma of one domain, as a function of matrices ``[E, D]``."""

    def __init__(self, domain: Domain, scoring: Scoring, gamma: float) -> None:
        self.router = domain.router
        self._inputs = domain.inputs
        self._count = domain.num_tokens
        self._competes = scoring == "softmax"
        self._gamma = gamma
        self._scores: list[torch.Tensor] = []
        self._diagonal = torch.zeros_like(domain.router)
        for block in self._blocks():
            logits = block @ self.router.T
            scores = logits.softmax(1) if self._competes else logits.sigmoid()
            self._scores.append(scores)
            self._diagonal.addmm_((scores * (1.0 - scores)).T, block.square_(), alpha=1.0 / self._count)

    def times(self, matrix: torch.Tensor) -> torch.Tensor:
        total = self._diagonal * matrix * (1.0 - self._gamma)
        for block, scores in zip(self._blocks(), self._scores, strict=True):
            answers = block @ matrix.T
            answers.mul_(scores)
            share = answers.sum(1, keepdim=True) if self._competes else answers
            answers.addcmul_(scores, share, value=-1.0)
            total.addmm_(answers.T, block, alpha=self._gamma / self._count)
        return total

    def _blocks(self) -> Iterator[torch.Tensor]:
        for inputs in self._inputs:
            for block in torch.split(inputs, BLOCK_TOKENS):
                yield block.double()


def _added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
