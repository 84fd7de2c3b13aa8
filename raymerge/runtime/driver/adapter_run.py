"""Carries out a merge of adapters: modules on the workers, the adapter on the driver, then into its place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raymerge.checkpoints.adapters import ADAPTER_WEIGHTS_FILE
from raymerge.checkpoints.files import ADAPTER_CONFIG_FILE
from raymerge.device_numerics import DeviceChoice
from raymerge.events import OnEvent, Published
from raymerge.lora.combine import AdapterMerge
from raymerge.lora.writer import Combination
from raymerge.options import RunOptions
from raymerge.publish.lease import Lease, StopRequest
from raymerge.publish.output_place import check_apart
from raymerge.publish.record import Journal
from raymerge.publish.staging import AdapterStaging, real_directory
from raymerge.runtime.driver.chained_merges import begun_on
from raymerge.runtime.driver.run import resumable
from raymerge.runtime.driver.unit_run import UnitRun
from raymerge.runtime.driver.versions import commits_of, condition_of, file_versions
from raymerge.runtime.workers.pool import Pool
from raymerge.runtime.workers.sizing import check_free

_SMALL = DeviceChoice("cpu", "factors are small, and a GPU would not help")


class AdapterRun:
    def __init__(
        self,
        merge: AdapterMerge,
        output: Path,
        options: RunOptions,
        *,
        on_event: OnEvent,
        began: float,
        journal: Journal | None = None,
    ) -> None:
        """``began`` is ``time.monotonic()`` at the begin of the user's command; ``journal`` is opened with
        the record.

        Raises PlanError: something stands in the merge's way. OptionError: the memory limit is too small for
        it, or more than is free. TargetError: the output would lie over, in or around an adapter."""
        self._plan = merge.plan.require()
        self._work = merge.work
        self._output = output
        self._options = options
        self._on_event = on_event
        self._began = began
        self._journal = journal
        self._commits = commits_of(
            (entry.model.path, entry.model.revision, adapter.root)
            for entry, adapter in zip(self._work.recipe.models, merge.adapters, strict=True)
        )
        self._adapters = merge.adapters
        directory = real_directory(str(output), options)
        title = f"the merge of {len(merge.adapters)} adapters with {self._work.recipe.merge_method}"
        self._staging = AdapterStaging(directory, self._plan, self._work.staging_nbytes, title)
        self._units = UnitRun(
            self._work,
            title,
            merge.adapters,
            self._staging,
            options,
            on_event=on_event,
            asked=StopRequest(directory).is_made,
        )
        self._units.budget()
        check_free(options)
        check_apart(directory, merge.adapters)

    @property
    def num_units(self) -> int:
        return self._work.num_units

    def check(self) -> None:
        """Before any worker is started: raises TargetError for the output place."""
        self._staging.check_unheld()
        self._staging.check(replace=self._options.replace)

    def carry_out(self, pool: Pool) -> Combination:
        """Run with a started pool until the adapter is published; raises what ``Run.carry_out`` raises."""
        pool.settle(lambda: begun_on([self._staging.ledger_path]) or _SMALL)
        with resumable(self._staging.output, self._staging.missing_bytes), self._staging.lock() as lease:
            return self._carry_out(pool, lease)

    def _carry_out(self, pool: Pool, lease: Lease) -> Combination:
        staging, replace, notes = self._staging, self._options.replace, self._plan.manifest["notes"]
        made_in = self._units.made(
            pool, self._conditions(pool), lease, replace=replace, slots=pool.threads, journal=self._journal
        )
        with made_in as units:
            made = self._work.conclude(staging.root, units.name, output=str(self._output), notes=notes)
        staging.sweep({ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE})
        lease.confirm()
        staging.publish(replace=replace)
        self._on_event(Published(staging.name, time.monotonic() - self._began))
        return made

    def _conditions(self, pool: Pool) -> Mapping[str, Any]:
        versions = file_versions(self._adapters)
        return {"numerics": pool.stage_numerics, "versions": versions, **condition_of(self._commits)}
