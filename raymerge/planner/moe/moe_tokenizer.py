"""The base's tokenizer in a mixture, whose ``model_type`` is another: it is to be loaded as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raymerge.architectures.moe_targets import MoeTarget, implied_tokenizer_class
from raymerge.checkpoints.json_files import load_json, read_bounded
from raymerge.planner.inputs.sources import Source
from raymerge.planner.tokenizer.sources import TokenizerChanges
from raymerge.storage.open import open_store

_FILE = "tokenizer_config.json"
_KEY = "tokenizer_class"


def named_tokenizer(tokenizer: TokenizerChanges, base: Source, target: MoeTarget) -> TokenizerChanges:
    """What becomes of the tokenizer, with the class in its file that the base's family implies.

    Args:
        tokenizer: what the trunk makes of it.
        base: the source that gives it.
        target: family of the output.
    """
    implied = implied_tokenizer_class(base.model_type)
    if implied is None or implied == implied_tokenizer_class(target.name):
        return tokenizer
    said = _read(tokenizer, base)
    if said is None or str(said.get(_KEY, implied)).removesuffix("Fast") == implied:
        return tokenizer
    text = json.dumps({**said, _KEY: implied}, indent=2, ensure_ascii=False) + "\n"
    note = (
        f"{_FILE} names {implied} in place of {said[_KEY]}: loaders take that class for {base.model_type}, "
        f"whatever the file says, but not for {target.name}"
    )
    files = {**tokenizer.files, _FILE: text.encode()}
    return replace(tokenizer, files=files, notes=(*tokenizer.notes, note))


def _read(tokenizer: TokenizerChanges, base: Source) -> Mapping[str, Any] | None:
    """The file as it would be written; None where there is none, or nothing that could be read."""
    checkpoint = base.checkpoint
    data = tokenizer.files.get(_FILE)
    if data is None and checkpoint.unwritten is not None:
        data = checkpoint.unwritten.written.get(_FILE)
    if data is None and _FILE in checkpoint.companions:
        given = checkpoint.unwritten
        with open_store(checkpoint.root if given is None else given.companions_root) as store:
            info = store.info(_FILE)
            data = read_bounded(store, _FILE, info.nbytes) if info is not None else None
    try:
        found = load_json(data) if data is not None else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
