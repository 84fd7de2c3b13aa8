"""Tensors one at a time, shards, segments, repeated content, the digest, and plans on disk."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import llama_config, read_tensors
from kits.merge_cases import make_family
from kits.merges import STACK, make_models
from kits.plan_damage import with_table
from kits.plan_maker import Specs, good, header_checkpoint, llama, llama_specs, make_recipe, planned, refusals
from kits.quantised_models import gpt_oss
from kits.recipe_maker import linear, one, stack, twice

from raymerge.api import plan
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, PlanError
from raymerge.merge_plan.expressions import Read, Scales
from raymerge.merge_plan.files_read import files_read
from raymerge.merge_plan.jobs import Jobs
from raymerge.merge_plan.plan import SCHEMAS, Plan, digest
from raymerge.merge_plan.report import DuplicateGroup, found_duplicates, planned_duplicates
from raymerge.merge_plan.tables import load_plan, save_plan
from raymerge.methods import BLOCK
from raymerge.planner.inputs.sources import collector_paused, model_references, open_models, open_reference
from raymerge.planner.merges import build_plan
from raymerge.recipes.load import parse_recipe
from raymerge.recipes.schema import Recipe

Q = "model.layers.{}.self_attn.q_proj.weight"


def _large(root: Path, num_elements: int) -> Path:
    specs = {**llama_specs(1), "model.big.weight": (DType.BF16, (num_elements,))}
    return header_checkpoint(root, specs, llama_config(layers=1))


def test_repeated_layers_are_computed_once_and_written_to_each_place(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    made = good(twice(a, b, 2))
    rows = made.plan["ops"].to_pylist()
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
    rows = made.plan["ops"].to_pylist()
    names = [Q.format(layer) for layer in range(6)]
    firsts = [rows[rows.index(made.rows(name)[0])]["copy_of"] for name in names]
    order = [rows.index(made.rows(name)[0]) for name in names]
    assert firsts == [-1, -1, order[1], -1, order[0], order[3]]


def test_shard_size_splits_the_output(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    made = good(linear(a, b, shard_size=8192))
    shards = made.plan["shards"].to_pylist()
    assert len(shards) > 2
    assert shards[0]["name"] == f"model-00001-of-{len(shards):05d}.safetensors"
    data = [shard["nbytes"] - len(shard["header"]) for shard in shards]
    assert sum(data) == sum(made.plan["tensors"].column("nbytes").to_pylist())
    assert max(data) <= 8192
    assert good(linear(a, b, shard_size=0)).plan["shards"].to_pylist()[0]["name"] == "model.safetensors"


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
    copied = good(one(a))
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
    made = good(stack(piece, piece))
    first, again = (made.rows(f"model.layers.{layer}.mlp.big.weight") for layer in range(2))
    rows = made.plan["ops"].to_pylist()
    assert len(first) > 1
    assert [rows[row["copy_of"]] for row in again] == first


def test_two_calls_give_equal_plans_and_every_recipe_field_another(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    recipe = make_recipe(linear(a, b))
    sources = open_models(recipe).require()
    plans = [build_plan(recipe, sources, version="0") for _ in range(2)]
    assert plans[0].digest == plans[1].digest
    assert plans[0].tables == plans[1].tables
    changes = ({"seed": 1}, {"dtype": "float32"}, {"shard_size": 9999}, {"duplicates": "share"})
    digests = {planned(linear(a, b, **change)).plan.digest for change in changes}
    assert len(digests | {plans[0].digest}) == 5
    assert build_plan(recipe, sources, version="1").digest != plans[0].digest


@pytest.mark.parametrize("running", [True, False])
def test_planning_leaves_the_garbage_collector_as_it_was(tmp_path: Path, running: bool) -> None:
    was_running = gc.isenabled()
    (gc.enable if running else gc.disable)()
    try:
        good(linear(llama(tmp_path / "a")))
        assert gc.isenabled() is running
        with pytest.raises(ValueError, match="odd"), collector_paused():
            raise ValueError("odd")
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
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    plan = good(linear(a, b, shard_size=8192)).plan
    save_plan(plan, tmp_path / "plan")
    return plan, tmp_path / "plan"


def test_a_saved_plan_comes_back_as_it_was(saved: tuple[Plan, Path]) -> None:
    plan, directory = saved
    assert tuple(SCHEMAS["scales"].names) == Scales._fields
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


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    (directory / "ops.arrow").unlink()
    assert "ops.arrow" in _refused(directory)


def test_a_plan_that_agrees_with_its_digest_but_not_with_itself_is_refused(saved: tuple[Plan, Path]) -> None:
    plan, directory = saved
    save_plan(with_table(plan, "segments", plan["segments"].slice(1)), directory)
    assert "they do not take every op once" in _refused(directory)


def test_sources_are_opened_once_each_with_the_base_first(tmp_path: Path) -> None:
    a, b, c = (llama(tmp_path / name) for name in "abc")
    recipe = make_recipe({**linear(a, b, a), "base_model": c})
    assert [source.name for source in open_models(recipe).require()] == [str(c), str(a), str(b)]
    assert [source.index for source in open_models(recipe).require()] == [0, 1, 2]
    assert len(list(model_references(recipe))) == 4


def test_every_model_that_cannot_be_read_is_reported_with_its_place(tmp_path: Path) -> None:
    a = llama(tmp_path / "a")
    recipe = make_recipe({**linear(a, tmp_path / "none"), "base_model": f"{a}+{a}"})
    (tmp_path / "none").mkdir()
    with pytest.raises(PlanError) as caught:
        open_models(recipe).require()
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
        plans.append(build_plan(recipe, open_models(recipe).require(), version="0"))
    assert plans[0].manifest["recipe_text"] != plans[1].manifest["recipe_text"]
    assert plans[0].digest == plans[1].digest


NORM = "model.norm.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"
POSITIONS = "model.positions"


def _model(root: Path, extra: Specs | None = None, *, without: tuple[str, ...] = (), **config: Any) -> Path:
    specs = {**llama_specs(2), **(extra or {})}
    kept = {name: spec for name, spec in specs.items() if name not in without}
    return header_checkpoint(root, kept, {**llama_config(layers=2), **config})


def test_without_a_dtype_every_tensor_keeps_the_lead_s(tmp_path: Path) -> None:
    a = _model(tmp_path / "a", {NORM: (DType.F32, (32,)), "lm_head.weight": (DType.F16, (64, 32))})
    b = _model(tmp_path / "b", {"model.embed_tokens.weight": (DType.F32, (64, 32))})
    made = good(linear(a, b))
    dtypes = [made.dtype(name) for name in (NORM, "lm_head.weight", "model.embed_tokens.weight")]
    assert dtypes == ["F32", "F16", "BF16"]
    assert made.config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("key", ["dtype", "out_dtype"])
def test_a_dtype_replaces_the_main_one_and_keeps_what_is_float32_on_purpose(tmp_path: Path, key: str) -> None:
    a, b = (_model(tmp_path / name, {NORM: (DType.F32, (32,))}) for name in "ab")
    made = good(linear(a, b, **{key: "float16"}))
    assert made.dtype("lm_head.weight") == "F16"
    assert made.dtype(NORM) == "F32"
    assert made.config["torch_dtype"] == "float16"


def test_a_router_s_selection_bias_stays_float32_in_a_float32_model(tmp_path: Path) -> None:
    specs = {name: (DType.F32, shape) for name, (_, shape) in llama_specs(2).items()}
    a = header_checkpoint(tmp_path / "a", {**specs, BIAS: (DType.F32, (4,))}, llama_config(layers=2))
    made = good(linear(a, a, dtype="bfloat16"))
    assert made.dtype(BIAS) == "F32"
    assert made.dtype(NORM) == "BF16"


def test_a_scaled_source_is_merged_and_an_unscaled_one_copied(tmp_path: Path) -> None:
    scale = [{"filter": "norm", "value": 2}, {"value": 1}]
    entry = {"model": _model(tmp_path / "a"), "parameters": {"scale": scale}}
    made = good({"merge_method": "passthrough", "models": [entry]})
    assert (made.method(NORM), made.fate(0, NORM)[:2]) == ("passthrough", ("merged", "method"))
    assert (made.method("lm_head.weight"), made.fate(0, "lm_head.weight")[0]) == ("copy", "copied")


def test_integers_are_kept_from_the_lead(tmp_path: Path) -> None:
    extra = {POSITIONS: (DType.I64, (1, 4))}
    a, b, c = _model(tmp_path / "a", extra), _model(tmp_path / "b", extra), _model(tmp_path / "c")
    made = good(linear(a, b, c, dtype="float16"))
    assert (made.method(POSITIONS), made.dtype(POSITIONS)) == ("copy", "I64")
    assert made.fate(0, POSITIONS) == ("copied", "copied_from_lead", POSITIONS)
    assert made.fate(1, POSITIONS) == ("dropped", "lead_has_it", POSITIONS)


def test_recomputed_buffers_are_kept_from_the_lead_or_left_out(tmp_path: Path) -> None:
    extra = {INV_FREQ: (DType.F32, (4,))}
    a, b = _model(tmp_path / "a", extra), _model(tmp_path / "b", extra)
    plain = _model(tmp_path / "plain")
    made = good(linear(a, b, dtype="float16"))
    assert (made.method(INV_FREQ), made.dtype(INV_FREQ)) == ("copy", "F32")
    assert not made.plan["tensors"].to_pylist()[made.names().index(INV_FREQ)]["check_finite"]
    made = good(linear(plain, b))
    assert INV_FREQ not in made.names()
    assert made.fate(1, INV_FREQ) == ("dropped", "recomputed_buffer", "")
    good(linear(a, plain))


def test_a_missing_tensor_is_refused_or_copied_from_the_base(tmp_path: Path) -> None:
    a, b, c = _model(tmp_path / "a"), _model(tmp_path / "b", without=(NORM,)), _model(tmp_path / "c")
    (problem,) = refusals(linear(a, b, c))
    assert f"{b}: it lacks 1 tensors that {a} has and that the recipe merges: {NORM}." in problem
    assert "missing_tensors: copy_base" in problem
    kept = {"missing_tensors": "copy_base", "base_model": a}
    made = good(linear(a, b, c, **kept))
    assert made.reads(NORM) == [(0, NORM)]
    assert made.fate(0, NORM) == ("copied", "only_in_base", NORM)
    assert made.fate(2, NORM) == ("dropped", "only_in_base", NORM)
    assert len(made.reads("lm_head.weight")) == 3
    made = good(linear(a, b, c, **kept, dtype="float32"))
    assert made.fate(0, NORM) == ("converted", "only_in_base", NORM)


def test_an_extra_tensor_is_refused_or_left_out(tmp_path: Path) -> None:
    extra = {"model.layers.1.self_attn.q_proj.bias": (DType.BF16, (32,))}
    a, b = _model(tmp_path / "a"), _model(tmp_path / "b", extra)
    (problem,) = refusals(linear(a, b))
    assert f"{b}: 1 of its tensors have no place in the output, since {a} lacks them" in problem
    assert "extra_tensors: drop" in problem
    made = good(linear(a, b, extra_tensors="drop"))
    assert made.fate(1, "model.layers.1.self_attn.q_proj.bias") == ("dropped", "extra_dropped", "")


def test_everything_wrong_with_the_tensors_is_said_at_once(tmp_path: Path) -> None:
    a = _model(tmp_path / "a")
    b = _model(
        tmp_path / "b",
        {
            "model.layers.1.mlp.up_proj.weight": (DType.BF16, (16, 32)),
            "model.more.weight": (DType.BF16, (1,)),
        },
        without=(NORM, "model.layers.0.mlp.up_proj.weight"),
    )
    c = _model(tmp_path / "c", {"model.layers.0.mlp.up_proj.weight": (DType.F8_E5M2, (64, 32))})
    made = planned(linear(a, b, c))
    words = ("other shapes", "no place in the output", "lacks 2 tensors", "quantised as FP8 e5m2")
    problems = [str(problem) for problem in made.plan.problems]
    assert len(problems) == len(words)
    for word in words:
        assert any(word in problem for problem in problems), problems


def test_a_plan_with_problems_still_accounts_for_all_but_what_has_no_place(tmp_path: Path) -> None:
    a = _model(tmp_path / "a")
    b = _model(tmp_path / "b", {"model.more.weight": (DType.BF16, (1,))}, without=(NORM,))
    made = planned(linear(a, b))
    everything = {(s.index, name) for s in made.sources for name in s.checkpoint.tensors}
    assert everything - made.fates() == {(1, "model.more.weight")}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("files_read")
    family = make_family(root / "family", hidden=256, files=2)
    lora = tiny_lora(root / "lora", read_tensors(family.base), 1)
    first, second = (gpt_oss(root / f"oss{seed}", seed).root for seed in (1, 2))
    base, tune = str(family.base), str(family.tunes[0])
    layer = {"layer_range": [0, 1]}
    return {
        "plain": linear(base, tune),
        "adapter": linear(f"{base}+{lora}", tune),
        "codes": linear(str(first), str(second)),
        "repeated": stack(*[{"sources": [{"model": each, **layer}]} for each in (base, tune, base)]),
    }


def _files(job: Any, source: int = -1) -> Iterator[tuple[int, str]]:
    if isinstance(job, Read):
        source = job.source
        yield source, job.key
    if isinstance(job, Scales):
        yield from ((source, key) for key in (job.key, job.tensor_key) if key)
    if isinstance(job, tuple):
        for each in job:
            yield from _files(each, source)
    elif is_dataclass(job):
        for field in fields(job):
            yield from _files(getattr(job, field.name), source)


@pytest.mark.parametrize("case", ["plain", "adapter", "codes", "repeated"])
def test_a_segment_reads_what_its_jobs_read(case: str, cases: dict[str, dict[str, Any]]) -> None:
    made = plan(cases[case])
    jobs = Jobs(made)
    found = files_read(made)
    assert len(found) == len(made["segments"])
    for number, files in enumerate(found):
        assert files == frozenset(_files(jobs.ops(number)))
    sources = {source for files in found for source, _ in files}
    assert len(sources) == len(made.manifest["sources"])


NORMS = ("model.layers.0.input_layernorm.weight", "model.layers.2.input_layernorm.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def plan_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)

    def planned(text: str) -> Plan:
        recipe = parse_recipe(text)
        assert isinstance(recipe, Recipe)
        return build_plan(recipe, open_models(recipe).require(), version="test")

    return planned


def _row_of(plan: Plan, name: str) -> int:
    number = plan["tensors"].column("name").to_pylist().index(name)
    return plan["ops"].column("tensor").to_pylist().index(number)


def _digests(plan: Plan, same: Mapping[str, str] | None = None) -> dict[int, str]:
    """A digest of its own for each op that is made; those named have the ones given."""
    copies = plan["ops"].column("copy_of").to_pylist()
    found = {row: f"digest {row}" for row, copy in enumerate(copies) if copy < 0}
    return found | {_row_of(plan, name): digest for name, digest in (same or {}).items()}


def test_a_layer_used_three_times_is_one_group_of_two(plan_of: Any) -> None:
    once = "  - sources: [{model: one, layer_range: [0, 1]}]\n"
    found = planned_duplicates(plan_of(f"merge_method: passthrough\nslices:\n{once * 3}"))
    sizes = {group.pattern: group.tensors for group in found.groups}
    assert sizes["model.layers.*.self_attn.q_proj.weight"] == 2
    assert set(sizes.values()) == {2}


def test_what_the_plan_knew_is_not_found_again(plan_of: Any) -> None:
    """Layer 2 is layer 0 once more; the last one is of another model."""
    plan = plan_of(STACK)
    assert found_duplicates(plan, _digests(plan), shared_bytes=None).unforeseen == ()
    other = "model.layers.3.input_layernorm.weight"
    told = found_duplicates(plan, _digests(plan, {NORMS[0]: "same", other: "same"}), shared_bytes=7)
    found = (DuplicateGroup("model.layers.*.input_layernorm.weight", 1, 64),)
    assert (told.planned, told.shared_bytes, told.unforeseen) == (planned_duplicates(plan), 7, found)
