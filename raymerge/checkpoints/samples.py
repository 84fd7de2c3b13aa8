"""Digests of a checkpoint's weights from samples, which tell one step of a training from another without
reading them whole."""

from __future__ import annotations

import xxhash

from raymerge.checkpoints.dcp.layout import CHUNKS_ENDING
from raymerge.checkpoints.dcp.metadata import METADATA_FILE
from raymerge.checkpoints.files import holds_weights, rule_by_name
from raymerge.storage.store import FileInfo, ReadStore, map_reads

_NUM_SAMPLES = 4
_SAMPLE_NBYTES = 16 << 10


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
