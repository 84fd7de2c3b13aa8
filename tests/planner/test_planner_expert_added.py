"""What is added has to mean what it meant: depth, activation, weighing; and none of it is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.expert_models import good_set, refused_set
from kits.plan_maker import Specs, header_checkpoint, llama_specs

from raymerge.dtypes import DType

HIDDEN, WIDTH = 32, 16


def _config(family: str, layers: int, **more: Any) -> dict[str, Any]:
    said = {
        "model_type": family,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        **more,
    }
    return {key: value for key, value in said.items() if value is not None}


def _matrices(head: str) -> Specs:
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {f"{head}.{kind}_proj.weight": (DType.BF16, shape) for kind, shape in shapes.items()}


def _specs(layers: int, sparse: range | None = None) -> dict[str, Any]:
    """A model with experts in some layers (all by default), and feed-forward layers in the others."""
    found = {name: spec for name, spec in llama_specs(layers).items() if ".mlp." not in name}
    for layer in range(layers):
        head = f"model.layers.{layer}.mlp"
        if sparse is not None and layer not in sparse:
            found |= _matrices(head)
            continue
        found[f"{head}.gate.weight"] = (DType.BF16, (4, HIDDEN))
        for expert in range(4):
            found |= _matrices(f"{head}.experts.{expert}")
    return found


def _mixture(
    root: Path, family: str = "qwen3_moe", layers: int = 2, sparse: range | None = None, **more: Any
) -> Path:
    return header_checkpoint(root, _specs(layers, sparse), _config(family, layers, **more))


def _dense(root: Path, layers: int = 2, extra: Specs | None = None, **more: Any) -> Path:
    family = more.pop("family", "qwen3")
    config = _config(family, layers, num_local_experts=None, num_experts_per_tok=None, **more)
    return header_checkpoint(root, {**_specs(layers, range(0)), **(extra or {})}, config)


def _problems(base: Path, other: Path, **added: Any) -> list[str]:
    return refused_set({"base_model": base, "experts": {"add": [{"model": other, **added}]}})


def test_experts_of_a_deeper_mixture_are_not_left_out(tmp_path: Path) -> None:
    base, deep = _mixture(tmp_path / "m"), _mixture(tmp_path / "deep", layers=5)
    (problem,) = _problems(base, deep)
    assert f"it has experts in 5 layers, and {base} has experts in 2" in problem
    assert "there is no place for those of layers 2, 3, 4" in problem
    assert "experts.add[0].model" in problem
    (problem,) = _problems(deep, base)
    assert "it has experts in 2 layers" in problem
    assert "there are none for layers 2, 3, 4" in problem


def test_layers_of_a_deeper_dense_model_are_not_left_out(tmp_path: Path) -> None:
    base, deep = _mixture(tmp_path / "m"), _dense(tmp_path / "deep", 3)
    (problem,) = _problems(base, deep, row_of=0)
    assert "it has feed-forward layers in 3 layers" in problem
    assert "there is no place for those of layer 2" in problem
    assert _problems(base, _dense(tmp_path / "same"), row_of=0) == []


def test_the_base_keeps_its_own_feed_forward_layers(tmp_path: Path) -> None:
    base, dense = _mixture(tmp_path / "m", layers=3, sparse=range(1, 3)), _dense(tmp_path / "d", 3)
    made = good_set({"base_model": base, "experts": {"add": [{"model": dense, "row_of": 0}]}})
    notes = made.plan.manifest["notes"]
    assert f"{base} keeps its feed-forward layers where it has no experts: layer 0" in notes
    assert made.fate(1, "model.layers.0.mlp.up_proj.weight")[1] == "only_experts_taken"
    everywhere = _mixture(tmp_path / "everywhere", layers=3)
    (problem,) = _problems(base, everywhere)
    assert "there is no place for those of layer 0" in problem


def test_what_a_silent_config_means(tmp_path: Path) -> None:
    silent = _mixture(tmp_path / "silent")
    (problem,) = _problems(silent, _mixture(tmp_path / "gelu", hidden_act="gelu"))
    assert f"the activation of {tmp_path / 'gelu'} is gelu, that of {silent} is silu" in problem
    assert _problems(silent, _mixture(tmp_path / "silu", hidden_act="silu")) == []
    gemma = _dense(tmp_path / "gemma", family="gemma2", hidden_act="silu", hidden_activation=None)
    (problem,) = _problems(silent, gemma, row_of=0)
    assert "is gelu_pytorch_tanh, that of" in problem
    (problem,) = _problems(silent, _dense(tmp_path / "dense", hidden_act="gelu"), row_of=1)
    assert "is gelu, that of" in problem
    unknown = _mixture(tmp_path / "unknown", "unheard_of")
    assert _problems(unknown, _mixture(tmp_path / "relu", hidden_act="relu")) == []


def test_rows_of_another_router_mean_nothing(tmp_path: Path) -> None:
    base = _mixture(tmp_path / "m", norm_topk_prob=True)
    other = _mixture(tmp_path / "other", "glm4_moe")
    (problem,) = _problems(base, other)
    assert "makes weights of its scores by sigmoid, and that of" in problem
    assert "by softmax" in problem
    assert "row_of" in problem
    assert _problems(base, other, row_of=1) == []


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ({"norm_topk_prob": True}, {}, "sum to 1 in {base}, and in {other} they do not"),
        ({}, {"norm_topk_prob": True}, "sum to 1 in {other}, and in {base} they do not"),
        (
            {},
            {"routed_scaling_factor": 2.5},
            "{other} multiplies what its experts give by 2.5, and {base} by 1",
        ),
        ({"routed_scaling_factor": 2.5}, {"routed_scaling_factor": 2.5}, None),
        ({"norm_topk_prob": False}, {}, None),
    ],
)
@pytest.mark.parametrize("row_of", [{}, {"row_of": 0}])
def test_experts_are_weighed_as_they_were(
    mine: dict[str, Any], theirs: dict[str, Any], expected: str | None, row_of: dict[str, int], tmp_path: Path
) -> None:
    base, other = _mixture(tmp_path / "m", **mine), _mixture(tmp_path / "o", **theirs)
    problems = _problems(base, other, **row_of)
    if expected is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert expected.format(base=base, other=other) in problems[0]


def test_all_differences_are_told_at_once(tmp_path: Path) -> None:
    base = _mixture(tmp_path / "m", "deepseek_v3", layers=2)
    other = _mixture(tmp_path / "o", layers=3, hidden_act="gelu")
    assert len(_problems(base, other)) == 5


def test_how_many_experts_a_token_goes_to_is_told(tmp_path: Path) -> None:
    base, other = _mixture(tmp_path / "m"), _mixture(tmp_path / "o", num_experts_per_tok=1)
    made = good_set({"base_model": base, "experts": {"add": [{"model": other}]}})
    assert f"{other} sends each token to 1 of its experts, the output to 2" in made.plan.manifest["notes"]


def test_biases_of_added_experts_are_not_left_out(tmp_path: Path) -> None:
    base = _mixture(tmp_path / "m")
    biases = {f"model.layers.{n}.mlp.gate_proj.bias": (DType.BF16, (WIDTH,)) for n in range(2)}
    (problem,) = _problems(base, _dense(tmp_path / "d", extra=biases), row_of=0)
    assert f"2 tensors of its experts have no place in those of {base}" in problem
    numbered = {f"model.layers.0.mlp.experts.{n}.up_proj.bias": (DType.BF16, (WIDTH,)) for n in range(4)}
    other = header_checkpoint(tmp_path / "o", {**_specs(2), **numbered}, _config("qwen3_moe", 2))
    (problem,) = _problems(base, other, experts=[1, 3])
    assert f"2 tensors of its experts have no place in those of {base}" in problem


def test_the_base_itself_is_like_itself(tmp_path: Path) -> None:
    base = _mixture(tmp_path / "m", layers=3, sparse=range(1, 3))
    made = good_set({"base_model": base, "experts": {"add": [{"model": base, "experts": [1]}]}})
    assert not [note for note in made.plan.manifest["notes"] if "keeps its feed-forward" in note]
