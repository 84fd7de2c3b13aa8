"""How the Ray pool lays out workers, on clusters of paper: what it asks for, and when it changes its mind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from kits.fake_ray import FakeRay, Handle, Method, Ref

from raymerge.device_numerics import DeviceChoice
from raymerge.errors import OptionError, Problem
from raymerge.merge_plan.files_read import SourceFile
from raymerge.options import RunOptions
from raymerge.runtime.workers import ray_pool
from raymerge.runtime.workers.dispatcher import DispatchPolicy
from raymerge.runtime.workers.placement import Seen, Sight
from raymerge.runtime.workers.pool import Stop
from raymerge.runtime.workers.ray_pool import RayPool
from raymerge.runtime.workers.sizing import most_lanes

ON_GPU, ON_CPU = DeviceChoice("cuda", "why not"), DeviceChoice("cpu", "no need")


class _Answered(Method):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def remote(self, *arguments: Any) -> Ref:
        ref = super().remote(*arguments)
        ref.answer(self._value)
        return ref


class PaperRay(FakeRay):
    """Machines with so many CPU slots and GPUs, on which workers are ready at once."""

    def __init__(self, *machines: tuple[int, int]) -> None:
        super().__init__()
        self.machines = machines
        self.failure: Exception | None = None
        """What workers with a GPU end with."""
        self.blind = False
        """Whether torch sees no GPU where Ray does."""
        self.timeouts: list[float | None] = []

    @property
    def actors(self) -> list[Handle]:
        return [each for each in self.handles if not each.is_killed]

    def nodes(self) -> list[dict[str, Any]]:
        alive = [
            {"NodeID": str(number), "Alive": True, "Resources": {"CPU": float(c), "GPU": float(g)}}
            for number, (c, g) in enumerate(self.machines)
        ]
        return [*alive, {"NodeID": "gone", "Alive": False, "Resources": {"CPU": 1000.0, "GPU": 1000.0}}]

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        return super().get(ref)

    def _made(self, options: dict[str, Any], name: str = "", device: str = "") -> Handle:
        handle, has_gpu = super()._made(options, name, device), bool(options["num_gpus"])
        kind = "cuda" if has_gpu and not self.blind else "cpu"
        numerics, kernels = {"device": kind, "torch": "2"}, {"processor": kind}
        answer = {"pid": 1, "node": "0", "oom_kills": 0, "numerics": numerics, "kernels": kernels}
        handle.ready = _Answered(self.failure if has_gpu and self.failure else answer)
        return handle


class PaperConnection:
    """A connection to it."""

    ray: PaperRay
    asked: list[int | None]

    def __init__(self, address: str | None, *, num_cpus: int | None = None, **_: object) -> None:
        self.asked.append(num_cpus)

    def open(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PaperRay]:
    """Makes the cluster that pools find: CPU slots and GPUs of each machine."""

    def make(*machines: tuple[int, int]) -> PaperRay:
        PaperConnection.ray, PaperConnection.asked = PaperRay(*machines), []
        monkeypatch.setattr(ray_pool, "RayConnection", PaperConnection)
        return PaperConnection.ray

    return make


def _started(options: RunOptions, *, parts: int | None = 1000) -> RayPool:
    pool = RayPool(options, lambda _: None, parts=parts)
    pool.start()
    return pool


def _asked(ray: PaperRay) -> list[tuple[int, int, str]]:
    return [(each.options["num_cpus"], each.options["num_gpus"], each.device) for each in ray.actors]


def _lose(ray: PaperRay, monkeypatch: pytest.MonkeyPatch, *, answers: int) -> None:
    get, left = ray.get, iter(range(answers))

    def lossy(answer: Any, timeout: float | None = None) -> Any:
        if next(left, None) is not None:
            raise ray.exceptions.ActorUnavailableError
        return get(answer, timeout)

    monkeypatch.setattr(ray, "get", lossy)


def test_workers_whose_answers_get_lost_are_replaced(
    cluster: Callable[..., PaperRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = cluster((4, 0))
    _lose(ray, monkeypatch, answers=3)
    pool = _started(RunOptions(workers=2, threads=1))
    assert pool.workers == ("worker-3", "worker-4")
    assert len(ray.actors) == 2
    assert pool.numerics["device"] == "cpu"


def test_workers_whose_answers_always_get_lost_do_not_start(
    cluster: Callable[..., PaperRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = cluster((4, 0))
    _lose(ray, monkeypatch, answers=100)
    with pytest.raises(OptionError, match=r"workers: they did not start .*\(their answers got lost\)"):
        _started(RunOptions(workers=2, threads=1))


def test_workers_reserve_their_threads(cluster: Callable[..., PaperRay]) -> None:
    ray = cluster((0, 0), (8, 0), (6, 0))
    pool = _started(RunOptions())
    assert _asked(ray) == [(4, 0, "cpu")] * 3
    assert (pool.threads, pool.device, pool.workers) == (4, "cpu", ("worker-0", "worker-1", "worker-2"))
    assert {each.options["max_concurrency"] for each in ray.actors} == {most_lanes(RunOptions()) + 2}
    pool.close()
    assert ray.actors == []


@pytest.mark.parametrize(
    ("options", "parts", "workers"),
    [(RunOptions(), 0, 1), (RunOptions(workers=50), 3, 3), (RunOptions(), None, 3)],
)
def test_no_more_workers_than_parts(
    options: RunOptions, parts: int | None, workers: int, cluster: Callable[..., PaperRay]
) -> None:
    cluster((12, 0))
    pool = _started(options, parts=parts)
    assert len(pool.workers) == workers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RunOptions(workers=15), "--workers: 15 workers were asked for, but the cluster has 14 CPU slots"),
        (RunOptions(threads=9), "--threads: 1 worker of 9 threads were asked for, but .* room for 0"),
        (RunOptions(workers=4, threads=4), "--workers: 4 workers of 4 threads .* has room for 3"),
        (RunOptions(device="cuda"), "--device: cuda was asked for, but the cluster has no GPU"),
    ],
)
def test_what_does_not_fit_is_refused(
    options: RunOptions, said: str, cluster: Callable[..., PaperRay]
) -> None:
    ray = cluster((8, 0), (6, 0))
    with pytest.raises(OptionError, match=said):
        _started(options)
    assert ray.actors == []


def test_more_workers_than_gpus_are_refused(cluster: Callable[..., PaperRay]) -> None:
    cluster((8, 2))
    with pytest.raises(OptionError, match="3 workers were asked for, but the cluster has 2 GPUs"):
        _started(RunOptions(workers=3, device="cuda"))


def test_more_workers_than_gpus_compute_on_processors_where_nobody_named_a_device(
    cluster: Callable[..., PaperRay],
) -> None:
    ray = cluster((8, 1))
    pool = _started(RunOptions(workers=3))
    pool.settle(lambda: ON_GPU)
    assert _asked(ray) == [(2, 0, "cpu")] * 3
    assert pool.device_reason == "3 workers were asked for, but the cluster has 1 GPU"


def test_a_gpu_that_was_named_is_taken_by_all(cluster: Callable[..., PaperRay]) -> None:
    ray = cluster((8, 2), (8, 2))
    pool = _started(RunOptions(device="cuda"))
    pool.settle(lambda: pytest.fail("there is nothing to choose"))
    assert _asked(ray) == [(1, 1, "cuda")] * 4
    assert (pool.device, pool.device_reason) == ("cuda", "")


@pytest.mark.parametrize(
    ("choice", "asked", "threads"), [(ON_GPU, [(1, 1, "auto")] * 4, 1), (ON_CPU, [(4, 0, "cpu")] * 8, 4)]
)
def test_workers_start_on_what_is_chosen(
    choice: DeviceChoice, asked: list[tuple[int, int, str]], threads: int, cluster: Callable[..., PaperRay]
) -> None:
    ray = cluster((16, 2), (16, 2))
    pool = _started(RunOptions())
    assert _asked(ray) == []
    pool.settle(lambda: choice)
    assert _asked(ray) == asked
    assert (pool.device, pool.threads, pool.device_reason) == (choice.device, threads, choice.reason)
    assert pool.stage_numerics["processor"] == choice.device
    assert {each.options["scheduling_strategy"] for each in ray.actors} == {"SPREAD"}
    assert None not in ray.timeouts
    pool.settle(lambda: pytest.fail("there is nothing to choose"))
    assert _asked(ray) == asked


def test_who_comes_later_is_on_a_gpu_as_the_others(cluster: Callable[..., PaperRay]) -> None:
    """One that fails there for a moment must not be taken for a worker of another kind."""
    ray = cluster((4, 1))
    pool = _started(RunOptions())
    pool.settle(lambda: ON_GPU)
    pool.group.spawn()
    assert _asked(ray) == [(1, 1, "auto"), (1, 1, "cuda")]


def _reason(ray: PaperRay) -> str:
    """Why a pool on four cores and two GPUs that work for nobody has its workers on processors."""
    pool = _started(RunOptions())
    pool.settle(lambda: ON_GPU)
    assert _asked(ray) == [(4, 0, "cpu")]
    assert (pool.device, pool.threads, pool.workers) == ("cpu", 4, ("worker-2",))
    return pool.device_reason


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            PaperRay.exceptions.GetTimeoutError("Get timed out"),
            "they did not start within 120 s (Get timed out)",
        ),
        (
            PaperRay.exceptions.RayActorError("Died in \x1b[36m__init__()\x1b[39m\n...\nImportError: lib.so"),
            "they ended before they were up (ImportError: lib.so)",
        ),
        (
            PaperRay.exceptions.RayTaskError(
                OptionError(Problem("--device", "cuda cannot be used here: CUDA error.", "Look."))
            ),
            "cuda cannot be used here: CUDA error",
        ),
    ],
)
def test_a_gpu_on_which_no_worker_starts_leaves_processors(
    failure: Exception, said: str, cluster: Callable[..., PaperRay]
) -> None:
    ray = cluster((4, 2))
    ray.failure = failure
    assert _reason(ray) == said


def test_gpus_that_do_not_work_leave_processors(cluster: Callable[..., PaperRay]) -> None:
    ray = cluster((4, 2))
    ray.blind = True
    assert _reason(ray) == "no GPU works where workers look for one"


def test_a_gpu_that_was_named_and_is_broken_is_an_error(cluster: Callable[..., PaperRay]) -> None:
    ray = cluster((4, 2))
    problem = Problem("--device", "cuda cannot be used here: CUDA error.", "Look at nvidia-smi.")
    ray.failure = PaperRay.exceptions.RayTaskError(OptionError(problem))
    with pytest.raises(OptionError, match="cuda cannot be used here"):
        _started(RunOptions(device="cuda"))


def test_gpus_count_where_cores_are_beside_them(cluster: Callable[..., PaperRay]) -> None:
    ray = cluster((4, 8), (64, 2), (64, 0), (0, 8))
    _started(RunOptions(device="cuda"))
    assert _asked(ray) == [(1, 1, "cuda")] * 6
    ray = cluster((4, 8), (64, 2))
    _started(RunOptions(device="cuda", threads=2))
    assert _asked(ray) == [(2, 1, "cuda")] * 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            RunOptions(device="cuda", workers=7),
            r"--workers: 7 workers were asked for, but the CPU slots of the cluster suffice for 6 of its 10 "
            r"GPUs, at 1 for each on its own machine\. Give at most 6, or add CPU slots\.",
        ),
        (RunOptions(device="cuda", threads=99), "--device: .* the cluster has no CPU slots beside its GPUs"),
    ],
)
def test_gpus_without_cores_are_refused_early(
    options: RunOptions, said: str, cluster: Callable[..., PaperRay]
) -> None:
    ray = cluster((4, 8), (64, 2))
    with pytest.raises(OptionError, match=said):
        _started(options)
    assert ray.actors == []


def test_without_cores_beside_gpus_there_is_nothing_to_choose(cluster: Callable[..., PaperRay]) -> None:
    ray = cluster((0, 8), (16, 0))
    pool = _started(RunOptions())
    pool.settle(lambda: pytest.fail("there is nothing to choose"))
    assert _asked(ray) == [(4, 0, "cpu")] * 4


def _policy(pool: RayPool, monkeypatch: pytest.MonkeyPatch) -> DispatchPolicy:
    found: list[DispatchPolicy] = []

    class Made:
        def __init__(self, *_: object, policy: DispatchPolicy, **__: object) -> None:
            found.append(policy)

        def begin(self) -> None:
            """Nothing to do."""

        def goes_on(self, _: Stop) -> bool:
            return False

    monkeypatch.setattr(ray_pool, "Dispatcher", Made)
    work: Any = None
    assert list(pool.run(work, range(10), Stop())) == []
    return found[0]


@pytest.mark.parametrize(("growing", "seconds"), [(False, 0.0), (True, 1800.0)])
def test_workers_leave_in_the_last_work_on_a_cluster_that_grows(
    growing: bool, seconds: float, cluster: Callable[..., PaperRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster((4, 0))
    pool = _started(RunOptions(address="far:1", workers=2, growing=growing))
    first = _policy(pool, monkeypatch)
    pool.conclude()
    last = _policy(pool, monkeypatch)
    assert (first.leaves, last.leaves) == (False, growing)
    assert (first.growth_seconds, last.growth_seconds) == (seconds, seconds)


@dataclass(frozen=True)
class _Reading:
    """Two parts: one reads a file that the first machine sees, one another that the second sees."""

    part: str = "segment"
    files: tuple[SourceFile, ...] = tuple(SourceFile(0, "/models", name, 8, "") for name in ("a", "b"))
    place: Path = Path("/out/x")

    def reads(self) -> tuple[frozenset[int], ...]:
        return frozenset({0}), frozenset({1})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RunOptions(address="far:1"), "1 segment reads has a GPU with 1 CPU slot beside it"),
        (RunOptions(address="far:1", device="cpu"), "1 segment reads has 4 CPU slots for a worker"),
        (RunOptions(address="far:1", threads=2, device="cpu"), ""),
        (RunOptions(address="far:1", growing=True), ""),
    ],
)
def test_parts_that_no_worker_could_do_are_refused_before_anything_is_written(
    options: RunOptions, said: str, cluster: Callable[..., PaperRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster((4, 1), (2, 0))
    pool = _started(replace(options, device="cuda") if options.device == "auto" else options)
    sights = {"0": Sight("first", (Seen.SAME, Seen.ABSENT)), "1": Sight("second", (Seen.ABSENT, Seen.SAME))}
    monkeypatch.setattr(pool._nodes, "sights", lambda *_: sights)
    work: Any = _Reading()
    if not said:
        pool.survey(work)
        return
    with pytest.raises(OptionError, match=rf"sources: no node that sees what {said}"):
        pool.survey(work)


A_ALONE = Sight("first", (Seen.SAME, Seen.ABSENT))
B_ALONE = Sight("second", (Seen.ABSENT, Seen.SAME))


def test_on_processors_too_few_workers_for_all_disks_are_refused(
    cluster: Callable[..., PaperRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster((4, 0), (4, 0))
    pool = _started(RunOptions(address="far:1", device="cpu", workers=1))
    monkeypatch.setattr(pool._nodes, "sights", lambda *_: {"0": A_ALONE, "1": B_ALONE})
    work: Any = _Reading()
    with pytest.raises(OptionError, match=r"2 workers at least are needed .*; 1 were asked for"):
        pool.survey(work)


def test_nodes_that_were_asked_are_not_asked_when_they_join(
    cluster: Callable[..., PaperRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster((4, 1), (4, 1))
    pool = _started(RunOptions(address="far:1", device="cuda"))
    assert _policy(pool, monkeypatch).surveyed is None
    monkeypatch.setattr(pool._nodes, "sights", lambda *_: {"0": A_ALONE, "1": B_ALONE})
    work: Any = _Reading()
    pool.survey(work)
    assert _policy(pool, monkeypatch).surveyed == {"0", "1"}
