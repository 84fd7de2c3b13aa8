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
    def test_both_totals_are_those_of_the_model(self) -> None:
        files = deepseek_v3_specs()
        specs = [spec for file in files for spec in file]
        assert len(files) == V3_NUM_FILES == 163
        assert all(files)
        assert len(specs) == len({spec.name for spec in specs}) == V3_NUM_TENSORS == 91_991
        assert sum(spec.nbytes for spec in specs) == V3_NBYTES == 688_574_839_360

    def test_kinds_are_those_of_the_model(self) -> None:
        specs = {spec.name: spec for file in deepseek_v3_specs() for spec in file}
        scales = [name for name in specs if name.endswith("_scale_inv")]
        assert len(scales) == 45_808
        assert all(specs[name].dtype is DType.F32 for name in scales)
        assert all(specs[name.removesuffix("_scale_inv")].dtype is DType.F8_E4M3 for name in scales)
        narrow = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
        assert specs[narrow].shape == (576, 7168)
        assert specs[narrow + "_scale_inv"].shape == (5, 56)
        assert specs["model.layers.60.mlp.gate.e_score_correction_bias"].dtype is DType.F32
        assert "model.layers.61.eh_proj.weight" in specs
        assert "model.layers.2.mlp.gate.weight" not in specs

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
