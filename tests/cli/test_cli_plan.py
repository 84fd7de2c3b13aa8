"""plan and inspect: stages, simulations, methods, and what they print."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kits.chains import CHAIN
from kits.checkpoint_maker import llama_config, read_tensors, sparse_checkpoint, tiny_llama, write_checkpoint
from kits.command_line import Outcome, run_command
from kits.gate_stages import reading_base
from kits.golden import check_golden
from kits.merges import MEAN, STACK, make_models, write_recipe
from kits.permuted_experts import MIXTRAL, make_model, moved, store
from rich.console import Console

import raymerge
from raymerge.checkpoints.header import TensorSpec
from raymerge.cli.plan import check_memory, explain_all, read_cluster
from raymerge.cli.render.reports import show_simulation
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, OptionError
from raymerge.merge_plan.memory import Projection
from raymerge.methods import methods
from raymerge.options import RunOptions
from raymerge.planner.simulation import Cluster, simulate_plan
from raymerge.units import format_duration

pytestmark = pytest.mark.usefixtures("without_ray")

TIES = """\
merge_method: ties
base_model: one
models:
  - model: two
    parameters: {weight: 1.0, density: 0.5}
dtype: float16
parameters: {int8_mask: true}
"""


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are some a merge runs elsewhere, and its plan says so."""
    monkeypatch.setattr("raymerge.devices.list_gpus", tuple)


def _plan(folder: Path, text: str, *args: str, columns: str = "80") -> Outcome:
    recipe = write_recipe(folder, text)
    return run_command("plan", recipe, "--memory", "1GiB", *args, cwd=folder, env={"COLUMNS": columns})


def _misshapen(folder: Path) -> Path:
    """Models of which the second has two tensors of other shapes."""
    make_models(folder)
    tensors = read_tensors(folder / "two")
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        tensors[name] = torch.ones(33, dtype=torch.bfloat16)
    return write_checkpoint(folder / "two", tensors, llama_config()).parent


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "text"), [("plan-mean", MEAN), ("plan-stack", STACK), ("plan-ties", TIES)])
def test_a_plan_reads_as_it_was_looked_at(name: str, text: str, tmp_path: Path) -> None:
    outcome = _plan(make_models(tmp_path), text)
    assert outcome.code == 0
    assert max(map(len, outcome.text.splitlines())) <= 80
    assert "\x1b" not in outcome.text
    check_golden(name, outcome.text)


def test_the_tensors_of_a_plan_read_as_they_were_looked_at(tmp_path: Path) -> None:
    outcome = _plan(make_models(tmp_path, layers=1), MEAN, "--tensors")
    check_golden("plan-mean-tensors", outcome.text)


def test_problems_come_last_and_are_exit_2(tmp_path: Path) -> None:
    outcome = _plan(_misshapen(tmp_path), MEAN)
    assert outcome.code == 2
    check_golden("plan-problems", outcome.text)


def test_the_json_of_a_plan_with_problems_holds_sources_and_problems(tmp_path: Path) -> None:
    outcome = _plan(_misshapen(tmp_path), MEAN, "--json")
    found = json.loads(outcome.text)
    assert outcome.code == 2
    assert found["problems"][0]["where"] == "two"
    assert "2 tensors have other shapes" in found["problems"][0]["what"]
    assert len(found["sources"]) == 2
    assert found.keys() == {"recipe", "sources", "problems"}


def test_without_a_plan_the_json_is_an_error_event(tmp_path: Path) -> None:
    make_models(tmp_path, ["one"])
    outcome = _plan(tmp_path, MEAN, "--json")
    event = json.loads(outcome.text)
    assert (outcome.code, event["event"], event["exit_code"]) == (2, "error", 2)
    assert "two" in event["problems"][0]["where"]


def test_too_little_memory_is_told_with_the_least_that_works(tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), MEAN)
    outcome = run_command("plan", recipe, "--memory", "1MiB", cwd=tmp_path)
    outcome.check_refusal("--memory", "The smallest budget that works is", "Plan of recipe.yml")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: (folder / "other.yml").touch(), "no such file"),
        (lambda folder: (folder / "recipe.yml").write_text("merge_method: [\n"), "recipe.yml:"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused(make: object, said: str, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path)
    outcome = run_command("plan", "recipe.yml", cwd=tmp_path)
    outcome.check_refusal(said)
    assert outcome.text.startswith("recipe.yml")


def test_corrected_yaml_keeps_its_lines_in_a_narrow_terminal(tmp_path: Path) -> None:
    make_models(tmp_path, ["one"], layers=3)
    make_models(tmp_path, ["two"], layers=4)
    text = (
        "merge_method: linear\nslices:\n  - sources:\n"
        "      - {model: one, layer_range: [0, 3], parameters: {weight: 1}}\n"
        "      - {model: two, layer_range: [0, 4], parameters: {weight: 1}}\n"
    )
    outcome = _plan(tmp_path, text, columns="40")
    assert outcome.code == 2
    assert any(line.strip().startswith("- sources") for line in outcome.text.splitlines())


ALIGN = """\
merge_method: linear
models:
  - {model: {model: one, override_architecture: Mixture}, parameters: {weight: 0.5}}
  - {model: {model: two, override_architecture: Mixture}, parameters: {weight: 0.5}}
align: experts
"""
MIXTURE = """\
base_model: base
gate_mode: hidden
experts:
  - {source_model: base, positive_prompts: ["w3 w4 w5"]}
  - {source_model: other, positive_prompts: ["w13 w14 w15"]}
"""
STAGE_CHAIN = """\
name: left
merge_method: linear
models: [{model: base, parameters: {weight: 0.5}}, {model: other, parameters: {weight: 0.5}}]
---
base_model: left
gate_mode: hidden
experts:
  - {source_model: left, positive_prompts: ["w3 w4 w5"]}
  - {source_model: other, positive_prompts: ["w13 w14 w15"]}
"""


@pytest.fixture
def mixtures(tmp_path: Path) -> Path:
    """Two mixtures of experts, of which the second is the first in another order."""
    model = make_model(MIXTRAL, 1)
    store(tmp_path / "one", model, MIXTRAL)
    store(tmp_path / "two", moved(model, MIXTRAL, 2), MIXTRAL)
    return tmp_path


@pytest.fixture
def readers(tmp_path: Path) -> Path:
    reading_base(tmp_path / "base")
    reading_base(tmp_path / "other", seed=2)
    return tmp_path


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def test_a_plan_with_a_stage_reads_as_it_was_looked_at(mixtures: Path) -> None:
    before = sorted(mixtures.rglob("*"))
    outcome = _plan(mixtures, ALIGN)
    assert outcome.code == 0
    assert max(map(len, outcome.text.splitlines())) <= 80
    check_golden("plan-align", outcome.text)
    assert sorted(mixtures.rglob("*")) == sorted([*before, mixtures / "recipe.yml"])


def test_what_a_stage_lacks_is_a_problem_of_the_plan(readers: Path) -> None:
    for path in (readers / "base").glob("tokenizer*"):
        path.unlink()
    outcome = _plan(readers, MIXTURE)
    assert outcome.code == 2
    text = _squeezed(outcome.text)
    assert "router rows (hidden) ? ? ? ?" in text
    assert "1 problem in the way" in text
    assert "tokenizer" in text
    found = json.loads(_plan(readers, MIXTURE, "--json").text)
    assert [stage["units"] for stage in found["stages"]] == [None]
    assert len(found["problems"]) == 1


def test_of_a_stage_over_the_result_of_a_merge_nothing_is_known_yet(readers: Path) -> None:
    outcome = _plan(readers, STAGE_CHAIN)
    assert outcome.code == 0, outcome.text
    assert "router rows (hidden) ? ? ? ?" in _squeezed(outcome.text)


def test_a_dry_run_tells_the_same(mixtures: Path) -> None:
    recipe = write_recipe(mixtures, ALIGN)
    args = ("submit", recipe, "-o", "out", "--dry-run", "--inline", "--memory")
    outcome = run_command(*args, "1GiB", cwd=mixtures)
    assert outcome.code == 0, outcome.text
    assert "stage before" in outcome.text
    event = json.loads(run_command(*args, "1GiB", "--json", cwd=mixtures).text)
    assert [stage["units"] for stage in event["stages"]] == [2]
    refused = run_command(*args, "64MiB", cwd=mixtures)
    assert refused.code == 2
    assert "too little for aligning" in _squeezed(refused.text)
    assert not (mixtures / "out").exists()


def _simulate(folder: Path, *args: str) -> Outcome:
    recipe = write_recipe(make_models(folder), MEAN)
    return run_command("plan", recipe, "--memory", "1GiB", *args, cwd=folder)


def _said(*words: str) -> list[str]:
    with pytest.raises(OptionError) as caught:
        read_cluster(words)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.sample(2)
@pytest.mark.parametrize("pairs", ["{} {} {}", "{} --simulate {} {}", "{},{},{}"])
def test_a_run_is_predicted_as_the_issue_writes_it(pairs: str, tmp_path: Path) -> None:
    args = pairs.format("workers=64", "storage=2GB/s", "startup=8s").split()
    outcome = _simulate(tmp_path, "--simulate", *args)
    assert outcome.code == 0
    for said in ("Simulated on 64 workers", "32 workers", "128 workers", "limiter", "start-up 8.0 s"):
        assert said in outcome.text


def test_the_json_holds_the_simulation(tmp_path: Path) -> None:
    found = json.loads(_simulate(tmp_path, "--json", "--simulate", "workers=4", "storage=2GB/s").text)
    made = found["simulation"]
    assert made["cluster"]["workers"] == 4
    assert made["cluster"]["memory"] == 1 << 30
    assert made["read_bytes"] == found["read_bytes"]
    assert made["seconds"] == pytest.approx(
        made["startup_seconds"] + made["run_seconds"] + made["finishing_seconds"]
    )
    assert 0 < max(made["busy"].values()) <= 1


def test_several_merges_start_their_workers_once_and_have_a_total(tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), CHAIN)
    args = ("plan", recipe, "--memory", "1GiB", "--simulate", "storage=1GB/s", "startup=30s")
    runs = [each["simulation"] for each in json.loads(run_command(*args, "--json", cwd=tmp_path).text)]
    assert [each["startup_seconds"] for each in runs] == [30.0, 0.0, 0.0]
    text = run_command(*args, cwd=tmp_path).text
    total = text.partition("Simulated, all merges together")[2]
    assert text.count("Simulated on 1 worker") == 3
    assert total.splitlines()[1].rstrip() == "merges  3 to make"
    seconds = sum(each["seconds"] for each in runs)
    assert f"time    {format_duration(seconds)}: start-up 0:30, runs " in total


def test_stages_are_said_to_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "stages are not simulated" not in _simulate(tmp_path, "--simulate", "storage=1GB/s").text
    stream = io.StringIO()
    monkeypatch.chdir(tmp_path)
    (account,) = explain_all("recipe.yml", "out", RunOptions(inline=True), title="recipe.yml")
    run = simulate_plan(account.merge.plan, Cluster(storage=1e9), 1 << 30)
    show_simulation(Console(file=stream, width=100), run, stages=2)
    assert "left out   2 stages before the merge; stages are not simulated" in stream.getvalue()


def test_too_little_simulated_memory_is_refused(tmp_path: Path) -> None:
    outcome = _simulate(tmp_path, "--simulate", "storage=1GB/s", "memory=1MiB")
    assert outcome.code == 2
    assert outcome.text.startswith("--simulate memory: 1.05 MB a worker are too little for any merge.\n")
    assert "The smallest budget that works is 16777216 bytes (16.78 MB).\n" in outcome.text


def test_the_tensor_and_the_method_that_need_more_are_named() -> None:
    need = Projection(1 << 30, 3, 1 << 29, "peak.weight", 1 << 26, "large.weight", "iso_c")
    other = replace(need, least_tensor="other.weight")
    check_memory(Cluster(storage=1e9), [need])
    check_memory(Cluster(storage=1e9, memory=1 << 26), [need])
    with pytest.raises(OptionError) as caught:
        check_memory(Cluster(storage=1e9, memory=1 << 25), [need, other, need])
    what = "--simulate memory: 33.55 MB a worker are too little for {} with iso_c. "
    least = "The smallest budget that works is 67108864 bytes (67.11 MB)."
    said = [str(each) for each in caught.value.problems]
    assert said == [what.format(name) + least for name in ("large.weight", "other.weight")]


def test_every_key_is_read() -> None:
    words = [
        "workers=64", "storage=2GB/s", "read=1.5GB/s", "write=800MB", "per_worker=1GiB/s", "compute=1.2GB/s",
        "threads=2", "cores=3", "per_core=4GB/s", "lanes=4", "memory=2GiB", "overhead=5ms", "driver=2ms",
        "startup=2min",
    ]  # fmt: skip
    assert read_cluster(words) == Cluster(
        workers=64, storage=2e9, read=1.5e9, write=8e8, per_worker=2**30, compute=1.2e9, threads=2, cores=3,
        per_core=4e9, lanes=4, memory=2 << 30, overhead=0.005, driver=0.002, startup=120.0,
    )  # fmt: skip


def test_a_storage_needs_one_speed_or_both_of_two() -> None:
    assert read_cluster(["read=1GB/s", "write=1GB/s"]).storage is None
    for words in ([], ["workers=4"], ["read=1GB/s"], ["write=1GB/s"]):
        (said,) = _said(*words)
        assert "the speed of the storage is not given" in said
        assert "storage=2GB/s" in said


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("wrkers=64", "there is no key 'wrkers'. Did you mean 'workers'? The keys are workers, storage,"),
        ("workers 4", "'workers 4' is no pair of a key and a value. Write it like workers=4."),
        ("workers=0", "--simulate workers: 0 workers cannot do anything. Give 1 or more."),
        ("workers=many", "workers: 'many' is no whole number. Give a whole number from 1 to 100,000."),
        ("workers=4;threads=2", "workers: '4;threads=2' is no whole number."),
        ("read=2GB/h", "--simulate read: '2GB/h' is no speed. Write it in bytes a second, like 2GB/s"),
        ("startup=8 parsecs", "--simulate startup: '8 parsecs' is no time. Write it like 8s, 5ms or 2min."),
        ("workers=100001", "workers: 100001 are more than can be simulated. Give a whole number from 1 to"),
        ("memory=lots", "--simulate memory: 'lots' is not a size. Write it like 4GiB."),
        ("storage=2GB/s", "'storage' is given twice"),
    ],
)
def test_wrong_words_are_refused_with_what_is_right(word: str, said: str) -> None:
    (found,) = _said("storage=1GB/s", word)
    assert said in found


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        ("25Gb/s", "'25Gb/s' has a small b: bits? 25Gb/s is 3.1GB/s."),
        ("200 Gbit/s", "bits? 200 Gbit/s is 25GB/s."),
        ("8Gib/s", "bits? 8Gib/s is 1GiB/s."),
        ("2", "'2' has no unit."),
        ("2,5GB/s", "'2,5GB/s' is no speed."),
    ],
)
def test_speeds_are_in_bytes(speed: str, said: str) -> None:
    """A link of 25 Gb/s is no link of 25 GB/s, and 2 are not 2 bytes a second."""
    (found,) = _said("storage=1GB/s", f"per_core={speed}")
    assert found.startswith("--simulate per_core: ")
    assert said in found
    assert found.endswith("Write it in bytes a second, like 2GB/s or 800MB/s.")


@pytest.mark.parametrize("words", [("storage", "=", "2GB/s"), ("storage=2", "GB/s")])
def test_spaces_do_not_matter(words: tuple[str, ...]) -> None:
    assert read_cluster(words) == Cluster(storage=2e9)
    assert read_cluster([*words, "startup", "=", "8", "s", "workers = 4"]) == Cluster(
        storage=2e9, startup=8.0, workers=4
    )


@pytest.mark.parametrize(
    ("words", "where"),
    [
        # A value that cannot be read is given nevertheless.
        (["storage=2GBs", "storage=3GB/s"], ["storage", ""]),
        (["read=fast", "write=1GB/s"], ["read"]),
        (["workers=many"], ["workers", ""]),
        # What is missing may be in a word that is not understood.
        (["storge=2GB/s"], [""]),
        (["workers=4", "2GB/s"], [""]),
        (["workers= storage=2GB/s"], ["workers"]),
        # What is right is not missed, and what is missing is told.
        ([], [""]),
        (["read=1GB/s"], [""]),
    ],
)
def test_nothing_is_told_that_follows_from_something_else(words: list[str], where: list[str]) -> None:
    """One problem for each mistake, at its key."""
    found = _said(*words)
    assert [each.partition(":")[0] for each in found] == [f"--simulate {key}".strip() for key in where]
    missing = [each for each in found if "not given" in each]
    assert bool(missing) == (words in ([], ["read=1GB/s"], ["workers=many"]))


@pytest.mark.parametrize(
    ("args", "said", "remedy"),
    [
        (
            ("--simulate", "workers=4", "storage=2GB/s", "recipe.yml"),
            "plan: 'storage=2GB/s' stands where the recipe is expected.",
            "Put the recipe first: raymerge plan recipe.yml --simulate workers=4 storage=2GB/s\n",
        ),
        (
            ("--simulate", "recipe.yml"),
            "--simulate: 'recipe.yml' stands where KEY=VALUE is expected.",
            "Put it first: raymerge plan recipe.yml --simulate workers=64 storage=2GB/s\n",
        ),
        (
            ("recipe.yml", "--simulate", "--json"),
            "--simulate: '--json' stands where KEY=VALUE is expected.",
            "Write it like --simulate workers=64 storage=2GB/s.\n",
        ),
    ],
)
def test_arguments_in_each_other_s_places_are_told_apart(
    args: tuple[str, ...], said: str, remedy: str, tmp_path: Path
) -> None:
    write_recipe(make_models(tmp_path), MEAN)
    outcome = run_command("plan", *args, cwd=tmp_path)
    assert outcome.code == 2
    assert outcome.text.startswith(said)
    assert outcome.text.endswith(remedy)
    assert outcome.text.count("expected") == 1
    assert "not given" not in outcome.text


def test_a_recipe_may_have_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    write_recipe(make_models(tmp_path), MEAN)
    (tmp_path / "recipe.yml").rename(tmp_path / "t=0.5.yml")
    outcome = run_command("plan", "t=0.5.yml", "--simulate", "storage=1GB/s", cwd=tmp_path)
    assert outcome.code == 0
    assert "Simulated on 1 worker" in outcome.text


def test_the_table_lists_every_method(tmp_path: Path) -> None:
    outcome = run_command("methods", cwd=tmp_path)
    assert outcome.code == 0
    for name, method in methods().items():
        (line,) = (line for line in outcome.text.splitlines() if line.startswith(f"{name} "))
        assert method.base.value in line
        assert method.access.value in line
        assert method.summary in line


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", list(methods()))
def test_a_method_shows_its_parameters(name: str, tmp_path: Path) -> None:
    outcome = run_command("methods", name, cwd=tmp_path)
    assert outcome.code == 0
    method = methods()[name]
    assert method.summary in outcome.text
    for parameter in method.parameters:
        (line,) = (line for line in outcome.text.splitlines() if line.startswith(f"{parameter.name} "))
        assert parameter.doc in line
        assert ("required" in line) == parameter.required
        assert ("changes nothing" in line) == (not parameter.effective)


def test_an_unknown_method_is_answered_with_the_nearest(tmp_path: Path) -> None:
    outcome = run_command("methods", "tise", cwd=tmp_path)
    assert (outcome.code, "Did you mean 'ties'?" in outcome.text) == (2, True)


def _inspect(folder: Path, *args: str) -> Outcome:
    return run_command("inspect", *args, cwd=folder, env={"COLUMNS": "80"})


def _experts(root: Path) -> Path:
    """A quantised mixture of experts in many files."""
    fp8 = {"": (DType.F8_E4M3, (6, 8)), "_scale_inv": (DType.F32, (1, 1))}
    headers = []
    for block in (f"model.layers.{layer}.mlp" for layer in range(10)):
        specs = {
            f"{block}.gate.weight": (DType.BF16, (4, 8)),
            f"{block}.shared_experts.up_proj.weight": (DType.BF16, (6, 8)),
            **{
                f"{block}.experts.{n}.up_proj.weight{end}": spec
                for n in range(4)
                for end, spec in fp8.items()
            },
        }
        headers.append([TensorSpec(name, *spec) for name, spec in specs.items()])
    config = {"architectures": ["SomeoneForCausalLM"], "model_type": "someone", "num_hidden_layers": 10}
    return sparse_checkpoint(root, headers, {**config, "quantization_config": {"quant_method": "fp8"}})


def test_a_dense_model_reads_as_it_was_looked_at(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "model", 0, tie=True)
    outcome = _inspect(tmp_path, "model")
    assert outcome.code == 0
    assert max(map(len, outcome.text.splitlines())) <= 80
    check_golden("inspect-dense", outcome.text)


def test_quantised_experts_read_as_they_were_looked_at(tmp_path: Path) -> None:
    _experts(tmp_path / "model")
    check_golden("inspect-experts", _inspect(tmp_path, "model").text)


def test_the_json_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path / "model", 0)
    monkeypatch.chdir(tmp_path)
    found = json.loads(_inspect(tmp_path, "model", "--json").text)
    assert found == json.loads(json.dumps(raymerge.inspect("model").to_json()))
    assert found["architectures"] == llama_config()["architectures"]


@pytest.mark.parametrize("model", ["nowhere/at/all", "a@b@c"])
def test_a_model_that_is_not_there_is_refused(model: str, tmp_path: Path) -> None:
    outcome = _inspect(tmp_path, model)
    outcome.check_refusal()
    assert outcome.text.startswith(model)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Give the model alone"):
        raymerge.inspect("model+adapter")
