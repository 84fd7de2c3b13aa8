"""Experts move between every two layouts that are published; their scores are read or computed."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.adapter_maker import lora_config, write_adapter
from kits.checkpoint_maker import write_checkpoint
from kits.expert_models import submitted
from kits.marks import one_in
from kits.permuted_experts import (
    DBRX,
    FUSED,
    GPT_OSS,
    GRANITE,
    LLAMA4,
    MIXTRAL,
    WIDTH,
    Tensors,
    make_model,
    store,
)
from kits.plan_maker import refusals
from safetensors.torch import save_file

from raymerge.architectures.expert_fields import ExpertMeaning
from raymerge.errors import Findings
from raymerge.planner.inputs.sources import open_models
from raymerge.planner.inputs.weights import Weights
from raymerge.planner.matching.input_resolver import InputResolver, open_inputs
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.moe.expert_blocks import ExpertBlock, expert_blocks
from raymerge.planner.moe.expert_moves import ExpertSelection, Scores, read_scores
from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.load import recipe_from_mapping
from raymerge.storage.local.store import LocalStore

EXPERTS, LAYERS, KINDS = 4, 2, ("gate", "up", "down")
LAYOUTS = {
    "one by one": MIXTRAL,
    "stacked": replace(FUSED, name="mixtral"),
    "transposed": replace(LLAMA4, name="llama4_text", shared=""),
    "interleaved": replace(GPT_OSS, is_biased=False),
    "rows": DBRX,
    "linears": replace(GRANITE, name="granitemoe", shared=""),
}
Layers = Sequence[Sequence[Tensors]]
"""For each layer its experts: ``gate``, ``up``, ``down``, and the router's ``row``."""


@pytest.fixture
def layouts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of one family are accepted by another: here they differ in layout only."""
    monkeypatch.setattr("raymerge.planner.moe.expert_moves.expert_meaning", lambda _: ExpertMeaning())


def _experts(load: Callable[[str], torch.Tensor], count: int) -> Layers:
    blocks = [f"model.layers.{layer}.mlp" for layer in range(LAYERS)]
    return [
        [
            {kind: load(f"{block}.experts.{each}.{kind}_proj.weight") for kind in KINDS}
            | {"row": load(f"{block}.gate.weight")[each]}
            for each in range(count)
        ]
        for block in blocks
    ]


def _write(root: Path, layout: str, seed: int = 0, experts: int = EXPERTS) -> Layers:
    family = replace(LAYOUTS[layout], experts=experts)
    model = make_model(family, seed, dtype=torch.float32)
    store(root, model, family, num_experts_per_tok=1)
    return _experts(model.__getitem__, experts)


def _read(root: Path, experts: int) -> Layers:
    recipe = recipe_from_mapping({"base_model": str(root), "experts": {"keep": [0]}})
    (source,) = open_models(recipe).require()
    with Weights(source) as weights:
        return _experts(weights.load, experts)


def _assert_equal(found: Layers, wanted: Layers, *, exact: bool = True) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    for mine, theirs in zip(found, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.keys() == other.keys()
            for kind, tensor in other.items():
                torch.testing.assert_close(one[kind], tensor, **tolerance)


@pytest.mark.usefixtures("layouts_alone")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_are_what_they_are_taken_for(layout: str, tmp_path: Path) -> None:
    layers = _write(tmp_path / "base", layout)
    _assert_equal(_read(tmp_path / "base", EXPERTS), layers)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("layouts_alone")
@pytest.mark.parametrize(("base", "other"), one_in(5, itertools.product(LAYOUTS, LAYOUTS)))
def test_experts_of_any_layout_are_added_to_any(base: str, other: str, tmp_path: Path) -> None:
    mine = _write(tmp_path / "base", base)
    theirs = _write(tmp_path / "other", other, 1, experts=3)
    out = submitted(tmp_path, "out", {"add": [{"model": str(tmp_path / "other"), "experts": [2, 0]}]})
    wanted = [[*own, more[2], more[0]] for own, more in zip(mine, theirs, strict=True)]
    _assert_equal(_read(out, EXPERTS + 2), wanted)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("layouts_alone")
@pytest.mark.parametrize(("layout", "dtype"), one_in(3, itertools.product(LAYOUTS, ["bfloat16", None])))
def test_any_layout_is_merged_and_kept(layout: str, dtype: str | None, tmp_path: Path) -> None:
    layers = _write(tmp_path / "base", layout)
    more = {} if dtype is None else {"dtype": dtype}
    cast = torch.float32 if dtype is None else torch.bfloat16

    def mean(experts: Sequence[Tensors]) -> Tensors:
        return {
            kind: torch.stack([each[kind] for each in experts]).double().mean(0).to(cast).float()
            for kind in experts[0]
        }

    kept = submitted(tmp_path, "kept", {"keep": {"0": [3, 1], "1": [0, 2]}}, **more)
    wanted = [[mean([own[i]]) for i in ids] for own, ids in zip(layers, ([3, 1], [0, 2]), strict=True)]
    _assert_equal(_read(kept, 2), wanted)
    groups = {"0": [[3, 1, 0], [2]], "1": [[0], [2, 1, 3]]}
    merged = submitted(tmp_path, "merged", {"merge": groups}, **more)
    wanted = [
        [mean([own[i] for i in group]) for group in groups[str(layer)]] for layer, own in enumerate(layers)
    ]
    _assert_equal(_read(merged, 2), wanted, exact=False)


@pytest.mark.usefixtures("layouts_alone")
@pytest.mark.parametrize("layout", one_in(3, LAYOUTS))
def test_a_dense_model_is_an_expert_of_any_layout(layout: str, tmp_path: Path) -> None:
    layers, dense = _write(tmp_path / "base", layout), _write(tmp_path / "one", "one by one", 2, experts=1)
    tensors = {
        f"model.layers.{layer}.mlp.{kind}_proj.weight": expert[kind].half()
        for layer, (expert,) in enumerate(dense)
        for kind in KINDS
    }
    config = {
        "model_type": "mistral",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "hidden_act": "silu",
    }
    root = write_checkpoint(tmp_path / "dense", tensors, config)
    out = submitted(tmp_path, "out", {"add": [{"model": str(root), "row_of": 3}]})
    wanted = [
        [*own, {kind: expert[kind].half().float() for kind in KINDS} | {"row": own[3]["row"]}]
        for own, (expert,) in zip(layers, dense, strict=True)
    ]
    _assert_equal(_read(out, EXPERTS + 1), wanted)


SCORED_LAYERS, SCORED = 2, 4
BLOCK = "model.layers.{}.mlp"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": SCORED_LAYERS,
    "num_experts": SCORED,
    "num_experts_per_tok": 1,
}


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for layer in range(SCORED_LAYERS):
        block = BLOCK.format(layer)
        found[f"{block}.gate.weight"] = torch.randn(SCORED, 8, generator=generator)
        for expert in range(SCORED):
            for kind, shape in (("gate", (6, 8)), ("up", (6, 8)), ("down", (8, 6))):
                tensor = torch.randn(shape, generator=generator) * (1 + (expert * 7 + layer) % 4)
                found[f"{block}.experts.{expert}.{kind}_proj.weight"] = tensor.bfloat16()
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("scores") / "base", _tensors(), CONFIG)


def _recipe(base: Path, change: dict[str, Any]) -> ExpertSetRecipe:
    recipe = recipe_from_mapping({"base_model": str(base), "experts": change})
    assert isinstance(recipe, ExpertSetRecipe)
    return recipe


def _asked(base: Path, said: str = "weights") -> tuple[ExpertSetRecipe, InputResolver, Sequence[ExpertBlock]]:
    recipe = _recipe(base, {"drop": 1, "scores": said})
    (source,) = open_models(recipe).require()
    resolver = InputResolver([source], [LogicalTensors(source)])
    return recipe, resolver, expert_blocks(source, resolver.logical[0], SCORED, Findings())


def _scores(base: Path, said: str = "weights") -> Scores:
    return read_scores(*_asked(base, said), None)


def test_sizes_of_weights(base: Path) -> None:
    found, tensors = _scores(base), _tensors()
    for layer in range(SCORED_LAYERS):
        for expert, score in enumerate(found[BLOCK.format(layer)]):
            head = f"{BLOCK.format(layer)}.experts.{expert}"
            gate, up, down = (
                float(tensors[f"{head}.{kind}_proj.weight"].double().norm())
                for kind in ("gate", "up", "down")
            )
            assert math.isclose(score, down * math.sqrt(gate**2 + up**2), rel_tol=1e-12)


def test_files_of_all_forms(base: Path, tmp_path: Path) -> None:
    values = {BLOCK.format(layer): (1.0, 0.25, 3.0, float(layer)) for layer in range(SCORED_LAYERS)}
    by_layer = {str(layer): list(values[BLOCK.format(layer)]) for layer in range(SCORED_LAYERS)}
    (tmp_path / "a.json").write_text(json.dumps({**by_layer, "comment": "of no layer"}))
    (tmp_path / "b.json").write_text(json.dumps({path: list(row) for path, row in values.items()}))
    save_file({key: torch.tensor(row) for key, row in by_layer.items()}, tmp_path / "c.safetensors")
    save_file(
        {path: torch.tensor(row, dtype=torch.bfloat16) for path, row in values.items()},
        tmp_path / "d.safetensors",
    )
    for name in ("a.json", "b.json", "c.safetensors", "d.safetensors"):
        assert _scores(base, str(tmp_path / name)) == values


_ROW = "[1, 2, 3, 4]"
REFUSED = {
    "no-json": ("{", "is not JSON"),
    "list": ("[1, 2]", "is no map of layers"),
    "layer": ('{"0": [1, 2, 3, 4]}', "there are no scores for layer 1 (model.layers.1.mlp)"),
    "short": ('{"0": [1, 2, 3, 4], "1": [1, 2]}', "has 4 experts, and 2 scores"),
    "nan": ('{"0": [1, 2, 3, NaN], "1": [1, 2, 3, 4]}', "holds NaN, which is not JSON"),
    "text": ('{"0": ["a", 2, 3, 4], "1": [1, 2, 3, 4]}', "there are no scores for layer 0"),
    "huge": (f'{{"0": [1, 2, 3, {"9" * 400}], "1": {_ROW}}}', "or a number beyond 1e+300"),
    "beyond": (
        f'{{"0": {_ROW}, "1": {_ROW}, "7": {_ROW}, "x": [1]}}',
        "scores for '7', 'x', where no experts",
    ),
    "twice": (
        f'{{"0": {_ROW}, "1": {_ROW}, "model.layers.1.mlp": {_ROW}}}',
        "'1' and 'model.layers.1.mlp' name",
    ),
    "repeated": (f'{{"0": {_ROW}, "1": {_ROW}, "0": {_ROW}}}', "names '0' twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(case: str, base: Path, tmp_path: Path) -> None:
    text, expected = REFUSED[case]
    (tmp_path / "scores.json").write_text(text)
    change = {"drop": 1, "scores": str(tmp_path / "scores.json")}
    (problem,) = refusals({"base_model": base, "experts": change})
    assert expected in problem
    assert "experts.scores" in problem


@pytest.mark.parametrize("said", ["~no-such-user-at-all/s.json", "nowhere.json", "a" * 5000])
def test_paths_that_lead_nowhere(said: str, base: Path) -> None:
    (problem,) = refusals({"base_model": base, "experts": {"drop": 1, "scores": said}})
    assert "experts.scores" in problem
    assert "no such" in problem or "cannot be read" in problem


def test_a_file_that_cannot_be_read(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.json"
    path.write_text("{}")

    read_bytes = Path.read_bytes

    def refuse(self: Path) -> bytes:
        if self == path:
            raise PermissionError(13, "Permission denied")
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    (problem,) = refusals({"base_model": base, "experts": {"drop": 1, "scores": str(path)}})
    assert f"experts.scores: {path}: cannot be read (Permission denied)" in problem
    path.write_bytes(b" " * (64 * 2**20 + 1))
    (problem,) = refusals({"base_model": base, "experts": {"drop": 1, "scores": str(path)}})
    assert "is too large for a file of scores" in problem


@pytest.mark.parametrize(
    ("groups", "first", "second", "words"),
    [
        ([[0, 1], [2, 3]], [0, 1, 3, 4], [0, 2, 3, 4], None),
        ([[0, 1], [2, 3]], [1, -1, 3, 4], [1, 2, 3, 4], "experts 0, 1 in layer 0 have scores down to -1"),
        ([[0, 1], [2, 3]], [0, 0, 3, 4], [0, 2, 3, 4], "the scores of experts 0, 1 in layer 0 are all 0"),
        # They count in groups of several only.
        ([[0], [1], [3, 2]], [0, -2, 3, 4], [0, 0, 0, 4], None),
        ([[0], [1], [3, 2]], [0, -2, 3, 4], [1, 1, 0, 0], "the scores of experts 3, 2 in layer 1 are all 0"),
    ],
)
def test_scores_that_are_the_weights_of_a_mean(
    groups: Any, first: list[int], second: list[int], words: str | None, base: Path, tmp_path: Path
) -> None:
    scores = tmp_path / "scores.json"
    scores.write_text(json.dumps({"0": first, "1": second}))
    problems = refusals({"base_model": base, "experts": {"merge": groups, "scores": str(scores)}})
    assert len(problems) == (words is not None)
    assert (words or "") in "".join(problems)


def _bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    read_into = LocalStore.read_into

    def counted(self: LocalStore, key: str, offset: int, buffer: memoryview) -> None:
        found.append((offset, buffer.nbytes))
        read_into(self, key, offset, buffer)

    monkeypatch.setattr(LocalStore, "read_into", counted)
    return found


def _fused(family: str) -> dict[str, torch.Tensor]:
    """The same experts as ``_tensors`` has, gate and up in one tensor."""
    plain, found = _tensors(), {}
    for layer in range(SCORED_LAYERS):
        head = BLOCK.format(layer)
        kinds = {
            kind: torch.stack([plain[f"{head}.experts.{e}.{kind}_proj.weight"] for e in range(SCORED)])
            for kind in ("gate", "up", "down")
        }
        found[f"{head}.gate.weight"] = plain[f"{head}.gate.weight"]
        if family == "gpt_oss":
            pairs = torch.stack([kinds["gate"], kinds["up"]], dim=2).flatten(1, 2).mT
        else:
            pairs = torch.cat([kinds["gate"], kinds["up"]], dim=1).mT
        found[f"{head}.experts.gate_up_proj"] = pairs.contiguous()
        found[f"{head}.experts.down_proj"] = kinds["down"].mT.contiguous()
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text", "gpt_oss"])
def test_every_byte_of_an_expert_is_read_once(
    family: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, wanted = base, _scores(base)
    if family != "qwen3_moe":
        sizes = {"hidden_size": 8, "intermediate_size": 6, "model_type": family, "num_local_experts": SCORED}
        root = write_checkpoint(tmp_path / "fused", _fused(family), CONFIG | sizes)
    asked = _asked(root)
    read = _bytes_read(monkeypatch)
    assert read_scores(*asked, None) == wanted
    tensors = asked[1].sources[0].checkpoint.tensors
    stored = [tensor.nbytes for name, tensor in tensors.items() if ".experts." in name]
    assert sum(nbytes for _, nbytes in read) == sum(stored)
    assert len(set(read)) == len(read)


def test_sizes_of_weights_with_what_an_adapter_adds(base: Path, tmp_path: Path) -> None:
    module, generator = f"{BLOCK.format(1)}.experts.2.down_proj", torch.Generator().manual_seed(1)
    down, up = torch.randn(2, 6, generator=generator), torch.randn(8, 2, generator=generator)
    name = f"base_model.model.{module}"
    write_adapter(
        tmp_path / "adapter",
        {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up},
        lora_config(r=2, lora_alpha=4, target_modules=["down_proj"]),
    )
    found, plain, tensors = _scores(Path(f"{base}+{tmp_path / 'adapter'}")), _scores(base), _tensors()
    block = BLOCK.format(1)
    before = float(tensors[f"{module}.weight"].double().norm())
    after = float((tensors[f"{module}.weight"].double() + 2 * up.double() @ down.double()).norm())
    assert math.isclose(found[block][2], plain[block][2] / before * after, rel_tol=1e-5)
    assert found[block][:2] == plain[block][:2]


def test_codes_that_are_read_are_refused_by_their_format(tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors().items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        tensors[name] = tensor.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.ones(1)
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    root = write_checkpoint(tmp_path / "base", tensors, config)
    (problem,) = refusals({"base_model": root, "experts": {"drop": 1, "scores": "weights"}})
    assert "its experts are stored as fp8_tensor (such as " in problem
    assert "raymerge convert MODEL --to bf16" in problem


def test_matrices_that_cannot_be_told_apart(tmp_path: Path) -> None:
    tensors = {name.replace("down_proj", "other"): tensor for name, tensor in _tensors().items()}
    root = write_checkpoint(tmp_path / "base", tensors, CONFIG)
    (problem,) = refusals({"base_model": root, "experts": {"drop": 1, "scores": "weights"}})
    assert "cannot be told apart" in problem


@settings(deadline=None, max_examples=13)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=SCORED, max_size=SCORED), min_size=2, max_size=2),
    drop=st.integers(1, 3),
)
def test_those_with_the_lowest_scores_go(rows: list[list[int]], drop: int, base: Path) -> None:
    recipe = _recipe(base, {"drop": drop, "scores": "weights"})
    sources = open_models(recipe).require()
    blocks = expert_blocks(sources[0], LogicalTensors(sources[0]), SCORED, Findings())
    mover = ExpertSelection(recipe, open_inputs(sources, Findings()), blocks, Findings())
    scores = {block.path: tuple(map(float, row)) for block, row in zip(blocks, rows, strict=True)}
    for block, experts in mover.moves(scores).items():
        kept = [expert.origins[0].expert for expert in experts]
        assert kept == sorted(kept, key=lambda expert: expert or 0)
        gone = set(range(SCORED)) - set(kept)
        row = scores[block]
        assert len(gone) == drop
        assert all(
            (row[one], -one) <= (row[other], -other) for one in gone for other in kept if other is not None
        )
