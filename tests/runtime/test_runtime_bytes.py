"""The same recipe gives the same bytes, however it is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint
from kits.marks import slow_but
from kits.merge_cases import INLINE, LEAST_MEMORY, Family, digests, least_memory, merge, recipes
from kits.quantised_merges import MAKERS

from raymerge.api import plan, read_recipe, submit
from raymerge.events import Event, Planned, SegmentDone, Started
from raymerge.merge_plan import segments
from raymerge.methods import methods
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import open_models
from raymerge.runtime.driver.run import Run

METHODS = tuple(methods())
QUICK = ("linear", "dare_ties")
_MANY = """
import json, sys
from pathlib import Path
from kits.merge_cases import digests, merge
root = Path(sys.argv[1])
for name, recipe in json.load(sys.stdin).items():
    merge(recipe, root / name)
print(json.dumps({path.name: digests(path) for path in sorted(root.iterdir())}))
"""


@pytest.fixture(scope="module")
def wide(large: Family, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Digests of a method's output, made with memory for all."""
    root = tmp_path_factory.mktemp("wide")

    @cache
    def made(method: str) -> dict[str, str]:
        merge(recipes(large)[method], root / method, RunOptions(inline=True, memory=40 * LEAST_MEMORY))
        return digests(root / method)

    return made


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", slow_but(METHODS, *QUICK))
def test_a_forty_times_smaller_budget_changes_no_byte(
    method: str, large: Family, wide: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    options = RunOptions(inline=True, memory=least_memory(recipes(large)[method]))
    merge(recipes(large)[method], tmp_path / "out", options)
    assert digests(tmp_path / "out") == wide(method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_where_rows_are_cut_changes_no_byte_of_the_weights(
    method: str,
    large: Family,
    wide: Callable[[str], dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uncut = wide(method)
    monkeypatch.setattr(segments, "_SEGMENTS_WANTED", 1)
    options = RunOptions(inline=True, memory=least_memory(recipes(large)[method]))
    merge(recipes(large)[method], tmp_path / "out", options)
    key = "model.safetensors"
    assert digests(tmp_path / "out")[key] == uncut[key]


@pytest.mark.parametrize("method", slow_but(METHODS, *QUICK))
@pytest.mark.parametrize("dtype", slow_but([torch.float32, torch.bfloat16], torch.bfloat16))
def test_a_model_merged_with_itself_is_itself(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", 3, dtype=dtype)
    tensors = read_tensors(base)
    for tensor in tensors.values():
        tensor.view(-1)[::7] = -0.0
    same = [write_checkpoint(tmp_path / f"same{n}", tensors, llama_config(dtype=dtype)) for n in range(4)]
    # The stack is another model, an expert is changed, and linear's recipe asks for another dtype.
    recipe = {**recipes(Family(same[0], tuple(same[1:])))[method], "dtype": None}
    if method in ("passthrough", "upcycle"):
        recipe = {"merge_method": method, "models": [{"model": str(same[1])}]}
    merge(recipe, tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    for name, tensor in tensors.items():
        assert found[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name


@pytest.fixture(scope="module")
def here(small: Family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    root = tmp_path_factory.mktemp("here")
    for name, recipe in recipes(small).items():
        merge(recipe, root / name)
    return {name: digests(root / name) for name in METHODS}


@pytest.mark.slow
def test_the_hash_seed_changes_no_byte(
    small: Family, here: Mapping[str, Mapping[str, str]], tmp_path: Path
) -> None:
    asked = recipes(small)
    there = tmp_path / "there"
    there.mkdir()
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _MANY, str(there)],
        input=json.dumps(asked),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == here


@pytest.mark.slow
@pytest.mark.ray
def test_ray_workers_change_no_byte(
    large: Family, wide: Callable[[str], dict[str, str]], tmp_path: Path, ray_cluster: Any
) -> None:
    """One pool carries out all plans, since starting workers takes longer than these merges."""
    from raymerge.runtime.workers.ray_pool import RayPool

    options = RunOptions(workers=2, memory=4 * LEAST_MEMORY)
    pool = RayPool(options, lambda _: None)
    try:
        pool.start()
        for method, recipe in recipes(large).items():
            options = replace(options, memory=max(4 * LEAST_MEMORY, least_memory(recipe)))
            sources = open_models(read_recipe(recipe)).require()
            run = Run(plan(recipe), sources, tmp_path / method, options, on_event=lambda _: None)
            receipts = run.carry_out(pool).receipts
            assert digests(tmp_path / method) == wide(method), method
            assert len({receipt.worker for receipt in receipts}) <= 2
    finally:
        pool.close()


def test_another_seed_gives_other_bytes(small: Family, tmp_path: Path) -> None:
    recipe = recipes(small)["dare_linear"]
    merge(recipe, tmp_path / "five")
    merge({**recipe, "seed": 6}, tmp_path / "six")
    five, six = digests(tmp_path / "five"), digests(tmp_path / "six")
    assert five["model.safetensors"] != six["model.safetensors"]


# Expert layouts


def _pair_recipe(method: str, pair: list[Path]) -> dict[str, Any]:
    base, other = map(str, pair)
    if method == "slerp":
        models = [{"model": base}, {"model": other}]
        return {"merge_method": "slerp", "base_model": base, "models": models, "parameters": {"t": 0.3}}
    models = [{"model": other, "parameters": {"weight": 1.0, "density": 0.5}}]
    return {"merge_method": method, "base_model": base, "models": models, "seed": 3}


def _transposed_pair(root: Path, seed: int) -> tuple[Path, Path]:
    """One Llama 4 model with single experts, and with transposed stacks; an expert's matrix is several
    pieces.
    """
    config = {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "num_hidden_layers": 1,
        "num_local_experts": 2,
        "hidden_size": 512,
        "intermediate_size": 600,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "vocab_size": 8,
    }
    generator = torch.Generator().manual_seed(seed)
    block = "model.layers.0.feed_forward"
    shapes = {"gate_proj": (600, 512), "up_proj": (600, 512), "down_proj": (512, 600)}
    stacks = {n: torch.randn(2, *s, generator=generator, dtype=torch.bfloat16) for n, s in shapes.items()}
    rest = {"model.embed_tokens.weight": (8, 512), "lm_head.weight": (8, 512), "model.norm.weight": (512,)}
    rest |= {f"{block}.router.weight": (2, 512)}
    tensors = {n: torch.randn(*s, generator=generator, dtype=torch.bfloat16) for n, s in rest.items()}
    single = {f"{block}.experts.{e}.{n}.weight": stacks[n][e] for n in stacks for e in range(2)}
    fused = {
        f"{block}.experts.gate_up_proj": torch.cat([stacks["gate_proj"], stacks["up_proj"]], 1).transpose(
            1, 2
        ),
        f"{block}.experts.down_proj": stacks["down_proj"].transpose(1, 2),
    }
    return (
        write_checkpoint(root / f"single{seed}", {**tensors, **single}, config),
        write_checkpoint(root / f"stacks{seed}", {**tensors, **fused}, config),
    )


@pytest.mark.parametrize("method", slow_but(["slerp", "della", "dare_ties"], "slerp"))
def test_matrices_that_lie_across_each_other_are_merged_as_those_alone(method: str, tmp_path: Path) -> None:
    pairs = [_transposed_pair(tmp_path, seed) for seed in (1, 2)]
    for layout in (0, 1):
        merge(_pair_recipe(method, [pair[layout] for pair in pairs]), tmp_path / f"out-{layout}", INLINE)
    single, stacks = (read_tensors(tmp_path / f"out-{layout}") for layout in (0, 1))
    block = "model.layers.0.feed_forward.experts"
    gates, ups = stacks[f"{block}.gate_up_proj"].transpose(1, 2).chunk(2, dim=1)
    for name, stack in (
        ("gate_proj", gates),
        ("up_proj", ups),
        ("down_proj", stacks[f"{block}.down_proj"].transpose(1, 2)),
    ):
        for expert in range(2):
            assert torch.equal(single[f"{block}.{expert}.{name}.weight"], stack[expert]), (name, expert)


KINDS = ("DeepSeek-V3 F32", "DeepSeek-V3 U8", "Kimi-K2-Thinking", "gpt-oss")
Recipes = Mapping[str, dict[str, Any]]


def _recipes(parents: Sequence[Path]) -> Recipes:
    """With statistics of whole matrices, and into another format."""
    base, *tuned = map(str, parents)
    entries = [{"model": each, "parameters": {"weight": 0.5, "density": 0.4}} for each in tuned]
    pair = [{"model": each, "parameters": {"weight": 0.5}} for each in tuned]
    return {
        "ties": {"merge_method": "ties", "base_model": base, "models": entries},
        "bfloat16": {"merge_method": "linear", "models": pair, "dtype": "bfloat16"},
    }


@pytest.fixture(scope="module", params=slow_but(KINDS, "Kimi-K2-Thinking"))
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipes, Path]:
    """Recipes of three parents, and a folder with their outputs, made inline with the usual memory."""
    root = tmp_path_factory.mktemp("parents")
    parents = [MAKERS[request.param](root / name, seed).root for seed, name in enumerate(("base", "a", "b"))]
    for name, recipe in (recipes := _recipes(parents)).items():
        merge(recipe, root / "out" / name)
    return recipes, root / "out"


@pytest.mark.parametrize("count", slow_but([1, 2], 2))
def test_threads_change_no_byte(count: int, cases: tuple[Recipes, Path], tmp_path: Path) -> None:
    recipes, expected = cases
    for name, recipe in recipes.items():
        merge(recipe, tmp_path / name, RunOptions(inline=True, threads=count))
        assert digests(tmp_path / name) == digests(expected / name)


def test_the_least_memory_changes_no_byte(cases: tuple[Recipes, Path], tmp_path: Path) -> None:
    recipes, expected = cases
    for name, recipe in recipes.items():
        merge(recipe, tmp_path / name, RunOptions(inline=True, memory=least_memory(recipe)))
        assert digests(tmp_path / name) == digests(expected / name)


@pytest.mark.slow
@pytest.mark.parametrize("most_bytes", [1 << 12, 1 << 40])
def test_where_quantised_rows_are_cut_changes_no_byte_of_the_weights(
    most_bytes: int, cases: tuple[Recipes, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_segment_target", lambda _: most_bytes)
    recipes, expected = cases
    counts = set()
    for name, recipe in recipes.items():
        done = merge(recipe, tmp_path / name, RunOptions(inline=True, memory=least_memory(recipe)))
        counts.add(done.of(Planned)[0].segments > 20)
        for file, digest in digests(expected / name).items():
            if file.endswith(".safetensors"):
                assert digests(tmp_path / name)[file] == digest
    assert counts == {most_bytes == 1 << 12}


def test_an_aborted_run_is_resumed(cases: tuple[Recipes, Path], tmp_path: Path) -> None:
    recipes, expected = cases
    done = 0

    def abort(event: Event) -> None:
        nonlocal done
        done += isinstance(event, SegmentDone)
        if done == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        submit(recipes["ties"], tmp_path / "out", INLINE, on_event=abort)
    assert not (tmp_path / "out").exists()
    merged = merge(recipes["ties"], tmp_path / "out")
    # Receipts are recorded in groups, so one that was not told of yet may be in the ledger, too.
    kept = merged.of(Started)[0].done_segments
    assert kept >= 2
    assert len(merged.of(SegmentDone)) == merged.of(Planned)[0].segments - kept
    assert digests(tmp_path / "out") == digests(expected / "ties")
