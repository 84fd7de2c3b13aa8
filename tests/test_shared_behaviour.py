"""The behaviour pack: merges of small trained models must predict text as well as right merges do.

The recipes run in this process; the pack's own evaluation judges them in two subprocesses of one thread each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from kits.behaviour import DOMAINS, PADDED_MEANS, Behaviour, Gate, judge, mixtures, reference_losses, submit
from kits.command_line import Outcome
from kits.marks import slow_but

RECIPES = (
    *("linear", "linear-fp32", "task_arithmetic", "ties", "ties-lambda", "slerp", "slerp-t25"),
    *("nuslerp", "model_stock", "sce", "dare_linear", "dare_ties", "della", "lora-applied"),
    *("far-linear", "far-slerp", "far-model_stock", "far-dare_ties", "passthrough-identity"),
    *("passthrough-upscale", "passthrough-upscale-zero", "moe-cheap_embed", "moe-hidden_avg"),
    *("moe-hidden_avg-near", "moe-hidden_avg-positive-only", "moe-hidden_avg-top2"),
)
"""All of the pack."""

BETTER_GATES = (Gate("router_input"), Gate("ridge"))
"""Gates that must do better than the best of the pack's, ``moe-cheap_embed``."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("behaviour")


@pytest.fixture(scope="module")
def ended(place: Path, shared_root: Path) -> Callable[[str], Outcome]:
    """How the command of a recipe ended, which is run once."""
    pack = shared_root / "behaviour"
    return cache(lambda name: submit(pack, f"recipes/{name}.yml", place / name))


@pytest.fixture(scope="module")
def judged(place: Path, ended: Callable[[str], Outcome], shared_root: Path) -> dict[str, Behaviour]:
    """What the pack says of every merge."""
    assert [name for name in RECIPES if ended(name).code] == []
    return judge(shared_root / "behaviour", place, RECIPES)


@pytest.fixture(scope="module")
def gated(shared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Behaviour]:
    """What the pack says of mixtures with gates of which it has no recipe."""
    place = tmp_path_factory.mktemp("gates")
    pack = shared_root / "behaviour"
    outcomes = mixtures(pack, place, BETTER_GATES)
    assert [outcome.text for outcome in outcomes.values() if outcome.code] == []
    return judge(pack, place / "outs", list(outcomes))


def test_every_recipe_is_judged(shared_root: Path) -> None:
    found = {path.stem for path in (shared_root / "behaviour" / "recipes").glob("*.yml")}
    assert found == set(RECIPES)
    assert set(RECIPES) > PADDED_MEANS


@pytest.mark.parametrize("name", slow_but(RECIPES, "della", "far-slerp", "passthrough-upscale-zero"))
def test_a_recipe_of_trained_models_merges(name: str, ended: Callable[[str], Outcome]) -> None:
    assert ended(name).code == 0, ended(name).text


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_merge_behaves_as_a_right_merge(name: str, judged: dict[str, Behaviour]) -> None:
    assert judged[name].failed == (), judged[name]


@pytest.mark.slow
def test_the_same_layers_put_together_again_are_the_same_model(judged: dict[str, Behaviour]) -> None:
    assert judged["passthrough-identity"].loss == judged["passthrough-upscale-zero"].loss


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PADDED_MEANS))
def test_means_without_padding_give_better_routers(
    name: str, judged: dict[str, Behaviour], shared_root: Path
) -> None:
    assert judged[name].loss["avg"] < reference_losses(shared_root / "behaviour")[name]["avg"] - 0.005


@pytest.mark.slow
@pytest.mark.parametrize("gate", BETTER_GATES, ids=lambda gate: gate.name)
def test_gates_from_what_the_router_sees_beat_the_best_of_the_pack(
    gate: Gate, gated: dict[str, Behaviour], judged: dict[str, Behaviour]
) -> None:
    made, best = gated[gate.name], judged["moe-cheap_embed"]
    assert made.failed == ()
    assert made.loss["avg"] < min(best.loss["avg"], 3.032) - 0.005
    for domain in DOMAINS:
        assert made.loss[domain] < best.loss[domain]
        assert made.right_first[domain] > best.right_first[domain] + 0.02
