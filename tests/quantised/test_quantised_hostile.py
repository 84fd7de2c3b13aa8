"""Scales that would spoil what they multiply are refused before anything is written, in every format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import TOKENIZER_FILES, read_config, read_tensors, write_checkpoint
from kits.integer_models import LAYOUTS, integer_llama
from kits.merge_cases import INLINE
from kits.packed_headers import GOOD
from kits.plan_maker import Specs
from kits.recipe_maker import linear as mean_of
from kits.tensor_scaled_models import modelopt_llama
from safetensors.torch import load_file, save_file

from raymerge.api import plan, submit
from raymerge.checkpoints.quantisation.formats import packed_tensors
from raymerge.checkpoints.source import open_checkpoint
from raymerge.errors import NonFiniteError, Problem, UserError
from raymerge.execute import stored_scales
from raymerge.execute.stored_scales import scale_problems
from raymerge.merge_plan.plan import Plan
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import open_store

_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_WHOLE = (".weight_scale_2", ".weight_global_scale")
_VALUES = {"NaN": float("nan"), "infinite": float("inf"), "negative": -0.5, "0": 0.0}


def _written(root: Path, specs: Specs, table: Mapping[str, Any], shape: tuple[int, ...]) -> Path:
    """A checkpoint of one tensor: codes of 1, scales of 1, and a stored shape that is true."""
    root.mkdir(parents=True)
    tensors = {"model.norm.weight": torch.ones(8).bfloat16()}
    for name, (dtype, size) in specs.items():
        numbers = torch.tensor(shape) if name.endswith("_shape") else torch.ones(size)
        if name.endswith("_scale_2"):
            numbers = numbers * 1e-3
        tensors[name] = numbers.to(getattr(torch, dtype.torch_name or ""))
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": dict(table)}))
    return root


def _copies(file: Path) -> dict[str, torch.Tensor]:
    """Tensors that do not lie in the file, which is to be written again."""
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def _damaged(scales: torch.Tensor, value: float) -> torch.Tensor:
    """The last of some scales as this; of exponents NaN is all that is wrong. 0 in all places."""
    if scales.dtype in _EXPONENTS:
        data = scales.clone()
        data.view(torch.uint8).view(-1)[-1] = 255
        return data
    data = scales.float().clone()
    data.view(-1)[0 if value == 0 else -1 :] = value
    return data.to(scales.dtype)


def _problems(made: Plan, roots: Sequence[Path]) -> list[Problem]:
    with ExitStack() as opened:
        stores = [opened.enter_context(open_store(str(root))) for root in roots]
        return list(scale_problems(made, stores, "ab"))


@pytest.mark.sample(11)
@pytest.mark.parametrize("kind", GOOD)
def test_scales_are_looked_at_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    specs, table, (_, shape, _) = GOOD[kind]
    roots = [_written(tmp_path / each, specs, table, shape) for each in "ab"]
    (weight,) = packed_tensors(open_checkpoint(roots[1], "b"), [table]).tensors.values()
    made = plan(mean_of(*roots)).require()
    assert not _problems(made, roots)
    good = _copies(roots[1] / "model.safetensors")
    for name in {weight.scales, weight.tensor_scale} - {None}:
        for word, value in _VALUES.items():
            # An exponent can be NaN alone, and float8 e4m3 has no infinity.
            has_none = good[name].dtype is torch.float8_e4m3fn and word == "infinite"
            if has_none or (good[name].dtype in _EXPONENTS and word != "NaN"):
                continue
            damaged = {**good, name: _damaged(good[name], value)}
            save_file(damaged, roots[1] / "model.safetensors", metadata={"format": "pt"})
            problems = _problems(made, roots)
            assert len(problems) == 1, (name, word)
            (problem,) = problems
            assert problem.where.startswith(f"b: {weight.codes}")
            assert word in problem.what or (word == "infinite" and "NaN" in problem.what)
            assert "of model.safetensors" in problem.what


@pytest.mark.parametrize(
    ("kind", "scales", "words"),
    [
        ("NVFP4 of ModelOpt", [1e-4, 5376.0, 2688.0], "most scales of whole matrices look like divisors"),
        ("NVFP4 of ModelOpt", [5376.0, 2e-4, 1e-4], None),
        ("NVFP4", [5376.0, 2e-4, 1e-4], "most scales of whole matrices look like factors"),
        ("NVFP4", [5376.0, 1e-4], None),
    ],
)
def test_scales_of_the_other_spelling_are_refused(
    kind: str, scales: Sequence[float], words: str | None, tmp_path: Path
) -> None:
    """A divisor that is taken for a factor would make numbers millions of times too large."""
    specs, table, (_, shape, _) = GOOD[kind]
    root = _written(tmp_path / "a", specs, table, shape)
    tensors = _copies(root / "model.safetensors")
    for number, scale in enumerate(scales):
        whole = {name: torch.full_like(t, scale) for name, t in tensors.items() if name.endswith(_WHOLE)}
        layer = {**{name: t for name, t in tensors.items() if name in specs}, **whole}
        tensors |= {name.replace("layers.0", f"layers.{number}"): t.clone() for name, t in layer.items()}
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    problems = _problems(plan(mean_of(root, root)).require(), [root])
    assert len(problems) == (1 if words else 0)
    assert all(words and words in each.what and each.where == "a" for each in problems), problems


@pytest.mark.sample(2)
@pytest.mark.parametrize("value", [float("nan"), -0.5])
@pytest.mark.parametrize("by", ["driver", "worker"])
def test_a_merge_with_such_a_scale_publishes_nothing(
    value: float, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more scales than the driver looks at, workers refuse what they meet."""
    if by == "worker":
        monkeypatch.setattr(stored_scales, "_MOST_BYTES", -1)
    models = [integer_llama(tmp_path / name, 1, LAYOUTS["INT4 with zero points"]).root for name in "ab"]
    name = "model.layers.0.mlp.up_proj.weight_scale"
    (file,) = [each for each in sorted(models[1].glob("*.safetensors")) if name in load_file(each)]
    tensors = _copies(file)
    save_file({**tensors, name: _damaged(tensors[name], value)}, file, metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"up_proj\.weight_packed: .*(negative|NaN).* first at byte \d+"):
        submit(mean_of(*models), tmp_path / "out", INLINE)
    assert {each.name for each in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("word", _VALUES)
@pytest.mark.parametrize("ending", ["o_proj.input_scale", "k_proj.k_scale"])
def test_scales_of_what_is_computed_are_looked_at_too(word: str, ending: str, tmp_path: Path) -> None:
    """Where the largest is taken, and where one is copied."""
    models = [modelopt_llama(tmp_path / each, seed, "FP8").root for seed, each in enumerate("ab")]
    name = f"model.layers.0.self_attn.{ending}"
    for root, value in zip(models, (0.25, _VALUES[word]), strict=True):
        tensors, config = read_tensors(root) | {name: torch.tensor(value)}, read_config(root)
        shutil.rmtree(root)
        write_checkpoint(root, tensors, config, extra=TOKENIZER_FILES)
    copied = {"merge_method": "passthrough", "models": [{"model": str(models[1])}]}
    for recipe, roots in ((mean_of(*models), models), (copied, models[1:])):
        (problem,) = _problems(plan(recipe).require(), roots)
        assert name in problem.where
        assert word in problem.what or (word == "infinite" and "NaN" in problem.what)


@pytest.mark.parametrize(("kind", "is_good"), [("per channel [rows]", True), ("NVFP4 of ModelOpt", False)])
def test_a_matrix_of_zeros_may_have_scales_of_0(kind: str, is_good: bool, tmp_path: Path) -> None:
    """Not the scale of a whole matrix that scales of blocks go with."""
    specs, table, (_, shape, _) = GOOD[kind]
    roots = [_written(tmp_path / each, specs, table, shape) for each in "ab"]
    stored = _copies(roots[1] / "model.safetensors")
    zeros = {name: torch.zeros(t.shape).to(t.dtype) for name, t in stored.items() if "input" not in name}
    save_file({**stored, **zeros}, roots[1] / "model.safetensors", metadata={"format": "pt"})
    problems = _problems(plan(mean_of(*roots)).require(), roots)
    assert [each.what.partition(",")[0] for each in problems] == (
        [] if is_good else ["what all scales of its blocks go with is 0"]
    )


def test_of_codes_whose_scales_are_0_little_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a model of such scales is read whole before its merge begins. Begin, middle and end are read."""
    specs, table, (_, shape, _) = GOOD["per channel [rows]"]
    root = _written(tmp_path / "a", specs, table, shape)
    stored = _copies(root / "model.safetensors")
    zeros = {name: torch.zeros(t.shape).to(t.dtype) for name, t in stored.items()}
    save_file(zeros, root / "model.safetensors", metadata={"format": "pt"})
    made, sizes, read = plan(mean_of(root, root)).require(), list[int](), LocalStore.read

    def counted(store: LocalStore, key: str, offset: int, nbytes: int) -> bytes:
        sizes.append(nbytes)
        return read(store, key, offset, nbytes)

    monkeypatch.setattr(stored_scales, "_PIECE", 16)
    monkeypatch.setattr(LocalStore, "read", counted)
    assert not _problems(made, [root, root])
    scales = sum(t.nbytes for name, t in zeros.items() if "scale" in name)
    assert 0 < sum(sizes) <= 2 * (scales + 3 * 16)
    (codes,) = (name for name in specs if name.endswith(".weight"))
    for place in (0, zeros[codes].numel() // 2, -1):
        zeros[codes].view(torch.uint8).view(-1)[place] = 1
        save_file(zeros, root / "model.safetensors", metadata={"format": "pt"})
        (problem,) = _problems(made, [root])
        assert "all scales of its codes are 0" in problem.what
        zeros[codes].view(torch.uint8).zero_()


@pytest.mark.sample(17)
@pytest.mark.parametrize("kind", {form: kind for kind, (_, _, (form, *_)) in GOOD.items()}.values())
@pytest.mark.parametrize("change", ["missing", "another shape", "another dtype"])
def test_scales_that_do_not_fit_their_codes_are_no_plan(kind: str, change: str, tmp_path: Path) -> None:
    specs, table, (_, shape, _) = GOOD[kind]
    root = _written(tmp_path / "a", specs, table, shape)
    (weight,) = packed_tensors(open_checkpoint(root, "a"), [table]).tensors.values()
    tensors = _copies(root / "model.safetensors")
    scales = tensors.pop(weight.scales)
    if change == "another shape":
        tensors[weight.scales] = torch.cat([scales.reshape(-1).view(torch.uint8)] * 3).view(scales.dtype)
    elif change == "another dtype":
        tensors[weight.scales] = torch.ones(scales.shape, dtype=torch.float64)
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{weight.scales}|{weight.codes}"):
        plan(mean_of(root, root)).require()
