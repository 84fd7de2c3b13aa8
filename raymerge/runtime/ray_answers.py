"""What workers on Ray answer, and what it means when they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raymerge.errors import OptionError, Problem, RaymergeError
from raymerge.runtime.device_choice import GpuError, Probe
from raymerge.runtime.devices import first_line

_PROBE_SECONDS = 60.0
"""The most that measuring may take, which usually takes one."""


def ready_answers(ray: Any, references: Sequence[Any], *, seconds: float) -> list[dict[str, Any]]:
    """What workers answer when they are ready, which takes them so many seconds at most.

    Raises:
        OptionError: they do not start; or what one of them raised.
    """
    try:
        answers: list[dict[str, Any]] = ray.get(list(references), timeout=seconds)
    except ray.exceptions.RayTaskError as error:
        raise cause_of(error) from None
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
        raise OptionError(
            Problem(
                "workers",
                f"they did not start within {seconds:.0f} s ({first_line(error)}).",
                "Look at 'ray status': the cluster may be full or short of memory; --inline needs none.",
            )
        ) from error
    return answers


def probed(ray: Any, reference: Any) -> Probe:
    """What a worker has measured.

    Raises:
        GpuError: it cannot measure its GPU, does not come back from it, or died of it.
    """
    try:
        return Probe.from_json(ray.get(reference, timeout=_PROBE_SECONDS))
    except ray.exceptions.RayTaskError as error:
        raise cause_of(error) from None
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
