"""Experts stored alone, fused, transposed or interleaved meet as equal matrices; codes are never combined."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import llama_config, write_checkpoint
from kits.marks import one_in, slow_but
from kits.merges import merge_here
from kits.permuted_experts import (
    FUSED,
    GPT_OSS,
    LLAMA4,
    MIXTRAL,
    NEURONS,
    QWEN,
    WIDTH,
    make_model,
    store,
    stored,
)
from kits.plan_maker import Specs, good, header_checkpoint, llama_specs, logical_values, planned, refusals
from kits.recipe_maker import linear, one, piece, slerp, stack

from raymerge.dtypes import DType

E, F, D = 3, NEURONS, WIDTH
LAYERS = 2
ARCHITECTURE = "Mixture"
Tensors = dict[str, torch.Tensor]
FAMILIES = {
    "mixtral": replace(MIXTRAL, experts=E),
    "qwen3_moe": replace(QWEN, experts=E),
    "out_in": replace(FUSED, name="mixtral", experts=E),
    "llama4": replace(LLAMA4, shared="", experts=E),
    "gpt_oss": replace(GPT_OSS, is_biased=False, experts=E),
}
"""Families by their layouts of experts; all have the same logical tensors."""


def _matrices(seed: int) -> Tensors:
    """The logical tensors of a tiny mixture of experts, by canonical name."""
    return make_model(FAMILIES["mixtral"], seed, dtype=torch.float32)


def _experts(matrices: Tensors, layer: int, kind: str) -> torch.Tensor:
    names = [f"model.layers.{layer}.mlp.experts.{e}.{kind}_proj.weight" for e in range(E)]
    return torch.stack([matrices[name] for name in names])


def _gate_up(matrices: Tensors, layer: int) -> list[torch.Tensor]:
    return [_experts(matrices, layer, kind) for kind in ("gate", "up")]


def _stored(matrices: Tensors, layout: str) -> Tensors:
    return stored(matrices, FAMILIES[layout])


def _model(root: Path, matrices: Tensors, layout: str) -> Path:
    return store(root, matrices, FAMILIES[layout])


LAYOUTS = ("mixtral", "out_in", "llama4", "gpt_oss")
SEPARABLE = ("mixtral", "qwen3_moe", "out_in")
"""Those of which every matrix is a run of bytes, so that each can be made in its own way."""


@pytest.mark.parametrize("lead", one_in(3, LAYOUTS))
def test_every_layout_gives_every_method_the_same_matrices(tmp_path: Path, lead: str) -> None:
    order = [lead, *(layout for layout in LAYOUTS if layout != lead)]
    models = [_matrices(seed) for seed in range(4)]
    roots = [_model(tmp_path / kind, values, kind) for kind, values in zip(order, models, strict=True)]
    entries = [{"model": {"model": str(r), "override_architecture": ARCHITECTURE}} for r in roots]
    made = good({"merge_method": "linear", "models": entries, "parameters": {"weight": 1}})
    seen: Tensors = {}
    for tensor in made.names():
        for logical, values in logical_values(made, tensor).items():
            assert len(values) == 4
            for value, matrices in zip(values, models, strict=True):
                assert torch.equal(value, matrices[logical]), (tensor, logical)
            seen[logical] = values[0]
    assert seen.keys() == models[0].keys()
    assert set(made.names()) == set(_stored(models[0], lead))


@pytest.mark.parametrize("layout", ["out_in", "llama4", "gpt_oss"])
def test_a_stack_is_one_run_where_nothing_hangs_on_the_matrix(tmp_path: Path, layout: str) -> None:
    root = _model(tmp_path / "a", _matrices(0), layout)
    other = _model(tmp_path / "b", _matrices(1), "mixtral" if layout == "out_in" else "out_in")
    data = linear(root, root)
    stacks = [name for name in good(data).names() if ".layers.0." in name and ".experts." in name]
    assert len(stacks) == 2
    for name in stacks:
        (row,) = good(data).rows(name)
        assert (row["num_parts"], row["is_flat"], row["num_inputs"]) == (1, True, 2)
    # Not so with a parent that stores the matrices in another way.
    entries = [{"model": {"model": str(r), "override_architecture": ARCHITECTURE}} for r in (root, other)]
    mixed = good({**data, "models": entries})
    assert all(len(mixed.rows(name)) >= E for name in stacks)


def test_one_source_in_the_lead_s_layout_is_converted_not_copied(tmp_path: Path) -> None:
    base = _model(tmp_path / "base", _matrices(0), "mixtral")
    fused = _model(tmp_path / "fused", _matrices(1), "out_in")
    made = good(one(fused, base_model=base))
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    assert made.reads(name) == [(1, "model.layers.0.mlp.experts.down_proj")]
    assert made.fate(1, "model.layers.0.mlp.experts.down_proj")[:2] == ("converted", "dtype")
    assert made.method("model.norm.weight") == "copy"


def _merged(root: Path, data: Mapping[str, Any]) -> Tensors:
    """What a merge writes, each expert's matrix by its canonical name; for ``mixtral`` and ``out_in``."""
    words = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    logical: Tensors = {}
    for name, value in merge_here(data, root).items():
        head, _, kind = name.partition(".experts.")
        if kind == "gate_up_proj":
            gate_up = [each.chunk(2) for each in value]
            logical |= {f"{head}.experts.{e}.gate_proj.weight": pair[0] for e, pair in enumerate(gate_up)}
            logical |= {f"{head}.experts.{e}.up_proj.weight": pair[1] for e, pair in enumerate(gate_up)}
        elif kind == "down_proj":
            logical |= {f"{head}.experts.{e}.down_proj.weight": each for e, each in enumerate(value)}
        else:
            for word, plain in words.items():
                name = name.replace(word, plain)
            logical[name] = value
    return logical


def _times(number: float, pattern: str, rest: float = 1.0) -> Callable[[str], float]:
    """A weight for the matrices whose names match, and another for the rest."""
    return lambda name: number if re.search(pattern, name) else rest


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", one_in(3, SEPARABLE))
@pytest.mark.parametrize(
    ("choices", "weight"),
    [
        ([{"filter": "mlp", "value": 0.5}, {"value": 0.25}], _times(0.5, r"\.mlp\.", 0.25)),
        ([{"glob": "*.experts.1.*", "value": 3}, {"value": 1}], _times(3, r"\.experts\.1\.")),
        ([{"filter": "gate_proj", "value": 3}, {"value": 1}], _times(3, "gate_proj")),
        ([{"filter": "up_proj", "value": 3}, {"value": 1}], _times(3, r"\.up_proj")),
        ([{"glob": "*up_proj*", "value": 3}, {"value": 1}], _times(3, r"\.up_proj")),
        ([{"glob": "*.gate_proj.*", "value": 3}, {"value": 1}], _times(3, r"\.gate_proj")),
        ([{"filter": "gate_up_proj", "value": 3}, {"value": 1}], _times(3, r"\.(gate|up)_proj")),
        ([{"filter": "experts", "glob": "*_proj*", "value": 3}, {"value": 1}], _times(3, r"\.experts\.")),
        (
            [{"glob": "*.experts.gate_up_proj", "layers": 1, "value": 3}, {"value": 1}],
            _times(3, r"\.1\..*experts.*(gate|up)_proj"),
        ),
    ],
)
def test_names_in_a_recipe_mean_the_same_in_every_layout(
    tmp_path: Path, layout: str, choices: list[dict[str, Any]], weight: Callable[[str], float]
) -> None:
    _check_weights(tmp_path, layout, choices, weight)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["mixtral", "out_in"])
@pytest.mark.parametrize(
    ("choices", "weight"),
    [
        ([{"filter": "block_sparse_moe", "value": 3}, {"value": 1}], _times(3, r"\.mlp\.")),
        ([{"filter": ".w2.", "value": 3}, {"value": 1}], _times(3, "down_proj")),
    ],
)
def test_published_names_of_mixtral_mean_the_same_in_its_layouts(
    tmp_path: Path, layout: str, choices: list[dict[str, Any]], weight: Callable[[str], float]
) -> None:
    _check_weights(tmp_path, layout, choices, weight)


def _check_weights(
    tmp_path: Path, layout: str, choices: list[dict[str, Any]], weight: Callable[[str], float]
) -> None:
    a, b = _matrices(0), _matrices(1)
    roots = [_model(tmp_path / str(seed), values, layout) for seed, values in enumerate((a, b))]
    entries = [{"model": roots[0]}, {"model": roots[1], "parameters": {"weight": choices}}]
    data = {"merge_method": "linear", "models": entries, "parameters": {"weight": 1, "normalize": False}}
    found, wanted = _merged(tmp_path / "out", data), {name: a[name] + weight(name) * b[name] for name in a}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-6), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", one_in(3, SEPARABLE))
@pytest.mark.parametrize(
    ("selector", "part"),
    [
        ({"glob": "*.experts.2.*"}, ".experts.2."),
        ({"filter": "up_proj"}, ".up_proj"),
        ({"glob": "*.experts*gate_proj*"}, ".gate_proj"),
    ],
)
def test_a_rule_holds_for_the_same_matrices_in_every_layout(
    tmp_path: Path, layout: str, selector: dict[str, str], part: str
) -> None:
    a, b = _matrices(0), _matrices(1)
    roots = [_model(tmp_path / str(seed), values, layout) for seed, values in enumerate((a, b))]
    rule = {**selector, "merge_method": "passthrough", "sources": [roots[1]]}
    data = linear(*roots, methods=[rule])
    for name, value in _merged(tmp_path / "out", data).items():
        wanted = b[name] if part in name else (a[name] + b[name]) / 2
        assert torch.allclose(value, wanted, atol=1e-6), name


def test_matrices_that_lie_interleaved_cannot_be_made_in_two_ways(tmp_path: Path) -> None:
    root = _model(tmp_path / "a", _matrices(0), "gpt_oss")
    both = {"merge_method": "linear", "models": [{"model": root}] * 2}
    of_gate = [{"filter": "gate_proj", "value": 3}, {"value": 1}]
    (problem,) = refusals({**both, "parameters": {"weight": of_gate}})
    assert "interleaved with others" in problem
    of_expert = [{"glob": "*.experts.1.*", "value": 3}, {"value": 1}]
    good({**both, "parameters": {"weight": of_expert}})


def test_a_selector_that_matches_nothing_is_a_note(tmp_path: Path) -> None:
    root = _model(tmp_path / "a", _matrices(0), "out_in")
    choices = [
        {"filter": "self_atn", "value": 3},
        {"glob": "*.experts.7.*", "value": 2},
        {"role": "mtp", "value": 2},
        {"filter": "mlp", "value": 4},
        {"value": 1},
    ]
    entries = [{"model": root}, {"model": root, "parameters": {"weight": choices}}]
    made = good({"merge_method": "linear", "models": entries, "parameters": {"weight": 1}})
    notes = [note for note in made.plan.manifest["notes"] if "matches no tensor" in note]
    assert [note.partition(": ")[2].partition(" matches")[0] for note in notes] == [
        "models[1].parameters.weight[0]: filter: self_atn",
        "models[1].parameters.weight[1]: glob: *.experts.7.*",
        "models[1].parameters.weight[2]: role: [mtp]",
    ]


def test_a_parameter_of_a_source_stored_otherwise_sees_its_roles_and_names(tmp_path: Path) -> None:
    a, b = _matrices(0), _matrices(1)
    base, other = _model(tmp_path / "a", a, "mixtral"), _model(tmp_path / "b", b, "out_in")
    choices = [{"role": "router", "value": 5}, {"role": "expert", "filter": "mlp", "value": 3}, {"value": 1}]
    entries = [{"model": base}, {"model": other, "parameters": {"weight": choices}}]
    made = good({"merge_method": "linear", "models": entries, "parameters": {"weight": 1}})
    assert made.weights("model.layers.0.block_sparse_moe.experts.1.w2.weight") == [1, 3]
    assert made.weights("model.layers.0.block_sparse_moe.gate.weight") == [1, 5]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["mixtral", "out_in"])
def test_missing_matrices_of_an_expert_are_the_base_s_and_no_others(tmp_path: Path, layout: str) -> None:
    a, b = _matrices(0), _matrices(1)
    lost = [f"model.layers.0.mlp.experts.1.{word}_proj.weight" for word in ("up", "down")]
    stored = _stored(b, "mixtral")
    for word in ("w2", "w3"):
        del stored[f"model.layers.0.block_sparse_moe.experts.1.{word}.weight"]
    base = _model(tmp_path / "base", a, layout)
    config = json.loads((base / "config.json").read_text())
    lacking = write_checkpoint(tmp_path / "lacking", stored, config)
    data = linear(base, lacking, base_model=base)
    assert "lacks 2 tensors" in refusals(data)[0]
    found = _merged(tmp_path / "out", {**data, "missing_tensors": "copy_base"})
    for name, value in found.items():
        assert torch.allclose(value, a[name] if name in lost else (a[name] + b[name]) / 2, atol=1e-6), name


@pytest.mark.sample(4)
@pytest.mark.parametrize("is_base", [True, False])
@pytest.mark.parametrize(
    ("stored", "count"),
    [
        ({"1.w2.weight": (D, F), "1.down_proj.weight": (D, F)}, 1),
        ({"down_proj": (E, D, F), "1.down_proj.weight": (D, F)}, 1),
        ({"w2_weight": (E, D, F), "down_proj": (E, D, F)}, E),
        ({"w13_weight": (E, 2 * F, D), "gate_up_proj": (E, 2 * F, D)}, 2 * E),
        ({"w13_weight": (E, 2 * F, D), "1.up_proj.weight": (F, D)}, 1),
    ],
)
def test_an_expert_stored_by_two_names_is_refused(
    tmp_path: Path, stored: dict[str, tuple[int, ...]], count: int, is_base: bool
) -> None:
    other = _model(tmp_path / "other", _matrices(1), "out_in")
    for order in (1, -1):
        sound = {n: v for n, v in _stored(_matrices(0), "out_in").items() if ".0.mlp.experts." not in n}
        names = list(stored)[::order]
        twice = sound | {f"model.layers.0.mlp.experts.{n}": torch.ones(stored[n]) for n in names}
        root = write_checkpoint(tmp_path / f"twice{order}", twice, FAMILIES["out_in"].config)
        roots = (root, other) if is_base else (other, root)
        problems = refusals(linear(*roots, base_model=str(roots[0]), extra_tensors="drop"))
        assert any(f"{count} matrices of experts are stored twice" in each for each in problems), problems
        assert any(all(f"layers.0.mlp.experts.{n}" in each for n in names) for each in problems), problems


def test_a_stack_of_unknown_order_is_one_tensor_for_element_wise_methods_only(tmp_path: Path) -> None:
    specs: Specs = {
        "model.embed_tokens.weight": (DType.BF16, (8, 4)),
        "model.layers.0.mlp.experts.gate_up_proj": (DType.BF16, (2, 4, 4)),
    }
    config = {"model_type": "nobody_knows", "num_hidden_layers": 1, "tie_word_embeddings": True}
    a, b = (header_checkpoint(tmp_path / name, specs, config) for name in "ab")
    assert len(good(linear(a, b)).rows("model.layers.0.mlp.experts.gate_up_proj")) == 1
    (problem,) = refusals(slerp(a, b))
    assert (
        "1 tensors hold several experts in an order that model_type 'nobody_knows' does not tell" in problem
    )


STACKS: Mapping[str, tuple[str, dict[str, Any], Callable[[Tensors, int], Tensors]]] = {
    "step": (
        "step3p5",
        {"moe_num_experts": E, "moe_intermediate_size": F},
        lambda m, layer: {
            f"moe.{kind}_proj.weight": _experts(m, layer, kind) for kind in ("gate", "up", "down")
        },
    ),
    "aria": (
        "aria_text",
        {"moe_num_experts": E, "intermediate_size": F},
        lambda m, layer: {
            "mlp.experts.fc1.weight": torch.cat(_gate_up(m, layer), dim=1).transpose(1, 2),
            "mlp.experts.fc2.weight": _experts(m, layer, "down").transpose(1, 2),
        },
    ),
    "vllm": (
        "qwen3_moe",
        {"num_experts": E, "moe_intermediate_size": F},
        lambda m, layer: {
            "mlp.experts.w13_weight": torch.cat(_gate_up(m, layer), dim=1),
            "mlp.experts.w2_weight": _experts(m, layer, "down"),
        },
    ),
    "inkling": (
        "inkling_text",
        {"n_routed_experts": E, "intermediate_size": F},
        lambda m, layer: {
            "mlp.experts.w13_weight": torch.stack(_gate_up(m, layer), dim=2).flatten(1, 2),
            "mlp.experts.w2_weight": _experts(m, layer, "down"),
        },
    ),
}
"""Stacks by other names: model type, config, and the tensors of a layer below its path."""


@pytest.mark.parametrize("kind", list(STACKS))
def test_stacks_by_other_names_hold_the_same_matrices(tmp_path: Path, kind: str) -> None:
    family, fields, stored = STACKS[kind]
    models, roots = [_matrices(seed) for seed in range(2)], []
    for number, matrices in enumerate(models):
        tensors = {name: value for name, value in matrices.items() if ".experts." not in name}
        for layer in range(LAYERS):
            made = stored(matrices, layer).items()
            tensors |= {f"model.layers.{layer}.{name}": value.contiguous() for name, value in made}
        config = {"model_type": family, "num_hidden_layers": LAYERS, "hidden_size": D, **fields}
        roots.append(
            write_checkpoint(tmp_path / str(number), tensors, {**config, "tie_word_embeddings": False})
        )
    made = good(slerp(*roots))
    seen: Tensors = {}
    for tensor in made.names():
        for logical, values in logical_values(made, tensor).items():
            seen[logical] = values[0]
            assert all(torch.equal(v, m[logical]) for v, m in zip(values, models, strict=True)), logical
    assert seen.keys() == models[0].keys()


@pytest.mark.parametrize("name", ["mlp.deep.weight", "mixture.deep", "mlp.experts.deep"])
def test_a_stack_of_as_many_matrices_as_experts_is_none_for_statistics(tmp_path: Path, name: str) -> None:
    specs: Specs = {
        "model.embed_tokens.weight": (DType.BF16, (8, 4)),
        f"model.layers.0.{name}": (DType.BF16, (3, 4, 4)),
        "model.layers.0.mamba.conv1d.weight": (DType.BF16, (3, 1, 4)),
    }
    config = {"model_type": "nobody_knows", "num_hidden_layers": 1, "tie_word_embeddings": True}
    a, b = (header_checkpoint(tmp_path / n, specs, {**config, "num_experts": 3}) for n in "ab")
    good(linear(a, b))
    (problem,) = refusals(slerp(a, b))
    assert "1 tensors hold several experts in an order that model_type 'nobody_knows' does not" in problem
    assert f"model.layers.0.{name} [3, 4, 4]" in problem
    c, d = (header_checkpoint(tmp_path / n, specs, {**config, "num_experts": 5}) for n in "cd")
    assert bool(refusals(slerp(c, d))) == ("experts" in name)


def test_random_methods_draw_by_logical_name_whatever_the_layout(tmp_path: Path) -> None:
    base, tuned = _matrices(0), _matrices(1)
    drawn = []
    for layout in ("mixtral", "out_in"):
        a, b = _model(tmp_path / f"{layout}0", base, layout), _model(tmp_path / f"{layout}1", tuned, layout)
        entries = [{"model": b, "parameters": {"weight": 1, "density": 0.5}}]
        made = good({"merge_method": "dare_linear", "base_model": a, "models": entries})
        drawn.append(sorted(made.plan["parts"].column("logical").to_pylist()))
    assert drawn[0] == drawn[1]


def test_a_layer_used_twice_draws_twice(tmp_path: Path) -> None:
    a, b = (_model(tmp_path / str(seed), _matrices(seed), "out_in") for seed in range(2))
    twice, parameters = stack(*[piece((a, b), 0, 1)] * 2), {"weight": 1, "density": 0.5}
    made = good({**twice, "merge_method": "dare_linear", "base_model": a, "parameters": parameters})
    names = made.plan["parts"].column("logical").to_pylist()
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in names
    assert len(set(names)) == len(names)
    assert set(made.plan["ops"].column("copy_of").to_pylist()) == {-1}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def _codes(root: Path, extra: Specs, **config: Any) -> Path:
    return header_checkpoint(root, {**llama_specs(2), **extra}, {**llama_config(layers=2), **config})


def _fp8(root: Path) -> Path:
    extra: Specs = {WEIGHT: (DType.F8_E4M3, (64, 32)), f"{WEIGHT}_scale_inv": (DType.F32, (1, 1))}
    return _codes(root, extra, quantization_config=FP8)


def _codebook(root: Path) -> Path:
    """GPTQ, whose codes raymerge does not read, behind a plain name."""
    extra: Specs = {WEIGHT: (DType.I32, (64, 4)), f"{WEIGHT}.qzeros": (DType.I32, (1, 4))}
    return _codes(root, extra, quantization_config={"quant_method": "gptq"})


def test_combining_codes_that_are_not_read_is_refused_and_still_accounts_for_everything(
    tmp_path: Path,
) -> None:
    made = planned(linear(_codebook(tmp_path / "a"), _codebook(tmp_path / "b")))
    problems = [str(problem) for problem in made.plan.problems]
    assert len(problems) == 2
    assert all("2 tensors are quantised as GPTQ, which raymerge" in each for each in problems)
    assert all(f"{WEIGHT} I32[64, 4]; {WEIGHT}.qzeros I32[1, 4]" in problem for problem in problems)
    assert made.fates() == {(s.index, name) for s in made.sources for name in s.checkpoint.tensors}


@pytest.mark.parametrize("key", ["dtype", "out_dtype"])
def test_another_dtype_of_block_fp8_is_written_without_scales(tmp_path: Path, key: str) -> None:
    made = good(one(_fp8(tmp_path / "a"), **{key: "bfloat16"}))
    assert (made.method(WEIGHT), made.dtype(WEIGHT)) == ("passthrough", "BF16")
    assert f"{WEIGHT}_scale_inv" not in made.names()
    assert made.fate(0, f"{WEIGHT}_scale_inv") == ("converted", "dtype", WEIGHT)
    assert "quantization_config" not in made.config


@pytest.mark.parametrize("key", ["dtype", "out_dtype"])
def test_another_dtype_of_codes_that_are_not_read_is_refused(tmp_path: Path, key: str) -> None:
    (problem,) = refusals(one(_codebook(tmp_path / "a"), **{key: "bfloat16"}))
    assert "2 tensors are quantised as GPTQ" in problem
    assert "without dtype" in problem


@pytest.mark.parametrize("is_first", [True, False])
def test_a_quantised_parent_beside_a_plain_one(tmp_path: Path, is_first: bool) -> None:
    """The first one says how the output is stored."""
    plain, fp8 = _codes(tmp_path / "plain", {}), _fp8(tmp_path / "fp8")
    made = good(linear(*((fp8, plain) if is_first else (plain, fp8))))
    assert made.dtype(WEIGHT) == ("F8_E4M3" if is_first else "BF16")
    assert (f"{WEIGHT}_scale_inv" in made.names()) == is_first
    (row,) = made.rows(WEIGHT)
    assert [read["scales"] >= 0 for read in made.inputs(row)] == [is_first, not is_first]
    assert made.config.get("quantization_config") == (FP8 if is_first else None)


def test_a_quantised_base_that_only_gives_names_gives_the_format_too(tmp_path: Path) -> None:
    """Else sums would be written as codes without a scale."""
    entries = [{"model": _codes(tmp_path / n, {}), "parameters": {"weight": 1}} for n in "ab"]
    made = good({"merge_method": "linear", "base_model": _fp8(tmp_path / "base"), "models": entries})
    assert (made.dtype(WEIGHT), made.method(f"{WEIGHT}_scale_inv")) == ("F8_E4M3", "scales")
    unread = _codes(
        tmp_path / "u8", {WEIGHT: (DType.U8, (64, 32))}, quantization_config={"quant_method": "mystery"}
    )
    problems = refusals({"merge_method": "linear", "base_model": unread, "models": entries})
    assert any("quantised as mystery" in problem for problem in problems)


@pytest.mark.parametrize("is_read", [True, False])
def test_codes_in_a_fused_stack_are_found_behind_plain_names(tmp_path: Path, is_read: bool) -> None:
    plain = _model(tmp_path / "plain", _matrices(0), "mixtral")
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        name: (DType.F32, tuple(value.shape)) for name, value in _stored(_matrices(1), "out_in").items()
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.mlp.experts.down_proj"
        specs[name] = (DType.F8_E4M3 if is_read else DType.U8, (E, D, F))
        specs[f"{name}_scale_inv" if is_read else f"{name}_means"] = (DType.F32, (E, 1, 1))
    said = FP8 if is_read else {"quant_method": "mystery"}
    config = {**FAMILIES["out_in"].config, "quantization_config": said}
    fused = header_checkpoint(tmp_path / "fused", specs, config)
    if not is_read:
        assert any("tensors are quantised as mystery" in each for each in refusals(linear(plain, fused)))
        return
    made = good(linear(plain, fused))
    experts = [name for name in made.names() if name.endswith("w2.weight")]
    assert len(experts) == LAYERS * E
    for name in experts:
        (row,) = made.rows(name)
        assert [read["scales"] >= 0 for read in made.inputs(row)] == [False, True]


def test_a_stack_of_experts_has_one_format(tmp_path: Path) -> None:
    root = _model(tmp_path / "a", _matrices(0), "out_in")
    data = one(root)
    made = good({**data, "out_format": [{"filter": ".w2.", "value": "bf16"}]})
    assert made.dtype("model.layers.0.mlp.experts.down_proj") == "BF16"
    assert made.dtype("model.layers.0.mlp.experts.gate_up_proj") == "F32"
    (problem,) = refusals({**data, "out_format": [{"glob": "*.experts.1.*", "value": "bf16"}]})
    assert "names some of the matrices that 4 tensors hold, and a tensor has one format" in problem


BLOCK = "model.layers.0.block_sparse_moe"


def _recipe(root: Path, listed: str, router: str) -> dict[str, Any]:
    places = {name: _model(root / name, _matrices(0), "mixtral") for name in sorted(set(listed))}
    models = [{"model": places[name], "parameters": {"weight": 0.5}} for name in listed]
    return {"merge_method": "linear", "models": models, "router": places[router]}


@pytest.mark.parametrize("listed", slow_but(["ab", "aab", "aba", "abaa"], "abaa"))
def test_the_router_is_that_of_a_model_however_often_it_is_listed(tmp_path: Path, listed: str) -> None:
    made = good(_recipe(tmp_path, listed, "a"))
    assert made.method(f"{BLOCK}.gate.weight") == "copy"
    ((source, _),) = made.reads(f"{BLOCK}.gate.weight")
    assert made.sources[source].name.endswith("a")
    assert len(made.weights(f"{BLOCK}.experts.1.w1.weight")) == len(listed)


def test_a_rule_of_the_recipe_takes_a_model_as_often_as_it_is_listed(tmp_path: Path) -> None:
    data = _recipe(tmp_path, "aab", "a")
    rule = {"role": "norm", "merge_method": "passthrough", "sources": [str(data["models"][0]["model"])]}
    (found,) = {problem.split(":")[1].strip() for problem in refusals({**data, "methods": [rule]})}
    assert found == "methods[0]"
