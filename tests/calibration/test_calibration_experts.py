"""Statistics of experts: what REAP's formula gives for the whole model, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.calibrations import make, reading_model, stage_of, windows_of, write_text
from kits.checkpoint_maker import write_json
from kits.command_line import run_command
from kits.layer_streams import open_base
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import raymerge
from raymerge.api import plan_for
from raymerge.errors import IncompleteError, NonFiniteError, PlanError, RecipeError
from raymerge.events import Event, SegmentDone, StageKept
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import STAGE_RECORD
from raymerge.stages.calibration import blocks
from raymerge.stages.calibration.experts import SCORES, tokens_lost
from raymerge.stages.router.work import PROMPTS
from raymerge.stages.streamed_model import LayerStream, Shape

LENGTH = 9


def reference(root: Path | str, windows: list[list[int]]) -> dict[int, dict[str, torch.Tensor]]:
    """By layer, REAP's figures from the whole model in float64, expert by expert and token by token."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float64, **eager)
    figures: dict[int, dict[str, torch.Tensor]] = {}
    for number, layer in enumerate(model.eval().model.layers):
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None:
            size = experts.gate_up_proj.shape[0]
            names = ("weighted", "norm", "weight", "count", "largest")
            figures[number] = {name: torch.zeros(size, dtype=torch.float64) for name in names}
            experts.register_forward_pre_hook(
                lambda module, args, own=figures[number]: note(own, module, args)
            )
    with torch.no_grad():
        for window in windows:
            model(torch.tensor([window]), use_cache=False)
    return figures


def note(figures: dict[str, torch.Tensor], experts: Any, args: tuple[torch.Tensor, ...]) -> None:
    for token, chosen, weights in zip(*args, strict=True):
        for expert, weight in zip(chosen.tolist(), weights.tolist(), strict=True):
            gate, up = (experts.gate_up_proj[expert] @ token).chunk(2)
            given = experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            figures["weighted"][expert] += weight * given.norm()
            figures["norm"][expert] += given.norm()
            figures["weight"][expert] += weight
            figures["count"][expert] += 1
            figures["largest"][expert] = max(figures["largest"][expert], given.abs().max())


def in_fp8(root: Path, plain: Path) -> None:
    """Store a model's matrices as FP8 codes with scales, and what they stand for as another model."""
    tensors, codes = load_file(root / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in list(tensors.items()):
        if "_proj.weight" in name and "experts" in name:
            scale = tensor.float().abs().max() / 448
            codes[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            codes[f"{name}_scale_inv"] = scale.view(1, 1)
            tensors[name] = codes[name].float() * scale
    shutil.copytree(root, plain)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file({**tensors, **codes}, root / "model.safetensors", {"format": "pt"})
    config = json.loads((root / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (root / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize("stored", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "deepseek_v3"])
def test_figures_are_those_of_the_formula(tmp_path: Path, name: str, stored: str) -> None:
    reading_model(tmp_path / "model", name)
    if stored == "fp8":
        in_fp8(tmp_path / "model", tmp_path / "plain")
    text = write_text(tmp_path / "text.txt", 90)
    model = open_base(tmp_path / "model")
    made = make(stage_of(model, "experts", [text], length=LENGTH), tmp_path / "made")
    windows = windows_of(text, LENGTH)
    expected = reference(tmp_path / ("plain" if stored == "fp8" else "model"), windows)
    assert len(made.tensors) == 6 * len(expected)
    for layer, own in expected.items():
        found = {
            name.rpartition(".")[2]: tensor
            for name, tensor in made.tensors.items()
            if f".{layer}.mlp" in name
        }
        often = own["count"].clamp_min(1)
        assert found["count"].tolist() == own["count"].tolist()
        torch.testing.assert_close(found["saliency"], own["weighted"] / often, rtol=1e-5, atol=0)
        torch.testing.assert_close(found["norm"], own["norm"] / often, rtol=1e-5, atol=0)
        torch.testing.assert_close(found["weight"], own["weight"], rtol=1e-5, atol=0)
        torch.testing.assert_close(found["largest"], own["largest"], rtol=1e-5, atol=0)
        assert found["lost"].tolist()[::4] == [0, LENGTH * len(windows)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(
            "mixtral",
            "gpt_oss",
            "qwen2_moe",
            "qwen3_next",
            "glm4_moe",
            "deepseek_v2",
            "granitemoe",
            "lfm2_moe",
        ),
        *("phimoe", "minimax_m2", "hunyuan_v1_moe", "ernie4_5_moe", "flex_olmo"),
    ],
)
def test_other_families_route_as_the_whole_model_does(tmp_path: Path, name: str) -> None:
    """Each layer is given what the layers before give with their experts run one by one."""
    model = reading_model(tmp_path / "model", name, dtype=torch.float32)
    text = write_text(tmp_path / "text.txt", 90)
    made = make(stage_of(model, "experts", [text], length=LENGTH), tmp_path / "made").tensors
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, **eager)
    seen: list[torch.Tensor] = []

    def note_sums(module: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        _, chosen, weights = (*args, *kwargs.values())
        seen.append(torch.zeros(module.num_experts).index_add_(0, chosen.flatten(), weights.flatten()))

    for module in whole.modules():
        if hasattr(module, "num_experts") and type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(note_sums, with_kwargs=True)
    with torch.no_grad():
        whole.eval()(torch.tensor(windows_of(text, LENGTH)), use_cache=False)
    weights = [made[key] for key in sorted(made) if key.endswith(".weight")]
    assert len(weights) == len(seen) > 0
    for own, expected in zip(weights, seen, strict=True):
        torch.testing.assert_close(own, expected.double(), rtol=1e-4, atol=1e-6)


def test_layers_that_draft_are_dropped_by_the_size_of_their_experts(tmp_path: Path) -> None:
    reading_model(tmp_path / "model", "deepseek_v3")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        tensors[name.replace("layers.2", "layers.3")] = tensors[name].clone()
    head = "model.layers.3."
    tensors |= {f"{head}{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{head}eh_proj.weight"] = torch.ones(32, 64)
    tensors |= {f"{head}{name}.weight": torch.ones(64, 32) for name in ("embed_tokens", "shared_head.head")}
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_bytes())
    write_json(tmp_path / "model" / "config.json", config | {"num_nextn_predict_layers": 1})
    text = write_text(tmp_path / "text.txt", 60)
    raymerge.calibrate(tmp_path / "model", [text], tmp_path / "made", RunOptions(inline=True), length=LENGTH)

    def size(expert: int) -> float:
        gate, up, down = (
            tensors[f"{head}mlp.experts.{expert}.{part}_proj.weight"].double().norm()
            for part in ("gate", "up", "down")
        )
        return float(down * torch.hypot(gate, up))

    first, second = sorted(sorted(range(4), key=size)[:2])
    experts = {"drop": 2, "scores": str(tmp_path / "made")}
    notes = raymerge.plan({"base_model": str(tmp_path / "model"), "experts": experts}).manifest["notes"]
    assert f"layer 3: left out for the lowest scores: {first}, {second}" in notes
    # Of a merge that is gone when the output is in place, the same plan comes out again.
    before = {"name": "mid", "merge_method": "passthrough", "models": [{"model": str(tmp_path / "model")}]}
    measured = {"drop": 2, "scores": "saliency"}
    calibrate = {"texts": [str(text)], "length": LENGTH}
    after = {"base_model": "mid", "experts": measured, "calibrate": calibrate}
    write = (tmp_path / "chain.yml").write_text
    write(f"{json.dumps(before)}\n---\n{json.dumps(after)}\n")
    made = raymerge.submit(tmp_path / "chain.yml", tmp_path / "out", RunOptions(inline=True))
    assert plan_for(tmp_path / "chain.yml", tmp_path / "out")[-1].plan.digest == made.digest


def test_tokens_lost_are_those_with_no_expert_left() -> None:
    chosen = torch.tensor([[0, 1], [1, 2], [3, 0], [1, 0]])
    order = [1, 0, 3, 2]
    expected = [sum(set(row) <= set(order[:n]) for row in chosen.tolist()) for n in range(5)]
    assert tokens_lost(chosen, order).tolist() == expected == [0, 0, 2, 3, 4]


def test_statistics_do_not_depend_on_units_memory_and_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BATCH_TOKENS", 2 * LENGTH)
    monkeypatch.setattr(blocks, "UNIT_TOKENS", 5 * LENGTH)
    model = reading_model(tmp_path / "model", "qwen3_moe")
    texts = [write_text(tmp_path / f"{seed}.txt", 60, seed=seed) for seed in (1, 2)]
    stage = stage_of(model, "experts", texts, length=LENGTH)
    first = make(stage, tmp_path / "first")
    assert first.num_units == 3
    # Every token of all units chose two experts.
    num_tokens = LENGTH * sum(len(windows_of(text, LENGTH)) for text in texts)
    counts = [tensor for name, tensor in first.tensors.items() if name.endswith(".count")]
    assert [int(each.sum()) for each in counts] == [2 * num_tokens] * 3
    # With all experts of a layer in memory, or one at a time; and in another order, as after a kill.
    assert make(stage, tmp_path / "other", backwards=True, spare=1 << 30).data == first.data


def test_a_layer_takes_the_memory_of_one_expert(tmp_path: Path) -> None:
    model = reading_model(tmp_path / "model", "qwen3_moe", num_experts=16)
    alone, whole = (LayerStream(model, purpose) for purpose in (SCORES, PROMPTS))
    matrices = 3 * 24 * 32 * 4
    assert whole.least_budget(Shape(1, 9)) - alone.least_budget(Shape(1, 9)) == 15 * matrices


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt", 40)
    odd = stage_of(reading_model(tmp_path / "odd", "llama4_text"), "experts", [text], length=LENGTH)
    with pytest.raises(PlanError, match="has no experts that are called"):
        make(odd, tmp_path / "made")
    dense = reading_model(tmp_path / "dense", "llama")
    with pytest.raises(PlanError, match="no layer with experts"):
        stage_of(dense, "experts", [text])
    (tmp_path / "empty.txt").touch()
    model = reading_model(tmp_path / "model", "olmoe")
    with pytest.raises(PlanError, match="gives no token"):
        make(stage_of(model, "experts", [text, tmp_path / "empty.txt"]), tmp_path / "made")
    with pytest.raises(PlanError, match="no such file"):
        stage_of(model, "experts", [tmp_path / "absent.txt"])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.down_proj.weight"][3, 4] = torch.nan
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    broken = stage_of(open_base(tmp_path / "model"), "experts", [text], length=LENGTH)
    with pytest.raises(NonFiniteError, match=r"expert 2 of layer 1 gives NaN or infinity for .*text\.txt"):
        make(broken, tmp_path / "broken")


def test_drops_what_the_command_measured(tmp_path: Path) -> None:
    reading_model(tmp_path / "model", "deepseek_v3")
    text = write_text(tmp_path / "text.txt", 200)
    given = ["calibrate", "model", "--texts", text.name, "--length", "20", "--inline", "-o", "statistics"]
    made = run_command(*given, cwd=tmp_path)
    assert made.code == 0, made.text
    assert "drop 2" in made.text
    tensors = load_file(tmp_path / "statistics" / "model.safetensors")
    recipe = {
        "base_model": str(tmp_path / "model"),
        "experts": {"drop": 2, "scores": str(tmp_path / "statistics")},
    }
    raymerge.submit(recipe, tmp_path / "dropped", RunOptions(inline=True))
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("model", "dropped"))
    for layer in (1, 2):
        saliency = tensors[f"model.layers.{layer}.mlp.experts.saliency"]
        stay = sorted(saliency.argsort(descending=True)[:2].tolist())
        head = f"model.layers.{layer}.mlp"
        for part in ("weight", "e_score_correction_bias"):
            assert torch.equal(after[f"{head}.gate.{part}"], before[f"{head}.gate.{part}"][stay])
        for number, expert in enumerate(stay):
            for part in ("gate_proj", "up_proj", "down_proj"):
                name = f"{head}.experts.{{}}.{part}.weight"
                assert torch.equal(after[name.format(number)], before[name.format(expert)])
    loaded = raymerge.verify_load(tmp_path / "dropped")
    assert loaded.ran
    assert not loaded.problems
    assert "of the router's weight" in "".join(raymerge.plan(recipe).manifest["notes"])
    other = reading_model(tmp_path / "other", "deepseek_v3", seed=2)
    with pytest.raises(PlanError, match="holds statistics of model, which is not"):
        raymerge.plan(recipe | {"base_model": other.checkpoint.root})
    place = tmp_path / "statistics" / STAGE_RECORD
    record = json.loads(place.read_bytes())
    damages: list[dict[str, Any]] = [
        {"texts": 3},
        {"texts": [{}]},
        {"layers": [{}]},
        {"layers": [{"saliency": ["1"], "shares": [], "lost": []}]},
        {"sizes": None},
        {"model_digest": None},
    ]
    for damage in damages:
        write_json(place, record | {"report": record["report"] | damage})
        with pytest.raises(PlanError, match="its record is not as it was written"):
            raymerge.plan(recipe)


def test_measures_within_the_recipe(tmp_path: Path) -> None:
    """The plan is complete but for which experts; after the stage it is as with the stage's directory."""
    reading_model(tmp_path / "model", "olmoe")
    text = str(write_text(tmp_path / "text.txt", 120))
    raymerge.calibrate(
        tmp_path / "model", [text], tmp_path / "statistics", RunOptions(inline=True), length=20
    )
    base = {"base_model": str(tmp_path / "model")}
    calibrate = {"texts": [text], "length": 20}
    recipe = {**base, "experts": {"drop": 2, "scores": "saliency"}, "calibrate": calibrate}
    given = {**base, "experts": {"drop": 2, "scores": str(tmp_path / "statistics")}}
    assert "once the model has been run" in "".join(raymerge.plan(recipe).manifest["notes"])

    def end(event: Event) -> None:
        if isinstance(event, SegmentDone):
            raise IncompleteError("as after kill -9")

    with pytest.raises(IncompleteError):
        raymerge.submit(recipe, tmp_path / "measured", RunOptions(inline=True), on_event=end)
    events: list[Event] = []
    made = raymerge.submit(recipe, tmp_path / "measured", RunOptions(inline=True), on_event=events.append)
    assert any(isinstance(event, StageKept) for event in events)
    raymerge.submit(given, tmp_path / "given", RunOptions(inline=True))
    files = [(tmp_path / each / "model.safetensors").read_bytes() for each in ("measured", "given")]
    assert files[0] == files[1]
    # What was published keeps what it was chosen by: the same plan comes out again.
    assert not raymerge.replay(tmp_path / "measured").problems
    (merge,) = plan_for(recipe, tmp_path / "measured")
    assert merge.plan.digest == made.digest
    for change, words in (
        ({**recipe, "calibrate": None}, "no texts|none are named"),
        ({**given, "calibrate": calibrate}, "nothing of this recipe is measured"),
    ):
        with pytest.raises(RecipeError, match=words):
            raymerge.plan(change)
