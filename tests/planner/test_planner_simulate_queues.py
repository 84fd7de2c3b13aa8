"""Lanes that wait for each other: beside exact results of queueing theory, and never beyond what there is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.planner.simulation import Network, Paces, Resource

READING = Resource(("reading", "-"), (1.0, math.inf), is_common=True)
WRITING = Resource(("-", "writing"), (math.inf, 1.0), is_common=True)
LINK = Resource(("link", "link"), (1.0, 1.0))
CORES = Resource(("cores", "cores"), (1.0, 1.0), servers=2, is_cores=True)
ALL = (READING, WRITING, LINK, CORES)

times = st.floats(0.0, 10.0)


def _network(
    resources: tuple[Resource, ...], shape: tuple[int, int], seconds: float, *, threads: int = 99
) -> Network:
    network = Network(shape, resources, threads)
    network.computes[:] = seconds
    return network


def _settled(network: Network) -> Paces:
    return network.settle(np.ones(network.computes.shape, dtype=np.bool_))


def _exact(demands: list[float], lanes: int) -> float:
    """Rate of a closed network of single servers, by mean value analysis."""
    queues, rate = np.zeros(len(demands)), 0.0
    for count in range(1, lanes + 1):
        stays = np.array(demands) * (1 + queues)
        rate = count / stays.sum()
        queues = rate * stays
    return rate


def _exact_crew(think: float, service: float, servers: int, lanes: int) -> float:
    """Rate of lanes that come back to some servers after a while, from the balance of their states."""
    weights = [1.0]
    for busy in range(lanes):
        weights.append(weights[-1] * (lanes - busy) / think * service / min(busy + 1, servers))
    there = sum(min(busy, servers) * weight for busy, weight in enumerate(weights)) / sum(weights)
    return there / service


@given(
    read=st.floats(0.1, 5.0), write=st.floats(0.1, 5.0), compute=st.floats(0.1, 5.0), lanes=st.integers(1, 12)
)
@settings(deadline=None, max_examples=80)
def test_one_of_each_is_near_the_exact_result(read: float, write: float, compute: float, lanes: int) -> None:
    network = _network((READING, WRITING), (1, lanes), compute, threads=1)
    network.moves[0, 0], network.moves[1, 1] = read, write
    # With one lane there is nobody to wait for, and threads are no matter.
    expected = _exact([read, write, compute], lanes)
    assert _settled(network).rates.sum() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("servers", [2, 3, 6])
@pytest.mark.parametrize("think", [0.2, 1.0, 5.0])
def test_several_cores_are_near_the_exact_result(servers: int, think: float) -> None:
    cores = Resource(("cores", "cores"), (1.0, 1.0), servers=servers, is_cores=True)
    alone = Resource(("waiting", "-"), (1.0, 1.0), servers=math.inf)
    for lanes in (1, 2, 4, 8, 16):
        network = _network((cores, alone), (1, lanes), 1.0)
        network.moves[0, 1] = think
        expected = _exact_crew(think, 1.0, servers, lanes)
        assert _settled(network).rates.sum() == pytest.approx(expected, rel=0.1)


@given(moves=st.lists(times, min_size=96, max_size=96), computes=st.lists(times, min_size=12, max_size=12),
       threads=st.integers(1, 3), rests=st.sets(st.integers(0, 11), max_size=8))  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_nothing_gives_more_than_it_has(
    moves: list[float], computes: list[float], threads: int, rests: set[int]
) -> None:
    network = Network((3, 4), ALL, threads)
    network.moves[:] = np.array(moves).reshape(2, 4, 3, 4)
    network.computes[:] = np.maximum(np.array(computes), 1e-6).reshape(3, 4)
    streams = np.array([number not in rests for number in range(12)]).reshape(3, 4)
    found = network.settle(streams)
    rates, slack = found.rates, 1.01
    assert (rates[~streams] == 0).all()
    alone = network.moves.max(axis=1).sum(axis=0) + network.computes
    assert (rates * alone <= slack).all()
    used = rates * network.moves.sum(axis=0)
    assert used[0].sum() <= slack
    assert used[1].sum() <= slack
    assert (used[2].sum(axis=1) <= slack).all()
    computing = (rates * network.computes).sum(axis=1)
    assert (used[3].sum(axis=1) + computing <= 2 * slack).all()
    assert (computing <= threads * slack).all()
    shares = found.transfers.sum(axis=0) + found.computing + found.held_up
    assert shares[streams] == pytest.approx(1)


def test_a_lane_alone_takes_the_slowest_of_each_transfer() -> None:
    network = _network(ALL, (1, 1), 4.0, threads=1)
    network.moves[0, :, 0, 0], network.moves[1, :, 0, 0] = (1.0, 0.0, 2.0, 0.5), (0.0, 3.0, 1.0, 0.5)
    found = _settled(network)
    assert found.rates[0, 0] == pytest.approx(1 / (2 + 3 + 4))
    assert found.slowest[:, 0, 0].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("lanes", "threads", "rate"), [(1, 2, 1), (2, 2, 2), (4, 2, 2), (6, 1, 1), (5, 4, 2)]
)
def test_lanes_that_only_compute_keep_threads_and_cores_busy(lanes: int, threads: int, rate: float) -> None:
    """There are two cores."""
    found = _settled(_network((CORES,), (1, lanes), 1.0, threads=threads))
    assert found.rates.sum() == pytest.approx(rate, rel=1e-3)


def test_workers_share_what_is_common_and_nothing_else() -> None:
    def rate(resource: Resource) -> float:
        network = _network((resource,), (4, 1), 1e-9)
        network.moves[0] = 1.0
        return float(_settled(network).rates.sum())

    assert rate(READING) == pytest.approx(1.0, rel=1e-3)
    assert rate(LINK) == pytest.approx(4.0, rel=1e-3)


def test_where_lanes_were_before_hardly_matters() -> None:
    fresh, used = (_network(ALL, (2, 3), 1.0, threads=1) for _ in range(2))
    used.moves[:] = 5.0
    _settled(used)
    for network in (fresh, used):
        network.moves[:] = np.linspace(0.0, 2.0, network.moves.size).reshape(network.moves.shape)
    assert _settled(used).rates == pytest.approx(_settled(fresh).rates, rel=0.01)
