"""Merges of models that lie on an S3 server: the bytes of a local merge, each read once, whatever happens."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.merge_cases import INLINE, NOT_REPRODUCED, Family, Merged, make_family, merge, recipes
from kits.s3_server import ENVIRONMENT, S3Server, s3_server
from kits.tokenizer_maker import CHATML_CONFIG, word_level, write_tokenizer
from safetensors.torch import save_file

from raymerge.api import audit, plan_for, replay, submit
from raymerge.checkpoints.source import open_checkpoint
from raymerge.checkpoints.tokenizer import read_tokenizer
from raymerge.errors import CheckpointError, IncompleteError, OptionError, PlanError, Problem, RecipeError
from raymerge.events import Event, Planned
from raymerge.merge_plan.files_read import SourceFile
from raymerge.merge_plan.memory import FAR_BYTES, FAR_LANE_BYTES
from raymerge.options import RunOptions
from raymerge.recipes.load import recipe_from_mapping
from raymerge.runtime.driver.audit_run import AuditOptions
from raymerge.runtime.workers.placement import Seen, Sight, survey_problems
from raymerge.runtime.workers.ray_nodes import _look
from raymerge.storage.addresses import NO_OPTIONS
from raymerge.units import format_size

NAMED_AFTER_SOURCES = frozenset(
    {
        *("README.md", "raymerge/plan/manifest.json", "raymerge/provenance.json", "raymerge/recipe.yml"),
        "raymerge/stages/@router.json",
    }
)
"""Files of an output that say what the recipe calls its sources."""


@dataclass(frozen=True, slots=True)
class Near:
    digests: dict[str, str]
    """Of its files."""
    read: int
    """Bytes of its sources that were read."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as found:
        yield found


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    server.calm()
    yield server
    server.calm()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("far")


@pytest.fixture(scope="module")
def family(server: S3Server, root: Path) -> Family:
    """Models that are here and on the server."""
    family = make_family(root / "models", hidden=160, layers=1, files=2)
    for path in (family.base, *family.tunes):
        server.upload(path, path.name)
    return family


@pytest.fixture(scope="module")
def near(family: Family, root: Path) -> Near:
    """What becomes of them here."""
    merged = merge(recipes(family)["task_arithmetic"], root / "near")
    return Near(_digests(root / "near"), _read(merged))


def _far(value: Any, family: Family) -> Any:
    """A recipe whose models are those on the server."""
    if isinstance(value, Mapping):
        return {key: _far(inner, family) for key, inner in value.items()}
    if isinstance(value, list):
        return [_far(inner, family) for inner in value]
    if isinstance(value, str):
        return value.replace(f"{family.base.parent}/", "s3://models/")
    return value


def _options(s3: S3Server) -> RunOptions:
    return replace(INLINE, storage=s3.options)


def _merged(s3: S3Server, family: Family, output: Path, name: str = "task_arithmetic") -> Merged:
    return merge(_far(recipes(family)[name], family), output, _options(s3))


def _read(merged: Merged) -> int:
    return sum(each.read_bytes for each in merged.result.receipts)


def _digests(output: Path) -> dict[str, str]:
    left_out = NOT_REPRODUCED | NAMED_AFTER_SOURCES
    found = {path.relative_to(output).as_posix(): path for path in output.rglob("*") if path.is_file()}
    return {
        key: hashlib.sha256(path.read_bytes()).hexdigest()
        for key, path in sorted(found.items())
        if key not in left_out
    }


def test_a_merge_is_that_of_local_sources_and_reads_every_byte_once(
    s3: S3Server, family: Family, near: Near, tmp_path: Path
) -> None:
    merged = _merged(s3, family, tmp_path / "out")
    assert _digests(tmp_path / "out") == near.digests
    weights = [each for each in s3.asked("GET", ".safetensors") if each.range is not None]
    headers = [each for each in weights if each.range is not None and not each.range[0]]
    assert sorted(each.key for each in headers) == sorted({each.key for each in weights})
    spans = sorted((each.key, *each.range) for each in weights if each.range is not None and each.range[0])
    for (key, _, end), (following, begin, _) in pairwise(spans):
        assert key != following or end <= begin
    assert sum(end - begin for _, begin, end in spans) == _read(merged) == near.read
    assert all(each.if_match for each in weights)
    # The rest: listings, versions at the end, and the small files of the model that gives them.
    others = [each for each in s3.requests if each not in weights]
    assert sum(each.sent for each in others) < 64 << 10
    assert len(others) < 40


def test_what_fails_for_a_moment_changes_nothing(
    s3: S3Server, family: Family, near: Near, tmp_path: Path
) -> None:
    for kind, every in (("error", 7), ("throttle", 11), ("reset", 13), ("cut", 17), ("tear", 19)):
        s3.fail(kind, key="model", times=20, every=every)
    merged = _merged(s3, family, tmp_path / "out")
    assert sum(fault.times for fault in s3.faults) < 90
    assert _digests(tmp_path / "out") == near.digests
    assert _read(merged) == near.read


def test_nothing_tells_how_the_server_is_reached(s3: S3Server, family: Family, tmp_path: Path) -> None:
    merged = _merged(s3, family, tmp_path / "out")
    told = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    told.append(repr(merged.events).encode())
    port = s3.endpoint.rpartition(":")[2]
    for secret in (
        ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        f":{port}",
        f"3A{port}",
    ):
        assert not any(secret.encode() in each for each in told)
    assert json.loads((tmp_path / "out/raymerge/run.json").read_bytes())["places"] == {
        f"s3://models/{name}": f"s3://models/{name}" for name in ("base", "tune1", "tune2", "tune3")
    }


@pytest.mark.parametrize("is_gone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_source_that_changes_or_vanishes_while_it_is_read(
    is_gone: bool, s3: S3Server, family: Family, near: Near, tmp_path: Path
) -> None:
    key = "tune2/model.safetensors"
    data, requests = (family.tunes[1] / "model.safetensors").read_bytes(), count()

    def change(method: str, asked: str) -> None:
        if asked == key and method == "GET" and next(requests) == 4:
            if is_gone:
                s3.client().delete_object(Bucket=s3.bucket, Key=key)
            else:
                s3.put(key, data[:-2] + bytes(2))

    s3.before = change
    error = IncompleteError if is_gone else CheckpointError
    said = "gone since the merge was planned" if is_gone else "was changed while it was merged"
    try:
        with pytest.raises(error, match=f"tune2.*{said}"):
            _merged(s3, family, tmp_path / "out")
    finally:
        s3.calm()
        s3.put(key, data)
    assert not (tmp_path / "out").exists()
    if is_gone:
        _merged(s3, family, tmp_path / "out")
        assert _digests(tmp_path / "out") == near.digests


def test_what_is_wrong_shows_before_anything_is_begun(s3: S3Server, family: Family, tmp_path: Path) -> None:
    def refusal(model: object) -> str:
        recipe = {"merge_method": "linear", "models": [{"model": model}], "parameters": {"weight": 1}}
        with pytest.raises((PlanError, RecipeError)) as caught:
            merge(recipe, tmp_path / "out", _options(s3))
        return str(caught.value)

    assert "there is no bucket 'nowhere' at http" in refusal("s3://nowhere/x")
    assert "s3://models/absent: there is nothing at this place" in refusal("s3://models/absent")
    assert "addresses of the kind nonsense:// are not supported" in refusal("nonsense://x/y")
    assert "revision" in refusal("s3://models/base@main")
    assert "has options behind it" in refusal("s3://models/base?endpoint=http://elsewhere")
    signed = refusal("s3://models/base?X-Amz-Signature=0123456789abcdef")
    assert "a signature in an address stands here" in signed
    assert "0123456789" not in signed
    s3.fail("forbid", times=9)
    assert "may not be read with the credentials of this machine" in refusal("s3://models/base")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_163_headers_are_read_together_by_one_request_each(s3: S3Server, tmp_path: Path) -> None:
    names = [f"model-{n:05}-of-00163.safetensors" for n in range(1, 164)]
    for number, name in enumerate(names):
        save_file({f"model.layers.{number}.w": torch.zeros(4)}, tmp_path / name)
    weight_map = {f"model.layers.{n}.w": name for n, name in enumerate(names)}
    index = {"metadata": {"total_size": 163 * 16}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    place = s3.upload(tmp_path, "many")
    s3.calm()
    s3.fail("delay", key=".safetensors", times=200, seconds=0.05)
    checkpoint = open_checkpoint(place, "many")
    assert len(checkpoint.tensors) == 163
    assert len(s3.requests) == 163 + len(("listing", "index", "config"))
    assert s3.most_at_once >= 8


@pytest.mark.slow
def test_adapters_and_files_of_tensors(s3: S3Server, family: Family, tmp_path: Path) -> None:
    adapter = tiny_lora(family.base.parent / "adapter", read_tensors(family.base), 1)
    s3.upload(adapter, "adapter")
    adapted = {
        "merge_method": "linear",
        "models": [
            {"model": f"{family.base}+{adapter}", "parameters": {"weight": 0.5}},
            {"model": str(family.tunes[0]), "parameters": {"weight": 0.5}},
        ],
    }
    files = {
        "merge_method": "linear",
        "models": [
            {"model": str(tune / "model.safetensors"), "parameters": {"weight": 0.5}}
            for tune in family.tunes[:2]
        ],
    }
    _compared(s3, family, (adapted, files), tmp_path)


@pytest.mark.slow
def test_what_transformers_reads_from_a_directory(s3: S3Server, family: Family, tmp_path: Path) -> None:
    """Tokenizers: to match rows by tokens, and to make router rows of prompts."""
    models = [family.base.parent / f"reader{number}" for number in range(3)]
    for number, model in enumerate(models):
        tiny_llama(model, number, layers=1, hidden=16, vocab=16, dtype=torch.float32)
        words = ["<unk>", "<s>", "</s>", *(f"w{n + number}" for n in range(13))]
        write_tokenizer(model, word_level(words, added=["<s>", "</s>"]), CHATML_CONFIG)
        s3.upload(model, model.name)
    union = {
        "merge_method": "linear",
        "models": [{"model": str(each), "parameters": {"weight": 0.5}} for each in models],
        "tokenizer": {"source": "union"},
    }
    experts = [
        {"source_model": str(model), "positive_prompts": [f"w5 w{number}"]}
        for number, model in enumerate(models[1:], 6)
    ]
    mixture = {"base_model": str(models[0]), "gate_mode": "hidden", "experts": experts}
    _compared(s3, family, (union, mixture), tmp_path)


def _compared(s3: S3Server, family: Family, asked: Sequence[Mapping[str, Any]], root: Path) -> None:
    for number, recipe in enumerate(asked):
        merge(recipe, root / f"near{number}")
        merge(_far(recipe, family), root / f"far{number}", _options(s3))
        assert _digests(root / f"far{number}") == _digests(root / f"near{number}")


def test_a_tokenizer_of_older_files_is_converted_from_a_copy(s3: S3Server, family: Family) -> None:
    s3.put("older/vocab.json", b"{}")
    s3.put("older/merges.txt", b"")
    s3.put("older/tokenizer_config.json", b"{}")
    seen: list[Path] = []

    def convert(directory: Path) -> str:
        seen.append(directory)
        assert (directory / "vocab.json").read_bytes() == b"{}"
        raise CheckpointError(Problem(str(directory), "cannot be converted.", ""))

    keys = ("vocab.json", "merges.txt", "tokenizer_config.json")
    with pytest.raises(CheckpointError, match=r"^s3://models/older: cannot be converted\.$"):
        read_tokenizer(s3.place("older"), keys, convert=convert)
    assert not seen[0].exists()


@pytest.mark.slow
def test_an_audit_and_a_replay_ask_a_server_only_for_what_is_named(
    s3: S3Server, family: Family, tmp_path: Path
) -> None:
    merged = _merged(s3, family, tmp_path / "out")
    names = [f"s3://models/{path.name}" for path in (family.base, *family.tunes)]
    s3.calm()
    verdict = audit(tmp_path / "out", AuditOptions(), INLINE)
    assert any("servers" in str(problem) or "--source" in str(problem) for problem in verdict.problems)
    assert any("--source" in str(problem) for problem in replay(tmp_path / "out").problems)
    assert s3.requests == []
    given = {name: s3.place(name.rpartition("/")[2]) for name in names}
    assert audit(tmp_path / "out", AuditOptions(sources=given), INLINE).problems == ()
    assert replay(tmp_path / "out", given).problems == ()
    assert merged.result.digest


def _projected(recipe: Mapping[str, Any], output: Path, options: RunOptions) -> int:
    """The peak that a run says it will have, which ends there."""

    def end(event: Event) -> None:
        if isinstance(event, Planned):
            raise KeyError(event.projected_peak)

    with pytest.raises(KeyError) as ended:
        submit(recipe, output, options, on_event=end)
    return int(ended.value.args[0])


def test_what_is_under_way_counts_as_memory(s3: S3Server, family: Family, tmp_path: Path) -> None:
    options = replace(_options(s3), memory=128 << 20)
    recipe = recipes(family)["task_arithmetic"]
    near = _projected(recipe, tmp_path / "near", replace(options, storage=NO_OPTIONS))
    far = _projected(_far(recipe, family), tmp_path / "far", options)
    assert near + FAR_BYTES + FAR_LANE_BYTES <= far <= 128 << 20
    # What is told is what was given, and what works.
    with pytest.raises(OptionError, match=r"27\.26 MB a worker are too little for .*") as refused:
        merge(_far(recipe, family), tmp_path / "small", replace(options, memory=26 << 20))
    (least,) = map(int, re.findall(r"smallest budget that works is (\d+) bytes", str(refused.value)))
    with pytest.raises(OptionError, match=f"{format_size(least - 1)} a worker are too little"):
        merge(_far(recipe, family), tmp_path / "small", replace(options, memory=least - 1))
    assert merge(_far(recipe, family), tmp_path / "small", replace(options, memory=least)).result.digest


def test_nodes_that_may_not_read_a_source(s3: S3Server) -> None:
    files = [SourceFile(0, s3.place("base"), "model-00001-of-00002.safetensors", 1, "")]
    s3.fail("forbid", method="HEAD", times=9)
    seen, _ = _look(files, os.devnull)
    assert seen == (Seen.REFUSED,)
    sights = {"node": Sight("10.0.0.1", seen)}
    (problem,) = survey_problems(sights, files, [frozenset({0})], "out")
    assert str(problem).startswith(
        "s3://models/base: no node with CPUs sees the files that were planned with"
    )
    assert (
        "10.0.0.1: model-00001-of-00002.safetensors is not to be read with what credentials" in problem.what
    )
    assert problem.remedy == "Give every node credentials that may read it, and a way to its server."


def test_the_plan_is_that_of_local_sources_but_for_names(s3: S3Server, family: Family) -> None:
    recipe = recipes(family)["ties"]
    (near,) = plan_for(recipe_from_mapping(recipe), "out")
    (far,) = plan_for(recipe_from_mapping(_far(recipe, family)), "out", _options(s3))
    assert all(far.plan[name].equals(near.plan[name]) for name in near.plan.tables)
    assert os.environ.get("AWS_ENDPOINT_URL") is None
