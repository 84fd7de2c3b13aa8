"""Plans of small recipes, and readers that say in plain words what a plan decided."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kits.checkpoint_maker import llama_config, llama_shapes, sparse_checkpoint

from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType
from raymerge.errors import UserError
from raymerge.merge_plan.jobs import Jobs
from raymerge.merge_plan.memory import expression_passes, op_kinds
from raymerge.merge_plan.plan import Plan
from raymerge.planner.inputs.sources import Source, holdings, open_models
from raymerge.planner.merges import build_plan, plan_merges
from raymerge.recipes.load import recipe_from_mapping
from raymerge.recipes.schema import Recipe

Specs = Mapping[str, tuple[DType, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Planned:
    plan: Plan
    sources: tuple[Source, ...]

    def rows(self, tensor: str) -> list[dict[str, Any]]:
        number = self.names().index(tensor)
        return [row for row in self.plan["ops"].to_pylist() if row["tensor"] == number]

    def names(self) -> list[str]:
        found: list[str] = self.plan["tensors"].column("name").to_pylist()
        return found

    def inputs(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return list(self.plan["inputs"].slice(row["first_input"], row["num_inputs"]).to_pylist())

    def parts(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return list(self.plan["parts"].slice(row["first_part"], row["num_parts"]).to_pylist())

    def reads(self, tensor: str) -> list[tuple[int, str]]:
        found = [self.stored(each) for row in self.rows(tensor) for each in self.inputs(row)]
        return list(dict.fromkeys(found))

    def stored(self, read: Mapping[str, Any]) -> tuple[int, str]:
        index = read["source"]
        for tensor in holdings(self.sources)[index].tensors.values():
            inside = tensor.offset <= read["offset"] < tensor.offset + max(tensor.nbytes, 1)
            if tensor.key == read["key"] and inside:
                return index, tensor.name
        raise AssertionError(f"{read} is in no tensor")

    def method(self, tensor: str) -> str:
        (found,) = {self.plan.expressions[row["expression"]].method for row in self.rows(tensor)}
        return found

    def settings(self, tensor: str) -> dict[str, Any]:
        expression = self.plan.expressions[self.rows(tensor)[0]["expression"]]
        found: dict[str, Any] = json.loads(expression.settings)
        return found

    def weights(self, tensor: str) -> list[float]:
        return [each["weight"] for each in self.settings(tensor)["sources"]]

    def dtype(self, tensor: str) -> str:
        found: str = self.plan["tensors"].column("dtype").to_pylist()[self.names().index(tensor)]
        return found

    def fate(self, source: int, name: str) -> tuple[str, str, str]:
        (found,) = [
            (row["disposition"], row["rule"], row["output"])
            for row in self.plan["dispositions"].to_pylist()
            if (row["source"], row["name"]) == (source, name)
        ]
        return found

    def fates(self) -> set[tuple[int, str]]:
        return {(row["source"], row["name"]) for row in self.plan["dispositions"].to_pylist()}

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.plan.manifest["config"]
        return found


def make_recipe(data: Mapping[str, Any]) -> Recipe:
    recipe = recipe_from_mapping(json.loads(json.dumps(data, default=str)))
    assert isinstance(recipe, Recipe)
    return recipe


def planned(data: Mapping[str, Any]) -> Planned:
    recipe = recipe_from_mapping(json.loads(json.dumps(data, default=str)))
    sources = open_models(recipe).require()
    return Planned(build_plan(recipe, sources, version="0"), sources)


def planned_merge(root: Path, data: Mapping[str, Any]) -> Planned:
    """The plan of one recipe of any kind, over results of its stages below ``root / "steps"``."""
    recipe = recipe_from_mapping(json.loads(json.dumps(data, default=str)))
    (merge,) = plan_merges([recipe], root / "steps", version="0")
    return Planned(merge.plan, merge.sources)


def good(data: Mapping[str, Any]) -> Planned:
    made = planned(data)
    made.plan.require()
    held = enumerate(holdings(made.sources))
    assert made.fates() == {(index, name) for index, holding in held for name in holding.stored}
    return made


def refusals(data: Mapping[str, Any]) -> list[str]:
    try:
        return [str(problem) for problem in planned(data).plan.problems]
    except UserError as error:
        return [str(problem) for problem in error.problems]


def header_checkpoint(root: Path, specs: Specs, config: Mapping[str, Any]) -> Path:
    """A checkpoint whose data is one hole: all zeros."""
    tensors = [TensorSpec(name, dtype, shape) for name, (dtype, shape) in specs.items()]
    return sparse_checkpoint(root, [tensors], config)


def llama_specs(layers: int = 3, *, dtype: DType = DType.BF16, tie: bool = False, hidden: int = 32) -> Specs:
    config = llama_config(layers=layers, tie=tie, hidden=hidden)
    return {name: (dtype, shape) for name, shape in llama_shapes(config).items()}


def llama(root: Path, layers: int = 3, *, tie: bool = False, **config: Any) -> Path:
    return header_checkpoint(
        root, llama_specs(layers, tie=tie), {**llama_config(layers=layers, tie=tie), **config}
    )


def same_needs(plan: Plan) -> int:
    """How many ops need what the projection counts for their kind; all must, but for scales."""
    kinds, jobs = op_kinds(plan), Jobs(plan)
    ops = [op for segment in range(len(jobs)) for op in jobs.all_ops(segment)]
    for op in ops:
        number = kinds.numbers[op.index]
        assert (number < 0) == op.expression.is_scales
        if number >= 0:
            kind = kinds.kinds[number]
            passes = expression_passes(op.expression, op.parts[0].shape)
            assert (kind.num_elements, kind.expression) == (op.num_elements, op.expression)
            assert (kind.need, kind.passes) == (op.need, passes)
    assert sorted({*kinds.numbers.tolist()} - {-1}) == list(range(len(kinds.kinds)))
    return len(ops)


def logical_values(made: Planned, tensor: str) -> dict[str, list[torch.Tensor]]:
    """For each logical tensor of an output what its inputs hold, in order, as F32 matrices.

    Sources must store F32.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for row in made.rows(tensor):
        parts = made.parts(row)
        for read in made.inputs(row):
            part = parts[read["part"]]
            found.setdefault(part["logical"], []).append(_values(made, read, part["shape"]))
    return found


def _values(made: Planned, read: Mapping[str, Any], shape: Sequence[int]) -> torch.Tensor:
    path = Path(made.sources[read["source"]].checkpoint.root) / read["key"]
    with path.open("rb") as file:
        file.seek(read["offset"])
        flat = torch.frombuffer(bytearray(file.read(read["nbytes"])), dtype=torch.float32)
    if not read["view_strides"]:
        return flat.reshape(tuple(shape))
    return flat.as_strided(read["view_shape"], read["view_strides"], read["view_offset"]).clone()


def plan_text(made: Planned) -> str:
    lines = [_row_text(made, index, row) for index, row in enumerate(made.plan["ops"].to_pylist())]
    lines.append("")
    for segment in made.plan["segments"].to_pylist():
        last = segment["first_op"] + segment["num_ops"] - 1
        ops = f"ops {segment['first_op']}-{last}"
        lines.append(f"segment: {ops} of shard {segment['shard']}, cost {segment['cost']}")
    for shard in made.plan["shards"].to_pylist():
        lines.append(f"shard: {shard['name']}, {shard['nbytes']} bytes, header {len(shard['header'])}")
    for row in made.plan["dispositions"].to_pylist():
        if row["disposition"] != "merged":
            target = f" -> {row['output']}" if row["output"] else ""
            lines.append(f"{row['disposition']} by {row['rule']}: {row['source']}:{row['name']}{target}")
    lines.append(f"tie: {json.dumps(made.plan.manifest['tie'], sort_keys=True)}")
    lines.append(f"config: {json.dumps(made.config, sort_keys=True)}")
    return "\n".join(lines) + "\n"


def _row_text(made: Planned, index: int, row: Mapping[str, Any]) -> str:
    tensor = made.plan["tensors"].slice(row["tensor"], 1).to_pylist()[0]
    place = f"{row['shard']}:{row['offset']}+{row['nbytes']}"
    reads = " ".join(_read_text(made, read) for read in made.inputs(row))
    twin = f" = op {row['copy_of']}" if row["copy_of"] >= 0 else ""
    expression = made.plan.expressions[row["expression"]].text()
    named = f"{tensor['name']} {tensor['dtype']}{tensor['shape']}"
    return f"{index}: {named} @{place} | {expression} | {reads}{twin}"


def _read_text(made: Planned, read: Mapping[str, Any]) -> str:
    source, name = made.stored(read)
    start = read["offset"] - made.sources[source].checkpoint.tensors[name].offset
    view = (
        f"~{read['view_offset']}{read['view_shape']}/{read['view_strides']}" if read["view_strides"] else ""
    )
    return f"{source}:{name}+{start}:{read['nbytes']}{view}"
