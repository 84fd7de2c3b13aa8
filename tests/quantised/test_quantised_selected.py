"""Which tensors a line of ``out_format`` speaks of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kits.plan_maker import good, header_checkpoint, refusals

from raymerge.dtypes import DType

LAYER, MTP = "model.layers.0", "model.layers.1"
ATTENTION = {f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.indexer.wk"}
KEPT = f"{LAYER}.self_attn.indexer.weights_proj"


def _model(root: Path) -> Path:
    """A DeepSeek-V3.2 with a layer for further tokens, and all that is no matrix of a module."""
    shapes = {
        "model.embed_tokens.weight": (32, 64),
        "model.norm.weight": (64,),
        f"{LAYER}.self_attn.q_proj.weight": (64, 64),
        f"{LAYER}.self_attn.q_proj.bias": (64,),
        f"{LAYER}.self_attn.sinks": (4, 64),
        f"{LAYER}.self_attn.indexer.wk.weight": (32, 64),
        f"{LAYER}.self_attn.conv1d.weight": (64, 1, 4),
        f"{LAYER}.input_layernorm.weight": (64,),
        f"{LAYER}.mlp.gate.weight": (2, 64),
        f"{LAYER}.mlp.gate.e_score_correction_bias": (2,),
        **{f"{each}.mlp.experts.{n}.up_proj.weight": (32, 64) for each in (LAYER, MTP) for n in (0, 1)},
        f"{MTP}.enorm.weight": (64,),
        f"{MTP}.eh_proj.weight": (64, 128),
        f"{MTP}.mlp.gate.weight": (2, 64),
        f"{MTP}.shared_head.head.weight": (32, 64),
    }
    config = {"model_type": "deepseek_v32", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    sizes = {"hidden_size": 64, "n_routed_experts": 2, "vocab_size": 32, "tie_word_embeddings": False}
    specs = {name: (DType.BF16, shape) for name, shape in shapes.items()}
    specs[f"{KEPT}.weight"] = (DType.F32, (8, 64))
    return header_checkpoint(root, specs, {**config, **sizes})


def _recipe(root: Path, asked: object) -> dict[str, Any]:
    return {"merge_method": "passthrough", "models": [{"model": root}], "out_format": asked}


def _coded(root: Path, asked: object) -> set[str]:
    names = good(_recipe(root, asked)).names()
    return {name.removesuffix(".weight_scale_inv") for name in names if name.endswith("_scale_inv")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory.mktemp("selected") / "a")


def _experts(*layers: str) -> set[str]:
    return {f"{layer}.mlp.experts.{number}.up_proj" for layer in layers for number in (0, 1)}


def test_what_a_16_bit_model_has_in_float32_stays_so(root: Path) -> None:
    assert _coded(root, "fp8_block") == ATTENTION | _experts(LAYER, MTP)
    asked = [{"glob": f"{KEPT}.*", "value": "fp8_block"}, "same"]
    assert _coded(root, asked) == {KEPT}


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        ({"role": "attention"}, ATTENTION),
        ({"role": "expert"}, _experts(LAYER, MTP)),
        ({"role": "mtp"}, _experts(MTP)),
        ({"role": "expert", "layers": 0}, _experts(LAYER)),
        ({"layers": 0}, ATTENTION | _experts(LAYER)),
        ({"role": ["router", "attention"]}, ATTENTION | {f"{LAYER}.mlp.gate", f"{MTP}.mlp.gate"}),
    ],
)
def test_a_role_speaks_of_matrices_of_modules(selector: dict[str, Any], wanted: set[str], root: Path) -> None:
    """Norms, biases and bare parameters of the same role stay as they are, and nobody has to list them."""
    assert _coded(root, [{**selector, "value": "fp8_block"}, "same"]) == wanted


def test_what_a_line_does_not_speak_of_is_for_the_next_one(root: Path) -> None:
    asked = [{"role": "attention", "value": "fp8_block"}, {"glob": "*.q_proj.bias", "value": "int4"}]
    (said,) = refusals(_recipe(root, asked))
    assert "1 tensors cannot be stored as int4: compressed-tensors packs the weight of one module" in said


@pytest.mark.parametrize("asked", [[{"role": "norm"}], [{"role": "router_bias"}]])
def test_a_line_that_speaks_of_no_matrix_is_told(asked: Sequence[dict[str, Any]], root: Path) -> None:
    (said,) = refusals(_recipe(root, [*({**each, "value": "fp8_block"} for each in asked), "same"]))
    assert "this line holds for no tensor of the output" in said


def test_a_name_insists(root: Path) -> None:
    for selector in ({"glob": "*.input_layernorm.weight"}, {"filter": "input_layernorm", "role": "norm"}):
        (said,) = refusals(_recipe(root, [{**selector, "value": "fp8_block"}, "same"]))
        assert "1 tensors cannot be stored as fp8_block: fp8_block is for matrices" in said
