"""Flags win over the profile, and the profile over what is usual."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.command_line import run_command
from kits.merges import MEAN, make_models, write_recipe

from raymerge.cli.options import Flags, options_from, planned_options, with_flags
from raymerge.deploy.profiles import parse_profile
from raymerge.errors import ProfileError
from raymerge.options import USUAL_PATIENCE, RunOptions

PROFILE = """\
run: {workers: 3, threads: 2, memory: 2GiB, device: cpu, patience: 30}
storage: {region: r}
"""


def test_the_profile_fills_what_no_flag_gives() -> None:
    options = options_from(parse_profile(PROFILE), Flags(replace=True), address="h:1")
    assert (options.workers, options.threads, options.memory) == (3, 2, 2 * 2**30)
    assert (options.device, options.patience, options.address) == ("cpu", 30.0, "h:1")
    assert options.storage.region == "r"
    assert options.replace


def test_a_flag_wins_even_where_it_says_what_is_usual() -> None:
    flags = Flags(workers=5, device="auto", patience=USUAL_PATIENCE)
    options = options_from(parse_profile(PROFILE), flags, address=None)
    assert (options.workers, options.device, options.patience) == (5, "auto", USUAL_PATIENCE)
    assert options.threads == 2


def test_flags_are_sent_away_within_the_profile_and_its_rules_hold_for_them() -> None:
    profile = parse_profile(PROFILE)
    assert with_flags(profile, Flags()) is profile
    sent = with_flags(profile, Flags(workers=5, memory=2**30))
    assert (sent.run.workers, sent.run.memory, sent.run.threads) == (5, 2**30, 2)
    assert sent.storage == profile.storage
    with pytest.raises(ProfileError, match=r"^--workers: 0 is out of range"):
        with_flags(profile, Flags(workers=0))


def test_a_plan_is_made_with_the_profile(tmp_path: Path) -> None:
    make_models(tmp_path)
    recipe = write_recipe(tmp_path, MEAN)
    (tmp_path / "p.yml").write_text("run: {memory: 256MiB}\noutput: there\n")
    outcome = run_command("plan", recipe, "--profile", "p.yml", "--json", cwd=tmp_path)
    assert outcome.code == 0
    assert json.loads(outcome.text)["memory"]["budget"] == 2**28
    flag = run_command("plan", recipe, "--profile", "p.yml", "--memory", "1GiB", "--json", cwd=tmp_path)
    assert json.loads(flag.text)["memory"]["budget"] == 2**30
    (tmp_path / "p.yml").write_text("run: {memori: 256MiB}\n")
    refused = run_command("plan", recipe, "--profile", "p.yml", cwd=tmp_path)
    assert refused.code == 2
    assert "p.yml:1:7: unknown key 'memori'" in refused.text


def test_a_plan_for_a_cluster_takes_its_workers_for_those_of_other_machines(tmp_path: Path) -> None:
    path = tmp_path / "p.yml"
    path.write_text("target: job\noutput: s3://b/x\njob: {address: 'http://h:8265'}\n")
    options, place = planned_options(str(path), None)
    assert (options.address, place) == ("auto", "s3://b/x")
    assert planned_options(None, 5) == (RunOptions(memory=5), None)
