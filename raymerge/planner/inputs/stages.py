"""Work on weights that comes before a merge, decided: what goes in, and the header of what comes out.

Some numbers cannot be known from headers: router rows for given prompts, which expert of one model belongs
with which of another. A stage makes them and leaves a small checkpoint. Its names, dtypes and shapes are
known beforehand, so the merge that reads it is planned before any stage runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import xxhash

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.layout import TensorSpec, lay_out
from raymerge.checkpoints.source import WeightFile
from raymerge.merge_plan.dispositions import Holding
from raymerge.planner.inputs.source import AlignSpec, GateSpec, Prepared, Source, Stage, holdings
from raymerge.storage.open import open_store

RESULT_FILE = "model.safetensors"
"""The one file of a stage's result."""

_LENGTH_NBYTES = 8
"""Bytes of a file before the JSON of its header."""
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
    """A stage with the digest of what it does.

    Args:
        name: directory of the result.
        title: what people are told.
        place: where the recipe asks for it.
        spec: what is asked.
        tensors: what the result will hold.
        version: raymerge's version.
    """
    layout = lay_out(tensors)
    asked = {"raymerge": version, "spec": _plain(spec), "header": layout.header.hex()}
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return Stage(name, title, place, spec, layout, xxhash.xxh3_128_hexdigest(text.encode()))


def prepared_of(stage: Stage, root: Path) -> Prepared:
    """The result of a stage as it will be below ``root``."""
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
    """What tells one holding from another without reading its weights."""
    found: dict[str, Any] = {
        "name": holding.name,
        "num_tensors": len(holding.stored),
        "files": [[file.key, file.nbytes, file.header_digest] for file in holding.files],
    }
    return found | {"made_by": holding.stage.digest} if isinstance(holding, Prepared) else found


def _plain(spec: GateSpec | AlignSpec) -> dict[str, Any]:
    """A spec as JSON values, its sources by their fingerprints."""
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
    """A source as far as a stage depends on it: headers, config, tokenizer files, adapter."""
    weights = [fingerprint(holding) for holding in holdings([source])]
    factors = source.adapter.factors if source.adapter is not None else {}
    scales = [[module, factor.scale, factor.transposed] for module, factor in factors.items()]
    return [weights, source.checkpoint.config, _tokenizer_digests(source), scales]


def _tokenizer_digests(source: Source) -> dict[str, str]:
    """Digests of what tokens are made by, and what stands beside it."""
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
