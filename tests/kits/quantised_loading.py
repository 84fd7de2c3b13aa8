"""What transformers makes of quantised checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch


def loaded(root: Path, **options: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model of a checkpoint in float32, and what is reported of loading it.

    MXFP4 is decoded on the way. FP8 models load on a CPU without accelerate, but transformers asks for it
    before it looks.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
    from transformers.quantizers import quantizer_finegrained_fp8

    table = (
        getattr(AutoConfig.from_pretrained(root, local_files_only=True), "quantization_config", None) or {}
    )
    if table.get("quant_method") == "mxfp4":
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    with mock.patch.object(quantizer_finegrained_fp8, "is_accelerate_available", return_value=True):
        model, report = AutoModelForCausalLM.from_pretrained(
            root, dtype=torch.float32, output_loading_info=True, local_files_only=True, **options
        )
    return model, {kind: names for kind, names in report.items() if names}
