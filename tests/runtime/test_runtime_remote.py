"""Outputs in an object store: the bytes of a local run, whole or absent, by one run at a time."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import moto.s3.models as moto_s3
import pytest
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint
from kits.marks import slow_but
from kits.merge_cases import INLINE, NOT_REPRODUCED, Family, digests, make_family, merge, recipes
from kits.quantised_merges import MAKERS
from kits.s3_server import ENVIRONMENT, MotoServer, S3Server
from kits.tensor_scaled_models import nvfp4_mixture

from raymerge.api import extract_lora, plan, submit, verify
from raymerge.errors import (
    CheckpointError,
    HeldError,
    IncompleteError,
    NonFiniteError,
    OptionError,
    RaymergeError,
    TargetError,
    TransientError,
    VerificationError,
)
from raymerge.events import Event, Planned, Published, SegmentDone, ShardDone, Started
from raymerge.execute.segment import SegmentRunner
from raymerge.options import RunOptions
from raymerge.publish import lease as lease_module
from raymerge.publish import staging as staging_module
from raymerge.publish.lease import LeaseObject, leased, myself
from raymerge.publish.object_shards import shard_orders, stamp_of
from raymerge.publish.record import RemoteLedger
from raymerge.publish.staging import RemoteStaging
from raymerge.storage.addresses import with_options
from raymerge.storage.objects import writer as stream
from raymerge.storage.objects.writer import ObjectWriter
from raymerge.storage.retry import RetryPolicy
from raymerge.verifier.load import copy_to_load

INDEX = "out/model.safetensors.index.json"
LEASE = "out/raymerge/lease.json"
BEGUN = "out/raymerge/begun"
_PART = 128 << 10
CASES = ("duplicates", "DeepSeek-V3 F32", "gpt-oss")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A merge into four shards of several segments each."""
    family = make_family(tmp_path_factory.mktemp("family"), hidden=128, files=2)
    return {**recipes(family)["linear"], "shard_size": "400KB"}


@pytest.fixture(scope="module")
def expected(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("expected") / "out"
    merge(recipe, output)
    return digests(output)


def _digests(s3: S3Server, prefix: str = "out") -> dict[str, str]:
    found = {key.removeprefix(f"{prefix}/"): data for key, data in s3.objects(f"{prefix}/").items()}
    return {key: hashlib.sha256(data).hexdigest() for key, data in found.items() if key not in NOT_REPRODUCED}


@pytest.fixture
def parts(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 400 kB are uploads of several parts, as larger ones are."""
    if not isinstance(server, MotoServer):
        pytest.skip("it takes no parts of less than 5 MiB, as S3 itself")
    monkeypatch.setattr(stream, "SMALLEST_PART", _PART)
    monkeypatch.setattr(moto_s3, "S3_UPLOAD_PART_MIN_SIZE", 1)


def _put(s3: S3Server) -> list[str]:
    """Keys that were written, in order: at once, or as uploads that were completed."""
    ends = {"PUT": lambda query: "partNumber=" not in query, "POST": lambda query: "uploadId=" in query}
    written = (each for each in s3.requests if each.status == 200 and each.method in ends)
    return [each.key for each in written if ends[each.method](each.query)]


def _pieces_put(s3: S3Server) -> int:
    return len([each for each in s3.asked("PUT", "/ledger/") if each.status == 200])


def _shards_put(s3: S3Server) -> list[str]:
    return [key for key in _put(s3) if key.endswith(".safetensors")]


# The bytes, and the order in which they come


@pytest.mark.usefixtures("parts")
def test_an_output_is_that_of_a_local_run_and_its_index_comes_last(
    s3: S3Server, recipe: dict[str, Any], expected: dict[str, str]
) -> None:
    merged = merge(recipe, s3.place("out"), INLINE)
    assert _digests(s3) == expected
    assert min(len(s3.asked("PUT", f"{number:05d}-of-")) for number in range(1, 4)) > 2
    put = [key for key in _put(s3) if not key.endswith("/events.jsonl")]
    assert put[-1] == INDEX
    assert put.index("out/config.json") > max(put.index(key) for key in put if "plan/" in key)
    assert sorted(_shards_put(s3)) == sorted(
        f"out/{key}" for key in expected if key.endswith("-00004.safetensors")
    )
    assert len(merged.of(SegmentDone)) == merged.of(Planned)[0].segments
    kept = {key for key in s3.objects("out/raymerge/") if "plan/" not in key}
    names = ("events.jsonl", "ledger.jsonl", "numerics.json", "provenance.json", "recipe.yml", "run.json")
    assert kept == {f"out/raymerge/{name}" for name in names}
    assert merged.of(Published)[0].path == "s3://models/out"
    verdict = verify(merged.result.output)
    assert (verdict.path, verdict.against_plan, verdict.problems) == ("s3://models/out", True, ())
    everything = b"".join(s3.objects("out/").values())
    for secret in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        assert ENVIRONMENT[secret].encode() not in everything


def test_verify_reads_scales_of_whole_matrices_by_one_request_a_file(s3: S3Server, tmp_path: Path) -> None:
    model = nvfp4_mixture(tmp_path / "model", 0)
    place = s3.upload(model.root, "out")
    s3.calm()
    verify(place)
    # The other one is for the header.
    assert len(s3.asked("GET", ".safetensors")) == 2 * len(list(model.root.glob("*.safetensors")))


@pytest.mark.slow
def test_a_model_of_one_file_has_its_config_last(s3: S3Server, medium: Family, tmp_path: Path) -> None:
    whole = recipes(medium)["linear"]
    merge(whole, tmp_path / "out")
    merge(whole, s3.place("out"), INLINE)
    assert _digests(s3) == digests(tmp_path / "out")
    put = [key for key in _put(s3) if not key.endswith("/events.jsonl")]
    assert put[-1] == "out/config.json"


def _case(name: str, root: Path) -> dict[str, Any]:
    """A merge whose bytes are equal in several places, or that makes codes with scales."""
    if name == "duplicates":
        model = tiny_llama(root / "one", 0, hidden=64, layers=2)
        span = {"sources": [{"model": str(model), "layer_range": [0, 1]}]}
        return {"merge_method": "passthrough", "slices": [span, span, span], "shard_size": "200KB"}
    parents = [str(MAKERS[name](root / each, seed).root) for seed, each in enumerate(("a", "b"))]
    entries = [{"model": each, "parameters": {"weight": 0.5}} for each in parents]
    return {"merge_method": "linear", "models": entries, "shard_size": "100KB"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("cases")
    return {name: _case(name, root / name.split()[0]) for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most_early"),
    [("duplicates", 0), ("duplicates", 1 << 20), ("DeepSeek-V3 F32", 0), ("gpt-oss", 1 << 20)],
)
def test_what_lies_in_several_shards_is_made_for_each(
    s3: S3Server,
    cases: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    most_early: int,
) -> None:
    monkeypatch.setattr(staging_module, "shard_orders", partial(shard_orders, most_early=most_early))
    case = cases[name]
    merge(case, tmp_path / "out")
    merge(case, s3.place("out"), INLINE)
    assert _digests(s3) == digests(tmp_path / "out")


@pytest.mark.parametrize("name", CASES)
def test_every_byte_of_a_shard_is_made_once_and_little_is_kept(
    cases: dict[str, dict[str, Any]], name: str
) -> None:
    case = plan(cases[name])
    rows = case["ops"].select(["shard", "nbytes"]).to_pylist()
    for most in (0, 3000, 1 << 20):
        orders = shard_orders(case, most_early=most)
        assert max(order.early_bytes for order in orders) <= most
        for shard, order in enumerate(orders):
            written = [row for _, makings in order.steps for _, some in makings for row in some]
            assert sorted(written) == [n for n, row in enumerate(rows) if row["shard"] == shard]
            for _, makings in order.steps:
                assert len({maker for maker, _ in makings}) == len(makings)
    # With room for them, scales are made with their codes, and copies with the first of them.
    assert sum(len(makings) for order in orders for _, makings in order.steps) < len(rows)


@pytest.mark.slow
def test_scratch_holds_a_shard_until_it_is_uploaded(
    s3: S3Server, recipe: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    held: list[str] = []
    s3.before = lambda method, key: held.extend(
        path.name for path in scratch.rglob("*.part") if method == "PUT" and "-of-" in key
    )
    merge(recipe, s3.place("out"), RunOptions(inline=True, scratch=str(scratch)))
    assert _digests(s3) == expected
    assert len(set(held)) == 4
    assert list(scratch.iterdir()) == []


def test_scratch_that_cannot_be_written_is_refused(
    s3: S3Server, recipe: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    options = RunOptions(inline=True, scratch=str(tmp_path / "file" / "scratch"))
    with pytest.raises(OptionError, match=r"nothing can be written there: Not a directory\. Choose another"):
        merge(recipe, s3.place("out"), options)


def test_uploads_are_in_the_memory_that_is_promised(
    s3: S3Server, medium: Family, recipe: dict[str, Any]
) -> None:
    tight = RunOptions(inline=True, memory=24 << 20)
    merged = merge(recipe, s3.place("out"), tight)
    assert 0 < merged.of(Planned)[0].projected_peak <= 24 << 20
    with pytest.raises(OptionError, match="too little for any merge"):
        merge(recipes(medium)["linear"], s3.place("other"), RunOptions(inline=True, memory=17 << 20))


# Faults


def test_a_source_that_changes_meanwhile_is_refused_before_its_shard_is_there(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path / "one", 0, hidden=32, layers=1)
    case = {"merge_method": "linear", "models": [{"model": str(model), "parameters": {"weight": 0.5}}]}
    made = SegmentRunner.made

    def changing(self: SegmentRunner, *arguments: Any, **more: Any) -> Any:
        receipt = made(self, *arguments, **more)
        write_checkpoint(model, read_tensors(model), json.loads((model / "config.json").read_text()))
        return receipt

    monkeypatch.setattr(SegmentRunner, "made", changing)
    with pytest.raises(CheckpointError, match="changed while it was merged"):
        merge(case, s3.place("out"), INLINE)
    assert not [key for key in s3.objects("out/") if key.endswith(".safetensors")]


def test_what_is_not_finite_leaves_nothing(s3: S3Server, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "one", 0, hidden=32, layers=1)
    tensors = read_tensors(model)
    tensors["model.norm.weight"][0] = float("nan")
    write_checkpoint(model, tensors, json.loads((model / "config.json").read_text()))
    case = {"merge_method": "linear", "models": [{"model": str(model), "parameters": {"weight": 0.5}}]}
    with pytest.raises(NonFiniteError):
        merge(case, s3.place("out"), INLINE)
    assert s3.objects("out/") == {}


@pytest.mark.usefixtures("parts")
def test_a_shard_that_somebody_else_writes_is_not_published(
    s3: S3Server, recipe: dict[str, Any], expected: dict[str, str]
) -> None:
    first = "out/model-00001-of-00004.safetensors"

    def meddle(event: Event) -> None:
        if isinstance(event, ShardDone) and first not in met:
            met.append(first)
            s3.put(first, b"x" * len(s3.objects(first)[first]))

    met: list[str] = []
    with pytest.raises(
        IncompleteError, match=r"00001-of-00004\.safetensors: is not the object that was written"
    ):
        submit(recipe, s3.place("out"), INLINE, on_event=meddle)
    assert INDEX not in s3.objects("out/")
    s3.calm()
    merge(recipe, s3.place("out"), INLINE)
    assert _shards_put(s3) == [first]
    assert _digests(s3) == expected


def _again(s3: S3Server, key: str, data: bytes) -> None:
    """Write a shard in one part, bearing what those of the run that is there bear: it has another tag."""
    stamp = stamp_of(s3.objects(BEGUN)[BEGUN].decode(), "cpu")
    s3.client().put_object(Bucket=s3.bucket, Key=key, Body=data, Metadata={"raymerge": stamp})


@pytest.mark.slow
@pytest.mark.usefixtures("parts")
def test_a_shard_that_another_worker_of_the_run_completes_late_is_as_good(
    s3: S3Server, recipe: dict[str, Any], expected: dict[str, str]
) -> None:
    def repeat(event: Event) -> None:
        if isinstance(event, ShardDone):
            key = f"out/{event.shard}"
            _again(s3, key, s3.objects(key)[key])

    submit(recipe, s3.place("out"), INLINE, on_event=repeat)
    assert _digests(s3) == expected


@pytest.mark.slow
def test_a_shard_that_does_not_begin_as_planned_is_told(s3: S3Server, recipe: dict[str, Any]) -> None:
    first = "out/model-00001-of-00004.safetensors"

    def meddle(event: Event) -> None:
        if isinstance(event, SegmentDone) and first in (found := s3.objects(first)):
            # As valid as before: a name of a tensor has another letter.
            _again(s3, first, found[first].replace(b"weight", b"weighs", 1))

    with pytest.raises(VerificationError, match=r"00001-of-00004\.safetensors: the object does not begin as"):
        submit(recipe, s3.place("out"), INLINE, on_event=meddle)
    assert INDEX not in s3.objects("out/")


@pytest.mark.usefixtures("parts")
def test_a_worker_of_a_run_that_is_gone_completes_nothing(s3: S3Server, recipe: dict[str, Any]) -> None:
    def begin_another(method: str, key: str) -> None:
        # When an upload begins: its last part may be under way when the mark is looked at.
        if method == "POST" and "-of-" in key:
            s3.put(BEGUN, b"another")

    s3.before = begin_another
    with pytest.raises(IncompleteError, match="this is no longer the run that the worker writes for"):
        merge(recipe, s3.place("out"), INLINE)
    assert not [key for key in s3.objects("out/") if key.endswith(".safetensors")]


# Runs that are killed


def _reached(s3: S3Server, folder: Path) -> tuple[str, str]:
    """What tells a command where the server is."""
    path = folder / "profile.yml"
    path.write_text(json.dumps({"storage": asdict(s3.options)}))
    return "--profile", str(path)


_IN_PARTS = """
from raymerge.storage.addresses import with_options
from raymerge.storage.objects import writer as stream
stream.SMALLEST_PART = {}
from raymerge.cli.main import main
main()
"""


@pytest.fixture
def parted(
    request: pytest.FixtureRequest, server: S3Server, recipe: dict[str, Any], tmp_path: Path
) -> tuple[dict[str, Any], int]:
    """A merge into shards of several parts, and how many bytes a part has at least."""
    if isinstance(server, MotoServer):
        request.getfixturevalue("parts")
        return {**recipe, "shard_size": "150KB"}, _PART
    family = make_family(tmp_path / "family", hidden=512, layers=8)
    return {**recipes(family)["linear"], "shard_size": "6MB"}, 5 << 20


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_that_was_killed_or_told_to_end_is_resumed_by_any_machine(
    number: signal.Signals, s3: S3Server, parted: tuple[dict[str, Any], int], tmp_path: Path
) -> None:
    recipe, part = parted
    num_shards = len(plan(recipe)["shards"])
    drivers: list[subprocess.Popen[bytes]] = []

    def stop(method: str, key: str) -> None:
        if method == "PUT" and "-of-" in key and _pieces_put(s3) >= 3:
            # Once: a second request to end means at once, and may leave the lease behind.
            s3.before = None
            drivers[0].send_signal(number)

    s3.before = stop
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    command = ["submit", "recipe.yml", "-o", "s3://models/out", *_reached(s3, tmp_path), "--inline", "--json"]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)}
    whole = [sys.executable, "-c", _IN_PARTS.format(part), *command]
    drivers.append(subprocess.Popen(whole, cwd=tmp_path, env=settings, stdout=subprocess.DEVNULL))
    is_killed = number == signal.SIGKILL
    assert drivers[0].wait(60) == (-number if is_killed else 3)
    assert INDEX not in s3.objects("out/")
    # Whoever is told to end leaves nothing to be waited for, or cleared away.
    assert (LEASE in s3.objects("out/")) == is_killed
    pieces = s3.objects("out/raymerge/ledger/").values()
    lines = [json.loads(line) for piece in pieces for line in piece.decode().splitlines()]
    kept = {line["shard"] for line in lines if "shard" in line}
    assert len(kept) >= 3
    assert bool([key for key in s3.uploads() if "-of-" in key]) == is_killed
    s3.calm()
    merged = merge(recipe, s3.place("out"), INLINE)
    assert merged.of(Started)[0].done_segments > 0
    assert not {f"out/{name}" for name in kept} & set(_shards_put(s3))
    assert len(_shards_put(s3)) == num_shards - len(kept)
    merge(recipe, tmp_path / "local")
    assert _digests(s3) == digests(tmp_path / "local")


# One run at a time


def test_a_place_that_is_held_is_told(s3: S3Server, recipe: dict[str, Any]) -> None:
    writer = ObjectWriter(s3.place("out"))
    with leased(LeaseObject(writer, "raymerge/lease.json"), plan(recipe).digest):
        with pytest.raises(HeldError, match=r"s3://models/out: another run makes this very checkpoint here"):
            merge(recipe, s3.place("out"), INLINE)
        assert list(s3.objects("out/")) == [LEASE]
    assert s3.objects("out/") == {}


def _stranger(s3: S3Server, digest: str) -> None:
    holder = replace(myself(digest), host="elsewhere", machine="elsewhere")
    s3.put(LEASE, json.dumps({"holder": asdict(holder), "beats": 1}).encode())


def test_a_machine_that_shows_that_it_lives_is_not_taken_over_from(
    s3: S3Server, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module.LeaseObject, "look_seconds", 0.2)
    _stranger(s3, "another")
    beats = count()

    def beat(method: str, key: str) -> None:
        if method == "GET" and key == LEASE:
            s3.put(LEASE, f"beat {next(beats)}".encode())

    s3.before = beat
    with pytest.raises(TargetError, match="another run holds it"):
        merge(recipe, s3.place("out"), INLINE)


def test_a_run_whose_lease_is_gone_publishes_nothing(
    s3: S3Server, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.05)

    def take(method: str, key: str) -> None:
        if method == "PUT" and key.endswith("00004.safetensors") and "00001" in key:
            _stranger(s3, "another")

    s3.before = take
    with pytest.raises(
        IncompleteError, match=r"the lease of this run is gone, another run took it over: process"
    ):
        merge(recipe, s3.place("out"), INLINE)
    assert INDEX not in s3.objects("out/")
    assert b"elsewhere" in s3.objects(LEASE)[LEASE]
    s3.client().delete_object(Bucket=s3.bucket, Key=LEASE)


@pytest.mark.parametrize(
    "during", slow_but(["out/raymerge/recipe.yml", "out/config.json"], "out/config.json")
)
def test_a_run_that_is_taken_over_while_it_publishes_publishes_nothing(
    s3: S3Server, small: Family, during: str
) -> None:
    met: list[str] = []

    def take_over(method: str, key: str) -> None:
        # The record is written when the run begins, and once more when it is published.
        if method == "PUT" and key == during and "out/raymerge/provenance.json" in _put(s3) and not met:
            met.append(key)
            for each in s3.objects("out/"):
                s3.client().delete_object(Bucket=s3.bucket, Key=each)
            _stranger(s3, "another")

    s3.before = take_over
    case = {**recipes(small)["linear"], "shard_size": "20KB"}
    with pytest.raises(IncompleteError, match="the lease of this run is gone, another run took it over"):
        merge(case, s3.place("out"), INLINE)
    assert {*s3.objects("out/")} == {LEASE, during}


def test_a_run_whose_beginning_is_another_publishes_nothing(s3: S3Server, small: Family) -> None:
    def begin_another(method: str, key: str) -> None:
        if method == "PUT" and key == "out/config.json":
            s3.put(BEGUN, b"another")

    s3.before = begin_another
    case = {**recipes(small)["linear"], "shard_size": "20KB"}
    with pytest.raises(IncompleteError, match="another began there"):
        merge(case, s3.place("out"), INLINE)
    assert INDEX not in s3.objects("out/")


def test_nobody_writes_over_what_another_recorded(s3: S3Server, tmp_path: Path) -> None:
    writer = ObjectWriter(s3.place("out"))

    def ledger(name: str, mark: str) -> RemoteLedger:
        path = tmp_path / name / "ledger.jsonl"
        path.parent.mkdir(exist_ok=True)
        return RemoteLedger(path, {"versions": []}, writer, mark, lambda: None)

    def fetched(mark: str) -> set[str]:
        path = tmp_path / f"of {mark}" / "ledger.jsonl"
        RemoteLedger.fetch(path, writer, mark)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return {line["shard"] for line in lines if "shard" in line}

    woken, successor, other = ledger("woken", "one"), ledger("successor", "one"), ledger("other", "two")
    successor.record_shard("b", "v", ())
    other.record_shard("c", "v", ())
    woken.record_shard("a", "v", ())
    successor.record_shard("d", "v", ())
    assert (fetched("one"), fetched("two")) == ({"a", "b", "d"}, {"c"})


# What is there


@pytest.mark.slow
def test_a_place_with_a_checkpoint_is_replaced_only_when_asked(
    s3: S3Server, small: Family, recipe: dict[str, Any], expected: dict[str, str]
) -> None:
    merge({**recipes(small)["linear"], "shard_size": "20KB"}, s3.place("out"), INLINE)
    before = s3.objects("out/")
    with pytest.raises(TargetError, match=r"s3://models/out: this place is not empty.*--replace"):
        merge(recipe, s3.place("out"), INLINE)
    assert s3.objects("out/") == before
    s3.put("out-2/config.json", b"a neighbour")
    deleted: list[set[str]] = []
    s3.before = lambda method, _: deleted.append({*s3.objects("out/")}) if method == "POST" else None
    merge(recipe, s3.place("out"), replace(INLINE, replace=True))
    assert _digests(s3) == expected
    # What makes it a checkpoint goes before anything else does.
    assert deleted[1] | {INDEX, "out/config.json"} >= {key for key in before if "probe" not in key}
    assert s3.objects("out-2/") == {"out-2/config.json": b"a neighbour"}


@pytest.mark.slow
def test_an_unfinished_run_of_another_plan_is_told_and_discarded_only_when_asked(
    s3: S3Server, recipe: dict[str, Any], expected: dict[str, str], medium: Family
) -> None:
    def broken(event: Event) -> None:
        if isinstance(event, SegmentDone):
            raise KeyError

    with pytest.raises(KeyError):
        submit({**recipe, "dtype": "float16"}, s3.place("out"), INLINE, on_event=broken)
    s3.calm()
    with pytest.raises(TargetError, match="an unfinished run is here, and it was of another plan"):
        merge(recipe, s3.place("out"), INLINE)
    merge(recipe, s3.place("out"), replace(INLINE, replace=True))
    assert _digests(s3) == expected


def test_what_is_no_checkpoint_is_never_replaced(s3: S3Server, recipe: dict[str, Any]) -> None:
    s3.put("out/other/config.json", b"{}")
    s3.put("out/notes.txt", b"mine")
    mine = s3.client().create_multipart_upload(Bucket=s3.bucket, Key="out/model-00001-of-00004.safetensors")
    for options in (INLINE, replace(INLINE, replace=True)):
        with pytest.raises(TargetError, match=r"there are 2 other files here, such as notes.txt"):
            merge(recipe, s3.place("out"), options)
    assert len(s3.objects("out/")) == 2
    with pytest.raises(TargetError, match="2 other files"):
        RemoteStaging(s3.place("out"), plan(recipe)).prepare({}, replace=False)
    assert "out/model-00001-of-00004.safetensors" in s3.uploads()
    s3.client().abort_multipart_upload(Bucket=s3.bucket, Key=mine["Key"], UploadId=mine["UploadId"])


def test_uploads_to_other_places_go_on(s3: S3Server, small: Family) -> None:
    client = s3.client()
    keys = ("out/photo.jpg", "out/sub/model.safetensors", "out/model.safetensors", "out/raymerge/run.json")
    for key in keys:
        client.create_multipart_upload(Bucket=s3.bucket, Key=key)
    merge(recipes(small)["linear"], s3.place("out"), INLINE)
    left = client.list_multipart_uploads(Bucket=s3.bucket)["Uploads"]
    left = [each for each in left if each["Key"].startswith("out/")]
    for each in left:
        client.abort_multipart_upload(Bucket=s3.bucket, Key=each["Key"], UploadId=each["UploadId"])
    assert {each["Key"] for each in left} == {*keys[:2]}


# What is refused before anything is made


def test_places_that_cannot_be_written_to(
    s3: S3Server, recipe: dict[str, Any], medium: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(output: str, kind: type[RaymergeError], words: str, **more: Any) -> None:
        with pytest.raises(kind, match=words) as found:
            merge({**recipe, **more}, output, INLINE)
        assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in str(found.value)
        assert "?" not in str(found.value)

    told("hf://org/name", OptionError, "nothing can be written there")
    told(s3.place("out").replace("//models/", "//absent/"), TargetError, "there is no bucket 'absent'")
    s3.fail("forbid", method="PUT", times=3)
    told(s3.place("out"), TargetError, "the store refuses it to the credentials of this machine: 403")
    s3.calm()
    monkeypatch.setattr(staging_module, "LARGEST_OBJECT", 1000)
    told(s3.place("out"), TargetError, r"an object has at most 1.00 kB.*smaller shard_size")
    monkeypatch.setattr(ObjectWriter, "put_new", lambda self, key, data, **_: self.put(key, data))
    monkeypatch.setattr(staging_module, "LARGEST_OBJECT", 1 << 40)
    told(s3.place("out"), TargetError, "this store has no conditional writes")
    assert s3.objects("out/") == {}


def test_a_store_that_fails_where_a_key_is_named_says_which(s3: S3Server) -> None:
    s3.fail("error", method="PUT", times=99)
    place = with_options("s3://models/out", replace(s3.options, kms_key="alias/models"))
    writer = ObjectWriter(place, retry_policy=RetryPolicy(sleep=lambda _: None))
    with pytest.raises(TransientError, match=r"encrypt with alias/models\. .* take kms_key out of storage:"):
        staging_module.check_writable(writer)


def test_results_between_want_a_directory(s3: S3Server, medium: Family) -> None:
    tune = str(medium.tunes[0])
    steps = [
        {"name": "first", "merge_method": "linear", "models": [{"model": tune, "parameters": {"weight": 1}}]},
        {"merge_method": "linear", "models": [{"model": "first", "parameters": {"weight": 1}}]},
    ]
    with pytest.raises(OptionError, match="this recipe has results between"):
        merge(steps, s3.place("out"), INLINE)
    assert s3.objects("out/") == {}


def test_an_adapter_wants_a_directory(s3: S3Server, small: Family) -> None:
    with pytest.raises(OptionError, match="an adapter is written to a directory of this machine"):
        extract_lora(small.tunes[0], small.base, s3.place("out"))
    assert s3.objects("out/") == {}


# The command line


def test_weights_are_copied_whole_where_the_system_writes_a_part_at_a_time(
    server: S3Server, small: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    place = server.upload(small.base, "model")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda to, data, at: real(to, data[: max(1, len(data) // 2)], at))
    with copy_to_load(place, memory=1 << 30, scratch=str(tmp_path)) as (root, lack):
        assert lack == ""
        weights = sorted(small.base.glob("*.safetensors"))
        assert weights
        for each in weights:
            assert (root / each.name).read_bytes() == each.read_bytes()
    assert list(tmp_path.iterdir()) == []
