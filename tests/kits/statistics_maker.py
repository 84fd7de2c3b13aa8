"""Directories of Fisher information as `raymerge calibrate` leaves them, with made-up numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from kits.layer_streams import open_base

from raymerge.checkpoints.header import lay_out
from raymerge.planner.calibration import fisher_tensors, model_digest
from raymerge.planner.inputs.sources import RESULT_FILE, STAGE_RECORD
from raymerge.runtime.driver.versions import digests_of

_BLOCK = 4099


def given_fisher(model: Path) -> Path:
    """Beside the model; made once. A tenth of all elements has none."""
    root = model.parent / f"{model.name}-fisher"
    if root.exists():
        return root
    source = open_base(model)
    layout = lay_out(tuple(fisher_tensors(source)))
    count = (layout.nbytes - len(layout.header)) // 4
    chance = np.random.default_rng(sum(model.name.encode()))
    numbers = chance.exponential(1.0, _BLOCK) * (chance.random(_BLOCK) > 0.1)
    root.mkdir()
    (root / RESULT_FILE).write_bytes(layout.header + np.resize(numbers.astype("<f4"), count).tobytes())
    report = {
        "kind": "calibration",
        "statistics": "fisher",
        "model": source.name,
        "model_digest": model_digest(source),
        "tokens": 1,
        "length": None,
        "texts": [],
    }
    record = {"report": report, "result": {"digest": digests_of(root, {RESULT_FILE: ()})[RESULT_FILE]}}
    (root / STAGE_RECORD).parent.mkdir()
    (root / STAGE_RECORD).write_text(json.dumps(record))
    return root
