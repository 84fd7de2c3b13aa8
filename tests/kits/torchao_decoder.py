"""Decodes weights of checkpoints with torchao's tensors: run as a program, where torchao is importable."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DECODED = "decoded-by-torchao"


def decoded(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """float32 [rows, columns]; None for what is no weight in codes."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import Float8Tensor
    from torchao.quantization.quantize_.common import KernelPreference

    module, codes = name.removesuffix(".weight").removesuffix(".weight_packed"), stored[name]
    endings = (".weight_scale", ".weight_scale_inv", ".scale")
    scales = next((stored[module + each] for each in endings if module + each in stored), None)
    if scales is None or name == module:
        return None
    if f"{module}.weight_scale_2" in stored:
        whole = stored[f"{module}.weight_scale_2"]
        return NVFP4Tensor(codes, scales, 16, torch.float32, whole).dequantize(torch.float32)
    width = codes.shape[1] * (1 if codes.dtype is torch.float8_e4m3fn else 2) // scales.shape[1]
    if width != 32:
        block = [codes.shape[0] // scales.shape[0], width]
        return Float8Tensor(codes, scales.float(), block, dtype=torch.float32).dequantize()
    is_fp8 = codes.dtype is torch.float8_e4m3fn
    parts = codes if is_fp8 else codes.view(torch.uint8), scales.view(torch.float8_e8m0fnu)
    form = torch.float8_e4m3fn if is_fp8 else torch.float4_e2m1fn_x2
    made = MXTensor(*parts, form, 32, torch.float32, KernelPreference.EMULATED, None, False)
    return made.dequantize(torch.float32)


def main(roots: list[str]) -> None:
    for root in map(Path, roots):
        files = sorted(root.glob("*.safetensors"))
        stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
        numbers = {name.replace("_packed", ""): decoded(name, stored) for name in stored}
        save_file({name: each for name, each in numbers.items() if each is not None}, root / DECODED)


if __name__ == "__main__":
    main(sys.argv[1:])
