"""How well the base, its three fine-tunes and a merge of them predict held-out text, in nats per token.

    python configs/quickstart/evaluate.py quickstart-out

A loss is the mean of -log p(token) over every window of a text; a window is the start token and the 255
tokens after it. Lower is better. The arithmetic is float32 on the CPU, whatever the stored dtype.
Exit code 0 when the merge beats every parent on the mean of the three texts, otherwise 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

# Read once by the libraries when they are imported, hence before the imports below.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

HERE = Path(__file__).resolve().parent
BASE = "base"
PARENTS = ("code", "english", "french")
TEXTS = {"code": "code", "English": "english", "French": "french"}
WINDOW = 256
WINDOWS_AT_ONCE = 8
THREADS = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One model of the table."""

    name: str
    """What the table calls it."""
    losses: dict[str, float]
    """Nats per token, by column of the table."""

    @property
    def mean(self) -> float:
        """Mean over the texts, each counting the same."""
        return fmean(self.losses.values())


def windows(tokenizer: Tokenizer, text: str, start: int) -> torch.Tensor:
    """The text as whole windows, int64 ``[n, WINDOW]``; what does not fill the last one is left out."""
    length = WINDOW - 1
    ids = tokenizer.encode(text).ids
    num_windows = len(ids) // length
    body = torch.tensor(ids[: num_windows * length]).view(num_windows, length)
    return torch.nn.functional.pad(body, (1, 0), value=start)


def load_strictly(path: Path) -> LlamaForCausalLM:
    """The model in float32.

    Raises:
        ValueError: a tensor is missing, left over or of the wrong shape; nothing is initialised at random.
    """
    model, info = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    wrong = {
        kind: sorted(map(str, info[kind]))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info.get(kind)
    }
    if wrong:
        raise ValueError(f"{path}: the weights do not fit the config: {wrong}")
    return model.eval()


def mean_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> float:
    """Nats per token over every window of ``batch``, int64 ``[n, WINDOW]``."""
    total = 0.0
    for part in batch.split(WINDOWS_AT_ONCE):
        logits = model(input_ids=part).logits[:, :-1].flatten(0, 1)
        each = cross_entropy(logits, part[:, 1:].flatten(), reduction="none")
        total += each.double().sum().item()
    return total / (batch.shape[0] * (WINDOW - 1))


def measure(name: str, path: Path) -> Row:
    """The losses of the model in ``path`` on every text."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    model = load_strictly(path)
    losses = {}
    with torch.inference_mode():
        for column, text in TEXTS.items():
            content = (HERE / "texts" / f"valid-{text}.txt").read_text(encoding="utf-8")
            losses[column] = mean_loss(model, windows(tokenizer, content, model.config.bos_token_id))
    return Row(name, losses)


def loss_table(rows: list[Row]) -> Table:
    """The rows, with the lowest loss of every column marked."""
    table = Table()
    table.add_column("model")
    for column in (*TEXTS, "mean"):
        table.add_column(column, justify="right")
    columns = [[row.losses[column] for row in rows] for column in TEXTS] + [[row.mean for row in rows]]
    for index, row in enumerate(rows):
        table.add_row(row.name, *(_cell(column, index) for column in columns))
    return table


def _cell(column: list[float], index: int) -> str:
    value = column[index]
    return f"[bold green]{value:.3f}*[/]" if value == min(column) else f"{value:.3f} "


def verdict(parents: list[Row], merged: Row) -> tuple[bool, str]:
    """Whether the merge beats every parent on the mean, and the sentence that says so."""
    best = min(parents, key=lambda row: row.mean)
    won = merged.mean < best.mean
    relation = "beats every parent" if won else "does NOT beat every parent"
    return won, (
        f"The merge {relation} on average: {merged.mean:.3f} nats per token, "
        f"the best parent ({best.name}) {best.mean:.3f}."
    )


def main() -> int:
    """Measure the five models and print the table."""
    parser = argparse.ArgumentParser(description="Loss by text of the quickstart's models and of a merge.")
    parser.add_argument("merged", type=Path, help="the merged checkpoint")
    merged_path = parser.parse_args().merged
    torch.set_num_threads(THREADS)
    disable_progress_bar()
    console = Console()
    with console.status("Measuring the base, its three fine-tunes and the merge ..."):
        base = measure(BASE, HERE / "models" / BASE)
        parents = [measure(name, HERE / "models" / name) for name in PARENTS]
        merged = measure("merged", merged_path)
    console.print("Loss on held-out text, in nats per token (lower is better, * is the best):")
    console.print(loss_table([base, *parents, merged]))
    won, sentence = verdict(parents, merged)
    console.print(sentence, soft_wrap=True)
    return 0 if won else 1


if __name__ == "__main__":
    sys.exit(main())
