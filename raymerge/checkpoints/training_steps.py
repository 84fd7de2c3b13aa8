"""What the directory holds that a training saves for one iteration, and digests that tell one iteration from
another without reading weights whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

import xxhash

from raymerge.checkpoints.dcp.layout import CHUNKS_ENDING, is_chunked
from raymerge.checkpoints.dcp.metadata import METADATA_FILE
from raymerge.checkpoints.files import PICKLES, SAFETENSORS, holds_weights, rule_by_name
from raymerge.storage.store import FileInfo, ReadStore, map_reads

_OPTIMIZER = "optim*"
_NUM_SAMPLES = 4
_SAMPLE_NBYTES = 16 << 10


class StepContents(NamedTuple):
    places: tuple[str, ...]
    """Of its checkpoints: "" for itself, or directories in it, as Accelerate's ``pytorch_model_fsdp_0`` and
    NeMo's ``weights``."""
    lack: str
    """Why the only one is unfinished; "" where it is not."""


def step_contents(keys: Iterable[str]) -> StepContents:
    names: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        directory, _, name = key.rpartition("/")
        names[directory].append(name)
    places = [""] if _is_checkpoint(names[""]) else sorted(filter(None, _below(names)))
    if not places and not any(holds_weights(name) for each in names.values() for name in each):
        return StepContents(("",), "it holds no weights")
    if len(places) > 1:
        return StepContents(tuple(places), "")
    place = places[0] if places else ""
    return StepContents((place,), _lack(names[place]))


def _below(names: dict[str, list[str]]) -> Iterable[str]:
    return (
        directory
        for directory, own in names.items()
        if "/" not in directory and not fnmatchcase(directory, _OPTIMIZER) and _is_checkpoint(own)
    )


def _is_checkpoint(names: Collection[str]) -> bool:
    """Whether they are one, finished or not."""
    is_saved = any(name.endswith(CHUNKS_ENDING) for name in names)
    return is_saved or is_chunked(names) or SAFETENSORS.are_in(names) or PICKLES.are_in(names)


def _lack(names: Collection[str]) -> str:
    kind = next((kind for kind in (SAFETENSORS, PICKLES) if kind.are_in(names)), None)
    if kind is not None:
        numbers = [each for name in names if (each := kind.part_numbers(name))]
        if any(map(kind.is_index, names)) or not numbers or len(numbers) >= int(numbers[0][1]):
            return ""
        return f"it has {len(numbers)} of {int(numbers[0][1])} numbered files and no index"
    if METADATA_FILE not in names and any(name.endswith(CHUNKS_ENDING) for name in names):
        return f"its chunks lack {METADATA_FILE}, which is saved last"
    return ""


def sampled_digest(store: ReadStore) -> str:
    """xxh3-128 in hex of names and sizes of the files with weights, and of bytes at the beginning, the end
    and two places between of each; "" without such files. Files beside the weights may change."""
    files = [info for info in store.files() if _is_sampled(info.key)]
    if not files:
        return ""
    samples = map_reads(store, lambda info: _sample(store, info), files)
    whole = xxhash.xxh3_128()
    for info, sample in zip(files, samples, strict=True):
        whole.update(f"{info.key}\0{info.nbytes}\0{sample}\0".encode())
    return whole.hexdigest()


def _is_sampled(key: str) -> bool:
    if "/" in key:
        return False
    is_chunk = key == METADATA_FILE or key.endswith(CHUNKS_ENDING)
    return is_chunk or (holds_weights(key) and rule_by_name(key) is None)


def _sample(store: ReadStore, info: FileInfo) -> str:
    nbytes = min(_SAMPLE_NBYTES, info.nbytes)
    digest = xxhash.xxh3_128()
    for number in range(_NUM_SAMPLES):
        offset = (info.nbytes - nbytes) * number // (_NUM_SAMPLES - 1)
        digest.update(store.read(info.key, offset, nbytes))
    return digest.hexdigest()
