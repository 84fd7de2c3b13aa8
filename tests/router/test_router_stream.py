"""Gates, sums and ridge regression over models that are streamed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import fields, llama_shapes, write_checkpoint
from kits.layer_streams import (
    BIG,
    KINDS,
    Collector,
    batches_of,
    make_base,
    open_base,
    streamed,
    token_runs,
    whole,
)
from kits.marks import slow_but
from kits.model_parents import save
from safetensors.torch import load_file

from raymerge.errors import RecipeError
from raymerge.planner.inputs.sources import Source
from raymerge.recipes.load import parse_recipe
from raymerge.stages.router.gates import (
    UNPROVEN,
    Ridge,
    accumulator,
    part_shapes,
    ridge_rows,
    unit,
    work_nbytes,
)
from raymerge.stages.router.prompts import Schedule, TokenRun, Use, make_schedule
from raymerge.stages.router.work import PROMPTS, random_rows
from raymerge.stages.streamed_model import LayerStream, Shape, StreamedModel

LENGTHS = (9, 5, 9, 13)
CPU = torch.device("cpu")
MIB = 1 << 20
_PLAIN = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "gpt2", "falcon", "phi3"),
    *("bloom", "mixtral", "qwen3_moe", "deepseek_v3"),
)
PATHS = {
    **dict.fromkeys(_PLAIN, "mlp"),
    "granitemoehybrid": "block_sparse_moe",
    "llama4_text": "feed_forward",
    "opt": "fc1",
}
"""Families, and where in a layer the feed-forward network is: windows, two kinds of masks, positions of every
kind, parallel layers, layers that answer with tuples, experts by file and fused, a network that has no module
of its own."""
DISTINCT = (
    *("llama", "gemma2", "gpt2", "falcon", "bloom", "mixtral", "deepseek_v3"),
    *("granitemoehybrid", "llama4_text", "opt"),
)
"""One of each kind; the others are alike."""
CONFIGS = {"granitemoehybrid": {"layer_types": ["attention"] * 3}}
"""What a family's config says else."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_base("llama", tmp_path_factory.mktemp("llama") / "model")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", slow_but(PATHS, *DISTINCT))
def test_as_in_the_whole_model(tmp_path: Path, name: str) -> None:
    base = make_base(name, tmp_path / "model", **CONFIGS.get(name, {}))
    runs = token_runs(*LENGTHS)
    seen = streamed(base, runs, tmp_path / "spill")
    hidden, router_input = whole(name, tmp_path / "model", runs, PATHS[name])
    assert seen.hidden.keys() == hidden.keys()
    for place, expected in hidden.items():
        torch.testing.assert_close(seen.hidden[place], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(seen.router_input[place], router_input[place], rtol=1e-5, atol=1e-5)
        assert not torch.equal(seen.router_input[place], seen.hidden[place])


def test_runs_come_in_order_layer_after_layer(llama: Source, tmp_path: Path) -> None:
    seen = streamed(llama, token_runs(4, 2), tmp_path)
    assert seen.order == [(layer, run) for layer in range(3) for run in range(2)]
    for states in (seen.hidden, seen.router_input):
        assert all(state.dtype == torch.float32 for state in states.values())
        assert states[2, 0].shape == (4, 32)
        assert states[2, 1].shape == (2, 32)


@settings(deadline=None, max_examples=3)
@given(order=st.permutations(range(4)), count=st.integers(1, 4))
def test_nothing_depends_on_the_other_runs(
    llama: Source, tmp_path_factory: pytest.TempPathFactory, order: list[int], count: int
) -> None:
    runs = token_runs(*LENGTHS)
    every = streamed(llama, runs, tmp_path_factory.getbasetemp())
    some = streamed(llama, [runs[n] for n in order[:count]], tmp_path_factory.getbasetemp())
    for place, run in enumerate(order[:count]):
        for layer in range(3):
            assert torch.equal(some.hidden[layer, place], every.hidden[layer, run])
            assert torch.equal(some.router_input[layer, place], every.router_input[layer, run])


def test_a_small_budget_changes_nothing_and_leaves_no_file(llama: Source, tmp_path: Path) -> None:
    runs = token_runs(*LENGTHS)
    large = streamed(llama, runs, tmp_path / "large", budget=BIG)
    assert not (tmp_path / "large").exists()
    watched: list[int] = []
    small = Collector()

    def watch(layer: int, run: int, hidden: torch.Tensor, router_input: torch.Tensor) -> None:
        watched.extend(path.stat().st_size for path in (tmp_path / "small").iterdir())
        small.layer(layer, run, hidden, router_input)

    LayerStream(llama, PROMPTS).read(batches_of(runs), watch, device=CPU, budget=0, spill=tmp_path / "small")
    assert set(watched) == {sum(LENGTHS) * 32 * 4}
    assert not list((tmp_path / "small").iterdir())
    assert all(torch.equal(small.hidden[place], state) for place, state in large.hidden.items())


def test_bytes_read_are_those_of_layers_and_used_rows(llama: Source, tmp_path: Path) -> None:
    tensors = llama.checkpoint.tensors
    layers = sum(tensor.nbytes for name, tensor in tensors.items() if ".layers." in name)
    norm = tensors["model.norm.weight"].nbytes
    batches = [torch.tensor([[7, 8, 7]]), torch.tensor([[9]])]
    read = LayerStream(llama, PROMPTS).read(
        batches, Collector().layer, device=CPU, budget=BIG, spill=tmp_path
    )
    assert read == layers + norm + 3 * 32 * 4


def test_settings_of_torch_are_put_back(llama: Source, tmp_path: Path) -> None:
    cudnn, within = torch.backends.cudnn, []
    before = cudnn.deterministic

    def look(*_: object) -> None:
        within.append((cudnn.deterministic, torch.is_grad_enabled()))

    LayerStream(llama, PROMPTS).read(batches_of(token_runs(2)), look, device=CPU, budget=BIG, spill=tmp_path)
    assert set(within) == {(True, False)}
    assert cudnn.deterministic == before
    assert torch.is_grad_enabled()


def test_bfloat16_weights_are_computed_with_in_float32(tmp_path: Path) -> None:
    save(KINDS["llama"].build(1).to(torch.bfloat16), tmp_path / "model")
    runs = token_runs(8)
    seen = streamed(open_base(tmp_path / "model"), runs, tmp_path)
    hidden, _ = whole("llama", tmp_path / "model", runs, "mlp")
    for place, expected in hidden.items():
        torch.testing.assert_close(seen.hidden[place], expected, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_of_the_bare_model(tmp_path: Path) -> None:
    model: Any = KINDS["llama"].build(1)
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "bare")
    runs = token_runs(6, 4)
    bare = open_base(tmp_path / "bare")
    assert "layers.0.mlp.up_proj.weight" in bare.checkpoint.tensors
    seen, expected = (streamed(each, runs, tmp_path) for each in (bare, open_base(tmp_path / "whole")))
    assert all(torch.equal(seen.hidden[place], state) for place, state in expected.hidden.items())


def test_an_adapter_over_the_base_counts(tmp_path: Path) -> None:
    model = KINDS["llama"].build(1)
    save(model, tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    tiny_lora(tmp_path / "adapter", state, 3)
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name in state:
        path = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.weight" in factors:
            state[name] += 2 * factors[f"{path}.lora_B.weight"] @ factors[f"{path}.lora_A.weight"]
    model.load_state_dict(state, strict=False)
    save(model, tmp_path / "merged")
    runs = token_runs(6, 4)
    seen = streamed(open_base(f"{tmp_path / 'model'}+{tmp_path / 'adapter'}"), runs, tmp_path)
    plain = streamed(open_base(tmp_path / "model"), runs, tmp_path)
    expected = streamed(open_base(tmp_path / "merged"), runs, tmp_path)
    assert not torch.equal(seen.hidden[2, 0], plain.hidden[2, 0])
    for place, state_there in expected.hidden.items():
        torch.testing.assert_close(seen.hidden[place], state_there, rtol=1e-5, atol=1e-5)


MODEL = fields(
    "num_hidden_layers: 12, hidden_size: 512, intermediate_size: 2048, vocab_size: 8192, head_dim: 128, "
    "tie_word_embeddings: true"
)
SCRIPT = """
import json, sys
import torch
from kits.layer_streams import batches_of, open_base, token_runs
from raymerge.stages.router.work import PROMPTS
from raymerge.stages.streamed_model import LayerStream, Shape

def nothing(*_):
    pass

def status(word):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(word))

torch.set_num_threads(1)
small, large, spill = sys.argv[1:]
batches = batches_of(token_runs(*[100] * 16))
device = torch.device("cpu")
# What is imported on the way is not what is measured.
LayerStream(open_base(small), PROMPTS).read(batches[:1], nothing, device=device, budget=0, spill=spill)
base = open_base(large)
least = LayerStream(base, PROMPTS).least_budget(Shape(1, 100))
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
LayerStream(base, PROMPTS).read(batches, nothing, device=device, budget=least, spill=spill)
print(json.dumps({"least": least, "grown": status("VmHWM") - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_a_model_larger_than_the_limit(llama: Source, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**KINDS["llama"].config, **MODEL}
    nbytes = _write_large(tmp_path / "large", sizes)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, llama.checkpoint.root, tmp_path / "large", tmp_path / "spill"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    measured = json.loads(ran.stdout.splitlines()[-1])
    assert measured["least"] < nbytes // 3
    # Memory that the allocator holds on to is the process's as well.
    assert measured["grown"] <= measured["least"] + 16 * MIB


def _write_large(root: Path, config: dict[str, Any]) -> int:
    """A checkpoint with layers of the config's sizes; returns its bytes in float32."""
    shapes = llama_shapes(config)
    tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    write_checkpoint(root, tensors, {**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    return 4 * sum(tensor.numel() for tensor in tensors.values())


def test_the_least_budget_grows_with_the_run_and_the_layer(llama: Source, tmp_path: Path) -> None:
    layer = sum(t.num_elements for name, t in llama.checkpoint.tensors.items() if ".layers.0." in name) * 4
    wide = make_base("llama", tmp_path / "wide", intermediate_size=96)
    narrow, wider = LayerStream(llama, PROMPTS), LayerStream(wide, PROMPTS)
    short, long = Shape(1, 4), Shape(1, 64)
    assert layer < narrow.least_budget(short) < narrow.least_budget(long)
    assert narrow.least_budget(short) < wider.least_budget(short)
    assert narrow.least_budget(short) < narrow.least_budget(Shape(3, 4))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each hollow model that is built."""
    found: list[int] = []
    build = StreamedModel.__init__

    def counted(self: StreamedModel, *args: Any) -> None:
        found.append(len(found))
        build(self, *args)

    monkeypatch.setattr(StreamedModel, "__init__", counted)
    return found


def test_a_hollow_model_is_not_used_after_a_failure(llama: Source, tmp_path: Path, built: list[int]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("enough")

    layers, runs = LayerStream(llama, PROMPTS), token_runs(5)
    with pytest.raises(RuntimeError, match="enough"):
        layers.read(batches_of(runs), fail, device=CPU, budget=BIG, spill=tmp_path)
    seen = Collector()
    layers.read(batches_of(runs), seen.layer, device=CPU, budget=BIG, spill=tmp_path)
    assert len(built) == 2
    assert torch.equal(seen.hidden[2, 0], streamed(llama, runs, tmp_path).hidden[2, 0])


WIDTH = 6
MODES = ("hidden", "hidden_last", "hidden_avg", "router_input", "centroid", "ridge")

Run = tuple[Use, torch.Tensor, torch.Tensor]
"""What it counts towards, hidden states and router inputs."""


def made(lengths: Sequence[tuple[int, int, int]], *, seed: int = 0) -> tuple[Schedule, list[Run]]:
    """Random states for runs of (expert, sign, length), of two routed experts and a shared one."""
    chance = torch.Generator().manual_seed(seed)
    runs = [TokenRun(e, sign, (number,) * n) for number, (e, sign, n) in enumerate(lengths)]
    schedule = make_schedule(runs, "hidden", num_routed=2, num_shared=1)
    uses = [use for unit in schedule.units for reading in unit for use in reading.uses]
    states = [
        (use, torch.randn(n, WIDTH, generator=chance), torch.randn(n, WIDTH, generator=chance))
        for use, (_, _, n) in zip(uses, lengths, strict=True)
    ]
    return schedule, states


def summed(mode: str, schedule: Schedule, runs: Sequence[Run]) -> dict[str, torch.Tensor]:
    sums = accumulator(mode, schedule, WIDTH, CPU)
    for use, hidden, router_input in runs:
        sums.add(use, hidden, router_input)
    return dict(sums.parts())


SUM_LENGTHS = ((0, 1, 5), (1, 1, 3), (0, -1, 4), (2, 1, 2), (0, 1, 1), (1, -1, 2))
POSITIVE = tuple(each for each in SUM_LENGTHS if each[1] > 0)


@pytest.mark.parametrize("mode", MODES)
def test_parts_are_float64_of_the_shapes_that_are_told(mode: str) -> None:
    schedule, runs = made(POSITIVE)
    parts = summed(mode, schedule, runs)
    assert {name: tuple(part.shape) for name, part in parts.items()} == part_shapes(mode, 3, WIDTH)
    assert all(part.dtype == torch.float64 for part in parts.values())
    nbytes = sum(part.numel() * 8 for part in parts.values())
    assert nbytes <= work_nbytes(mode, 3, WIDTH)


def test_a_vector_of_zeros_has_no_direction() -> None:
    schedule, runs = made([(0, 1, 2), (1, 1, 1)])
    zeros = [(use, hidden, torch.zeros_like(router_input)) for use, hidden, router_input in runs]
    assert torch.equal(summed("centroid", schedule, zeros)["sums"], torch.zeros(2, 3, WIDTH).double())


def test_every_expert_counts_alike_in_the_gram_matrix_and_shared_ones_not_at_all() -> None:
    schedule, runs = made(POSITIVE)
    parts = summed("ridge", schedule, runs)
    tokens = [torch.cat([each[2] for each in runs if each[0].expert == e]).double() for e in range(3)]
    gram = sum(each.T @ each / len(each) for each in tokens[:2])
    assert isinstance(gram, torch.Tensor)
    torch.testing.assert_close(parts["gram"].sum(0), gram / 2)
    torch.testing.assert_close(parts["means"].sum(0), torch.stack([each.mean(0) for each in tokens]))


def test_halves_are_kept_apart() -> None:
    schedule, runs = made(((0, 1, 4), (0, 1, 7), (1, 1, 6)))
    assert [use.first for use, *_ in runs] == [0, 7, 3]
    parts = summed("ridge", schedule, runs)
    short, long, only = (each[2].double() for each in runs)
    halves = (long / 11, only[:3] / 6), (short / 11, only[3:] / 6)
    for half, (first, second) in enumerate(halves):
        wanted = torch.stack([first.sum(0), second.sum(0)])
        torch.testing.assert_close(parts["means"][half, :2], wanted)
        gram = (first.T @ first * 11 + second.T @ second * 6) / 2
        torch.testing.assert_close(parts["gram"][half], gram)
    torch.testing.assert_close(schedule.shares, torch.tensor([[7 / 11, 0.5], [4 / 11, 0.5]]).double())


@pytest.mark.parametrize("lengths", [(1024, 1), (1, 1024, 1023), (3000, 7), (1025,)])
def test_tiles_do_not_lose_tokens(lengths: tuple[int, ...]) -> None:
    schedule, runs = made([(0, 1, length) for length in lengths])
    tokens = torch.cat([each[2] for each in runs]).double()
    wanted = tokens.T @ tokens / len(tokens) / 2
    torch.testing.assert_close(summed("ridge", schedule, runs)["gram"].sum(0), wanted)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_units_have_length_one_and_nothing_stays_nothing() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-9, 0.0]], dtype=torch.float64)
    assert torch.equal(unit(vectors), torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.1, 0.0]], dtype=torch.float64))


def test_normal_rows() -> None:
    rows = random_rows("random", 0, "router.0", (64, 1024)).double()
    assert rows.shape == (64, 1024)
    assert float(rows.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(rows.std()) == pytest.approx(1.0, abs=0.02)
    products = rows @ rows.T / 1024
    products.fill_diagonal_(0)
    assert float(products.abs().max()) < 0.2


def test_uniform_rows() -> None:
    rows = random_rows("uniform_random", 0, "router.0", (64, 1024)).double()
    limit = 1 / math.sqrt(1024)
    assert float(rows.abs().max()) <= limit
    assert float(rows.mean()) == pytest.approx(0.0, abs=limit * 0.02)
    assert float(rows.std()) == pytest.approx(limit / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize("mode", ["random", "uniform_random"])
def test_random_rows_are_a_function_of_seed_and_name(mode: str) -> None:
    def rows(seed: int, name: str) -> torch.Tensor:
        return random_rows(mode, seed, name, (4, 8))

    first = rows(0, "router.0")
    assert torch.equal(rows(0, "router.0"), first)
    for other in ((1, "router.0"), (0, "router.1"), (0, "shared_gate.0")):
        assert not torch.isin(rows(*other), first).any()


def moments(
    classes: Sequence[torch.Tensor], firsts: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gram matrices, means and shares of the inputs of some experts, by halves."""
    firsts = firsts or [len(each) // 2 for each in classes]
    halves = [
        [part / len(each) ** 0.5 for part in (each[:first], each[first:])]
        for each, first in zip(classes, firsts, strict=True)
    ]
    grams = [sum((each[half].T @ each[half] for each in halves), torch.zeros(())) for half in (0, 1)]
    sums = [
        torch.stack([each[half].sum(0) / len(of) ** 0.5 for each, of in zip(halves, classes, strict=True)])
        for half in (0, 1)
    ]
    first = torch.tensor([n / len(each) for n, each in zip(firsts, classes, strict=True)]).double()
    return torch.stack(grams) / len(classes), torch.stack(sums), torch.stack([first, 1 - first])


def ridge(classes: Sequence[torch.Tensor], penalty: float, firsts: Sequence[int] | None = None) -> Ridge:
    gram, means, shares = moments(classes, firsts)
    return ridge_rows(gram, means, shares=shares, penalty=penalty)


def plain_rows(classes: Sequence[torch.Tensor], penalty: float) -> torch.Tensor:
    """Ridge regression to centred targets, by its definition."""
    gram = torch.stack([each.T @ each / len(each) for each in classes]).mean(0)
    means = torch.stack([each.mean(0) for each in classes])
    strength = penalty * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    found: torch.Tensor = torch.linalg.solve(gram + strength, ((means - means.mean(0)) / len(classes)).T)
    return found.T


def pairs_of(count: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(count) for b in range(a)]


@settings(deadline=None, max_examples=13)
@given(st.integers(2, 5), st.floats(1e-3, 1.0), st.integers(0, 99))
def test_rows_have_the_directions_of_the_regression(count: int, penalty: float, seed: int) -> None:
    classes = [randn(12, 6, seed=seed + at) + at for at in range(count)]
    rows, wanted = ridge(classes, penalty).rows, plain_rows(classes, penalty)
    factor = float((rows * wanted).sum() / wanted.square().sum())
    assert factor > 0
    torch.testing.assert_close(rows, factor * wanted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(rows.sum(0), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-8)


def test_rows_of_all_texts_do_not_depend_on_the_halves() -> None:
    classes = [randn(40, 5, seed=at) + at for at in range(3)]
    even, uneven = ridge(classes, 0.1).rows, ridge(classes, 0.1, [4, 30, 20]).rows
    torch.testing.assert_close(even / even.norm(), uneven / uneven.norm())


def test_a_shared_expert_does_not_touch_the_routed_rows() -> None:
    classes = [randn(30, 5, seed=at) + at for at in range(2)]
    gram, means, shares = moments(classes)
    own = randn(2, 1, 5, seed=7)
    every = ridge_rows(gram.clone(), torch.cat([means, own], 1), shares=shares, penalty=0.1)
    alone = ridge(classes, 0.1)
    torch.testing.assert_close(every.rows[:2], alone.rows)
    assert every.separation == pytest.approx(alone.separation)
    total = gram.sum(0)
    strength = 0.1 * total.diagonal().mean() * torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(every.rows[2], torch.linalg.solve(total + strength, own.sum(0)[0]))


def test_a_density_like_the_routed_experts_has_logit_one() -> None:
    classes = [randn(4000, 3, seed=at) + torch.tensor([4.0, at, 0.0]) for at in range(2)]
    gram, means, shares = moments(classes)
    every = torch.cat([means, means.mean(1, keepdim=True)], 1)
    rows = ridge_rows(gram, every, shares=shares, penalty=1e-6).rows
    assert float((torch.cat(classes) @ rows[2]).mean()) == pytest.approx(1.0, abs=0.1)


def test_one_expert_has_a_row_and_no_separation() -> None:
    found = ridge([randn(8, 4) + 1], 0.1)
    assert found.separation is None
    assert float(found.rows.norm()) > 0


def test_differences_are_log_odds() -> None:
    # Two normal classes of one covariance and opposite means: the odds are known, and need no constant.
    spread = torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=torch.float64)
    mean = torch.tensor([0.5, -0.3, 0.8, 0.0], dtype=torch.float64)
    classes = [randn(200_000, 4, seed=at) * spread + sign * mean for at, sign in enumerate((1, -1))]
    rows, separation = ridge(classes, 1e-6)
    torch.testing.assert_close(rows[0] - rows[1], 2 * mean / spread**2, rtol=0.03, atol=0.01)
    assert separation == pytest.approx(float((2 * mean / spread).norm()), rel=0.02)


@pytest.mark.parametrize("firsts", [[15, 15, 15, 15], [6, 20, 15, 29]])
def test_the_length_is_that_of_both_trials(firsts: list[int]) -> None:
    classes = [randn(30, 5, seed=at) + randn(5, seed=90 + at) for at in range(4)]
    gaps = spreads = 0.0
    for is_swapped in (False, True):
        split = [(each[:n], each[n:]) for each, n in zip(classes, firsts, strict=True)]
        learnt, tried = zip(*(parts[::-1] if is_swapped else parts for parts in split), strict=True)
        # Every expert's tokens weigh what they do in all texts, in each half.
        weights = torch.tensor([len(each) / 30 for each in learnt]).double()
        gram = sum((w * x.T @ x / len(x) for w, x in zip(weights, learnt, strict=True)), torch.zeros(()))
        means = torch.stack([each.mean(0) for each in learnt])
        strength = 0.3 * gram.diagonal().mean() * torch.eye(5, dtype=torch.float64)
        rows = torch.linalg.solve(gram + strength, (means - means.mean(0)).T).T
        distances = torch.stack([(rows[a] - rows[b]).square().sum() for a, b in pairs_of(4)])
        rows /= distances.mean().sqrt()
        weights = torch.tensor([len(each) for each in tried]).double()
        covariances = torch.stack([(x - x.mean(0)).T @ (x - x.mean(0)) / len(x) for x in tried])
        within = (weights[:, None, None] * covariances).sum(0) / weights.sum()
        centres = torch.stack([each.mean(0) for each in tried])
        for a, b in pairs_of(4):
            gaps += float((rows[a] - rows[b]) @ (centres[a] - centres[b]))
            spreads += float((rows[a] - rows[b]) @ within @ (rows[a] - rows[b]))
    found = ridge(classes, 0.3, firsts)
    distances = torch.stack([(found.rows[a] - found.rows[b]).square().sum() for a, b in pairs_of(4)])
    assert float(distances.mean().sqrt()) == pytest.approx(gaps / spreads)
    assert found.separation == pytest.approx((gaps / 12) / math.sqrt(spreads / 12))


@pytest.mark.parametrize(("penalty", "margin"), [(0.1, 0.05), (0.001, 0.1)])
@pytest.mark.parametrize("num_tokens", [6, 20, 64, 200, 1000])
def test_logits_are_as_sure_as_new_text_allows(num_tokens: int, penalty: float, margin: float) -> None:
    """Fewer tokens than the width or more: no other length makes the cross-entropy of new text much less.

    With hardly a penalty and as many tokens in a half as the width, a half's rows are far worse than those of
    all text, so that a longer margin is left there.
    """
    width, count = 128, 4
    centres = randn(count, width, seed=1) * (4 / (2 * width)) ** 0.5 + randn(width, seed=2)
    classes = [centres[at] + randn(num_tokens, width, seed=10 + at) for at in range(count)]
    tokens = torch.cat([centres[at] + randn(800, width, seed=20 + at) for at in range(count)])
    whose = torch.arange(count).repeat_interleave(800)
    logits = tokens @ ridge(classes, penalty).rows.T

    def loss(scale: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits * scale, whose))

    best = min(loss(10 ** (at / 20)) for at in range(-60, 41))
    assert loss(1.0) < best + margin
    assert loss(1.0) < math.log(count) + 0.01, "worse than knowing nothing"


def test_where_nothing_generalises_rows_are_short() -> None:
    # Tokens of one distribution, fewer than the width: each half tells its own noise apart, and nothing else.
    noise = [randn(20, 64, seed=at) + 1 for at in range(3)]
    found = ridge(noise, 0.1)
    assert found.separation is not None
    assert found.separation < 0.5
    # Halves that say the opposite of each other.
    mean = randn(64, seed=9)
    opposite = [
        torch.cat([sign * mean + randn(10, 64, seed=at), -sign * mean + randn(10, 64, seed=at)])
        for at, sign in enumerate((1, -1))
    ]
    rows, separation = ridge(opposite, 0.1)
    assert separation is not None
    assert separation < 0
    logits = torch.cat(opposite) @ rows.T
    assert 0 < float((logits[:, 0] - logits[:, 1]).square().mean().sqrt()) < 2 * UNPROVEN


def test_a_token_an_expert_is_too_little_for_a_trial() -> None:
    found = ridge([randn(1, 4), randn(1, 4, seed=1)], 0.1)
    assert found.separation == 0.0
    assert 0 < float(found.rows.norm()) < math.inf
    third = [randn(9, 4, seed=at) + 3 * at for at in (2, 3)]
    rows, separation = ridge([randn(1, 4), *third], 0.1)
    assert separation is not None
    assert separation > 1, "the others are tried without it"
    assert bool(torch.isfinite(rows).all())


def test_texts_without_variety_make_no_endless_rows() -> None:
    classes = [torch.ones(8, 3, dtype=torch.float64) * sign for sign in (1, -1)]
    rows, separation = ridge(classes, 0.1)
    assert separation == pytest.approx(10.0)
    assert float((rows[0] - rows[1]) @ torch.ones(3).double()) * 2 == pytest.approx(100.0)


def test_equal_texts_for_all_experts_give_rows_of_nothing() -> None:
    rows, separation = ridge([randn(9, 4)] * 3, 0.1)
    assert torch.equal(rows, torch.zeros(3, 4, dtype=torch.float64))
    assert separation == 0.0
    # The same but for rounding, as sums over other orders of units are.
    gram, means, shares = moments([randn(9, 4)] * 3)
    means[:, 1] *= 1 + 1e-15
    assert torch.equal(ridge_rows(gram, means, shares=shares, penalty=0.1).rows, torch.zeros(3, 4).double())


@pytest.mark.parametrize("seed", range(20))
def test_a_matrix_of_lower_rank_is_refused_though_it_has_a_factor(seed: int) -> None:
    # Rounding may leave every pivot above zero: then rows of 10**13 would come of it.
    scales = torch.logspace(0, -3, 32, dtype=torch.float64)
    classes = [randn(10, 32, seed=2 * seed + at) * scales for at in (0, 1)]
    with pytest.raises(ArithmeticError, match="positive definite"):
        ridge(classes, 0.0)


def test_the_least_penalty_of_a_recipe_is_enough_for_any_text() -> None:
    # One direction that holds nearly all, as router inputs have, and hardly any tokens.
    scales = torch.full((256,), 1e-4, dtype=torch.float64)
    scales[0] = 100.0
    classes = [randn(6, 256, seed=at) * scales for at in (0, 1)]
    assert bool(torch.isfinite(ridge(classes, 1e-6).rows).all())


@pytest.mark.parametrize("penalty", ["0", "9e-7", "2e6"])
def test_a_recipe_has_no_penalty_that_cannot_be_solved(penalty: str) -> None:
    text = "base_model: a\ngate_mode: ridge\nexperts: [{source_model: b, positive_prompts: [x]}]\n"
    with pytest.raises(RecipeError, match=r"gate_ridge: .* is (out of range|not above 0)"):
        parse_recipe(f"{text}gate_ridge: {penalty}\n", "r.yml", exists=lambda _: False)
