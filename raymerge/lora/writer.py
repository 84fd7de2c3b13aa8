"""Writes an adapter tensor by tensor and publishes the whole directory at once."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from raymerge.checkpoints.adapters import (
    ADAPTER_WEIGHTS_FILE,
    Adapter,
    FactorKind,
    factor_names,
    open_adapter,
)
from raymerge.checkpoints.files import ADAPTER_CONFIG_FILE
from raymerge.checkpoints.header import StoredTensor, TensorSpec, lay_out
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.errors import OptionError, Problem, TargetError
from raymerge.lora.matrices import Factors, read_pieces
from raymerge.storage.addresses import is_remote, parse_place, shown
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Buffer

_SPOOL = "spool"


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Fields of ``adapter_config.json`` other than ranks."""

    base_model: str
    target_modules: tuple[str, ...]
    modules_to_save: tuple[str, ...] = ()
    task_type: str | None = None
    fan_in_fan_out: bool = False
    """Whether the model stores the weights of its linear modules [in, out]."""
    replaces_biases: bool = False
    lora_bias: bool = False
    ties_weights: bool = False


def write_adapter(
    root: Path, tensors: Sequence[StoredTensor], facts: AdapterFacts, ranks: Mapping[str, int], *, name: str
) -> int:
    """Write weights and config of an adapter from tensors in files of the directory ``root``, durably, and
    reopen it; returns the bytes of the weights. ``ranks`` are those of its modules."""
    layout = lay_out([TensorSpec(each.name, each.dtype, each.shape) for each in tensors])
    origins = {each.name: each for each in tensors}
    with LocalStore(root) as store:
        store.create(ADAPTER_WEIGHTS_FILE, layout.nbytes)
        store.write_at(ADAPTER_WEIGHTS_FILE, 0, layout.header)
        for placed in layout.tensors:
            offset = placed.offset
            for piece in read_pieces(store, origins[placed.name]):
                store.write_at(ADAPTER_WEIGHTS_FILE, offset, piece)
                offset += len(piece)
        store.sync(ADAPTER_WEIGHTS_FILE)
        store.write_atomic(ADAPTER_CONFIG_FILE, (json.dumps(_config(facts, ranks), indent=2) + "\n").encode())
    # What cannot be read back must not be published.
    open_adapter(root, name)
    return layout.nbytes


def as_stored(tensor: torch.Tensor, dtype: DType) -> memoryview:
    """The bytes of a tensor in a dtype, in row-major order."""
    stored = tensor.to(getattr(torch, str(dtype.torch_name))).cpu().contiguous()
    return stored.flatten().view(torch.uint8).numpy().data


class AdapterWriter:
    """Collects tensors beside the output place, and renames the finished directory into it; what is not
    published is removed on exit."""

    def __init__(self, output: Path) -> None:
        self._shown = output
        self._output = output.absolute()
        _check_target(self._output)
        self._output.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{self._output.name}.adapter-"
        self._root = Path(tempfile.mkdtemp(prefix=prefix, dir=self._output.parent))
        self._spool = open(self._root / _SPOOL, "w+b")  # noqa: SIM115 - __exit__ closes it
        self._tensors: dict[str, StoredTensor] = {}
        self.ranks: dict[str, int] = {}

    def __enter__(self) -> AdapterWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spool.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def add_factors(self, module: str, kind: FactorKind, factors: Factors) -> None:
        """The product of ``factors`` has scale 1."""
        for name, tensor in zip(factor_names(module, kind), (factors.down, factors.up), strict=True):
            self.add_bytes(TensorSpec(name, DType.F32, tuple(tensor.shape)), [as_stored(tensor, DType.F32)])
        self.ranks[module] = factors.rank

    def add_bytes(self, spec: TensorSpec, pieces: Iterable[Buffer]) -> None:
        offset = self._spool.tell()
        self._tensors[spec.name] = StoredTensor(
            spec.name, spec.dtype, spec.shape, _SPOOL, offset, spec.nbytes
        )
        for piece in pieces:
            self._spool.write(piece)

    def drop(self, module: str, kind: FactorKind) -> None:
        for name in factor_names(module, kind):
            del self._tensors[name]
        del self.ranks[module]

    def publish(self, facts: AdapterFacts) -> Adapter:
        """Write the files, reopen them as an adapter, and rename the directory into place. Raises TargetError
        if that has been filled meanwhile."""
        self._spool.flush()
        write_adapter(self._root, tuple(self._tensors.values()), facts, self.ranks, name=str(self._shown))
        self._spool.close()
        (self._root / _SPOOL).unlink()
        self._root.chmod(0o755)
        _check_target(self._output)
        self._root.rename(self._output)
        with LocalStore(self._output.parent) as store:
            store.sync_directory()
        return open_adapter(self._shown, str(self._shown))


def short_targets(targets: Collection[str], modules: Iterable[str]) -> tuple[str, ...]:
    """The modules with factors, by the last word of their path where that matches no others."""
    target_paths = frozenset(targets)
    others = {path.rpartition(".")[2] for path in modules if path not in target_paths}
    leaves = {path.rpartition(".")[2] for path in target_paths}
    long = {path for path in target_paths if path.rpartition(".")[2] in others}
    return (*sorted(leaves - others), *sorted(long))


def _config(facts: AdapterFacts, ranks: Mapping[str, int]) -> dict[str, Any]:
    largest = max(ranks.values())
    fields = {
        **dict.fromkeys(("auto_mapping", "exclude_modules", "layer_replication", "layers_pattern")),
        **dict.fromkeys(("layers_to_transform", "revision")),
        **dict.fromkeys(("inference_mode", "init_lora_weights"), True),
        **dict.fromkeys(("use_dora", "use_rslora"), False),
        **dict.fromkeys(("lora_alpha", "r"), largest),
        **dict.fromkeys(("alpha_pattern", "rank_pattern"), _exceptions(ranks, largest)),
        "base_model_name_or_path": facts.base_model,
        "bias": "all" if facts.replaces_biases else "none",
        "ensure_weight_tying": facts.ties_weights,
        "fan_in_fan_out": facts.fan_in_fan_out,
        "lora_bias": facts.lora_bias,
        "lora_dropout": 0.0,
        "modules_to_save": list(facts.modules_to_save) or None,
        "peft_type": "LORA",
        "target_modules": list(facts.target_modules),
        "task_type": facts.task_type,
    }
    return dict(sorted(fields.items()))


def _exceptions(ranks: Mapping[str, int], largest: int) -> dict[str, int]:
    """``rank_pattern``: modules of smaller rank, and those that another module's pattern would match.

    A pattern matches every path that ends in it and the first match counts: longer ones go first."""
    smaller = {module for module, rank in ranks.items() if rank != largest}
    caught = {module for module in ranks if not smaller.isdisjoint(_ends(module))}
    order = sorted(smaller | caught, key=lambda module: (-len(module), module))
    return {module: ranks[module] for module in order}


def _ends(module: str) -> Iterable[str]:
    path = module.split(".")
    return (".".join(path[start:]) for start in range(1, len(path)))


def output_directory(output: str | Path) -> Path:
    """The local directory of ``output``; raises OptionError: not a local directory."""
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
    total: float
    """Of the squared singular values, as in ``Factors``: the squared norm of the change."""

    @staticmethod
    def of(name: str, factors: Factors) -> ModuleReport:
        return ModuleReport(name, factors.rank, factors.kept, factors.total)

    @property
    def energy(self) -> float:
        """Share of the change's squared norm in the factors; 1 for no change."""
        return self.kept / self.total if self.total else 1.0


OnModule: TypeAlias = Callable[[ModuleReport, int], None]
"""Called after each module with factors, with the number of modules expected."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    name: str
    reason: str
    total: float
    """Squared norm of the change; 0 for dtypes other than plain floats."""


@dataclass(frozen=True, slots=True)
class Extraction:
    output: str
    nbytes: int
    modules: tuple[ModuleReport, ...]
    saved: tuple[str, ...]
    biases: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    """Changed tensors that the adapter lacks."""
    num_unchanged: int
    relative_error: float
    """Norm of the part of the difference that the adapter lacks, over the norm of the difference."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Combination:
    output: str
    nbytes: int
    modules: tuple[ModuleReport, ...]
    saved: tuple[str, ...]
    relative_error: float
    """Norm of the part of the merged change that the factors lack, over the norm of that change."""
    notes: tuple[str, ...]


def relative_error(missing: float, total: float) -> float:
    """Ratio of two norms, from their squares; 0 for a norm of 0."""
    return math.sqrt(max(0.0, missing) / total) if total else 0.0
