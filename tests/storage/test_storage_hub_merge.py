"""Merges of models on the Hub: the same bytes as of local ones, of the commits that a run began with."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from kits.adapter_maker import pickled_adapter, tiny_lora
from kits.checkpoint_maker import read_tensors
from kits.hub_server import HubServer, hub_server
from kits.merge_cases import INLINE, Family, digests, make_family, merge, recipes
from kits.merges import mean_of, merge_here
from kits.recipe_maker import linear, one
from kits.s3_server import s3_server
from kits.training_checkpoint import grid, save_chunks, save_shards

from raymerge.api import audit, plan, plan_for, replay, submit, submit_sweep
from raymerge.checkpoints.source import open_checkpoint
from raymerge.errors import IncompleteError, PlanError, RecipeError
from raymerge.events import Event, SegmentDone, Started, StorageFailed
from raymerge.options import RunOptions
from raymerge.runtime.driver.chained_merges import steps_directory
from raymerge.runtime.driver.versions import commits_taken

METHOD = "task_arithmetic"
RECORD = ("README.md", "raymerge/")
"""Files of an output that tell what its sources are called."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), hidden=128, files=2)


@pytest.fixture(scope="module")
def local(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The merge of the models as they lie in directories."""
    output = tmp_path_factory.mktemp("local") / "out"
    merge(recipes(family)[METHOD], output)
    return output


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with hub_server(tmp_path_factory.mktemp("cache")) as found:
        yield found


@pytest.fixture
def hub(server: HubServer, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The server with the models and an empty cache, as if nothing had been asked."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    server.repositories.clear()
    for model in (family.base, *family.tunes):
        server.push(f"org/{model.name}", model)
    server.forget()
    return server


def on_hub(family: Family, revision: str = "") -> dict[str, Any]:
    """The recipe with the models' addresses on the Hub."""
    text = json.dumps(recipes(family)[METHOD])
    for model in (family.base, *family.tunes):
        text = text.replace(json.dumps(str(model)), json.dumps(f"hf://org/{model.name}{revision}"))
    found: dict[str, Any] = json.loads(text)
    return found


def named(family: Family) -> dict[str, Any]:
    """The recipe with the models' names on the Hub, which are fetched."""
    found: dict[str, Any] = json.loads(json.dumps(on_hub(family)).replace("hf://", ""))
    return found


def checkpoint_of(output: Path) -> dict[str, str]:
    """Digests of the files of an output that do not tell what its sources are called."""
    return {key: digest for key, digest in digests(output).items() if not key.startswith(RECORD)}


def begun(
    recipe: Any, output: Path | str, act: Callable[[Event], None], events: list[Event] | None = None
) -> list[Event]:
    """A run whose events are collected and acted upon."""
    events = [] if events is None else events

    def told(event: Event) -> None:
        events.append(event)
        act(event)

    submit(recipe, output, INLINE, on_event=told)
    return events


def losing(hub: HubServer) -> Callable[[Event], None]:
    """Takes the access to one model away after the first segment."""

    def lose(event: Event) -> None:
        if isinstance(event, SegmentDone):
            hub.repositories["org/tune1"].refusal = (403, "GatedRepo", "no")
            hub.expire()

    return lose


def test_a_merge_is_the_local_one_and_each_byte_of_the_weights_is_served_once(
    hub: HubServer, family: Family, local: Path, tmp_path: Path
) -> None:
    def forget(event: Event) -> None:
        if isinstance(event, Started):
            hub.forget()

    begun(on_hub(family), tmp_path / "out", forget)
    assert checkpoint_of(tmp_path / "out") == checkpoint_of(local)
    for model in (family.base, *family.tunes):
        checkpoint = open_checkpoint(model, model.name)
        for file in checkpoint.files:
            begin = min(each.offset for each in checkpoint.tensors.values() if each.key == file.key)
            ranges = hub.ranges(f"org/{model.name}", file.key)
            assert ranges[0][0] == begin
            ends = [offset + nbytes for offset, nbytes in ranges]
            assert ends == [*(offset for offset, _ in ranges[1:]), file.nbytes]


def test_planning_reads_headers_only(hub: HubServer, family: Family) -> None:
    plan(on_hub(family))
    served = sum(each.nbytes for each in hub.asked)
    sizes = sum(path.stat().st_size for path in family.base.parent.rglob("*.safetensors"))
    assert served < sizes
    for model in (family.base, *family.tunes):
        of_model = [each for each in hub.asked if f"/{model.name}/" in each.path]
        # Its commit and its files; config and index; and the begin of each file of weights: where, and what.
        assert len(of_model) <= 2 + 2 * 2 + 3 * len(list(model.glob("*.safetensors")))


@pytest.mark.slow
def test_faults_on_the_way_change_nothing(
    hub: HubServer, family: Family, local: Path, tmp_path: Path
) -> None:
    hub.fail("GET /api", "500")
    hub.fail("HEAD .*config", "reset")

    def fail(event: Event) -> None:
        if isinstance(event, Started):
            hub.fail("GET .*tune1.*safetensors", "cut", "500", "reset")
            hub.fail("HEAD .*tune2.*safetensors", "429")
            hub.expire()

    events = begun(on_hub(family), tmp_path / "out", fail)
    assert checkpoint_of(tmp_path / "out") == checkpoint_of(local)
    assert any(isinstance(event, StorageFailed) for event in events)


def test_what_was_made_of_is_recorded(hub: HubServer, family: Family, tmp_path: Path) -> None:
    merge(on_hub(family), tmp_path / "out")
    commit = hub.repositories["org/base"].refs["main"]
    told = json.loads((tmp_path / "out" / "raymerge" / "provenance.json").read_text())
    (base,) = [each for each in told["sources"] if each["name"] == "hf://org/base"]
    assert base["revision"] == commit
    assert all(len(file["sha256"]) == 64 for file in base["files"])
    story = json.loads((tmp_path / "out" / "raymerge" / "run.json").read_text())
    assert story["places"]["hf://org/base"] == f"hf://org/base@{commit}"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"- `org/base`, revision `{commit}`" in card
    assert "base_model:\n- org/base\n- org/tune1\n" in card


def test_a_branch_that_moves_changes_nothing_in_a_run_and_in_what_resumes_it(
    hub: HubServer, family: Family, local: Path, tmp_path: Path
) -> None:
    """The run loses its access in the midst of it, after the branch moved; then it has it again."""
    repository = hub.repositories["org/tune1"]
    old = repository.refs["main"]

    def move(event: Event) -> None:
        if isinstance(event, Started):
            hub.push("org/tune1", family.tunes[1])
        if isinstance(event, SegmentDone):
            repository.refusal = (403, "GatedRepo", "no")
            hub.expire()

    with pytest.raises(IncompleteError, match="granted access"):
        begun(on_hub(family), tmp_path / "out", move)
    assert repository.refs["main"] != old
    repository.refusal = None
    hub.forget()
    done = merge(on_hub(family), tmp_path / "out").of(Started)[0].done_segments
    assert done > 0
    assert checkpoint_of(tmp_path / "out") == checkpoint_of(local)
    assert not [each for each in hub.asked if repository.refs["main"] in each.path]


@pytest.mark.slow
def test_a_run_towards_an_object_store_goes_on_with_its_commits(
    hub: HubServer, family: Family, local: Path
) -> None:
    def lose(event: Event) -> None:
        if isinstance(event, Started):
            hub.push("org/tune1", family.tunes[1])
            hub.repositories["org/tune1"].refusal = (403, "GatedRepo", "no")
            hub.expire()

    with s3_server() as s3:
        place = s3.place("merged")
        with pytest.raises(IncompleteError, match="granted access"):
            begun(on_hub(family), place, lose)
        hub.repositories["org/tune1"].refusal = None
        submit(on_hub(family), place, INLINE)
        made = {key.removeprefix("merged/"): text for key, text in s3.objects("merged/").items()}
    weights = [key for key in checkpoint_of(local) if key.endswith(".safetensors")]
    assert weights
    assert all(made[key] == (local / key).read_bytes() for key in weights)


def test_a_new_run_and_one_that_replaces_take_the_commits_of_now(
    hub: HubServer, family: Family, tmp_path: Path
) -> None:
    with pytest.raises(IncompleteError):
        begun(on_hub(family), tmp_path / "out", losing(hub))
    hub.repositories["org/tune1"].refusal = None
    old = hub.repositories["org/tune1"].refs["main"]
    new = hub.push("org/tune1", family.tunes[1])
    places = [
        (tmp_path / "out", RunOptions(inline=True), old),
        (tmp_path / "out", RunOptions(inline=True, replace=True), new),
        (tmp_path / "other", RunOptions(inline=True), new),
    ]
    for output, options, commit in places:
        (merged,) = plan_for(on_hub(family), output, options)
        roots = [source.checkpoint.root for source in merged.sources]
        assert f"hf://org/tune1@{commit}" in roots


def test_outputs_of_a_sweep_that_are_there_keep_their_commits(
    hub: HubServer, family: Family, tmp_path: Path
) -> None:
    plain = on_hub(family)
    models = [{**each, "parameters": {"weight": "$w"}} for each in plain["models"]]
    sweep = {**plain, "models": models, "sweep": {"w": [0.3, 0.6]}}
    first = submit_sweep(sweep, tmp_path / "outs", INLINE)
    hub.push("org/tune1", family.tunes[1])
    hub.forget()
    again = submit_sweep(sweep, tmp_path / "outs", INLINE)
    assert {name: each.digest for name, each in again.items()} == {
        name: each.digest for name, each in first.items()
    }


def test_a_commit_in_the_recipe_stays_what_it_is(hub: HubServer, family: Family, tmp_path: Path) -> None:
    commit = hub.repositories["org/tune1"].refs["main"]
    recipe = json.loads(json.dumps(on_hub(family)).replace("org/tune1", f"org/tune1@{commit}"))
    hub.push("org/tune1", family.tunes[1])
    hub.forget()
    (planned,) = plan_for(recipe, tmp_path / "out")
    assert f"hf://org/tune1@{commit}" in {source.checkpoint.root for source in planned.sources}
    assert f"hf://org/tune1@{commit}" not in commits_taken(planned.sources)
    # Nobody has to be asked what a commit is.
    assert len([each for each in hub.asked if each.path.startswith("/api/models/org/tune1/")]) == 1


def test_a_whole_cache_does_without_a_network_and_proves_what_was_made(
    hub: HubServer, family: Family, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(on_hub(family), tmp_path / "ranges")
    assert "servers are asked only for what you name" in str(replay(tmp_path / "ranges").problems)
    for model in (family.base, *family.tunes):
        snapshot_download(f"org/{model.name}")
    hub.forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    merge(on_hub(family), tmp_path / "cached")
    assert checkpoint_of(tmp_path / "cached") == checkpoint_of(local)
    assert digests(tmp_path / "cached") == digests(tmp_path / "ranges")
    assert replay(tmp_path / "ranges").problems == ()
    assert audit(tmp_path / "ranges", options=INLINE).require().problems == ()
    assert hub.asked == []


def _weights_asked(hub: HubServer, repo: str) -> set[str]:
    """Files of weights of a repository of which anything was asked."""
    paths = (each.path.partition(f"/{repo}/")[2] for each in hub.asked)
    return {path for path in paths if path.endswith((".safetensors", ".bin", ".pt", ".gguf", ".onnx"))}


@pytest.mark.parametrize("key", ["stray.bin", "vocoder.pt"])
def test_weights_that_no_rule_knows_are_refused_before_any_is_fetched(
    hub: HubServer, family: Family, tmp_path: Path, key: str
) -> None:
    model = Path(shutil.copytree(family.tunes[0], tmp_path / "model"))
    (model / key).parent.mkdir(exist_ok=True)
    (model / key).write_bytes(b"x")
    hub.push("org/tune1", model)
    with pytest.raises(PlanError, match=f"org/tune1: holds weights that are not merged.*: {key}"):
        plan(named(family)).require()
    assert _weights_asked(hub, "org/tune1") == set()


def test_what_rules_leave_out_is_not_fetched(
    hub: HubServer, family: Family, local: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(family.tunes[0], tmp_path / "model"))
    for key in ("original/model.safetensors", "onnx/model.onnx", "small.gguf", "pytorch_model.bin"):
        (model / key).parent.mkdir(exist_ok=True)
        (model / key).write_bytes(b"x")
    hub.push("org/tune1", model)
    merge(named(family), tmp_path / "out")
    assert checkpoint_of(tmp_path / "out") == checkpoint_of(local)
    asked = {path.rpartition("/")[2] for path in _weights_asked(hub, "org/tune1")}
    assert asked == {path.name for path in family.tunes[0].glob("*.safetensors")}


def test_a_model_is_fetched_for_its_tokenizer_whatever_weights_lie_beside(
    hub: HubServer, family: Family, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(family.tunes[0], tmp_path / "model"))
    (model / "stray.bin").write_bytes(b"x")
    hub.push("org/giver", model)
    recipe = {**named(family), "tokenizer_source": "org/giver"}
    plan(recipe)
    assert "model" in str(_weights_asked(hub, "org/giver"))


@pytest.mark.parametrize("scheme", ["", "hf://"])
def test_a_pickled_adapter_gives_the_bytes_of_a_local_one_in_safetensors(
    hub: HubServer, family: Family, tmp_path: Path, scheme: str
) -> None:
    lora = tiny_lora(tmp_path / "lora", read_tensors(family.base), 3)
    hub.push("org/lora", pickled_adapter(lora, tmp_path / "pickled"))
    recipe: dict[str, Any] = {"merge_method": "passthrough"}
    for name, adapter in (("expected", str(lora)), ("found", f"{scheme}org/lora")):
        merge({**recipe, "models": [{"model": f"{family.base}+{adapter}"}]}, tmp_path / name)
    assert checkpoint_of(tmp_path / "found") == checkpoint_of(tmp_path / "expected")


def test_a_pickled_adapter_that_the_recipe_refuses_is_not_fetched(
    hub: HubServer, family: Family, tmp_path: Path
) -> None:
    lora = tiny_lora(tmp_path / "lora", read_tensors(family.base), 3)
    hub.push("org/lora", pickled_adapter(lora, tmp_path / "pickled"))
    recipe = one(f"{family.base}+org/lora")
    with pytest.raises(PlanError, match=r"org/lora: has its weights in adapter_model.bin, and pickled weigh"):
        plan({**recipe, "pickled_weights": "refuse"}).require()
    assert _weights_asked(hub, "org/lora") == set()


def test_nothing_is_fetched_for_a_recipe_that_cannot_be_read(hub: HubServer, family: Family) -> None:
    recipe = named(family)
    with pytest.raises(RecipeError) as caught:
        plan({**recipe, "modles": 1})
    assert hub.asked == []
    assert [problem.where for problem in caught.value.problems] == ["recipe: modles"]


def test_headers_are_read_for_a_recipe_that_cannot_be_read(hub: HubServer, family: Family) -> None:
    text = json.dumps(on_hub(family)).replace("org/tune2", "org/none")
    with pytest.raises(RecipeError) as caught:
        plan({**json.loads(text), "modles": 1})
    said = "\n".join(problem.what for problem in caught.value.problems)
    assert len(caught.value.problems) == 2
    assert "modles" in said
    assert "the Hub has no such repository" in said


def test_what_is_wrong_with_several_models_is_said_at_once(hub: HubServer, family: Family) -> None:
    hub.repositories["org/tune1"].refusal = (403, "GatedRepo", "no")
    text = json.dumps(on_hub(family)).replace("org/tune2", "org/none").replace("tune3", "tune3@v9")
    with pytest.raises(PlanError) as caught:
        plan(json.loads(text))
    said = [problem.what for problem in caught.value.problems]
    assert said == [
        "the Hub gives it only to those who were granted access.",
        "the Hub has no such repository, or it is private.",
        "the repository has no such revision.",
    ]


def test_the_token_and_signed_addresses_are_nowhere(
    hub: HubServer,
    family: Family,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "raymerge")
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    for repository in hub.repositories.values():
        repository.refusal = (401, "RepoNotFound", "no")

    def lose(event: Event) -> None:
        if isinstance(event, SegmentDone):
            monkeypatch.setenv("HF_TOKEN", f"{hub.token}x")
            hub.repositories["org/tune1"].refusal = (403, "GatedRepo", f"no, {hub.token}")
            hub.expire()

    events: list[Event] = []
    with pytest.raises(IncompleteError) as caught:
        begun(on_hub(family), tmp_path / "out", lose, events)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    done = merge(on_hub(family), tmp_path / "out")
    texts = [str(caught.value), *(json.dumps(event.to_json()) for event in (*events, *done.events))]
    texts += [record.getMessage() for record in caplog.records if record.name.startswith("raymerge")]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for secret in (hub.token, "X-Signature"):
        assert not [text for text in texts if secret in text]
        assert not [path for path in files if secret.encode() in path.read_bytes()]


@pytest.mark.slow
def test_several_merges_go_on_with_the_commits_that_the_first_of_them_began_with(
    hub: HubServer, family: Family, tmp_path: Path
) -> None:
    first = {"name": "first", **on_hub(family)}
    last = linear("first", "hf://org/tune3@main")
    old = {name: each.refs["main"] for name, each in hub.repositories.items()}

    with pytest.raises(IncompleteError):
        begun([first, last], tmp_path / "out", losing(hub))
    hub.repositories["org/tune1"].refusal = None
    for name in ("org/tune1", "org/tune3"):
        hub.push(name, family.tunes[1])
    merges = plan_for([first, last], tmp_path / "out")
    roots = {source.checkpoint.root for merge in merges for source in merge.sources}
    assert {f"hf://{name}@{commit}" for name, commit in old.items()} < roots
    merge([first, last], tmp_path / "out")
    merges = plan_for([first, last], tmp_path / "out")
    now = hub.repositories["org/tune3"].refs["main"]
    assert merges[-1].sources[1].checkpoint.root == f"hf://org/tune3@{now}"


@pytest.mark.slow
def test_what_is_kept_of_several_merges_keeps_no_commits(
    hub: HubServer, family: Family, tmp_path: Path
) -> None:
    chain = [{"name": "first", **linear("hf://org/tune1@main", "hf://org/tune2")}, linear("first")]
    submit(chain, tmp_path / "out", replace(INLINE, keep_intermediates=True))
    assert (steps_directory(tmp_path / "out") / "first").is_dir()
    shutil.rmtree(tmp_path / "out")
    now = hub.push("org/tune1", family.tunes[1])
    sources = [source for merge in plan_for(chain, tmp_path / "out") for source in merge.sources]
    assert f"hf://org/tune1@{now}" in {source.checkpoint.root for source in sources}


def test_a_file_of_tensors_is_read_at_a_commit_too(hub: HubServer, family: Family, tmp_path: Path) -> None:
    commit = hub.repositories["org/tune1"].refs["main"]
    for address in ("hf://org/tune1/model.safetensors", "hf://org/tune1@main/model.safetensors"):
        (planned,) = plan_for(linear(address, "hf://org/tune2/model.safetensors"), tmp_path / "out")
        assert planned.sources[0].checkpoint.is_single_file
        assert planned.sources[0].checkpoint.root == f"hf://org/tune1@{commit}"
        assert commits_taken(planned.sources)


def test_an_adapter_is_read_by_its_address_too(hub: HubServer, family: Family, tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    tiny_lora(lora, read_tensors(family.base), 1)
    commit = hub.push("org/lora", lora)
    recipe = one("hf://org/base+hf://org/lora@main")
    (planned,) = plan_for(recipe, tmp_path / "out")
    (source,) = planned.sources
    assert source.adapter is not None
    assert source.adapter.root == f"hf://org/lora@{commit}"
    assert commits_taken(planned.sources) == {
        "hf://org/base@main": hub.repositories["org/base"].refs["main"],
        "hf://org/lora@main": commit,
    }
    merge(recipe, tmp_path / "out")
    merge({**recipe, "models": [{"model": f"{family.base}+{lora}"}]}, tmp_path / "local")
    assert checkpoint_of(tmp_path / "out") == checkpoint_of(tmp_path / "local")


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["chunks", "shards"])
@pytest.mark.parametrize("prefix", ["", "hf://"])
def test_a_model_that_is_stored_only_in_chunks_is_read(
    hub: HubServer, form: str, prefix: str, tmp_path: Path
) -> None:
    tensor, boxes = torch.randn(6, 4), grid((6, 4), (2,))
    if form == "chunks":
        root = save_chunks(tmp_path / "model", {"w": tensor}, {"w": boxes})
        save_chunks(root / "optim", {"w": tensor}, {"w": boxes})
    else:
        root = save_shards(tmp_path / "model", {"w": tensor}, {"w": boxes}, ranks=2)
    hub.push("org/chunks", root)
    merged = merge_here(mean_of(f"{prefix}org/chunks"), tmp_path / "out")
    assert torch.equal(merged["w"], tensor)
    assert not hub.ranges("org/chunks", "optim/__0_0.distcp")
