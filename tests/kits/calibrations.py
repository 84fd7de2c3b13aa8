"""Tiny models that can read, texts for them, and stages of statistics made in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kits.gate_stages import random_texts
from kits.layer_streams import KINDS, open_base
from kits.model_parents import save
from kits.model_types import VOCAB
from kits.tokenizer_maker import CHATML_CONFIG, word_level, write_tokenizer
from safetensors.torch import load_file

from raymerge.device_numerics import torch_threads
from raymerge.planner.calibration import calibration_stage
from raymerge.planner.inputs.sources import RESULT_FILE, Source, Stage, StatisticsKind
from raymerge.recipes.calibration import Calibrate
from raymerge.stages.calibration.work import CalibrationWork

CPU = torch.device("cpu")
BEGIN = 1


def reading_model(
    root: Path, name: str, *, seed: int = 1, dtype: Any = torch.bfloat16, **config: Any
) -> Source:
    """A family's tiny model in which words ``w3`` to the last are tokens of these numbers."""
    save(KINDS[name].build(seed, **config).to(dtype), root)
    return with_words(root)


def with_words(root: Path) -> Source:
    words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCAB))]
    write_tokenizer(root, word_level(words, added=["<s>", "</s>"]), CHATML_CONFIG)
    return open_base(root)


def write_text(path: Path, num_words: int, *, seed: int = 7) -> Path:
    (content,) = random_texts(seed, num_words, high=VOCAB)
    path.write_text(content, encoding="utf-8")
    return path


def windows_of(path: Path, length: int) -> list[list[int]]:
    """The windows that a text is cut into, as the documentation says."""
    tokens = [int(word[1:]) for word in path.read_text(encoding="utf-8").split()]
    step = length - 1
    whole = tokens[: len(tokens) // step * step] or tokens
    return [[BEGIN, *whole[first : first + step]] for first in range(0, len(whole), step)]


def stage_of(model: Source, kind: StatisticsKind, texts: Sequence[Path], *, length: int = 9) -> Stage:
    calibrate = Calibrate(texts=tuple(map(str, texts)), length=length)
    return calibration_stage(kind, model, calibrate, place="recipe.yml:1:1", version="0")


@dataclass(frozen=True, slots=True)
class Made:
    tensors: dict[str, torch.Tensor]
    report: dict[str, Any]
    data: bytes
    num_units: int


def make(stage: Stage, staging: Path, *, backwards: bool = False, spare: int = 0) -> Made:
    """``spare``: bytes of memory beyond the least."""
    staging.mkdir(parents=True, exist_ok=True)
    work: Any = CalibrationWork(stage, stage.spec)  # type: ignore[arg-type]
    work.check()
    numbers = list(range(work.num_units))
    with torch_threads(1):
        for number in numbers[::-1] if backwards else numbers:
            budget = work.least_budget() + spare
            work.unit(number, staging=staging, device=CPU, budget=budget, tell=lambda _: None)
        report = work.conclude(staging)
    path = staging / RESULT_FILE
    return Made(load_file(path), report, path.read_bytes(), len(numbers))
