"""The actor: holds a segment runner on its device. Threaded, so that one segment reads while another
computes."""

from __future__ import annotations

import os
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
        self._wanted = device
        self._runner: SegmentRunner | None = None

    def ready(self) -> dict[str, Any]:
        """Its process and what it computes on, once it can work."""
        return {"pid": os.getpid(), "numerics": numerics_of(choose_device(self._wanted))}

    def open(self, work: Work) -> dict[str, Any]:
        """Take up the plan; the answer is that of ``ready``."""
        self._runner = SegmentRunner(
            work.plan,
            [open_store(root) for root in work.roots],
            open_store(str(work.staging)),
            device=choose_device(self._wanted),
            projection=work.projection,
            name=self._name,
        )
        return self.ready()

    def run(self, segment: int) -> dict[str, Any]:
        """Make one segment; the receipt as JSON values."""
        if self._runner is None:
            raise RuntimeError("the worker was given no plan")
        return self._runner.run(segment).to_json()
