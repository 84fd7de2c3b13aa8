"""An adapter that is being made: its tensors one by one, and at the end the whole directory at once."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch

from raymerge.checkpoints.adapters import (
    ADAPTER_WEIGHTS_FILE,
    Adapter,
    FactorKind,
    factor_names,
    open_adapter,
)
from raymerge.checkpoints.files import ADAPTER_CONFIG_FILE
from raymerge.checkpoints.header import TensorSpec, lay_out
from raymerge.dtypes import DType
from raymerge.errors import OptionError, Problem, TargetError
from raymerge.lora.matrices import PIECE_NBYTES, Factors
from raymerge.storage.addresses import is_remote, parse_place, shown
from raymerge.storage.local.store import LocalStore

_SPOOL = "spool"


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What ``adapter_config.json`` says beside ranks."""

    base_model: str
    target_modules: tuple[str, ...]
    """Paths, or ends of paths, of the modules that have factors."""
    modules_to_save: tuple[str, ...] = ()
    """Paths of the modules that are in it whole."""
    task_type: str | None = None
    fan_in_fan_out: bool = False
    """Whether the model stores the weights of its linear modules [in, out]."""
    replaces_biases: bool = False
    """Whether it holds biases of modules that are not in it whole."""
    lora_bias: bool = False
    """Whether up factors have biases."""
    ties_weights: bool = False
    """Whether a change of the embedding is one of the head as well."""


class AdapterWriter:
    """Collects tensors beside the output place, and renames the finished directory into it.

    Use it as a context: what was not published by the end of it is removed.
    """

    def __init__(self, output: Path) -> None:
        self._shown = output
        self._output = output.absolute()
        _check_target(self._output)
        self._output.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{self._output.name}.adapter-"
        self._root = Path(tempfile.mkdtemp(prefix=prefix, dir=self._output.parent))
        self._spool = open(self._root / _SPOOL, "w+b")  # noqa: SIM115 - __exit__ closes it
        self._placed: dict[str, tuple[TensorSpec, int]] = {}
        self.ranks: dict[str, int] = {}
        """Rank of each module that has factors, in the order of coming."""

    def __enter__(self) -> AdapterWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spool.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def add_factors(self, module: str, kind: FactorKind, factors: Factors, dtype: DType = DType.F32) -> None:
        """Take in the factors of a module; their product counts once."""
        for name, tensor in zip(factor_names(module, kind), (factors.down, factors.up), strict=True):
            self.add_tensor(name, tensor, dtype)
        self.ranks[module] = factors.rank

    def add_tensor(self, name: str, tensor: torch.Tensor, dtype: DType) -> None:
        """Take in a tensor by its name in the file, rounded to ``dtype``."""
        stored = tensor.to(getattr(torch, str(dtype.torch_name))).cpu().contiguous()
        data = stored.flatten().view(torch.uint8).numpy().tobytes()
        self.add_bytes(TensorSpec(name, dtype, tuple(tensor.shape)), [data])

    def add_bytes(self, spec: TensorSpec, pieces: Iterable[bytes]) -> None:
        """Take in a tensor as it lies in some other file."""
        self._placed[spec.name] = (spec, self._spool.tell())
        for piece in pieces:
            self._spool.write(piece)

    def drop(self, module: str, kind: FactorKind) -> None:
        for name in factor_names(module, kind):
            del self._placed[name]
        del self.ranks[module]

    def publish(self, facts: AdapterFacts) -> Adapter:
        """Write the files, read them back as any adapter, and rename the directory into place.

        Raises:
            TargetError: something has come to the output place meanwhile.
        """
        self._write_weights()
        config = json.dumps(_config(facts, self.ranks), indent=2) + "\n"
        with LocalStore(self._root) as store:
            store.write_atomic(ADAPTER_CONFIG_FILE, config.encode())
        self._spool.close()
        (self._root / _SPOOL).unlink()
        self._root.chmod(0o755)
        # What cannot be read back must not be published.
        open_adapter(self._root, str(self._shown))
        _check_target(self._output)
        self._root.rename(self._output)
        with LocalStore(self._output.parent) as store:
            store.sync_directory()
        return open_adapter(self._shown, str(self._shown))

    def _write_weights(self) -> None:
        layout = lay_out([spec for spec, _ in self._placed.values()])
        with LocalStore(self._root) as store:
            store.create(ADAPTER_WEIGHTS_FILE, layout.nbytes)
            store.write_at(ADAPTER_WEIGHTS_FILE, 0, layout.header)
            for tensor in layout.tensors:
                self._spool.seek(self._placed[tensor.name][1])
                for done in range(0, tensor.nbytes, PIECE_NBYTES):
                    piece = self._spool.read(min(PIECE_NBYTES, tensor.nbytes - done))
                    store.write_at(ADAPTER_WEIGHTS_FILE, tensor.offset + done, piece)
            store.sync(ADAPTER_WEIGHTS_FILE)


def short_targets(targets: Collection[str], modules: Iterable[str]) -> tuple[str, ...]:
    """The modules that have factors, by the last word of their path where that says no others."""
    wanted = frozenset(targets)
    others = {path.rpartition(".")[2] for path in modules if path not in wanted}
    leaves = {path.rpartition(".")[2] for path in wanted}
    long = {path for path in wanted if path.rpartition(".")[2] in others}
    return (*sorted(leaves - others), *sorted(long))


def _config(facts: AdapterFacts, ranks: Mapping[str, int]) -> dict[str, Any]:
    largest = max(ranks.values())
    exceptions = _exceptions(ranks, largest)
    return {
        "alpha_pattern": exceptions,
        "auto_mapping": None,
        "base_model_name_or_path": facts.base_model,
        "bias": "all" if facts.replaces_biases else "none",
        "ensure_weight_tying": facts.ties_weights,
        "exclude_modules": None,
        "fan_in_fan_out": facts.fan_in_fan_out,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": largest,
        "lora_bias": facts.lora_bias,
        "lora_dropout": 0.0,
        "modules_to_save": list(facts.modules_to_save) or None,
        "peft_type": "LORA",
        "r": largest,
        "rank_pattern": exceptions,
        "revision": None,
        "target_modules": list(facts.target_modules),
        "task_type": facts.task_type,
        "use_dora": False,
        "use_rslora": False,
    }


def _exceptions(ranks: Mapping[str, int], largest: int) -> dict[str, int]:
    """``rank_pattern``: the modules of smaller rank, and those that a pattern of another one would match.

    A pattern speaks of every path that ends in it and the first that matches holds: longer ones go first.
    """
    smaller = {module for module, rank in ranks.items() if rank != largest}
    caught = {module for module in ranks if not smaller.isdisjoint(_ends(module))}
    order = sorted(smaller | caught, key=lambda module: (-len(module), module))
    return {module: ranks[module] for module in order}


def _ends(module: str) -> Iterable[str]:
    path = module.split(".")
    return (".".join(path[start:]) for start in range(1, len(path)))


def output_directory(output: str | Path) -> Path:
    """The directory that a user means.

    Raises:
        OptionError: it is an address elsewhere: adapters are written to directories.
    """
    if is_remote(str(output)):
        what = "an adapter is written to a directory of this machine."
        raise OptionError(
            Problem(shown(str(output)), what, "Give a directory as -o, and copy it from there.")
        )
    return Path(parse_place(str(output)).text)


def _check_target(output: Path) -> None:
    if os.path.lexists(output) and not output.is_dir():
        what, remedy = "a file is in the place of the output directory.", "Choose another -o."
    elif output.is_dir() and any(output.iterdir()):
        what, remedy = "this directory is not empty.", "Choose another -o, or empty it first."
    else:
        return
    raise TargetError(Problem(str(output), what, remedy))


@dataclass(frozen=True, slots=True)
class ModuleReport:
    name: str
    rank: int
    kept: float
    """Sum of the squared singular values that the factors say."""
    total: float
    """Sum of all squared singular values: the squared length of the change."""

    @property
    def energy(self) -> float:
        """Share of the change's squared length that the factors say; 1 for no change."""
        return self.kept / self.total if self.total else 1.0


OnModule: TypeAlias = Callable[[ModuleReport, int], None]
"""Told of each module with factors as it is done, with the number of those that may come in all."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    name: str
    reason: str
    total: float
    """Squared length of the change; 0 where its elements are no plain floats."""


@dataclass(frozen=True, slots=True)
class Extraction:
    output: str
    nbytes: int
    modules: tuple[ModuleReport, ...]
    saved: tuple[str, ...]
    """Modules that are in it whole."""
    biases: tuple[str, ...]
    """Biases that are in it beside factors."""
    left_out: tuple[LeftOut, ...]
    """Changed tensors that are not in it."""
    num_unchanged: int
    """Modules that are equal in both models."""
    relative_error: float
    """Length of what the adapter does not say of the difference, over the length of the difference."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Combination:
    output: str
    nbytes: int
    modules: tuple[ModuleReport, ...]
    saved: tuple[str, ...]
    """Tensors that take the place of the model's."""
    relative_error: float
    """Length of what its factors do not say of the merged change, over the length of that change."""
    notes: tuple[str, ...]


def relative_error(missing: float, total: float) -> float:
    """Ratio of two lengths, from their squares; 0 for no length."""
    return math.sqrt(max(0.0, missing) / total) if total else 0.0
