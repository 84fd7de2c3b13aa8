"""The actor: holds a segment runner on its device. Threaded, so that one segment reads while another computes."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from raymerge.execute.segment import SegmentRunner
from raymerge.runtime.devices import choose_device, numerics_of
from raymerge.runtime.options import Device
from raymerge.runtime.pool import Work
from raymerge.storage.open import open_store


class MergeWorker:
    """One worker of the Ray pool. Disposable: it keeps nothing that is not in the staging directory."""

    def __init__(self, name: str, device: Device) -> None:
        torch.set_num_threads(1)
        self._name = name
        self._device = choose_device(device)
        self._runner: SegmentRunner | None = None

    def ready(self) -> dict[str, Any]:
        """Who it is and what it computes on."""
        return {
            "name": self._name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "numerics": numerics_of(self._device),
        }

    def open(self, work: Work) -> None:
        """Take up the plan."""
        self._runner = SegmentRunner(
            work.plan,
            [open_store(root) for root in work.roots],
            open_store(str(work.staging)),
            device=self._device,
            budget=work.budget,
            name=self._name,
        )

    def run(self, segment: int) -> dict[str, Any]:
        """Make one segment; the receipt as JSON values."""
        if self._runner is None:
            raise RuntimeError("the worker was given no plan")
        return self._runner.run(segment).to_json()
