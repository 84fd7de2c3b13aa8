"""Structure verified, and models compared."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint, write_json
from kits.expert_models import save, sparse
from kits.merge_cases import Family, make_family, merge, recipes
from kits.quantised_merges import read_numbers
from kits.quantised_models import QuantisedModel, deepseek_v3, gpt_oss, kimi_k2_thinking
from kits.tensor_scaled_models import fp8_mixture, nvfp4_llama
from safetensors.torch import load_file, save_file

from raymerge.api import AuditOptions, audit, conversion, diff, submit, verify
from raymerge.errors import VerificationError
from raymerge.options import RunOptions
from raymerge.verifier.compare import ComparedTensor, Comparison, Status
from raymerge.verifier.structure import RECORD_PLAN

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("sources"), files=3)


@pytest.fixture(scope="module")
def original(sources: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("merged") / "out"
    merge({**recipes(sources)["ties"], "shard_size": 20_000}, root)
    assert len(_shards(root)) > 2
    return root


@pytest.fixture
def merged(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "out"))


def _shards(root: Path) -> list[Path]:
    return sorted(root.glob("*.safetensors"))


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def _said(root: Path) -> str:
    return "\n".join(str(problem) for problem in verify(root).problems)


def test_a_merged_checkpoint_passes_against_its_plan(merged: Path) -> None:
    verdict = verify(merged)
    assert verdict.problems == ()
    assert verdict.against_plan
    assert verdict.files == len(_shards(merged))
    assert verdict.tensors == len(read_tensors(merged))
    assert verdict.nbytes == sum(path.stat().st_size for path in _shards(merged))
    assert verdict.require() is verdict


def test_the_sources_themselves_pass_without_a_plan(sources: Family) -> None:
    for root in (sources.base, *sources.tunes):
        verdict = verify(root)
        assert verdict.problems == ()
        assert not verdict.against_plan


def test_a_tied_model_passes(tmp_path: Path) -> None:
    assert verify(tiny_llama(tmp_path / "model", 1, tie=True)).problems == ()


def test_a_model_of_an_unknown_family_passes(tmp_path: Path) -> None:
    config = {"architectures": ["OddForCausalLM"], "model_type": "odd", "num_hidden_layers": 7}
    root = write_checkpoint(tmp_path / "odd", {"some.weight": torch.ones(3)}, config)
    assert verify(root).problems == ()


Tensors = dict[str, torch.Tensor]


def _map(root: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Change which file the index says that each tensor is in."""
    _edit(root / INDEX, lambda index: change(index["weight_map"]))


def _restore(root: Path, change: Callable[[Tensors, str], object]) -> str:
    """Store the first shard anew with this done to its tensors and the first of their names."""
    shard = _shards(root)[0]
    tensors = load_file(shard)
    first = min(tensors)
    change(tensors, first)
    save_file(tensors, shard, metadata={"format": "pt"})
    return first


def _drop_tensor(root: Path) -> None:
    """From the shard and from the index alike, so that only the plan knows."""
    name = _restore(root, lambda tensors, first: tensors.pop(first))
    _map(root, lambda files: files.pop(name))


def _add_tensor(root: Path) -> None:
    _restore(root, lambda tensors, _: tensors.update({"model.extra.weight": torch.ones(2)}))
    _map(root, lambda files: files.update({"model.extra.weight": _shards(root)[0].name}))


def _change_shape(tensors: Tensors, _: str) -> None:
    name = next(name for name, tensor in sorted(tensors.items()) if tensor.dim() == 2)
    tensors[name] = tensors[name].flatten()


def _halve(tensors: Tensors, first: str) -> None:
    tensors[first] = tensors[first].half()


def _rename(tensors: Tensors, first: str) -> None:
    tensors["model.stranger"] = tensors.pop(first)


def _without(name: str | Path) -> Callable[[Path], object]:
    return lambda root: (root / name).unlink()


def _name_the_wrong_shard(files: dict[str, str]) -> None:
    here = files[NORM]
    files[NORM] = next(name for name in sorted(set(files.values())) if name != here)


def _second_set(root: Path) -> None:
    """Every name once more, in a file that no index speaks of."""
    save_file(read_tensors(root), root / "copy.safetensors", metadata={"format": "pt"})


def _edit_vocabulary(root: Path) -> None:
    _edit(root / "tokenizer.json", lambda content: content.update(version="2.0"))


def _lose_the_record(root: Path) -> None:
    shutil.rmtree(root / RECORD_PLAN.parent)
    (root / RECORD_PLAN).mkdir(parents=True)


def _swap_two_tensors(root: Path) -> None:
    """Two norms of one shape change places in their file, by its header."""
    for shard in _shards(root):
        content = shard.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        norms = [entry for name, entry in sorted(header.items()) if "layernorm" in name]
        if len(norms) > 1:
            one, other = norms[:2]
            assert one["shape"] == other["shape"]
            one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
            changed = json.dumps(header, separators=(",", ":")).encode().ljust(length)
            assert len(changed) == length
            shard.write_bytes(content[:8] + changed + content[8 + length :])
            return
    raise AssertionError("no shard has two of them")


def _size(path: Path, more: int) -> None:
    os.truncate(path, path.stat().st_size + more)


_CANNOT_BE_READ = "the saved plan cannot be read"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensors swapped": (_swap_two_tensors, "the plan says"),
    "file cut": (lambda root: _size(_shards(root)[1], -1), "model-00002-of-"),
    "file longer": (lambda root: _size(_shards(root)[0], 1), "model-00001-of-"),
    "tensor renamed": (lambda root: _restore(root, _rename), "model.stranger"),
    "tensor dropped": (_drop_tensor, "1 tensors of the plan are missing"),
    "tensor added": (_add_tensor, "model.extra.weight: the plan has no such tensor"),
    "another dtype": (lambda root: _restore(root, _halve), "the plan says"),
    "another shape": (lambda root: _restore(root, _change_shape), "the plan says"),
    "no last file": (lambda root: _shards(root)[-1].unlink(), ".safetensors"),
    "not in the index": (lambda root: _map(root, lambda files: files.pop(NORM)), NORM),
    "in the index alone": (
        lambda root: _map(root, lambda files: files.update({"model.ghost.weight": _shards(root)[0].name})),
        "model.ghost.weight",
    ),
    "in another file": (lambda root: _map(root, _name_the_wrong_shard), NORM),
    "no index": (_without(INDEX), "no model.safetensors.index.json, so that no loader finds them"),
    "a file more": (
        lambda root: save_file(
            {"model.left.over": torch.ones(2)}, root / "model.safetensors", {"format": "pt"}
        ),
        "model.safetensors",
    ),
    "a second set": (_second_set, "copy.safetensors: holds tensors that other weights"),
    "another total": (
        lambda root: _edit(
            root / INDEX,
            lambda index: index["metadata"].update(total_size=index["metadata"]["total_size"] - 2),
        ),
        f"{INDEX}: it is not the index that the plan makes",
    ),
    "another vocabulary": (_edit_vocabulary, "tokenizer.json: its bytes are not those that were published"),
    "other settings": (
        lambda root: _edit(root / "generation_config.json", lambda content: content.update(temperature=0.1)),
        "generation_config.json: its bytes are not those that were published",
    ),
    "no companion": (_without("special_tokens_map.json"), "special_tokens_map.json: is missing"),
    "a companion more": (
        lambda root: (root / "added_tokens.json").write_text('{"<evil>": 7}'),
        "added_tokens.json: the merge writes no such file",
    ),
    # transformers lays an adapter that it finds over the model.
    "an adapter": (
        lambda root: (root / "adapter_config.json").write_text("{}"),
        "adapter_config.json: the merge writes no such file",
    ),
    "no provenance": (_without("raymerge/provenance.json"), "provenance.json: is missing"),
    "no config": (_without("config.json"), "config.json"),
    "another config": (
        lambda root: _edit(root / "config.json", lambda config: config.update(hidden_act="gelu")),
        "config.json: it is not the config that the plan says",
    ),
    "no JSON": (lambda root: (root / "config.json").write_text("{"), "config.json"),
    "another plan": (
        lambda root: _edit(root / RECORD_PLAN / "manifest.json", lambda manifest: manifest.update(seed=77)),
        "the saved plan",
    ),
    "no table": (_without(RECORD_PLAN / "tensors.arrow"), _CANNOT_BE_READ),
    "no plan": (lambda root: shutil.rmtree(root / RECORD_PLAN), _CANNOT_BE_READ),
    "no record": (_lose_the_record, _CANNOT_BE_READ),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found_and_never_raised(damage: Callable[[Path], object], said: str, merged: Path) -> None:
    damage(merged)
    verdict = verify(merged)
    assert said in "\n".join(map(str, verdict.problems))
    with pytest.raises(VerificationError) as caught:
        verdict.require()
    assert caught.value.problems == verdict.problems


def test_what_no_loader_reads_may_be_added_and_the_card_edited(merged: Path) -> None:
    (merged / "README.md").write_text("Our model.")
    for key in ("LICENSE", "docs/eval.md", "images/loss.png", ".gitattributes", "model-Q4_K_M.gguf"):
        (merged / key).parent.mkdir(exist_ok=True)
        (merged / key).write_bytes(b"x")
    assert verify(merged).problems == ()


def test_an_audit_goes_on_where_only_companions_were_changed(merged: Path) -> None:
    _edit_vocabulary(merged)
    found = audit(merged, AuditOptions(sample=1.0), RunOptions(inline=True))
    assert [str(each.where).rpartition("/")[2] for each in found.problems] == ["tokenizer.json"]
    assert found.recomputed > 0


def test_a_second_set_beside_weights_without_a_plan_is_found(plain: Path) -> None:
    assert verify(plain).problems == ()
    _second_set(plain)
    assert "copy.safetensors: holds tensors that other weights" in _said(plain)


def test_an_absent_directory_is_a_verdict(tmp_path: Path) -> None:
    verdict = verify(tmp_path / "nowhere")
    assert "there is no such directory" in str(verdict.problems[0])


# Configs that do not fit, without a plan to compare with


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model", 3)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_hidden_layers", 4, "num_hidden_layers is 4, but model.layers has 3 layers"),
        ("torch_dtype", "float32", "it says float32, but most tensors are bfloat16"),
        ("vocab_size", 65, "vocab_size is 65, but model.embed_tokens.weight has 64 rows"),
    ],
)
def test_a_config_that_does_not_fit_the_tensors_is_found(
    field: str, value: object, said: str, plain: Path
) -> None:
    _edit(plain / "config.json", lambda config: config.update({field: value}))
    assert said in _said(plain)


def test_an_untied_config_without_a_head_is_found(tmp_path: Path) -> None:
    tensors = read_tensors(tiny_llama(tmp_path / "tied", 1, tie=True))
    root = write_checkpoint(tmp_path / "model", tensors, llama_config(tie=False))
    assert "tie_word_embeddings is false, but lm_head.weight is not stored" in _said(root)


def test_several_problems_are_told_at_once(plain: Path) -> None:
    _edit(plain / "config.json", lambda config: config.update(num_hidden_layers=9, vocab_size=99))
    assert len(verify(plain).problems) == 3


QUERY = "model.layers.0.self_attn.q_proj.weight"


def tensor(found: Comparison, name: str) -> ComparedTensor:
    return next(each for each in found.tensors if each.name == name)


def counts(found: Comparison) -> dict[str, int]:
    total: dict[str, int] = {}
    for role in found.roles:
        for status, count in role.counts.items():
            total[status] = total.get(status, 0) + count
    return total


def changed(root: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """A tiny Llama with tensors in place of its own, or, where they are None, without them."""
    tensors = {**read_tensors(root), **changes}
    left = {name: each for name, each in tensors.items() if each is not None}
    extra = {name: (root / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    return write_checkpoint(target, left, json.loads((root / "config.json").read_text()), extra=extra)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_llama(tmp_path_factory.mktemp("llama") / "model", 0)
    return changed(root, root.parent / "plain")


def test_files_do_not_matter(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "one", 0)
    tiny_llama(tmp_path / "three", 0, files=3)
    found = diff(tmp_path / "one", tmp_path / "three")
    assert found.is_equal
    assert counts(found) == {"equal": 30}
    assert (found.tensors, found.config) == ((), ())


def test_one_byte_makes_a_difference(llama: Path, tmp_path: Path) -> None:
    query = read_tensors(llama)[QUERY].clone()
    query.view(torch.uint8)[-1, -2] ^= 1
    found = diff(llama, changed(llama, tmp_path / "other", **{QUERY: query}))
    assert not found.is_equal
    assert counts(found) == {"equal": 29, "different": 1}
    assert tensor(found, QUERY).status is Status.DIFFERENT


def test_figures_are_those_of_float64(llama: Path, tmp_path: Path) -> None:
    a = read_tensors(llama)[QUERY].double()
    b = (a * 1.5 + 0.01).bfloat16()
    found = tensor(diff(llama, changed(llama, tmp_path / "other", **{QUERY: b})), QUERY)
    apart = b.double() - a
    assert found.relative_error == pytest.approx(float(apart.norm() / a.norm()), rel=1e-5)
    assert found.max_abs_error == pytest.approx(float(apart.abs().max()), rel=1e-6)
    cosine = float((a.flatten() @ b.double().flatten()) / a.norm() / b.double().norm())
    assert found.cosine == pytest.approx(cosine, abs=1e-6)


def test_a_role_counts_as_one_tensor(llama: Path, tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    ours = read_tensors(llama)
    theirs = {name: ours[name] * factor for name, factor in zip(names, (1.25, 3.0), strict=True)}
    found = diff(llama, changed(llama, tmp_path / "other", **theirs))
    role = next(each for each in found.roles if each.role == "attention")
    alike = [each for name, each in ours.items() if "self_attn" in name and name in theirs]
    apart = math.sqrt(sum(float((theirs[n].double() - ours[n].double()).square().sum()) for n in names))
    size = math.sqrt(sum(float(each.double().square().sum()) for each in alike))
    assert role.relative_error == pytest.approx(apart / size, rel=1e-5)
    assert role.worst == names[1]
    assert role.counts == {"equal": 10, "different": 2}


def test_a_large_tensor_is_compared_in_runs(tmp_path: Path) -> None:
    """Several runs, the only difference in the last one."""
    config, numbers = llama_config(), torch.arange(3_000_000, dtype=torch.float32).remainder(97) - 48
    other = numbers.clone()
    other[-1] += 100
    for name, each in (("a", numbers), ("b", other)):
        write_checkpoint(tmp_path / name, {"x.weight": each}, config)
    found = tensor(diff(tmp_path / "a", tmp_path / "b"), "x.weight")
    assert found.max_abs_error == 100
    assert found.relative_error == pytest.approx(100 / float(numbers.double().norm()), rel=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_figures_hold_where_squares_leave_float32(size: float, tmp_path: Path) -> None:
    a = torch.tensor([1.0, 2.0, 3.0]) * size
    for name, each in (("a", a), ("b", a * 2)):
        write_checkpoint(tmp_path / name, {"x.weight": each}, llama_config())
    found = tensor(diff(tmp_path / "a", tmp_path / "b"), "x.weight")
    assert found.relative_error == pytest.approx(1)
    assert found.cosine == pytest.approx(1)


def test_another_dtype_may_hold_the_same_numbers(llama: Path, tmp_path: Path) -> None:
    query = read_tensors(llama)[QUERY]
    found = diff(llama, changed(llama, tmp_path / "other", **{QUERY: query.float()}))
    assert not found.is_equal
    assert tensor(found, QUERY).status is Status.SAME_NUMBERS
    assert (tensor(found, QUERY).stored_a, tensor(found, QUERY).stored_b) == ("BF16 [32, 32]", "F32 [32, 32]")


def test_numbers_that_are_not_finite_are_counted(llama: Path, tmp_path: Path) -> None:
    query = read_tensors(llama)[QUERY].clone()
    query[0, :3] = torch.tensor([float("nan"), float("inf"), 7.0])
    found = tensor(diff(llama, changed(llama, tmp_path / "other", **{QUERY: query})), QUERY)
    assert found.num_not_finite == 2
    assert found.max_abs_error is not None
    assert 6 < found.max_abs_error < 8
    assert json.dumps(found.relative_error) != "NaN"


def test_tensors_that_one_lacks_and_other_shapes(llama: Path, tmp_path: Path) -> None:
    more = {"model.extra.weight": torch.zeros(2), QUERY: torch.zeros(16, 32), "lm_head.weight": None}
    found = diff(llama, changed(llama, tmp_path / "other", **more))
    assert tensor(found, "lm_head.weight").status is Status.ONLY_A
    assert tensor(found, "model.extra.weight").status is Status.ONLY_B
    shaped = tensor(found, QUERY)
    assert (shaped.status, shaped.stored_b, shaped.relative_error) == (Status.DIFFERENT, "F32 [16, 32]", None)


def test_config_and_companions(llama: Path, tmp_path: Path) -> None:
    other = changed(llama, tmp_path / "other")
    config: dict[str, Any] = json.loads((llama / "config.json").read_text())
    del config["hidden_act"]
    write_json(other / "config.json", {**config, "rope_parameters": {"rope_theta": 5.0}, "vocab_size": 65})
    (other / "tokenizer.json").write_text("{}")
    (other / "extra.txt").write_text("x")
    found = diff(llama, other)
    assert not found.is_equal
    assert {(each.path, each.a, each.b) for each in found.config} == {
        ("hidden_act", "silu", "absent"),
        ("rope_parameters", "absent", "{'rope_theta': 5.0}"),
        ("vocab_size", "64", "65"),
    }
    assert found.companions == {
        "extra.txt": "only_b", "tokenizer.json": "different", "tokenizer_config.json": "equal",
    }  # fmt: skip


@pytest.mark.parametrize("key", ["config.json", "tokenizer.json"])
def test_either_alone_makes_a_difference(key: str, llama: Path, tmp_path: Path) -> None:
    other = changed(llama, tmp_path / "other")
    assert diff(llama, other).is_equal
    content = json.loads((other / key).read_text())
    write_json(other / key, {**content, "another_field": 1})
    assert not diff(llama, other).is_equal


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model with its experts one by one, and together."""
    root, model = tmp_path_factory.mktemp("layouts"), sparse("qwen3_moe").build(0)
    save(model, root / "single")
    save(model, root / "fused", fused=True)
    return root / "single", root / "fused"


def test_experts_in_two_layouts_have_the_same_numbers(layouts: tuple[Path, Path]) -> None:
    found = diff(*layouts)
    assert counts(found) == {"equal": 30, "same_numbers": 36}
    assert found.tensors[0].stored_b.endswith("in model.layers.0.mlp.experts.down_proj")


def test_one_expert_that_differs_is_named(layouts: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = read_tensors(layouts[1])
    tensors["model.layers.1.mlp.experts.gate_up_proj"][2, -1] += 1
    write_checkpoint(tmp_path / "fused", tensors, json.loads((layouts[1] / "config.json").read_text()))
    found = diff(layouts[0], tmp_path / "fused")
    different = [each.name for each in found.tensors if each.status is Status.DIFFERENT]
    assert different == ["model.layers.1.mlp.experts.2.up_proj.weight"]


def test_experts_that_one_lacks_are_named(layouts: tuple[Path, Path], tmp_path: Path) -> None:
    gone = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors = read_tensors(layouts[0])
    del tensors[gone]
    write_checkpoint(tmp_path / "single", tensors, json.loads((layouts[0] / "config.json").read_text()))
    found = diff(tmp_path / "single", layouts[1])
    assert [each.name for each in found.tensors if each.status is Status.ONLY_B] == [gone]


@pytest.mark.parametrize("make", [deepseek_v3, gpt_oss, kimi_k2_thinking, fp8_mixture, nvfp4_llama])
def test_codes_are_compared_by_what_they_mean(make: Any, tmp_path: Path) -> None:
    models: list[QuantisedModel] = [make(tmp_path / str(seed), seed) for seed in (0, 1)]
    found = diff(*(model.root for model in models))
    means = [{name: each.values for name, each in read_numbers(model.root).items()} for model in models]
    coded = [each for each in found.tensors if each.name in models[0].quantised]
    assert len(coded) == len(models[0].quantised)
    for each in coded:
        a, b = (np.asarray(mean[each.name], dtype=np.float64) for mean in means)
        assert each.relative_error == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-4)
        assert each.max_abs_error == pytest.approx(np.abs(b - a).max(), rel=1e-5)


def test_a_quantised_model_is_compared_with_its_numbers(tmp_path: Path) -> None:
    model = deepseek_v3(tmp_path / "codes", 0)
    submit(conversion(model.root, "bf16"), tmp_path / "plain", RunOptions(inline=True))
    found = diff(model.root, tmp_path / "plain")
    coded = [each for each in found.tensors if each.name in model.quantised]
    assert len(coded) == len(model.quantised)
    assert all(each.relative_error is not None and each.relative_error < 2**-8 for each in coded)
    assert any(each.path == "quantization_config" for each in found.config)


@pytest.mark.parametrize(("one", "other"), [(True, 1), ({"a": [0]}, {"a": [False]})])
def test_a_switch_is_no_number(one: object, other: object, tmp_path: Path) -> None:
    """To Python they are equal."""
    for name, value in (("one", one), ("other", other)):
        write_checkpoint(tmp_path / name, {"x.weight": torch.zeros(2)}, llama_config() | {"switch": value})
    found = diff(tmp_path / "one", tmp_path / "other")
    assert [each.path.partition(".")[0] for each in found.config] == ["switch"]
    assert not found.is_equal
