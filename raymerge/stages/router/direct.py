"""Router rows that need no run of the base model: random ones, and those of embeddings."""

# ruff: noqa: ARG002 - a unit has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.stages import RESULT_FILE, GateSpec, Stage
from raymerge.planner.moe.gates import router_tensor, shared_gate_tensor
from raymerge.recipes import RANDOM_GATES
from raymerge.stages.router.embed_gates import embed_nbytes, embed_rows, embedding_problems
from raymerge.stages.router.gates_part import Rows, check_finite
from raymerge.stages.router.prompts import TokenRun, tokenized
from raymerge.stages.router.random_gates import random_rows
from raymerge.stages.router.readings import prompt_problems
from raymerge.stages.router.report import GateReport, layer_report
from raymerge.stages.router.results import Result
from raymerge.storage.local.store import LocalStore
from raymerge.storage.ranges import Range


class DirectWork:
    """One unit, which makes the result at once. Pickles as the stage alone, without the prompts' tokens."""

    def __init__(self, stage: Stage, spec: GateSpec) -> None:
        """
        Args:
            stage: whose result.
            spec: what it asks for.
        """
        self._stage = stage
        self._spec = spec

    def __getstate__(self) -> tuple[Stage, GateSpec]:
        return self._stage, self._spec

    def __setstate__(self, state: tuple[Stage, GateSpec]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def num_units(self) -> int:
        """One."""
        return 1

    def costs(self) -> tuple[int, ...]:
        """Bytes read: rows of the embedding."""
        return (0 if self._is_random else embed_nbytes(self._spec, self._runs),)

    def least_budget(self) -> int:
        """Bytes for the rows of one layer, and for the rows of the embedding that are read at once."""
        num_experts = len(self._spec.experts) + len(self._spec.shared)
        return 8 * self._spec.hidden_size * (8 * num_experts + 4096)

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        """Bytes of disk: the result."""
        return self._stage.layout.nbytes

    def check(self) -> None:
        """Find out whether the rows can be made.

        Raises:
            PlanError: with all of the reasons why not.
        """
        if self._is_random:
            return
        problems: list[Problem] = [*embedding_problems(self._spec)]
        try:
            problems += prompt_problems(self._spec, self._runs, where=self._stage.place)
        except PlanError as error:
            problems += error.problems
        if problems:
            raise PlanError(problems)

    def unit(
        self,
        number: int,
        *,
        staging: Path,
        device: torch.device,
        budget: int,
        tell: Callable[[int], None],
    ) -> tuple[int, int]:
        """Make the rows; on the CPU, whatever the worker has: they are small.

        Raises:
            CheckpointError: the embedding cannot be read.
            NonFiniteError: it holds NaN or infinity.
        """
        rows: Rows | None = None
        read_bytes = 0
        with LocalStore(staging) as store:
            result = Result(store, self._stage, self._spec)
            result.create()
            if not self._is_random:
                rows = embed_rows(self._spec, self._runs)
                read_bytes = embed_nbytes(self._spec, self._runs)
                check_finite(rows.routed, self._spec, self._spec.layers[0])
            for layer in self._spec.layers:
                result.write(layer, rows or self._random(layer))
                tell(read_bytes)
            result.finish()
        return read_bytes, result.nbytes

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        """The result."""
        return {RESULT_FILE: ()}

    def conclude(self, staging: Path) -> dict[str, Any]:
        """The condition of the rows; nothing is known of where they send text."""
        spec = self._spec
        with LocalStore(staging) as store:
            result = Result(store, self._stage, spec)
            layers = tuple(layer_report(layer, result.routed(layer), None) for layer in spec.layers)
        return GateReport(spec.mode, tuple(expert.name for expert in spec.experts), layers).to_json()

    @property
    def _is_random(self) -> bool:
        return self._spec.mode in RANDOM_GATES

    @cached_property
    def _runs(self) -> tuple[TokenRun, ...]:
        return tokenized(self._spec)

    def _random(self, layer: int) -> Rows:
        spec, width = self._spec, self._spec.hidden_size
        routed = random_rows(spec.mode, spec.seed, router_tensor(layer), (len(spec.experts), width))
        shared = random_rows(spec.mode, spec.seed, shared_gate_tensor(layer), (len(spec.shared), width))
        return Rows(routed * spec.scale, shared)
