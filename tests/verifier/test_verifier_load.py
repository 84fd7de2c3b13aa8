"""Checkpoints that are loaded, and every mutation of one noticed."""

from __future__ import annotations

import ast
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint, write_json
from kits.expert_models import save
from kits.merge_cases import merge
from kits.model_types import ModelType
from kits.model_types_decoders import DECODERS
from kits.model_types_others import ENCODERS, TWO_SIDED
from kits.quantised_merges import plain_twin
from kits.quantised_models import QuantisedModel, deepseek_v3, gpt_oss, kimi_k2_thinking
from safetensors.torch import load_file, save_file

import raymerge
from raymerge.api import AuditOptions, AuditVerdict, RunOptions, audit, verify
from raymerge.merge_plan.tables import load_plan
from raymerge.verifier.load import LoadVerdict, load_checkpoint
from raymerge.verifier.structure import RECORD_PLAN

ENOUGH = 4 << 30
KINDS = {kind.name: kind for kind in (*DECODERS, *ENCODERS, *TWO_SIDED)}
# One of each way to store and to build: plain, tied, biases, fused and single experts, recurrent, two-sided.
SAMPLE = (
    *("gemma2", "gpt2", "qwen3_moe", "mixtral", "dbrx", "falcon_h1"),
    *("bert", "switch_transformers", "whisper"),
)


def said(verdict: LoadVerdict) -> str:
    return "\n".join(map(str, verdict.problems))


def passed(verdict: LoadVerdict, word: str) -> tuple[str, ...]:
    return next(each.names for each in verdict.passed if word in each.why)


@pytest.mark.parametrize("kind", [KINDS[name] for name in SAMPLE], ids=SAMPLE)
def test_models_that_transformers_knows_load_and_run(kind: ModelType, tmp_path: Path) -> None:
    save(kind.build(0), tmp_path)
    verdict = load_checkpoint(tmp_path, memory=ENOUGH)
    assert verdict.problems == ()
    assert verdict.tensors == len(read_tensors(tmp_path))
    reads_text = kind.name != "whisper"
    assert verdict.ran is reads_text
    assert reads_text or "was not run" in verdict.note


def test_experts_that_are_stored_together_load_as_well(tmp_path: Path) -> None:
    save(KINDS["qwen3_moe"].build(0), tmp_path, fused=True)
    assert "model.layers.0.mlp.experts.gate_up_proj" in read_tensors(tmp_path)
    verdict = load_checkpoint(tmp_path, memory=ENOUGH)
    assert verdict.problems == ()
    assert verdict.ran


def test_a_large_model_is_compared_and_not_loaded(tmp_path: Path) -> None:
    verdict = load_checkpoint(tiny_llama(tmp_path / "model", 0), memory=1 << 20)
    assert verdict.problems == ()
    assert not verdict.ran
    assert verdict.needed_nbytes > 1 << 20
    assert verdict.note.startswith("only names and shapes were compared: loading takes ")


_UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(_UP), f"{_UP} of LlamaForCausalLM would be random"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), "extra would be left out"),
        (lambda each: each.update({_UP: each[_UP].T.contiguous()}), f"{_UP} is [32, 64] and not [64, 32]"),
        (lambda tensors: tensors["model.norm.weight"].fill_(math.inf), "has NaN or infinity"),
    ],
)
def test_what_transformers_would_pass_over_is_a_problem(
    change: Callable[[dict[str, torch.Tensor]], object], words: str, tmp_path: Path
) -> None:
    file = tiny_llama(tmp_path / "model", 0) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    assert words in said(load_checkpoint(tmp_path / "model", memory=ENOUGH))


def test_an_expert_that_is_missing_is_found(tmp_path: Path) -> None:
    """It goes together with others into one key of the model, which is there all the same."""
    save(KINDS["qwen3_moe"].build(0), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    found = said(load_checkpoint(tmp_path, memory=0))
    assert "model.layers.1.mlp.experts.gate_up_proj cannot be put together of its tensors (" in found
    assert "Traceback" not in found
    assert "would be random" not in found


def test_layers_of_prediction_are_listed_and_not_hidden(tmp_path: Path) -> None:
    verdict = load_checkpoint(deepseek_v3(tmp_path, 0).root, memory=0)
    assert verdict.problems == ()
    names = passed(verdict, "predict further tokens")
    assert "model.layers.2.eh_proj.weight" in names
    assert all(name.startswith("model.layers.2.") for name in names)


def test_scales_are_keys_of_their_own(tmp_path: Path) -> None:
    """Block FP8 is compared as codes with scales, whether this machine can compute with them or not."""
    root = deepseek_v3(tmp_path / "whole", 0).root
    tensors = read_tensors(root)
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    write_checkpoint(tmp_path / "lacking", tensors, json.loads((root / "config.json").read_text()))
    found = said(load_checkpoint(tmp_path / "lacking", memory=0))
    assert "o_proj.weight_scale_inv of DeepseekV3ForCausalLM would be random" in found


def test_mxfp4_is_decoded_and_run(tmp_path: Path) -> None:
    verdict = load_checkpoint(gpt_oss(tmp_path, 0).root, memory=ENOUGH)
    assert verdict.problems == ()
    assert verdict.ran
    assert (verdict.model_class, len(verdict.tokens)) == ("GptOssForCausalLM", 8)


def test_a_model_that_is_not_known_is_no_success(tmp_path: Path) -> None:
    verdict = load_checkpoint(kimi_k2_thinking(tmp_path, 0).root, memory=ENOUGH)
    assert not verdict.ran
    assert "it is not loadable here: its config says model_type 'kimi_k2'" in said(verdict)
    assert "Use --level audit" in said(verdict)


def test_files_of_tensors_are_not_loadable(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "raymerge" / "plan").mkdir(parents=True)
    write_json(tmp_path / "raymerge" / "plan" / "manifest.json", {"config": {}})
    assert "it has no config.json" in said(load_checkpoint(tmp_path, memory=ENOUGH))


_CODE = """\
from pathlib import Path

(Path(__file__).parent / "ran").touch()
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_model"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a model that only its own code knows; where that was run, there is a file ``ran``."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    root = tiny_llama(tmp_path / "model", 0)
    code = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = {"model_type": "own_model", "architectures": ["OwnForCausalLM"], "auto_map": code}
    write_json(root / "config.json", llama_config() | config)
    (root / "modeling_own.py").write_text(_CODE, encoding="utf-8")
    return root


def test_code_of_a_checkpoint_is_not_run_unasked(own_code: Path) -> None:
    verdict = load_checkpoint(own_code, memory=ENOUGH)
    assert "its own code (auto_map) is not run" in said(verdict)
    assert "--trust-remote-code" in said(verdict)
    assert not list(own_code.parent.rglob("ran"))


def test_code_of_a_checkpoint_is_run_when_asked(own_code: Path) -> None:
    verdict = load_checkpoint(own_code, memory=ENOUGH, trust_remote_code=True)
    assert verdict.problems == ()
    assert (verdict.model_class, verdict.ran) == ("OwnForCausalLM", True)
    assert list(own_code.parent.rglob("ran"))


def test_code_beside_a_known_model_is_not_run(tmp_path: Path) -> None:
    """Even when asked: transformers has the model itself."""
    root = tiny_llama(tmp_path / "model", 0)
    config: dict[str, Any] = json.loads((root / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    write_json(root / "config.json", config)
    (root / "modeling_own.py").write_text(_CODE, encoding="utf-8")
    assert load_checkpoint(root, memory=ENOUGH, trust_remote_code=True).ran
    assert not list(tmp_path.rglob("ran"))


def test_a_broken_checkpoint_is_a_verdict(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": torch.zeros(2)}, llama_config())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "model.safetensors" in said(load_checkpoint(tmp_path, memory=ENOUGH))


def test_code_of_a_tokenizer_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers has no tokenizer of its own for this model, and asks on the terminal unless told."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *texts: asked.append(texts) or "y")
    root = tmp_path / "model"
    save(KINDS["arcee"].build(0), root)
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["modeling_own.Own", None]}}
    write_json(root / "tokenizer_config.json", own)
    (root / "modeling_own.py").write_text(_CODE, encoding="utf-8")
    for may in (False, True):
        verdict = load_checkpoint(root, memory=ENOUGH, trust_remote_code=may)
        assert (verdict.problems, verdict.ran) == ((), True)
    assert asked == []
    assert not list(tmp_path.rglob("ran"))


def test_transformers_is_told_everywhere_whether_code_may_be_run() -> None:
    """Where a call that reads a model's directory leaves it out, transformers asks."""
    texts = {file: file.read_text("utf-8") for file in Path(raymerge.__file__).parent.rglob("*.py")}
    calls = [
        (file.name, call)
        for file, text in texts.items()
        if "from_pretrained" in text or "from_config" in text
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
    ]
    # A quantiser is made of a table, and reads no file.
    calls = [(name, call) for name, call in calls if ast.unparse(call.func) != "quantizers.from_config"]
    assert len(calls) >= 6
    for name, call in calls:
        given = {each.arg for each in call.keywords}
        assert "trust_remote_code" in given or None in given, f"{name}: {ast.unparse(call)}"


def test_a_tokenizer_that_does_not_load_is_told(tmp_path: Path) -> None:
    save(KINDS["phi3"].build(0), tmp_path)
    (tmp_path / "tokenizer.json").write_text("junk", encoding="utf-8")
    verdict = load_checkpoint(tmp_path, memory=ENOUGH)
    assert verdict.problems == ()
    assert verdict.ran
    assert "its tokenizer does not load here" in verdict.note


LEDGER = Path("raymerge") / "ledger.jsonl"
INLINE = RunOptions(inline=True, threads=1)
SHARD = 400_000
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"
COPIED = "model.layers.0.self_attn.o_proj.weight"


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged mixture and how it was made."""

    root: Path
    """The checkpoint."""
    recipe: Mapping[str, Any]
    """Its recipe."""


def _recipe(models: list[QuantisedModel], weight: float) -> dict[str, Any]:
    entries = [
        {"model": str(model.root), "parameters": {"weight": share}}
        for model, share in zip(models, (weight, 1 - weight), strict=True)
    ]
    rule = {"role": "attention", "merge_method": "passthrough", "sources": [str(models[0].root)]}
    return {"merge_method": "linear", "models": entries, "methods": [rule], "shard_size": SHARD}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Merged]:
    """A mixture in bfloat16 and one in block FP8, each of some shards; and the first with another weight."""
    root = tmp_path_factory.mktemp("made")
    coded = [deepseek_v3(root / f"coded{seed}", seed, ragged=False) for seed in (0, 1)]
    plain = [plain_twin(model, root / f"plain{seed}") for seed, model in enumerate(coded)]
    asked = {
        "plain": _recipe(plain, 0.3),
        "coded": _recipe(coded, 0.3),
        "other": _recipe(plain, 0.4),
        "other coded": _recipe(coded, 0.5),
    }
    for name, recipe in asked.items():
        merge(recipe, root / "out" / name)
    return {name: Merged(root / "out" / name, recipe) for name, recipe in asked.items()}


@pytest.fixture
def damaged(made: Mapping[str, Merged], tmp_path: Path) -> Callable[[str], Path]:

    def copy(name: str) -> Path:
        return Path(shutil.copytree(made[name].root, tmp_path / name))

    return copy


def audited(root: Path, sample: float = 0.01) -> AuditVerdict:
    return audit(root, AuditOptions(sample, seed=1), INLINE)


def _where(root: Path, name: str) -> tuple[Path, int, int]:
    """The file of a tensor, its first byte there and its length."""
    for path in sorted(root.glob("*.safetensors")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        entry = json.loads(raw[8 : 8 + length]).get(name)
        if entry is not None:
            first, stop = entry["data_offsets"]
            return path, 8 + length + first, stop - first
    raise KeyError(name)


def _rewrite(root: Path, name: str, content: bytes) -> None:
    path, offset, nbytes = _where(root, name)
    assert len(content) == nbytes
    raw = bytearray(path.read_bytes())
    raw[offset : offset + nbytes] = content
    path.write_bytes(raw)


def _content(root: Path, name: str) -> bytes:
    path, offset, nbytes = _where(root, name)
    return path.read_bytes()[offset : offset + nbytes]


def _fit_ledger(root: Path) -> None:
    """Make the digests of the ledger those of the bytes that are there."""
    rows = load_plan(root / RECORD_PLAN)["ops"].to_pylist()
    shards = load_plan(root / RECORD_PLAN)["shards"].column("name").to_pylist()
    lines = [json.loads(line) for line in (root / LEDGER).read_text().splitlines()]
    for line in lines:
        for row in line.get("receipt", {}).get("digests", {}):
            place = rows[int(row)]
            raw = (root / shards[place["shard"]]).read_bytes()
            found = raw[place["offset"] : place["offset"] + place["nbytes"]]
            line["receipt"]["digests"][row] = xxhash.xxh3_128_hexdigest(found)
    (root / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_audit_begins_with_the_structure(damaged: Callable[[str], Path]) -> None:
    root, name = damaged("coded"), EXPERT.format(0, "up") + "_scale_inv"
    shard, _, _ = _where(root, name)
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    verdict = audited(root)
    assert verdict.num_problems == len(verify(root).problems) > 0
    assert verdict.digested == 0


def test_without_damage_nothing_is_found(made: Mapping[str, Merged]) -> None:
    for name in ("plain", "coded"):
        assert verify(made[name].root).problems == ()
        verdict = audited(made[name].root, 0.2)
        assert verdict.num_problems == 0
        assert verdict.skipped == ()
        assert verdict.copied > 0


def _flip(root: Path, name: str) -> None:
    """One bit in the middle of a tensor, the lowest one of a byte."""
    content = bytearray(_content(root, name))
    content[len(content) // 2] ^= 1
    _rewrite(root, name, content)


def _swap_experts(root: Path) -> None:
    one, other = (EXPERT.format(number, "down") for number in (0, 1))
    first, second = _content(root, one), _content(root, other)
    _rewrite(root, one, second)
    _rewrite(root, other, first)


FLIPPED = [
    ("plain", EXPERT.format(1, "gate")),
    ("plain", COPIED),
    ("plain", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("coded", EXPERT.format(1, "gate")),
    ("coded", COPIED + "_scale_inv"),
]
"""A tensor of each kind."""


@pytest.mark.parametrize(("name", "tensor"), FLIPPED)
def test_one_flipped_bit_is_found_by_its_digest(
    name: str, tensor: str, damaged: Callable[[str], Path]
) -> None:
    root = damaged(name)
    _flip(root, tensor)
    assert verify(root).problems == ()
    verdict = audited(root)
    assert verdict.num_problems >= 1
    assert any(f": {tensor}" in problem.where for problem in verdict.problems)


def _swap_scales(root: Path) -> None:
    """A scale of another expert's, which is as good a number."""
    one, other = (EXPERT.format(number, "up") + "_scale_inv" for number in (0, 1))
    assert _content(root, one) != _content(root, other)
    _rewrite(root, one, _content(root, other))


def _rescale(root: Path, factor: float, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """An expert of larger scales, with other codes ``[rows, columns]``."""
    name = EXPERT.format(0, "up")
    scales = torch.frombuffer(bytearray(_content(root, name + "_scale_inv")), dtype=torch.float32)
    codes = torch.frombuffer(bytearray(_content(root, name)), dtype=torch.float8_e4m3fn)
    changed = change(codes.float().view(128, -1)).to(torch.float8_e4m3fn)
    _rewrite(root, name + "_scale_inv", (scales * factor).view(torch.uint8).numpy().tobytes())
    _rewrite(root, name, changed.view(torch.uint8).numpy().tobytes())


def _one_per_block(codes: torch.Tensor) -> torch.Tensor:
    """Zeros, but for the largest code in the last place of the blocks, which a small sample does not have."""
    found = torch.zeros_like(codes)
    found[-1, 127::128] = 448
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("factor", "change", "sample"),
    [(1e6, torch.zeros_like, 0.01), (4.0, lambda codes: codes / 4, 1.0), (1e6, _one_per_block, 0.01)],
    ids=["zeros", "coarser", "one code in its place"],
)
def test_scales_larger_than_their_blocks_need_are_found(
    factor: float,
    change: Callable[[torch.Tensor], torch.Tensor],
    sample: float,
    damaged: Callable[[str], Path],
) -> None:
    root = damaged("coded")
    _rescale(root, factor, change)
    _fit_ledger(root)
    verdict = audited(root, sample)
    assert verdict.num_problems >= 1
    assert {EXPERT.format(0, "up") in problem.where for problem in verdict.problems} == {True}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("plain", lambda root: _flip(root, EXPERT.format(1, "gate"))),
        ("plain", lambda root: _flip(root, COPIED)),
        ("plain", _swap_experts),
        ("coded", lambda root: _flip(root, EXPERT.format(1, "gate"))),
        ("coded", _swap_scales),
    ],
    ids=["flip", "flip a copy", "swap experts", "flip a code", "swap scales"],
)
def test_damage_with_digests_that_fit_is_found(
    name: str, damage: Callable[[Path], None], damaged: Callable[[str], Path]
) -> None:
    root = damaged(name)
    damage(root)
    _fit_ledger(root)
    verdict = audited(root, 1.0)
    assert 1 <= verdict.num_problems <= 3
    assert "their digest is not" not in str(verdict.problems)


@pytest.mark.parametrize("name", ["plain", "coded"])
def test_a_merge_by_another_weight_is_found(name: str, made: Mapping[str, Merged], tmp_path: Path) -> None:
    """The result of another recipe, put in place with its digests: every tensor that was merged is told."""
    other = made["other" if name == "plain" else "other coded"].root
    root = Path(shutil.copytree(made[name].root, tmp_path / "out"))
    for path in other.glob("*.safetensors"):
        shutil.copy(path, root / path.name)
    _fit_ledger(root)
    assert verify(root).problems == ()
    verdict = audited(root)
    assert verdict.num_problems > 0.8 * (verdict.tensors - verdict.copied - verdict.scales)
    assert "recomputed from the sources" in str(verdict.problems[0])


def test_a_problem_says_where_and_what(damaged: Callable[[str], Path]) -> None:
    root = damaged("plain")
    name = EXPERT.format(0, "up")
    values = torch.frombuffer(bytearray(_content(root, name)), dtype=torch.bfloat16).clone()
    values[5] += 1.0
    _rewrite(root, name, values.view(torch.uint8).numpy().tobytes())
    _fit_ledger(root)
    (problem,) = audited(root, 1.0).problems
    assert problem.where == f"{root}: {name}[0, 5]"
    assert f"it is {float(values[5]):.9g}, but recomputed from the sources" in problem.what
    assert "give or take" in problem.what
