"""What ``router: repair`` regains of the loss that a merge of mixtures loses, on texts nothing was made of.

    python tests/benchmarks/router_repair.py PACK

``PACK`` is the behaviour pack, with the experts ``far-code``, ``far-english`` and ``far-french``. A mixture
of them has random routers, and two experts for each token. Three copies of it are sources, one a domain: the
routers alone are trained, on one half of the domain's text. Their linear merge is repaired with these halves.
Losses are those of the other halves, of a source that of its own domain; then the halves change places, and
the means are printed. Ten minutes on a core.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import raymerge

DOMAINS = ("code", "english", "french")
LENGTH = 256
EPOCHS, BATCH, RATE = 6, 8, 2e-2
INLINE = raymerge.RunOptions(inline=True, threads=1)
Losses = Sequence[float]


def halves(pack: Path, place: Path) -> tuple[Mapping[str, Path], Mapping[str, Path]]:
    """Of each domain the two halves of its text."""
    made: tuple[dict[str, Path], dict[str, Path]] = ({}, {})
    for domain in DOMAINS:
        text = (pack / "data" / f"valid-{domain}.txt").read_text(encoding="utf-8")
        for number, part in enumerate((text[: len(text) // 2], text[len(text) // 2 :])):
            made[number][domain] = place / f"{domain}-{number}.txt"
            made[number][domain].write_text(part, encoding="utf-8")
    return made


def build(pack: Path, place: Path) -> Path:
    """The mixture whose routers know nothing yet."""
    recipe = {
        "base_model": str(pack / "models" / "base"),
        "architecture": "mixtral",
        "gate_mode": "random",
        "experts_per_token": 2,
        "dtype": "bfloat16",
        "experts": [{"source_model": str(pack / "models" / f"far-{domain}")} for domain in DOMAINS],
    }
    raymerge.submit(recipe, place / "mixture", INLINE)
    return place / "mixture"


def trained(mixture: Path, text: Path, out: Path) -> Path:
    """A copy of a mixture whose routers are trained on a text."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        mixture, dtype=torch.float32, experts_implementation="eager"
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(mixture)
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    windows = ids[: len(ids) // (LENGTH - 1) * (LENGTH - 1)].view(-1, LENGTH - 1)
    windows = torch.cat([torch.full((len(windows), 1), tokenizer.bos_token_id), windows], 1)
    routers = [layer.mlp.gate.weight for layer in model.model.layers]
    model.requires_grad_(False)
    for router in routers:
        router.requires_grad_(True)
    optimizer = torch.optim.AdamW(routers, lr=RATE, weight_decay=0.0)
    chance = torch.Generator().manual_seed(1)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(windows), generator=chance).split(BATCH):
            optimizer.zero_grad()
            model(windows[chosen], labels=windows[chosen]).loss.backward()
            optimizer.step()
    shutil.copytree(mixture, out)
    tensors = load_file(out / "model.safetensors")
    for layer, router in enumerate(routers):
        name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        tensors[name] = router.detach().to(tensors[name].dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def losses(model: Path, texts: Sequence[Path]) -> Losses:
    return [text.loss for text in raymerge.evaluate(model, texts, length=LENGTH).texts]


def measured(
    mixture: Path, known: Mapping[str, Path], judged: Mapping[str, Path], place: Path
) -> list[Losses]:
    """Losses by domain: of the sources, each on its own; of their merge; and of that repaired."""
    sources = {domain: trained(mixture, known[domain], place / domain) for domain in DOMAINS}
    models = [
        {"model": str(sources[domain]), "texts": [str(known[domain])], "parameters": {"weight": 1.0}}
        for domain in DOMAINS
    ]
    rows = [[losses(sources[domain], [judged[domain]])[0] for domain in DOMAINS]]
    for router in ("merge", "repair"):
        recipe: dict[str, Any] = {"merge_method": "linear", "models": models, "router": router}
        if router == "repair":
            recipe["calibrate"] = {"length": LENGTH}
        else:
            recipe["models"] = [{key: each[key] for key in each if key != "texts"} for each in models]
        raymerge.submit(recipe, place / router, INLINE)
        rows.append(losses(place / router, [judged[domain] for domain in DOMAINS]))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pack", type=Path)
    pack = parser.parse_args().pack
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        mixture, parts = build(pack, place), halves(pack, place)
        runs = [
            measured(mixture, parts[number], parts[1 - number], place / f"run-{number}") for number in (0, 1)
        ]
    print("| | code | English | French | mean |\n|---|---|---|---|---|")
    means = []
    for number, name in enumerate(("sources, each on its domain", "linear merge", "linear merge, repaired")):
        by_domain = [mean(each) for each in zip(*(run[number] for run in runs), strict=True)]
        means.append(mean(by_domain))
        print(f"| {name} | {' | '.join(f'{each:.3f}' for each in (*by_domain, means[-1]))} |")
    lost, regained = means[1] - means[0], means[1] - means[2]
    print(f"lost {lost:.4f}, regained {regained:.4f}: {regained / lost:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
