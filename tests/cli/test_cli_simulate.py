"""``raymerge plan --simulate``: what it takes, what it shows, and how wrong input is refused."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from kits.chains import CHAIN
from kits.command_line import Outcome, run_command
from kits.merges import MEAN, make_models, write_recipe
from rich.console import Console

from raymerge.cli.plan import check_memory, explain_all, read_cluster
from raymerge.cli.render.reports import show_simulation
from raymerge.errors import OptionError
from raymerge.merge_plan.memory import Projection
from raymerge.options import RunOptions
from raymerge.planner.simulation import Cluster, simulate_plan
from raymerge.units import format_duration


def _plan(folder: Path, *args: str) -> Outcome:
    recipe = write_recipe(make_models(folder), MEAN)
    return run_command("plan", recipe, "--memory", "1GiB", *args, cwd=folder)


def _said(*words: str) -> list[str]:
    with pytest.raises(OptionError) as caught:
        read_cluster(words)
    return [str(problem) for problem in caught.value.problems]


def test_a_run_is_predicted_as_the_issue_writes_it(tmp_path: Path) -> None:
    outcome = _plan(tmp_path, "--simulate", "workers=64", "storage=2GB/s", "startup=8s")
    assert outcome.code == 0
    assert "Simulated on 64 workers" in outcome.text
    assert "32 workers" in outcome.text
    assert "128 workers" in outcome.text
    assert "limiter" in outcome.text
    assert "start-up 8.0 s" in outcome.text


@pytest.mark.parametrize(
    "args",
    [("--simulate", "workers=4", "--simulate", "storage=2GB/s"), ("--simulate", "workers=4,storage=2GB/s")],
)
def test_pairs_may_be_given_in_any_way(args: tuple[str, ...], tmp_path: Path) -> None:
    assert "Simulated on 4 workers" in _plan(tmp_path, *args).text


def test_the_json_holds_the_simulation(tmp_path: Path) -> None:
    found = json.loads(_plan(tmp_path, "--json", "--simulate", "workers=4", "storage=2GB/s").text)
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


def test_merges_that_are_made_already_are_not_simulated(tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), CHAIN)
    assert run_command("submit", recipe, "--inline", "--keep-intermediates", cwd=tmp_path).code == 0
    args = ("plan", recipe, "--simulate", "storage=1GB/s", "startup=30s")
    found = json.loads(run_command(*args, "--json", cwd=tmp_path).text)
    assert [each["is_made"] for each in found] == [True, True, False]
    assert ["simulation" in each for each in found] == [False, False, True]
    assert found[2]["simulation"]["startup_seconds"] == 30.0
    text = run_command(*args, cwd=tmp_path).text
    assert text.count("Simulated on 1 worker") == 1
    assert "merges  1 to make, 2 made already " in text


def test_stages_are_said_to_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "stages are not simulated" not in _plan(tmp_path, "--simulate", "storage=1GB/s").text
    stream = io.StringIO()
    monkeypatch.chdir(tmp_path)
    (account,) = explain_all("recipe.yml", "out", RunOptions(inline=True), title="recipe.yml")
    run = simulate_plan(account.merge.plan, Cluster(storage=1e9), 1 << 30)
    show_simulation(Console(file=stream, width=100), run, stages=2)
    assert "left out   2 stages before the merge; stages are not simulated" in stream.getvalue()


def test_too_little_simulated_memory_is_refused(tmp_path: Path) -> None:
    outcome = _plan(tmp_path, "--simulate", "storage=1GB/s", "memory=1MiB")
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
        workers=64,
        storage=2e9,
        read=1.5e9,
        write=8e8,
        per_worker=2**30,
        compute=1.2e9,
        threads=2,
        cores=3,
        per_core=4e9,
        lanes=4,
        memory=2 << 30,
        overhead=0.005,
        driver=0.002,
        startup=120.0,
    )


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
        (
            "workers=many",
            "--simulate workers: 'many' is no whole number. Give a whole number from 1 to 100,000.",
        ),
        (
            "read=2GB/h",
            "--simulate read: '2GB/h' is no speed. Write it in bytes a second, like 2GB/s or 800MB/s.",
        ),
        ("startup=8 parsecs", "--simulate startup: '8 parsecs' is no time. Write it like 8s, 5ms or 2min."),
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


@pytest.mark.parametrize(
    ("word", "most"),
    [
        ("workers=100001", "100,000"),
    ],
)  # fmt: skip
def test_what_would_take_all_memory_to_simulate_is_refused(word: str, most: str) -> None:
    key, _, number = word.partition("=")
    (found,) = _said("storage=1GB/s", word)
    what, remedy = "are more than can be simulated.", f"Give a whole number from 1 to {most}."
    assert found == f"--simulate {key}: {number[:20]} {what} {remedy}"


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
