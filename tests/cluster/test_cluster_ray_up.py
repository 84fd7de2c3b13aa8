"""The files for Ray's launcher, by Ray's own check of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "cluster" / "ray-up"
FILES = sorted(each.name for each in FOLDER.glob("*.yaml"))


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", FILES)
def test_ray_takes_it(name: str) -> None:
    from ray.autoscaler._private import util

    whole = util.prepare_config(_read(name))
    util.validate_config(whole)
    # A field that it does not know is one that it would not heed.
    with pytest.raises(Exception, match="Additional properties are not allowed"):
        util.validate_config({**whole, "idle_timeout": 5})


@pytest.mark.parametrize("name", FILES)
def test_every_node_asks_for_the_token_and_no_file_has_it(name: str) -> None:
    found = _read(name)
    commands = [*found["head_start_ray_commands"], *found["worker_start_ray_commands"]]
    assert all(command.startswith("RAY_AUTH_MODE=token ray ") for command in commands)
    assert found["file_mounts"] == {"/home/ray/.ray/auth_token": "~/.ray/auth_token"}


@pytest.mark.parametrize("name", FILES)
def test_the_head_computes_nothing_and_shows_itself_to_nobody(name: str) -> None:
    (start,) = (each for each in _read(name)["head_start_ray_commands"] if "start --head" in each)
    assert "--num-cpus=0" in start
    assert "--dashboard-host=127.0.0.1" in start
