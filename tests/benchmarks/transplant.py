"""What the ways to make rows for a new vocabulary are worth, and whether omp makes the rows of mergekit.

    python tests/benchmarks/transplant.py losses
    python tests/benchmarks/transplant.py peer [--place .bench]

``losses``: the quickstart's base gets the vocabulary of a donor by each approximation; nats per byte of
held-out text. Tokenizer and donors are made here from the first halves of the quickstart's texts, and losses
are of the second halves. One donor is the quickstart's English model, whose body is frozen while rows for its
new tokens are trained; the other a smaller model trained from nothing, which has seen too little text to be
good. Some minutes on two cores.

``peer``: two small models, one with a byte-level tokenizer and one with a SentencePiece-like one, each on the
other's vocabulary, by mergekit-tokensurgeon (installed below the place, unless it is there) and by raymerge.
Prints the largest difference of a row, relative to its length. Where two shared tokens fit equally well to
the last digits of float32, the two may choose another one each: such rows are compared with a pursuit in
float64. Ends with 1 if a row of raymerge's is more than 1e-4 off.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy, pad
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peer
from kits.checkpoint_maker import read_tensors
from kits.transplants import (
    BYTE_LEVEL,
    EMBEDDING,
    HEAD,
    METASPACE,
    Matrix,
    byte_level,
    metaspace,
    pairs_of,
    plain_text,
    pursued_rows,
    tokens_of,
    transplant,
    write_model,
)

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart"
TEXTS = ("code", "english", "french")
SPECIAL = {"bos_token": "<|start|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
VOCABULARY, WINDOW, BATCH = 1200, 128, 32
LIMIT = 1e-4


def halves(name: str) -> tuple[str, str]:
    text = (QUICKSTART / "texts" / f"valid-{name}.txt").read_text(encoding="utf-8")
    middle = text.index("\n", len(text) // 2) + 1
    return text[:middle], text[middle:]


def new_tokenizer() -> Tokenizer:
    """A byte-level BPE that splits words as GPT-2 does, which the quickstart's does not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([halves(name)[0] for name in TEXTS], trainer)
    return tokenizer


def extended_donor(place: Path, tokenizer: Tokenizer) -> Path:
    """The English model with the new vocabulary: its own rows for shared tokens, trained ones for others."""
    source = QUICKSTART / "models" / "english"
    own = Tokenizer.from_file(str(source / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    before = model.get_input_embeddings().weight.detach().clone()
    rows, is_new = torch.zeros(tokenizer.get_vocab_size(), before.shape[1]), []
    for text, number in sorted(tokenizer.get_vocab().items(), key=lambda each: each[1]):
        pieces = [token.id for token in own.model.tokenize(text)]
        rows[number] = before[pieces].mean(0)
        is_new.append(len(pieces) != 1)
    model.resize_token_embeddings(len(rows), mean_resizing=False)
    model.get_input_embeddings().weight.data.copy_(rows)
    mask = torch.tensor(is_new)[:, None]
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    model.get_input_embeddings().weight.requires_grad_(requires_grad=True)
    _train(model, tokenizer, steps=150, rate=3e-3, mask=mask)
    return _saved(model, tokenizer, place)


def small_donor(place: Path, tokenizer: Tokenizer) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    _train(model, tokenizer, steps=400, rate=2e-3, mask=torch.ones(1, 1))
    return _saved(model, tokenizer, place)


def _train(
    model: LlamaForCausalLM, tokenizer: Tokenizer, *, steps: int, rate: float, mask: torch.Tensor
) -> None:
    ids = torch.tensor([number for name in TEXTS for number in tokenizer.encode(halves(name)[0]).ids])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    embedding = model.get_input_embeddings().weight
    before, generator = embedding.detach().clone(), torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(ids) - WINDOW, (BATCH,), generator=generator)
        batch = pad(torch.stack([ids[at : at + WINDOW - 1] for at in starts.tolist()]), (1, 0), value=0)
        logits = model(input_ids=batch).logits[:, :-1].flatten(0, 1)
        optimizer.zero_grad()
        cross_entropy(logits, batch[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
        if embedding.requires_grad:
            embedding.data.copy_(torch.where(mask > 0, embedding.data, before))


def _saved(model: LlamaForCausalLM, tokenizer: Tokenizer, place: Path) -> Path:
    model.config.update({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    model.save_pretrained(place)
    tokenizer.save(str(place / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


def per_byte(evaluate: ModuleType, path: Path) -> Iterator[float]:
    """Nats per byte of the second half of each text, over whole windows."""
    tokenizer, model = Tokenizer.from_file(str(path / "tokenizer.json")), evaluate.load_strictly(path)
    for name in TEXTS:
        windows = evaluate.windows(tokenizer, halves(name)[1], model.config.bos_token_id)
        nbytes = len(tokenizer.decode(windows[:, 1:].flatten().tolist(), skip_special_tokens=False).encode())
        with torch.inference_mode():
            yield evaluate.mean_loss(model, windows) * windows[:, 1:].numel() / nbytes


def losses() -> int:
    evaluate = _evaluate()
    base, tokenizer = QUICKSTART / "models" / "base", new_tokenizer()
    print("| model | vocabulary | code | English | French | mean |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        _line(evaluate, "base", "its own", base)
        for title, make in (("English donor", extended_donor), ("small donor", small_donor)):
            donor = make(place / title, tokenizer)
            _line(evaluate, title, "new", donor)
            for approximation in ("omp", "subword", "mean"):
                out = transplant(base, donor, place / f"{title}-{approximation}", approximation)
                _line(evaluate, f"base, {approximation}", f"new, from the {title}", out)
    return 0


def _line(evaluate: ModuleType, model: str, vocabulary: str, path: Path) -> None:
    found = list(per_byte(evaluate, path))
    numbers = " | ".join(f"{each:.3f}" for each in (*found, sum(found) / len(found)))
    print(f"| {model} | {vocabulary} | {numbers} |", flush=True)


def _evaluate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_evaluate", QUICKSTART / "evaluate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compare(place: Path) -> int:
    program = peer.install(place / "peer", ROOT / "constraints.txt").with_name("mergekit-tokensurgeon")
    worst = 0.0
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        bytes_model = write_model(
            root / "byte-level", byte_level(900, plain_text("english")), BYTE_LEVEL, seed=1, hidden=96
        )
        space_model = write_model(
            root / "metaspace", metaspace(1100, plain_text("code")), METASPACE, seed=2, hidden=128
        )
        for k in (16, 64):
            for base, donor in ((bytes_model, space_model), (space_model, bytes_model)):
                worst = max(worst, _difference(program, base, donor, k))
    print(f"largest difference, without other choices of mergekit's: {worst:.1e} (limit {LIMIT:.0e})")
    return int(worst > LIMIT)


def _difference(program: Path, base: Path, donor: Path, k: int) -> float:
    """The largest of rows that both approximate, where both chose the same tokens. Rows that both take over
    are equal."""
    theirs = base.parent / f"theirs-{base.name}-{k}"
    command = [str(program), str(base), str(donor), str(theirs), "-k", str(k), "-a", "omp"]
    subprocess.run(command, check=True, capture_output=True)
    ours = transplant(base, donor, base.parent / f"ours-{base.name}-{k}", k=k)
    pairs, texts = pairs_of(base, donor), tokens_of(donor)
    shared = {number for number, _ in pairs}
    # Single bytes that lie in both under other marks are taken over here, and approximated there.
    made = [n for n, text in texts.items() if n not in shared and len(text) > 1 and "<0x" not in text]
    print(
        f"{base.name} on the vocabulary of {donor.name}, k = {k}: {len(shared)} rows taken over", flush=True
    )
    worst = 0.0
    for matrix in (EMBEDDING, HEAD):
        own, other, one, two = (
            read_tensors(each)[matrix].double().numpy() for each in (base, donor, ours, theirs)
        )
        assert all((one[number] == two[number]).all() for number in shared)
        apart = _apart(one[made], two[made])
        far = [number for number, each in zip(made, apart, strict=True) if each > LIMIT]
        worst = max(worst, *(each for each in apart if each <= LIMIT))
        print(f"  {matrix}: {len(made)} rows made, {max(apart):.1e} apart at most", flush=True)
        if far:
            exact = pursued_rows(own, other, pairs, far, k)
            mine, peers = max(_apart(one[far], exact)), max(_apart(two[far], exact))
            exact_too = f"from float64 ours are {mine:.1e} apart, mergekit's {peers:.1e}"
            print(f"    {len(far)} above the limit: {exact_too}", flush=True)
            worst = max(worst, mine)
    return worst


def _apart(one: Matrix, two: Matrix) -> list[float]:
    lengths: Matrix = np.linalg.norm(one - two, axis=1) / np.linalg.norm(two, axis=1)
    return [float(each) for each in lengths]


def main(arguments: Sequence[str] | None = None) -> int:
    parser: Any = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("losses", "peer"))
    parser.add_argument(
        "--place", type=Path, default=ROOT / ".bench", help="where mergekit is, or gets installed"
    )
    asked = parser.parse_args(arguments)
    torch.set_num_threads(2)
    return losses() if asked.what == "losses" else compare(asked.place)


if __name__ == "__main__":
    sys.exit(main())
