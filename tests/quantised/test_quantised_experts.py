"""Recipes that change experts, build mixtures or align experts, on quantised models.

What only moves is moved with its scales, byte for byte; whatever would compute on codes is refused by the
format's name, with the command that helps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import llama_config, read_tensors, write_json
from kits.expert_models import submitted
from kits.merge_cases import merge
from kits.plan_maker import header_checkpoint, llama_specs
from kits.quantised_merges import MAKERS, config_of, plain_twin, same_bytes
from kits.quantised_models import QuantisedModel, deepseek_v3

from raymerge.api import plan, verify
from raymerge.dtypes import DType
from raymerge.errors import UserError

KINDS = {"DeepSeek-V3 F32": "fp8_block", "gpt-oss": "mxfp4", "Kimi-K2-Thinking": "int4"}
"""Layouts, and what their format is called."""
CONVERT = "raymerge convert MODEL --to bf16 -o OUT"
_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, QuantisedModel]:
    """A model of each layout, whose experts are in one group."""
    root = tmp_path_factory.mktemp("models")
    found = {kind: MAKERS[kind](root / kind, 1) for kind in KINDS}
    for model in found.values():
        config = config_of(model.root)
        groups = {key: 1 for key in ("n_group", "topk_group") if key in config}
        write_json(model.root / "config.json", config | groups)
    return found


def _kept(tensors: Mapping[str, torch.Tensor], ids: list[int]) -> dict[str, torch.Tensor]:
    """The tensors of a model of which these experts are kept, in this order."""
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
    assert config_of(out)["quantization_config"] == config_of(base)["quantization_config"]
    assert verify(out).problems == ()


@pytest.mark.parametrize(("form", "is_short"), [("fp8_block", True), ("fp8_channel", False)])
def test_experts_that_a_merge_left_plain_can_be_changed(form: str, is_short: bool, tmp_path: Path) -> None:
    """Its list of plain modules has one entry for the experts of a layer; one for each does as well."""
    model = deepseek_v3(tmp_path / "model", 1)
    config = config_of(model.root) | {"n_group": 1, "topk_group": 1}
    write_json(model.root / "config.json", config)
    formats = [{"role": "expert", "value": "bf16"}, {"value": form}]
    merge(
        {"merge_method": "passthrough", "models": [{"model": str(model.root)}], "out_format": formats},
        tmp_path / "base",
    )
    config = config_of(tmp_path / "base")
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
    listed = config_of(out)["quantization_config"][key]
    assert {each for each in listed if re.search(r"experts\W+[0-9]", each)} == (
        set() if is_short else {n.removesuffix(".weight") for n in wanted if ".experts." in n}
    )
    assert verify(out).problems == ()


def _said(recipe: Mapping[str, Any]) -> list[str]:
    """What a plan has against a recipe."""
    try:
        return [str(problem) for problem in plan(recipe).problems]
    except UserError as error:
        return [str(problem) for problem in error.problems]


CHANGES: dict[str, dict[str, Any]] = {
    "merged": {"experts": {"merge": [[0, 1], [2, 3]]}},
    "one merged": {"experts": {"merge": [[0], [1], [2, 3]]}},
    "plain ones added": {"experts": {"add": [{"model": "plain"}]}},
    "another dtype": {"experts": {"keep": [3, 2, 1, 0]}, "dtype": "bfloat16"},
}


@pytest.mark.parametrize(("kind", "change"), list(zip(cycle(KINDS), CHANGES, strict=False)))
def test_experts_that_would_be_computed_are_refused(
    kind: str,
    change: str,
    models: Mapping[str, QuantisedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = models[kind]
    if "plain" in change:
        plain_twin(model, tmp_path / "plain")
    said = _said({"base_model": str(model.root), **CHANGES[change]})
    assert any(f"tensors are quantised as {KINDS[kind]}, and recipes that build" in each for each in said)
    assert any(CONVERT in each for each in said)


@pytest.mark.parametrize("kind", KINDS)
def test_dense_models_and_scores_of_codes_are_refused(
    kind: str, models: Mapping[str, QuantisedModel]
) -> None:
    base = {"base_model": str(models[kind].root)}
    assert _said({**base, "experts": {"dense": "mean"}})
    (said,) = _said({**base, "experts": {"drop": 2, "scores": "weights"}})
    assert "give the scores in a file" in said.lower()


@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_are_codes_are_not_aligned(
    kind: str, models: Mapping[str, QuantisedModel], tmp_path: Path
) -> None:
    one, other = models[kind], MAKERS[kind](tmp_path / "other", 2)
    entries = [{"model": str(each.root), "parameters": {"weight": 1}} for each in (one, other)]
    said = _said({"merge_method": "linear", "models": entries, "align": "experts"})
    for model in (one, other):
        (own,) = [each for each in said if each.startswith(f"{model.root}: ") and KINDS[kind] in each]
        assert "only plain numbers are aligned" in own
        assert CONVERT in own
        assert "Or remove 'align'." in own


FP8_TABLE = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _dense(root: Path, *words: str) -> Path:
    """A dense Llama of which the matrices with these words in their names are block FP8."""
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for name, (dtype, shape) in llama_specs(2).items():
        is_code = any(word in name for word in words)
        specs[name] = (DType.F8_E4M3 if is_code else dtype, shape)
        if is_code:
            specs[f"{name}_scale_inv"] = (DType.F32, (1, 1))
    table = {"quantization_config": FP8_TABLE} if words else {}
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
    said = _said({"merge_method": "passthrough", "models": [{"model": f"{model.root}+{adapter}"}]})
    assert any(
        "is quantised as fp8_block, and adapters are only added to plain numbers" in each for each in said
    )
    assert all(f"({CONVERT!r}) and name OUT+ADAPTER" in each for each in said)
