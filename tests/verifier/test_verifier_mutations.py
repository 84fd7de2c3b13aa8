"""Damage of every kind, done to small merged mixtures of experts: each is found at the level that claims to.

The table of docs/how-to/verify.md says the same: what structure finds, what only an audit finds, and what
only recomputing finds as the ledger was made to fit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from kits.checkpoint_maker import write_json
from kits.merge_cases import merge
from kits.quantised_merges import plain_twin
from kits.quantised_models import QuantisedModel, deepseek_v3
from safetensors.torch import load_file, save_file

from raymerge.api import AuditOptions, AuditVerdict, RunOptions, audit, verify
from raymerge.merge_plan.tables import load_plan
from raymerge.verifier.structure import RECORD_PLAN

INDEX = "model.safetensors.index.json"
LEDGER = Path("raymerge") / "ledger.jsonl"
INLINE = RunOptions(inline=True, threads=1)
SHARD = 400_000
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"
NORM = "model.norm.weight"
ROUTER = "model.layers.1.mlp.gate.weight"
COPIED = "model.layers.0.self_attn.o_proj.weight"


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged mixture and how it was made."""

    root: Path
    """The checkpoint."""
    recipe: Mapping[str, Any]
    """Its recipe."""


def _recipe(models: list[QuantisedModel], weight: float) -> dict[str, Any]:
    """A mean, and attention as the first model has it."""
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
    """A copy of one of them, to be damaged."""

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


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def _fit_ledger(root: Path) -> None:
    """Make the digests of the ledger those of the bytes that are there."""
    rows = load_plan(root / RECORD_PLAN)["rows"].to_pylist()
    shards = load_plan(root / RECORD_PLAN)["shards"].column("name").to_pylist()
    lines = [json.loads(line) for line in (root / LEDGER).read_text().splitlines()]
    for line in lines:
        for row in line.get("receipt", {}).get("digests", {}):
            place = rows[int(row)]
            raw = (root / shards[place["shard"]]).read_bytes()
            found = raw[place["offset"] : place["offset"] + place["nbytes"]]
            line["receipt"]["digests"][row] = xxhash.xxh3_128_hexdigest(found)
    (root / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))


# What structure finds


def _duplicate_a_name(root: Path) -> None:
    one, other = sorted(root.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(one).items()))
    save_file({**load_file(other), name: tensor}, other, metadata={"format": "pt"})


def _untie(root: Path) -> None:
    _edit(root / "config.json", lambda config: config.update(tie_word_embeddings=True))


def _drop_scale(root: Path) -> None:
    name = EXPERT.format(0, "up") + "_scale_inv"
    shard, _, _ = _where(root, name)
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    _edit(root / INDEX, lambda index: index["weight_map"].pop(name))


@pytest.mark.parametrize(
    ("name", "damage"), [("plain", _duplicate_a_name), ("plain", _untie), ("coded", _drop_scale)]
)
def test_structure_finds_it(
    name: str, damage: Callable[[Path], None], damaged: Callable[[str], Path]
) -> None:
    root = damaged(name)
    damage(root)
    assert verify(root).problems
    # An audit begins with it.
    verdict = audited(root)
    assert verdict.num_problems == len(verify(root).problems)
    assert verdict.digested == 0


# What an audit finds


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
    ("plain", ROUTER),
    ("plain", NORM),
    ("plain", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("coded", EXPERT.format(1, "gate")),
    ("coded", EXPERT.format(1, "gate") + "_scale_inv"),
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


def test_swapped_experts_are_found(damaged: Callable[[str], Path]) -> None:
    root = damaged("plain")
    _swap_experts(root)
    assert verify(root).problems == ()
    assert {EXPERT.format(number, "down") in str(audited(root).problems) for number in (0, 1)} == {True}


# What only recomputing finds


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
