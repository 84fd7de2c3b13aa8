"""What a plan reads from: the models of a recipe, and results of stages that run before the merge.

Router rows for given prompts, or which experts of two models match, cannot be known from headers. A stage
computes them into a small checkpoint whose names, dtypes and shapes are known beforehand, so the merge that
reads it is planned before any stage runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import xxhash

from raymerge.architectures import Rules, Stack, TiedPair, module_finder
from raymerge.architectures.sections import class_names
from raymerge.checkpoints.adapters import Adapter
from raymerge.checkpoints.header import FileLayout, StoredTensor, TensorSpec, lay_out
from raymerge.checkpoints.source import Checkpoint, WeightFile
from raymerge.dtypes import DType
from raymerge.merge_plan.dispositions import Holding
from raymerge.recipes import ModelReference
from raymerge.storage.addresses import is_remote
from raymerge.storage.open import open_store


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor of one value that the output needs and no source has, such as zero biases."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True)
class ExpertPrompts:
    name: str
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    text: str = ""
    held_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GateSpec:
    """Router rows of a mixture of experts to be made.

    The result has ``router.{layer}`` float32 ``[experts, hidden]`` for each layer; where shared experts have
    gates ``shared_gate.{layer}`` float32 ``[shared, hidden]``; and the constants.
    """

    base: Source
    mode: str
    experts: tuple[ExpertPrompts, ...]
    """Routed experts, in the order of the rows."""
    shared: tuple[ExpertPrompts, ...]
    layers: tuple[int, ...]
    hidden_size: int
    seed: int
    scale: float
    """Factor on every finished row of routed experts."""
    penalty: float
    """For ridge, relative to the mean of the Gram matrix's diagonal."""
    constants: tuple[Constant, ...]


@dataclass(frozen=True, slots=True)
class AlignSpec:
    """Experts of one model to be permuted into the order of another's.

    The result has every expert's matrices and biases, the router's rows and its biases, layer by layer, by
    their canonical names and in the other model's dtypes.
    """

    reference: Source
    other: Source
    layers: tuple[int, ...]
    neurons: bool
    """Whether the neurons inside an expert are matched as well."""


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    """Directory of the result below the steps."""
    title: str
    place: str
    spec: GateSpec | AlignSpec
    layout: FileLayout
    digest: str
    """Of everything that determines the result, as far as headers tell."""


@dataclass(frozen=True, slots=True)
class Prepared:
    name: str
    root: str
    tensors: Mapping[str, StoredTensor]
    files: tuple[WeightFile, ...]
    """Its one file; without a version until it is made."""
    stage: Stage

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        return self.tensors

    def parts(self, name: str) -> tuple[str, ...]:
        return (name,)

    def whole(self, stored: str) -> str:
        return stored


@dataclass(frozen=True, slots=True)
class Source:
    index: int
    reference: ModelReference
    checkpoint: Checkpoint
    adapter: Adapter | None
    rules: Rules
    stacks: tuple[Stack, ...]
    pair: TiedPair | None
    stored_head_is_embedding: bool
    """Whether the stored head is byte-equal to the embedding that the config ties it to."""
    prepared: tuple[Prepared, ...] = ()

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def model_type(self) -> str:
        return str(self.checkpoint.config.get("model_type") or "")

    @property
    def architectures(self) -> tuple[str, ...]:
        """From the config, or the recipe's override."""
        override = self.reference.override_architecture
        return (override,) if override else class_names(self.checkpoint.config)

    def layer_stack(self, module: str | None) -> Stack | None:
        """The stack of layers that a slice of this module counts, or None where it is not unique."""
        if module in (None, "default"):
            return next((stack for stack in self.stacks if stack.is_main), None)
        find = module_finder(self.checkpoint.config, self.stacks)
        own = [stack for stack in self.stacks if find(f"{stack.prefix}.0.weight") == module]
        return own[0] if len(own) == 1 else None


def holdings(sources: Sequence[Source]) -> tuple[Holding, ...]:
    """Everything that a plan may read from, by index: models, then adapters, then results of stages."""
    models: list[Holding] = [source.checkpoint for source in sources]
    adapters = (source.adapter for source in sources if source.adapter is not None)
    return (*models, *adapters, *(each for source in sources for each in source.prepared))


def reads_far(sources: Sequence[Source]) -> bool:
    return any(is_remote(each.root) for each in holdings(sources))


RESULT_FILE = "model.safetensors"
_LENGTH_NBYTES = 8
_TOKENIZER = (
    "token*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)


def make_stage(
    *,
    name: str,
    title: str,
    place: str,
    spec: GateSpec | AlignSpec,
    tensors: Sequence[TensorSpec],
    version: str,
) -> Stage:
    layout = lay_out(tensors)
    asked = {"raymerge": version, "spec": _plain(spec), "header": layout.header.hex()}
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return Stage(name, title, place, spec, layout, xxhash.xxh3_128_hexdigest(text.encode()))


def prepared_of(stage: Stage, root: Path) -> Prepared:
    layout = stage.layout
    found = sorted(layout.tensors, key=lambda tensor: tensor.name)
    digest = xxhash.xxh3_128_hexdigest(layout.header[_LENGTH_NBYTES:])
    return Prepared(
        name=stage.title,
        root=str(root / stage.name),
        tensors={
            each.name: StoredTensor(each.name, each.dtype, each.shape, RESULT_FILE, each.offset, each.nbytes)
            for each in found
        },
        files=(WeightFile(RESULT_FILE, layout.nbytes, digest, ""),),
        stage=stage,
    )


def fingerprint(holding: Holding) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": holding.name,
        "num_tensors": len(holding.stored),
        "files": [[file.key, file.nbytes, file.header_digest] for file in holding.files],
    }
    return found | {"made_by": holding.stage.digest} if isinstance(holding, Prepared) else found


def _plain(spec: GateSpec | AlignSpec) -> dict[str, Any]:
    if isinstance(spec, AlignSpec):
        sources = [_fingerprints(spec.reference), _fingerprints(spec.other)]
        return {"kind": "align", "sources": sources, "layers": spec.layers, "neurons": spec.neurons}
    return {
        "kind": "gates",
        "base": _fingerprints(spec.base),
        "mode": spec.mode,
        "experts": [asdict(each) for each in spec.experts],
        "shared": [asdict(each) for each in spec.shared],
        "layers": spec.layers,
        "hidden_size": spec.hidden_size,
        "seed": spec.seed,
        "scale": spec.scale,
        "penalty": spec.penalty,
        "constants": [[e.name, e.dtype.value, e.shape, e.value] for e in spec.constants],
    }


def _fingerprints(source: Source) -> list[Any]:
    weights = [fingerprint(holding) for holding in holdings([source])]
    factors = source.adapter.factors if source.adapter is not None else {}
    scales = [[module, factor.scale, factor.transposed] for module, factor in factors.items()]
    return [weights, source.checkpoint.config, _tokenizer_digests(source), scales]


def _tokenizer_digests(source: Source) -> dict[str, str]:
    checkpoint, promised = source.checkpoint, source.checkpoint.unwritten
    keys = [key for key in checkpoint.companions if any(fnmatchcase(key, each) for each in _TOKENIZER)]
    written = promised.written if promised is not None else {}
    found = {key: xxhash.xxh3_128_hexdigest(written[key]) for key in keys if key in written}
    with open_store(checkpoint.root if promised is None else promised.companions_root) as store:
        for key in keys:
            info = store.info(key) if key not in found else None
            if info is not None:
                found[key] = xxhash.xxh3_128_hexdigest(store.read(key, 0, info.nbytes))
    return found
