"""Every file below a source has a disposition: it is read, copied, left out by a rule that the plan names, or
refused by its name; wherever the source lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kits.checkpoint_maker import tiny_llama
from kits.command_line import run_command
from kits.hub_server import hub_server
from kits.s3_server import s3_server
from safetensors.torch import save_file

from raymerge.api import inspect, plan, plan_for, submit
from raymerge.errors import PlanError
from raymerge.options import RunOptions
from raymerge.publish.output_place import place_of

LEFT_OUT = {
    "original/consolidated.00.pth": "original release",
    "original/params.json": "original release",
    "consolidated.safetensors": "original release",
    "metal/model.bin": "original release",
    "onnx/model.onnx": "export for other software",
    "openvino/openvino_model.bin": "export for other software",
    "model-Q4_K_M.gguf": "export for other software",
    "tf_model.h5": "export for other software",
    "flax_model.msgpack": "export for other software",
    "model.fp16.safetensors": "variant in another precision",
    "pytorch_model.bin": "pickled copy",
    "pytorch_model.bin.index.json": "pickled copy",
    "2_Dense/pytorch_model.bin": "pickled copy",
    "lora/adapter_config.json": "adapter",
    "lora/adapter_model.safetensors": "adapter",
    "checkpoint-500/model.safetensors": "training state",
    "optimizer.pt": "training state",
    "training_args.bin": "training state",
    ".gitattributes": "hidden",
    "README.md": "model card",
    "raymerge/run.json": "record of a merge",
}
REFUSED = {"vocoder/model.pt"}
PARTS = (
    *("2_Dense/model.safetensors", "extra.safetensors"),
    *(f"parts/deep/down/model-0000{number}-of-00002.safetensors" for number in (1, 2)),
)
PICKLED_PART = "3_Dense/pytorch_model.bin"
WEIGHT = {"parameters": {"weight": 1.0}}
COPIED = {"LICENSE", "1_Pooling/config.json", "tokenizer.json", "spk_dict.pt", "speakers/mean.npz"}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with all that repositories hold beside one."""
    root = tiny_llama(tmp_path_factory.mktemp("zoo") / "zoo", 0)
    for key in (*LEFT_OUT, *REFUSED, *COPIED):
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
    for key in (*PARTS, PICKLED_PART):
        path, tensors = root / key, {f"{Path(key).stem}.weight": torch.ones(2)}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(tensors, path) if key == PICKLED_PART else save_file(tensors, path)
    return root


@pytest.fixture(params=["directory", "s3", "hub", "hub by address", "hub by address, fetched"])
def place(request: pytest.FixtureRequest, zoo: Path, tmp_path: Path) -> Iterator[tuple[str, RunOptions]]:
    """What recipes call the model, and how it is reached."""
    here = RunOptions(inline=True)
    if request.param == "directory":
        yield str(zoo), here
    elif request.param == "s3":
        with s3_server() as server:
            server.upload(zoo, "zoo")
            yield "s3://models/zoo", replace(here, storage=server.options)
    else:
        with hub_server(tmp_path / "cache") as hub:
            hub.push("org/zoo", zoo)
            if request.param == "hub by address, fetched":
                inspect("org/zoo")
            yield "org/zoo" if request.param == "hub" else "hf://org/zoo", here


def test_every_file_is_accounted_for(place: tuple[str, RunOptions]) -> None:
    name, options = place
    found = inspect(place_of(name, options))
    assert {each.key: each.rule for each in found.left_out if each.rule} == LEFT_OUT
    assert {each.key for each in found.left_out if each.rule is None} == REFUSED
    assert {*COPIED} <= {*found.companions}
    assert {file.key for file in found.files} == {"model.safetensors", *PARTS, PICKLED_PART}


def test_weights_that_no_rule_is_about_stop_a_plan_and_a_run(
    place: tuple[str, RunOptions], tmp_path: Path
) -> None:
    name, options = place
    recipe = {"merge_method": "linear", "models": [{"model": name, "parameters": {"weight": 1.0}}]}
    if name == "org/zoo":
        # What a repository lists is refused before it is fetched, so that there is nothing to plan with.
        with pytest.raises(PlanError, match=r"vocoder/model\.pt"):
            plan_for(recipe, tmp_path / "out", options)
    else:
        (merge,) = plan_for(recipe, tmp_path / "out", options)
        (problem,) = merge.plan.problems
        assert "vocoder/model.pt" in problem.what
    with pytest.raises(PlanError, match="vocoder"):
        submit(recipe, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_the_plan_on_the_screen_names_the_rules_and_what_they_leave_out(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "one", 0)
    tiny_llama(tmp_path / "two", 1)
    for key in ("one/README.md", "one/optimizer.pt", "two/original/consolidated.00.pth", "two/README.md"):
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_bytes(b"x" * 10)
    (tmp_path / "recipe.yml").write_text(
        "{merge_method: linear, models: [{model: one}, {model: two}], parameters: {weight: 1}}\n"
    )
    done = run_command("plan", "recipe.yml", "--json", cwd=tmp_path)
    lines = [
        (line["source"], line["rule"], line["files"], line["examples"])
        for line in json.loads(done.text)["left_out"]
    ]
    # Of the second model no companion is copied, so that its model card is no news.
    assert lines == [
        (0, "model card", 1, ["README.md"]),
        (0, "training state", 1, ["optimizer.pt"]),
        (1, "original release", 1, ["original/consolidated.00.pth"]),
    ]
    shown = run_command("plan", "recipe.yml", cwd=tmp_path, env={"COLUMNS": "200"}).text
    for word in ("left out by rule", "model card", "training state", "original/consolidated.00.pth"):
        assert word in shown
    shown = run_command("inspect", "two", cwd=tmp_path, env={"COLUMNS": "200"}).text
    assert "original release" in shown


def test_a_model_whose_tokenizer_alone_is_taken_may_hold_anything(zoo: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "one", 1)
    recipe = {"merge_method": "linear", "models": [{"model": str(other)}], "tokenizer_source": str(zoo)}
    assert not [each for each in plan(recipe).problems if "vocoder" in each.what]


def test_links_to_directories_do_not_vanish(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", 0)
    for key in ("dense/model.safetensors", "notes/text.txt", "exports/model.onnx", "more/deep/a.txt"):
        (tmp_path / key).parent.mkdir(parents=True)
        (tmp_path / key).write_bytes(b"{}")
    (tmp_path / "more" / "linked").symlink_to(tmp_path / "dense")
    (model / "checkpoint-5").mkdir()
    (model / "parts").mkdir()
    links = {
        "parts/2_Dense": ("dense", None),
        "more": ("more", None),
        "notes": ("notes", "link to a directory"),
        "exports": ("exports", "link to a directory"),
        "latest": ("model/checkpoint-5", "link to a directory"),
        "original": ("dense", "original release"),
    }
    for key, (target, _) in links.items():
        (model / key).symlink_to(tmp_path / target)
    left_out = {each.key: each.rule for each in inspect(model).left_out}
    assert left_out == {f"{key}/": rule for key, (_, rule) in links.items()}
    (problem,) = plan({"merge_method": "linear", "models": [{"model": str(model)}], **WEIGHT}).problems
    assert "more/, parts/2_Dense/" in problem.what


def test_an_adapter_is_not_extracted_from_part_of_a_model(zoo: Path, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "base", 1)
    done = run_command("extract-lora", str(zoo), "--base", "base", "-o", "lora", "--rank", "2", cwd=tmp_path)
    assert (done.code, "2_Dense" in done.text) == (2, True), done.text
