"""Merges to try the executor and the runtime with: a family of checkpoints, a recipe for each method."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kits.checkpoint_maker import fields, tiny_llama
from kits.method_kit import default_case, method_named
from kits.statistics_maker import given_fisher

from raymerge.api import plan, submit
from raymerge.events import Event
from raymerge.merge_plan.memory import project
from raymerge.methods import BaseUse, Method, methods
from raymerge.options import RunOptions
from raymerge.runtime.driver.run import RunResult

NOT_REPRODUCED = frozenset({"raymerge/ledger.jsonl", "raymerge/run.json", "raymerge/events.jsonl"})
"""The files of an output that name workers and tell times, file versions and what was measured."""

INLINE = RunOptions(inline=True)
LEAST_MEMORY = 16 << 20
"""Bytes of the smallest budget that raymerge runs with."""


_UPCYCLED: Mapping[str, Any] = {
    "noise_scale": 0.01,
    "scale": [{"filter": "down_proj", "value": 0.5}, {"value": 1}],
    "reinit_fraction": [{"filter": "mlp", "value": 0.5}, {"value": 0}],
    "neuron_axis": [{"filter": "down_proj", "value": 1}, {"value": 0}],
}


@dataclass(frozen=True, slots=True)
class Family:
    base: Path
    tunes: tuple[Path, ...]


def make_family(root: Path, *, hidden: int = 32, layers: int = 2, files: int = 1) -> Family:
    """Write the four checkpoints below ``root``.

    With ``hidden`` 32 a merge is one segment, with 256 about fifty; with 640 its tensors span several blocks.
    """
    base = tiny_llama(root / "base", 0, hidden=hidden, vocab=hidden, layers=layers, files=files)
    tunes = tuple(
        tiny_llama(root / f"tune{seed}", seed, hidden=hidden, vocab=hidden, layers=layers, base=base)
        for seed in (1, 2, 3)
    )
    return Family(base, tunes)


def recipes(family: Family) -> dict[str, dict[str, Any]]:
    base = str(family.base)
    return {
        **{name: default_recipe(family, method) for name, method in methods().items()},
        "linear": {"merge_method": "linear", "models": _models(family, {"weight": 0.3}), "dtype": "float32"},
        "passthrough": {
            "merge_method": "passthrough",
            "slices": [
                {"sources": [{"model": base, "layer_range": [0, 1]}]},
                {"sources": [{"model": base, "layer_range": [0, 1], "parameters": {"scale": 0.5}}]},
            ],
        },
        "task_arithmetic": {
            "merge_method": "task_arithmetic",
            "base_model": base,
            "models": _models(family, {"weight": 0.5}),
        },
        "slerp": {
            "merge_method": "slerp",
            "base_model": base,
            "models": [{"model": base}, {"model": str(family.tunes[0])}],
            "parameters": {"t": 0.4},
        },
        # Without what stages measure of other tensors.
        "regmean": {
            "merge_method": "linear",
            "models": _models(family, {"weight": 0.3}),
            "methods": [{"role": ["norm", "embedding"], "merge_method": "regmean"}],
        },
        "upcycle": {
            "merge_method": "upcycle",
            "models": [{"model": str(family.tunes[0]), "parameters": _UPCYCLED}],
            "seed": 5,
        },
        **_spherical(family),
        **_of_deltas(family),
    }


def default_recipe(family: Family, method: Method) -> dict[str, Any]:
    case = default_case(method)
    pairs = zip(family.tunes, case.sources, strict=False)
    recipe: dict[str, Any] = {
        "merge_method": method.name,
        "models": [{"model": str(tune), "parameters": dict(own)} for tune, own in pairs],
        "parameters": dict(case.values),
    }
    if method.statistics == "fisher":
        for entry in recipe["models"]:
            entry["statistics"] = str(given_fisher(Path(entry["model"])))
    return recipe if method.base is BaseUse.UNUSED else {**recipe, "base_model": str(family.base)}


def _spherical(family: Family) -> dict[str, dict[str, Any]]:
    base, (one, two, _) = str(family.base), family.tunes
    pair = [
        {"model": str(one), "parameters": {"weight": 0.7}},
        {"model": str(two), "parameters": {"weight": 0.3}},
    ]
    weighted, alone = _models(family, {"weight": 0.5}), [{"model": str(one)}]
    return {
        "nuslerp": {
            "merge_method": "nuslerp",
            "models": pair,
            "parameters": {"nuslerp_flatten": False, "nuslerp_row_wise": [{"filter": "mlp", "value": 1}]},
        },
        "multislerp": {"merge_method": "multislerp", "base_model": base, "models": weighted},
        "karcher": {"merge_method": "karcher", "models": _models(family, {})},
        "slerp_delta": {
            "merge_method": "slerp_delta",
            "base_model": base,
            "models": [{"model": str(one)}, {"model": str(two)}],
            "parameters": {"t": 0.3},
        },
        "geometric_median": {"merge_method": "geometric_median", "models": weighted},
        "nearswap": {
            "merge_method": "nearswap",
            "base_model": base,
            "models": alone,
            "parameters": {"t": 0.01},
        },
        "arcee_fusion": {"merge_method": "arcee_fusion", "base_model": base, "models": alone},
    }


def _of_deltas(family: Family) -> dict[str, dict[str, Any]]:
    thinned = _models(family, {"weight": 0.6, "density": 0.5})
    named = fields(
        "ties: {}, dare_linear: {seed: 5}, dare_ties: {seed: 5}, breadcrumbs: {}, breadcrumbs_ties: {}, "
        "della: {seed: 5}, della_linear: {seed: 5}, sce: {parameters: {select_topk: 0.5}}, ram: {}, "
        "ramplus_tl: {}, consensus_ta: {}, lines: {}, "
        "model_stock: {parameters: {filter_wise: [{filter: mlp, value: 1}, {value: 0}]}}, iso_c: {}, "
        "tsv_m: {}"
    )
    return {
        name: {
            "merge_method": name,
            "base_model": str(family.base),
            "models": _fitting(name, thinned),
            **more,
        }
        for name, more in named.items()
    }


def _fitting(name: str, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    method = method_named(name)
    return [
        {**each, "parameters": {k: v for k, v in each["parameters"].items() if method.parameter(k)}}
        for each in entries
    ]


def _models(family: Family, parameters: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"model": str(tune), "parameters": dict(parameters)} for tune in family.tunes]


class EventLog(list[Event]):
    """Takes what a run tells, and then has it looked at."""

    def __init__(self, then: Callable[[Event], object] = lambda _: None) -> None:
        super().__init__()
        self._then = then

    def __call__(self, event: Event) -> None:
        self.append(event)
        self._then(event)

    def __bool__(self) -> bool:
        """It takes events, though there are none yet."""
        return True

    def of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self if isinstance(event, kinds)]


@dataclass(frozen=True, slots=True)
class Merged:
    result: RunResult
    events: EventLog = field(default_factory=EventLog)

    def of(self, kind: type[Event]) -> list[Any]:
        return self.events.of(kind)


def merge(recipe: Mapping[str, Any] | str, output: Path | str, options: RunOptions = INLINE) -> Merged:
    events = EventLog()
    return Merged(submit(recipe, output, options, on_event=events), events)


def staging_of(output: Path) -> Path:
    """The directory of an unfinished run."""
    (found,) = output.parent.glob(f".{output.name}.raymerge-*")
    return found


def flip(path: Path, offset: int = -1) -> None:
    """Change a byte of a file, and nothing else that shows."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def least_memory(recipe: Mapping[str, Any]) -> int:
    return project(plan(recipe), LEAST_MEMORY).least_budget


def receipts_of(output: Path) -> list[dict[str, Any]]:
    """The receipts of a finished merge: at least one."""
    records = map(json.loads, (output / "raymerge" / "ledger.jsonl").read_text().splitlines())
    found = [each["receipt"] for each in records if "receipt" in each]
    assert found
    return found


def digests(output: Path) -> dict[str, str]:
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.rglob("*"))
        if path.is_file() and str(path.relative_to(output)) not in NOT_REPRODUCED
    }
