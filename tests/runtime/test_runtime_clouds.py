"""Merges whose sources and output lie on Google's or Azure's store, tried against strict fakes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from kits.azure_server import AzureServer
from kits.cloud_http import serving
from kits.cloud_server import CloudServer
from kits.google_server import GoogleServer
from kits.marks import slow_but
from kits.merge_cases import INLINE, NOT_REPRODUCED, Family, Merged, digests, make_family, merge, recipes

from raymerge.api import plan, verify
from raymerge.errors import HeldError, TargetError
from raymerge.events import Started
from raymerge.execute.segment import SegmentRunner
from raymerge.publish import lease as lease_module
from raymerge.publish.lease import LeaseObject, leased, myself
from raymerge.publish.object_shards import shard_orders
from raymerge.storage.objects import writer as stream
from raymerge.storage.objects.writer import ObjectWriter

_CLOUDS: Mapping[str, type[CloudServer]] = {"gs": GoogleServer, "az": AzureServer}
_PART = 128 << 10
LEASE = "out/raymerge/lease.json"
INDEX = "out/model.safetensors.index.json"
_NAMED_AFTER_SOURCES = frozenset(
    {"README.md", "raymerge/plan/manifest.json", "raymerge/provenance.json", "raymerge/recipe.yml"}
)
"""Files of an output that say what the recipe calls its sources."""


@pytest.fixture(scope="module", params=_CLOUDS)
def server(request: pytest.FixtureRequest) -> Iterator[CloudServer]:
    with serving(_CLOUDS[request.param]()) as found:
        yield found


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), hidden=128, files=2)


@pytest.fixture
def cloud(server: CloudServer, family: Family, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudServer]:
    """The fake with the sources in it, where most shards are uploads of several parts."""
    server.clear()
    for path in (family.base, *family.tunes):
        server.upload(path, path.name)
    server.smallest_part = _PART
    monkeypatch.setattr(stream, "SMALLEST_PART", _PART)
    yield server
    assert server.strange == []


@pytest.fixture(scope="module")
def near(family: Family) -> dict[str, Any]:
    """A merge of local models into four shards of several parts each."""
    return {**recipes(family)["linear"], "shard_size": "400KB"}


@pytest.fixture(scope="module")
def expected(near: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("expected") / "out"
    merge(near, output)
    return {key: found for key, found in digests(output).items() if key not in _NAMED_AFTER_SOURCES}


@pytest.fixture
def recipe(cloud: CloudServer, near: dict[str, Any], family: Family) -> dict[str, Any]:
    models = [
        {**each, "model": each["model"].replace(f"{family.base.parent}/", cloud.place(""))}
        for each in near["models"]
    ]
    return {**near, "models": models}


def _merge(cloud: CloudServer, recipe: dict[str, Any], **options: Any) -> Merged:
    return merge(recipe, cloud.place("out"), replace(INLINE, **options))


def _digests(cloud: CloudServer) -> dict[str, str]:
    found = {key.removeprefix("out/"): data for key, data in cloud.below("out/").items()}
    left_out = NOT_REPRODUCED | _NAMED_AFTER_SOURCES
    return {key: hashlib.sha256(data).hexdigest() for key, data in found.items() if key not in left_out}


def _shards_put(cloud: CloudServer) -> list[str]:
    return [key for key in cloud.written() if key.endswith(".safetensors")]


def _recorded(cloud: CloudServer) -> set[str]:
    lines = b"".join(cloud.below("out/raymerge/ledger/").values()).splitlines()
    return {f"out/{each['shard']}" for each in map(json.loads, lines) if "shard" in each}


@pytest.mark.sample(1)
def test_sources_and_output_there_give_the_bytes_of_a_local_merge(
    cloud: CloudServer, recipe: dict[str, Any], expected: dict[str, str]
) -> None:
    for kind in ("error", "throttle", "reset"):
        for method in ("GET", "HEAD", "PUT"):
            cloud.fail(kind, method=method)  # type: ignore[arg-type]
    merged = _merge(cloud, recipe)
    assert _digests(cloud) == expected
    put = [key for key in cloud.written() if not key.endswith("/events.jsonl")]
    assert put[-1] == INDEX
    assert len(set(_shards_put(cloud))) == 4
    assert LEASE not in cloud.objects
    assert cloud.uploads() == []
    # Every byte of the sources is asked for by its version.
    tensors = [each.request.headers for each in cloud.of("GET", ".safetensors")]
    assert len([each for each in tensors if "if-match" in each]) >= 4
    told = [*cloud.below("out/").values(), repr(merged.events).encode()]
    for secret in (cloud.secret, cloud.endpoint):
        assert not any(secret.encode() in each for each in told)
    verdict = verify(merged.result.output)
    assert (verdict.against_plan, verdict.problems) == (True, ())
    with pytest.raises(TargetError, match="this place is not empty"):
        _merge(cloud, {**recipe, "models": recipe["models"][:2]})
    _merge(cloud, {**recipe, "models": recipe["models"][:2]}, replace=True)
    assert {*_digests(cloud)} == {*expected}
    assert _digests(cloud) != expected


@pytest.mark.parametrize("server", slow_but(_CLOUDS, "gs"), indirect=True)
def test_what_fails_in_the_middle_is_resumed(
    cloud: CloudServer, recipe: dict[str, Any], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, last = SegmentRunner.made, shard_orders(plan(recipe))[-1]

    def failing(self: SegmentRunner, segment: int, *arguments: Any, **more: Any) -> Any:
        if segment in last.segments:
            until = time.monotonic() + 20
            while not _recorded(cloud) and time.monotonic() < until:
                time.sleep(0.01)
            raise KeyError("as the test has it")
        return made(self, segment, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(SegmentRunner, "made", failing)
        with pytest.raises(KeyError):
            _merge(cloud, recipe)
    assert INDEX not in cloud.objects
    kept = _recorded(cloud)
    assert kept
    cloud.asked.clear()
    merged = _merge(cloud, recipe)
    assert merged.of(Started)[0].done_segments > 0
    assert {*_shards_put(cloud)}.isdisjoint(kept)
    assert len(_shards_put(cloud)) == 4 - len(kept)
    assert _digests(cloud) == expected


@pytest.mark.parametrize("server", slow_but(_CLOUDS, "az"), indirect=True)
def test_a_driver_that_died_is_taken_over_from_and_one_that_lives_is_not(
    cloud: CloudServer, recipe: dict[str, Any], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "DEAD_SECONDS", 0.5)
    monkeypatch.setattr(lease_module.LeaseObject, "look_seconds", 0.05)
    with leased(LeaseObject(ObjectWriter(cloud.place("out")), "raymerge/lease.json"), "of another plan"):
        with pytest.raises(HeldError, match="another run"):
            _merge(cloud, recipe)
        assert [*cloud.below("out/")] == [LEASE]
    holder = replace(myself("another"), host="elsewhere", machine="elsewhere")
    cloud.put(LEASE, json.dumps({"holder": asdict(holder), "beats": 1}).encode())
    _merge(cloud, recipe)
    assert _digests(cloud) == expected
