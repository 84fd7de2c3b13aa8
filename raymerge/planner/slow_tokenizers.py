"""``tokenizer.json`` for a model that has only the files of older tokenizers."""

from __future__ import annotations

from pathlib import Path

from raymerge.errors import CheckpointError, Problem


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
        reason = " ".join(str(error).split())[:160]
        what = f"has no tokenizer.json, and transformers cannot make one of its other files ({reason})."
        remedy = (
            "Make it where the tokenizer loads, with AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
        raise CheckpointError(Problem(str(root), what, remedy)) from error
    return text
