"""``raymerge convert``: the recipe that its arguments mean, and the same run as that of ``submit``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama
from kits.command_line import Outcome, run_command
from kits.plan_maker import header_checkpoint, llama, llama_specs
from kits.quantised_merges import changed_bytes

import raymerge
import raymerge.api
from raymerge.dtypes import DType, config_name


def _convert(folder: Path, *args: str) -> Outcome:
    return run_command("convert", "model", "-o", "out", *args, cwd=folder)


def test_a_conversion_is_shown_as_a_merge_is(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "model", 0, layers=1)
    outcome = _convert(tmp_path, "--to", "fp8_block", "--inline")
    assert outcome.code == 0, outcome.text
    lines = outcome.text.splitlines()
    assert lines[0].startswith("planned: ")
    assert any(line.startswith("verified: ") for line in lines)
    assert "done: out" in lines
    names = read_tensors(tmp_path / "out").keys()
    assert "model.layers.0.mlp.up_proj.weight_scale_inv" in names
    assert "lm_head.weight_scale_inv" not in names
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        tmp_path / "model" / "tokenizer.json"
    ).read_bytes()


def test_the_same_format_is_a_copy(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "model", 0, layers=1)
    assert _convert(tmp_path, "--to", "same", "--inline").code == 0
    assert changed_bytes(tmp_path / "out", tmp_path / "model") == set()
    config = "config.json"
    assert json.loads((tmp_path / "out" / config).read_text()) == json.loads(
        (tmp_path / "model" / config).read_text()
    )


def test_a_rehearsal_shows_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    llama(tmp_path / "model", 1)
    outcome = _convert(tmp_path, "--to", "attention:fp8_block", "--to", "same", "--dry-run")
    assert outcome.code == 0, outcome.text
    assert "Plan of converting model" in outcome.text
    assert "quantization_config" in outcome.text
    assert not (tmp_path / "out").exists()
    event = json.loads(_convert(tmp_path, "--to", "same", "--dry-run", "--json").text)
    assert (event["event"], event["method"]) == ("dry_run", "passthrough")


def test_the_plan_is_that_of_the_recipe(tmp_path: Path) -> None:
    root = str(llama(tmp_path / "model", 1))
    lines = [
        {"role": "attention", "value": "fp8_block"},
        {"glob": "*.mlp.up_proj.*", "value": "same"},
        "bf16",
    ]
    recipe = {"merge_method": "passthrough", "models": [{"model": root}], "out_format": lines}
    made = raymerge.conversion(root, ["attention:fp8_block", "*.mlp.up_proj.*:same", "bf16"])
    assert raymerge.plan(made).digest == raymerge.plan(recipe).digest


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (["fp8"], "--to fp8: 'fp8' is not known here."),
        (["experts:bf16"], "'experts' is no role, and no pattern of names either."),
        (["bf16", "expert:same"], "--to expert:same: 'bf16' stands before it and is for all tensors."),
        (["bf16", "same"], "Give 'bf16' last."),
    ],
)
def test_what_cannot_be_meant_is_refused(to: list[str], said: str, tmp_path: Path) -> None:
    outcome = _convert(tmp_path, *(word for each in to for word in ("--to", each)))
    assert outcome.code == 2
    assert said in outcome.text
    assert "Traceback" not in outcome.text


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32])
def test_plain_numbers_of_another_dtype_become_bfloat16(dtype: DType, tmp_path: Path) -> None:
    config = {**llama_config(layers=1), "torch_dtype": config_name(dtype)}
    root = header_checkpoint(tmp_path / "model", llama_specs(1, dtype=dtype), config)
    made = raymerge.plan(raymerge.conversion(root, "bf16"))
    assert made.problems == ()
    assert set(made["tensors"].column("dtype").to_pylist()) == {"BF16"}
    assert made.manifest["config"]["torch_dtype"] == "bfloat16"


def test_a_selector_that_speaks_of_no_tensor_is_refused(tmp_path: Path) -> None:
    root = llama(tmp_path / "model", 1)
    asked = ["*.self_attn.*:same", "*.mpl.*:fp8_block", "attention:bf16", "mlp:fp8_block", "same"]
    problems = raymerge.plan(raymerge.conversion(root, asked)).problems
    assert [problem.where for problem in problems] == ["--to *.mpl.*:fp8_block", "--to attention:bf16"]
    assert all(problem.what == "this line holds for no tensor of the output." for problem in problems)
