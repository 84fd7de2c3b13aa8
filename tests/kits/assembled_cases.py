"""Matrices whose rows are assembled, a pair of checkpoints with them, and plans of one output of theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from kits.assembly_maker import Stock, expression, made, plan_of

from raymerge.dtypes import DType
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.expressions import Output, Part, Read, Row
from raymerge.merge_plan.plan import Plan

ROWS, COLUMNS, RANK = 150, 1000, 5
METHODS = ("linear", "task_arithmetic", "slerp", "ties", "dare_ties")


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stock_tensors(seed: int) -> dict[str, torch.Tensor]:
    return {
        "a": random_tensor(ROWS, COLUMNS, seed=seed),
        "b": random_tensor(ROWS + 7, COLUMNS, seed=seed + 1, dtype=torch.bfloat16),
        "vector": random_tensor(ROWS, seed=seed + 2),
        "lora.up": random_tensor(ROWS, RANK, seed=seed + 3),
        "lora.down": random_tensor(RANK, COLUMNS, seed=seed + 4),
        "lora.magnitude": random_tensor(ROWS, seed=seed + 5).abs(),
        "flipped.up": random_tensor(COLUMNS, RANK, seed=seed + 6, dtype=torch.bfloat16),
        "flipped.down": random_tensor(RANK, ROWS, seed=seed + 7, dtype=torch.bfloat16),
    }


def output_of(
    reads: tuple[Read, ...], shape: tuple[int, ...] = (ROWS, COLUMNS), method: str = "linear", **values: float
) -> Output:
    has_base = method not in ("linear", "passthrough", "multislerp")
    numbers = {"weight": 0.5, "density": 0.5, "t": 0.3, **values}
    made_of = expression(method, sources=len(reads) - has_base, has_base=has_base, **numbers)
    size = int(np.prod(shape))
    return Output("out", DType.F32, shape, (Row(size, made_of, (Part("out", shape, None),), reads),), True)


def sound_plan(stock: Stock, *outputs: Output) -> Plan:
    plan = plan_of(stock, outputs)
    assert check_plan(plan) == ()
    return plan


def values_of(data: bytes, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.float32)).view(shape)


def made_alone(
    stock: Stock, read: Read, root: Path, shape: tuple[int, ...] = (ROWS, COLUMNS)
) -> torch.Tensor:
    output = output_of((read,), shape, "linear", weight=1.0)
    return values_of(made(stock, sound_plan(stock, output), root)["out"], shape)
