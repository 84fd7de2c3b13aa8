"""The kit's own promises: what it makes is real, repeatable, and has the sizes it names."""

from __future__ import annotations

import time
from pathlib import Path

from kits.checkpoint_maker import (
    V3_CONFIG,
    V3_NBYTES,
    V3_NUM_FILES,
    V3_NUM_TENSORS,
    deepseek_v3_names,
    deepseek_v3_specs,
    sparse_checkpoint,
)

from raymerge.checkpoints.source import main_dtype, open_checkpoint
from raymerge.dtypes import DType


class TestDeepSeekV3:
    def test_opens_in_seconds(self, tmp_path: Path) -> None:
        root = sparse_checkpoint(tmp_path, deepseek_v3_specs(), V3_CONFIG, names=deepseek_v3_names())
        started = time.process_time()
        checkpoint = open_checkpoint(root, "v3")
        # Processor seconds: about 1 when measured alone; the bound leaves room for a busy machine.
        assert time.process_time() - started < 6
        assert len(checkpoint.tensors) == V3_NUM_TENSORS
        assert sum(tensor.nbytes for tensor in checkpoint.tensors.values()) == V3_NBYTES
        assert len(checkpoint.files) == V3_NUM_FILES
        assert checkpoint.notes == ()
        assert main_dtype(checkpoint) is DType.BF16
        names = list(checkpoint.tensors)
        assert names.index("model.layers.9.mlp.experts.99.up_proj.weight") < names.index(
            "model.layers.10.mlp.experts.0.up_proj.weight"
        )
