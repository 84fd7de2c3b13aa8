"""The Python API: the same power as the command line, and nothing loaded before it is used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from kits.adapter_maker import peft_merge
from kits.adapter_merges import BASE, adapter
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.s3_server import s3_server

import raymerge
from raymerge.api import merges_adapters, plan_all, read_recipe, read_recipes
from raymerge.errors import PlanError, RecipeError
from raymerge.events import Event, Published


@pytest.fixture
def recipe(tmp_path: Path) -> Mapping[str, object]:
    base = tiny_llama(tmp_path / "a", 1)
    tiny_llama(tmp_path / "b", 2, base=base)
    entries = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in ("a", "b")]
    return {"merge_method": "linear", "models": entries}


def test_a_mapping_is_planned_merged_and_verified(recipe: Mapping[str, object], tmp_path: Path) -> None:
    seen: list[Event] = []
    plan = raymerge.plan(recipe)
    options = raymerge.RunOptions(inline=True)
    result = raymerge.submit(recipe, tmp_path / "out", options, on_event=seen.append)
    assert (plan.problems, result.digest) == ((), plan.digest)
    assert raymerge.verify(tmp_path / "out").problems == ()
    assert isinstance(seen[-1], Published)
    first, second, merged = (read_tensors(tmp_path / name) for name in ("a", "b", "out"))
    name = "model.norm.weight"
    assert merged[name].float().tolist() == pytest.approx(
        ((first[name] + second[name]) / 2).tolist(), rel=1e-2
    )


def test_a_file_and_its_mapping_give_the_same_plan(recipe: Mapping[str, object], tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(dict(recipe)))
    tables = raymerge.plan(path).tables, raymerge.plan(str(path)).tables, raymerge.plan(recipe).tables
    assert all(each["ops"].equals(tables[0]["ops"]) for each in tables)


def _chain(recipe: Mapping[str, object], root: Path) -> list[dict[str, object]]:
    """The recipe under a name, and one that uses its result."""
    models = [{"model": "mean"}, {"model": str(root / "a")}]
    last: dict[str, object] = {
        "merge_method": "slerp",
        "base_model": "mean",
        "models": models,
        "parameters": {"t": 0.5},
    }
    return [{**recipe, "name": "mean"}, last]


def test_several_recipes_are_planned_and_merged_in_order(
    recipe: Mapping[str, object], tmp_path: Path
) -> None:
    chain = _chain(recipe, tmp_path)
    mean, last = plan_all(chain[::-1])
    assert mean.digest == raymerge.plan(recipe).digest
    assert last.manifest["sources"][0]["made_by"] == mean.digest
    options = raymerge.RunOptions(inline=True)
    result = raymerge.submit([read_recipe(chain[0]), chain[1]], tmp_path / "out", options)
    assert result.digest == last.digest
    assert raymerge.verify(tmp_path / "out").problems == ()


def test_a_file_of_several_recipes_is_a_sequence_of_them(
    recipe: Mapping[str, object], tmp_path: Path
) -> None:
    import yaml

    chain = _chain(recipe, tmp_path)
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump_all(chain))
    assert [each.name for each in read_recipes(path)] == ["mean", None]
    assert [plan.digest for plan in plan_all(path)] == [plan.digest for plan in plan_all(chain)]
    with pytest.raises(RecipeError, match="2 recipes where one is expected"):
        raymerge.plan(path)


def test_faults_of_all_recipes_come_at_once_with_their_numbers(
    recipe: Mapping[str, object], tmp_path: Path
) -> None:
    first, second = _chain(recipe, tmp_path)
    with pytest.raises(RecipeError) as caught:
        read_recipes([{**first, "sede": 1}, second, {"merge_method": "linear"}])
    assert [problem.where.split(":")[0] for problem in caught.value.problems] == ["recipes[0]", "recipes[2]"]
    with pytest.raises(RecipeError, match="none"):
        read_recipes([])


def _of(*models: object, **more: object) -> dict[str, object]:
    """A recipe of the mean of these, whatever they are."""
    entries = [{"model": str(each), "parameters": {"weight": 0.5}} for each in models]
    return {"merge_method": "linear", "models": entries, **more}


def test_adapters_are_merged_into_an_adapter(tmp_path: Path) -> None:
    roots = [adapter(tmp_path / str(seed), seed) for seed in range(2)]
    made = raymerge.merge_adapters(_of(*roots, adapter={"combine": "concatenate"}), tmp_path / "out")
    one, two, merged = (peft_merge(BASE, root) for root in (*roots, tmp_path / "out"))
    assert (made.output, made.relative_error) == (str(tmp_path / "out"), 0)
    for name, change in merged.items():
        torch.testing.assert_close(change, (one[name] + two[name]) / 2, rtol=1e-5, atol=1e-6)


def test_a_merge_of_adapters_is_known_by_its_models_or_its_block(tmp_path: Path) -> None:
    one, two = (adapter(tmp_path / str(seed), seed) for seed in range(2))
    tiny_llama(tmp_path / "base", 0)
    assert merges_adapters(_of(one, two))
    assert merges_adapters([_of(one, two)])
    assert merges_adapters(read_recipe(_of("an/adapter", "another/one", adapter={})))
    assert not merges_adapters(_of("an/adapter", "another/one"))
    assert not merges_adapters(_of(one))
    assert not merges_adapters(_of(one, tmp_path / "base"))
    assert not merges_adapters(_of(f"{tmp_path / 'base'}+{one}", f"{tmp_path / 'base'}+{two}"))
    assert not merges_adapters(_of(one, "x" * 5000))
    assert not merges_adapters([{**_of(one, two, adapter={}), "name": "first"}, _of(one, "first")])


def test_an_adapter_in_the_home_directory_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for seed in range(2):
        adapter(tmp_path / str(seed), seed)
    assert merges_adapters(_of("~/0", "~/1"))


@pytest.mark.parametrize("more", [{}, {"adapter": {"rank": 2}}])
def test_a_merge_of_adapters_has_no_plan_and_gives_no_checkpoint(
    more: Mapping[str, object], tmp_path: Path
) -> None:
    recipe = _of(*(adapter(tmp_path / str(seed), seed) for seed in range(2)), **more)
    options = raymerge.RunOptions(inline=True)
    verbs = (raymerge.plan, plan_all, lambda asked: raymerge.submit(asked, tmp_path / "out", options))
    for verb in verbs:
        with pytest.raises(PlanError, match="'merge_adapters'") as caught:
            verb(recipe)
        assert caught.value.problems[0].where == f"recipe: {'adapter' if more else 'models'}"
    assert not (tmp_path / "out").exists()


def test_adapters_are_merged_by_one_recipe_alone(tmp_path: Path) -> None:
    recipes = tmp_path / "two.yml"
    text = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nadapter: {rank: 2}\n"
    recipes.write_text(f"name: first\n{text}---\nmerge_method: passthrough\nmodels: [{{model: first}}]\n")
    with pytest.raises(RecipeError, match="a merge of adapters is a recipe alone"):
        raymerge.merge_adapters(recipes, tmp_path / "out")


def test_errors_are_the_librarys_own(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        raymerge.plan({"merge_method": "linear"})
    with pytest.raises(PlanError, match="absent"):
        raymerge.plan({"merge_method": "passthrough", "models": [{"model": str(tmp_path / "absent")}]})
    experts = [{"source_model": str(tmp_path / name)} for name in ("absent", "missing")]
    with pytest.raises(PlanError, match=r"(?s)absent.*missing"):
        raymerge.plan({"base_model": str(tmp_path / "absent"), "gate_mode": "random", "experts": experts})
    with pytest.raises(AttributeError):
        raymerge.no_such_thing  # noqa: B018


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ("torch", "ray", "pyarrow", "pydantic")
    code = f"import raymerge, sys; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_each_output_of_a_sweep_has_the_plan_of_its_own_text(
    recipe: Mapping[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    from raymerge.planner.inputs import sources

    swept = {**recipe, "sweep": {"w": [0.25, 0.75]}, "parameters": {"weight": "$w"}}
    swept["models"] = [{"model": str(tmp_path / name)} for name in ("a", "b")]
    (tmp_path / "sweep.yml").write_text(yaml.safe_dump(swept))
    opened: list[str] = []

    def open_checkpoint(root: str, *args: object, **options: object) -> object:
        opened.append(root)
        return original(root, *args, **options)

    original = sources.open_checkpoint
    monkeypatch.setattr(sources, "open_checkpoint", open_checkpoint)
    planned = raymerge.plan_sweep(tmp_path / "sweep.yml")
    assert sorted(opened) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert [each.output.name for each in planned] == ["w0.25", "w0.75"]
    for each in planned:
        (tmp_path / "one.yml").write_text(each.output.text)
        assert [merge.plan.digest for merge in each.merges] == [raymerge.plan(tmp_path / "one.yml").digest]


def test_the_models_of_a_sweep_are_looked_for_whatever_its_values_are(
    recipe: Mapping[str, object], tmp_path: Path
) -> None:
    swept = {**recipe, "sweep": {"w": [0.5, "high"]}, "parameters": {"weight": "$w"}}
    swept["models"] = [{"model": str(tmp_path / name)} for name in ("a", "nowhere")]
    with pytest.raises(RecipeError) as caught:
        raymerge.plan_sweep(swept)
    value, absent = caught.value.problems
    assert value.what.startswith("with w = high: 'high' is a text")
    assert absent.where == f"recipe: models[1].model: {tmp_path / 'nowhere'}"
    with pytest.raises(PlanError) as refused:
        raymerge.plan_sweep({**swept, "sweep": {"w": [0.5, 1]}})
    assert refused.value.problems == (absent,)


def test_an_average_of_checkpoints_goes_on_from_its_output(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "run" / "step-1", 1)
    for seed in (2, 3):
        tiny_llama(tmp_path / "run" / f"step-{seed}", seed, base=base)
    block = {"root": str(tmp_path / "run"), "schedule": "linear"}
    before, after = tmp_path / "before", tmp_path / "after"
    for output, more in ((before, {"to": 2}), (after, {"continue": str(before)})):
        planned = raymerge.plan_sweep({"checkpoints": {**block, **more}, "dtype": "float32"})
        (tmp_path / "one.yml").write_text(planned[0].output.text)
        made = raymerge.submit(tmp_path / "one.yml", output, raymerge.RunOptions(inline=True))
        assert made.digest == planned[0].merges[-1].plan.digest
    assert list(planned[0].output.coefficients) == [str(before), str(tmp_path / "run" / "step-3")]
    parents = [read_tensors(tmp_path / "run" / f"step-{seed}") for seed in (1, 2, 3)]
    for name, tensor in read_tensors(after).items():
        mean = torch.stack([each[name].double() for each in parents]).mean(0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_checkpoints_and_averages_in_an_object_store_are_found(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", 1)
    with s3_server() as s3:
        root, before = f"s3://{s3.bucket}/run", f"s3://{s3.bucket}/before"
        for step in (1, 2):
            s3.upload(model, f"run/step-{step}")
        options = raymerge.RunOptions(inline=True, storage=s3.options)
        swept = {"checkpoints": {"root": root, "schedule": "linear"}, "dtype": "float32"}
        ((made, _),) = raymerge.plan_sweep(swept, "merged", options)
        assert list(made.coefficients) == [f"{root}/step-1", f"{root}/step-2"]
        (tmp_path / "one.yml").write_text(made.text)
        raymerge.submit(tmp_path / "one.yml", before, options)
        s3.upload(model, "run/step-3")
        swept["checkpoints"] = {"root": root, "schedule": "linear", "continue": before}
        ((after, _),) = raymerge.plan_sweep(swept, "merged", options)
        assert list(after.coefficients) == [before, f"{root}/step-3"]
