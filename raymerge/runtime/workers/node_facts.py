"""What a node of a Ray cluster has, told by the node itself. ``python -m`` prints it of all nodes as JSON.

The question is sent by value: it needs nothing of raymerge on the node, which may have another or none."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

COMPARED = ("python", "ray", "torch", "raymerge")
"""Versions that have to agree."""
_SECONDS = 60.0


def facts(places: Sequence[str] = ()) -> dict[str, Any]:
    """Versions, memory, GPUs and clock of the machine that this runs on, and which directories it lacks."""
    import psutil

    memory = psutil.virtual_memory()
    return {
        "host": socket.gethostname(),
        "versions": versions_here(),
        "memory": memory.total,
        "memory_free": memory.available,
        "shared_free": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        "gpu_names": _gpu_names(),
        "unseen": [each for each in places if not os.path.isdir(each)],
        "clock": time.time(),
    }


def versions_here() -> dict[str, str | None]:
    """Versions of ``COMPARED`` in this interpreter; None for what is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in COMPARED[1:]:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _gpu_names() -> list[str]:
    try:
        import torch

        return [
            torch.get_device_module().get_device_name(index)
            for index in range(torch.accelerator.device_count())
        ]
    except Exception:  # whatever keeps torch from being asked, there is nothing to compute on
        return []


def asked(address: str | None, places: Sequence[str] = ()) -> dict[str, Any]:
    """The facts of every node, with its CPU slots and GPUs. Raises OptionError: no cluster answers."""
    from raymerge.runtime.workers.ray_environment import RayConnection
    from raymerge.runtime.workers.ray_nodes import Nodes

    began = time.monotonic()
    connection = RayConnection(address)
    connection.open()
    try:
        before = time.time()
        answers = Nodes(connection.ray, is_here=address is None).answers(
            facts, tuple(places), seconds=_SECONDS
        )
        nodes = [
            _with_skew(name, machine, answer, (before, time.time()))
            for name, machine, answer in answers
            if answer
        ]
    finally:
        connection.close()
    silent = [name for name, _, answer in answers if not answer]
    return {"nodes": nodes, "silent": silent, "seconds": time.monotonic() - began}


def _with_skew(
    name: str, machine: tuple[int, int], answer: Mapping[str, Any], asked_between: tuple[float, float]
) -> dict[str, Any]:
    """``skew``: seconds that the node's clock is ahead, at least; 0 while it may be right."""
    before, after = asked_between
    skew = max(0.0, answer["clock"] - after) + min(0.0, answer["clock"] - before)
    return {**answer, "host": name, "skew": skew, "cpus": machine[0], "gpus": machine[1]}


def main(arguments: Sequence[str]) -> int:
    """``arguments``: the address, "" for an embedded Ray, and directories."""
    from raymerge.errors import UserError

    try:
        answer: dict[str, Any] = asked(arguments[0] or None, arguments[1:])
    except UserError as error:
        answer = {"problems": [[each.what, each.remedy] for each in error.problems]}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
