"""Stacks of experts as ModelOpt stores those of Llama 4 and gpt-oss: [experts, in, out] under one scale."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import TOKENIZER_FILES, read_config, read_tensors, write_checkpoint
from kits.float64_merges import slerp
from kits.merge_cases import INLINE, digests, merge
from kits.quantised_merges import Numbers, changed_bytes, check_stored_alike, e2m1_numbers, same_bytes
from kits.quantised_numbers import Values, e4m3_values, fp8_matrices, nvfp4, parent_numbers
from kits.recipe_maker import linear as mean_of
from kits.recipe_maker import one as one_model

from raymerge.api import AuditOptions, audit, plan, verify
from raymerge.merge_plan import memory
from raymerge.options import RunOptions

EXPERTS, HIDDEN, WIDTH = 3, 32, 48


class Layout(NamedTuple):
    model_type: str
    algorithm: str

    @property
    def experts(self) -> str:
        block = "mlp" if self.model_type == "gpt_oss" else "feed_forward"
        return f"model.layers.0.{block}.experts"

    @property
    def config(self) -> dict[str, Any]:
        table = {"quant_method": "modelopt", "quant_algo": self.algorithm, "ignore": ["*router*"]}
        sizes = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": WIDTH}
        return {
            "model_type": self.model_type,
            "num_hidden_layers": 1,
            **sizes,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "quantization_config": table,
        }


LAYOUTS = (Layout("llama4_text", "NVFP4"), Layout("gpt_oss", "NVFP4"), Layout("llama4_text", "FP8"))
STACKS = {"gate_up_proj": (HIDDEN, 2 * WIDTH), "down_proj": (WIDTH, HIDDEN)}


class Model(NamedTuple):
    root: Path
    values: Mapping[str, Values]
    """What stacks mean: [experts, in, out]."""


def _model(root: Path, seed: int, layout: Layout, *, is_plain: bool = False) -> Model:
    tensors, values = {}, {}
    shapes = {"model.embed_tokens.weight": (16, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes[f"{layout.experts.removesuffix('experts')}router.weight"] = (EXPERTS, HIDDEN)
    for name, shape in shapes.items():
        tensors[name] = torch.from_numpy(parent_numbers(name, shape, seed)).bfloat16()
    for word, (inputs, outputs) in STACKS.items():
        name = f"{layout.experts}.{word}"
        numbers = parent_numbers(name, (EXPERTS, inputs, outputs), seed) * (1 + seed)
        if is_plain:
            tensors[name] = torch.from_numpy(numbers).bfloat16()
            values[name] = tensors[name].double().numpy()
            continue
        parts, values[name] = _stored(numbers, layout.algorithm)
        tensors |= {f"{name}{ending}": each for ending, each in parts.items()}
        tensors[f"{name}_input_scale"] = torch.tensor(0.25 * (1 + seed))
    config = layout.config
    if is_plain:
        del config["quantization_config"]
    write_checkpoint(root, tensors, config, files=2, extra=TOKENIZER_FILES)
    return Model(root, values)


def _stored(numbers: Values, algorithm: str) -> tuple[dict[str, torch.Tensor], Values]:
    if algorithm == "FP8":
        coded = fp8_matrices(numbers.reshape(1, -1, numbers.shape[-1]))
        parts = {"": coded.codes.view(numbers.shape), "_weight_scale": coded.scales.float().reshape(())}
        return parts, coded.values.reshape(numbers.shape)
    turned = np.ascontiguousarray(numbers.swapaxes(1, 2))
    coded = nvfp4(turned.reshape(-1, turned.shape[-1]), float(np.abs(numbers).max()), is_factor=True)
    codes, scales = (each.view(*turned.shape[:2], -1).mT.contiguous() for each in (coded.codes, coded.scales))
    assert coded.whole is not None
    parts = {"": codes, "_weight_scale": scales, "_weight_scale_2": coded.whole}
    return parts, coded.values.reshape(turned.shape).swapaxes(1, 2)


def _read(root: Path, layout: Layout) -> dict[str, Numbers]:
    stored = read_tensors(root)
    names = {f"{layout.experts}.{word}" for word in STACKS}
    return {name: _numbers(stored, name, layout.algorithm) for name in names}


def _numbers(stored: Mapping[str, torch.Tensor], name: str, algorithm: str) -> Numbers:
    codes, scales = stored[name], stored[f"{name}_weight_scale"].double()
    if algorithm == "FP8":
        number = codes.view(torch.uint8).numpy()
        steps = 2.0 ** (np.maximum((number >> 3) & 15, 1) - 10.0) * scales.numpy()
        return Numbers(e4m3_values()[number] * scales.numpy(), steps, 448 * scales.numpy() + 0 * steps)
    steps = (scales * stored[f"{name}_weight_scale_2"].double()).float().double().mT.numpy()
    pairs = codes.mT.reshape(*steps.shape, 8).numpy()
    turned = e2m1_numbers(pairs, steps)
    return Numbers(*(each.swapaxes(1, 2) for each in (turned.values, turned.steps, turned.limits)))


def _check(root: Path, layout: Layout, expected: Mapping[str, Values]) -> None:
    for name, have in _read(root, layout).items():
        errors = np.abs(have.values - expected[name])
        assert np.all(errors <= have.steps / 2 + 1e-6 * np.abs(expected[name]).max()), name
        assert np.all(np.abs(expected[name]) <= have.limits * 1.17), name


def _matrices(layout: Layout, name: str, stack: Values) -> list[Values]:
    """One for each projection of each expert: gate and up take turns in gpt-oss."""
    if name.endswith("down_proj"):
        return list(stack)
    halves = (stack[..., 0::2], stack[..., 1::2])
    if layout.model_type != "gpt_oss":
        halves = (stack[..., :WIDTH], stack[..., WIDTH:])
    return [half[expert] for expert in range(EXPERTS) for half in halves]


@pytest.fixture(scope="module", params=LAYOUTS, ids=" ".join)
def layout(request: pytest.FixtureRequest) -> Layout:
    made: Layout = request.param
    return made


@pytest.fixture(scope="module")
def parents(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    root = tmp_path_factory.mktemp("parents")
    return [_model(root / name, seed, layout) for seed, name in enumerate("ab")]


def _weighted(parents: list[Model], *weights: float) -> dict[str, Any]:
    models = [
        {"model": str(each.root), "parameters": {"weight": weight}}
        for each, weight in zip(parents, weights, strict=True)
    ]
    return {"merge_method": "linear", "models": models}


@pytest.mark.sample(2)
def test_a_stack_merged_with_itself_is_itself(layout: Layout, parents: list[Model], tmp_path: Path) -> None:
    for model in parents:
        assert all(
            (_read(model.root, layout)[name].values == each).all() for name, each in model.values.items()
        )
    merge(mean_of(parents[1].root, parents[1].root), tmp_path / "out")
    assert changed_bytes(tmp_path / "out", parents[1].root) == set()


@pytest.mark.sample(1)
def test_stacks_are_merged_by_the_numbers_that_they_mean(
    layout: Layout, parents: list[Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within half a step, under one scale, that of inputs the largest; the same bytes in any pieces."""
    recipe = _weighted(parents, 0.3, 0.7)
    merge(recipe, tmp_path / "out")
    check_stored_alike(tmp_path / "out", parents[0].root)
    assert read_config(tmp_path / "out") == layout.config
    first, second = (each.values for each in parents)
    _check(tmp_path / "out", layout, {name: 0.3 * each + 0.7 * second[name] for name, each in first.items()})
    stored = read_tensors(tmp_path / "out")
    assert [float(stored[f"{layout.experts}.{word}_input_scale"]) for word in STACKS] == [0.5, 0.5]
    assert verify(tmp_path / "out").problems == ()
    assert not audit(tmp_path / "out", AuditOptions(1.0, seed=3), INLINE).problems
    monkeypatch.setattr(memory, "_CODES_PIECE", 1)
    merge(recipe, tmp_path / "pieces", RunOptions(inline=True, threads=2))
    one, two = (digests(tmp_path / each) for each in ("out", "pieces"))
    weights = [name for name in one if name.endswith(".safetensors")]
    assert [one[name] for name in weights] == [two[name] for name in weights]


@pytest.mark.sample(2)
def test_stacks_meet_plain_ones_in_the_same_order(
    layout: Layout, parents: list[Model], tmp_path: Path
) -> None:
    plain = _model(tmp_path / "plain", 2, layout, is_plain=True)
    merge(_weighted([parents[0], plain], 0.5, 0.5), tmp_path / "out")
    first = parents[0].values
    expected = {name: (each + plain.values[name]) / 2 for name, each in first.items()}
    _check(tmp_path / "out", layout, expected)


@pytest.mark.sample(1)
def test_methods_that_need_each_expert_make_plain_numbers(
    layout: Layout, parents: list[Model], tmp_path: Path
) -> None:
    recipe = {
        "merge_method": "slerp",
        "base_model": str(parents[0].root),
        "models": [{"model": str(parents[1].root)}],
        "parameters": {"t": 0.4},
    }
    (problem,) = plan(recipe).problems
    assert "2 tensors are" in str(problem)
    assert "with one scale for all" in str(problem)
    assert "slerp does not look at each element alone" in str(problem)
    merge({**recipe, "out_format": [{"role": "expert", "value": "bf16"}, "same"]}, tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    for name, first in parents[0].values.items():
        matrices = (_matrices(layout, name, each) for each in (first, parents[1].values[name]))
        have = _matrices(layout, name, found[name].double().numpy())
        for one, other, number in zip(*matrices, have, strict=True):
            errors = np.abs(np.array(slerp(0.4)([one, other])) - number).min(0)
            assert np.all(errors <= 2.0**-8 * np.abs(number) + 1e-6)
    merge(one_model(parents[0].root, out_format="bf16"), tmp_path / "plain")
    stored = read_tensors(tmp_path / "plain")
    for name, values in parents[0].values.items():
        assert torch.equal(stored[name], torch.from_numpy(values.copy()).float().bfloat16())
    assert not [name for name in stored if "scale" in name]
    assert "quantization_config" not in read_config(tmp_path / "plain")


def test_experts_that_are_stored_one_by_one_are_named(tmp_path: Path) -> None:
    layout = LAYOUTS[0]
    root = _model(tmp_path / "a", 1, layout).root
    tensors = read_tensors(_model(tmp_path / "b", 2, layout, is_plain=True).root)
    gate, up = tensors.pop(f"{layout.experts}.gate_up_proj").chunk(2, dim=2)
    stacks = {"gate": gate, "up": up, "down": tensors.pop(f"{layout.experts}.down_proj")}
    tensors |= {
        f"{layout.experts}.{number}.{word}_proj.weight": matrix.mT.contiguous()
        for word, matrices in stacks.items()
        for number, matrix in enumerate(matrices)
    }
    config = {key: each for key, each in layout.config.items() if key != "quantization_config"}
    write_checkpoint(tmp_path / "c", tensors, config, extra=TOKENIZER_FILES)
    (problem,) = plan(mean_of(root, tmp_path / "c")).problems
    assert "2 tensors are ModelOpt nvfp4 in stacks" in str(problem)
    assert f"in {tmp_path / 'c'} the experts lie in another order" in str(problem)
    assert "linear" not in str(problem)


def test_a_scheme_of_cached_keys_has_no_place_in_the_table_of_mxfp4(tmp_path: Path) -> None:
    layout = LAYOUTS[1]
    root = _model(tmp_path / "a", 1, layout).root
    forms = [{"glob": "*gate_up_proj", "value": "mxfp4"}, "bf16"]
    assert not plan(one_model(root, out_format=forms)).problems
    config = layout.config
    config["quantization_config"]["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    write_checkpoint(tmp_path / "b", read_tensors(root), config, extra=TOKENIZER_FILES)
    (problem,) = plan(one_model(tmp_path / "b", out_format=forms)).problems
    assert "caches keys and values as codes (kv_cache_scheme)" in str(problem)


def test_a_copied_stack_has_its_own_scales(layout: Layout, parents: list[Model], tmp_path: Path) -> None:
    rule = {"role": "expert", "merge_method": "passthrough", "sources": [str(parents[0].root)]}
    merge({**_weighted(parents, 1, 1), "methods": [rule]}, tmp_path / "out")
    before = read_tensors(parents[0].root)
    after = read_tensors(tmp_path / "out")
    experts = [name for name in before if ".experts." in name]
    assert all(same_bytes(before[name], after[name]) for name in experts)


UNREAD: Mapping[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
    "a scale for each expert": {
        "": (torch.uint8, (EXPERTS, 16, 24)),
        "_weight_scale": (torch.float8_e4m3fn, (EXPERTS, 2, 24)),
        "_weight_scale_2": (torch.float32, (EXPERTS,)),
    },
    "codes packed along the last axis": {
        "": (torch.uint8, (EXPERTS, 32, 16)),
        "_weight_scale": (torch.float8_e4m3fn, (EXPERTS, 32, 2)),
        "_weight_scale_2": (torch.float32, ()),
    },
}


@pytest.mark.parametrize("kind", UNREAD)
def test_other_stacks_are_refused_with_all_that_belongs_to_them(kind: str, tmp_path: Path) -> None:
    """Scales of inputs too, which would be another model's else."""
    layout, roots = LAYOUTS[0], [tmp_path / each for each in "ab"]
    name = f"{layout.experts}.down_proj"
    for seed, root in enumerate(roots):
        model = read_tensors(_model(tmp_path / f"read_{root.name}", seed, layout).root)
        for ending, (dtype, shape) in UNREAD[kind].items():
            model[f"{name}{ending}"] = torch.ones(shape).to(dtype)
        write_checkpoint(root, model, layout.config, extra=TOKENIZER_FILES)
    (problem,) = plan(mean_of(*roots)).problems[:1]
    assert "4 tensors are quantised as NVFP4 in stacks of experts, other than ModelOpt's" in str(problem)
    rule = {"glob": "*down_proj*", "merge_method": "passthrough", "sources": [str(roots[1])]}
    apart = [{**rule, "glob": each} for each in ("*down_proj", "*down_proj_weight_scale*")]
    (problem, *_) = plan({**mean_of(*roots), "methods": apart}).problems
    assert "1 tensors are quantised as NVFP4 in stacks" in str(problem)
    assert f"{name}_input_scale" in str(problem)
    merge({**mean_of(*roots), "methods": [rule]}, tmp_path / "out")
    before, after = read_tensors(roots[1]), read_tensors(tmp_path / "out")
    assert after[f"{name}_input_scale"] == before[f"{name}_input_scale"] == 0.5
