"""What a directory without safetensors weights is instead, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable

from raymerge.errors import Problem

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "m = M.from_pretrained('{path}', dtype='auto'); m.save_pretrained('{path}-safetensors')\""
)


def describe_no_weights(names: Iterable[str], where: str, *, pickled: bool = False) -> Problem:
    """Say what the directory ``where`` with the files ``names`` is, if not a checkpoint.

    An adapter counts first: its own weights are safetensors or pickles too. With ``pickled``, pickles of the
    right names would have been read.
    """
    found = sorted(names)
    pickles = [name for name in found if name.endswith(_PICKLES)]
    others = [name for name in found if name.endswith(".safetensors")]
    ggufs = [name for name in found if name.endswith(".gguf")]
    if "adapter_config.json" in found:
        what = "is a LoRA adapter (adapter_config.json), not a model."
        return Problem(where, what, f"Name it behind the model that it was trained on: MODEL+{where}.")
    if others:
        what = f"holds {', '.join(others[:3])}, but neither model.safetensors nor an index of several files."
        return Problem(where, what, "If that is the model in the Hugging Face layout, rename it.")
    if pickles and pickled:
        what = f"holds {', '.join(pickles[:3])}, but neither pytorch_model.bin nor an index of several files."
        return Problem(where, what, "If one of them is the model, rename it to pytorch_model.bin.")
    if pickles:
        what = f"has its weights in {pickles[0]}, and pickled weights are refused (pickled_weights: refuse)."
        remedy = "Take that out: no code of the file is run. Or convert it: "
        return Problem(where, what, remedy + _CONVERT.format(path=where))
    if ggufs:
        what = f"has its weights in {ggufs[0]}; GGUF is a format for running models, not for merging them."
        return Problem(where, what, "Take the checkpoint in safetensors that it was made from.")
    what = "holds no weights: neither model.safetensors nor model.safetensors.index.json."
    return Problem(where, what, "Check the path, and whether the download came to its end.")
