"""Router stages as work for workers; random rows and those of embeddings are made in one unit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from raymerge.architectures import logical_name
from raymerge.errors import PlanError, Problem
from raymerge.methods import normal, random_key, uniform
from raymerge.planner.inputs.sources import RESULT_FILE, GateSpec, Source, Stage
from raymerge.planner.inputs.weights import Weights
from raymerge.planner.moe.shape import router_tensor, shared_gate_tensor
from raymerge.recipes import RANDOM_GATES
from raymerge.stages.router.gates import Rows, check_finite, unit
from raymerge.stages.router.prompts import TokenRun, prompt_problems, tokenized
from raymerge.stages.router.results import GateReport, Result, layer_report
from raymerge.stages.router.streamed import StreamedWork
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range

_ROWS_AT_ONCE = 1024
_OTHER_MODE = "Use gate_mode: hidden_avg, or random."


def embed_rows(spec: GateSpec, runs: Sequence[TokenRun]) -> Rows:
    """The rows of every layer.

    The embeddings of all tokens of an expert's texts are added and scaled to length 1, and so are those of
    its negative prompts; a row is the difference of the two, of length 1 again. Only the needed rows of the
    embedding are read.

    Raises:
        CheckpointError: the embedding cannot be read.
    """
    counts = _counts(runs)
    ids = sorted({token for counted in counts.values() for token in counted})
    num_experts = len(spec.experts) + len(spec.shared)
    sums = torch.zeros(2, num_experts, spec.hidden_size, dtype=torch.float64)
    name = str(embedding_of(spec.base))
    with Weights(spec.base) as weights:
        for begin in range(0, len(ids), _ROWS_AT_ONCE):
            some = ids[begin : begin + _ROWS_AT_ONCE]
            rows = weights.rows(name, some).double()
            for (expert, sign), counted in counts.items():
                often = torch.tensor([counted[token] for token in some], dtype=torch.float64)
                sums[0 if sign > 0 else 1, expert] += often @ rows
    positive, negative = unit(sums)
    both = unit(positive - negative)
    routed = len(spec.experts)
    return Rows((both[:routed] * spec.scale).float(), both[routed:].float())


def embed_nbytes(spec: GateSpec, runs: Sequence[TokenRun]) -> int:
    with Weights(spec.base) as weights:
        name = str(embedding_of(spec.base))
        one = weights.nbytes(name) // weights.shape(name)[0]
    return one * len({token for run in runs if run.sign for token in run.tokens})


def embedding_of(base: Source) -> str | None:
    """Logical name of the base's token embedding, or None if no tensor is known as one."""
    return None if base.pair is None else logical_name(base.pair.embedding, base.rules)


def embedding_problems(spec: GateSpec) -> Iterator[Problem]:
    name = embedding_of(spec.base)
    if name is None:
        yield Problem(spec.base.name, "has no token embedding that is known as such.", _OTHER_MODE)
        return
    with Weights(spec.base) as weights:
        shape = weights.shape(name)
    if shape[1:] != (spec.hidden_size,):
        what = (
            f"its embedding {name} is {list(shape)}, and the router's rows have {spec.hidden_size} elements."
        )
        yield Problem(spec.base.name, what, _OTHER_MODE)


def _counts(runs: Sequence[TokenRun]) -> dict[tuple[int, int], Counter[int]]:
    found: dict[tuple[int, int], Counter[int]] = {}
    for run in runs:
        if run.sign:
            found.setdefault((run.expert, run.sign), Counter()).update(run.tokens)
    return found


_CPU = torch.device("cpu")


def random_rows(mode: str, seed: int, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Normal numbers, or with ``uniform_random`` uniform ones between -1 and 1 over the root of H.

    Each element is a function of seed, name and index: no two rows are alike, whatever their experts are.

    Args:
        name: of the tensor in the stage's result.

    Returns:
        float32 of ``shape``.
    """
    key, count = random_key(seed, name, 0), math.prod(shape)
    if mode == "random":
        return normal(key, 0, count, _CPU).view(shape)
    # Exact up to the one rounding of the quotient: the numbers are multiples of 2**-24.
    return uniform(key, 0, count, _CPU).mul_(2.0).sub_(1.0).div_(math.sqrt(shape[1])).view(shape)


# ruff: noqa: ARG002 - a unit has all arguments of the protocol, whether it needs them or not


class DirectWork:
    """One unit, which makes the result at once. Pickles as the stage, without the prompts' tokens."""

    def __init__(self, stage: Stage, spec: GateSpec) -> None:
        self._stage = stage
        self._spec = spec

    def __getstate__(self) -> tuple[Stage, GateSpec]:
        return self._stage, self._spec

    def __setstate__(self, state: tuple[Stage, GateSpec]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def num_units(self) -> int:
        return 1

    def costs(self) -> tuple[int, ...]:
        return (0 if self._is_random else embed_nbytes(self._spec, self._runs),)

    def least_budget(self) -> int:
        """Bytes for the rows of one layer, and for the embedding rows that are read at once."""
        num_experts = len(self._spec.experts) + len(self._spec.shared)
        return 8 * self._spec.hidden_size * (8 * num_experts + 4096)

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        return self._stage.layout.nbytes

    def check(self) -> None:
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
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        """Make the rows, always on the CPU: they are small."""
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
        return {RESULT_FILE: ()}

    def conclude(self, staging: Path) -> dict[str, Any]:
        """The condition of the rows; where they send text is unknown."""
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


class GateWork(Protocol):
    """Makes the rows of one stage; picklable.

    Its bytes depend on the number of torch's threads: the caller has to set that to one.
    """

    @property
    def num_units(self) -> int:
        """Independent units; depends on the recipe and the base's tokenizer alone."""

    def costs(self) -> tuple[int, ...]:
        """Approximate bytes that each unit reads."""

    def least_budget(self) -> int:
        """Fewest bytes of memory that a worker needs."""

    def staging_nbytes(self, *, budget: int, busy: int) -> int:
        """Most bytes of disk, result included, for a memory ``budget`` per worker and ``busy`` units in
        progress.
        """

    def check(self) -> None:
        """Check before anything starts that it can be done.

        Raises:
            PlanError: it cannot, with all reasons.
        """

    def unit(
        self, number: int, *, staging: Path, device: torch.device, budget: int, tell: Callable[[int], None]
    ) -> tuple[int, int]:
        """Do one unit and write its files to ``staging``; returns bytes read and written.

        ``tell`` is called after each layer with the bytes read so far; what it raises ends the unit.
        """

    def files(self, number: int) -> Mapping[str, Sequence[Range]]:
        """The files of a unit in ``staging``, whole."""

    def conclude(self, staging: Path) -> dict[str, Any]:
        """Make the result from all units' files, and report on it as ``GateReport.to_json``."""


def gate_work(stage: Stage) -> GateWork:
    if not isinstance(stage.spec, GateSpec):
        raise TypeError(f"{stage.name} asks for no router rows")
    if stage.spec.mode in RANDOM_GATES or stage.spec.mode == "cheap_embed":
        return DirectWork(stage, stage.spec)
    return StreamedWork(stage, stage.spec)
