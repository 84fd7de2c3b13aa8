"""Two checkpoints compared: bytes whatever the files, numbers whatever the layout and the format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint, write_json
from kits.expert_models import save, sparse
from kits.quantised_merges import read_numbers
from kits.quantised_models import QuantisedModel, deepseek_v3, gpt_oss, kimi_k2_thinking
from kits.tensor_scaled_models import fp8_mixture, nvfp4_llama

from raymerge.api import diff
from raymerge.verifier.compare import ComparedTensor, Comparison, Status

QUERY = "model.layers.0.self_attn.q_proj.weight"


def tensor(found: Comparison, name: str) -> ComparedTensor:
    return next(each for each in found.tensors if each.name == name)


def counts(found: Comparison) -> dict[str, int]:
    """Tensors by status."""
    total: dict[str, int] = {}
    for role in found.roles:
        for status, count in role.counts.items():
            total[status] = total.get(status, 0) + count
    return total


def changed(root: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """A tiny Llama with tensors in place of its own, or, where they are None, without them."""
    tensors = {**read_tensors(root), **changes}
    left = {name: each for name, each in tensors.items() if each is not None}
    extra = {name: (root / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    return write_checkpoint(target, left, json.loads((root / "config.json").read_text()), extra=extra)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_llama(tmp_path_factory.mktemp("llama") / "model", 0)
    return changed(root, root.parent / "plain")


def test_files_do_not_matter(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "one", 0)
    tiny_llama(tmp_path / "three", 0, files=3)
    found = diff(tmp_path / "one", tmp_path / "three")
    assert found.is_equal
    assert counts(found) == {"equal": 30}
    assert (found.tensors, found.config) == ((), ())


def test_one_byte_makes_a_difference(llama: Path, tmp_path: Path) -> None:
    query = read_tensors(llama)[QUERY].clone()
    query.view(torch.uint8)[-1, -2] ^= 1
    found = diff(llama, changed(llama, tmp_path / "other", **{QUERY: query}))
    assert not found.is_equal
    assert counts(found) == {"equal": 29, "different": 1}
    assert tensor(found, QUERY).status is Status.DIFFERENT


def test_figures_are_those_of_float64(llama: Path, tmp_path: Path) -> None:
    a = read_tensors(llama)[QUERY].double()
    b = (a * 1.5 + 0.01).bfloat16()
    found = tensor(diff(llama, changed(llama, tmp_path / "other", **{QUERY: b})), QUERY)
    apart = b.double() - a
    assert found.relative_error == pytest.approx(float(apart.norm() / a.norm()), rel=1e-5)
    assert found.max_abs_error == pytest.approx(float(apart.abs().max()), rel=1e-6)
    cosine = float((a.flatten() @ b.double().flatten()) / a.norm() / b.double().norm())
    assert found.cosine == pytest.approx(cosine, abs=1e-6)


def test_a_role_counts_as_one_tensor(llama: Path, tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    ours = read_tensors(llama)
    theirs = {name: ours[name] * factor for name, factor in zip(names, (1.25, 3.0), strict=True)}
    found = diff(llama, changed(llama, tmp_path / "other", **theirs))
    role = next(each for each in found.roles if each.role == "attention")
    alike = [each for name, each in ours.items() if "self_attn" in name and name in theirs]
    apart = math.sqrt(sum(float((theirs[n].double() - ours[n].double()).square().sum()) for n in names))
    size = math.sqrt(sum(float(each.double().square().sum()) for each in alike))
    assert role.relative_error == pytest.approx(apart / size, rel=1e-5)
    assert role.worst == names[1]
    assert role.counts == {"equal": 10, "different": 2}


def test_a_large_tensor_is_compared_in_runs(tmp_path: Path) -> None:
    """Several runs, the only difference in the last one."""
    config, numbers = llama_config(), torch.arange(3_000_000, dtype=torch.float32).remainder(97) - 48
    other = numbers.clone()
    other[-1] += 100
    for name, each in (("a", numbers), ("b", other)):
        write_checkpoint(tmp_path / name, {"x.weight": each}, config)
    found = tensor(diff(tmp_path / "a", tmp_path / "b"), "x.weight")
    assert found.max_abs_error == 100
    assert found.relative_error == pytest.approx(100 / float(numbers.double().norm()), rel=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_figures_hold_where_squares_leave_float32(size: float, tmp_path: Path) -> None:
    a = torch.tensor([1.0, 2.0, 3.0]) * size
    for name, each in (("a", a), ("b", a * 2)):
        write_checkpoint(tmp_path / name, {"x.weight": each}, llama_config())
    found = tensor(diff(tmp_path / "a", tmp_path / "b"), "x.weight")
    assert found.relative_error == pytest.approx(1)
    assert found.cosine == pytest.approx(1)


def test_another_dtype_may_hold_the_same_numbers(llama: Path, tmp_path: Path) -> None:
    query = read_tensors(llama)[QUERY]
    found = diff(llama, changed(llama, tmp_path / "other", **{QUERY: query.float()}))
    assert not found.is_equal
    assert tensor(found, QUERY).status is Status.SAME_NUMBERS
    assert (tensor(found, QUERY).stored_a, tensor(found, QUERY).stored_b) == ("BF16 [32, 32]", "F32 [32, 32]")


def test_numbers_that_are_not_finite_are_counted(llama: Path, tmp_path: Path) -> None:
    query = read_tensors(llama)[QUERY].clone()
    query[0, :3] = torch.tensor([float("nan"), float("inf"), 7.0])
    found = tensor(diff(llama, changed(llama, tmp_path / "other", **{QUERY: query})), QUERY)
    assert found.num_not_finite == 2
    assert found.max_abs_error is not None
    assert 6 < found.max_abs_error < 8
    assert json.dumps(found.relative_error) != "NaN"


def test_tensors_that_one_lacks_and_other_shapes(llama: Path, tmp_path: Path) -> None:
    more = {"model.extra.weight": torch.zeros(2), QUERY: torch.zeros(16, 32), "lm_head.weight": None}
    found = diff(llama, changed(llama, tmp_path / "other", **more))
    assert tensor(found, "lm_head.weight").status is Status.ONLY_A
    assert tensor(found, "model.extra.weight").status is Status.ONLY_B
    shaped = tensor(found, QUERY)
    assert (shaped.status, shaped.stored_b, shaped.relative_error) == (Status.DIFFERENT, "F32 [16, 32]", None)


def test_config_and_companions(llama: Path, tmp_path: Path) -> None:
    other = changed(llama, tmp_path / "other")
    config: dict[str, Any] = json.loads((llama / "config.json").read_text())
    del config["hidden_act"]
    write_json(other / "config.json", {**config, "rope_parameters": {"rope_theta": 5.0}, "vocab_size": 65})
    (other / "tokenizer.json").write_text("{}")
    (other / "extra.txt").write_text("x")
    found = diff(llama, other)
    assert not found.is_equal
    assert {(each.path, each.a, each.b) for each in found.config} == {
        ("hidden_act", "silu", "absent"),
        ("rope_parameters", "absent", "{'rope_theta': 5.0}"),
        ("vocab_size", "64", "65"),
    }
    assert found.companions == {
        "extra.txt": "only_b", "tokenizer.json": "different", "tokenizer_config.json": "equal",
    }  # fmt: skip


@pytest.mark.parametrize("key", ["config.json", "tokenizer.json"])
def test_either_alone_makes_a_difference(key: str, llama: Path, tmp_path: Path) -> None:
    other = changed(llama, tmp_path / "other")
    assert diff(llama, other).is_equal
    content = json.loads((other / key).read_text())
    write_json(other / key, {**content, "another_field": 1})
    assert not diff(llama, other).is_equal


# Experts in two layouts


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model with its experts one by one, and together."""
    root, model = tmp_path_factory.mktemp("layouts"), sparse("qwen3_moe").build(0)
    save(model, root / "single")
    save(model, root / "fused", fused=True)
    return root / "single", root / "fused"


def test_experts_in_two_layouts_have_the_same_numbers(layouts: tuple[Path, Path]) -> None:
    found = diff(*layouts)
    assert counts(found) == {"equal": 30, "same_numbers": 36}
    assert found.tensors[0].stored_b.endswith("in model.layers.0.mlp.experts.down_proj")


def test_one_expert_that_differs_is_named(layouts: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = read_tensors(layouts[1])
    tensors["model.layers.1.mlp.experts.gate_up_proj"][2, -1] += 1
    write_checkpoint(tmp_path / "fused", tensors, json.loads((layouts[1] / "config.json").read_text()))
    found = diff(layouts[0], tmp_path / "fused")
    different = [each.name for each in found.tensors if each.status is Status.DIFFERENT]
    assert different == ["model.layers.1.mlp.experts.2.up_proj.weight"]


def test_experts_that_one_lacks_are_named(layouts: tuple[Path, Path], tmp_path: Path) -> None:
    gone = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors = read_tensors(layouts[0])
    del tensors[gone]
    write_checkpoint(tmp_path / "single", tensors, json.loads((layouts[0] / "config.json").read_text()))
    found = diff(tmp_path / "single", layouts[1])
    assert [each.name for each in found.tensors if each.status is Status.ONLY_B] == [gone]


# Codes with scales


@pytest.mark.parametrize("make", [deepseek_v3, gpt_oss, kimi_k2_thinking, fp8_mixture, nvfp4_llama])
def test_codes_are_compared_by_what_they_mean(make: Any, tmp_path: Path) -> None:
    models: list[QuantisedModel] = [make(tmp_path / str(seed), seed) for seed in (0, 1)]
    found = diff(*(model.root for model in models))
    means = [{name: each.values for name, each in read_numbers(model.root).items()} for model in models]
    coded = [each for each in found.tensors if each.name in models[0].quantised]
    assert len(coded) == len(models[0].quantised)
    for each in coded:
        a, b = (np.asarray(mean[each.name], dtype=np.float64) for mean in means)
        assert each.relative_error == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-4)
        assert each.max_abs_error == pytest.approx(np.abs(b - a).max(), rel=1e-5)


def test_a_quantised_model_is_compared_with_its_numbers(tmp_path: Path) -> None:
    from raymerge.api import conversion, submit
    from raymerge.options import RunOptions

    model = deepseek_v3(tmp_path / "codes", 0)
    submit(conversion(model.root, "bf16"), tmp_path / "plain", RunOptions(inline=True))
    found = diff(model.root, tmp_path / "plain")
    coded = [each for each in found.tensors if each.name in model.quantised]
    assert len(coded) == len(model.quantised)
    assert all(each.relative_error is not None and each.relative_error < 2**-8 for each in coded)
    assert any(each.path == "quantization_config" for each in found.config)


@pytest.mark.parametrize(("one", "other"), [(True, 1), ({"a": [0]}, {"a": [False]})])
def test_a_switch_is_no_number(one: object, other: object, tmp_path: Path) -> None:
    """To Python they are equal."""
    for name, value in (("one", one), ("other", other)):
        write_checkpoint(tmp_path / name, {"x.weight": torch.zeros(2)}, llama_config() | {"switch": value})
    found = diff(tmp_path / "one", tmp_path / "other")
    assert [each.path.partition(".")[0] for each in found.config] == ["switch"]
    assert not found.is_equal
