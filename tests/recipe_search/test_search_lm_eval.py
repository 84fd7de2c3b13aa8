"""Tasks of lm-eval as evaluators: what its API is given, and its results as metrics."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kits.checkpoint_maker import tiny_llama
from kits.inference_server import MODEL, SglangStandIn, served

import raymerge
from raymerge.documents.fields import FaultError
from raymerge.errors import OptionError, SearchError
from raymerge.recipe_search.evaluators.lm_eval import LmEvalSettings, metrics_of, read_lm_eval

MODELS = Path(__file__).parents[2] / "configs" / "quickstart" / "models"
INLINE = raymerge.RunOptions(inline=True, threads=1)


class LmEval(ModuleType):
    """A stand-in, whose accuracy is the weight in the recipe of the directory that it is given."""

    def __init__(self) -> None:
        super().__init__("lm_eval")
        self.calls: list[dict[str, Any]] = []

    def simple_evaluate(
        self,
        *,
        model: str,
        model_args: Mapping[str, Any],
        tasks: list[str],
        task_manager: Any,
        device: str | None,
        limit: float | None = None,
        num_fewshot: int | None = None,
        bootstrap_iters: int = 100_000,
        log_samples: bool = True,
    ) -> dict[str, Any]:
        self.calls.append(
            {"model": model, "model_args": model_args, "tasks": tasks, "limit": limit, "shots": num_fewshot}
        )
        if tasks == ["absent"]:
            raise KeyError("absent")
        acc = 0.5
        if model == "hf":
            # Without a device lm-eval takes a GPU, also where there is none.
            assert device is not None
            assert json.loads((Path(model_args["pretrained"]) / "config.json").read_text())
            card = (Path(model_args["pretrained"]) / "README.md").read_text()
            acc = float(card.partition("weight: ")[2].split()[0])
        else:
            assert (Path(model_args["tokenizer"]) / "tokenizer.json").exists()
        return {"results": {tasks[0]: {"alias": tasks[0], "acc,none": acc, "acc_stderr,none": "N/A"}}}


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> LmEval:
    module, tasks = LmEval(), ModuleType("lm_eval.tasks")
    tasks.TaskManager = lambda include_path: include_path  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", module)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    return module


def recipe(root: Path, block: Mapping[str, Any]) -> dict[str, Any]:
    base = tiny_llama(root / "a", 1)
    tiny_llama(root / "b", 2, base=base)
    weight = {"search": {"low": 0.1, "high": 0.9, "step": 0.4}}
    return {
        "search": {"strategy": "grid", "metrics": {"arc_easy/acc": 1}, **block},
        "merge_method": "linear",
        "models": [
            {"model": str(root / "a"), "parameters": {"weight": weight}},
            {"model": str(root / "b"), "parameters": {"weight": 0.5}},
        ],
        "dtype": "bfloat16",
    }


def test_tasks_judge_the_directory_of_each_candidate(lm_eval: LmEval, tmp_path: Path) -> None:
    settings = {"tasks": ["arc_easy"], "limit": 20, "num_fewshot": 2, "model_args": {"dtype": "float32"}}
    result = raymerge.search(recipe(tmp_path, {"lm_eval": settings}), tmp_path / "out", INLINE)
    assert result.best.metrics == {"arc_easy/acc": 0.9}
    assert [each.score for each in result.trials] == [0.1, 0.5, 0.9]
    call = lm_eval.calls[0]
    assert (call["model"], call["tasks"], call["limit"], call["shots"]) == ("hf", ["arc_easy"], 20, 2)
    assert call["model_args"]["dtype"] == "float32"
    assert not Path(call["model_args"]["pretrained"]).exists()


def test_tasks_judge_a_server(lm_eval: LmEval, tmp_path: Path) -> None:
    made = recipe(tmp_path, {})
    for model, name in zip(made["models"], ("english", "french"), strict=True):
        model["model"] = str(MODELS / name)
    with served(SglangStandIn(MODELS / "base")) as server:
        settings = {"url": server.url, "engine": "sglang", "lm_eval": {"tasks": ["arc_easy"]}}
        made["search"] |= {"server": settings, "evaluations": 1}
        assert raymerge.search(made, tmp_path / "out", INLINE).best.metrics == {"arc_easy/acc": 0.5}
        url = server.url
    (call,) = lm_eval.calls
    assert call["model"] == "local-completions"
    assert (call["model_args"]["base_url"], call["model_args"]["model"]) == (f"{url}/v1/completions", MODEL)


def test_what_lm_eval_raises_is_the_failure_of_candidates(lm_eval: LmEval, tmp_path: Path) -> None:
    block = {"lm_eval": {"tasks": ["absent"]}}
    with pytest.raises(SearchError, match="lm-eval: KeyError: 'absent'"):
        raymerge.search(recipe(tmp_path, block), tmp_path / "out", INLINE)
    assert len(lm_eval.calls) == 3


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    block = {"lm_eval": {"tasks": ["arc_easy"]}}
    with pytest.raises(OptionError, match=r"pip install 'raymerge\[lm-eval\]'"):
        raymerge.search(recipe(tmp_path, block), tmp_path / "out", INLINE)


def test_metrics_are_named_by_task_and_filter() -> None:
    results = {
        "arc_easy": {"alias": "arc_easy", "acc,none": 0.5, "acc_stderr,none": 0.01, "acc_norm,none": 0.25},
        "gsm8k": {"exact_match,strict-match": 0.75, "sample_len": 10},
    }
    assert metrics_of(results) == {
        "arc_easy/acc": 0.5,
        "arc_easy/acc_norm": 0.25,
        "gsm8k/exact_match,strict-match": 0.75,
    }


def test_settings_are_those_of_lm_eval() -> None:
    assert read_lm_eval({"tasks": ["a"], "limit": 0.5}) == LmEvalSettings(("a",), limit=0.5)
    with pytest.raises(FaultError) as refused:
        read_lm_eval({"task": ["a"], "limit": 0})
    assert [each.what for each in refused.value.faults] == [
        "unknown key 'task'.",
        "the key 'tasks' is missing or empty.",
        "0 is not above 0.",
    ]
