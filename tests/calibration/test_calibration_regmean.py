"""RegMean and RegMean++: least squares over stacked activations, as numpy solves them in float64."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kits.calibrations import CPU, reading_model, windows_of, write_text
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from raymerge.api import AuditOptions, RunOptions, audit, calibrate, conversion, plan_all, read_recipe, submit
from raymerge.cli.render.reports import show_routing
from raymerge.device_numerics import torch_threads
from raymerge.errors import CheckpointError, NonFiniteError, PlanError, UserError
from raymerge.events import StageReport
from raymerge.planner.inputs.sources import RESULT_FILE, open_models
from raymerge.planner.merges import stages_of
from raymerge.recipes.schema import Recipe
from raymerge.stages.calibration.regmean import mixes_of, regmean_work
from raymerge.stages.streamed_model import Shape, StreamedModel

LENGTH, WORDS = 9, 160
ALPHA, RIDGE = 0.8, 1e-3
INLINE = RunOptions(inline=True)
Array = npt.NDArray[np.float64]


def recipe_of(root: Path, name: str, **more: Any) -> dict[str, Any]:
    """Two models of a family, each with a text."""
    models = []
    for seed in (1, 2):
        model, text = root / f"{name}{seed}", root / f"text{seed}.txt"
        if not model.exists():
            reading_model(model, name, seed=seed)
            write_text(text, WORDS, seed=seed)
        models.append({"model": str(model), "texts": [str(text)]})
    recipe = {"merge_method": "regmean", "models": models, "dtype": "float32"}
    recipe |= {"parameters": {"alpha": ALPHA, "ridge": RIDGE}}
    calibrate = {"length": LENGTH, **more.pop("calibrate", {})}
    return {**recipe, "calibrate": calibrate, **more}


def whole(root: str) -> Any:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(root, dtype=torch.float64, **eager).eval()


def activations(model: Any, text: Path, layers: Sequence[int]) -> tuple[dict[str, Array], int]:
    """What every matrix of some layers is multiplied with, ``[tokens, in]``, and the number of all tokens."""
    seen: dict[str, list[torch.Tensor]] = {}
    hooks = []
    for layer in layers:
        for path, module in model.model.layers[layer].named_modules():
            name = f"model.layers.{layer}.{path}"
            if isinstance(module, torch.nn.Linear):

                def note(_: Any, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                    seen.setdefault(f"{name}.weight", []).append(args[0].flatten(0, -2))

                hooks.append(module.register_forward_pre_hook(note))
            elif hasattr(module, "gate_up_proj"):

                def note_experts(experts: Any, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                    for key, rows in of_experts(experts, *args):
                        seen.setdefault(f"{name}.{key}.weight", []).append(rows)

                hooks.append(module.register_forward_pre_hook(note_experts))
    windows = windows_of(text, LENGTH)
    with torch.no_grad():
        for window in windows:
            model(torch.tensor([window]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows).numpy() for name, rows in seen.items()}, sum(map(len, windows))


def of_experts(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, _: torch.Tensor) -> Any:
    for expert in range(len(experts.gate_up_proj)):
        rows = hidden[(chosen == expert).any(1)]
        gate, up = (rows @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
        yield f"{expert}.gate_proj", rows
        yield f"{expert}.up_proj", rows
        yield f"{expert}.down_proj", torch.nn.functional.silu(gate) * up


def fitted(weights: Sequence[Array], inputs: Sequence[Array], tokens: Sequence[int]) -> Array:
    """The least squares of ``W x - W_i x`` over all inputs, of which alpha makes more and shorter ones, and
    of ``sqrt(ridge) (W - W_i)``."""
    count, rows, right = len(weights), list[Array](), list[Array]()
    grams = [own.T @ own / size for own, size in zip(inputs, tokens, strict=True)]
    ridge = RIDGE * np.mean([np.diag(gram).mean() for gram in grams])
    for weight, own, gram, size in zip(weights, inputs, grams, tokens, strict=True):
        diagonal = np.diag(np.sqrt((1 - ALPHA) * np.diag(gram) + ridge))
        stacked = np.concatenate([np.sqrt(ALPHA / size) * own, diagonal])
        rows.append(stacked)
        right.append(stacked @ weight.T)
    assert count == len(rows)
    solution, *_ = np.linalg.lstsq(np.concatenate(rows), np.concatenate(right))
    return np.asarray(solution.T)


def float64(root: str) -> dict[str, Array]:
    return {name: each.double().numpy() for name, each in load_file(f"{root}/model.safetensors").items()}


def merged(recipe: Mapping[str, Any], output: Path, options: RunOptions = INLINE) -> dict[str, torch.Tensor]:
    submit(recipe, output, options)
    return load_file(output / "model.safetensors")


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "qwen3_moe"])
def test_matrices_are_the_least_squares_over_the_inputs(tmp_path: Path, name: str) -> None:
    recipe = recipe_of(tmp_path, name)
    found = merged(recipe, tmp_path / "out")
    roots = [each["model"] for each in recipe["models"]]
    models = [whole(root) for root in roots]
    layers = range(len(models[0].model.layers))
    seen = [activations(model, tmp_path / f"text{n}.txt", layers) for n, model in enumerate(models, start=1)]
    weights = [float64(root) for root in roots]
    fits = 0
    for key, tensor in found.items():
        own = [each[key] for each in weights]
        expected = (own[0] + own[1]) / 2
        if all(key in inputs for inputs, _ in seen) and ".gate." not in key:
            fits += 1
            expected = fitted(own, [inputs[key] for inputs, _ in seen], [tokens for _, tokens in seen])
            assert np.abs(expected - (own[0] + own[1]) / 2).max() > 1e-3
        torch.testing.assert_close(tensor.double().numpy(), expected, rtol=1e-4, atol=1e-5)
    assert fits == len([key for key in found if "proj" in key])


def test_inputs_behind_merged_layers_are_those_of_the_merged_model(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "llama", calibrate={"model": "merged"})
    found = merged(recipe, tmp_path / "out")
    roots = [each["model"] for each in recipe["models"]]
    weights = [float64(root) for root in roots]
    state = {key: torch.from_numpy((weights[0][key] + weights[1][key]) / 2) for key in weights[0]}
    walker = whole(roots[0])
    for layer in range(len(walker.model.layers)):
        own = {key for key in state if f"layers.{layer}." in key}
        seen = []
        for number, weight in enumerate(weights, start=1):
            sources = {key: torch.from_numpy(weight[key]) for key in own}
            walker.load_state_dict({**state, **sources}, strict=False)
            seen.append(activations(walker, tmp_path / f"text{number}.txt", [layer]))
        for key in own & seen[0][0].keys():
            pairs = ([each[key] for each in weights], [inputs[key] for inputs, _ in seen])
            state[key] = torch.from_numpy(fitted(*pairs, [tokens for _, tokens in seen]))
    for key, tensor in found.items():
        torch.testing.assert_close(tensor.double(), state[key], rtol=1e-4, atol=1e-5)


def test_a_layer_that_gives_nan_behind_merged_ones_is_named(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "llama", calibrate={"model": "merged"})
    path = Path(recipe["models"][1]["model"]) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"llama2: layer 1 gives NaN or infinity for \S*text2.txt"):
        submit(recipe, tmp_path / "out", INLINE)
    with pytest.raises(NonFiniteError, match=r"^q_proj: has inputs"):
        mixes_of([torch.full((2, 2), torch.inf)] * 2, alpha=0.5, ridge=RIDGE, name="q_proj")


def test_without_what_is_off_the_diagonal_each_column_is_a_weighted_mean() -> None:
    grams = [torch.randn(3, 8, 5, dtype=torch.float64) for _ in range(3)]
    grams = [(each.mT @ each)[0] for each in grams]
    diagonals = torch.stack([each.diagonal() for each in grams])
    ridge = RIDGE * diagonals.mean()
    weights = (diagonals + ridge) / (diagonals + ridge).sum(0)
    for mix, own in zip(mixes_of(grams, alpha=0.0, ridge=RIDGE), weights, strict=True):
        torch.testing.assert_close(mix, torch.diag(3 * own - 1).float())


def test_equal_sources_and_inputs_and_none_at_all_give_the_mean() -> None:
    gram = torch.eye(4).double() + 1
    assert torch.stack(mixes_of([gram, gram, gram], alpha=0.7, ridge=RIDGE)).abs().max() < 1e-14
    assert not torch.stack(mixes_of([torch.zeros(4, 4)] * 2, alpha=0.7, ridge=RIDGE)).any()


def test_what_has_no_solution_is_refused_by_name() -> None:
    gram = torch.tensor([[1.0, -5.0], [-5.0, 1.0]])
    with pytest.raises(UserError, match=r"^q_proj: has no solution.*Write a smaller 'alpha'"):
        mixes_of([gram, gram], alpha=0.5, ridge=RIDGE, name="q_proj")


def test_few_inputs_that_are_alike_are_fitted_without_any_help_of_a_diagonal() -> None:
    """Fewer tokens than inputs, so that all can be met; their sums in float32 have eigenvalues below zero."""
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(48, 512, generator=draw) + 3 * torch.randn(1, 512, generator=draw) for _ in "ab"]
    weights = [torch.randn(8, 512, generator=draw) for _ in inputs]
    grams = [each.T @ each / len(each) for each in inputs]
    total = torch.stack(grams).sum(0).double()
    assert torch.linalg.eigvalsh(total).min() < -1e-9 * total.diagonal().mean()
    mixes = mixes_of(grams, alpha=1.0, ridge=1e-9)
    fits = [weight + weight @ mix for weight, mix in zip(weights, mixes, strict=True)]
    fit = torch.stack(fits).mean(0)
    for own, weight in zip(inputs, weights, strict=True):
        off = (own @ (fit - weight).T).norm() / (own @ (weights[0] - weights[1]).T).norm()
        assert off < 0.01


@pytest.mark.slow
def test_matrices_that_are_stored_turned_are_fitted(tmp_path: Path) -> None:
    """GPT-2's, which are ``[in, out]`` and add their bias in one step."""
    recipe = recipe_of(tmp_path, "gpt2")
    found = merged(recipe, tmp_path / "out")
    seen, weights = [], [float64(each["model"]) for each in recipe["models"]]
    for number, entry in enumerate(recipe["models"], start=1):
        model, rows = whole(entry["model"]), list[torch.Tensor]()
        hook = model.transformer.h[1].mlp.c_proj.register_forward_pre_hook(
            lambda _, args, rows=rows: rows.append(args[0].flatten(0, -2))
        )
        windows = windows_of(tmp_path / f"text{number}.txt", LENGTH)
        with torch.no_grad():
            for window in windows:
                model(torch.tensor([window]), use_cache=False)
        hook.remove()
        seen.append((torch.cat(rows).numpy(), sum(map(len, windows))))
    (key,) = (name for name in found if name.endswith("h.1.mlp.c_proj.weight"))
    expected = fitted([each[key].T for each in weights], [own for own, _ in seen], [n for _, n in seen])
    torch.testing.assert_close(found[key].double().numpy(), expected.T, rtol=1e-4, atol=1e-5)


def test_experts_that_are_all_multiplied_at_once_are_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "llama4_text")
    with pytest.raises(PlanError, match=r"experts\.0\.\w+\.weight is multiplied in no way that is known"):
        submit(recipe, tmp_path / "out", INLINE)


def test_a_base_that_is_not_listed_is_no_parent(tmp_path: Path) -> None:
    reading_model(tmp_path / "base", "llama", seed=3)
    data = recipe_of(tmp_path, "llama", base_model=str(tmp_path / "base"))
    rule = {"role": "mlp", "merge_method": "regmean"}
    for more in ({}, {"merge_method": "task_arithmetic", "methods": [rule], "parameters": {"weight": 1}}):
        recipe = read_recipe({**data, **more})
        assert isinstance(recipe, Recipe)
        (stage,) = stages_of(recipe, open_models(recipe).require(), version="0")
        assert [source.name for source in stage.spec.sources] == [each["model"] for each in data["models"]]


def test_what_few_tokens_reach_is_printed(tmp_path: Path) -> None:
    rule, stream = {"layers": 1, "merge_method": "karcher"}, StringIO()
    data = recipe_of(tmp_path, "llama", methods=[rule], calibrate={"tokens": 2 * LENGTH})
    recipe = read_recipe(data)
    assert isinstance(recipe, Recipe)
    (stage,) = stages_of(recipe, open_models(recipe).require(), version="0")
    work = regmean_work(stage, stage.spec)  # type: ignore[arg-type]
    work.check()
    for number in range(work.num_units):
        least = work.least_budget()
        work.unit(number, staging=tmp_path, device=CPU, budget=least, tell=lambda _: None)
    report = StageReport(stage.title, work.conclude(tmp_path))
    show_routing(Console(file=stream, width=200), [report])
    line = (
        r"few tokens +fewer than 32 of some model reach 14 of the matrices, in layers 0, 2, such as model\."
    )
    assert re.search(line, stream.getvalue())


def test_units_in_any_order_give_the_same_bytes(tmp_path: Path) -> None:
    recipe = read_recipe(recipe_of(tmp_path, "llama"))
    assert isinstance(recipe, Recipe)
    (stage,) = stages_of(recipe, open_models(recipe).require(), version="0")
    made = []
    for backwards in (False, True):
        work, staging = regmean_work(stage, stage.spec), tmp_path / f"units{backwards}"  # type: ignore[arg-type]
        staging.mkdir()
        work.check()
        numbers, least = list(range(work.num_units)), work.least_budget()
        with torch_threads(1):
            for number in numbers[::-1] if backwards else numbers:
                work.unit(number, staging=staging, device=CPU, budget=least, tell=lambda _: None)
            work.conclude(staging)
        made.append((staging / RESULT_FILE).read_bytes())
    assert made[0] == made[1]


def test_arguments_of_layers_are_made_anew_where_they_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = list[Shape](), StreamedModel.calls

    def noted(model: StreamedModel, shape: Shape, device: torch.device) -> Any:
        made.append(shape)
        return calls(model, shape, device)

    monkeypatch.setattr(StreamedModel, "calls", noted)
    recipe = read_recipe(recipe_of(tmp_path, "llama", calibrate={"model": "merged"}))
    for number, words in enumerate((WORDS // 4, WORDS // 8), start=1):
        write_text(tmp_path / f"text{number}.txt", words, seed=number)
    assert isinstance(recipe, Recipe)
    (stage,) = stages_of(recipe, open_models(recipe).require(), version="0")
    results, often = [], []
    for spare in (0, 1 << 30):
        made.clear()
        work, staging = regmean_work(stage, stage.spec), tmp_path / f"spare{spare}"  # type: ignore[arg-type]
        staging.mkdir()
        work.check()
        budget = work.least_budget() + spare
        with torch_threads(1):
            work.unit(0, staging=staging, device=CPU, budget=budget, tell=lambda _: None)
        results.append((staging / RESULT_FILE).read_bytes())
        often.append(len(made))
    assert results[0] == results[1]
    assert often[0] > often[1] == len(set(made)) > 1


@pytest.mark.slow
def test_statistics_of_a_directory_stand_in_for_texts(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "llama")
    of_texts = merged(recipe, tmp_path / "of_texts")
    first = recipe["models"][0]
    texts = tuple(first.pop("texts"))
    calibrate(first["model"], texts, tmp_path / "kept", INLINE, statistics="inputs", length=LENGTH)
    first["statistics"] = str(tmp_path / "kept")
    found = merged(recipe, tmp_path / "of_statistics")
    assert all(torch.equal(of_texts[name], tensor) for name, tensor in found.items())


def test_statistics_that_are_damaged_are_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "llama")
    first = recipe["models"][0]
    kept = tmp_path / "kept"
    calibrate(first["model"], tuple(first.pop("texts")), kept, INLINE, statistics="inputs", length=LENGTH)
    first["statistics"] = str(kept)
    data = bytearray((kept / RESULT_FILE).read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    (kept / RESULT_FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"kept/.* not those that 'raymerge calibrate' left"):
        submit(recipe, tmp_path / "out", INLINE)


def test_an_audit_finds_a_changed_byte_of_a_fitted_matrix(tmp_path: Path) -> None:
    options = replace(INLINE, keep_intermediates=True)
    recipe = recipe_of(tmp_path, "llama", methods=[{"role": "attention", "merge_method": "linear"}])
    recipe["models"] = [{**each, "parameters": {"weight": 1}} for each in recipe["models"]]
    submit(recipe, tmp_path / "out", options)
    verdict = audit(tmp_path / "out", AuditOptions(1.0, seed=3), INLINE)
    assert (verdict.problems, verdict.skipped) == ((), ())
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    path.write_bytes(data)
    assert audit(tmp_path / "out", AuditOptions(1.0, seed=3), INLINE).problems


def refused(recipe: Mapping[str, Any]) -> str:
    try:
        return "\n".join(str(each) for plan in plan_all([recipe]) for each in plan.problems)
    except PlanError as error:
        return str(error)


def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "llama")
    models = recipe["models"]
    without = [{"model": each["model"]} for each in models]
    assert "Add 'calibrate: {texts: [FILE]}'" in refused({**recipe, "models": without})
    merged_first = {**recipe, "calibrate": {"model": "merged", "length": LENGTH}}
    rule = {"role": "norm", "merge_method": "karcher"}
    assert "karcher makes some of their tensors" in refused({**merged_first, "methods": [rule]})
    of_one = {"role": "attention", "merge_method": "passthrough", "sources": [models[1]["model"]]}
    others_made = r"such as \S+self_attn\S+, which is made of \S+llama2, are not"
    assert re.search(others_made, refused({**merged_first, "methods": [of_one], "dtype": None}))
    turned = {"layers": 0, "merge_method": "regmean", "sources": [each["model"] for each in models[::-1]]}
    assert "made of" in refused({**merged_first, "methods": [turned]})
    submit(conversion(models[0]["model"], "fp8_block"), tmp_path / "fp8", INLINE)
    coded = [{**models[0], "model": str(tmp_path / "fp8")}, models[1]]
    assert "regmean multiplies plain numbers" in refused({**recipe, "models": coded})
