"""Shards, segments, repeated content, the digest, and plans on disk."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import llama_config
from kits.plan_maker import good, header_checkpoint, llama, llama_specs, make_recipe, planned

from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, PlanError, Problem
from raymerge.merge_plan.plan import SCHEMAS, Plan, digest
from raymerge.merge_plan.tables import load_plan, save_plan
from raymerge.methods import BLOCK
from raymerge.planner.inputs.sources import model_references, open_reference, open_sources
from raymerge.planner.merges import build_plan
from raymerge.recipes import Recipe, parse_recipe

Q = "model.layers.{}.self_attn.q_proj.weight"


def _linear(*models: Path, **more: Any) -> dict[str, Any]:
    entries = [{"model": model} for model in models]
    return {"merge_method": "linear", "models": entries, "parameters": {"weight": 1}, **more}


def _large(root: Path, num_elements: int) -> Path:
    specs = {**llama_specs(1), "model.big.weight": (DType.BF16, (num_elements,))}
    return header_checkpoint(root, specs, llama_config(layers=1))


def test_repeated_layers_are_computed_once_and_written_to_each_place(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    piece = {"sources": [{"model": m, "layer_range": [0, 2]} for m in (a, b)]}
    made = good({"merge_method": "linear", "slices": [piece, piece], "parameters": {"weight": 1}})
    rows = made.plan["rows"].to_pylist()
    (first,), (again,) = made.rows(Q.format(1)), made.rows(Q.format(3))
    assert rows[again["copy_of"]] == first
    assert first["also"] == [rows.index(again)]
    assert (again["also"], again["nbytes"]) == ([], first["nbytes"])
    assert sum(row["copy_of"] >= 0 for row in rows) == 18


def test_content_is_compared_beyond_where_it_is_read(tmp_path: Path) -> None:
    """The same bytes under two weights, each twice, in any order."""
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    sources = [{"model": m, "layer_range": [0, 1]} for m in (a, b)]
    data = {"merge_method": "linear", "parameters": {"normalize": False}}
    slices = [{"sources": sources, "parameters": {"weight": weight}} for weight in (1, 2, 2, 3, 1, 3)]
    made = good({**data, "slices": slices})
    rows = made.plan["rows"].to_pylist()
    names = [Q.format(layer) for layer in range(6)]
    firsts = [rows[rows.index(made.rows(name)[0])]["copy_of"] for name in names]
    order = [rows.index(made.rows(name)[0]) for name in names]
    assert firsts == [-1, -1, order[1], -1, order[0], order[3]]


@pytest.mark.parametrize("duplicates", ["keep", "share"])
def test_each_name_has_bytes_of_its_own_under_either_policy(tmp_path: Path, duplicates: str) -> None:
    a = llama(tmp_path / "a")
    piece = {"sources": [{"model": a, "layer_range": [0, 3]}]}
    made = good({"merge_method": "passthrough", "slices": [piece, piece], "duplicates": duplicates})
    assert made.plan.manifest["duplicates"] == duplicates
    places = [(row["shard"], row["offset"]) for row in made.plan["rows"].to_pylist()]
    assert len(set(places)) == len(places)


def test_shard_size_splits_the_output(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    made = good(_linear(a, b, shard_size=8192))
    shards = made.plan["shards"].to_pylist()
    assert len(shards) > 2
    assert shards[0]["name"] == f"model-00001-of-{len(shards):05d}.safetensors"
    data = [shard["nbytes"] - len(shard["header"]) for shard in shards]
    assert sum(data) == sum(made.plan["tensors"].column("nbytes").to_pylist())
    assert max(data) <= 8192
    assert good(_linear(a, b, shard_size=0)).plan["shards"].to_pylist()[0]["name"] == "model.safetensors"


def test_a_tensor_longer_than_a_segment_is_cut_for_element_wise_methods_only(tmp_path: Path) -> None:
    size = 16 * BLOCK + 5
    a, b = _large(tmp_path / "a", size), _large(tmp_path / "b", size)
    both = {"models": [{"model": a}, {"model": b}]}
    by_element = good({"merge_method": "linear", **both, "parameters": {"weight": 1}})
    pieces = by_element.rows("model.big.weight")
    assert len(pieces) > 4
    assert sum(row["num_elements"] for row in pieces) == size
    assert all(row["first_element"] % BLOCK == 0 for row in pieces)
    assert len(by_element.plan["segments"]) > 4
    copied = good({"merge_method": "passthrough", "models": [{"model": a}]})
    assert len(copied.rows("model.big.weight")) > 4
    whole = good({"merge_method": "slerp", "base_model": a, **both, "parameters": {"t": 0.5}})
    assert len(whole.rows("model.big.weight")) == 1
    weights = {"base_model": a, "parameters": {"weight": 1, "density": 0.5}, **both}
    assert len(good({"merge_method": "ties", **weights}).rows("model.big.weight")) == 1
    assert len(good({"merge_method": "dare_ties", **weights}).rows("model.big.weight")) > 4


def test_pieces_of_repeated_content_are_paired_piece_by_piece(tmp_path: Path) -> None:
    specs = {**llama_specs(1), "model.layers.0.mlp.big.weight": (DType.BF16, (9 * BLOCK,))}
    a = header_checkpoint(tmp_path / "a", specs, llama_config(layers=1))
    piece = {"sources": [{"model": a, "layer_range": [0, 1]}]}
    made = good({"merge_method": "passthrough", "slices": [piece, piece]})
    first, again = (made.rows(f"model.layers.{layer}.mlp.big.weight") for layer in range(2))
    rows = made.plan["rows"].to_pylist()
    assert len(first) > 1
    assert [rows[row["copy_of"]] for row in again] == first


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shard_size=st.integers(0, 40_000), layers=st.integers(1, 3), hidden=st.sampled_from([8, 16]))
def test_every_split_gives_a_sound_plan(tmp_path: Path, shard_size: int, layers: int, hidden: int) -> None:
    specs, config = llama_specs(layers, hidden=hidden), llama_config(layers=layers, hidden=hidden)
    a, b = (header_checkpoint(tmp_path / f"{n}{layers}{hidden}", specs, config) for n in "ab")
    made = good(_linear(a, b, shard_size=shard_size))
    assert sorted(made.names()) == sorted(specs)


def test_two_calls_give_equal_plans_and_every_recipe_field_another(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    recipe = make_recipe(_linear(a, b))
    sources = open_sources(recipe)
    plans = [build_plan(recipe, sources, version="0") for _ in range(2)]
    assert plans[0].digest == plans[1].digest
    assert plans[0].tables == plans[1].tables
    changes = ({"seed": 1}, {"dtype": "float32"}, {"shard_size": 9999}, {"duplicates": "share"})
    digests = {planned(_linear(a, b, **change)).plan.digest for change in changes}
    assert len(digests | {plans[0].digest}) == 5
    assert build_plan(recipe, sources, version="1").digest != plans[0].digest


@pytest.mark.parametrize("running", [True, False])
def test_planning_leaves_the_garbage_collector_as_it_was(tmp_path: Path, running: bool) -> None:
    a = llama(tmp_path / "a")
    was_running = gc.isenabled()
    (gc.enable if running else gc.disable)()
    try:
        good(_linear(a))
        assert gc.isenabled() is running
        with pytest.raises(PlanError):
            open_sources(make_recipe(_linear(a, tmp_path / "absent")))
        assert gc.isenabled() is running
        with pytest.raises(PlanError):
            planned({**_linear(a), "merge_method": "none"})
        assert gc.isenabled() is running
    finally:
        (gc.enable if was_running else gc.disable)()


_CHILD = """
import sys
from kits.plan_maker import planned
a, b = sys.argv[1:]
parameters = {"weight": [{"filter": "attn", "value": [0.1, 0.9]}, {"value": 1}], "density": 0.5}
data = {"merge_method": "dare_ties", "base_model": a, "models": [{"model": b}], "parameters": parameters}
print(planned(data).plan.digest)
"""


@pytest.mark.slow
def test_plans_do_not_hang_on_the_hash_seed(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    digests = set()
    for seed in ("0", "1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", _CHILD, str(a), str(b)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        digests.add(done.stdout.strip())
    assert len(digests) == 1


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Plan, Path]:
    """A plan and the directory that it was saved to."""
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    plan = good(_linear(a, b, shard_size=8192)).plan
    save_plan(plan, tmp_path / "plan")
    return plan, tmp_path / "plan"


def test_a_saved_plan_comes_back_as_it_was(saved: tuple[Plan, Path]) -> None:
    plan, directory = saved
    loaded = load_plan(directory)
    assert (loaded.manifest, loaded.digest, loaded.problems) == (plan.manifest, plan.digest, ())
    assert loaded.tables == plan.tables
    assert loaded.expressions == plan.expressions
    assert loaded.require() is loaded


def test_the_digest_does_not_hang_on_how_arrow_cuts_its_columns(saved: tuple[Plan, Path]) -> None:
    plan, _ = saved
    cut = {name: pa.concat_tables([table.slice(0, 1), table.slice(1)]) for name, table in plan.tables.items()}
    assert digest(plan.manifest, cut) == plan.digest
    longer = {name: pa.concat_tables([table, table]).combine_chunks() for name, table in plan.tables.items()}
    rest = {name: longer[name].slice(table.num_rows) for name, table in plan.tables.items()}
    assert digest(plan.manifest, rest) == plan.digest


def test_the_digest_tells_texts_apart_that_are_the_same_in_a_row(saved: tuple[Plan, Path]) -> None:
    plan, _ = saved

    def told(*names: str) -> str:
        table = pa.table([list(names), [b""] * len(names)], schema=SCHEMAS["files"])
        return digest(plan.manifest, {**plan.tables, "files": table})

    texts = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("ü", "b"), ("", ""), ("",), ()]
    assert len({told(*names) for names in texts}) == len(texts)


def _refused(directory: Path) -> str:
    with pytest.raises(PlanError) as caught:
        load_plan(directory)
    assert all(problem.remedy == "Start again with --replace." for problem in caught.value.problems)
    return str(caught.value)


USED = sorted(set(SCHEMAS) - {"assemblies", "terms", "factors", "runs", "scales", "files"})
"""Tables that have rows in such plans."""


@pytest.mark.parametrize("name", USED)
def test_a_changed_value_in_any_table_is_refused(saved: tuple[Plan, Path], name: str) -> None:
    plan, directory = saved
    table = plan[name]
    changed = pa.concat_tables([table.slice(1), table.slice(0, 1)])
    with pa.ipc.new_file(directory / f"{name}.arrow", table.schema) as writer:
        writer.write_table(changed)
    assert "was changed" in _refused(directory)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(SCHEMAS)), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_gives_the_same_plan_or_a_refusal(
    saved: tuple[Plan, Path], name: str, place: float, bit: int
) -> None:
    plan, directory = saved
    path = directory / f"{name}.arrow"
    before = path.read_bytes()
    data = bytearray(before)
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data)
    try:
        # Padding between Arrow's buffers may change: nobody reads it.
        assert load_plan(directory).tables == plan.tables
    except PlanError:
        pass
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("text", "words"), [("", "cannot be read"), ("[]", "cannot be read"), ('{"digest": ""}', "cannot be")]
)
def test_a_broken_manifest_is_refused(saved: tuple[Plan, Path], text: str, words: str) -> None:
    _, directory = saved
    (directory / "manifest.json").write_text(text)
    assert words in _refused(directory)


def test_a_changed_manifest_a_missing_table_and_another_format_are_refused(saved: tuple[Plan, Path]) -> None:
    _, directory = saved
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "seed": 8}))
    assert "was changed" in _refused(directory)
    path.write_text(json.dumps({**manifest, "format": 0}))
    assert "of another version" in _refused(directory)
    (directory / "rows.arrow").unlink()
    assert "rows.arrow" in _refused(directory)


def test_a_plan_that_agrees_with_its_digest_but_not_with_itself_is_refused(saved: tuple[Plan, Path]) -> None:
    plan, directory = saved
    tables = {**plan.tables, "segments": plan["segments"].slice(1)}
    save_plan(replace(plan, tables=tables, digest=digest(plan.manifest, tables)), directory)
    assert "they do not take every row once" in _refused(directory)


def test_only_a_plan_without_problems_is_let_through(saved: tuple[Plan, Path]) -> None:
    plan, _ = saved
    with pytest.raises(PlanError, match=r"here: it is so\. Change it\."):
        replace(plan, problems=(Problem("here", "it is so.", "Change it."),)).require()


def test_sources_are_opened_once_each_with_the_base_first(tmp_path: Path) -> None:
    a, b, c = (llama(tmp_path / name) for name in "abc")
    recipe = make_recipe({**_linear(a, b, a), "base_model": c})
    assert [source.name for source in open_sources(recipe)] == [str(c), str(a), str(b)]
    assert [source.index for source in open_sources(recipe)] == [0, 1, 2]
    assert len(list(model_references(recipe))) == 4


def test_every_model_that_cannot_be_read_is_reported_with_its_place(tmp_path: Path) -> None:
    a = llama(tmp_path / "a")
    recipe = make_recipe({**_linear(a, tmp_path / "none"), "base_model": f"{a}+{a}"})
    (tmp_path / "none").mkdir()
    with pytest.raises(PlanError) as caught:
        open_sources(recipe)
    problems = [str(problem) for problem in caught.value.problems]
    assert "base_model" in problems[0]
    assert "is a model, not an adapter" in problems[0]
    assert "models[1].model" in problems[1]
    with pytest.raises(CheckpointError):
        open_reference(recipe.models[1].model)


def test_comments_and_layout_of_a_recipe_change_no_digest(tmp_path: Path) -> None:
    model = llama(tmp_path / "a")
    text = f"merge_method: passthrough\nmodels: [{{model: {model}}}]\n"
    plans = []
    for each in (text, f"# a word\n\n{text}seed: 0\n"):
        recipe = parse_recipe(each, "r.yml")
        assert isinstance(recipe, Recipe)
        plans.append(build_plan(recipe, open_sources(recipe), version="0"))
    assert plans[0].manifest["recipe_text"] != plans[1].manifest["recipe_text"]
    assert plans[0].digest == plans[1].digest
