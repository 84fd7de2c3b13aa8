"""Plans that stand for checkpoints, and whole plans as text, compared line by line.

``RAYMERGE_UPDATE_GOLDEN=1 pytest tests/planner/test_planner_planned.py`` writes the texts anew.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.chains import documents
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint
from kits.marks import one_in, slow_but
from kits.plan_maker import Specs, good, header_checkpoint, llama_specs, plan_text, planned
from kits.recipe_maker import linear, one, piece, stack
from safetensors.torch import save_file

from raymerge.api import submit
from raymerge.checkpoints.source import Checkpoint, WeightFile, open_checkpoint, same_bytes
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, PlanError, Problem
from raymerge.merge_plan.plan import Plan
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import open_models, open_reference
from raymerge.planner.merges import PlannedMerge, build_plan, plan_merges, planned_checkpoint
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.load import recipe_from_mapping
from raymerge.recipes.order import merge_order
from raymerge.recipes.schema import Recipe

INLINE = RunOptions(inline=True)
ABSENT = Path("nowhere") / "steps"
COMPANIONS = {"tokenizer.model": b"pieces", "README.md": b"not copied", "code/model.py": b"pass"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models ``one`` and ``two``, and tied ones."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two")):
        tiny_llama(root / name, seed)
        for key, content in COMPANIONS.items():
            (root / name / key).parent.mkdir(exist_ok=True)
            (root / name / key).write_bytes(content)
        tiny_llama(root / f"{name}-tied", seed, tie=True)
    return root


def _recipes(root: Path, changed: Mapping[str, Any] | None = None) -> tuple[Recipe, ...]:
    found = documents(root=str(root))
    found[0] |= changed or {}
    read = [recipe_from_mapping(each, f"recipes[{index}]") for index, each in enumerate(found)]
    return merge_order([each for each in read if isinstance(each, Recipe)])


def _plans(recipes: Sequence[Recipe], **rest: Any) -> tuple[PlannedMerge, ...]:
    return plan_merges(recipes, ABSENT, version="1", **rest)


def _promised(data: Mapping[str, Any]) -> Checkpoint:
    made = planned(data)
    donor = made.sources[made.plan.manifest["donor"]]
    return planned_checkpoint(made.plan, ABSENT, name="left", donor=donor)


def _without_versions(files: Sequence[WeightFile]) -> list[tuple[str, int, str]]:
    return [(file.key, file.nbytes, file.header_digest) for file in files]


def _assert_kept(promised: Checkpoint, found: Checkpoint) -> None:
    assert promised.tensors == found.tensors
    assert list(promised.tensors) == list(found.tensors)
    assert _without_versions(promised.files) == _without_versions(found.files)
    assert (promised.config, promised.companions) == (found.config, found.companions)
    assert (promised.notes, promised.name) == (found.notes, found.name)


def _mean(root: Path, names: Sequence[str] = ("one", "two"), **more: Any) -> dict[str, Any]:
    return linear(*(root / name for name in names), **more)


def _stack(root: Path, name: str) -> dict[str, Any]:
    return stack(piece(root / name, 0, 2), piece(root / name, 1, 3))


def _untied(root: Path) -> dict[str, Any]:
    """A stack that ends in another model than it begins with, so that its head is written."""
    return stack(*(piece(root / f"{name}-tied", 0, 3) for name in ("one", "two")))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "make",
    one_in(
        2,
        [
            lambda root: _mean(root, dtype="float32", shard_size=20_000),
            _mean,
            lambda root: _mean(root, ("one-tied", "two-tied")),
            lambda root: _stack(root, "one"),
            lambda root: _stack(root, "two-tied"),
            _untied,
        ],
    ),
)
def test_what_a_plan_promises_is_what_the_merge_makes(make: Any, models: Path, tmp_path: Path) -> None:
    data = make(models)
    promised = _promised(data)
    submit(data, tmp_path / "out", INLINE)
    _assert_kept(promised, open_checkpoint(tmp_path / "out", "left"))


def _unsigned(plan: Plan) -> dict[str, Any]:
    """The manifest without the digests of the plans that its sources are made by."""
    manifest = copy.deepcopy(dict(plan.manifest))
    for source in manifest["sources"]:
        source.pop("made_by", None)
    return manifest


@pytest.mark.parametrize("suffix", slow_but(["", "-tied"], "-tied"))
def test_a_plan_over_promises_is_the_plan_over_finished_checkpoints(
    suffix: str, models: Path, tmp_path: Path
) -> None:
    root = tmp_path / "models"
    root.mkdir()
    for name in ("one", "two"):
        (root / name).symlink_to(models / f"{name}{suffix}")
    merges = _plans(_recipes(root))
    places: dict[str, Path] = {}

    def opener(reference: ModelReference) -> Checkpoint:
        place = places.get(reference.path)
        return open_checkpoint(place, str(reference)) if place is not None else open_reference(reference)

    for merge in merges:
        sources = open_models(merge.recipe, opener=opener).require()
        finished = build_plan(merge.recipe, sources, version="1")
        assert _unsigned(merge.plan) == _unsigned(finished)
        assert all(merge.plan[name].equals(table) for name, table in finished.tables.items())
        place = tmp_path / str(merge.recipe.name)
        places[str(merge.recipe.name)] = place
        _make(merge, places, place)


def _make(merge: PlannedMerge, places: Mapping[str, Path], output: Path) -> None:
    data = merge.recipe.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
    for entry in data["models"]:
        entry["model"] = str(places.get(entry["model"], entry["model"]))
    if "base_model" in data:
        data["base_model"] = str(places.get(data["base_model"], data["base_model"]))
    submit(data, output, INLINE)


def test_a_head_that_stays_equal_to_its_embedding_is_known_without_reading(tmp_path: Path) -> None:
    """Both are stored and the config calls them one: of a finished model, only their bytes could tell."""
    for seed, name in enumerate(("one", "two")):
        tensors = read_tensors(tiny_llama(tmp_path / name, seed))
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        write_checkpoint(tmp_path / name, tensors, llama_config(tie=True))
    promised = _promised(_mean(tmp_path))
    submit(_mean(tmp_path), tmp_path / "out", INLINE)
    found = open_checkpoint(tmp_path / "out", "left")
    _assert_kept(promised, found)
    for checkpoint in (promised, found):
        head, embedding, norm = (
            checkpoint.tensors[name]
            for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")
        )
        assert same_bytes(checkpoint, head, embedding)
        assert not same_bytes(checkpoint, head, norm)
    merges = _plans(_recipes(tmp_path))
    assert all(source.stored_head_is_embedding for merge in merges for source in merge.sources)


def test_companions_that_are_written_reach_the_merges_behind(models: Path) -> None:
    """A chat template changes a file of the tokenizer, which the next merges copy."""
    template = "{{ messages }}, as the recipe has it"
    first = _mean(models, chat_template=template) | {"name": "first"}
    second = {**first, "name": "second", "chat_template": None, "models": [{"model": "first"}] * 2}
    third = one("second")
    second["parameters"] = {"weight": 0.5}
    read = [recipe_from_mapping(each) for each in (first, second, third)]
    merges = _plans([each for each in read if isinstance(each, Recipe)])
    for merge in merges[1:]:
        (checkpoint,) = (source.checkpoint for source in merge.sources)
        assert checkpoint.unwritten is not None
        written = checkpoint.unwritten.written
        assert template in b"".join(written.values()).decode()
        assert {*written} <= {*checkpoint.companions}


def test_a_merge_of_tensors_alone_promises_tensors_alone(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for name in ("one", "two"):
        save_file({"a.weight": torch.ones(4, 4), "b.weight": torch.ones(3)}, files / f"{name}.safetensors")
    data = _mean(files, ("one.safetensors", "two.safetensors"))
    promised = _promised(data)
    submit(data, tmp_path / "out", INLINE)
    _assert_kept(promised, open_checkpoint(tmp_path / "out", "left"))
    assert promised.is_raw


def test_plans_know_by_what_plans_their_sources_are_made(models: Path) -> None:
    left, right, last = _plans(_recipes(models))
    assert (left.uses, right.uses) == ({}, {1: "left"})
    assert {last.uses[index] for index in last.uses} == {"left", "right"}
    made_by = {source["name"]: source.get("made_by") for source in last.plan.manifest["sources"]}
    assert made_by == {"left": left.plan.digest, "right": right.plan.digest}
    assert "made_by" not in left.plan.manifest["sources"][0]


def test_a_change_of_numbers_changes_every_plan_behind_it(models: Path) -> None:
    before = [merge.plan.digest for merge in _plans(_recipes(models))]
    entries = documents(root=str(models))[0]["models"]
    entries[0]["parameters"] = {"weight": 0.3}
    after = [merge.plan.digest for merge in _plans(_recipes(models, {"models": entries}))]
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert before == [merge.plan.digest for merge in _plans(_recipes(models))]


def _problems(data: Sequence[Mapping[str, Any]]) -> tuple[Problem, ...]:
    read = [recipe_from_mapping(each, f"recipes[{index}]") for index, each in enumerate(data)]
    with pytest.raises(PlanError) as caught:
        _plans(merge_order([each for each in read if isinstance(each, Recipe)]))
    return caught.value.problems


def test_problems_of_all_merges_come_at_once_and_say_of_which(models: Path) -> None:
    data = documents(root=str(models))
    data[0]["models"][0]["parameters"]["wieght"] = 1
    data[1] |= {"base_model": str(models / "one"), "models": [{"model": str(models / "two")}]}
    found = _problems(data)
    assert [problem.where.split(":")[0] for problem in found] == ["recipes[0]", "recipes[1]"]
    assert "'wieght'" in found[0].what
    assert "'weight'" in found[1].what


def test_a_problem_that_knows_only_its_model_is_told_of_its_merge(models: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "odd", {"odd.weight": torch.ones(3)}, {"model_type": "odd"})
    data = documents(root=str(models))
    data[0]["models"][1]["model"] = str(tmp_path / "odd")
    assert all(problem.where.startswith("recipes[0]") for problem in _problems(data))


def test_models_are_looked_for_even_behind_a_broken_merge(models: Path) -> None:
    data = documents(root=str(models))
    data[0]["models"][0]["model"] = str(models / "absent")
    data[1]["models"][1]["model"] = str(models / "missing")
    data[1]["base_model"] = str(models / "missing")
    found = _problems(data)
    assert [problem.where.split("/")[-1] for problem in found] == ["absent", "missing"]
    assert found[1].where.startswith("recipes[1]: base_model")


def test_the_last_plan_is_shown_with_its_problems(models: Path) -> None:
    data = documents(root=str(models))
    data[2]["parameters"]["lamda"] = 1.0
    read = [recipe_from_mapping(each, f"recipes[{index}]") for index, each in enumerate(data)]
    *before, last = _plans([each for each in read if isinstance(each, Recipe)])
    assert all(merge.plan.problems == () for merge in before)
    (problem,) = last.plan.problems
    assert problem.where.startswith("recipes[2]")


@pytest.mark.parametrize(("named", "guess"), [("lfet", "Did you mean 'left'?"), ("quite-else", "")])
def test_a_name_that_nothing_has_is_told_the_names_of_the_merges(
    named: str, guess: str, models: Path
) -> None:
    data = documents(root=str(models))
    data[1]["models"][0]["model"] = named
    (problem,) = _problems(data)
    assert f"{guess} The merges of this file are 'left', 'right'.".strip() in problem.remedy
    assert "models[0].model" in problem.where


def test_a_path_is_not_taken_for_a_name(models: Path) -> None:
    data = documents(root=str(models))
    data[1]["models"][0]["model"] = str(models / "lfet")
    (problem,) = _problems(data)
    assert "merges of this file" not in problem.remedy


def test_adapters_do_not_stand_among_several_merges(models: Path) -> None:
    data = documents(root=str(models))
    data[1]["models"][1]["model"] = f"{models / 'two'}+left"
    data[2]["adapter"] = {}
    found = _problems([*data[:2], data[2]])
    assert ["its result is a model, and no adapter" in each.what for each in found] == [True, False]
    assert "a file of its own" in found[1].remedy
    data[1]["models"][1]["model"] = str(models / "two")
    (problem,) = _problems(data)
    assert "a file of its own" in problem.remedy


def test_an_opener_of_the_callers_own_is_asked_for_models_alone(models: Path) -> None:
    asked: list[str] = []

    def opener(reference: ModelReference) -> Checkpoint:
        asked.append(Path(reference.path).name)
        return open_reference(reference)

    _plans(_recipes(models), opener=opener)
    assert set(asked) == {"one", "two"}

    def refuse(reference: ModelReference) -> Checkpoint:
        raise CheckpointError(Problem(reference.path, "it is locked.", "Unlock it."))

    with pytest.raises(PlanError, match="it is locked"):
        _plans(_recipes(models), opener=refuse)


GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "plans"
Data = Mapping[str, Any]


def _llama(root: Path, extra: Specs | None = None, **config: Any) -> Path:
    specs = {**llama_specs(2, hidden=8, tie=bool(config.get("tie_word_embeddings"))), **(extra or {})}
    return header_checkpoint(root, specs, {**llama_config(layers=2, hidden=8), **config})


def _models(*roots: Path) -> list[dict[str, Any]]:
    return [{"model": root} for root in roots]


def _mean_of_two(root: Path) -> Data:
    """Also another dtype, a file limit, and a recomputed buffer."""
    buffer: Specs = {"model.layers.0.self_attn.rotary_emb.inv_freq": (DType.F32, (4,))}
    norm: Specs = {"model.norm.weight": (DType.F32, (8,))}
    a, b = _llama(root / "a", norm), _llama(root / "b", {**norm, **buffer})
    return linear(a, b, dtype="float16", shard_size=2000)


def _experts(root: Path) -> Data:
    """Interleaved columns in the base, one tensor an expert in the fine-tune."""
    e, f, d = 2, 3, 4
    rest: Specs = {"model.embed_tokens.weight": (DType.BF16, (8, d)), "lm_head.weight": (DType.BF16, (8, d))}
    block = "model.layers.0.{}.experts"
    fused: Specs = {
        "model.layers.0.mlp.router.weight": (DType.BF16, (e, d)),
        f"{block.format('mlp')}.gate_up_proj": (DType.BF16, (e, d, 2 * f)),
        f"{block.format('mlp')}.down_proj": (DType.BF16, (e, f, d)),
    }
    alone = {
        f"{block.format('block_sparse_moe')}.{expert}.{word}.weight": (DType.BF16, shape)
        for expert in range(e)
        for word, shape in (("w1", (f, d)), ("w2", (d, f)), ("w3", (f, d)))
    }
    alone["model.layers.0.block_sparse_moe.gate.weight"] = (DType.BF16, (e, d))
    fields = {"num_hidden_layers": 1, "num_local_experts": e, "hidden_size": d, "intermediate_size": f}
    base = header_checkpoint(root / "base", {**rest, **fused}, {**fields, "model_type": "gpt_oss"})
    tuned = header_checkpoint(root / "tuned", {**rest, **alone}, {**fields, "model_type": "mixtral"})
    named = {"model": str(tuned), "override_architecture": "Any"}
    return {
        "merge_method": "dare_linear",
        "base_model": {"model": str(base), "override_architecture": "Any"},
        "models": [{"model": named}],
        "parameters": {"weight": 0.5, "density": 0.5},
        "seed": 7,
    }


def _modules(root: Path) -> Data:
    vision: Specs = {
        "model.visual.blocks.0.attn.qkv.weight": (DType.BF16, (4, 4)),
        "model.visual.merger.mlp.weight": (DType.BF16, (4, 4)),
    }
    text = {
        name.replace("model.", "model.language_model.", 1): s for name, s in llama_specs(2, hidden=8).items()
    }
    config = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Some"],
        "text_config": {"num_hidden_layers": 2},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": False,
    }
    a, b = (header_checkpoint(root / name, {**text, **vision}, config) for name in "ab")
    pieces = [piece((a, b), 1, 2), piece((b, a), 0, 2, parameters={"weight": 2})]
    modules = {"text_decoder": {"slices": pieces}, "vision_tower": {"models": _models(b)}}
    return {"merge_method": "linear", "modules": modules, "parameters": {"weight": 1}}


def _odds_and_ends(root: Path) -> Data:
    """Missing, extra and integer tensors, and a base that only gives names."""
    integers: Specs = {"model.positions": (DType.I64, (2,))}
    base = _llama(root / "base", integers)
    a = _llama(root / "a", {**integers, "model.more.weight": (DType.BF16, (2,))})
    specs = llama_specs(2, hidden=8)
    kept = {name: spec for name, spec in specs.items() if name != "model.norm.weight"}
    b = header_checkpoint(root / "b", kept, llama_config(layers=2, hidden=8))
    entries = _models(a, b)
    for entry in entries:
        entry["parameters"] = {"weight": 1}
    policies = {"missing_tensors": "copy_base", "extra_tensors": "drop"}
    return {"merge_method": "linear", "base_model": base, "models": entries, **policies}


RECIPES: Mapping[str, Callable[[Path], Data]] = {
    "experts": _experts,
    "mean-of-two": _mean_of_two,
    "modules": _modules,
    "odds-and-ends": _odds_and_ends,
}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_plan_is_what_it_was(tmp_path: Path, name: str) -> None:
    text = plan_text(good(RECIPES[name](tmp_path)))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("RAYMERGE_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_every_golden_plan_has_its_recipe() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(RECIPES)
