"""Laws that a simulated run obeys: bytes, bandwidth, threads, and workers that wait for one long segment."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.errors import OptionError
from raymerge.planner.simulate_work import Floats, SegmentLoads
from raymerge.planner.simulation import Cluster, Limiter, Simulation, run_segments, simulate

MB, GB = 10**6, 10**9
AT_ONCE = {"overhead": 0.0, "driver": 0.0, "startup": 0.0}
"""A cluster that wastes no time."""


def _loads(reads: list[int], *, write_share: float = 0.25, seconds_per_byte: float = 0.0) -> SegmentLoads:
    read = np.array(reads, dtype=np.int64)
    written = (read * write_share).astype(np.int64)
    return SegmentLoads(
        cost=read + written,
        read_bytes=read,
        write_bytes=written,
        source_bytes=read,
        thread_seconds=np.asarray(read * seconds_per_byte, dtype=np.float64),
        copy_seconds=np.zeros(len(read)),
    )


def _equal(count: int, nbytes: int = 400 * MB, **more: float) -> SegmentLoads:
    return _loads([nbytes] * count, **more)


def _cluster(**given: float | None) -> Cluster:
    return Cluster(**{**AT_ONCE, "storage": 1e15, "threads": 1, **given})  # type: ignore[arg-type]


segment_sizes = st.lists(st.integers(0, 500 * MB), min_size=1, max_size=40)
clusters = st.builds(
    Cluster,
    workers=st.integers(1, 20),
    storage=st.sampled_from([1e9, 20e9]),
    read=st.sampled_from([None, 0.8e9]),
    write=st.sampled_from([None, 0.3e9]),
    per_worker=st.sampled_from([None, 0.5e9]),
    threads=st.integers(1, 3),
    cores=st.sampled_from([None, 1, 2]),
    per_core=st.sampled_from([None, 3e9]),
    lanes=st.sampled_from([None, 1, 4]),
    startup=st.sampled_from([0.0, 8.0]),
)


@pytest.mark.parametrize("workers", [1, 4, 100])
def test_a_run_bound_by_the_storage_takes_bytes_over_bandwidth(workers: int) -> None:
    course = run_segments(_equal(64), _cluster(workers=workers, storage=2 * GB))
    assert course.seconds == pytest.approx(64 * 500 * MB / (2 * GB), rel=5e-3)


def test_reading_and_writing_may_have_limits_of_their_own() -> None:
    loads = _equal(64)
    both = run_segments(loads, _cluster(workers=8, read=2 * GB, write=1 * GB)).seconds
    slow = run_segments(loads, _cluster(workers=8, read=2 * GB, write=0.1 * GB)).seconds
    assert both == pytest.approx(64 * 400 * MB / (2 * GB), rel=5e-3)
    assert slow == pytest.approx(64 * 100 * MB / (0.1 * GB), rel=5e-3)


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (1, 2), (8, 1), (8, 4)])
def test_a_run_bound_by_computing_scales_with_workers_times_threads(workers: int, threads: int) -> None:
    loads = _equal(64, seconds_per_byte=1e-9)
    cluster = _cluster(workers=workers, threads=threads, lanes=2 * threads)
    expected = 64 * 0.4 / (workers * threads)
    assert run_segments(loads, cluster).seconds == pytest.approx(expected, rel=5e-3)


def test_a_worker_s_link_bounds_it_and_not_the_others() -> None:
    loads = _equal(64)
    for workers in (1, 4):
        cluster = _cluster(workers=workers, per_worker=1 * GB, lanes=3)
        expected = 64 * 0.5 / workers
        assert run_segments(loads, cluster).seconds == pytest.approx(expected, rel=0.05)


def test_cores_are_shared_by_computing_and_moving_bytes() -> None:
    loads = _equal(64, seconds_per_byte=1e-9)
    one = _cluster(cores=1, per_core=2 * GB, threads=2, lanes=3)
    work = 64 * (0.4 + 0.5 / 2)
    # Now and then all lanes but one wait for leave to compute, of which there is less than of lanes.
    assert work <= run_segments(loads, one).seconds <= 1.04 * work
    assert work / 2 <= run_segments(loads, replace(one, cores=2)).seconds <= 1.06 * work / 2


def test_a_given_speed_takes_the_place_of_the_measured_one() -> None:
    loads = _equal(64, seconds_per_byte=1e-9)
    course = run_segments(loads, _cluster(compute=4 * GB, threads=1, lanes=2))
    assert course.seconds == pytest.approx(64 * 0.1, rel=5e-3)


def test_one_huge_segment_bounds_the_run_and_runs_alone() -> None:
    loads = _loads([100 * GB, *[400 * MB] * 63], seconds_per_byte=1e-9)
    made = simulate(loads, _cluster(workers=32))
    assert made.run_seconds == pytest.approx(100, rel=5e-3)
    assert made.alone_seconds > 90
    assert made.limiter == Limiter.IDLE
    assert made.busy_seconds.least < 5 < made.busy_seconds.most


def test_one_segment_takes_the_sum_of_reading_computing_and_writing() -> None:
    loads = _loads([1 * GB], seconds_per_byte=0.5e-9)
    cluster = _cluster(storage=None, read=1 * GB, write=0.5 * GB)
    assert run_segments(loads, cluster).seconds == pytest.approx(1 + 0.5 + 0.25 / 0.5, rel=1e-3)
    # Of what the storage gives to both, as of a link, a lane has all while it does either.
    for both in (_cluster(storage=1 * GB), _cluster(per_worker=1 * GB)):
        assert run_segments(loads, both).seconds == pytest.approx(1 + 0.5 + 0.25, rel=1e-3)


def test_a_core_that_moves_bytes_does_so_while_its_lane_waits_for_them() -> None:
    loads = _loads([1 * GB], seconds_per_byte=0.5e-9)
    slow = _cluster(storage=0.5 * GB, per_core=1 * GB)
    assert run_segments(loads, slow).seconds == pytest.approx(2.5 + 0.5, rel=1e-3)
    fast = _cluster(storage=10 * GB, per_core=1 * GB)
    assert run_segments(loads, fast).seconds == pytest.approx(1.25 + 0.5, rel=1e-3)


def test_lanes_overlap_until_something_is_full() -> None:
    """Each alone reads for 0.4 s, computes for 0.4 s and writes for 0.1 s."""
    loads = _equal(60, seconds_per_byte=1e-9)

    def seconds(**given: float | None) -> float:
        return run_segments(loads, _cluster(storage=None, read=1 * GB, write=1 * GB, **given)).seconds

    assert seconds(lanes=1) == pytest.approx(60 * 0.9, rel=5e-3)
    some = [seconds(lanes=lanes) for lanes in (1, 2, 3, 5, 9, 30)]
    assert some == sorted(some, reverse=True)
    # Each lane waits for the other now and then, so that two are not twice as fast.
    assert 1.2 * 60 * 0.9 / 2 < some[1] < 1.5 * 60 * 0.9 / 2
    # Many keep the storage or the one thread busy nearly all the time.
    assert 60 * 0.4 < some[-1] < 1.1 * 60 * 0.4


def test_a_worker_has_two_lanes_beside_its_threads() -> None:
    assert [_cluster(threads=threads).wanted_lanes for threads in (1, 4)] == [3, 6]
    assert _cluster(threads=4, lanes=2).wanted_lanes == 2
    loads = _equal(60, seconds_per_byte=1e-9)
    given = {"storage": 2 * GB, "threads": 2}
    usual, named = (run_segments(loads, _cluster(lanes=lanes, **given)).seconds for lanes in (None, 4))
    assert usual == named


def test_time_is_told_by_what_lanes_do() -> None:
    loads = _loads([1 * GB], seconds_per_byte=0.5e-9)

    def spent(**given: float | None) -> dict[Limiter, float]:
        course = run_segments(loads, _cluster(storage=None, read=1 * GB, write=1 * GB, **given))
        return {name: seconds for name, seconds in course.spent.items() if seconds}

    parts = {Limiter.READING: 1.0, Limiter.WRITING: 0.25, Limiter.COMPUTING: 0.5}
    assert spent() == pytest.approx(parts, rel=1e-3)
    # A core that takes longer to move bytes than the storage is what the time goes to.
    assert spent(per_core=0.5 * GB) == pytest.approx({Limiter.CORES: 2.5, Limiter.COMPUTING: 0.5}, rel=1e-3)


def test_waiting_is_told_by_what_is_waited_for() -> None:
    loads = _equal(64, seconds_per_byte=1e-9)
    by_threads = run_segments(loads, _cluster(threads=1, lanes=4, cores=4)).spent
    by_cores = run_segments(loads, _cluster(threads=4, lanes=4, cores=1)).spent
    assert by_threads[Limiter.COMPUTING] > 20 * by_threads[Limiter.CORES]
    assert by_cores[Limiter.CORES] > 2 * by_cores[Limiter.COMPUTING]


def test_no_segments_take_no_time() -> None:
    made = simulate(_loads([]), _cluster(workers=3, startup=8.0))
    assert (made.run_seconds, made.read_bytes, made.segments) == (0, 0, 0)
    assert made.limiter == Limiter.START_UP
    assert made.seconds == 8 + made.finishing_seconds


def test_the_driver_hands_out_one_after_the_other() -> None:
    loads = _loads([1000] * 500)
    made = simulate(loads, _cluster(workers=500, driver=0.01))
    assert made.run_seconds >= 5
    assert made.limiter in (Limiter.DISPATCH, Limiter.IDLE)


@given(reads=segment_sizes, cluster=clusters, per_byte=st.sampled_from([0.0, 1e-9]))
@settings(deadline=None, max_examples=60)
def test_bytes_and_time_are_conserved(reads: list[int], cluster: Cluster, per_byte: float) -> None:
    loads = _loads(reads, seconds_per_byte=per_byte)
    course = run_segments(loads, cluster)
    assert course.moved_bytes.sum() == (loads.read_bytes + loads.write_bytes).sum()
    assert len(course.busy_seconds) == len(course.moved_bytes) == cluster.workers
    assert course.busy_seconds.max() <= course.seconds * (1 + 1e-9)
    assert sum(course.spent.values()) == pytest.approx(course.seconds, rel=1e-6, abs=1e-9)
    assert course.alone_seconds <= course.seconds


@given(reads=segment_sizes, cluster=clusters, per_byte=st.sampled_from([0.0, 1e-9]))
@settings(deadline=None, max_examples=60)
def test_no_run_is_faster_than_its_limits(reads: list[int], cluster: Cluster, per_byte: float) -> None:
    loads = _loads(reads, seconds_per_byte=per_byte)
    read, written = int(loads.read_bytes.sum()), int(loads.write_bytes.sum())
    seconds, longest = float(loads.thread_seconds.sum()), float(loads.thread_seconds.max())
    bounds = [
        (read + written) / (cluster.storage or np.inf),
        read / (cluster.read or np.inf),
        written / (cluster.write or np.inf),
        (read + written) / cluster.workers / (cluster.per_worker or np.inf),
        seconds / cluster.workers / min(cluster.threads, cluster.wanted_lanes),
        longest,
        float(_alone(loads, cluster).max()),
    ]
    # Ends of segments that come close together are counted as one.
    assert run_segments(loads, cluster).seconds >= 0.98 * max(bounds)


def _alone(loads: SegmentLoads, cluster: Cluster) -> Floats:
    """Seconds of each segment on a cluster that has no other."""
    either = [each for each in (cluster.storage, cluster.per_worker, cluster.per_core) if each is not None]
    reading, writing = (min([*either, each or np.inf]) for each in (cluster.read, cluster.write))
    moving = loads.read_bytes / reading + loads.write_bytes / writing
    return np.asarray(moving + loads.thread_seconds)


@given(reads=segment_sizes, cluster=clusters, per_byte=st.sampled_from([0.0, 1e-9]))
@settings(deadline=None, max_examples=60)
def test_one_lane_in_all_does_one_thing_at_a_time(
    reads: list[int], cluster: Cluster, per_byte: float
) -> None:
    loads, one = _loads(reads, seconds_per_byte=per_byte), replace(cluster, workers=1, lanes=1)
    expected = _alone(loads, one) + one.overhead + one.driver
    # Segments of no length at all end together.
    assert run_segments(loads, one).seconds == pytest.approx(expected.sum(), rel=0.02)


@given(reads=segment_sizes, cluster=clusters, per_byte=st.sampled_from([0.0, 1e-9]))
@settings(deadline=None, max_examples=60)
def test_more_workers_are_not_slower_than_list_scheduling_allows(
    reads: list[int], cluster: Cluster, per_byte: float
) -> None:
    loads = _loads(reads, seconds_per_byte=per_byte)
    few, many = (
        run_segments(loads, replace(cluster, workers=number)).seconds
        for number in (cluster.workers, 2 * cluster.workers)
    )
    lanes = 2 * cluster.workers * cluster.wanted_lanes
    assert many <= few * (2 - 1 / lanes) * 1.02 + cluster.overhead + len(reads) * cluster.driver


@given(reads=segment_sizes, cluster=clusters)
@settings(deadline=None, max_examples=20)
def test_two_calls_give_equal_results(reads: list[int], cluster: Cluster) -> None:
    loads = _loads(reads, seconds_per_byte=1e-9)
    assert simulate(loads, cluster) == simulate(loads, cluster)


def test_segments_are_handed_out_largest_first() -> None:
    sizes = [*[100 * MB] * 8, 800 * MB]
    course = run_segments(_loads(sizes, seconds_per_byte=1e-9), _cluster(workers=2, lanes=1))
    # The long one is begun at once, though it comes last: one worker has it, the other one the rest.
    assert course.seconds == pytest.approx(0.8, rel=5e-3)


@pytest.mark.parametrize(
    ("loads", "cluster", "limiter"),
    [
        (_equal(64), _cluster(workers=4, storage=1 * GB), Limiter.READING),
        (_equal(64, write_share=4.0), _cluster(workers=4, storage=1 * GB), Limiter.WRITING),
        (_equal(64), _cluster(workers=4, read=1 * GB, write=GB), Limiter.READING),
        (_equal(64), _cluster(workers=4, read=9 * GB, write=GB), Limiter.WRITING),
        (_equal(64), _cluster(workers=4, per_worker=1 * GB), Limiter.LINK),
        (_equal(64, seconds_per_byte=1e-9), _cluster(workers=4), Limiter.COMPUTING),
        (_equal(64, seconds_per_byte=1e-9), _cluster(workers=4, cores=1, per_core=GB), Limiter.CORES),
        (_equal(4, seconds_per_byte=1e-9), _cluster(workers=64), Limiter.IDLE),
        (_equal(4), _cluster(workers=4, startup=100.0), Limiter.START_UP),
        (_equal(64), _cluster(workers=4, overhead=10.0), Limiter.DISPATCH),
    ],
)
def test_the_limiter_is_named(loads: SegmentLoads, cluster: Cluster, limiter: Limiter) -> None:
    made = simulate(loads, cluster)
    assert made.limiter == limiter
    assert sum(made.shares.values()) == pytest.approx(1)
    assert list(made.shares.values()) == sorted(made.shares.values(), reverse=True)


def test_half_and_twice_the_workers_are_told() -> None:
    made = simulate(_equal(64, seconds_per_byte=1e-9), _cluster(workers=4))
    half, twice = made.others
    assert (half.workers, twice.workers) == (2, 8)
    assert half.seconds > 1.5 * made.seconds
    assert made.seconds > 1.5 * twice.seconds
    (alone,) = simulate(_equal(4), _cluster()).others
    assert alone.workers == 2


def test_the_json_has_the_same_numbers() -> None:
    made: Simulation = simulate(_equal(4), _cluster(workers=2, startup=1.0))
    found = made.to_json()
    assert found["seconds"] == made.seconds
    assert found["limiter"] == made.limiter
    assert found["cluster"]["workers"] == 2
    assert found["others"][1]["workers"] == 4


def test_a_thousand_workers_and_thousands_of_segments_take_seconds() -> None:
    sizes = np.random.default_rng(0).integers(200 * MB, 500 * MB, 6600).tolist()
    loads = _loads(sizes, seconds_per_byte=1e-9)
    cluster = Cluster(workers=1000, storage=100 * GB, per_worker=GB, threads=2, lanes=4)
    began = time.process_time()
    run_segments(loads, cluster)
    assert time.process_time() - began < 10


def test_everything_wrong_with_a_cluster_is_told_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        Cluster(workers=0, threads=-1, overhead=-1.0, read=0.0)
    where = [problem.where for problem in caught.value.problems]
    assert where == [
        "--simulate workers",
        "--simulate threads",
        "--simulate read",
        "--simulate overhead",
        "--simulate",
    ]
