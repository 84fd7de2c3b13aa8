"""Stages of router rows: every gate mode against the whole model, units, bytes, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kits.gate_stages import (
    LAYERS,
    WIDTH,
    Made,
    WholeModel,
    expert,
    make,
    random_texts,
    reading_base,
    stage_of,
    text,
    three_experts,
    tokens_of,
)

from raymerge.device_numerics import one_thread
from raymerge.dtypes import DType
from raymerge.planner.inputs.sources import Constant, ExpertPrompts, Source
from raymerge.stages.router import gate_work

STREAMED = ("hidden", "hidden_last", "hidden_avg", "router_input", "centroid", "ridge")
ALL_MODES = (*STREAMED, "cheap_embed", "random", "uniform_random")

Vector = Callable[[str, int], torch.Tensor]
"""One vector of a text at a layer."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return reading_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def whole(base: Source) -> WholeModel:
    return WholeModel(base)


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.div(torch.linalg.vector_norm(vectors, dim=-1, keepdim=True))


def mean_of(prompts: tuple[str, ...], vector: Vector, layer: int) -> torch.Tensor:
    return torch.stack([vector(prompt, layer) for prompt in prompts]).mean(0)


def rows(made: Made, layer: int) -> torch.Tensor:
    return made.tensors[f"router.{layer}"]


@pytest.mark.parametrize("mode", [*STREAMED, "cheap_embed"])
def test_an_empty_prompt_is_read_as_the_beginning_alone(
    tmp_path: Path, base: Source, whole: WholeModel, mode: str
) -> None:
    experts = [expert("a", ""), expert("b", text(5, 6, 7), text(8))]
    made = make(stage_of(base, mode, experts), tmp_path)
    first, second = rows(made, 1).double()
    assert torch.isfinite(rows(made, 1)).all()
    assert not torch.allclose(first, second)
    if mode.startswith("hidden"):
        torch.testing.assert_close(first, unit(whole.read("")[0][1][-1]), rtol=2e-4, atol=2e-5)


def assert_rows(made: Made, wanted: Callable[[int], torch.Tensor]) -> None:
    for layer in range(LAYERS):
        torch.testing.assert_close(rows(made, layer).double(), wanted(layer), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("mode", ["hidden", "hidden_last", "hidden_avg"])
@pytest.mark.parametrize("negative", [False, True])
def test_rows_of_hidden_states(
    tmp_path: Path, base: Source, whole: WholeModel, *, mode: str, negative: bool
) -> None:
    experts = three_experts(negative=negative)
    made = make(stage_of(base, mode, experts), tmp_path)

    def vector(prompt: str, layer: int) -> torch.Tensor:
        states = whole.read(prompt)[0][layer]
        return states.mean(0) if mode == "hidden_avg" else states[-1]

    def wanted(layer: int) -> torch.Tensor:
        positive = torch.stack([mean_of(each.positive, vector, layer) for each in experts])
        if negative:
            positive -= torch.stack([mean_of(each.negative, vector, layer) for each in experts])
        return unit(positive)

    assert_rows(made, wanted)


@pytest.mark.parametrize("negative", [False, True])
def test_rows_of_router_inputs_are_centred(
    tmp_path: Path, base: Source, whole: WholeModel, *, negative: bool
) -> None:
    experts = three_experts(negative=negative)
    made = make(stage_of(base, "router_input", experts), tmp_path)

    def vector(prompt: str, layer: int) -> torch.Tensor:
        return whole.read(prompt)[1][layer].mean(0)

    def wanted(layer: int) -> torch.Tensor:
        found = torch.stack([mean_of(each.positive, vector, layer) for each in experts])
        if negative:
            found -= torch.stack([mean_of(each.negative, vector, layer) for each in experts])
        return unit(found - found.mean(0))

    assert_rows(made, wanted)


def test_rows_of_centroids_are_means_of_directions(tmp_path: Path, base: Source, whole: WholeModel) -> None:
    experts = three_experts()
    made = make(stage_of(base, "centroid", experts), tmp_path)

    def wanted(layer: int) -> torch.Tensor:
        tokens = [torch.cat([whole.read(each)[1][layer] for each in one.positive]) for one in experts]
        centres = unit(torch.stack([unit(each).mean(0) for each in tokens]))
        return unit(centres - centres.mean(0))

    assert_rows(made, wanted)


def test_rows_of_ridge_are_those_of_least_squares(tmp_path: Path, base: Source, whole: WholeModel) -> None:
    experts = three_experts()
    made = make(stage_of(base, "ridge", experts, penalty=0.2), tmp_path)
    for layer in range(LAYERS):
        tokens = [torch.cat([whole.read(each)[1][layer] for each in one.positive]) for one in experts]
        weights = torch.cat([torch.full((len(each),), 1 / (3 * len(each))) for each in tokens]).double()
        inputs = torch.cat(tokens)
        targets = torch.cat(
            [torch.eye(3).double()[at].expand(len(each), 3) for at, each in enumerate(tokens)]
        )
        penalty = 0.2 * float((weights[:, None] * inputs**2).sum() / WIDTH)
        root = weights.sqrt()[:, None]
        left = torch.cat([root * inputs, penalty**0.5 * torch.eye(WIDTH).double()])
        right = torch.cat([root * (targets - 1 / 3), torch.zeros(WIDTH, 3).double()])
        wanted = torch.linalg.lstsq(left, right).solution.T
        found = rows(made, layer).double()
        factor = float((found * wanted).sum() / wanted.square().sum())
        assert factor > 1
        torch.testing.assert_close(found, wanted * factor, rtol=2e-3, atol=2e-3)


def test_rows_of_cheap_embed(tmp_path: Path, base: Source, whole: WholeModel) -> None:
    experts = three_experts(negative=True)
    work = gate_work(stage_of(base, "cheap_embed", experts))
    made = make(stage_of(base, "cheap_embed", experts), tmp_path)

    def side(prompts: tuple[str, ...]) -> torch.Tensor:
        tokens = [token for prompt in prompts for token in tokens_of(prompt)]
        return unit(whole.embedding[tokens].sum(0))

    wanted = unit(torch.stack([side(each.positive) - side(each.negative) for each in experts]))
    assert_rows(made, lambda _: wanted)
    used = {token for one in experts for prompt in one.positive for token in tokens_of(prompt)}
    assert work.costs() == (len(used) * WIDTH * 4,), "rows that no prompt has are not read"


@pytest.mark.parametrize("mode", ["random", "uniform_random"])
def test_random_rows_need_no_prompts_and_no_tokenizer(tmp_path: Path, *, mode: str) -> None:
    base = reading_base(tmp_path / "base")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / file).unlink()
    experts, shared = [expert("copy")] * 7, [expert("shared")]
    made = make(stage_of(base, mode, experts, shared=shared), tmp_path / "made")
    assert made.tensors["router.0"].shape == (7, WIDTH)
    assert made.tensors["shared_gate.0"].shape == (1, WIDTH)
    every = torch.cat(list(made.tensors.values()))
    assert len({tuple(row) for row in every.tolist()}) == 8 * LAYERS, (
        "copies of one model get rows of their own"
    )
    assert made.report["summary"]["routing"] is None
    again = make(stage_of(base, mode, experts, shared=shared, seed=1), tmp_path / "again")
    assert not torch.equal(again.tensors["router.0"], made.tensors["router.0"])


@pytest.mark.parametrize("mode", ALL_MODES)
def test_scale_is_a_factor_on_routed_rows_alone(tmp_path: Path, base: Source, *, mode: str) -> None:
    experts, shared = three_experts(), [expert("shared", text(5, 50, 30))]
    plain = make(stage_of(base, mode, experts, shared=shared), tmp_path / "plain")
    scaled = make(stage_of(base, mode, experts, shared=shared, scale=4.0), tmp_path / "scaled")
    for name, tensor in plain.tensors.items():
        factor = 4.0 if name.startswith("router") else 1.0
        assert torch.equal(scaled.tensors[name], tensor * factor)


@pytest.mark.parametrize("mode", ["hidden_avg", "centroid", "cheap_embed"])
def test_a_shared_expert_gets_the_row_of_its_own_prompts(tmp_path: Path, base: Source, *, mode: str) -> None:
    experts, own = three_experts(), random_texts(8, 6, 4)
    shared = make(stage_of(base, mode, experts, shared=[expert("s", *own)]), tmp_path / "a")
    alone = make(stage_of(base, mode, [expert("s", *own)]), tmp_path / "b")
    for layer in range(LAYERS):
        torch.testing.assert_close(shared.tensors[f"shared_gate.{layer}"], alone.tensors[f"router.{layer}"])
    without = make(stage_of(base, mode, experts), tmp_path / "c")
    for layer in range(LAYERS):
        torch.testing.assert_close(rows(shared, layer), rows(without, layer))


def test_ridge_gives_a_shared_expert_a_high_logit_on_its_own_text(
    tmp_path: Path, base: Source, whole: WholeModel
) -> None:
    own = random_texts(3, 9, 9, low=43, high=64)
    stage = stage_of(base, "ridge", three_experts(), shared=[expert("s", *own)])
    made = make(stage, tmp_path)
    for layer in range(LAYERS):
        row = made.tensors[f"shared_gate.{layer}"][0].double()
        on_own = torch.cat([whole.read(each)[1][layer] for each in own]) @ row
        on_other = torch.cat([whole.read(each)[1][layer] for each in three_experts()[0].positive]) @ row
        assert float(on_own.mean()) > float(on_other.mean()) + 0.3


@pytest.mark.parametrize("mode", STREAMED)
def test_units_do_not_matter(
    tmp_path: Path, base: Source, monkeypatch: pytest.MonkeyPatch, *, mode: str
) -> None:
    stage = stage_of(base, mode, three_experts(negative=True), shared=[expert("s", text(4, 9))])
    one = make(stage, tmp_path / "one")
    monkeypatch.setattr("raymerge.stages.router.prompts.UNIT_TOKENS", 20)
    several = make(stage, tmp_path / "several")
    backwards = make(stage, tmp_path / "backwards", backwards=True)
    assert one.num_units == 1
    assert several.num_units > 2
    assert backwards.data == several.data, "the order in which units are done changes nothing"
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(several.tensors[name], tensor, rtol=1e-5, atol=1e-5)
    separations = [each.report["summary"]["separation"] for each in (several, one)]
    assert separations[0] == pytest.approx(separations[1])
    for ours, theirs in zip(several.report["layers"], one.report["layers"], strict=True):
        assert ours["routing"] == theirs["routing"]
        assert ours["margin"] == pytest.approx(theirs["margin"], rel=1e-4)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_same_bytes_twice_over_what_was_left_and_after_pickling(
    tmp_path: Path, base: Source, *, mode: str
) -> None:
    stage = stage_of(base, mode, three_experts())
    first = make(stage, tmp_path)
    work = pickle.loads(pickle.dumps(gate_work(stage)))
    work.unit(0, staging=tmp_path, device=torch.device("cpu"), budget=1 << 30, tell=lambda _: None)
    work.conclude(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == first.data
    assert not list(tmp_path.glob("spill*"))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_result_is_laid_out_as_planned_with_constants(tmp_path: Path, base: Source, *, mode: str) -> None:
    constants = (Constant("q.bias", DType.BF16, (3,), 0.0), Constant("one", DType.F32, (2, 2), 1.0))
    stage = stage_of(base, mode, three_experts(), constants=constants, layers=(0, 2))
    made = make(stage, tmp_path)
    assert made.data.startswith(stage.layout.header)
    assert len(made.data) == stage.layout.nbytes
    assert made.tensors.keys() == {"router.0", "router.2", "q.bias", "one"}
    assert torch.equal(made.tensors["q.bias"], torch.zeros(3, dtype=torch.bfloat16))
    assert torch.equal(made.tensors["one"], torch.ones(2, 2))
    assert [each["layer"] for each in made.report["layers"]] == [0, 2]


def test_layers_do_not_depend_on_which_others_are_wanted(tmp_path: Path, base: Source) -> None:
    every = make(stage_of(base, "ridge", three_experts()), tmp_path / "every")
    some = make(stage_of(base, "ridge", three_experts(), layers=(1,)), tmp_path / "some")
    assert torch.equal(every.tensors["router.1"], some.tensors["router.1"])


def test_the_report_judges_held_out_texts_and_says_whose_own_it_took(tmp_path: Path, base: Source) -> None:
    first, second, third = three_experts()
    # Texts of the second expert's words: the rows must send hardly any of them to the first.
    wrong = ExpertPrompts("expert 0", first.positive, held_out=second.positive)
    report = make(stage_of(base, "ridge", [wrong, second, third]), tmp_path / "a").report
    assert report["on_own"] == [1, 2]
    assert report["summary"]["routing"][0] < 0.3
    assert report["summary"]["routing"][1] > 0.7
    own = make(stage_of(base, "ridge", three_experts()), tmp_path / "b").report
    assert own["on_own"] == [0, 1, 2]
    assert min(own["summary"]["routing"]) > 0.6
    assert own["num_judged"] == [
        sum(len(tokens_of(each)) for each in one.positive) for one in three_experts()
    ]


def test_what_does_not_hold_for_other_text_is_told_and_has_short_rows(tmp_path: Path, base: Source) -> None:
    # What the first half of each expert's texts says, the second denies.
    low, high = ([random_texts(seed, 9, low=at, high=at + 17)[0] for seed in (1, 2)] for at in (3, 40))
    first, second = zip(low, high, strict=True)
    experts = [ExpertPrompts("a", first), ExpertPrompts("b", second[::-1])]
    made = make(stage_of(base, "ridge", experts, layers=(0,)), tmp_path / "a")
    assert made.report["summary"]["unproven"] == [0]
    assert 0 < made.report["summary"]["margin"] < 0.3
    summary = make(stage_of(base, "ridge", three_experts()), tmp_path / "b").report["summary"]
    assert summary["unproven"] == []
    assert summary["separation"] > 0.3
    centroid = make(stage_of(base, "centroid", three_experts()), tmp_path / "c").report
    assert centroid["summary"]["separation"] is None


def test_one_expert_has_a_row(tmp_path: Path, base: Source) -> None:
    for mode in STREAMED:
        made = make(stage_of(base, mode, three_experts()[:1]), tmp_path / mode)
        assert float(rows(made, 0).norm()) > 0
        assert made.report["summary"]["condition"] == 1.0
