"""What workers on Ray answer, and what it means when they do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from raymerge.errors import OptionError, Problem, RaymergeError
from raymerge.runtime.devices.choice import GpuError, Probe
from raymerge.runtime.devices.devices import first_line

_LOOK_SECONDS = 5.0
"""How often somebody may look around while workers are waited for."""
_PROBE_SECONDS = 60.0
"""The most that measuring may take, which usually takes one."""


def ready_answers(
    ray: Any, references: Sequence[Any], *, seconds: float, look: Callable[[], None] | None = None
) -> list[dict[str, Any] | None]:
    """What workers answer when they are ready.

    Args:
        ray: the ray module.
        references: to the answers.
        seconds: that they may take.
        look: called every few seconds until they are there; it may raise. None for nothing.

    Returns:
        None for a worker whose answer got lost on its way: it may be alive, but nobody knows.

    Raises:
        OptionError: they do not start; or what one of them raised.
    """
    ends_at = time.monotonic() + seconds
    answers: list[dict[str, Any] | None] = []
    for reference in references:
        try:
            answers.append(_awaited(ray, reference, ends_at, look))
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from error
        except ray.exceptions.ActorUnavailableError:
            answers.append(None)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise not_started(seconds, first_line(error)) from error
    return answers


def _awaited(ray: Any, reference: Any, ends_at: float, look: Callable[[], None] | None) -> Any:
    """An answer; ``look`` is called while it takes its time."""
    while look is not None and ends_at - time.monotonic() > _LOOK_SECONDS:
        if ray.wait([reference], num_returns=1, timeout=_LOOK_SECONDS)[0]:
            break
        look()
    return ray.get(reference, timeout=max(0.0, ends_at - time.monotonic()))


def not_started(seconds: float, reason: str) -> OptionError:
    """What is said of workers that do not start."""
    what = f"they did not start within {seconds:.0f} s ({reason})."
    remedy = "Look at 'ray status': the cluster may be full or short of memory; --inline needs none."
    return OptionError(Problem("workers", what, remedy))


def probed(ray: Any, reference: Any) -> Probe:
    """What a worker has measured.

    Raises:
        GpuError: it cannot measure its GPU, does not come back from it, or died of it.
    """
    try:
        return Probe.from_json(ray.get(reference, timeout=_PROBE_SECONDS))
    except ray.exceptions.RayTaskError as error:
        raise cause_of(error) from error
    except ray.exceptions.GetTimeoutError:
        raise GpuError(f"its worker does not answer within {_PROBE_SECONDS:.0f} s") from None
    except ray.exceptions.RayError as error:
        raise GpuError(f"its worker was lost: {first_line(error)}") from None


def cause_of(error: Any) -> Exception:
    """What a worker raised, as the driver raises it; for what nobody foresaw, with the worker's traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RaymergeError | OSError):
        return cause
    return error if isinstance(error, Exception) else RuntimeError(str(error))
