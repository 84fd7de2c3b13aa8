"""Windows over what trainers save for each step: where a checkpoint lies, and which are passed over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.command_line import run_command
from kits.merge_cases import INLINE
from kits.s3_server import s3_server
from kits.training_checkpoint import grid, save_chunks
from safetensors.torch import save_file

from raymerge.api import plan_sweep, submit_sweep
from raymerge.errors import RecipeError

KEY = "model.layers.0.mlp.up_proj.weight"
BOXES = {KEY: grid((6, 4), (2,))}


def weight(step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def _accelerate(root: Path, tensor: torch.Tensor) -> None:
    save_chunks(root / "pytorch_model_fsdp_0", {KEY: tensor}, BOXES)
    state = {f"state.{KEY}.exp_avg": tensor + 1}
    save_chunks(root / "optimizer_0", state, {})
    (root / "random_states_0.pkl").write_bytes(b"")


def _nemo(root: Path, tensor: torch.Tensor) -> None:
    save_chunks(root / "weights", {f"module.{KEY}": tensor}, {f"module.{KEY}": BOXES[KEY]})
    (root / "context").mkdir()
    (root / "context" / "model.yaml").write_text("{}")


def _torchtitan(root: Path, tensor: torch.Tensor) -> None:
    save_chunks(root, {KEY: tensor}, BOXES)


def _transformers(root: Path, tensor: torch.Tensor) -> None:
    root.mkdir(parents=True)
    save_file({KEY: tensor}, root / "model.safetensors")
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "optimizer.pt").write_bytes(b"")
    (root / "global_step7").mkdir()
    (root / "global_step7" / "model_states.pt").write_bytes(b"")


LAYOUTS: Mapping[str, tuple[str, Callable[[Path, torch.Tensor], None]]] = {
    "accelerate": ("checkpoint-{}", _accelerate),
    "nemo": ("model--loss=2.5-step={}-last", _nemo),
    "megatron": ("iter_{:07}", _torchtitan),
    "torchtitan": ("step-{}", _torchtitan),
    "transformers": ("checkpoint-{}", _transformers),
}


def made(run: Path, layout: str, *steps: int) -> Mapping[int, Path]:
    name, save = LAYOUTS[layout]
    places = {step: run / name.format(step) for step in steps}
    for step, place in places.items():
        save(place, weight(step))
    return places


def block(run: object, **keys: object) -> dict[str, Any]:
    return {"checkpoints": {"root": str(run), "schedule": "linear", **keys}, "out_dtype": "float32"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_checkpoint_of_a_step_is_taken_from_where_the_trainer_puts_it(
    layout: str, tmp_path: Path
) -> None:
    made(tmp_path / "run", layout, 3, 4)
    submit_sweep(block(tmp_path / "run"), tmp_path / "out", INLINE)
    (merged,) = read_tensors(tmp_path / "out" / "window-2").values()
    torch.testing.assert_close(merged, (weight(3) + weight(4)) / 2)


def test_of_several_checkpoints_of_a_step_the_pattern_names_one(tmp_path: Path) -> None:
    places = made(tmp_path / "run", "accelerate", 3, 4)
    save_chunks(places[4] / "pytorch_model_fsdp_1", {KEY: weight(9)}, BOXES)
    with pytest.raises(RecipeError) as refused:
        plan_sweep(block(tmp_path / "run"), tmp_path / "out", INLINE)
    (problem,) = refused.value.problems
    assert problem.where == "recipe: checkpoints.root"
    assert problem.what == (
        f"'{places[4]}' holds several checkpoints (pytorch_model_fsdp_0, pytorch_model_fsdp_1)."
    )
    pattern = "checkpoint-{iteration}/pytorch_model_fsdp_0"
    assert f"pattern: '{pattern}'" in problem.remedy
    (planned,) = plan_sweep(block(tmp_path / "run", pattern=pattern), tmp_path / "out", INLINE)
    assert [*planned.output.coefficients] == [str(each / "pytorch_model_fsdp_0") for each in places.values()]


def test_the_plan_names_what_is_passed_over_and_what_is_missing(tmp_path: Path) -> None:
    places = made(tmp_path / "run", "torchtitan", 100, 200, 500, 600, 700, 800)
    (places[700] / ".metadata").unlink()
    (tmp_path / "run" / "step-150.tmp").mkdir()
    (tmp_path / "run" / "tmp-step-900").mkdir()
    (tmp_path / "run" / "step-650").mkdir()
    (tmp_path / "w.yml").write_text(json.dumps(block(Path("run"), every=100, to=900, windows=[4, 2])))
    told = json.loads(run_command("plan", "w.yml", "--json", cwd=tmp_path).text)
    four, two = told["outputs"]
    assert [*four["coefficients"]] == [f"run/step-{step}" for step in (200, 500, 600, 800)]
    assert two["unfinished"] == {
        "run/step-650": "it holds no weights",
        "run/step-700": "its chunks lack .metadata, which is saved last",
        "run/tmp-step-900": "its name says so",
    }
    assert four["unfinished"] == two["unfinished"]
    late = [{"from": 700, "to": 700, "every": 100}, {"from": 900, "to": 900, "every": 100}]
    assert two["missing"] == late
    assert four["missing"] == [{"from": 300, "to": 400, "every": 100}, *late]
    shown = " ".join(run_command("plan", "w.yml", cwd=tmp_path, env={"COLUMNS": "120"}).text.split())
    assert "run/step-700: its chunks lack .metadata" in shown
    assert "2 iterations, 300 to 400" in shown
    told = run_command("submit", "w.yml", "-o", "out", "--inline", cwd=tmp_path).text
    assert "passed over: run/step-700: its chunks lack .metadata" in told


def test_a_window_that_is_too_large_names_what_is_unfinished(tmp_path: Path) -> None:
    places = made(tmp_path / "run", "transformers", 100, 200)
    (places[100] / "model.safetensors").rename(places[100] / "model-00001-of-00002.safetensors")
    with pytest.raises(RecipeError, match=r"larger than the 1 .*checkpoint-100: it has 1 of 2 num"):
        plan_sweep(block(tmp_path / "run", windows=2), tmp_path / "out", INLINE)


# Going on


def _grown(run: Path, out: Path, before: Path | None, **keys: object) -> Path:
    more = {} if before is None else {"continue": str(before)}
    (made_at,) = submit_sweep(block(run, **more, **keys), out, INLINE)
    return out / made_at


def _refusal(run: Path, before: Path, **keys: object) -> str:
    with pytest.raises(RecipeError) as refused:
        plan_sweep(block(run, **{"continue": str(before)}, **keys), run.parent / "refused", INLINE)
    (problem,) = refused.value.problems
    assert (problem.where, bool(problem.remedy)) == ("recipe: checkpoints.continue", True)
    return problem.what


def _replaced(place: Path, save: Callable[[Path, torch.Tensor], None], seed: int) -> None:
    shutil.rmtree(place)
    save(place, weight(seed))


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["torchtitan", "accelerate", "transformers"])
def test_an_average_does_not_go_on_if_what_it_is_made_of_was_replaced(layout: str, tmp_path: Path) -> None:
    run, save = tmp_path / "run", LAYOUTS[layout][1]
    places = made(run, layout, 1, 2)
    first = _grown(run, tmp_path / "first", None)
    made(run, layout, 3)
    second = _grown(run, tmp_path / "second", first)
    made(run, layout, 4)
    # Written again, it is the same.
    _replaced(places[1], save, 1)
    third = _grown(run, tmp_path / "third", second)
    (merged,) = read_tensors(third).values()
    torch.testing.assert_close(merged, sum(map(weight, (1, 2, 3, 4))) / 4)
    _replaced(places[1], save, 9)
    made(run, layout, 5)
    for before in (first, second, third):
        what = _refusal(run, before)
        assert what.startswith(f"'{places[1]}")
        assert f"is not what '{before}' is an average of" in what
    # Of what is gone nothing is known, as where a training removes its old checkpoints.
    shutil.rmtree(places[1])
    plan_sweep(block(run, **{"continue": str(third)}), tmp_path / "out", INLINE)


def test_an_average_goes_on_only_with_the_run_that_it_is_of(tmp_path: Path) -> None:
    run, moved, other, newer = (tmp_path / name for name in ("run", "moved", "other", "newer"))
    made(run, "torchtitan", 10, 20)
    before = _grown(run, tmp_path / "out", None)
    made(run, "torchtitan", 30)
    for step in (10, 20, 30):
        _torchtitan(other / f"step-{step}", weight(step + 1))
    made(newer, "torchtitan", 30)
    assert _refusal(other, before).startswith(f"'{other}/step-10' is not what '{before}' is an average of")
    assert _refusal(newer, before) == (
        f"'{before}' is an average of checkpoints of '{run}', and '{newer}' has none of them."
    )
    run.rename(moved)
    (planned,) = plan_sweep(block(moved, **{"continue": str(before)}), tmp_path / "more", INLINE)
    assert [*planned.output.coefficients] == [str(before), str(moved / "step-30")]


def test_an_average_does_not_go_on_beside_checkpoints_that_it_lacks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    places = made(run, "torchtitan", 10, 15, 20)
    before = _grown(run, tmp_path / "out", None, every=10)
    made(run, "torchtitan", 30)
    plan_sweep(block(run, every=10, **{"continue": str(before)}), tmp_path / "more", INLINE)
    assert (
        _refusal(run, before)
        == f"'{places[15]}' lies between the checkpoints of '{before}' and is none of them."
    )


@pytest.mark.slow
def test_a_run_in_an_object_store_is_looked_into_too(tmp_path: Path) -> None:
    run, before = tmp_path / "run", tmp_path / "out" / "window-2"
    with s3_server() as server:
        options = replace(INLINE, storage=server.options)
        for step in (1, 2):
            _accelerate(run / f"checkpoint-{step}", weight(step))
        server.upload(run, "run")
        recipe = block("s3://models/run")
        submit_sweep(recipe, tmp_path / "out", options)
        (merged,) = read_tensors(before).values()
        torch.testing.assert_close(merged, (weight(1) + weight(2)) / 2)
        _accelerate(tmp_path / "new" / "checkpoint-3", weight(3))
        server.upload(tmp_path / "new", "run")
        recipe["checkpoints"]["continue"] = str(before)
        (planned,) = plan_sweep(recipe, tmp_path / "more", options)
        assert [*planned.output.coefficients][1:] == ["s3://models/run/checkpoint-3/pytorch_model_fsdp_0"]
        _replaced(run / "checkpoint-1", _accelerate, 9)
        server.upload(run, "run")
        with pytest.raises(RecipeError, match=r"checkpoint-1/pytorch_model_fsdp_0' is not what"):
            plan_sweep(recipe, tmp_path / "more", options)
