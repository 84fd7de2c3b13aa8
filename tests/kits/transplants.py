"""Small models with trained tokenizers of two kinds, and a vocabulary transplant computed by other means."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from kits.checkpoint_maker import llama_config, llama_shapes, write_checkpoint
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import raymerge

Matrix: TypeAlias = npt.NDArray[np.float64]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart"
INLINE = raymerge.RunOptions(inline=True)

BYTE_LEVEL: Mapping[str, str] = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
METASPACE: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def plain_text(name: str) -> str:
    """A quickstart text in ASCII without runs of spaces, in which the two kinds differ in marks alone."""
    text = (QUICKSTART / "texts" / f"valid-{name}.txt").read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", text.encode("ascii", "ignore").decode())


def byte_level(size: int, text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), list(BYTE_LEVEL.values())
    _train(tokenizer, text, vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    return tokenizer


def metaspace(size: int, text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(marks)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    _train(tokenizer, text, vocab_size=size, special_tokens=special)
    parsed = json.loads(tokenizer.to_str())
    # As where SentencePiece was: tokens of bytes are tokens of the model.
    parsed["added_tokens"] = [each for each in parsed["added_tokens"] if each["id"] < 3]
    return Tokenizer.from_str(json.dumps(parsed))


def _train(tokenizer: Tokenizer, text: str, **settings: Any) -> None:
    trainer = trainers.BpeTrainer(show_progress=False, **settings)
    tokenizer.train_from_iterator(text.split("."), trainer)


def write_model(
    root: Path,
    tokenizer: Tokenizer,
    roles: Mapping[str, str],
    *,
    seed: int,
    hidden: int = 32,
    tie: bool = False,
    spare: int = 0,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """A Llama of one layer with a row for each token, and ``spare`` rows more (or less)."""
    size = tokenizer.get_vocab_size() + spare
    config = llama_config(layers=1, hidden=hidden, vocab=size, tie=tie) | fields
    generator = torch.Generator().manual_seed(seed)
    shapes = llama_shapes(config).items()
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) * 0.1 for name, shape in shapes}
    # As Hugging Face's LlamaTokenizer, so that the peer knows the mark of a space.
    kind = "LlamaTokenizerFast" if "unk_token" in roles else "PreTrainedTokenizerFast"
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": kind, **roles}),
        "generation_config.json": json.dumps({"eos_token_id": 1, "pad_token_id": None}),
    }
    return write_checkpoint(root, tensors, config, extra=files)


def transplant(
    base: Path, donor: Path, out: Path, approximation: str = "omp", *, k: int | None = None, **options: Any
) -> Path:
    recipe = raymerge.transplantation(base, donor, approximation, k=k)
    raymerge.submit(recipe, out, raymerge.RunOptions(inline=True, **options))
    return out


def tokens_of(root: Path) -> dict[int, str]:
    """Plain texts by id, of tokens that are ASCII: marks of spaces are spaces."""
    vocab = Tokenizer.from_file(str(root / "tokenizer.json")).get_vocab()
    return {number: re.sub("[Ġ▁]", " ", text) for text, number in vocab.items()}


def pairs_of(base: Path, donor: Path) -> list[tuple[int, int]]:
    """Ids in donor and base of tokens with one text, and of those that end a text; in the donor's order."""
    own = {text: number for number, text in tokens_of(base).items()}
    ends = {BYTE_LEVEL["eos_token"], METASPACE["eos_token"]}
    end = next(number for text, number in own.items() if text in ends)
    both = sorted(tokens_of(donor).items())
    found = ((number, end if text in ends else own.get(text)) for number, text in both)
    return [(number, row) for number, row in found if row is not None]


def pursued(atoms: Matrix, target: Matrix, k: int) -> tuple[list[int], Matrix]:
    """Orthogonal matching pursuit as the paper has it (2506.06607): the atom of the largest product with the
    residual, then least squares over all that are chosen."""
    chosen: list[int] = []
    coefficients, residual = np.zeros(0), target
    for _ in range(k):
        products = np.abs(atoms @ residual)
        products[chosen] = -1
        chosen.append(int(products.argmax()))
        coefficients = np.linalg.lstsq(atoms[chosen].T, target, rcond=None)[0]
        residual = target - atoms[chosen].T @ coefficients
    return chosen, coefficients


def pursued_rows(
    own: Matrix, theirs: Matrix, pairs: Sequence[tuple[int, int]], ids: Sequence[int], k: int
) -> Matrix:
    atoms, rows = theirs[[donor for donor, _ in pairs]], own[[base for _, base in pairs]]
    made = []
    for number in ids:
        chosen, coefficients = pursued(atoms, theirs[number], k)
        made.append(coefficients @ rows[chosen])
    return np.array(made)
