"""Quantised experts: apart, fused, in stacks, and matrix by matrix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import llama_config, read_config, read_tensors, write_checkpoint, write_json
from kits.expert_models import submitted
from kits.marks import slow_but
from kits.merge_cases import merge
from kits.plan_damage import tampered
from kits.plan_maker import Specs, good, header_checkpoint, llama_specs, refusals
from kits.quantised_merges import MAKERS, changed_bytes, read_numbers, same_bytes
from kits.quantised_models import QuantisedModel, deepseek_v3
from kits.quantised_numbers import Values, e4m3_values, fp8_blocks
from kits.recipe_maker import linear, one, piece, stack

from raymerge.api import conversion, plan, verify
from raymerge.checkpoints.quantisation.encoding import usual_quant_spec
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.dtypes import DType
from raymerge.errors import Problem, UserError
from raymerge.merge_plan.check import check_plan

KINDS = {"DeepSeek-V3 F32": "fp8_block", "gpt-oss": "mxfp4", "Kimi-K2-Thinking": "int4"}
"""Layouts, and what their format is called."""
CONVERT = "raymerge convert MODEL --to bf16 -o OUT"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, QuantisedModel]:
    """A model of each layout, whose experts are in one group."""
    root = tmp_path_factory.mktemp("models")
    found = {kind: MAKERS[kind](root / kind, 1) for kind in KINDS}
    for model in found.values():
        config = read_config(model.root)
        groups = {key: 1 for key in ("n_group", "topk_group") if key in config}
        write_json(model.root / "config.json", config | groups)
    return found


def _kept(tensors: Mapping[str, torch.Tensor], ids: list[int]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        number = _NUMBER.search(name)
        if number is not None:
            if int(number[0]) in ids:
                found[_NUMBER.sub(str(ids.index(int(number[0]))), name)] = tensor
        elif re.search(r"\.mlp\.(gate|router|experts)\.", name):
            found[name] = tensor[ids]
        else:
            found[name] = tensor
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_are_kept_take_their_scales_along(
    kind: str, models: Mapping[str, QuantisedModel], tmp_path: Path
) -> None:
    base, ids = models[kind].root, [2, 0]
    (tmp_path / "base").symlink_to(base)
    out = submitted(tmp_path, "out", {"keep": ids})
    found, wanted = read_tensors(out), _kept(read_tensors(base), ids)
    assert found.keys() == wanted.keys()
    assert all(same_bytes(found[name], tensor) for name, tensor in wanted.items())
    assert read_config(out)["quantization_config"] == read_config(base)["quantization_config"]
    assert verify(out).problems == ()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("form", "is_short"), [("fp8_block", True), ("fp8_channel", False)])
def test_experts_that_a_merge_left_plain_can_be_changed(form: str, is_short: bool, tmp_path: Path) -> None:
    """Its list of plain modules has one entry for the experts of a layer; one for each does as well."""
    model = deepseek_v3(tmp_path / "model", 1)
    config = read_config(model.root) | {"n_group": 1, "topk_group": 1}
    write_json(model.root / "config.json", config)
    formats = [{"role": "expert", "value": "bf16"}, {"value": form}]
    merge(one(str(model.root), out_format=formats), tmp_path / "base")
    config = read_config(tmp_path / "base")
    table = config["quantization_config"]
    key = "ignore" if "ignore" in table else "modules_to_not_convert"
    assert not [each for each in table[key] if re.search(r"experts\W+[0-9]", each)]
    if not is_short:
        names = [name.removesuffix(".weight") for name in model.values if ".experts." in name]
        table[key] = [*(each for each in table[key] if ".experts" not in each), *names]
        write_json(tmp_path / "base" / "config.json", config)
    out = submitted(tmp_path, "out", {"keep": [2, 0]})
    found, wanted = read_tensors(out), _kept(read_tensors(tmp_path / "base"), [2, 0])
    assert found.keys() == wanted.keys()
    assert all(same_bytes(found[name], tensor) for name, tensor in wanted.items())
    listed = read_config(out)["quantization_config"][key]
    assert {each for each in listed if re.search(r"experts\W+[0-9]", each)} == (
        set() if is_short else {n.removesuffix(".weight") for n in wanted if ".experts." in n}
    )
    assert verify(out).problems == ()


def _said(recipe: Mapping[str, Any]) -> list[str]:
    try:
        return [str(problem) for problem in plan(recipe).problems]
    except UserError as error:
        return [str(problem) for problem in error.problems]


def _dense(root: Path, *words: str) -> Path:
    """A dense Llama of which the matrices with these words in their names are block FP8."""
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for name, (dtype, shape) in llama_specs(2).items():
        is_code = any(word in name for word in words)
        specs[name] = (DType.F8_E4M3 if is_code else dtype, shape)
        if is_code:
            specs[f"{name}_scale_inv"] = (DType.F32, (1, 1))
    table = {"quantization_config": FP8} if words else {}
    return header_checkpoint(root, specs, {**llama_config(layers=2), **table})


@pytest.mark.parametrize("words", [("_proj.weight",), ("self_attn",), ("mlp",)])
def test_a_mixture_is_not_built_of_codes(words: tuple[str, ...], tmp_path: Path) -> None:
    one, other = _dense(tmp_path / "a", *words), _dense(tmp_path / "b")
    experts = [{"source_model": str(root)} for root in (one, other)]
    (said,) = _said({"base_model": str(other), "gate_mode": "random", "experts": experts})
    assert said.startswith(f"{one}: it is quantised (fp8_block), and mixtures are built of plain numbers.")
    assert CONVERT in said


def test_an_adapter_on_codes_is_refused_with_the_way_round(
    models: Mapping[str, QuantisedModel], tmp_path: Path
) -> None:
    model = models["DeepSeek-V3 F32"]
    matrices = {name: torch.from_numpy(values) for name, values in model.values.items() if values.ndim == 2}
    adapter = tiny_lora(tmp_path / "lora", matrices, 3, targets=("kv_b_proj",))
    said = _said(one(f"{model.root}+{adapter}"))
    assert any(
        "is quantised as fp8_block, and adapters are only added to plain numbers" in each for each in said
    )
    assert all(f"({CONVERT!r}) and name OUT+ADAPTER" in each for each in said)


HIDDEN, WIDTH, EXPERTS = 128, 96, 2
"""Gate ends at row 96 of 192, which is within the first block of 128 rows."""
BLOCK = "model.layers.0.mlp.experts"
SHAPES = {
    f"{BLOCK}.gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN),
    f"{BLOCK}.down_proj": (EXPERTS, HIDDEN, WIDTH),
}
OUT_IN, IN_OUT = "qwen3_moe", "qwen3_vl_moe"
"""Families that store experts [out, in], and transposed."""
CONFIG = {
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
    "tie_word_embeddings": False,
}


class Model(NamedTuple):
    """A checkpoint and what its experts mean."""

    root: Path
    family: str
    values: Mapping[str, Values]


def _numbers(family: str, seed: int) -> dict[str, Values]:
    random = np.random.default_rng(seed)
    made = {name: random.standard_normal(shape) * 0.05 for name, shape in SHAPES.items()}
    return {
        n: np.ascontiguousarray(each.swapaxes(1, 2)) if family == IN_OUT else each for n, each in made.items()
    }


def _rest() -> dict[str, torch.Tensor]:
    gate, norm = torch.ones(EXPERTS, HIDDEN).bfloat16(), torch.ones(HIDDEN).bfloat16()
    return {"model.layers.0.mlp.gate.weight": gate, "model.norm.weight": norm}


def _coded(root: Path, family: str, seed: int) -> Model:
    tensors, values = _rest(), {}
    for name, numbers in _numbers(family, seed).items():
        experts = [fp8_blocks(expert, "F32") for expert in numbers]
        codes = torch.stack([each.codes.view(torch.uint8) for each in experts])
        tensors[name] = codes.view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.stack([each.scales for each in experts])
        values[name] = np.stack([each.values for each in experts])
    config = {**CONFIG, "model_type": family, "quantization_config": FP8}
    return Model(write_checkpoint(root, tensors, config), family, values)


def _plain(root: Path, family: str, seed: int, *, alone: bool = False) -> Model:
    """The same in bfloat16, stacked or one expert by one."""
    tensors, values = _rest(), {}
    for name, numbers in _numbers(family, seed).items():
        stack = torch.from_numpy(numbers).bfloat16()
        values[name] = stack.double().numpy()
        if not alone:
            tensors[name] = stack
            continue
        words = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for expert, matrix in enumerate(stack if family == OUT_IN else stack.mT):
            for word, part in zip(words, matrix.chunk(len(words)), strict=True):
                tensors[f"{BLOCK}.{expert}.{word}.weight"] = part.contiguous()
    return Model(write_checkpoint(root, tensors, {**CONFIG, "model_type": family}), family, values)


@pytest.fixture(scope="module", params=[OUT_IN, IN_OUT])
def parents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    root, family = tmp_path_factory.mktemp("parents"), request.param
    return _coded(root / "a", family, 1), _coded(root / "b", family, 2)


def _check_codes(root: Path, wanted: Mapping[str, Values]) -> None:
    """Each number is within half a code of what is wanted."""
    found = read_tensors(root)
    for name, values in wanted.items():
        codes, scales = found[name], found[f"{name}_scale_inv"]
        assert scales.shape == (EXPERTS, -(-values.shape[1] // 128), -(-values.shape[2] // 128))
        rows, columns = values.shape[1:]
        spread = scales.double().numpy().repeat(128, 1).repeat(128, 2)[:, :rows, :columns]
        have = e4m3_values()[codes.view(torch.uint8).numpy()] * spread
        assert np.all(np.abs(have - values) <= (np.abs(values) / 16 + spread / 1024) * (1 + 1e-5)), name


def _mean(one: Model, other: Model) -> dict[str, Values]:
    return {name: (values + other.values[name]) / 2 for name, values in one.values.items()}


def test_a_merge_is_the_merge_of_what_the_parents_mean(parents: tuple[Model, Model], tmp_path: Path) -> None:
    merge(linear(*parents), tmp_path / "out")
    _check_codes(tmp_path / "out", _mean(*parents))
    assert verify(tmp_path / "out").problems == ()


def test_a_model_merged_with_itself_is_itself(parents: tuple[Model, Model], tmp_path: Path) -> None:
    twin = _coded(tmp_path / "twin", parents[0].family, 1)
    merge(linear(parents[0], twin), tmp_path / "out")
    assert changed_bytes(tmp_path / "out", parents[0].root) == set()


@pytest.mark.sample(1)
@pytest.mark.parametrize("alone", [False, True])
def test_a_plain_parent_meets_a_quantised_one(
    alone: bool, parents: tuple[Model, Model], tmp_path: Path
) -> None:
    plain = _plain(tmp_path / "plain", parents[0].family, 3, alone=alone)
    merge(linear(parents[0], plain), tmp_path / "codes")
    _check_codes(tmp_path / "codes", _mean(parents[0], plain))
    merge(linear(plain, parents[0]), tmp_path / "plainly")
    found = read_tensors(tmp_path / "plainly")
    assert found.keys() == read_tensors(plain.root).keys()
    down = _mean(plain, parents[0])[f"{BLOCK}.down_proj"][1]
    have = found[f"{BLOCK}.1.down_proj.weight"] if alone else found[f"{BLOCK}.down_proj"][1]
    wanted = down.T if alone and plain.family == IN_OUT else down
    assert np.allclose(have.double().numpy(), wanted, rtol=2**-8, atol=1e-7)


def test_it_is_converted_both_ways(parents: tuple[Model, Model], tmp_path: Path) -> None:
    one = parents[0]
    merge(conversion(one.root, "bf16"), tmp_path / "plain")
    found = read_tensors(tmp_path / "plain")
    assert not any(name.endswith("_scale_inv") for name in found)
    for name, values in one.values.items():
        assert torch.equal(found[name], torch.from_numpy(values).float().bfloat16()), name
    back = conversion(tmp_path / "plain", "fp8_block")
    if one.family == IN_OUT:
        (refused,) = plan(back).problems
        assert "loaders take experts in it that lie [experts, out, in]" in refused.what
        return
    merge(back, tmp_path / "codes")
    _check_codes(tmp_path / "codes", {name: found[name].double().numpy() for name in one.values})


_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", slow_but(MAKERS, "DeepSeek-V3 F32", "Kimi-K2-Thinking", "gpt-oss"))
def test_a_stack_moves_codes_with_their_scales(kind: str, tmp_path: Path) -> None:
    one, other = (MAKERS[kind](tmp_path / name, seed) for seed, name in enumerate("ab"))
    recipe = stack(piece(one, 0, 2), piece(other, 1, 2), piece(one, 1, 2))
    merge({**recipe, "shard_size": 200_000}, tmp_path / "out")
    # The layer for further tokens goes behind the last.
    origins = {0: (one, 0), 1: (one, 1), 2: (other, 1), 3: (one, 1), 4: (one, 2)}
    assert read_config(tmp_path / "out") == {
        **read_config(one.root),
        "num_hidden_layers": 4,
        "quantization_config": _table(one.root, {layer: own for layer, (_, own) in origins.items()}),
        **_types(one.root),
    }
    stored = {model.root: read_tensors(model.root) for model in (one, other)}
    found = read_tensors(tmp_path / "out")
    wanted = {name: tensor for name, tensor in stored[one.root].items() if not _LAYER.match(name)}
    for layer, (model, own) in origins.items():
        head = f"model.layers.{own}."
        for name, tensor in stored[model.root].items():
            if name.startswith(head):
                wanted[f"model.layers.{layer}.{name.removeprefix(head)}"] = tensor
    assert found.keys() == wanted.keys()
    assert all(same_bytes(found[name], tensor) for name, tensor in wanted.items())
    verdict = verify(tmp_path / "out")
    assert verdict.problems == ()
    assert verdict.against_plan
    assert verdict.files > 1


def _table(root: Path, origins: Mapping[int, int]) -> dict[str, Any]:
    """The table of the stack: modules that it names by layers stand for each layer that is made of theirs."""
    table = read_config(root)["quantization_config"]
    if "quantized_layers" not in table:
        return dict(table)
    modules = {
        f"model.layers.{layer}.{_LAYER.sub('', path)}": value
        for path, value in table["quantized_layers"].items()
        for layer, own in origins.items()
        if path.startswith(f"model.layers.{own}.")
    }
    return {**table, "quantized_layers": modules}


def _types(root: Path) -> dict[str, Any]:
    """``layer_types`` of the stack, where the family has it."""
    types = read_config(root).get("layer_types")
    return {"layer_types": [types[0], types[1], types[1], types[1]]} if types else {}


def test_merged_layers_in_a_stack_are_encoded_under_their_new_names(tmp_path: Path) -> None:
    one, other = (MAKERS["DeepSeek-V3 F32"](tmp_path / name, seed) for seed, name in enumerate("ab"))
    slices = [piece((one, other), 0, 2), piece((one, other), 1, 2)]
    merge({"merge_method": "linear", "parameters": {"weight": 0.5}, "slices": slices}, tmp_path / "out")
    assert verify(tmp_path / "out").problems == ()
    found = read_numbers(tmp_path / "out")
    for name in one.quantised:
        if not name.startswith("model.layers.1."):
            continue
        mean = (one.values[name] + other.values[name]) / 2
        for number in (1, 2):
            have = found[name.replace(".1.", f".{number}.", 1)]
            assert np.all(np.abs(have.values - mean) <= have.steps / 2 * (1 + 1e-5))


HEADS, STACKED = "model.layers.0.self_attn.heads.weight", "model.layers.0.mlp.experts"
STACKED_CONFIG = {
    "model_type": "mystery_moe",
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_experts": 4,
    "moe_intermediate_size": 96,
    "tie_word_embeddings": False,
}
STACKED_IN_OUT = {f"{STACKED}.gate_up_proj": (4, 256, 192), f"{STACKED}.down_proj": (4, 96, 256)}
STACKED_OUT_IN = {name: (experts, rows, columns) for name, (experts, columns, rows) in STACKED_IN_OUT.items()}


def _model(root: Path, shapes: Mapping[str, tuple[int, ...]], *, coded: bool = False, **more: Any) -> Path:
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        "model.norm.weight": (DType.BF16, (256,)),
        "model.layers.0.mlp.gate.weight": (DType.BF16, (4, 256)),
    }
    for name, shape in shapes.items():
        specs |= _coded_stack(name, shape) if coded else {name: (DType.BF16, shape)}
    table = {"quantization_config": FP8} if coded else {}
    return header_checkpoint(root, specs, {**STACKED_CONFIG, **table, **more})


def _coded_stack(name: str, shape: tuple[int, ...]) -> Specs:
    scales = usual_quant_spec(FP8_BLOCK, shape).scales_shape
    return {name: (DType.F8_E4M3, shape), f"{name}_scale_inv": (DType.F32, scales)}


@pytest.mark.parametrize("more", [{}, {"dtype": "bfloat16"}], ids=["same", "bf16"])
@pytest.mark.parametrize("name", [HEADS, f"{STACKED}.weird"])
@pytest.mark.parametrize(
    "shape", [(4, 200, 256), (2, 255, 256)], ids=["fewer scale rows", "as many scale rows"]
)
def test_a_stack_that_is_one_tensor_needs_rows_that_bands_divide(
    shape: tuple[int, ...], name: str, more: Mapping[str, Any], tmp_path: Path
) -> None:
    """Scale rows counted through the stack would be others than those of its matrices."""
    roots = [_model(tmp_path / each, {name: shape}, coded=True) for each in "ab"]
    said = refusals(linear(*roots, **more))
    wanted = f"1 tensors are several matrices with 2 rows of scales for {shape[1]} rows each"
    assert said
    assert all(wanted in each and f"{name} {list(shape)}" in each for each in said)
    passed = good(one(roots[0]))
    assert {each.method for each in passed.plan.expressions} == {"copy"}


def test_numbers_are_not_made_codes_of_such_a_stack(tmp_path: Path) -> None:
    """The base alone is stored so, and is not read."""
    base, plain = (_model(tmp_path / each, {HEADS: (4, 200, 256)}, coded=each == "a") for each in "ab")
    recipe = one(plain, base_model=base)
    (said,) = refusals(recipe)
    assert "1 tensors are several matrices with 2 rows of scales for 200 rows each" in said


def test_bands_through_several_matrices_contradict_a_plan(tmp_path: Path) -> None:
    roots = [_model(tmp_path / each, {HEADS: (4, 256, 256)}, coded=True) for each in "ab"]
    made = good(linear(*roots))
    (row, *_) = made.rows(HEADS)
    changed = tampered(made.plan, "parts", "shape", {row["first_part"]: [8, 128, 256]})
    assert check_plan(changed) == ()
    # As many elements and scale rows, of which most begin in one matrix and end in the next.
    changed = tampered(made.plan, "parts", "shape", {row["first_part"]: [16, 64, 256]})
    assert [_broken(each) for each in check_plan(changed)] == ["inputs"]


def test_codes_that_are_made_through_several_matrices_contradict_a_plan(tmp_path: Path) -> None:
    made = good(
        linear(_model(tmp_path / "a", STACKED_OUT_IN, model_type="qwen3_moe"), out_format="fp8_block")
    )
    parts = [row["first_part"] for row in made.rows(f"{STACKED}.down_proj")]
    changed = tampered(made.plan, "parts", "shape", {part: [8, 128, 96] for part in parts})
    assert check_plan(changed) == ()
    changed = tampered(made.plan, "parts", "shape", {part: [16, 64, 96] for part in parts})
    assert {_broken(each) for each in check_plan(changed)} == {"ops"}


def _broken(problem: Problem) -> str:
    """The table in which scale rows go through several matrices."""
    assert "its scale rows are not those of its matrices" in problem.what
    return problem.where.split("table ")[1].split(",")[0]


@pytest.mark.parametrize("rows", [1, 100, 128, 200, 255, 256, 384])
def test_runs_whose_bands_can_be_counted_are_told(rows: int) -> None:
    """Against the rows of scales that each row of the run has."""
    quant_spec = usual_quant_spec(FP8_BLOCK, (3, rows, 8))
    for start, count in ((0, 1), (0, 2), (1, 2), (0, 3), (2, 1)):
        own = [matrix * quant_spec.grid[0] + row // 128 for matrix in range(count) for row in range(rows)]
        as_one = (np.arange(count * rows) // 128).tolist()
        assert quant_spec.has_scale_rows_of(start * rows * 8, count * rows * 8) == (own == as_one)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (HEADS, (4, 200, 256)),
        (HEADS, (4, 256, 256)),
        (f"{STACKED}.weird", (4, 200, 256)),
        (f"{STACKED}.gate_up_proj_bias", (4, 192)),
        ("model.layers.0.self_attn.rel_bias", (4, 64)),
    ],
)
def test_what_is_no_weight_of_a_module_is_no_block_fp8(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    root = _model(tmp_path / "a", {name: shape})
    (said,) = refusals(linear(root, out_format=[{"glob": name, "value": "fp8_block"}]))
    kind = "weights of modules in it and stacks of experts, and nothing else"
    taken = "experts in it that lie [experts, out, in]" if name.endswith(".weird") else f"the {kind}"
    assert f"loaders take {taken}" in said
    assert f"{{glob: '{name}', value: bf16}}" in said


def test_experts_that_lie_transposed_are_no_block_fp8(tmp_path: Path) -> None:
    for family in ("llama4_text", "gpt_oss", "qwen3_vl_moe"):
        root = _model(tmp_path / family, STACKED_IN_OUT, model_type=family)
        (said,) = refusals(linear(root, out_format=[{"role": "expert", "value": "fp8_block"}, "same"]))
        assert "2 tensors cannot be stored as fp8_block" in said
        assert "loaders take experts in it that lie [experts, out, in], and these do not" in said
    square = {f"{STACKED}.gate_up_proj": (4, 192, 192)}
    (said,) = refusals(linear(_model(tmp_path / "square", square, hidden_size=192), out_format="fp8_block"))
    assert "[experts, out, in], and config and family do not tell that these do" in said


@pytest.mark.parametrize("asked", ["fp8_block", [{"role": "expert", "value": "fp8_block"}, "same"]])
def test_experts_with_a_row_for_each_output_are_encoded_and_their_biases_are_not(
    asked: object, tmp_path: Path
) -> None:
    bias = f"{STACKED}.gate_up_proj_bias"
    root = _model(tmp_path / "a", {**STACKED_OUT_IN, bias: (4, 192)}, model_type="qwen3_moe")
    made = good(linear(root, out_format=asked))
    scales = {name for name in made.names() if name.endswith("_scale_inv")}
    assert scales == {f"{name}_scale_inv" for name in STACKED_OUT_IN}


def test_stored_transposed_experts_stay_as_they_are(tmp_path: Path) -> None:
    """Who stored them so has a loader for them."""
    roots = [_model(tmp_path / each, STACKED_IN_OUT, coded=True, model_type="qwen3_vl_moe") for each in "ab"]
    made = good(linear(*roots, out_format="fp8_block"))
    assert {f"{name}_scale_inv" for name in STACKED_IN_OUT} < set(made.names())
