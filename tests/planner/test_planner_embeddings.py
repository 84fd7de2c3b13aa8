"""Vocabularies of different length: refused with a count of their tokens, cut short, or filled up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint
from kits.plan_maker import good, planned, refusals

import raymerge

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Three Llamas in float32 with 64, 70 and 60 rows."""
    sizes = {"a": 64, "b": 70, "c": 60}
    a, b, c = (
        tiny_llama(tmp_path / name, seed, dtype=torch.float32, vocab=rows)
        for seed, (name, rows) in enumerate(sizes.items())
    )
    return a, b, c


def _linear(*models: Path, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(each), "parameters": {"weight": 1}} for each in models]
    return {"merge_method": "linear", "models": entries, **more}


def _merged(recipe: Mapping[str, Any], out: Path) -> dict[str, torch.Tensor]:
    result = raymerge.submit(
        json.loads(json.dumps(recipe, default=str)), out, raymerge.RunOptions(inline=True)
    )
    return read_tensors(result.output)


def test_other_numbers_of_rows_are_refused_with_three_ways_out(models: tuple[Path, Path, Path]) -> None:
    a, b, c = models
    problems = refusals(_linear(a, b, c))
    assert len(problems) == 2
    assert f"{b}: 2 of its tensors have 70 rows, one for each token, where {a} has 64" in problems[0]
    assert f"{c}: 2 of its tensors have 60 rows" in problems[1]
    for word in ("tokenizer_source: union", "embedding_sizes: common", "embedding_sizes: pad"):
        assert word in problems[0]


def test_the_refusal_counts_tokens_that_agree_moved_or_are_new(tmp_path: Path) -> None:
    def tokenizer(vocabulary: Mapping[str, int]) -> dict[str, str]:
        model = {"type": "WordLevel", "vocab": dict(vocabulary), "unk_token": "a"}
        return {"tokenizer.json": json.dumps({"version": "1.0", "added_tokens": [], "model": model})}

    generator = torch.Generator().manual_seed(0)

    def model(name: str, vocabulary: Mapping[str, int], rows: int) -> Path:
        tensors = {EMBEDDING: torch.randn(rows, 8, generator=generator)}
        config = {**llama_config(layers=0, hidden=8, vocab=rows, tie=True)}
        return write_checkpoint(tmp_path / name, tensors, config, extra=tokenizer(vocabulary))

    one = model("one", {"a": 0, "b": 1, "c": 2}, 3)
    two = model("two", {"a": 0, "c": 1, "b": 2, "d": 3}, 4)
    (problem,) = refusals(_linear(one, two))
    assert "(1 tokens have the same id in both, 2 another, 1 are only here)" in problem


def test_common_keeps_the_rows_that_all_have(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    recipe = _linear(*models, embedding_sizes="common")
    found = _merged(recipe, tmp_path / "out")
    parents = [read_tensors(each) for each in models]
    for name in (EMBEDDING, HEAD):
        expected = sum(parent[name][:60].double() for parent in parents) / 3
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-6, atol=1e-8)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 60
    made = good(recipe)
    assert made.fate(1, EMBEDDING) == ("merged", "method", EMBEDDING)


def test_pad_keeps_every_row_and_fills_from_those_that_go_on(
    models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    a, b, c = (read_tensors(each)[EMBEDDING].double() for each in models)
    found = _merged(_linear(*models, embedding_sizes="pad"), tmp_path / "out")[EMBEDDING].double()
    assert found.shape == (70, 32)
    torch.testing.assert_close(found[:60], (a[:60] + b[:60] + c[:60]) / 3, rtol=1e-6, atol=1e-8)
    beyond = (a[60:64] + b[60:64]) / 2
    torch.testing.assert_close(found[60:64], (a[60:64] + b[60:64] + beyond) / 3, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found[64:], b[64:], rtol=1e-6, atol=1e-8)


def test_a_base_that_has_a_row_fills_the_gap_alone(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, base, short = models
    recipe = _linear(short, base_model=str(base), embedding_sizes="pad") | {"merge_method": "task_arithmetic"}
    found = _merged(recipe, tmp_path / "out")[EMBEDDING]
    assert torch.equal(found[60:], read_tensors(base)[EMBEDDING][60:])
    torch.testing.assert_close(found[:60], read_tensors(short)[EMBEDDING])


def test_models_of_one_size_need_no_word(tmp_path: Path) -> None:
    a, b = (tiny_llama(tmp_path / name, seed) for seed, name in enumerate("ab"))
    plain, asked = good(_linear(a, b)), good(_linear(a, b, embedding_sizes="pad"))
    assert plain.rows(EMBEDDING) == asked.rows(EMBEDDING)
    assert len(plain.plan["assemblies"]) == len(asked.plan["assemblies"]) == 0
    assert asked.config == plain.config


def test_rows_of_another_width_are_no_matter_of_vocabulary(tmp_path: Path) -> None:
    a = tiny_llama(tmp_path / "a", 0)
    b = tiny_llama(tmp_path / "b", 1, hidden=16, vocab=70)
    problems = planned(_linear(a, b, embedding_sizes="common")).plan.problems
    assert any("other shapes" in problem.what for problem in problems)
