"""Merges by Fisher information and by RegMean of the quickstart's three fine-tunes, beside their mean.

No text is calibrated on that is judged. Each held-out text is cut in two: what is calibrated on one half is
judged on the other, and the other way round. Or models are calibrated on text that they write themselves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import raymerge

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart"
DOMAINS = ("code", "english", "french")
LENGTH = 256
"""Tokens of a window that is judged."""
INLINE = raymerge.RunOptions(inline=True, threads=1)


def _halves(texts: Path, place: Path) -> tuple[Mapping[str, Path], Mapping[str, Path]]:
    """Of each domain the two halves of its text, cut at a line."""
    made: tuple[dict[str, Path], dict[str, Path]] = ({}, {})
    for domain in DOMAINS:
        lines = (texts / f"valid-{domain}.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        sizes = [len("".join(lines[:count])) for count in range(len(lines) + 1)]
        middle = min(range(len(sizes)), key=lambda count: abs(2 * sizes[count] - sizes[-1]))
        for number, part in enumerate((lines[:middle], lines[middle:])):
            made[number][domain] = place / f"{domain}-{number}.txt"
            made[number][domain].write_text("".join(part), encoding="utf-8")
    return made


def _judged(recipe: Mapping[str, Any], texts: Mapping[str, Path], place: Path) -> list[float]:
    """The loss of each domain under what a recipe makes."""
    raymerge.submit(recipe, place, INLINE)
    return [text.loss for text in raymerge.evaluate(place, list(texts.values()), length=LENGTH).texts]


_PIECE = 2000


def _pieces(texts: Path, place: Path) -> tuple[Mapping[str, Path], Mapping[str, Path]]:
    """Of each domain every second piece of its text, cut at lines, and the others."""
    made: tuple[dict[str, Path], dict[str, Path]] = ({}, {})
    for domain in DOMAINS:
        parts, begun = ["", ""], 0
        for line in (texts / f"valid-{domain}.txt").read_text(encoding="utf-8").splitlines(keepends=True):
            parts[begun // _PIECE % 2] += line
            begun += len(line)
        for number, part in enumerate(parts):
            made[number][domain] = place / f"{domain}-{number}.txt"
            made[number][domain].write_text(part, encoding="utf-8")
    return made


def _written(models: Path, place: Path) -> Mapping[str, Path]:
    """Some 96,000 tokens that each model draws by itself, from nothing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made: dict[str, Path] = {}
    for domain in DOMAINS:
        tokenizer = AutoTokenizer.from_pretrained(models / domain)
        model: Any = AutoModelForCausalLM.from_pretrained(models / domain, dtype=torch.float32).eval()
        begin = torch.full((64, 1), tokenizer.bos_token_id or 0)
        torch.manual_seed(0)
        lines: list[str] = []
        for _ in range(6):
            drawn = model.generate(
                begin,
                attention_mask=torch.ones_like(begin),
                do_sample=True,
                top_k=0,
                max_new_tokens=250,
                min_new_tokens=250,
                pad_token_id=0,
            )
            lines += [tokenizer.decode(row[1:], skip_special_tokens=True) for row in drawn]
        made[domain] = place / f"{domain}-written.txt"
        made[domain].write_text("\n".join(lines), encoding="utf-8")
    return made


Fold = tuple[Mapping[str, Path], Mapping[str, Path]]
"""What is calibrated on, and what is judged, by domain."""


def _folds(cut: str, place: Path) -> Sequence[Fold]:
    texts = QUICKSTART / "texts"
    if cut == "written":
        whole = {domain: texts / f"valid-{domain}.txt" for domain in DOMAINS}
        return [(_written(QUICKSTART / "models", place), whole)]
    one, other = (_pieces if cut == "pieces" else _halves)(texts, place)
    return [(one, other), (other, one)]


Recipe = Callable[[Mapping[str, Path]], Mapping[str, Any]]
"""Of the texts that may be calibrated on."""


def _row(name: str, recipe: Recipe, folds: Sequence[Fold]) -> str:
    with tempfile.TemporaryDirectory() as out:
        losses = [
            _judged(recipe(calibrated), judged, Path(out) / f"{number}")
            for number, (calibrated, judged) in enumerate(folds)
        ]
    by_domain = [mean(each) for each in zip(*losses, strict=True)]
    return f"| {name} | {' | '.join(f'{each:.4f}' for each in (*by_domain, mean(by_domain)))} |"


def _entries(models: Path, texts: Mapping[str, Path], **parameters: float) -> list[dict[str, Any]]:
    return [
        {"model": str(models / each), "parameters": parameters}
        | ({"texts": [str(texts[each])]} if texts else {})
        for each in DOMAINS
    ]


def _linear(models: Path) -> tuple[str, Recipe]:
    recipe = {"merge_method": "linear", "models": _entries(models, {}, weight=1.0), "dtype": "bfloat16"}
    return "linear", lambda _: recipe


def _regmean_recipes(models: Path) -> Iterator[tuple[str, Recipe]]:
    yield _linear(models)
    for name, model, alpha in (
        ("RegMean", "source", 0.5),
        ("RegMean++", "merged", 0.1),
        ("RegMean++", "merged", 0.5),
        ("RegMean++", "merged", 0.9),
    ):

        def recipe(texts: Mapping[str, Path], model: str = model, alpha: float = alpha) -> Mapping[str, Any]:
            return {
                "merge_method": "regmean",
                "models": _entries(models, texts),
                "parameters": {"alpha": alpha},
                "calibrate": {"length": LENGTH, "model": model},
                "dtype": "bfloat16",
            }

        yield f"{name}, alpha {alpha:g}", recipe


def _fisher_recipes(models: Path) -> Iterator[tuple[str, Recipe]]:
    yield _linear(models)
    for length in (256, 64):
        for root in (False, True):

            def recipe(texts: Mapping[str, Path], length: int = length, root: bool = root) -> dict[str, Any]:
                return {
                    "merge_method": "fisher",
                    "models": _entries(models, texts, weight=1.0),
                    "parameters": {"root": root},
                    "calibrate": {"length": length},
                    "dtype": "bfloat16",
                }

            yield f"fisher, windows of {length} tokens{', root' if root else ''}", recipe


def measure_fisher() -> None:
    _measure(_fisher_recipes(QUICKSTART / "models"), "halves")


def measure_regmean(cut: str) -> None:
    _measure(_regmean_recipes(QUICKSTART / "models"), cut)


def _measure(recipes: Iterator[tuple[str, Recipe]], cut: str) -> None:
    torch.set_num_threads(1)
    print("| merge of the three | code | English | French | mean |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        folds = _folds(cut, Path(place))
        for name, recipe in recipes:
            print(_row(name, recipe, folds), flush=True)
