"""Fisher information: squares of the whole model's gradients, window by window, and merges by them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.calibrations import make, reading_model, stage_of, windows_of, write_text
from kits.layer_streams import open_base
from kits.marks import slow_but
from kits.merge_cases import INLINE, merge
from kits.statistics_maker import given_fisher
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from raymerge.api import AuditOptions, audit, calibrate, plan, plan_for
from raymerge.errors import OptionError, PlanError, UserError
from raymerge.planner.calibration import model_digest
from raymerge.planner.inputs.weights import Weights
from raymerge.runtime.driver.chained_merges import MergeJob
from raymerge.stages import streamed_model
from raymerge.stages.calibration import blocks

LENGTH = 9
FAMILIES = ("llama", "gemma2", "qwen3_moe", "llama4_text", "gpt2", "bloom", "deepseek_v3", "gpt_oss", "lfm2")


def squared_gradients(root: Path, windows: list[list[int]], into: Path) -> dict[str, torch.Tensor]:
    """By canonical name, from the gradients of the whole model in float64: a mean of 1 over all elements."""
    eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float64, **eager).eval()
    sums = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for window in windows:
        model.zero_grad()
        tokens = torch.tensor([window])
        logits = model(tokens, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").backward()
        for name, each in model.named_parameters():
            sums[name] += 0.0 if each.grad is None else each.grad**2
    scale = sum(each.numel() for each in sums.values()) / float(sum(each.sum() for each in sums.values()))
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(sums[name] * scale)
    model.float().save_pretrained(into)
    with Weights(open_base(into)) as weights:
        return {name: weights.load(name) for name in weights.names()}


@pytest.mark.parametrize("name", slow_but(FAMILIES, "llama", "gemma2", "qwen3_moe", "llama4_text"))
def test_squares_are_those_of_the_whole_model(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a head of its own, with one that is tied, with experts, and with experts in one tensor; heads some
    rows at a time."""
    monkeypatch.setattr(streamed_model, "_FEWEST_ROWS", 25)
    model = reading_model(tmp_path / "model", name)
    text = write_text(tmp_path / "text.txt", 45)
    made = make(stage_of(model, "fisher", [text], length=LENGTH), tmp_path / "made")
    expected = squared_gradients(tmp_path / "model", windows_of(text, LENGTH), tmp_path / "expected")
    absent = {each for each in expected if each.endswith("e_score_correction_bias")}
    assert made.tensors.keys() == expected.keys() - absent
    for each, values in made.tensors.items():
        torch.testing.assert_close(values, expected[each], rtol=1e-4, atol=1e-6 * float(values.max()))


def test_units_and_memory_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units in another order, as workers finish them, and states in memory in place of a file."""
    monkeypatch.setattr(blocks, "UNIT_TOKENS", 20)
    model, text = reading_model(tmp_path / "model", "gemma2"), write_text(tmp_path / "text.txt", 60)
    stage = stage_of(model, "fisher", [text], length=LENGTH)
    made = make(stage, tmp_path / "one")
    assert 1 < made.num_units <= 5
    assert make(stage, tmp_path / "other", backwards=True, spare=1 << 20).data == made.data


def two_models(root: Path, name: str) -> list[Path]:
    places = [root / "a", root / "b"]
    for seed, place in enumerate(places, start=1):
        reading_model(place, name, seed=seed)
    return places


def recipe_of(places: list[Path], **more: Any) -> dict[str, Any]:
    weights = ({"weight": 0.5}, {"weight": 2.0})
    models = [
        {"model": str(place), "parameters": own, "statistics": str(given_fisher(place))}
        for place, own in zip(places, weights, strict=True)
    ]
    return {"merge_method": "fisher", "models": models, "dtype": "float32", **more}


@pytest.mark.parametrize("name", ["llama4_text", "deepseek_v3"])
def test_a_merge_is_that_of_the_formula(tmp_path: Path, name: str) -> None:
    """Of experts in one tensor and alone; what has no information is a mean, and the plan says so."""
    places = two_models(tmp_path, name)
    merge(recipe_of(places), tmp_path / "out")
    information = [load_file(given_fisher(place) / "model.safetensors") for place in places]
    parents, merged = [all_weights(place) for place in places], all_weights(tmp_path / "out")
    for tensor, values in merged.items():
        both = [(own.get(tensor, torch.zeros(())) + 0.01).double() for own in information]
        share = 0.5 * both[0] / (0.5 * both[0] + 2.0 * both[1])
        expected = share * parents[0][tensor].double() + (1 - share) * parents[1][tensor].double()
        torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
    assert not audit(tmp_path / "out", AuditOptions(1.0), INLINE).num_problems
    without = [each for each in plan(recipe_of(places)).manifest["notes"] if "no statistics" in each]
    assert bool(without) == (information[0].keys() != merged.keys())


def all_weights(place: Path) -> dict[str, torch.Tensor]:
    with Weights(open_base(place)) as weights:
        return {name: weights.load(name) for name in weights.names()}


def test_a_rule_takes_information_of_its_own_tensors(tmp_path: Path) -> None:
    places = two_models(tmp_path, "llama")
    rule = {"role": "mlp", "merge_method": "fisher"}
    merge({**recipe_of(places, methods=[rule]), "merge_method": "linear"}, tmp_path / "rule")
    merge(recipe_of(places), tmp_path / "all")
    plain = recipe_of(places, merge_method="linear")
    for entry in plain["models"]:
        del entry["statistics"]
    merge(plain, tmp_path / "linear")
    by_rule, whole, linear = (
        load_file(tmp_path / each / "model.safetensors") for each in ("rule", "all", "linear")
    )
    for tensor, values in by_rule.items():
        assert torch.equal(values, (whole if ".mlp." in tensor else linear)[tensor])


def test_information_is_collected_before_the_merge_or_was_before(tmp_path: Path) -> None:
    places = two_models(tmp_path, "llama")
    texts = [str(write_text(tmp_path / f"{seed}.txt", 30, seed=seed)) for seed in (1, 2)]
    models = [{"model": str(p), "texts": [t]} for p, t in zip(places, texts, strict=True)]
    recipe = {"merge_method": "fisher", "models": models, "calibrate": {"length": LENGTH}}
    merge(recipe, tmp_path / "out")
    calibrate(places[1], texts[1:], tmp_path / "b-made", INLINE, statistics="fisher", length=LENGTH)
    models[1] = {"model": str(places[1]), "statistics": str(tmp_path / "b-made")}
    merge(recipe, tmp_path / "again")
    first, second = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("out", "again"))
    assert first == second


def test_each_merge_of_a_file_runs_a_model_on_its_own_texts(tmp_path: Path) -> None:
    places = two_models(tmp_path, "llama")
    texts = [str(write_text(tmp_path / f"{seed}.txt", 30, seed=seed)) for seed in (1, 2)]

    def of_texts(*own: str) -> dict[str, Any]:
        models = [{"model": str(place), "texts": [text]} for place, text in zip(places, own, strict=True)]
        return {"merge_method": "fisher", "models": models, "calibrate": {"length": LENGTH}}

    last = of_texts(*texts[::-1])
    last["models"].append({"model": "first", "texts": texts})
    merges = plan_for([{"name": "first", **of_texts(*texts)}, last], tmp_path / "out")
    job = MergeJob(merges, tmp_path / "out", INLINE, on_event=lambda _: None)
    stages = [stage for merge in merges for stage in merge.stages]
    assert [[text.path for text in stage.spec.texts] for stage in stages] == [  # type: ignore[union-attr]
        *([text] for text in texts), *([text] for text in texts[::-1]), texts
    ]  # fmt: skip
    for stage in stages[:4]:
        work: Any = job._stage_run(stage).work
        assert [text.name for text in work.texts] == [text.path for text in stage.spec.texts]  # type: ignore[union-attr]
    assert len(job._reports(stages)) == 5


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    a, b = places = two_models(tmp_path, "llama")
    good = recipe_of(places)
    bare: dict[str, Any] = {**good, "models": [{"model": str(a)}, {"model": str(b)}]}
    swapped = [{"model": str(a), "statistics": str(given_fisher(b))}, good["models"][1]]
    text = str(write_text(tmp_path / "text.txt", 30))
    expert = {"source_model": str(b), "positive_prompts": ["w5"]}
    trunk = {"trunk": {"merge_method": "fisher"}, "gate_mode": "random"}
    for recipe, words in (
        ({"base_model": str(a), "experts": [expert, expert], **trunk}, "statistics of all models"),
        (bare, "no texts are named"),
        ({**good, "models": swapped}, f"which is not {a}"),
        ({**bare, "calibrate": {"texts": [text], "model": "merged"}}, "those of each source"),
        ({**bare, "calibrate": {"texts": [str(tmp_path / "none.txt")]}}, "no such file"),
    ):
        with pytest.raises(UserError, match=words):
            plan(recipe).require()


def test_statistics_are_those_of_one_model(tmp_path: Path) -> None:
    """Of a copy of it too; any tensor, the config and the tokenizer are parts of it."""
    place = tmp_path / "a"
    reading_model(place, "llama")
    before = model_digest(open_base(place))
    assert model_digest(open_base(Path(shutil.copytree(place, tmp_path / "copy")))) == before
    weights = place / "model.safetensors"
    tensors, stored = load_file(weights), weights.read_bytes()
    digests = []
    for name in tensors:
        changed = {**tensors, name: tensors[name] + 1}
        save_file(changed, weights, {"format": "pt"})
        digests.append(model_digest(open_base(place)))
    weights.write_bytes(stored)
    for key in ("config.json", "tokenizer_config.json"):
        kept = (place / key).read_text()
        (place / key).write_text(json.dumps({**json.loads(kept), "rope_theta": 5.0}))
        digests.append(model_digest(open_base(place)))
        (place / key).write_text(kept)
    assert model_digest(open_base(place)) == before
    assert len({before, *digests}) == len(tensors) + 3


def test_what_turns_texts_into_tokens_tells_stages_apart(tmp_path: Path) -> None:
    """The chat template, and whether a file has conversations; a file that is written to later is refused."""
    place = tmp_path / "a"
    model = reading_model(place, "llama")
    line = json.dumps(
        {"messages": [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]}
    )
    text, chat = tmp_path / "text.txt", tmp_path / "text.jsonl"
    for path in (text, chat):
        path.write_text(line)
    stages = [stage_of(model, "fisher", [path]) for path in (text, chat)]
    for template in ("{{ messages }}", "{{ messages[0] }}"):
        (place / "chat_template.jinja").write_text(template)
        stages.append(stage_of(open_base(place), "fisher", [chat]))
    assert len({stage.digest for stage in stages}) == 4
    text.write_text(line + " ")
    with pytest.raises(PlanError, match=r"text\.txt: was written to since"):
        make(stages[0], tmp_path / "made")


def test_numbers_of_tokens_are_refused_by_name(tmp_path: Path) -> None:
    places = two_models(tmp_path, "llama")
    text = str(write_text(tmp_path / "text.txt", 30))
    long: dict[str, Any] = {"length": 1 << 20}
    for given, option in (({"tokens": 0}, "--tokens"), ({"length": 1}, "--length"), (long, "--length")):
        with pytest.raises(OptionError, match=f"^{option}: "):
            calibrate(places[0], [text], tmp_path / "made", INLINE, statistics="fisher", **given)
    models = [f"  - {{model: {place}, texts: [{text}]}}" for place in places]
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        "\n".join(["merge_method: fisher", "models:", *models, "calibrate:", "  length: 1048576"])
    )
    with pytest.raises(PlanError, match=r"recipe\.yml:6:.* reads \d+ at once"):
        plan(recipe).require()


def test_what_nothing_uses_is_refused_where_it_stands(tmp_path: Path) -> None:
    models = ["models:", "  - {model: a, texts: [a.txt]}", "  - model: b", "    statistics: b"]
    lines = ["merge_method: linear", *models, "calibrate: {texts: [c.txt]}"]

    def places(*written: str) -> list[str]:
        """The lines that are refused for it, among all problems: the models are not there."""
        (tmp_path / "recipe.yml").write_text("\n".join(written))
        with pytest.raises(UserError) as caught:
            plan(tmp_path / "recipe.yml")
        words = ("nothing of this recipe", "stands here again", "nothing here is made")
        refused = [each for each in caught.value.problems if any(word in each.what for word in words)]
        return [each.where.rpartition("recipe.yml:")[2].partition(":")[0] for each in refused]

    assert places(*lines) == ["3", "5", "6"]
    assert places(*lines, "router: repair") == ["5"]
    assert places(*lines, "methods: [{role: mlp, merge_method: fisher}]") == []
    assert places("merge_method: regmean", *lines[1:5], "calibrate: {model: merged}") == []
    merged = ["calibrate:", "  texts: [c.txt]", "  model: merged"]
    assert places(*lines[:3], "router: repair", *merged) == ["7"]
    assert places("base_model: a", "experts: {drop: 1, scores: saliency}", *merged) == ["5"]
    again = ["  - {model: a}", "  - {model: a, texts: [a.txt]}"]
    assert places("merge_method: fisher", *lines[1:3], *again) == ["4"]
