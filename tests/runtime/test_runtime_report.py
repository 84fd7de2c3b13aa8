"""Reports measure what float64 over whole arrays gives: of plain, fused and quantised tensors, before a merge
and after it."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from kits import permuted_experts as mixtures
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import read_tensors
from kits.measured_arrays import Arrays, measure
from kits.quantised_models import deepseek_v3
from kits.recipe_maker import linear
from kits.tensor_scaled_models import fp8_llama
from numpy.typing import NDArray

from raymerge.api import RunOptions, report, report_difference, submit
from raymerge.errors import CheckpointError, OptionError
from raymerge.verifier.measurements import ARRAYS, Measurements, Report

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart" / "models"
PARENTS = ("code", "english")
INLINE = RunOptions(inline=True, threads=1)
CLOSE = [name for name in ARRAYS if name not in ("overlap", "sketches", "encoding_errors")]


def arrays(root: Path) -> Arrays:
    return {name: value.double().numpy() for name, value in read_tensors(root).items()}


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = {
        "merge_method": "ties",
        "base_model": str(QUICKSTART / "base"),
        "models": [
            {"model": str(QUICKSTART / name), "parameters": {"weight": 0.5, "density": 0.6}}
            for name in PARENTS
        ],
        "dtype": "bfloat16",
    }
    out = tmp_path_factory.mktemp("report") / "merged"
    submit(recipe, out, INLINE)
    return out


def expected(merged: Path | None) -> Measurements:
    sources = [arrays(QUICKSTART / name) for name in PARENTS]
    return measure(sources, arrays(QUICKSTART / "base"), None if merged is None else arrays(merged))


def check_equal(found: Measurements, expected: Measurements) -> None:
    order = {label.part: number for number, label in enumerate(expected.labels)}
    rows = [order[label.part] for label in found.labels]
    assert sorted(rows) == list(range(len(expected)))
    for name in CLOSE:
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name)[rows], rtol=1e-9, atol=1e-9, err_msg=name
        )


@pytest.mark.slow
def test_numbers_of_a_merge_are_those_of_whole_arrays(merged: Path) -> None:
    made = report(merged, INLINE, is_exact=True)
    check_equal(made.measurements, expected(merged))
    theirs = expected(merged)
    order = [label.part for label in theirs.labels]
    rows = [order.index(label.part) for label in made.measurements.labels]
    # Where changes are equally large, any of them is among the largest fifth: of norms that is many.
    off = np.abs(made.measurements.overlaps - theirs.overlaps[rows])
    assert off[[label.role != "norm" for label in made.measurements.labels]].max() < 0.03
    assert (made.kind, made.method, made.base) == ("merge", "ties", str(QUICKSTART / "base"))
    assert [Path(each).name for each in made.parents] == list(PARENTS)
    assert {label.role for label in made.measurements.labels} == {"embedding", "norm", "mlp", "attention"}
    assert made.nbytes_by_use == {"merged": 3 * sum(value.nbytes // 4 for value in arrays(merged).values())}


def test_a_recipe_is_measured_before_it_is_merged(merged: Path) -> None:
    made = report(merged / "raymerge" / "recipe.yml", INLINE, is_exact=True)
    check_equal(made.measurements, expected(None))
    assert made.kind == "recipe"
    assert np.isnan(made.measurements.shares).all()


def test_a_sample_is_right_within_the_error_that_it_states(merged: Path) -> None:
    sampled, exact = (report(merged, INLINE, is_exact=each).measurements for each in (False, True))
    assert sampled.sampled.sum() < 0.7 * exact.sampled.sum() == 0.7 * exact.elements.sum()
    ours, theirs = sampled.grouped("role"), exact.grouped("role")
    norms = [np.sqrt(np.einsum("njj->n", each.gram)) for each in (ours, theirs)]
    off = np.abs(norms[0] / norms[1] - 1)
    assert (off <= 4 * ours.standard_error + 1e-12).all()
    assert ours.standard_error.max() > 0
    assert not theirs.standard_error.any()


def test_numbers_hang_on_neither_threads_nor_memory_nor_workers(merged: Path) -> None:
    one, other = (
        report(merged, RunOptions(inline=True, threads=threads, memory=memory)).measurements
        for threads, memory in ((1, 16 << 20), (2, None))
    )
    for name in ARRAYS:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.labels == other.labels


def test_a_report_comes_back_from_its_file(merged: Path, tmp_path: Path) -> None:
    made = report(merged, INLINE)
    made.save(tmp_path / "numbers.parquet")
    again = Report.load(tmp_path / "numbers.parquet")
    assert again.measurements.labels == made.measurements.labels
    for name in ARRAYS:
        assert np.array_equal(getattr(again.measurements, name), getattr(made.measurements, name)), name
    assert (again.parents, again.base, again.speeds) == (made.parents, made.base, made.speeds)


def stored_experts(root: Path, family: mixtures.Family) -> dict[tuple[str, int], NDArray[np.float64]]:
    """The elements of each expert in each tensor that has experts, as they are stored."""
    found = {}
    for name, values in arrays(root).items():
        number = re.search(r"experts\.(\d+)\.", name)
        if number:
            found[name, int(number[1])] = values.ravel()
        elif ".experts." in name and values.ndim > 2:
            found |= {(name, expert): values[expert].ravel() for expert in range(family.experts)}
    return found


@pytest.mark.parametrize(
    "family", [mixtures.QWEN, mixtures.FUSED, mixtures.GPT_OSS], ids=lambda each: each.layout
)
@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_experts_are_measured_one_by_one(family: mixtures.Family, method: str, tmp_path: Path) -> None:
    base = mixtures.make_model(family, 0)
    models = {"a": base, "b": mixtures.noisy(base, 1, 0.1)}
    one, two = (mixtures.store(tmp_path / name, model, family) for name, model in models.items())
    delta = {"model": str(two), "parameters": {"weight": 1.0}}
    recipe = {"merge_method": method, "base_model": str(one), "models": [delta]}
    made = report(recipe, INLINE, is_exact=True).measurements
    before, after = stored_experts(one, family), stored_experts(two, family)
    changes: dict[tuple[str, int], float] = defaultdict(float)
    for label, gram in zip(made.labels, made.gram[:, 0, 0], strict=True):
        if label.expert >= 0 and not label.tensor.endswith("_bias"):
            changes[label.tensor, label.expert] += gram
    assert changes.keys() == before.keys()
    for place, values in before.items():
        delta = after[place] - values
        assert changes[place] == pytest.approx(delta @ delta, rel=1e-9), place


def test_rows_of_routers_tell_where_experts_went(tmp_path: Path) -> None:
    family = mixtures.QWEN
    base = mixtures.make_model(family, 0)
    other = mixtures.moved(base, family, 3)
    roots = [mixtures.store(tmp_path / name, model, family) for name, model in (("a", base), ("b", other))]
    made = report_difference(*roots, INLINE)
    assert [each.layer for each in made.routers] == list(range(family.layers))
    for each in made.routers:
        name = f"model.layers.{each.layer}.mlp.gate.weight"
        rows = [model[name].double().numpy() for model in (other, base)]
        came_from = [int(np.abs(rows[1] - row).sum(1).argmin()) for row in rows[0]]
        assert list(each.nearest) == came_from != list(range(family.experts))
        assert min(each.nearest_cosines) == pytest.approx(1.0)
        assert (each.first, each.second) == (0, -1)


def test_codes_with_scales_are_measured_as_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    one, two = (deepseek_v3(tmp_path / str(seed), seed) for seed in (1, 2))
    made = report_difference(one.root, two.root, INLINE, is_exact=True).measurements
    changes = {
        label.part: change for label, change in zip(made.labels, made.relative_change[:, 0], strict=True)
    }
    coded = [name for name in one.values if name in changes and name.endswith("proj.weight")]
    assert len(coded) > 10
    for name in coded:
        base, delta = one.values[name], two.values[name] - one.values[name]
        assert changes[name] == pytest.approx(np.linalg.norm(delta) / np.linalg.norm(base), rel=1e-6), name


def test_a_report_needs_the_plan_and_the_sources(merged: Path, tmp_path: Path) -> None:
    gone = shutil.copytree(QUICKSTART / "code", tmp_path / "code")
    recipe = yaml.safe_load((merged / "raymerge" / "recipe.yml").read_text())
    recipe["models"][0]["model"] = str(gone)
    out = tmp_path / "out"
    submit(recipe, out, INLINE)
    shutil.rmtree(gone)
    with pytest.raises(CheckpointError, match="Say where it is as it was: --source"):
        report(out, INLINE)
    moved = report(out, INLINE, sources={str(gone): str(QUICKSTART / "code")})
    assert len(moved.measurements) == len(expected(None))
    with pytest.raises(OptionError, match="--memory"):
        report(merged, RunOptions(inline=True, memory=1 << 20))
    shutil.rmtree(out / "raymerge")
    with pytest.raises(CheckpointError, match="keeps no plan"):
        report(out, INLINE)


def test_a_tensor_of_one_model_alone_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    made = report(linear(QUICKSTART / "code", dtype="float16"), INLINE)
    assert len(made.measurements) == 0
    assert set(made.skipped or ()) == {"it is made of one model alone, with nothing to compare"}
    made.save(tmp_path / "numbers.parquet")
    assert len(Report.load(tmp_path / "numbers.parquet").measurements) == 0


def test_the_speed_of_a_stage_and_of_copies_is_told_apart(tmp_path: Path) -> None:
    prompts = {name: {"source_model": str(QUICKSTART / name), "positive_prompts": [name]} for name in PARENTS}
    mixture = {"base_model": str(QUICKSTART / "base"), "gate_mode": "cheap_embed", "dtype": "bfloat16"}
    submit({**mixture, "experts": list(prompts.values())}, tmp_path / "out", INLINE)
    made = report(tmp_path / "out", INLINE)
    speeds = {each.stage: each for each in made.speeds}
    stage = next(name for name in speeds if name.startswith("router rows"))
    assert speeds[stage].written_bytes > 0
    assert speeds["copied"].written_bytes > speeds.get("merged", speeds[stage]).written_bytes
    assert made.nbytes_by_use is not None
    assert made.nbytes_by_use["copied"] > 3e6


def test_pairs_are_compared_where_they_meet(tmp_path: Path) -> None:
    sources = {name: str(QUICKSTART / name) for name in ("code", "english", "french")}
    layers = [({"code", "english"}, 0, 3), ({"french", "english"}, 3, 6)]
    slices = [
        {"sources": [{"model": sources[name], "layer_range": [a, b]} for name in sorted(names)]}
        for names, a, b in layers
    ]
    base = {"model": str(QUICKSTART / "base")}
    for each, (_, a, b) in zip(slices, layers, strict=True):
        each["sources"].append({**base, "layer_range": [a, b]})
    recipe = {"merge_method": "task_arithmetic", "base_model": base["model"], "slices": slices}
    recipe["parameters"] = {"weight": 0.5}
    made = report(recipe, INLINE, is_exact=True)
    whole = made.measurements.where(
        np.array([label.layer >= 0 for label in made.measurements.labels])
    ).grouped()
    code, english, french = ([Path(each).name for each in made.parents].index(name) for name in sources)
    assert np.isnan(whole.pair_conflict[0, code, french])
    one, two, origin = (arrays(QUICKSTART / name) for name in ("code", "english", "base"))
    names = [name for name in one if re.search(r"layers\.[012]\.", name)]
    d, e = (np.concatenate([(each[name] - origin[name]).ravel() for name in names]) for each in (one, two))
    conflict = 1 - np.abs(d + e).sum() / (np.abs(d).sum() + np.abs(e).sum())
    assert whole.pair_conflict[0, code, english] == pytest.approx(conflict)
    assert whole.cosines[0, code, english] == pytest.approx(d @ e / np.sqrt((d @ d) * (e @ e)))


def test_a_parent_is_one_with_its_adapter_and_its_aligned_experts(tmp_path: Path) -> None:
    adapter = tiny_lora(tmp_path / "adapter", read_tensors(QUICKSTART / "base"), 0)
    recipe = linear(f"{QUICKSTART / 'base'}+{adapter}", QUICKSTART / "code", dtype="bfloat16")
    made = report(recipe, INLINE, is_exact=True)
    assert len(made.parents) == 2
    assert (made.measurements.present > 0).all()
    family = mixtures.QWEN
    base = mixtures.make_model(family, 0)
    models = {"one": base, "two": mixtures.moved(base, family, 3)}
    roots = [mixtures.store(tmp_path / name, model, family) for name, model in models.items()]
    submit(
        linear(*roots, align="experts"), tmp_path / "out", RunOptions(inline=True, keep_intermediates=True)
    )
    aligned = report(tmp_path / "out", INLINE, is_exact=True)
    assert [Path(each).name for each in aligned.parents] == ["one", "two"]
    assert len(aligned.measurements) == len(base)


def test_scales_of_activations_are_no_changes(tmp_path: Path) -> None:
    one, two = (fp8_llama(tmp_path / str(seed), seed) for seed in (1, 2))
    made = report_difference(one.root, two.root, INLINE, is_exact=True)
    assert [Path(each).name for each in made.parents] == ["2"]
    assert not [label.tensor for label in made.measurements.labels if label.tensor.endswith("_scale")]


def test_of_several_merges_one_that_can_be_measured_is(tmp_path: Path) -> None:
    code, english, french = (str(QUICKSTART / name) for name in ("code", "english", "french"))
    first, last = linear(code, english, name="half"), linear("half", french, name="whole")
    (tmp_path / "several.yml").write_text(yaml.safe_dump_all([first, last]))
    made = report(tmp_path / "several.yml", INLINE)
    assert list(made.parents) == [code, english]
    assert made.name.endswith("several.yml: half")
