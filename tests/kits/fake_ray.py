"""A Ray whose calls a test answers itself, one by one: for what no real cluster does twice the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """Base of what calls fail with."""


class RayTaskError(RayError):
    """What a worker raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class OutOfMemoryError(RayError):
    """A worker was ended for want of memory."""


class GetTimeoutError(RayError):
    """No answer in time."""


class RayActorError(RayError):
    """A worker cannot answer."""


class ActorDiedError(RayActorError):
    """A worker's process ended."""


class ActorUnavailableError(RayActorError):
    """A call may or may not have reached its worker."""


@dataclass(eq=False)
class Ref:
    """The answer to a call; a test sets it."""

    arguments: tuple[Any, ...] = ()
    answers: list[Any] = field(default_factory=list)
    """At most one: a value, or an error."""

    def answer(self, value: Any) -> None:
        self.answers.append(value)


class Method:
    """A method of a worker; it notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Ref] = []

    def remote(self, *arguments: Any) -> Ref:
        self.calls.append(Ref(arguments))
        return self.calls[-1]

    @property
    def last(self) -> Ref:
        return self.calls[-1]


class Handle:
    """A worker."""

    def __init__(self, options: dict[str, Any], device: str = "") -> None:
        self.options = options
        self.device = device
        self.ready, self.open, self.run, self.heartbeat = Method(), Method(), Method(), Method()
        self.is_killed = False

    def is_up(self, node: str = "node-a", oom_kills: int = 0) -> None:
        """Answer its taking up the work."""
        self.open.last.answer(said(node, oom_kills))

    @property
    def numbers(self) -> list[int]:
        """Parts that it was given so far."""
        return [ref.arguments[0] for ref in self.run.calls]


class FakeRay:
    """In place of the module ``ray``."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        RayTaskError=RayTaskError,
        OutOfMemoryError=OutOfMemoryError,
        GetTimeoutError=GetTimeoutError,
        RayActorError=RayActorError,
        ActorUnavailableError=ActorUnavailableError,
    )

    def __init__(self, nodes: Sequence[str] = ("node-a",)) -> None:
        self.handles: list[Handle] = []
        self.alive = dict.fromkeys(nodes, True)
        self.without_gpus: set[str] = set()
        """Nodes, of these."""

    def remote(self, worker: type[Any]) -> Any:
        def options(**given: Any) -> Any:
            return SimpleNamespace(remote=lambda *told: self._made(given, *told))

        return SimpleNamespace(options=options)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": node,
                "Alive": alive,
                "Resources": {"CPU": 2.0, "GPU": 0.0 if node in self.without_gpus else 2.0},
                "NodeManagerHostname": node,
            }
            for node, alive in self.alive.items()
        ]

    def put(self, value: Any) -> Any:
        return value

    def wait(self, refs: Sequence[Ref], *, num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        """Those that are answered, and the others; never waits."""
        ready = [ref for ref in refs if ref.answers][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        (answer,) = ref.answers
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self, handle: Handle) -> None:
        handle.is_killed = True

    def _made(self, options: dict[str, Any], name: str = "", device: str = "") -> Handle:
        self.handles.append(Handle(options, device))
        return self.handles[-1]


def said(node: str = "node-a", oom_kills: int = 0) -> dict[str, Any]:
    """What a worker says of itself."""
    return {"pid": 1, "node": node, "oom_kills": oom_kills, "numerics": {}, "kernels": {}}


def receipt(number: int) -> dict[str, Any]:
    """Of a part, as a worker answers it."""
    return {
        "segment": number,
        "read_bytes": 0,
        "written_bytes": 0,
        "seconds": 0.0,
        "worker": "worker",
        "digests": {},
    }
