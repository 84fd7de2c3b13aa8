"""One scale of the whole matrix for what servers join, and the server's view of what is published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import read_config, read_tensors
from kits.float64_merges import linear
from kits.merge_cases import INLINE, merge
from kits.quantised_merges import changed_bytes, check_merged, merged_values, read_numbers
from kits.quantised_models import QuantisedModel
from kits.recipe_maker import linear as mean_of
from kits.recipe_maker import one as one_model
from kits.recipe_maker import piece, stack
from kits.served_numbers import joined_modules, served_as_stored, served_numbers
from kits.tensor_scaled_models import fp8_llama, nvfp4_mixture
from safetensors.torch import load_file, save_file

from raymerge.api import AuditOptions, audit, plan, submit, verify
from raymerge.architectures.roles import joined_matrix
from raymerge.architectures.rules import load_rules
from raymerge.errors import VerificationError
from raymerge.execute import lane
from raymerge.execute.encoding import Observed, TensorScale
from raymerge.merge_plan.jobs import OpJob

_EXPERT, _ATTENTION = "model.layers.0.mlp.experts.1", "model.layers.0.self_attn"
_UP, _LATENT = f"{_EXPERT}.up_proj", f"{_ATTENTION}.kv_a_proj_with_mqa"


def _edit(root: Path, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Give tensors of a checkpoint other numbers, or take them away."""
    for file in root.glob("*.safetensors"):
        held = {name: tensors.get(name, tensor) for name, tensor in load_file(file).items()}
        left = {name: tensor for name, tensor in held.items() if tensor is not None}
        save_file(left, file, metadata={"format": "pt"})
    index = root / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    gone = {name for name, tensor in tensors.items() if tensor is None}
    content["weight_map"] = {n: f for n, f in content["weight_map"].items() if n not in gone}
    index.write_text(json.dumps(content))


def _grown(model: QuantisedModel, module: str, factor: float) -> QuantisedModel:
    """The model with a matrix whose numbers, by its one scale alone, are so many times as large."""
    stored, divisor, scale = (
        read_tensors(model.root),
        f"{module}.weight_global_scale",
        f"{module}.weight_scale_2",
    )
    is_divisor = divisor in stored
    _edit(model.root, {divisor: stored[divisor] / factor} if is_divisor else {scale: stored[scale] * factor})
    values = {**model.values, f"{module}.weight": model.values[f"{module}.weight"] * factor}
    return QuantisedModel(model.root, values, model.quantised)


def _notes(recipe: Mapping[str, Any]) -> str:
    return "\n".join(plan(dict(recipe)).manifest["notes"])


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_modelopt", [False, True], ids=["compressed", "modelopt"])
@pytest.mark.parametrize(
    ("words", "grown"),
    [
        (("gate_proj", "up_proj", "down_proj"), f"{_EXPERT}.gate_proj"),
        (("w1", "w3", "w2"), f"{_EXPERT}.w3"),
        (("gate_proj", "up_proj", "down_proj"), _LATENT),
    ],
    ids=["gate", "w3", "latent"],
)
def test_what_is_joined_is_served_as_it_was_merged(
    words: Sequence[str], grown: str, is_modelopt: bool, tmp_path: Path
) -> None:
    """Also where one of the joined matrices outgrew the scale that both had."""
    base, other = (
        nvfp4_mixture(tmp_path / name, seed, words=words, is_modelopt=is_modelopt)
        for seed, name in enumerate("ab")
    )
    other = _grown(other, grown, 64.0)
    merge(mean_of(base, other), tmp_path / "out")
    assert served_as_stored(tmp_path / "out")
    check_merged(tmp_path / "out", merged_values([base, other], linear(1, 1)), [base, other])
    endings = (".weight_global_scale", ".weight_scale_2")
    changed = {name for name in changed_bytes(tmp_path / "out", base.root) if name.endswith(endings)}
    joined = next(each for each in joined_modules(read_tensors(base.root)) if grown in each)
    assert {name.rpartition(".")[0] for name in changed} == set(joined)
    verdict = verify(tmp_path / "out")
    assert (verdict.problems, verdict.notes) == ((), ())
    assert not audit(tmp_path / "out", AuditOptions(1.0, seed=3), INLINE).problems


def _unequal(root: Path, *, is_modelopt: bool = False) -> QuantisedModel:
    """A model of which gate and up have scales 10 times apart, and the latent inputs 4 times."""
    return _grown(_grown(nvfp4_mixture(root, 0, is_modelopt=is_modelopt), _UP, 0.1), _LATENT, 4)


def _said(root: Path) -> str:
    return "\n".join(map(str, verify(root).problems))


@pytest.mark.parametrize("is_modelopt", [False, True], ids=["compressed", "modelopt"])
def test_a_checkpoint_that_is_served_wrong_is_found_with_the_factor(
    is_modelopt: bool, tmp_path: Path
) -> None:
    """Of factors the largest is taken for the latent inputs, and of divisors too."""
    model = _unequal(tmp_path / "model", is_modelopt=is_modelopt)
    off = {name: pair for name, pair in served_numbers(model.root).items() if not np.array_equal(*pair)}
    latent = f"{_ATTENTION}.q_a_proj" if is_modelopt else _LATENT
    assert set(off) == {_UP, latent}
    sizes = {name: [np.abs(each).max() for each in pair] for name, pair in off.items()}
    ratios = {name: served / meant for name, (served, meant) in sizes.items()}
    assert ratios == {_UP: pytest.approx(10), latent: pytest.approx(4 if is_modelopt else 0.25)}
    said = _said(model.root)
    assert "2 times matrices that servers join have different scales of the whole matrix" in said
    scale = "weight_scale_2" if is_modelopt else "weight_global_scale"
    assert f"what has {_UP}.{scale} 10 times as large as it is" in said
    assert "Merge the model with itself" in said


@pytest.mark.parametrize(("is_modelopt", "look"), [(False, "factors"), (True, "divisors")])
def test_a_checkpoint_in_the_other_spelling_is_a_problem(
    is_modelopt: bool, look: str, tmp_path: Path
) -> None:
    """And a copy of it is published with a note."""
    model = nvfp4_mixture(tmp_path / "model", 0, is_modelopt=is_modelopt)
    endings = ("weight_global_scale", "weight_scale_2")
    stored = {name: each for name, each in read_tensors(model.root).items() if name.endswith(endings)}
    _edit(model.root, {name: 1 / each for name, each in stored.items()})
    (problem,) = verify(model.root).problems
    assert (words := f"most scales of whole matrices look like {look}") in problem.what
    assert f"{words}, as" in _notes(one_model(model))
    merge(one_model(model), tmp_path / "out")
    verdict = verify(tmp_path / "out")
    (note,) = verdict.notes
    assert words in note
    assert "as in the model that they come from" in note
    assert not verdict.problems


def test_what_is_told_to_be_merged_with_itself_is_served_right_afterwards(tmp_path: Path) -> None:
    """Every number within half a code step; what has equal scales keeps its bytes."""
    model = _unequal(tmp_path / "model")
    assert "2 times matrices that servers join have different scales" in _notes(mean_of(model, model))
    merge(mean_of(model, model), tmp_path / "out")
    assert served_as_stored(tmp_path / "out")
    assert verify(tmp_path / "out").problems == ()
    check_merged(tmp_path / "out", merged_values([model], linear(1)), [model])
    changed = {name.partition(".weight")[0] for name in changed_bytes(tmp_path / "out", model.root)}
    assert changed <= {_UP, _LATENT, f"{_EXPERT}.gate_proj", f"{_ATTENTION}.q_a_proj"}


def test_copies_stay_as_they_are_with_a_note(tmp_path: Path) -> None:
    """In the plan, and in the verdict on what was published."""
    model, other = _unequal(tmp_path / "model"), nvfp4_mixture(tmp_path / "other", 1)
    assert "copied unchanged" not in _notes(mean_of(model, other))
    recipe = one_model(model)
    assert "and 3 times they are copied unchanged and stay so" in _notes(recipe)
    merge(recipe, tmp_path / "out")
    assert not changed_bytes(tmp_path / "out", model.root)
    verdict = verify(tmp_path / "out")
    assert verdict.problems == ()
    (note,) = verdict.notes
    assert "2 times matrices that servers join have different scales" in note
    assert "as in the model that they come from" in note


def test_what_would_be_served_wrong_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were each matrix to choose its own scale, as codecs alone would have it."""
    shared = lane.shared_scale

    def alone(op: OpJob, seen: Sequence[Observed]) -> TensorScale:
        return shared(op, seen[:1])

    monkeypatch.setattr(lane, "shared_scale", alone)
    base, other = (nvfp4_mixture(tmp_path / name, seed) for seed, name in enumerate("ab"))
    _grown(other, _UP, 64.0)
    with pytest.raises(VerificationError, match=r"serves what has .*up_proj.* times as large as it is"):
        submit(mean_of(base, other), tmp_path / "out", INLINE)
    assert not (tmp_path / "out").exists()


def test_fp8_that_is_made_has_one_scale_for_what_is_joined(tmp_path: Path) -> None:
    """So that servers, which encode it under the largest, have nothing to encode. Copies keep their own."""
    models = [fp8_llama(tmp_path / name, seed) for seed, name in enumerate("ab")]
    rule = {"glob": "*.up_proj.*", "merge_method": "passthrough", "sources": [str(models[0].root)]}
    merge({**mean_of(*models), "methods": [rule]}, tmp_path / "out")
    before, after = (read_tensors(root) for root in (models[0].root, tmp_path / "out"))
    block = "model.layers.0"
    names = [f"{block}.self_attn.{word}_proj.weight_scale" for word in "qkv"]
    assert len({float(before[name]) for name in names}) == 3
    (scale,) = {float(after[name]) for name in names}
    merged = merged_values(models, linear(1, 1))
    largest = max(np.abs(merged[name.removesuffix("_scale")]).max() for name in names)
    assert scale == pytest.approx(largest / 448, rel=1e-6)
    for part in ("weight", "weight_scale"):
        assert torch.equal(before[f"{block}.mlp.up_proj.{part}"], after[f"{block}.mlp.up_proj.{part}"])
    found = read_numbers(tmp_path / "out")
    for name in (each.removesuffix("_scale") for each in names):
        errors = np.abs(found[name].values - merged[name][0])
        assert np.all(errors <= found[name].steps / 2 * (1 + 1e-4) + 1e-7)
    assert not audit(tmp_path / "out", AuditOptions(1.0, seed=3), INLINE).problems


def _static(model: QuantisedModel, **tensors: torch.Tensor | None) -> QuantisedModel:
    """The model with a config that says that every matrix has a scale of its inputs, and some without one."""
    config = read_config(model.root)
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] = {"num_bits": 4, "type": "float", "dynamic": "local"}
    (model.root / "config.json").write_text(json.dumps(config))
    _edit(model.root, {f"{name}.input_global_scale": tensor for name, tensor in tensors.items()})
    return model


def test_a_scale_of_inputs_that_one_parent_lacks_is_the_others(tmp_path: Path) -> None:
    """Of all that have one the smallest, as it divides."""
    models = [_static(nvfp4_mixture(tmp_path / name, seed)) for seed, name in enumerate("ab")]
    down = f"{_EXPERT}.down_proj"
    _static(models[0], **{down: None})
    _static(models[1], **{down: torch.tensor([3.0])})
    merge(mean_of(*models), tmp_path / "out")
    assert float(read_tensors(tmp_path / "out")[f"{down}.input_global_scale"]) == 3.0


@pytest.mark.parametrize("method", ["linear", "passthrough"])
def test_a_scale_of_inputs_that_nobody_has_is_refused_by_name(method: str, tmp_path: Path) -> None:
    models = [
        _static(nvfp4_mixture(tmp_path / name, seed), **{f"{_EXPERT}.down_proj": None})
        for seed, name in enumerate("ab")
    ]
    recipe = mean_of(*models) if method == "linear" else one_model(models[0])
    said = "\n".join(map(str, plan(recipe).problems))
    assert f"{_EXPERT}.down_proj" in said
    said = _said(models[0].root)
    assert "activations have stored scales (a static scheme), but 1 quantised matrices have none" in said
    assert f"{_EXPERT}.down_proj" in said
    assert "make the scheme dynamic in its config" in said


@pytest.mark.parametrize(
    ("model_type", "groups"),
    [
        ("llama", ["q_proj k_proj v_proj", "gate_proj up_proj", "w1 w3", "wq wk wv"]),
        ("deepseek_v4", ["wq_a wkv", "wkv wgate", "w1 w3", "q_a_proj kv_a_proj_with_mqa"]),
        ("qwen3_next", ["in_proj_qkv in_proj_z", "in_proj_b in_proj_a"]),
        ("kimi_linear", ["q_proj k_proj v_proj g_proj f_a_proj b_proj", "gate_proj up_proj"]),
    ],
)
def test_joined_matrices_are_those_of_servers(model_type: str, groups: Sequence[str]) -> None:
    """In their order there, of one module only, whatever that is called."""
    rules = load_rules(model_type)
    for words in map(str.split, groups):
        found = {joined_matrix(f"model.layers.3.x.{word}.weight", rules) for word in words}
        (matrix,) = found
        assert matrix is not None
        parts = [f"model.layers.3.x.{word}" for word in words]
        assert [each for each in matrix.parts if each in parts] == parts
    assert joined_matrix("x.0.w1.weight", rules) != joined_matrix("x.1.w3.weight", rules)
    assert joined_matrix("x.o_proj.weight", rules) is None
    assert (joined_matrix("x.g_proj.weight", rules) is None) == (model_type != "kimi_linear")


def test_a_joined_matrix_in_several_formats_is_noted(tmp_path: Path) -> None:
    """Unless the base has it so; also where layers of another model bring it in."""
    model = nvfp4_mixture(tmp_path / "a", 1).root

    def noted(recipe: Mapping[str, Any]) -> list[str]:
        return [each for each in plan(dict(recipe)).require().manifest["notes"] if "vLLM joins" in each]

    def notes(root: Path, *lines: Any) -> list[str]:
        return noted(one_model(root, out_format=[*lines, "same"]))

    freed = {"glob": "*.up_proj.*", "value": "bf16"}
    (note,) = notes(model, freed)
    experts = "model.layers.0.mlp.experts.0"
    assert note.startswith("2 times matrices")
    assert f"({experts}.gate_proj as nvfp4, {experts}.up_proj as plain numbers)" in note
    assert "{glob: 'model.layers.*.mlp.experts.*.*', value: bf16}" in note
    assert notes(model, {"role": "expert", "value": "bf16"}) == notes(model) == []
    merge(one_model(model, out_format=[freed, "same"]), tmp_path / "out")
    assert notes(tmp_path / "out", {"role": "attention", "value": "bf16"}) == []
    (note,) = noted(stack(piece(model, 0, 1), piece(tmp_path / "out", 0, 1)))
    assert "(model.layers.1.mlp.experts.0.gate_proj as nvfp4" in note
