"""``tokenizer.json`` for a model that has only the files of older tokenizers."""

from __future__ import annotations

import re
from pathlib import Path

from raymerge.errors import CheckpointError, Problem

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\s")
"""How a file in tiktoken's form begins: a token in base64, and its rank."""


def convert_slow_tokenizer(root: Path) -> str:
    """The text of ``tokenizer.json`` as transformers makes it; code that comes with the model is not run.

    Raises:
        CheckpointError: transformers cannot make it, for want of a library or of a class.
    """
    from transformers import AutoTokenizer

    try:
        # Without the last, transformers asks whoever sits at the terminal whether to run the model's code.
        tokenizer = AutoTokenizer.from_pretrained(
            root, local_files_only=True, use_fast=True, trust_remote_code=False
        )
        text: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # what it raises depends on the class, the files and the libraries installed
        reason = _reason(root, error)
        what = f"has no tokenizer.json, and transformers cannot make one of its other files ({reason})."
        remedy = (
            "Make it where the tokenizer loads, with AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
        raise CheckpointError(Problem(str(root), what, remedy)) from error
    return text


def _reason(root: Path, error: Exception) -> str:
    """Why transformers failed, which takes what is no SentencePiece model for a file of tiktoken."""
    text = " ".join(str(error).split())[:160]
    if "tiktoken" not in text:
        return text
    pieces = [path for path in sorted(root.glob("*.model")) if not _is_of_tiktoken(path)]
    return f"{pieces[0].name} is not a SentencePiece model that can be read" if pieces else text


def _is_of_tiktoken(path: Path) -> bool:
    with path.open("rb") as file:
        return _TIKTOKEN_LINE.match(file.readline(1024)) is not None
