"""Routers repaired after a merge: the solver against dense algebra, and whole runs against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kits.calibrations import reading_model, windows_of
from kits.layer_streams import KINDS
from kits.router_merges import LENGTH, RouterMerge
from safetensors.torch import load_file

import raymerge
from raymerge.api import plan_for, read_recipes
from raymerge.device_numerics import torch_threads
from raymerge.errors import IncompleteError, UserError
from raymerge.events import Ended, StageReport, StageStarted, StepKept
from raymerge.options import RunOptions
from raymerge.runtime.driver.stage_run import work_of
from raymerge.stages.calibration.router_solver import Domain, Scoring, solve_router

Matrix = torch.Tensor


def _curvature(inputs: Matrix, router: Matrix, scoring: str, gamma: float) -> Matrix:
    """Sigma of a domain as a matrix ``[E D, E D]``, by the definition."""
    experts, width = router.shape
    total = torch.zeros(experts * width, experts * width, dtype=torch.float64)
    for token in inputs.double():
        logits = router @ token
        if scoring == "softmax":
            scores = logits.softmax(0)
            response = scores.diag() - torch.outer(scores, scores)
        else:
            scores = logits.sigmoid()
            response = (scores * (1 - scores)).diag()
        total += torch.kron(response, torch.outer(token, token))
    total /= len(inputs)
    return gamma * total + (1 - gamma) * total.diag().diag()


def _dense(inputs: Sequence[Matrix], routers: Sequence[Matrix], scoring: str, gamma: float = 0.9) -> Matrix:
    systems = [_curvature(x, w, scoring, gamma) for x, w in zip(inputs, routers, strict=True)]
    right = sum(a @ w.flatten() for a, w in zip(systems, routers, strict=True))
    return torch.linalg.solve(sum(systems), right).view(routers[0].shape)


def _random(*shape: int, seed: int) -> Matrix:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_solution_is_that_of_the_dense_system(scoring: Scoring) -> None:
    inputs = [_random(40, 6, seed=1), 2 * _random(1300, 6, seed=2)]
    routers = [_random(4, 6, seed=3).double(), _random(4, 6, seed=4).double()]
    start = (routers[0] + routers[1]) / 2
    # In pieces, as texts come.
    domains = [Domain(x.split(37), w) for x, w in zip(inputs, routers, strict=True)]
    solution = solve_router(domains, start, scoring)
    assert solution.is_converged
    assert 0 < solution.num_iterations <= 24
    torch.testing.assert_close(solution.router, _dense(inputs, routers, scoring), rtol=1e-4, atol=1e-4)


def test_what_all_rows_share_stays_as_merged_without_the_diagonal() -> None:
    inputs, routers = [_random(60, 5, seed=1)] * 2, [_random(3, 5, seed=s).double() for s in (2, 3)]
    domains = [Domain([x], w) for x, w in zip(inputs, routers, strict=True)]
    start = _random(3, 5, seed=4).double()
    moved = solve_router(domains, start + torch.ones(3, 1) * torch.arange(5.0), "softmax", gamma=1.0).router
    router = solve_router(domains, start, "softmax", gamma=1.0).router
    torch.testing.assert_close(router.mean(0), start.mean(0))
    torch.testing.assert_close(moved - router, (torch.ones(3, 1) * torch.arange(5.0)).double())


def test_a_solver_that_is_stopped_early_says_so() -> None:
    domains = [Domain([_random(30, 8, seed=s)], _random(4, 8, seed=s + 2).double()) for s in (1, 2)]
    solution = solve_router(domains, torch.zeros(4, 8).double(), "softmax", most_iterations=2)
    assert not solution.is_converged
    assert solution.num_iterations == 2


def _load(merge: RouterMerge, model: Path) -> Any:
    architecture = getattr(transformers, KINDS[merge.kind].architecture)
    return architecture.from_pretrained(model, attn_implementation="eager", dtype=torch.float32).eval()


def _routers(model: Any) -> dict[str, torch.nn.Module]:
    """The routers of a model of transformers by name, in the order of layers."""
    named = dict(model.named_modules())
    return {name: each for name, each in named.items() if name.endswith(("mlp.gate", "mlp.router"))}


def _inputs(model: Any, router: torch.nn.Module, text: Path) -> Matrix:
    seen: list[Matrix] = []
    hook = router.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].reshape(-1, args[0].shape[-1]))
    )
    with torch.no_grad():
        for window in windows_of(text, LENGTH):
            model(torch.tensor([window]), use_cache=False)
    hook.remove()
    return torch.cat(seen)


def _whole(router: Any) -> Matrix:
    bias = [router.bias[:, None]] if hasattr(router, "bias") else []
    return torch.cat([router.weight, *bias], 1).detach().double()


def _repaired(merge: RouterMerge, merged: Path, scoring: str) -> dict[str, Matrix]:
    """The routers as the paper and the documentation have them, with whole models in memory."""
    model, sources = _load(merge, merged), [_routers(_load(merge, each)) for each in merge.models]
    made: dict[str, Matrix] = {}
    for name, router in _routers(model).items():
        inputs = [_inputs(model, router, text) for text in merge.texts]
        if hasattr(router, "bias"):
            inputs = [torch.cat([each, torch.ones(len(each), 1)], 1) for each in inputs]
        solved = _dense(inputs, [_whole(source[name]) for source in sources], scoring)
        width = router.weight.shape[1]
        with torch.no_grad():
            router.weight.copy_(solved[:, :width])
            if hasattr(router, "bias"):
                router.bias.copy_(solved[:, width])
        made[name] = solved
    return made


@pytest.mark.parametrize(
    ("kind", "scoring"), [("qwen3_moe", "softmax"), ("deepseek_v3", "sigmoid"), ("gpt_oss", "softmax")]
)
def test_repaired_routers_are_those_of_whole_models_and_the_rest_is_the_merge(
    tmp_path: Path, kind: str, scoring: str
) -> None:
    merge, reports = RouterMerge(tmp_path, kind), list[StageReport]()
    out = merge.submit(
        on_event=lambda event: reports.append(event) if isinstance(event, StageReport) else None
    )
    merged = merge.submit_unrepaired("merged")
    expected = _repaired(merge, merged, scoring)
    ours, theirs = _tensors(out), _tensors(merged)
    replaced = {
        f"{name}.{part}" for name in expected for part in ("weight", "bias") if f"{name}.{part}" in ours
    }
    assert replaced
    assert {name for name in theirs if not torch.equal(ours[name], theirs[name])} == replaced
    for name, router in expected.items():
        bias = [ours[f"{name}.bias"][:, None]] if f"{name}.bias" in ours else []
        own = torch.cat([ours[f"{name}.weight"], *bias], 1)
        torch.testing.assert_close(own.double(), router, rtol=1e-3, atol=1e-4)
    (report,) = (each.report for each in reports)
    assert [layer["is_converged"] for layer in report["layers"]] == [True] * len(expected)
    assert _mean(report, "after") > _mean(report, "before")


def _tensors(model: Path) -> dict[str, Matrix]:
    return {
        name: each for file in sorted(model.glob("*.safetensors")) for name, each in load_file(file).items()
    }


def _mean(report: dict[str, Any], when: str) -> float:
    shares = [share for layer in report["layers"] for share in layer[when]]
    return sum(shares) / len(shares)


def test_equal_sources_keep_their_routers(tmp_path: Path) -> None:
    merge = RouterMerge(tmp_path, "olmoe", seeds=(3, 3), dtype=torch.bfloat16)
    out, source = _tensors(merge.submit()), _tensors(merge.models[0])
    assert {name for name in source if not torch.equal(out[name], source[name])} == set()


def test_a_stopped_run_goes_on_and_can_be_replayed(tmp_path: Path) -> None:
    merge = RouterMerge(tmp_path, "olmoe", dtype=torch.bfloat16)
    whole, events = _tensors(merge.submit("whole")), list[object]()

    def stop(event: object) -> None:
        if isinstance(event, StageStarted):
            raise IncompleteError("stopped at once.")

    with pytest.raises(IncompleteError):
        merge.submit(on_event=stop)
    out = merge.submit(on_event=events.append)
    assert [type(event) for event in events].count(StepKept) == 1
    assert all(torch.equal(each, whole[name]) for name, each in _tensors(out).items())
    assert raymerge.verify(out).problems == ()
    assert raymerge.replay(out).problems == ()
    # As planned beforehand.
    assert raymerge.plan(merge.recipe()).digest == raymerge.plan(merge.recipe(name="other")).digest


def test_experts_that_do_not_fit_are_loaded_one_by_one(tmp_path: Path) -> None:
    merge = RouterMerge(tmp_path, "olmoe", dtype=torch.bfloat16)
    merged = merge.submit_unrepaired("merged")
    domains = [{"model": str(m), "texts": [str(t)]} for m, t in zip(merge.models, merge.texts, strict=True)]
    recipe = {
        "merge_method": "passthrough",
        "models": [{"model": str(merged)}],
        "router": {"repair": domains},
    }
    (stage,) = plan_for(recipe, tmp_path / "out")[-1].stages
    work: Any = work_of(stage)
    work.check()
    made = []
    for budget in (work.least_budget(), 1 << 40):
        staging = tmp_path / f"staging-{budget}"
        staging.mkdir()
        with torch_threads(1):
            work.unit(0, staging=staging, device=torch.device("cpu"), budget=budget, tell=lambda _: None)
        made.append((staging / "model.safetensors").read_bytes())
    assert made[0] == made[1]


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    merge = RouterMerge(tmp_path, "olmoe", dtype=torch.bfloat16)
    one, two = (_tensors(merge.submit(f"out-{count}", options=RunOptions(workers=count))) for count in (1, 2))
    assert all(torch.equal(each, two[name]) for name, each in one.items())


def _refused(recipe: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        raymerge.plan(recipe).require()
    return str(caught.value)


def test_what_cannot_be_repaired_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    merge = RouterMerge(tmp_path, "olmoe")
    recipe = merge.recipe()
    del recipe["models"][1]["texts"]
    assert "models[1]: 'router: repair' runs texts" in _refused(recipe)
    recipe["models"][1]["texts"] = [str(tmp_path / "absent.txt")]
    assert "there is no such file" in _refused(recipe)
    (tmp_path / "absent.txt").write_text("\n")
    assert "there is nothing in it" in _refused(recipe)
    assert "experts in one order" in _refused(merge.recipe(align="experts"))
    reading_model(tmp_path / "dense", "llama")
    dense = [{**recipe["models"][0], "model": str(tmp_path / "dense")}]
    assert "no layers with experts" in _refused({**merge.recipe(), "models": dense})
    reading_model(tmp_path / "more", "olmoe", num_experts=6)
    domain = {"model": str(tmp_path / "more"), "texts": [str(merge.texts[0])]}
    repair = {"merge_method": "passthrough", "models": [{"model": str(merge.models[0])}]}
    assert "has 6 experts" in _refused({**repair, "router": {"repair": [domain]}})


def test_a_base_without_texts_of_its_own_has_no_say() -> None:
    models: list[dict[str, Any]] = [{"model": "base"}, {"model": "other"}]
    shared = {"merge_method": "task_arithmetic", "base_model": "base", "calibrate": {"texts": ["all.txt"]}}
    for texts, domains in (([], ["other"]), (["own.txt"], ["base", "other"])):
        models[0] |= {"texts": texts} if texts else {}
        repaired: Any = read_recipes({**shared, "models": models, "router": "repair"})[-1]
        assert [str(domain.model) for domain in repaired.router.repair] == domains


def test_a_router_that_is_not_linear_is_refused(tmp_path: Path) -> None:
    merge, events = RouterMerge(tmp_path, "dbrx"), list[object]()
    with pytest.raises(UserError, match="does not give experts by a softmax or a sigmoid"):
        merge.submit(on_event=events.append)
    assert [type(event) for event in events] == [Ended]
