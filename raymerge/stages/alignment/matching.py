"""Matching experts with experts and neurons with neurons, by what they compute.

Two stages (arXiv 2509.11348): experts first, by features that no order of neurons changes; then the neurons
of each pair, by their weights. Both are assignments of least total cost. Costs are float64, rounded to a grid
that lies far above the rounding of their sums: no choice hangs on threads or devices, and what is equal is
equal. Of several best orders, one that leaves most in place is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linear_sum_assignment

Costs = npt.NDArray[np.float64]
"""What it costs to put a column's member into a row's place; square."""
Order = npt.NDArray[np.intp]
"""For each place the number of the member that belongs there."""

EXPERT_STEP = 2.0**-30
"""Total costs of experts that differ by less are equal."""

CHUNK = 256
"""Columns, or rows, that are converted to float64 at once."""

# Steps of the grid in the rows' mean squared length.
_GRID = 2.0**30


def order_of(costs: Costs, *, step: float = 1.0) -> Order:
    """The order of least total cost; among equals one that leaves most in place.

    Args:
        costs: ``[n, n]``; overwritten.
        step: two total costs that differ by less are equal.
    """
    size = len(costs)
    if not size:
        return np.zeros(0, dtype=np.intp)
    # All places together get less than one step, so that this decides between equals alone.
    costs[np.diag_indices(size)] -= step / (2 * size)
    nearest: Order = costs.argmin(axis=1)
    if len(np.unique(nearest)) == size:
        # Every place has its cheapest member: no assignment costs less.
        return nearest
    found: Order = linear_sum_assignment(costs)[1]
    return found


def group_order(costs: Costs, num_groups: int, *, step: float = 1.0) -> Order:
    """As ``order_of``, where neighbours that make a group stay together.

    A group belongs with the one that costs least when their members are matched.

    Args:
        costs: ``[n, n]``, n a multiple of ``num_groups``.
        num_groups: groups of ``n / num_groups`` neighbours.
        step: two total costs that differ by less are equal.
    """
    size = len(costs) // num_groups
    between = np.zeros((num_groups, num_groups))
    inside: dict[tuple[int, int], Order] = {}
    for mine in range(num_groups):
        for theirs in range(num_groups):
            part = costs[mine * size : (mine + 1) * size, theirs * size : (theirs + 1) * size]
            order = order_of(part.copy(), step=step)
            inside[mine, theirs] = order
            between[mine, theirs] = part[np.arange(size), order].sum()
    groups = order_of(between, step=step)
    found = [inside[mine, theirs] + theirs * size for mine, theirs in enumerate(groups)]
    return np.concatenate(found)


def total_cost(costs: Costs, order: Order) -> float:
    """The cost of an order."""
    return float(costs[np.arange(len(order)), order].sum())


def expert_costs(features: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Costs:
    """What it costs to put one expert into another's place, judged by several features alike.

    Squared distances of each feature are divided by their median, then added up. A feature in which all
    experts are equal does not count.

    Args:
        features: pairs of ``[experts, n]``, those of the reference and of the other model; at least one.

    Returns:
        ``[experts, experts]``; totals that differ by less than ``EXPERT_STEP`` are equal.
    """
    size = len(features[0][0])
    total = np.zeros((size, size))
    for feature in features:
        costs = squared_distances([feature])
        # Where most experts are twins, more than half of the distances are zero.
        usual = float(np.median(costs)) or float(costs.mean())
        total += costs / (usual or 1.0)
    return total


def squared_distances(matrices: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Costs:
    """Squared distances between the rows of two models, added up over several matrices.

    Args:
        matrices: pairs of ``[n, m]`` on one device, at least one; n is the same for all, m may differ.

    Returns:
        ``[n, n]`` on the CPU, in steps of 2**-30 of the rows' mean squared length: whole numbers.
    """
    first, second = matrices[0]
    costs = torch.zeros(len(first), len(second), dtype=torch.float64, device=first.device)
    mine, theirs = costs.new_zeros(len(first)), costs.new_zeros(len(second))
    for pair in matrices:
        for begin in range(0, pair[0].shape[1], CHUNK):
            one, two = (each[:, begin : begin + CHUNK].double() for each in pair)
            costs.addmm_(one, two.T, alpha=-2.0)
            mine += one.square().sum(1)
            theirs += two.square().sum(1)
    costs += mine[:, None]
    costs += theirs
    scale = float((mine.mean() + theirs.mean()) / 2)
    found: Costs = costs.mul_(_GRID / (scale or 1.0)).round_().clamp_(min=0).cpu().numpy()
    return found
