"""What lies at a place in an object store: whose it is, and that nothing of others is ever deleted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import tiny_llama
from kits.merge_cases import INLINE, Family, merge, recipes
from kits.s3_server import S3Server, s3_server

from raymerge.api import plan
from raymerge.deploy.targets.local import PlaceRuns
from raymerge.deploy.targets.target import RunState
from raymerge.errors import OptionError, TargetError
from raymerge.merge_plan.tables import Plan
from raymerge.publish.remote_staging import RemoteStaging

CONFIG = "place/config.json"
MANIFEST = "place/raymerge/plan/manifest.json"
REPLACING = replace(INLINE, replace=True)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as found:
        yield found


@pytest.fixture
def s3(server: S3Server) -> S3Server:
    """The server, empty."""
    server.empty()
    return server


@pytest.fixture(scope="module")
def recipe(small: Family) -> dict[str, Any]:
    return recipes(small)["linear"]


@pytest.fixture(scope="module")
def family_plan(recipe: dict[str, Any]) -> Plan:
    return plan(recipe)


@pytest.mark.parametrize("place", ["", "place"])
def test_a_bucket_without_a_checkpoint_is_left_alone(
    s3: S3Server, recipe: dict[str, Any], place: str
) -> None:
    prefix = f"{place}/" if place else ""
    for key in ("data/precious.tar", "raymerge/notes.txt", "raymerge/begun", "other/config.json"):
        s3.put(f"{prefix}{key}", b"mine")
    before = s3.objects()
    for options in (INLINE, REPLACING):
        with pytest.raises(TargetError, match="4 other files here, such as data/precious"):
            merge(recipe, s3.place(place), options)  # type: ignore[arg-type]
    assert s3.objects() == before


@pytest.mark.parametrize(
    ("key", "is_recorded"),
    [
        ("thesis.docx", True),
        ("thesis.docx", False),
        ("other-team/data.txt", True),
        ("other-team/model.safetensors", True),
        ("additional_chat_templates/x/data.txt", True),
        ("raymerge/models/config.json", True),
        ("raymerge/notes.txt", False),
    ],
)
def test_what_is_no_part_of_a_checkpoint_stops_its_replacement(
    s3: S3Server, family_plan: Plan, key: str, is_recorded: bool
) -> None:
    for each in ("config.json", "model.safetensors", key):
        s3.put(f"place/{each}", b"{}")
    if is_recorded:
        s3.put(MANIFEST, b'{"digest": "of another"}')
    before = s3.objects()
    with pytest.raises(TargetError, match=f"files here are no part of the checkpoint, such as {key}"):
        RemoteStaging(s3.place("place"), family_plan).check(replace=True)
    assert s3.objects() == before


def test_what_a_run_copied_is_replaced_and_what_comes_meanwhile_stays(
    s3: S3Server, family_plan: Plan, tmp_path: Path
) -> None:
    model = tiny_llama(tmp_path / "one", 0, hidden=32, layers=1)
    for each in ("assets/deep/logo.txt", "additional_chat_templates/x.jinja", "voices.dat"):
        (model / each).parent.mkdir(parents=True, exist_ok=True)
        (model / each).write_text("of the model")
    case = {"merge_method": "linear", "models": [{"model": str(model), "parameters": {"weight": 1}}]}
    merge(case, s3.place("place"), INLINE)  # type: ignore[arg-type]
    assert {"place/assets/deep/logo.txt", "place/additional_chat_templates/x.jinja"} <= {*s3.objects()}
    staging = RemoteStaging(s3.place("place"), family_plan)
    staging.check(replace=True)
    assert "place/voices.dat" in s3.objects()
    late = {"place/late/data.txt": b"mine", "place/late.docx": b"mine"}
    for key, content in late.items():
        s3.put(key, content)
    staging.discard()
    assert s3.objects() == late


@pytest.mark.slow
def test_what_others_keep_below_a_place_outlives_a_run_there(s3: S3Server, recipe: dict[str, Any]) -> None:
    others = ("place/below/old.safetensors", "place/raymerge/below/notes.txt")

    def keep(method: str, key: str) -> None:
        if key == MANIFEST and method == "PUT":
            for each in others:
                s3.put(each, b"mine")

    s3.before = keep
    merge(recipe, s3.place("place"), INLINE)  # type: ignore[arg-type]
    assert {*others, CONFIG} <= {*s3.objects()}


def test_what_a_run_left_that_came_no_further_is_nothing(s3: S3Server, family_plan: Plan) -> None:
    for each in ("stop.json", "events.jsonl"):
        s3.put(f"place/raymerge/{each}", b"{}")
    RemoteStaging(s3.place("place"), family_plan).check(replace=False)


# What is told of it


def test_a_run_that_was_killed_before_it_began_is_told(s3: S3Server) -> None:
    place = s3.place("place")
    assert PlaceRuns().report(place).state is RunState.UNKNOWN
    s3.put(MANIFEST, b"{}")
    report = PlaceRuns().report(place)
    assert (report.state, "nobody makes it" in report.message) == (RunState.STOPPED, True)
    s3.put(CONFIG, b"{}")
    assert PlaceRuns().report(place).state is RunState.UNKNOWN


@pytest.mark.slow
def test_a_store_that_refuses_says_so_itself(s3: S3Server) -> None:
    place, runs = s3.place("place").replace("//models/", "//absent/"), PlaceRuns()
    for ask in (runs.report, runs.stop, lambda run: list(runs.logs(run, follow=False))):
        with pytest.raises(TargetError, match="there is no bucket 'absent'") as found:
            ask(place)
        assert "endpoint=" not in str(found.value)
        assert "your rights there" not in str(found.value)
        assert not isinstance(found.value, OptionError)
