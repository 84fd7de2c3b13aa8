"""Training checkpoints in chunks, written as torch writes them, without ranks; and by ranks."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save, save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First element and sizes of a chunk."""


def grid(shape: Sequence[int], *cuts: Sequence[int]) -> list[Box]:
    """The chunks of a tensor that is cut at these places of each dimension."""
    edges = [(0, *(cuts[dim] if dim < len(cuts) else ()), size) for dim, size in enumerate(shape)]
    parts = ([(low, high - low) for low, high in pairwise(own)] for own in edges)
    return [tuple(zip(*box, strict=True)) for box in product(*parts)]  # type: ignore[misc]


def whole(tensor: torch.Tensor) -> list[Box]:
    return [((0,) * tensor.dim(), tuple(tensor.shape))]


def taken(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))].clone()


def save_chunks(
    root: Path,
    tensors: Mapping[str, torch.Tensor],
    boxes: Mapping[str, Sequence[Box]],
    *,
    paths: Mapping[str, tuple[str, ...]] | None = None,
    entries: Mapping[str, Any] | None = None,
    files: int = 3,
    as_safetensors: bool = False,
) -> Path:
    """A directory of torch's distributed checkpoint; chunks go to ``files`` files by turns."""
    root.mkdir(parents=True)
    stored: dict[MetadataIndex, _StorageInfo] = {}
    contents = [bytearray() for _ in range(files)]
    held: list[dict[str, torch.Tensor]] = [{} for _ in range(files)]
    described: dict[str, Any] = dict.fromkeys(entries or {}, BytesStorageMetadata())
    for key, value in (entries or {}).items():
        stored[MetadataIndex(key)] = _appended(contents, 0, _saved(value))
    for number, (key, tensor) in enumerate(tensors.items()):
        own = boxes.get(key, whole(tensor))
        chunks = [ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1])) for box in own]
        properties = TensorProperties(dtype=tensor.dtype)
        described[key] = TensorStorageMetadata(properties, tensor.size(), chunks)
        for index, box in enumerate(own):
            place, data = (number + index) % files, taken(tensor, box)
            if as_safetensors:
                held[place][key] = data
                info = _StorageInfo(f"__{place}_0.distcp", len(contents[place]), data.nbytes)
            else:
                info = _appended(contents, place, _saved(data))
            stored[MetadataIndex(key, torch.Size(box[0]), index)] = info
    for place, content in enumerate(contents):
        (root / f"__{place}_0.distcp").write_bytes(
            bytes(content) + (save(held[place]) if held[place] else b"")
        )
    metadata = Metadata(described, dict(paths or {}), stored, StorageMeta(checkpoint_id=root), "1.0.0")
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    return root


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _appended(contents: list[bytearray], place: int, data: bytes) -> _StorageInfo:
    info = _StorageInfo(f"__{place}_0.distcp", len(contents[place]), len(data))
    contents[place] += data
    return info


def metadata_of(root: Path) -> Metadata:
    loaded: Metadata = pickle.loads((root / ".metadata").read_bytes())
    return loaded


def write_metadata(root: Path, metadata: object) -> None:
    (root / ".metadata").write_bytes(pickle.dumps(metadata))


def load_whole(root: Path) -> dict[str, torch.Tensor]:
    """Every tensor, as torch loads it into one process."""
    described = metadata_of(root).state_dict_metadata
    state = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in described.items()
        if isinstance(each, TensorStorageMetadata)
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no ranks
        dcp.load(state, checkpoint_id=root, planner=planner, no_dist=True)
    return state


def save_shards(
    root: Path, tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Sequence[Box]], ranks: int
) -> Path:
    """Safetensors files as ``HuggingFaceStorageWriter`` writes them without consolidation."""
    root.mkdir(parents=True)
    for rank in range(ranks):
        held, begins = {}, {}
        for key, tensor in tensors.items():
            own = boxes.get(key, whole(tensor))
            if rank < len(own):
                held[key], begins[key] = taken(tensor, own[rank]), {"saved_offsets": own[rank][0]}
        notes = {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(held, root / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", notes)
    return root


# By ranks -------------------------------------------------------------------------------------------------

SHAPES = {
    "model.embed_tokens.weight": (10, 6),
    "layers.0.up.weight": (8, 12),
    "layers.0.grid.weight": (7, 9),
    "norm.weight": (5,),
}
_DTYPES = {"layers.0.up.weight": torch.bfloat16}


def state_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {key: torch.randn(shape).to(_DTYPES.get(key, torch.float32)) for key, shape in SHAPES.items()}


def _sharded(key: str, tensor: torch.Tensor, ranks: int) -> Any:
    """FSDP's rows, a tensor-parallel layer's columns, both at once, or a copy on each rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line, square = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (2, ranks // 2))
    placements = {
        "model.embed_tokens.weight": (line, [Shard(0)]),
        "layers.0.up.weight": (line, [Shard(1)]),
        "layers.0.grid.weight": (square, [Shard(0), Shard(1)]),
    }
    mesh, placement = placements.get(key, (line, [Replicate()]))
    return distribute_tensor(tensor, mesh, placement)


def _save_all(rank: int, ranks: int, root: Path, seeds: Sequence[int]) -> None:
    _join(rank, ranks, root / "rendezvous")
    for seed in seeds:
        state = {key: _sharded(key, tensor, ranks) for key, tensor in state_of(seed).items()}
        training = {
            "model": state,
            "optimizer": {"state": {"exp": seed * torch.ones(3)}, "lr": 0.1},
            "step": seed,
        }
        dcp.save(training, storage_writer=FileSystemWriter(root / f"archives-{seed}"))
        blobs = SerializationFormat.SAFETENSORS
        dcp.save(
            training, storage_writer=FileSystemWriter(root / f"blobs-{seed}", serialization_format=blobs)
        )
        files = dict.fromkeys(state, 1)
        dcp.save(
            state,
            storage_writer=HuggingFaceStorageWriter(
                str(root / f"shards-{seed}"), save_distributed=True, fqn_to_index_mapping=files
            ),
        )
    torch.distributed.destroy_process_group()


def _load_all(rank: int, ranks: int, root: Path, places: Sequence[str]) -> None:
    """Load checkpoints into this rank's shards, and save what is whole again as ``loaded-`` and its name,
    with the optimizer's state where there is any."""
    _join(rank, ranks, root / "rendezvous-load")
    for place in places:
        state = {key: _sharded(key, torch.zeros_like(each), ranks) for key, each in state_of(0).items()}
        optimizer: dict[str, Any] = {"state": {"exp": torch.zeros(3)}, "lr": 0.0}
        has_state = "optimizer.lr" in metadata_of(Path(place)).state_dict_metadata
        dcp.load({"model": state} | ({"optimizer": optimizer} if has_state else {}), checkpoint_id=place)
        full = {key: each.full_tensor().contiguous() for key, each in state.items()}
        if has_state:
            full["optimizer.exp"] = optimizer["state"]["exp"]
            full["optimizer.lr"] = torch.tensor(optimizer["lr"])
        if rank == 0:
            save_file(full, root / f"loaded-{Path(place).name}.safetensors")
    torch.distributed.destroy_process_group()


def _join(rank: int, ranks: int, rendezvous: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks
    )


def by_ranks(task: str, ranks: int, root: Path, arguments: Sequence[object]) -> None:
    """Save (the seeds) or load (the places) with so many processes of their own."""
    command = [sys.executable, "-W", "ignore", __file__, task, str(ranks), str(root), *map(str, arguments)]
    subprocess.run(command, check=True, timeout=600)


if __name__ == "__main__":
    import torch.multiprocessing as mp

    task, count, folder, *rest = sys.argv[1:]
    work, given = (_save_all, list(map(int, rest))) if task == "save" else (_load_all, rest)
    mp.spawn(work, (int(count), Path(folder), given), int(count))
