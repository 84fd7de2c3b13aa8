"""Two tiny mixtures with a text each, merged with their routers repaired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kits.calibrations import reading_model, write_text

import raymerge
from raymerge.options import RunOptions

LENGTH = 9
INLINE = RunOptions(inline=True)


class RouterMerge:
    def __init__(
        self, root: Path, kind: str, *, seeds: tuple[int, int] = (1, 2), dtype: Any = torch.float32
    ) -> None:
        self.root = root
        self.kind = kind
        self.models = [root / f"model-{number}" for number in (0, 1)]
        self.texts = [root / f"text-{number}.txt" for number in (0, 1)]
        for model, text, seed in zip(self.models, self.texts, seeds, strict=True):
            reading_model(model, kind, seed=seed, dtype=dtype)
            write_text(text, 50, seed=seed)

    def recipe(self, **more: Any) -> dict[str, Any]:
        models = [
            {"model": str(model), "texts": [str(text)], "parameters": {"weight": 0.5}}
            for model, text in zip(self.models, self.texts, strict=True)
        ]
        calibrate = {"length": LENGTH}
        return {
            "merge_method": "linear",
            "models": models,
            "router": "repair",
            "calibrate": calibrate,
            **more,
        }

    def submit(
        self, name: str = "out", *, on_event: Any = None, options: RunOptions = INLINE, **more: Any
    ) -> Path:
        raymerge.submit(self.recipe(**more), self.root / name, options, on_event=on_event)
        return self.root / name

    def submit_unrepaired(self, name: str) -> Path:
        recipe = self.recipe(router="merge")
        del recipe["calibrate"]
        for entry in recipe["models"]:
            del entry["texts"]
        raymerge.submit(recipe, self.root / name, INLINE)
        return self.root / name
