"""A Ray whose calls a test answers itself, one by one: for what no real cluster does twice the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class RayError(Exception): ...


class RayTaskError(RayError):
    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class OutOfMemoryError(RayError): ...


class GetTimeoutError(RayError): ...


class RayActorError(RayError): ...


class ActorDiedError(RayActorError): ...


class ActorUnavailableError(RayActorError):
    """A call may or may not have reached its worker."""


@dataclass(eq=False)
class Ref:
    arguments: tuple[Any, ...] = ()
    answers: list[Any] = field(default_factory=list)

    def answer(self, value: Any) -> None:
        self.answers.append(value)


class Method:
    def __init__(self) -> None:
        self.calls: list[Ref] = []

    def remote(self, *arguments: Any) -> Ref:
        self.calls.append(Ref(arguments))
        return self.calls[-1]

    @property
    def last(self) -> Ref:
        return self.calls[-1]


class Handle:
    def __init__(self, options: dict[str, Any], device: str = "") -> None:
        self.options = options
        self.device = device
        self.ready, self.open, self.run, self.heartbeat = Method(), Method(), Method(), Method()
        self.is_killed = False

    def is_up(self, node: str = "node-a", oom_kills: int = 0) -> None:
        self.open.last.answer(said(node, oom_kills))

    @property
    def numbers(self) -> list[int]:
        return [ref.arguments[0] for ref in self.run.calls]


class FakeRay:
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
    return {"pid": 1, "node": node, "oom_kills": oom_kills, "numerics": {}, "kernels": {}}


def receipt(number: int) -> dict[str, Any]:
    return {
        "segment": number,
        "read_bytes": 0,
        "written_bytes": 0,
        "seconds": 0.0,
        "worker": "worker",
        "digests": {},
    }
