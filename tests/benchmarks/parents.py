"""The checkpoints that are merged: a Llama and fine-tunes of it, made of seeds and streamed to disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch
from kits.checkpoint_maker import llama_config, llama_shapes, sparse_checkpoint, write_json

from raymerge.checkpoints.header import FileLayout, StoredTensor, TensorSpec, lay_out, split_into_shards
from raymerge.dtypes import DType

NUM_PARENTS = 4
_FILE = "model.safetensors"
_PIECE = 1 << 22
_SPREAD, _CHANGE = 0.02, 0.001
_HEAD_SIZE = 64
_SHARD_NBYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class Size:
    hidden: int
    width: int
    layers: int
    vocab: int


SIZES = {
    "tiny": Size(hidden=64, width=128, layers=2, vocab=2048),
    "10MB": Size(hidden=256, width=704, layers=4, vocab=4096),
    "0.25GB": Size(hidden=1024, width=2816, layers=8, vocab=16000),
    "1GB": Size(hidden=2048, width=5632, layers=8, vocab=32000),
    "7B": Size(hidden=4096, width=11008, layers=32, vocab=32000),
}


def make_parents(root: Path, size: Size, tokenizer: Path) -> list[Path]:
    places = [root / f"p{number}" for number in range(NUM_PARENTS)]
    absent = [number for number, place in enumerate(places) if not (place / "config.json").is_file()]
    if 0 in absent:
        _make(places[0], size, 0, tokenizer)
    with ThreadPoolExecutor(2) as threads:
        tunes = [number for number in absent if number]
        list(threads.map(lambda number: _make(places[number], size, number, tokenizer, places[0]), tunes))
    return places


def make_sparse(root: Path, size: Size) -> Path:
    return sparse_checkpoint(root, split_into_shards(specs_of(size), _SHARD_NBYTES), config_of(size))


def weights_of(parent: Path) -> Path:
    return parent / _FILE


def config_of(size: Size) -> dict[str, Any]:
    heads = size.hidden // _HEAD_SIZE
    return {
        **llama_config(layers=size.layers, hidden=size.hidden, vocab=size.vocab),
        "intermediate_size": size.width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": _HEAD_SIZE,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def specs_of(size: Size) -> list[TensorSpec]:
    shapes = llama_shapes(config_of(size))
    return [TensorSpec(name, DType.BF16, shape) for name, shape in shapes.items()]


def _make(place: Path, size: Size, seed: int, tokenizer: Path, base: Path | None = None) -> None:
    """One parent: noise, or with a base that base and a little noise. The config comes last, as a mark."""
    place.mkdir(parents=True, exist_ok=True)
    layout = lay_out(specs_of(size))
    with open(place / _FILE, "wb") as stream:
        stream.write(layout.header)
        for piece in _pieces(layout, seed, None if base is None else base / _FILE):
            stream.write(piece.to(torch.bfloat16).view(torch.uint8).numpy().data)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(tokenizer / file, place / file)
    write_json(place / "config.json", config_of(size))


def _pieces(layout: FileLayout, seed: int, base: Path | None) -> Iterator[torch.Tensor]:
    numbers = count()
    with open(base or "/dev/null", "rb") as stream:
        stream.seek(layout.data_start if base is not None else 0)
        for tensor in layout.tensors:
            for length in _lengths(tensor):
                # The generator looks at 32 bits of its seed.
                generator = torch.Generator().manual_seed((seed << 24) + next(numbers))
                noise = torch.randn(length, generator=generator)
                if base is None:
                    yield noise.mul_(_SPREAD).add_(float(len(tensor.shape) == 1))
                else:
                    yield noise.mul_(_CHANGE).add_(_read(stream, length))


def _lengths(tensor: StoredTensor) -> Iterator[int]:
    elements = tensor.nbytes // 2
    for begin in range(0, elements, _PIECE):
        yield min(_PIECE, elements - begin)


def _read(stream: IO[bytes], elements: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(stream.read(2 * elements)), dtype=torch.bfloat16)
