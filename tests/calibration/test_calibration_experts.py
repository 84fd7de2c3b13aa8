"""Statistics of experts: what REAP's formula gives for the whole model, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kits.calibrations import make, reading_model, stage_of, windows_of, write_text
from kits.command_line import run_command
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import raymerge
from raymerge.options import RunOptions

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


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "deepseek_v3"])
def test_figures_are_those_of_the_formula(tmp_path: Path, name: str) -> None:
    model = reading_model(tmp_path / "model", name)
    text = write_text(tmp_path / "text.txt", 90)
    made = make(stage_of(model, "experts", [text], length=LENGTH), tmp_path / "made")
    expected = reference(tmp_path / "model", windows_of(text, LENGTH))
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
