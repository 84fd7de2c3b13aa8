"""Pickled weights: as torch saves them, packed again by other tools, and made by somebody who means harm."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from kits.checkpoint_maker import read_tensors, write_json

PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def pickled_twin(model: Path, root: Path, *, files: int = 1) -> Path:
    root.mkdir()
    for path in model.iterdir():
        if "safetensors" not in path.name:
            (root / path.name).write_bytes(path.read_bytes())
    save_pickles(root, read_tensors(model), files=files)
    return root


def save_pickles(root: Path, tensors: Mapping[str, torch.Tensor], *, files: int = 1) -> None:
    names = [PICKLE]
    if files > 1:
        names = [f"pytorch_model-{number:05d}-of-{files:05d}.bin" for number in range(1, files + 1)]
    weight_map: dict[str, str] = {}
    for number, file in enumerate(names):
        members = {name: tensors[name] for name in sorted(tensors)[number::files]}
        torch.save(members, root / file)
        weight_map |= dict.fromkeys(members, file)
    if files > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        write_json(root / PICKLE_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def repacked(
    source: Path,
    target: Path,
    *,
    change: Mapping[str, bytes] | None = None,
    without: tuple[str, ...] = (),
    compress: bool = False,
) -> Path:
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", kind) as new:
        for entry in old.infolist():
            top, _, name = entry.filename.partition("/")
            if name not in without:
                new.writestr(f"{top}/{name}", (change or {}).get(name, old.read(entry)))
    return target


def local_header(path: Path, ending: str) -> int:
    with zipfile.ZipFile(path) as archive:
        return next(e.header_offset for e in archive.infolist() if e.filename.endswith(ending))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def record_config(root: Path, config: Mapping[str, Any]) -> None:
    directory = root / "raymerge" / "plan"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text(json.dumps({"config": config}))
