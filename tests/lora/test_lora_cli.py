"""``raymerge extract-lora``, and the page about adapters."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from kits.adapter_maker import peft_merge
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.command_line import run_command
from rich.status import Status

from raymerge.cli.adapters import told_modules
from raymerge.cli.render.screen import make_console
from raymerge.lora import ModuleReport
from raymerge.recipes import Recipe, recipe_from_mapping

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "adapters.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a base and its fine-tune."""
    base = tiny_llama(tmp_path / "base", 0)
    tiny_llama(tmp_path / "tuned", 1, base=base)
    return tmp_path


def test_it_writes_an_adapter_and_says_what_is_in_it(folder: Path) -> None:
    outcome = run_command("extract-lora", "tuned", "--base", "base", "-o", "out", "--rank", "4", cwd=folder)
    assert outcome.code == 0
    assert "Adapter in out" in outcome.text
    assert "21 modules, rank 4" in outcome.text
    assert "9: lm_head, model.embed_tokens, model.layers.0.input_layernorm and 6 more" in outcome.text
    assert peft_merge(read_tensors(folder / "base"), folder / "out")


def test_every_option_reaches_the_extraction(folder: Path) -> None:
    options: tuple[str, ...] = (
        "--energy",
        "0.5",
        "--include",
        "*attn*",
        "--include",
        "*norm*",
        "--include",
        "*embed*",
    )
    options += ("--exclude", "*q_proj*", "--embeddings", "adapter", "--rest", "skip", "--device", "cpu")
    command = ("extract-lora", "tuned", "--base", "base", "--output", "out", "--json", *options)
    outcome = run_command(*command, cwd=folder)
    report = json.loads(outcome.text)
    names = {module["name"].rpartition(".")[2] for module in report["modules"]}
    assert names == {"k_proj", "v_proj", "o_proj", "embed_tokens"}
    assert all(0.5 <= module["energy"] <= 1 for module in report["modules"])
    assert (report["output"], report["saved"]) == ("out", [])
    reasons = {each["reason"] for each in report["left_out"]}
    assert reasons == {"excluded", "not a matrix, and --rest is skip"}


def test_modules_are_listed_on_demand(folder: Path) -> None:
    command = ("extract-lora", "tuned", "--base", "base", "-o", "out", "--modules")
    assert "model.layers.2.mlp.up_proj" in run_command(*command, cwd=folder).text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("tuned", "--base", "tuned", "-o", "out"), "there is no change to extract"),
        (("tuned", "-o", "out"), "--base"),
        (("tuned", "--base", "base"), "--output"),
    ],
)
def test_refusals_are_sentences_and_exit_code_2(folder: Path, args: tuple[str, ...], said: str) -> None:
    outcome = run_command("extract-lora", *args, cwd=folder)
    assert outcome.code == 2
    assert said in outcome.text
    assert "Traceback" not in outcome.text


def test_errors_as_json(folder: Path) -> None:
    command = ("extract-lora", "tuned", "--base", "nowhere", "-o", "out", "--json")
    outcome = run_command(*command, cwd=folder)
    assert json.loads(outcome.text)["problems"][0]["where"] == "nowhere"


def test_a_line_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Status, "update", lambda _, text: said.append(text.plain))
    with told_modules(make_console(io.StringIO()), "merging the adapters") as tell:
        tell(ModuleReport("layers.0.up\x1b[2J", 4, 1.0, 1.0), 2)
        tell(ModuleReport("layers.1.[bold]up", 3, 1.0, 1.0), 2)
    assert said == [
        "1 of 2 modules: layers.0.up\\x1b[2J, rank 4",
        "2 of 2 modules: layers.1.[bold]up, rank 3",
    ]


def test_the_line_is_for_terminals_only() -> None:
    stream = io.StringIO()
    with told_modules(make_console(stream), "merging the adapters") as tell:
        tell(ModuleReport("layers.0.up", 4, 1.0, 1.0), 1)
    assert stream.getvalue() == ""


def test_the_recipes_on_the_page_are_recipes() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        assert isinstance(recipe_from_mapping(yaml.safe_load(example)), Recipe)
