"""Running servers as evaluators: the numbers that they answer with are those of the weights that they got."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.inference_server import SglangStandIn, StandIn, VllmStandIn, served, stored

import raymerge
from raymerge.documents.fields import FaultError
from raymerge.errors import IncompleteError, OptionError, SearchError
from raymerge.events import Event, TrialEvaluated
from raymerge.recipe_search.evaluators.server import read_server
from raymerge.recipe_search.trials import best_first

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
MODELS = QUICKSTART / "models"
INLINE = raymerge.RunOptions(inline=True, threads=1)
UPDATE = {
    ("vllm", "disk"): ["/pause?mode=wait", "/collective_rpc", "/resume"],
    ("sglang", "disk"): ["/update_weights_from_disk"],
    ("sglang", "memory"): ["/server_info", "/get_server_info", "/update_weights_from_tensor"],
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "held-out.txt"
    path.write_text((QUICKSTART / "texts" / "valid-english.txt").read_text()[:2000])
    return path


def recipe(server: Mapping[str, Any], **block: Any) -> dict[str, Any]:
    models = [
        {"model": str(MODELS / name), "parameters": {"weight": {"search": [0, 1]}}}
        for name in ("english", "french")
    ]
    return {
        "search": {"strategy": "soup", "server": dict(server), **block},
        "merge_method": "task_arithmetic",
        "base_model": str(MODELS / "base"),
        "models": models,
        "dtype": "bfloat16",
    }


def stand_in(engine: str) -> StandIn:
    return (VllmStandIn if engine == "vllm" else SglangStandIn)(MODELS / "base")


def has_weights_of(server: StandIn, directory: Path) -> bool:
    expected = stored(directory)
    return expected.keys() == server.tensors.keys() and all(
        torch.equal(expected[name], each) for name, each in server.tensors.items()
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("engine", "transfer"),
    [("vllm", "disk"), ("sglang", "memory"), pytest.param("sglang", "disk", marks=pytest.mark.slow)],
)
def test_a_server_judges_the_weights_of_each_candidate(
    engine: str, transfer: str, text: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    with served(stand_in(engine)) as server:
        settings = {"url": server.url, "engine": engine, "transfer": transfer, "after": "best"}
        settings |= {"texts": [str(text)]}
        if transfer == "disk":
            settings["directory"] = str(shared)
        result = raymerge.search(recipe(settings), tmp_path / "out", INLINE)
        assert len(result.trials) == 3
        assert best_first(result.trials)[0] is result.best
        (loss,) = raymerge.evaluate(tmp_path / "out", [text], length=511, threads=1).texts
        assert result.best.metrics == pytest.approx({"mean": loss.loss, "held-out": loss.loss}, abs=1e-5)
        once = [*UPDATE[engine, transfer], "/v1/models", "/v1/completions"]
        assert server.calls == [*once * 3, *UPDATE[engine, transfer]]
        assert has_weights_of(server, tmp_path / "out")
        assert server.url not in (tmp_path / "out" / "README.md").read_text()
    assert not list(shared.glob("*"))
    assert not list(tmp_path.glob(".out.raymerge.search/candidates*"))


def test_a_failed_update_is_the_failure_of_one_candidate(text: Path, tmp_path: Path) -> None:
    server = stand_in("vllm")
    server.failures[0] = "out of memory"
    with served(server):
        settings = {"url": server.url, "engine": "vllm", "texts": [str(text)]}
        result = raymerge.search(recipe(settings), tmp_path / "out", INLINE)
        assert not server.is_paused  # type: ignore[attr-defined]
    first, second, *_ = result.trials
    assert (first.state, second.state) == ("failed", "done")
    assert "/collective_rpc answered 500: " in first.error
    assert "out of memory" in first.error
    # French alone: nothing is left of the candidate before it.
    plain = recipe({})
    del plain["search"]
    for model, weight in zip(plain["models"], (0, 1), strict=True):
        model["parameters"]["weight"] = weight
    (loss,) = raymerge.evaluate(plain, [text], length=511, threads=1).texts
    assert second.metrics["mean"] == pytest.approx(loss.loss, abs=1e-5)


@pytest.mark.slow
def test_a_command_gets_the_address_and_a_resumed_search_another(tmp_path: Path) -> None:
    with served(stand_in("sglang")) as server:
        settings = {"url": f"{server.url}/", "engine": "sglang", "transfer": "memory"}
        settings["command"] = 'test "{url}" != x && echo 0.5'
        trials = raymerge.search(recipe(settings), tmp_path / "out", INLINE).trials
        assert [each.metrics for each in trials] == [{"score": 0.5}] * 3
        seen: list[Event] = []
        elsewhere = recipe(settings | {"url": "http://127.0.0.1:1"})
        raymerge.search(elsewhere, tmp_path / "out", INLINE, on_event=seen.append)
        assert all(each.is_recorded for each in seen if isinstance(each, TrialEvaluated))


@pytest.mark.slow
def test_a_server_that_is_not_there_is_no_fault_of_candidates(text: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    settings = {"url": url, "engine": "sglang", "texts": [str(text)]}
    with pytest.raises(IncompleteError, match=f"{url}/update_weights_from_disk cannot be reached: "):
        raymerge.search(recipe(settings), tmp_path / "out", INLINE)
    with served(stand_in("sglang")) as server:
        settings["url"] = server.url
        trials = raymerge.search(recipe(settings), tmp_path / "out", INLINE).trials
    assert [each.state for each in trials] == ["done"] * len(trials)


def test_a_vllm_without_the_endpoints_is_told_what_it_lacks(text: Path, tmp_path: Path) -> None:
    with served(stand_in("sglang")) as server:
        settings = {"url": server.url, "engine": "vllm", "texts": [str(text)]}
        with pytest.raises(SearchError, match="has no /pause: start vLLM with VLLM_SERVER_DEV_MODE=1"):
            raymerge.search(recipe(settings), tmp_path / "out", INLINE)


@pytest.mark.ray
@pytest.mark.slow
def test_each_of_two_servers_judges_a_part_of_the_candidates(text: Path, tmp_path: Path) -> None:
    options = raymerge.RunOptions(threads=1)
    with served(stand_in("vllm")) as one, served(stand_in("vllm")) as other:
        settings = {"url": [one.url, other.url], "engine": "vllm", "texts": [str(text)]}
        block = {"strategy": "random", "evaluations": 4}
        two = raymerge.search(recipe(settings, **block), tmp_path / "two", options)
        assert one.updates + other.updates == 4
        assert min(one.updates, other.updates) > 0
        how = raymerge.SearchOptions(evaluators=3)
        with pytest.raises(OptionError, match="3 evaluators, where the recipe names 2 servers"):
            raymerge.search(recipe(settings, **block), tmp_path / "three", options, how)
        alone = recipe(settings | {"url": one.url}, **block)
        assert [each.score for each in raymerge.search(alone, tmp_path / "one", options).trials] == [
            each.score for each in two.trials
        ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"engine": "vllm", "transfer": "memory"}, "vLLM takes tensors over NCCL or CUDA IPC"),
        ({"texts": None}, "nothing says what is measured"),
        ({"command": "run {url}"}, "texts and command all say what is measured"),
        ({"texts": None, "command": "run {model}"}, "does not use {url}"),
        ({"url": "localhost:8000"}, "not the address of a server"),
        ({"url": ["http://a", "http://a/"]}, "addresses of different servers"),
        ({"transfer": "memory", "directory": "/shared"}, "nothing is written"),
        ({"engin": "vllm"}, "unknown key 'engin'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change: Mapping[str, Any], what: str) -> None:
    with pytest.raises(FaultError, match=what):
        read_server({"url": "http://a", "engine": "sglang", "texts": ["x.txt"], **change})
