"""Plans whose inputs are gathered from rows, made by hand over small checkpoints, and carried out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kits.checkpoint_maker import write_checkpoint
from kits.method_kit import method_named
from kits.segment_bench import Bench, plan_bench

from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.merge_plan.dispositions import Disposition, Rule, Use
from raymerge.merge_plan.expressions import (
    Expression,
    Gather,
    GatherInput,
    Output,
    Product,
    Read,
    make_expression,
)
from raymerge.merge_plan.jobs import Input, JobPart, OpJob
from raymerge.merge_plan.plan import FORMAT, Plan, encoding_to_json, expression_to_json, make_plan
from raymerge.merge_plan.segments import cut_segments, place_ops, place_shards
from raymerge.merge_plan.tables import disposition_table, op_tables, other_tables
from raymerge.methods import Method, Settings

Runs = Sequence[tuple[int, int, int, int]]


@dataclass(frozen=True, slots=True)
class Stock:
    sources: tuple[Checkpoint, ...]

    def read(self, name: str, source: int = 0, *, view: View | None = None) -> Read:
        stored = self.sources[source].tensors[name]
        return Read(0, source, stored.key, stored.offset, stored.nbytes, stored.dtype, view)

    def term(
        self, name: str, source: int = 0, *, view: View | None = None, product: Product | None = None
    ) -> GatherInput:
        shape = view.shape if view is not None else self.sources[source].tensors[name].shape
        return GatherInput(self.read(name, source, view=view), shape[0], product)

    def product(
        self, prefix: str, rank: int, *, scale: float = 1.0, transposed: bool = False, magnitude: bool = False
    ) -> Product:
        length = self.read(f"{prefix}.magnitude") if magnitude else None
        return Product(
            self.read(f"{prefix}.up"), self.read(f"{prefix}.down"), rank, scale, transposed, length
        )


def make_stock(root: Path, *tensors: Mapping[str, torch.Tensor]) -> Stock:
    config = {"architectures": ["OddForCausalLM"], "model_type": "odd"}
    paths = [write_checkpoint(root / str(index), each, config) for index, each in enumerate(tensors)]
    return Stock(tuple(open_checkpoint(path, str(path)) for path in paths))


def whole(gather_input: GatherInput, columns: int) -> Gather:
    return Gather(
        gather_input.num_rows,
        columns,
        (gather_input,),
        ((0, 0, gather_input.num_rows, 0),),
        gather_input.num_rows,
    )


def expression(
    method: str | Method, *, sources: int, has_base: bool = False, cast: DType = DType.F32, **values: float
) -> Expression:
    found = method_named(method) if isinstance(method, str) else method
    known = {parameter.name: parameter for parameter in found.parameters}
    numbers = {name: values.get(name, each.default) for name, each in known.items()}
    shared = {name: value for name, value in numbers.items() if known[name].scope == "global"}
    own = {name: value for name, value in numbers.items() if known[name].scope == "source"}
    return make_expression(found, Settings(shared, (own,) * sources), has_base=has_base, cast=cast)


def row_of(
    made_of: Expression,
    inputs: Sequence[Input],
    shape: tuple[int, ...],
    *,
    index: int = 0,
    is_flat: bool = True,
    check_finite: bool = False,
    places: tuple[tuple[str, int], ...] = (("out", 0),),
) -> OpJob:
    part = JobPart("out", shape, None, tuple(inputs))
    return OpJob(
        index, "out", check_finite, made_of, 0, math.prod(shape), is_flat, parts=(part,), places=places
    )


def plan_of(stock: Stock, outputs: Sequence[Output]) -> Plan:
    shards = place_shards(outputs, 0)
    ops = place_ops(outputs, shards)
    dropped = Disposition(Use.DROPPED, Rule.CONFIG_ONLY)
    dispositions = [
        (index, name, dropped) for index, each in enumerate(stock.sources) for name in each.tensors
    ]
    made = op_tables(outputs, shards, ops)
    others = other_tables(shards, cut_segments(ops), {}), {"dispositions": disposition_table(dispositions)}
    tables = {**made.tables, **others[0], **others[1]}
    manifest = {
        "format": FORMAT,
        "recipe": {},
        "seed": 0,
        "sources": [
            {
                "name": each.name,
                "num_tensors": len(each.tensors),
                "files": [[file.key, file.nbytes, file.header_digest] for file in each.files],
            }
            for each in stock.sources
        ],
        "donor": 0,
        "left_out": [],
        "expressions": [expression_to_json(each) for each in made.expressions],
        "encodings": [encoding_to_json(each) for each in made.encodings],
        "config": {"model_type": "odd"},
        "tie": {"head": "", "embedding": "", "tied": None, "reason": ""},
    }
    return make_plan(manifest, tables, ())


def bench_of(stock: Stock, plan: Plan, root: Path, **settings: Any) -> Bench:
    return plan_bench(plan, [each.root for each in stock.sources], root, **settings)


def made(stock: Stock, plan: Plan, root: Path, **settings: Any) -> dict[str, bytes]:
    bench = bench_of(stock, plan, root, **settings)
    for segment in bench.segments:
        bench.runner.run(segment)
    return dict(bench.written())
