"""The files beside the weights of a published checkpoint, against the digests in its provenance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import xxhash

from raymerge.checkpoints.files import MODEL_CARD, RECORD_DIRECTORY, holds_weights
from raymerge.checkpoints.index import INDEX_FILE
from raymerge.checkpoints.json_files import load_json, read_bounded
from raymerge.checkpoints.source import CONFIG_FILE, Checkpoint
from raymerge.errors import Problem
from raymerge.merge_plan.tables import Plan, index_bytes
from raymerge.storage.file_rules import EXPORT, HIDDEN
from raymerge.storage.store import FileInfo, ReadStore, is_key

PROVENANCE_FILE = f"{RECORD_DIRECTORY}/provenance.json"
"""Key of what says what a checkpoint was made of, and of the digests of its companions."""
_AGAIN = "Merge again, or take the checkpoint from where it is whole."
_DOCUMENTS = (
    "*.md",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "*.png",
    "*.jpg",
    "*.jpeg",
    "*.gif",
    "*.svg",
    "*.webp",
)
"""Files for people, which no loader reads."""
_CHUNK = 8 << 20
_MOST = 1 << 30
# A provenance names every tensor.


def may_be_added(key: str) -> bool:
    """Whether a file may come to a checkpoint after it was published, since no loader of it reads the file.

    Those are files for people, hidden ones, and the model once more in a format for other software.
    """
    name = key.rpartition("/")[2]
    is_document = any(fnmatchcase(name, pattern) for pattern in _DOCUMENTS)
    return is_document or HIDDEN.matches(key) or EXPORT.matches(key)


def file_problems(store: ReadStore, plan: Plan, name: str) -> Iterator[Problem]:
    """Files beside the weights that are not those which were published: changed, missing or added.

    The model card may be edited, and what ``may_be_added`` allows may be added.

    Args:
        store: the checkpoint.
        plan: in its record.
        name: what messages call the checkpoint.
    """
    files = {info.key: info for info in store.files()}
    digests = _digests(store, files.get(PROVENANCE_FILE))
    if digests is None:
        what = "is missing or damaged, and it alone says what the tokenizer and other companions must be."
        yield Problem(f"{name}/{PROVENANCE_FILE}", what, _AGAIN)
        return
    for key, digest in digests.items():
        if key != MODEL_CARD:
            yield from changed_file(store, key, digest, name)
    yield from _index_problems(store, files, plan, name)
    made = {*plan["shards"].column("name").to_pylist(), CONFIG_FILE, INDEX_FILE, MODEL_CARD, *digests}
    for key in files.keys() - made:
        if key.startswith(f"{RECORD_DIRECTORY}/") or may_be_added(key):
            continue
        more = " Loaders that take every file of weights would read it." if holds_weights(key) else ""
        yield Problem(
            f"{name}/{key}", f"the merge writes no such file.{more}", "Take it away, or merge again."
        )


def changed_file(store: ReadStore, key: str, digest: str, name: str) -> Iterator[Problem]:
    """What is wrong with a file that has to have a digest; ``name`` is what messages call the checkpoint."""
    found = file_digest(store, key)
    if found != digest:
        what = "is missing." if not found else "its bytes are not those that were published."
        yield Problem(f"{name}/{key}", what, _AGAIN)


def file_digest(store: ReadStore, key: str) -> str:
    """xxh3-128 of a file's bytes, in hex; "" where there is none."""
    info = store.info(key)
    if info is None:
        return ""
    digest = xxhash.xxh3_128()
    for offset in range(0, info.nbytes, _CHUNK):
        digest.update(store.read(key, offset, min(_CHUNK, info.nbytes - offset)))
    return digest.hexdigest()


def stray_weights(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Safetensors at the top of a checkpoint that no plan speaks of, beside those that are its weights."""
    for each in checkpoint.left_out:
        if each.rule is None and "/" not in each.key and each.key.endswith(".safetensors"):
            what = "is no part of the weights, and loaders that take every *.safetensors would read it."
            yield Problem(f"{checkpoint.name}/{each.key}", what, "Take it away, or name it in the index.")


def _digests(store: ReadStore, info: FileInfo | None) -> Mapping[str, str] | None:
    """Digests of the companions and the model card, by their keys; None where nothing says them."""
    if info is None:
        return None
    try:
        found = load_json(read_bounded(store, info.key, info.nbytes, most=_MOST))
    except (ValueError, RecursionError):
        return None
    files = found.get("files") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not all(is_key(k) and isinstance(v, str) for k, v in files.items()):
        return None
    return files


def _index_problems(
    store: ReadStore, files: Mapping[str, FileInfo], plan: Plan, name: str
) -> Iterator[Problem]:
    """An index that is not the one which the plan makes, its total size included."""
    shards = plan["shards"].column("name").to_pylist()
    info = files.get(INDEX_FILE)
    if len(shards) == 1 and info is not None:
        yield Problem(f"{name}/{INDEX_FILE}", "the merge writes no such file.", "Take it away.")
    elif info is not None and store.read(INDEX_FILE, 0, info.nbytes) != index_bytes(plan):
        yield Problem(f"{name}/{INDEX_FILE}", "it is not the index that the plan makes.", _AGAIN)
