"""verify, diff, convert and adapters: what they report."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kits.adapter_merges import DOWN, Q0, adapter, with_heads
from kits.checkpoint_maker import llama_config, read_config, read_tensors, tiny_llama, write_json
from kits.command_line import Outcome, run_command
from kits.merges import MEAN, STACK, make_models, write_recipe
from kits.plan_maker import header_checkpoint, llama, llama_specs
from kits.quantised_merges import changed_bytes
from kits.recipe_maker import one
from rich.console import Console

import raymerge
import raymerge.api
from raymerge.api import RunOptions
from raymerge.cli.render.progress import PlainProgress
from raymerge.cli.render.reports import show_routing
from raymerge.cli.running import Ending, shown_status
from raymerge.dtypes import DType, config_name
from raymerge.events import (
    DuplicatesFound,
    EncodingErrorsFound,
    Event,
    OnEvent,
    Published,
    RayEnded,
    StageReport,
    Stopping,
)
from raymerge.merge_plan.report import ConversionProof, DuplicateGroup, ErrorsAbove, RoleError, TensorError
from raymerge.stages.router.results import LayerReport, gate_report


def _merged(root: Path) -> Path:
    recipe = write_recipe(make_models(root), MEAN)
    assert run_command("submit", recipe, "-o", "out", "--inline", cwd=root).code == 0
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _merged(tmp_path_factory.mktemp("merged"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def _verify(folder: Path, *args: str) -> Outcome:
    return run_command("verify", "out", *args, cwd=folder)


def _audit(folder: Path, *args: str) -> Outcome:
    return _verify(folder, "--level", "audit", "--inline", *args)


def test_a_merged_checkpoint_is_sound_as_its_plan_says(folder: Path, tmp_path: Path) -> None:
    outcome = _verify(folder)
    assert outcome.code == 0
    assert outcome.text.startswith("out is sound: 30 tensors, ")
    assert "as its plan says" in outcome.text
    verdict = json.loads(_verify(folder, "--json").text)
    assert (verdict["sound"], verdict["tensors"], verdict["files"]) == (True, 30, 1)
    tiny_llama(tmp_path / "out", 0, files=2)
    assert "in 2 files; it keeps no plan" in _verify(tmp_path).text


def test_damage_is_not_sound(copy: Path) -> None:
    write_json(copy / "out" / "config.json", llama_config() | {"vocab_size": 65})
    outcome = _verify(copy)
    assert (outcome.code, "vocab_size is 65" in outcome.text) == (2, True)
    weights = copy / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    outcome = _verify(copy)
    outcome.check_refusal("out is NOT SOUND: 1 problem.", "model.safetensors", "→")
    shutil.rmtree(copy / "out")
    outcome = _verify(copy, "--json")
    verdict = json.loads(outcome.text)
    assert (outcome.code, verdict["sound"], verdict["problems"][0]["where"]) == (2, False, "out")


def test_an_audit_tells_what_it_looked_at(folder: Path) -> None:
    outcome = _audit(folder, "--seed", "7")
    assert outcome.code == 0
    assert outcome.text.startswith("out is sound: 30 tensors.")
    assert "compared with the digests of the ledger" in outcome.text
    assert "30 tensors recomputed from the sources (0.01 of each, seed 7)" in outcome.text
    assert "not audited" not in outcome.text


def test_an_audit_chooses_a_seed_and_says_which(folder: Path) -> None:
    one, other = (json.loads(_audit(folder, "--json").text) for _ in range(2))
    assert one["seed"] != other["seed"]
    assert one["sound"] is other["sound"] is True
    assert (one["recomputed"], one["skipped"], one["problems"]) == (30, [], [])


def test_an_audit_of_damage_ends_with_2(copy: Path) -> None:
    weights = copy / "out" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for place in range(1, 20):
        content[-place * 2000] ^= 0x80
    weights.write_bytes(content)
    outcome = _audit(copy, "--sample", "1", "--show", "2")
    outcome.check_refusal("out is NOT SOUND: ")
    assert outcome.text.count("→") == 2
    assert "more are not shown; --show " in outcome.text
    assert _verify(copy).code == 0


def test_an_audit_says_what_it_could_not_look_at(tmp_path: Path) -> None:
    # Not of a copy: the record says where the sources were.
    (_merged(tmp_path) / "two").rename(tmp_path / "away")
    outcome = _audit(tmp_path)
    outcome.check_refusal("not audited: 30 tensors (such as lm_head.weight): two is not there")
    assert _audit(tmp_path, "--source", "two=away").code == 0


def test_an_audit_that_could_compare_nothing_does_not_say_sound(copy: Path) -> None:
    """The mean of a model and its negative: all of it is left open."""
    name = yaml.safe_load((copy / "recipe.yml").read_text())["models"][0]["model"]
    shutil.copytree(copy / name, copy / "same")
    entries = [{"model": each, "parameters": {"weight": w}} for each, w in ((name, 1.0), ("same", -1.0))]
    cancelled = {"merge_method": "linear", "models": entries, "parameters": {"normalize": False}}
    write_recipe(copy, yaml.safe_dump(cancelled | {"dtype": "bfloat16"}))
    again = run_command("submit", "recipe.yml", "-o", "out", "--inline", "--replace", cwd=copy)
    assert again.code == 0, again.text
    outcome = _audit(copy)
    assert outcome.text.startswith("out is as it was written: 30 tensors. Whether they are right was not")
    assert "not audited: 30 tensors" in outcome.text


def test_an_audit_ends_in_time_once_it_is_told_to() -> None:
    ending = Ending()
    with shown_status("auditing", ending) as show:
        show(Stopping(None))
        assert not ending._timers
        show(Stopping(1.0))
    assert len(ending._timers) == 1
    ending.cancel()


@pytest.mark.parametrize("as_json", [False, True])
def test_an_audit_whose_ray_dies_says_so(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    ending = Ending(json_to=sys.__stdout__ if as_json else None)
    with shown_status("auditing", ending) as show:
        show(RayEnded("raylet"))
    said, shown = "the embedded Ray of this command has ended (raylet died).", capfd.readouterr()
    assert codes == [3]
    if not as_json:
        assert said in shown.err
        return
    event = json.loads(shown.out)
    assert (event["event"], event["exit_code"]) == ("error", 3)
    assert event["message"].startswith(said)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--sample", "0"), "0 is no share of the elements"),
        (("--source", "two"), "'two' does not say which source is where"),
        (("--memory", "1MiB"), "and this takes 16.78 MB"),
    ],
)
def test_what_an_audit_cannot_be_asked(wrong: tuple[str, ...], said: str, folder: Path) -> None:
    outcome = _audit(folder, *wrong)
    assert (outcome.code, said in outcome.text) == (2, True)


def test_a_checkpoint_that_loads(folder: Path) -> None:
    outcome = _verify(folder, "--level", "load")
    assert outcome.code == 0
    assert outcome.text.startswith("out loads.\nLlamaForCausalLM of transformers ")
    assert "it was loaded and run, with " in outcome.text
    outcome = _verify(folder, "--level", "load", "--memory", "16MiB")
    assert outcome.code == 0
    assert "only names and shapes were compared" in outcome.text


def test_a_checkpoint_that_does_not_load(tmp_path: Path) -> None:
    make_models(tmp_path, ("out",))
    write_json(tmp_path / "out" / "config.json", llama_config(layers=4))
    outcome = _verify(tmp_path, "--level", "load", "--json")
    verdict = json.loads(outcome.text)
    assert (outcome.code, verdict["sound"], verdict["ran"]) == (2, False, False)
    assert "would be random" in verdict["problems"][0]["what"]


def test_a_record_is_derived_anew(folder: Path) -> None:
    outcome = _verify(folder, "--replay")
    assert outcome.code == 0
    assert outcome.text.startswith("out is what its record says.\nplan ")
    assert "2 sources, 30 tensors" in outcome.text
    outcome = _verify(folder, "--replay", "--source", "one=two/absent")
    outcome.check_refusal("out IS NOT WHAT ITS RECORD SAYS: 1 problem.", "two/absent")
    outcome = _verify(folder, "--replay", "--level", "audit")
    assert (outcome.code, "so is --level audit." in outcome.text) == (2, True)
    assert "Give one after the other." in outcome.text


GROUPS = (
    DuplicateGroup("model.layers.*.mlp.up_proj.weight", 14, 3_000_000),
    DuplicateGroup("model.layers.*.mlp.down_proj.weight", 14, 2_000_000),
    DuplicateGroup("model.layers.*.input_layernorm.weight", 2, 1000),
)
ATTENTION = TensorError("model.layers.0.self_attn.o_proj.weight", "attention", 0.0266)
EXPERT = TensorError("model.layers.1.mlp.experts.3.up_proj.weight", "expert", 0.031)
ROLES = (RoleError("attention", 1, 0.0266, ATTENTION), RoleError("expert", 24, 0.0262, EXPERT))
LAYERS = (LayerReport(0, 2.5, (0.9, 0.5), (0.7, 0.3), 1.5), LayerReport(1, 7.0, (0.7, 0.5), (0.6, 0.4), 0.5))
ROWS = gate_report("ridge", ("expert 0 (code)", "expert 1 (french)"), LAYERS, (200, 30), (1,))
ENTROPY = ROWS["summary"]["entropy"]


def _said(event: Event) -> list[str]:
    stream = io.StringIO()
    PlainProgress(Console(file=stream, width=80), "out")(event)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("shared", "more"),
    [(0, "; the file system cannot have them share storage"), (4_000_000, "; 4.00 MB share storage")],
)
def test_what_was_made_once_is_told_with_the_largest_groups(shared: int | None, more: str) -> None:
    assert _said(DuplicatesFound(30, 5_001_000, GROUPS, shared, ())) == [
        f"duplicates: 30 tensors (5.00 MB) equal others, made once and written to each place{more}",
        "  model.layers.*.mlp.up_proj.weight: 14 tensors, 3.00 MB",
        "  model.layers.*.mlp.down_proj.weight: 14 tensors, 2.00 MB",
        "  and 1 group more",
    ]


def test_what_turned_out_equal_has_lines_of_its_own() -> None:
    group = DuplicateGroup("a\x1b[31m", 2, 1000)
    assert _said(DuplicatesFound(0, 0, (), None, (group,))) == [
        "duplicates: 2 tensors (1.00 kB) turned out equal to others, which the plan could not know",
        "  a\\x1b[31m: 2 tensors, 1.00 kB",
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_stack_ends_with_its_duplicates(as_json: bool, tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), STACK)
    flags = ("--json",) if as_json else ()
    outcome = run_command("submit", recipe, "-o", "out", "--inline", *flags, cwd=tmp_path)
    assert outcome.code == 0
    lines = outcome.text.splitlines()
    if as_json:
        (found,) = [each for each in map(json.loads, lines) if each["event"] == "duplicates_found"]
        assert (found["tensors"], len(found["groups"])) == (9, 9)
        assert found["nbytes"] == sum(group["nbytes"] for group in found["groups"])
        return
    (place,) = [number for number, line in enumerate(lines) if line.startswith("duplicates: 9 tensors (")]
    assert lines[place + 3] == "  and 7 groups more"
    assert lines[place + 4].startswith("verified: ")


def test_encoding_errors_are_told_by_role_with_a_warning_below() -> None:
    assert _said(EncodingErrorsFound(ROLES, ErrorsAbove(0.03, 2, EXPERT))) == [
        "encoded: 25 tensors as codes with scales; relative error that this added:",
        "  attention: 0.0266 in 1 tensor, at most 0.0266 in model.layers.0.self_attn.o_proj.weight",
        "  expert: 0.0262 in 24 tensors, at most 0.031 in model.layers.1.mlp.experts.3.up_proj.weight",
        "warning: encoding changed 2 tensors by more than 0.03 (warn_encoding_error), "
        "model.layers.1.mlp.experts.3.up_proj.weight most of all, by 0.031; "
        "'{role: expert, value: bf16}' as the first line of out_format keeps that role in bfloat16",
    ]
    assert len(_said(EncodingErrorsFound(ROLES, None))) == 3


@pytest.mark.parametrize(
    ("proof", "line"),
    [
        (
            ConversionProof(24, 96, 0, 0, None),
            "  exact: 96 blocks of 24 tensors hold just the numbers that they were made of",
        ),
        (
            ConversionProof(24, 96, 2, 3, TensorError("w", "expert", 0.1, 1, 0.25)),
            "  not exact: 3 of 96 blocks, in 2 of 24 tensors; the largest error is 0.25, in w (1 block)",
        ),
    ],
)
def test_a_conversion_ends_with_its_proof(proof: ConversionProof, line: str) -> None:
    assert _said(EncodingErrorsFound(ROLES, None, proof))[3:] == [line]


def _table(report: Mapping[str, Any]) -> str:
    stream = io.StringIO()
    show_routing(Console(file=stream, width=120), [StageReport("router rows of a mixture", report)])
    return stream.getvalue()


def test_the_table_says_what_the_rows_are_like() -> None:
    lines = [" ".join(line.split()) for line in _table(ROWS).splitlines()]
    assert lines == [
        "",
        "router rows of a mixture",
        "gate mode ridge",
        "layers 2",
        "condition 7.0 at worst, good below 100",
        f"load entropy {ENTROPY:.2f} of 1.00 bits; in the lowest layer {LAYERS[0].entropy:.2f}",
        "margin 1 between the first and the second logit",
        "expert tokens chosen first for",
        "expert 0 (code) 200 80%",
        "expert 1 (french)* 30 50%",
        "* judged on the texts that its row was made from, for want of held-out ones",
    ]
    # Other stages have none.
    assert _table({"reference": "one", "other": "two", "layers": []}) == ""


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ((math.inf, 9.0), "infinite at worst; above 5, experts are hardly told apart, in layers 0, 1"),
        ((9.0,) * 20, "in layers 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_rows_that_hardly_differ_are_pointed_at(conditions: tuple[float, ...], said: str) -> None:
    layers = tuple(LayerReport(number, each) for number, each in enumerate(conditions))
    text = _table(gate_report("hidden", ("a", "b"), layers))
    assert said in text
    # No text was run, so nothing is said of routing.
    assert "expert " not in text
    assert "margin" not in text


@pytest.mark.parametrize("as_json", [False, True])
def test_submit_ends_with_the_table(as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table stands behind the lines of the run; JSON has the report as an event."""
    recipe = write_recipe(make_models(tmp_path), MEAN)

    def submit(recipe: str, output: str, options: RunOptions, *, on_event: OnEvent) -> None:
        on_event(StageReport("router rows", ROWS))
        on_event(Published("/somewhere/out", 61.0))

    monkeypatch.setattr("raymerge.api.submit", submit)
    outcome = run_command("submit", recipe, "-o", "out", *(["--json"] if as_json else []), cwd=tmp_path)
    assert outcome.code == 0
    if as_json:
        events = [json.loads(line) for line in outcome.text.splitlines()]
        assert [event["report"]["mode"] for event in events if event["event"] == "stage_report"] == ["ridge"]
    else:
        assert outcome.text.index("done: out") < outcome.text.index("gate mode")


def test_equal_checkpoints_exit_with_0(folder: Path) -> None:
    outcome = run_command("diff", "one", "one", cwd=folder)
    assert outcome.code == 0
    assert outcome.text.startswith("A = one and B = one are equal, byte by byte.")
    assert "attention     12" in outcome.text
    assert "config.json" not in outcome.text


def test_checkpoints_that_differ_exit_with_2_and_a_table(tmp_path: Path) -> None:
    make_models(tmp_path)
    write_json(tmp_path / "two" / "config.json", llama_config() | {"rope_theta": 5.0})
    (tmp_path / "two" / "tokenizer.json").unlink()
    outcome = run_command("diff", "one", "two", cwd=tmp_path)
    assert outcome.code == 2
    assert outcome.text.startswith("A = one and B = two differ.")
    for said in ("rel. error", "and 20 tensors more; --json lists all", "rope_theta  absent  5.0", "only a"):
        assert said in outcome.text


def test_the_comparison_as_json(folder: Path) -> None:
    outcome = run_command("diff", "one", "two", "--json", cwd=folder)
    found = json.loads(outcome.text)
    assert outcome.code == 2
    assert (found["equal"], len(found["tensors"])) == (False, 30)
    assert {tensor["status"] for tensor in found["tensors"]} == {"different"}
    assert found["companions"]["tokenizer.json"] == "equal"


def test_threads_are_checked(folder: Path) -> None:
    outcome = run_command("diff", "one", "two", "--threads", "0", cwd=folder)
    outcome.check_refusal("0 threads cannot compare anything")


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
    assert read_config(tmp_path / "out") == read_config(tmp_path / "model")


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
    recipe = one(root, out_format=lines)
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
    outcome.check_refusal(said)


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


EXACT = f"{MEAN}adapter: {{combine: concatenate}}\n"
ONE_SHOT = "this recipe merges adapters into one adapter, which is done at once and has no plan."


@pytest.fixture
def adapters_folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(("one", "two")):
        adapter(tmp_path / name, seed)
    write_recipe(tmp_path, MEAN)
    return tmp_path


def _submit(folder: Path, *args: str, text: str = MEAN) -> Outcome:
    return run_command("submit", write_recipe(folder, text), *args, cwd=folder)


def _lines(outcome: Outcome) -> dict[str, str]:
    """The report's facts by their titles."""
    pairs = (line.split(maxsplit=1) for line in outcome.text.splitlines() if " " in line)
    return {title: rest.strip() for title, rest in pairs}


def test_the_report_says_what_is_in_it(adapters_folder: Path) -> None:
    report = _lines(_submit(adapters_folder, "-o", "out", text=f"{MEAN}adapter: {{rank: 2}}\n"))
    assert report["Adapter"] == "in out"
    assert report["factors"] == "3 modules, rank 2"
    assert report["energy"].startswith("at least 0.")
    assert 0 < float(report["error"].split()[0]) < 1
    assert "saved" not in report
    assert report["size"].endswith("B")


def test_what_only_some_adapters_change_is_noted(adapters_folder: Path) -> None:
    adapter(adapters_folder / "one", 0, [Q0])
    adapter(adapters_folder / "two", 1, [Q0, DOWN])
    outcome = _submit(adapters_folder, "-o", "out")
    assert f"one does not change {DOWN}: it counts there as a change of zero." in outcome.text
    assert _lines(outcome)["factors"] == "2 modules, rank 4"


def test_tensors_that_are_saved_whole_are_listed(adapters_folder: Path) -> None:
    for root in with_heads(adapters_folder / "heads"):
        root.rename(adapters_folder / ("h" + root.name))
    text = MEAN.replace("one", "h0").replace("two", "h1")
    report = _lines(_submit(adapters_folder, "-o", "out", text=text))
    assert report["saved"] == "whole  1: lm_head.weight"


def test_the_last_event_says_what_was_made(adapters_folder: Path) -> None:
    outcome = _submit(adapters_folder, "-o", "out", "--json")
    *before, event = map(json.loads, outcome.text.splitlines())
    assert [each["event"] for each in before] == ["stage_started", "unit_done", "published"]
    assert (outcome.code, event["event"], event["output"]) == (0, "adapter_merged", "out")
    assert [module["rank"] for module in event["modules"]] == [4, 4, 4]
    assert all(0 < module["energy"] <= 1 for module in event["modules"])
    assert {"nbytes", "saved", "relative_error", "notes"} <= set(event)


@pytest.mark.parametrize(("args", "said"), [((), "is not empty"), (("--replace",), "no adapter is there")])
def test_a_taken_place_stays_as_it_is(args: tuple[str, ...], said: str, adapters_folder: Path) -> None:
    (adapters_folder / "out").mkdir()
    (adapters_folder / "out" / "mine.txt").write_text("mine")
    outcome = _submit(adapters_folder, "-o", "out", *args)
    outcome.check_refusal(said)
    assert [each.name for each in (adapters_folder / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("text", [MEAN, EXACT])
@pytest.mark.parametrize("args", [("plan",), ("submit", "--dry-run")])
def test_it_has_no_plan(args: tuple[str, str], text: str, adapters_folder: Path) -> None:
    write_recipe(adapters_folder, text)
    before = sorted(adapters_folder.rglob("*"))
    outcome = run_command(args[0], "recipe.yml", *args[1:], cwd=adapters_folder)
    outcome.check_refusal(ONE_SHOT, "Use 'raymerge submit' without --dry-run")
    assert sorted(adapters_folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MEAN.replace("linear", "multislerp"), "multislerp does not merge adapters"),
        (f"base_model: base\n{MEAN}", "'base_model' has no meaning in a merge of adapters"),
        (MEAN.replace("model: two", "model: base"), "Name it behind the model that it was trained on"),
        (
            f"name: mean\n{EXACT}---\n{MEAN.replace('model: two', 'model: mean')}",
            "merges of adapters are carried out one by one",
        ),
    ],
)
def test_recipes_that_cannot_be_carried_out(text: str, said: str, adapters_folder: Path) -> None:
    tiny_llama(adapters_folder / "base", 0)
    outcome = _submit(adapters_folder, "-o", "out", "--inline", text=text)
    outcome.check_refusal(said)
    assert not (adapters_folder / "out").exists()
