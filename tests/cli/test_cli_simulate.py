"""``raymerge plan --simulate``: what it takes, what it shows, and how wrong input is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.command_line import Outcome, run_command
from kits.merges import MEAN, make_models, write_recipe

from raymerge.cli.simulate import read_cluster
from raymerge.errors import OptionError
from raymerge.planner.simulate import Cluster

STARTUP = 8.0


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


def test_the_prediction_fits_a_narrow_terminal(tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), MEAN)
    args = ("plan", recipe, "--simulate", "workers=64", "storage=2GB/s")
    outcome = run_command(*args, cwd=tmp_path, env={"COLUMNS": "80"})
    assert max(map(len, outcome.text.splitlines())) <= 80


@pytest.mark.parametrize(
    "args",
    [
        ("--simulate", "workers=4", "--simulate", "storage=2GB/s"),
        ("--simulate", "workers=4 storage=2GB/s"),
        ("--simulate", "workers=4,storage=2GB/s"),
        ("--simulate=workers=4", "storage=2GB/s"),
    ],
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
    assert sum(made["shares"].values()) == pytest.approx(1)


def test_without_the_option_nothing_is_simulated(tmp_path: Path) -> None:
    found = json.loads(_plan(tmp_path, "--json").text)
    assert "simulation" not in found


def test_a_plan_with_problems_is_not_simulated(tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), MEAN)
    args = ("plan", recipe, "--memory", "1MiB", "--simulate", "storage=1GB/s")
    outcome = run_command(*args, cwd=tmp_path)
    assert outcome.code == 2
    assert "Simulated" not in outcome.text


def test_a_second_recipe_is_no_pair(tmp_path: Path) -> None:
    outcome = _plan(tmp_path, "other.yml")
    assert outcome.code == 2
    assert "'other.yml' is one argument too many" in outcome.text


def test_too_little_simulated_memory_is_refused(tmp_path: Path) -> None:
    outcome = _plan(tmp_path, "--simulate", "storage=1GB/s", "memory=1MiB")
    assert outcome.code == 2
    assert "--simulate memory" in outcome.text


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
        ("zzz=1", "there is no key 'zzz'. The keys are workers, storage,"),
        ("workers", "'workers' is no pair of a key and a value. Write it like workers=64."),
        ("workers=0", "--simulate workers: 0 workers cannot do anything. Give 1 or more."),
        ("workers=many", "--simulate workers: 'many' is no whole number; write it like 64."),
        ("workers=-3", "'-3' is no whole number"),
        ("read=2GB/h", "--simulate read: '2GB/h' is no speed; write it like 2GB/s or 800MB/s."),
        ("per_worker=0GB/s", "--simulate per_worker: 0 moves nothing. Give more than 0."),
        ("startup=8 parsecs", "is no pair"),
        ("startup=8weeks", "--simulate startup: '8weeks' is no time; write it like 8s, 5ms or 2min."),
        ("memory=lots", "--simulate memory: 'lots' is not a size"),
        ("storage=2GB/s", "'storage' is given twice"),
    ],
)
def test_wrong_words_are_refused_with_what_is_right(word: str, said: str) -> None:
    assert said in _said("storage=1GB/s", word)[0]


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    outcome = _plan(tmp_path, "--simulate", "workers=0", "storage=fast", "colour=red")
    assert outcome.code == 2
    for said in ("'fast' is no speed", "there is no key 'colour'", "0 workers cannot do anything"):
        assert said in outcome.text
