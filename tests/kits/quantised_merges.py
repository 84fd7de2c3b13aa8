"""What merges of quantised models must be: float64 merges of what the parents mean, and what outputs mean.

Outputs are decoded from the definitions of the formats, and nothing here is raymerge's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kits.checkpoint_maker import TOKENIZER_FILES, read_config, read_tensors, write_checkpoint
from kits.float64_merges import Merge, linear, slerp, ties
from kits.quantised_models import QuantisedModel, deepseek_v3, gpt_oss, kimi_k2_thinking, three_formats
from kits.quantised_numbers import ScaleKind, Values, e2m1_values, e4m3_values, int4_codes
from numpy.typing import NDArray

KINDS: tuple[ScaleKind, ...] = ("F32", "ue8m0 F32", "F8_E8M0", "U8")

Maker = Callable[[Path, int], QuantisedModel]


_WEIGHTS, _DENSITY = (0.618034, 0.381966), 0.4
# Of no simple ratio: what is decoded takes few values, and sums that cancel would leave the sign to rounding.


def _deepseek(kind: ScaleKind) -> Maker:
    return lambda root, seed: deepseek_v3(root, seed, scales=kind)


MAKERS: Mapping[str, Maker] = {
    **{f"DeepSeek-V3 {kind}": _deepseek(kind) for kind in KINDS},
    "Kimi-K2-Thinking": kimi_k2_thinking,
    "gpt-oss": gpt_oss,
    "three formats": three_formats,
}


@dataclass(frozen=True, slots=True)
class Numbers:
    values: Values
    """Its numbers, in the stored order of dimensions."""
    steps: Values
    """From each number to the next that its code, times its scale, could mean."""
    limits: Values
    """The largest that codes could mean at each place."""


def read_numbers(root: Path) -> dict[str, Numbers]:
    stored = read_tensors(root)
    found: dict[str, Numbers] = {}
    for name, tensor in stored.items():
        is_scale = name.endswith(("_scale", "_scale_inv", "_scales", "_scale_2", ".scale"))
        if (is_scale and "hc_" not in name) or name.endswith((".weight_shape", ".tid2eid")):
            continue
        module = name.removesuffix(".weight")
        if name.endswith("_blocks"):
            module = name.removesuffix("_blocks")
            found[module] = _mxfp4(tensor, stored[f"{module}_scales"])
        elif name.endswith(".weight_packed"):
            module = name.removesuffix("_packed")
            scales, whole = stored[f"{module}_scale"], stored.get(f"{module}_global_scale")
            found[module] = _packed(tensor, scales, whole)
        elif tensor.dtype is torch.int8:
            found[name] = _mxfp4(
                tensor.view(torch.uint8).view(len(tensor), -1, 16), stored[f"{module}.scale"]
            )
        elif f"{name}_scale_2" in stored:
            steps = stored[f"{name}_scale"].double() * stored[f"{name}_scale_2"].double()
            pairs = tensor.view(*steps.shape, 8).numpy()
            found[name] = e2m1_numbers(pairs, steps.float().double().numpy())
        elif tensor.dtype is torch.float8_e4m3fn:
            one = stored.get(f"{name}_scale")
            blocks = next(
                (stored[each] for each in (f"{name}_scale_inv", f"{module}.scale") if each in stored), one
            )
            assert blocks is not None
            found[name] = _fp8(tensor, blocks) if one is None else _spread(tensor, one)
        else:
            found[name] = _plain(tensor)
    return found


def entries(models: Sequence[QuantisedModel], weights: Sequence[float], **more: Any) -> list[dict[str, Any]]:
    return [
        {"model": str(model.root), "parameters": {"weight": weight, **more}}
        for model, weight in zip(models, weights, strict=True)
    ]


def merge_cases(parents: Sequence[QuantisedModel]) -> Mapping[str, tuple[dict[str, Any], int, Merge]]:
    base, *tuned = parents
    named = {"base_model": str(base.root)}
    thinned = entries(tuned, _WEIGHTS, density=_DENSITY)
    return {
        "linear": ({"models": entries(parents[:2], (0.3, 0.7))}, 2, linear(0.3, 0.7)),
        "slerp": (
            {**named, "models": [{"model": str(tuned[0].root)}], "parameters": {"t": 0.4}},
            2,
            slerp(0.4),
        ),
        "ties": ({**named, "models": thinned}, 3, ties(_WEIGHTS, _DENSITY)),
    }


def merged_values(parents: Sequence[QuantisedModel], merge: Merge) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for name, first in parents[0].values.items():
        views = [list(_matrices(name, parent.values[name])) for parent in parents]
        merged = [merge(group) for group in zip(*views, strict=True)]
        whole = np.empty((len(merged[0]), *first.shape))
        for outcome, values in enumerate(whole):
            for target, found_here in zip(_matrices(name, values), merged, strict=True):
                target[...] = found_here[outcome]
        found[name] = whole
    return found


def check_merged(root: Path, expected: Mapping[str, Values], parents: Sequence[QuantisedModel]) -> None:
    found = read_numbers(root)
    assert found.keys() == expected.keys()
    for name, outcomes in expected.items():
        have = found[name]
        errors = np.abs(outcomes - have.values)
        nearest = np.take_along_axis(outcomes, errors.argmin(0)[None], 0)[0]
        error = errors.min(0)
        # What float32 loses while numbers are merged hangs on what goes in, not on what comes out.
        lost = 3e-6 * np.max([np.abs(parent.values[name]) for parent in parents], axis=0)
        assert np.all(error <= have.steps + lost), name
        inside = np.abs(nearest) <= have.limits
        assert np.all((error <= have.steps / 2 + lost)[inside]), name
        # Scales that are too coarse would make any error small.
        most = 0.15 if have.limits.min() < np.inf else 0.01
        assert np.linalg.norm(error) <= most * np.linalg.norm(nearest), name


def in_plain_layout(name: str, values: Values) -> Values:
    """Numbers in the order of dimensions of the family's bfloat16: gpt-oss has its experts turned there."""
    return values.swapaxes(-1, -2) if name.endswith((".gate_up_proj", ".down_proj")) else values


def plain_twin(model: QuantisedModel, root: Path) -> QuantisedModel:
    stored, tensors = read_tensors(model.root), {}
    values: dict[str, Values] = {}
    for name, exact in model.values.items():
        if name not in model.quantised:
            tensors[name], values[name] = stored[name], exact
        else:
            tensors[name] = torch.from_numpy(in_plain_layout(name, exact)).float().bfloat16()
            values[name] = in_plain_layout(name, tensors[name].double().numpy())
    config = read_config(model.root)
    for key in ("quantization_config", "expert_dtype"):
        config.pop(key, None)
    write_checkpoint(root, tensors, config, extra=TOKENIZER_FILES)
    return QuantisedModel(root, values, frozenset())


def check_stored_alike(root: Path, base: Path) -> None:
    found, wanted = ({n: (t.dtype, t.shape) for n, t in read_tensors(each).items()} for each in (root, base))
    assert found == wanted
    assert read_config(root)["quantization_config"] == read_config(base)["quantization_config"]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.dtype is other.dtype and one.shape == other.shape
    return alike and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def changed_bytes(root: Path, base: Path) -> set[str]:
    found, wanted = read_tensors(root), read_tensors(base)
    assert found.keys() == wanted.keys()
    return {name for name, tensor in found.items() if not same_bytes(tensor, wanted[name])}


def _matrices(name: str, values: Values) -> Iterator[Values]:
    word = name.rpartition(".")[2].removesuffix("_bias")
    if word not in ("gate_up_proj", "down_proj"):
        yield values
        return
    for expert in values:
        yield from (expert[0::2], expert[1::2]) if word == "gate_up_proj" else (expert,)


def _fp8(codes: torch.Tensor, scales: torch.Tensor) -> Numbers:
    exponents = scales.dtype in (torch.float8_e8m0fnu, torch.uint8)
    exact = 2.0 ** (scales.view(torch.uint8).double() - 127) if exponents else scales.double()
    rows, columns = codes.shape
    return _e4m3(codes, exact.numpy().repeat(128, 0).repeat(128, 1)[:rows, :columns])


def _spread(codes: torch.Tensor, scales: torch.Tensor) -> Numbers:
    if scales.dtype is torch.uint8:
        return _e4m3(codes, (2.0 ** (scales.double().numpy() - 127)).repeat(32, 1))
    matrices = codes.shape[:-2]
    exact = scales.double().numpy()
    by_matrix = exact.reshape(*matrices, 1, 1) if exact.size == math.prod(matrices) else exact
    return _e4m3(codes, np.broadcast_to(by_matrix, codes.shape))


def _e4m3(codes: torch.Tensor, spread: Values) -> Numbers:
    number = codes.view(torch.uint8).numpy()
    spacing = 2.0 ** (np.maximum((number >> 3) & 15, 1) - 10.0)
    return Numbers(e4m3_values()[number] * spread, spacing * spread, 448 * spread)


def _packed(codes: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor | None) -> Numbers:
    if codes.dtype is torch.int32:
        return _int4(codes, scales)
    if whole is None:
        return _mxfp4(codes.view(*scales.shape, 16), scales)
    steps = (scales.float() / whole).double().numpy()
    return e2m1_numbers(codes.view(*scales.shape, 8).numpy(), steps)


def _mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Numbers:
    return e2m1_numbers(blocks.numpy(), 2.0 ** (scales.view(torch.uint8).double().numpy() - 127))


def e2m1_numbers(pairs: NDArray[np.uint8], steps: Values) -> Numbers:
    number = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)
    spread = np.broadcast_to(steps[..., None], number.shape)
    spacing = np.array([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0])[number & 7]
    shape = (*pairs.shape[:-2], -1)
    parts = (e2m1_values()[number] * spread, spacing * spread, 6 * spread)
    return Numbers(*(part.reshape(shape) for part in parts))


def _int4(packed: torch.Tensor, scales: torch.Tensor) -> Numbers:
    codes = int4_codes(packed.numpy())
    spread = scales.double().numpy().repeat(codes.shape[1] // scales.shape[1], 1)
    # There is one code more below zero than above.
    return Numbers(codes * spread, spread, 7 * spread)


def _plain(tensor: torch.Tensor) -> Numbers:
    values = tensor.double().numpy()
    fraction = {torch.bfloat16: 7, torch.float32: 23}[tensor.dtype]
    steps = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(values), 1e-30))) - fraction)
    return Numbers(values, steps, np.full(values.shape, np.inf))
