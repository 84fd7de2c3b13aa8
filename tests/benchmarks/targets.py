"""What the merges must reach, and what they were measured to reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import programme as run
from benchmarks.groups import Results
from benchmarks.ratios import Quantity, in_run, memory, middle, own_memory, ratio, whole
from benchmarks.recipes import METHODS, VERBATIM

ELEMENTWISE = ("linear", "task_arithmetic", "slerp", "dare_linear", "dare_ties")
STATISTICAL = ("ties", "breadcrumbs", "della", "sce", "model_stock", "karcher")
TIGHT_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Target:
    text: str
    bound: float | None
    is_most: bool
    """Whether the number must not be above the bound; else it must not be below."""
    measured: float | None

    @property
    def is_met(self) -> bool | None:
        if self.measured is None or self.bound is None:
            return None
        return self.measured <= self.bound if self.is_most else self.measured >= self.bound


def targets(results: Results) -> Iterator[Target]:
    yield from _against_the_limit(results)
    yield from _against_the_peer(results)
    yield from _of_memory(results)
    yield _least(
        results,
        f"{run.SCALED}: 2 workers against 1, one thread each, in the run",
        1.7,
        (run.SCALED, run.ONE, run.TWO),
        in_run,
    )
    plan = middle(results, run.PLAN, "raymerge plan", whole)
    yield Target("raymerge plan of a 7B pair, whole process, seconds", 3.0, True, plan)
    submit = middle(results, run.SUBMIT, run.RAY, whole)
    yield Target("raymerge submit of a tiny model, whole process, seconds", 12.0, True, submit)


def _against_the_limit(results: Results) -> Iterator[Target]:
    for methods, bound in ((ELEMENTWISE, 1.3), (STATISTICAL, 3.0)):
        for method in methods:
            found = ratio(results, method, run.INLINE, run.LIMIT, in_run)
            yield Target(f"{method}: in the run, times the limit", bound, True, found)
    for method in run.COLD:
        found = ratio(results, run.cold_name(method), run.INLINE, run.LIMIT, in_run)
        yield Target(f"{run.cold_name(method)}: in the run, times the limit", 1.1, True, found)
    for method in VERBATIM:
        found = ratio(results, method, run.INLINE, run.COPY, in_run)
        yield Target(f"{method}: in the run, times cp + sync", 0.75, True, found)


def _against_the_peer(results: Results) -> Iterator[Target]:
    for method, bound in (("linear", 6), ("ties", 20)):
        text = f"{method}: mergekit's time over --inline's, start-up apart"
        yield _least(results, text, bound, (method, run.PEER, run.INLINE), in_run)
    for method, ray, inline in (("linear", 1.5, 4), ("ties", 8, 15)):
        text = f"{method}: mergekit's whole process over raymerge's with embedded Ray"
        yield _least(results, text, ray, (method, run.PEER, run.RAY), whole)
        text = f"{method}: mergekit's whole process over --inline's"
        yield _least(results, text, inline, (method, run.PEER, run.INLINE), whole)
    # Inputs that mergekit maps are no memory that it needs, though they count as long as they lie there.
    for method in ("linear", "ties"):
        for program in (run.INLINE, run.RAY):
            text = f"{method}: mergekit's own memory over that of {program}"
            compared = (method, run.PEER, program)
            yield _least(results, text, 10, compared, own_memory)
            yield _least(results, f"{text}, mapped files counted", None, compared, memory)


def _of_memory(results: Results) -> Iterator[Target]:
    found = [used for method in METHODS if (used := _use(results, method)) is not None]
    text = f"memory above idle over what the plan states, the worst of {len(found)} merges"
    yield Target(text, 1.0, True, max(found, default=None))
    above = above_idle(results, "linear", run.TIGHT)
    tight = None if above is None else above / TIGHT_NBYTES
    yield Target("linear with 256 MiB: memory above idle over 256 MiB", 1.0, True, tight)
    times = ratio(results, "linear", run.TIGHT, run.INLINE, in_run)
    yield Target("linear with 256 MiB: in the run, times that with ample memory", 1.15, True, times)


def _use(results: Results, method: str) -> float | None:
    above, stated = above_idle(results, method, run.INLINE), stated_memory(results, method, run.INLINE)
    return above / stated if above is not None and stated else None


def stated_memory(results: Results, method: str, program: str) -> int | None:
    return next((sample.projected for sample in results.of(method, program)), None)


def above_idle(results: Results, method: str, program: str) -> float | None:
    idle = results.of(run.IDLE, method)
    found = results.of(method, program)
    return max(sample.peak for sample in found) - idle[-1].peak if idle and found else None


def _least(
    results: Results, text: str, bound: float | None, compared: tuple[str, str, str], quantity: Quantity
) -> Target:
    group, over, under = compared
    return Target(text, bound, False, ratio(results, group, over, under, quantity))
