"""Names of one model in two spellings: what has no counterpart is refused, and what may be absent is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from kits.adapter_maker import write_adapter
from kits.checkpoint_maker import read_tensors, write_checkpoint
from kits.merges import mean_of, merge_here
from kits.plan_maker import Specs, good, header_checkpoint, refusals
from kits.recipe_maker import linear, piece, stack

from raymerge.architectures.roles import NameReader, logical_name, stacks
from raymerge.architectures.rules import Role, load_rules
from raymerge.dtypes import DType

BF16 = DType.BF16
ENDS: Specs = {"model.embed_tokens.weight": (BF16, (8, 4)), "model.norm.weight": (BF16, (4,))}
SINKS = "model.layers.{}.self_attn.{}"


def _model(root: Path, word: str, model_type: str = "mimo_v2_flash") -> Path:
    specs: Specs = {SINKS.format(layer, word): (BF16, (4,)) for layer in range(2)}
    specs = {**ENDS, **specs, **{f"model.layers.{n}.mlp.up_proj.weight": (BF16, (6, 4)) for n in range(2)}}
    config = {"model_type": model_type, "num_hidden_layers": 2, "tie_word_embeddings": True}
    return header_checkpoint(root, specs, config)


def test_a_name_that_no_rule_knows_is_refused_with_the_one_that_it_may_be(tmp_path: Path) -> None:
    base, other = (_model(tmp_path / word, word, "llama") for word in ("sinks", "attention_sink_bias"))
    problems = refusals(linear(base, other))
    assert any("it lacks 2 tensors" in each and SINKS.format(0, "sinks") in each for each in problems)
    names = [(SINKS.format(layer, "attention_sink_bias"), SINKS.format(layer, "sinks")) for layer in range(2)]
    expected = "; ".join(f"{mine} (perhaps {theirs} by another name)" for mine, theirs in names)
    assert any(
        f"have no place in the output, since {base} lacks them: {expected}" in each for each in problems
    )


def test_two_tensors_for_one_name_are_one_too_many(tmp_path: Path) -> None:
    base = _model(tmp_path / "base", "sinks")
    specs: Specs = {
        SINKS.format(0, "sinks"): (BF16, (4,)),
        SINKS.format(0, "attention_sink_bias"): (BF16, (4,)),
    }
    both = header_checkpoint(tmp_path / "both", {**ENDS, **specs}, {"model_type": "mimo_v2_flash"})
    assert any(
        f"no place in the output, since {base} lacks them" in each for each in refusals(linear(base, both))
    )


def test_slices_of_models_in_two_spellings(tmp_path: Path) -> None:
    base, other = (_model(tmp_path / word, word) for word in ("attention_sink_bias", "sinks"))
    made = good({**stack(piece((base, other), 1, 2)), "merge_method": "linear", "parameters": {"weight": 1}})
    assert made.reads(SINKS.format(0, "attention_sink_bias")) == [
        (0, SINKS.format(1, "attention_sink_bias")),
        (1, SINKS.format(1, "sinks")),
    ]


def test_a_stack_of_two_spellings_is_refused_until_they_are_one(tmp_path: Path) -> None:
    base, other = (_model(tmp_path / word, word) for word in ("attention_sink_bias", "sinks"))
    (problem,) = refusals(stack(piece(base, 0, 1), piece(other, 1, 2)))
    names = f"as in {SINKS.format(1, 'sinks')}, where {base} has {SINKS.format(0, 'attention_sink_bias')},"
    remedy = f"{{merge_method: passthrough, base_model: {base}, models: [{{model: {other}}}]}}"
    assert problem.startswith(f"{other}: ")
    assert names in problem
    assert remedy in problem
    made = good(yaml.safe_load(remedy))
    assert made.reads(SINKS.format(1, "attention_sink_bias")) == [(1, SINKS.format(1, "sinks"))]


CONV = "model.layers.0.linear_attn.{}conv1d.weight"
OLMO = {"model_type": "olmo_hybrid", "num_hidden_layers": 1, "tie_word_embeddings": True} | {
    f"linear_{field}": value
    for field, value in {
        "num_key_heads": 4,
        "num_value_heads": 2,
        "key_head_dim": 3,
        "value_head_dim": 9,
    }.items()
}


def _convolutions(seed: int, *, is_joined: bool) -> dict[str, torch.Tensor]:
    parts = torch.randn(42, 1, 4, generator=torch.Generator().manual_seed(seed)).split([12, 12, 18])
    ends = {"model.embed_tokens.weight": torch.ones(8, 4)}
    if is_joined:
        return {**ends, CONV.format(""): torch.cat(parts)}
    return {**ends, **{CONV.format(f"{word}_"): part for word, part in zip("qkv", parts, strict=True)}}


@pytest.mark.parametrize("is_joined", [True, False])
def test_parts_of_a_convolution_have_the_rows_that_the_config_gives(is_joined: bool, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", _convolutions(1, is_joined=is_joined), OLMO)
    other = write_checkpoint(tmp_path / "other", _convolutions(2, is_joined=not is_joined), OLMO)
    one, two = (_convolutions(seed, is_joined=is_joined) for seed in (1, 2))
    for name, value in merge_here(mean_of(base, other), tmp_path / "out").items():
        torch.testing.assert_close(value, (one[name] + two[name]) / 2, msg=name)
    unlike = {**OLMO, "linear_value_head_dim": 6}
    roots = [
        write_checkpoint(tmp_path / str(n), read_tensors(root), unlike)
        for n, root in enumerate((base, other))
    ]
    assert any("it lacks" in problem for problem in refusals(linear(*roots)))
    silent = {key: value for key, value in OLMO.items() if key != "linear_value_head_dim"}
    whole = write_checkpoint(tmp_path / "whole", _convolutions(3, is_joined=True), silent)
    (problem,) = refusals(linear(base, whole))
    assert problem.startswith(f"{whole}: 1 tensors hold several")
    assert "does not tell the rows of each: it lacks linear_value_head_dim:" in problem


HEADS, HALF, WIDTH = 2, 2, 4
ROWS = 2 * HEADS * HALF
TOWER = "model.vision_tower.layers.0.attn"
WQKV = "vision_tower.encoder.blocks.0.wqkv"
KIMI = {"model_type": "kimi_k25", "text_config": {"num_hidden_layers": 1}, "tie_word_embeddings": True}


def _published(seed: int) -> dict[str, torch.Tensor]:
    values = torch.randn(3 * ROWS, WIDTH + 1, generator=torch.Generator().manual_seed(seed))
    ends = {"language_model.model.embed_tokens.weight": torch.ones(8, 4)}
    return {
        **ends,
        f"{WQKV}.weight": values[:, :WIDTH].contiguous(),
        f"{WQKV}.bias": values[:, WIDTH].contiguous(),
    }


def _as_modules(published: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Row ``2 * i + k`` of a head of q and k becomes row ``k * HALF + i``."""
    order = [head * 2 * HALF + 2 * i + k for head in range(HEADS) for k in range(2) for i in range(HALF)]
    made = {"model.language_model.embed_tokens.weight": torch.ones(8, 4)}
    for leaf in ("weight", "bias"):
        for number, word in enumerate("qkv"):
            part = published[f"{WQKV}.{leaf}"][number * ROWS : (number + 1) * ROWS]
            made[f"{TOWER}.{word}_proj.{leaf}"] = (part if word == "v" else part[order]).contiguous()
    return made


@pytest.mark.parametrize("is_base_published", [True, False])
def test_rows_in_the_order_of_rotary_embeddings(is_base_published: bool, tmp_path: Path) -> None:
    one, two = _published(1), _published(2)
    mean = {name: (value + two[name]) / 2 for name, value in one.items()}
    config = {**KIMI, "vision_config": {"num_attention_heads": HEADS}}
    first, second = (one, _as_modules(two)) if is_base_published else (_as_modules(one), two)
    roots = [write_checkpoint(tmp_path / str(n), each, config) for n, each in enumerate((first, second))]
    expected = mean if is_base_published else _as_modules(mean)
    merged = merge_here(mean_of(*roots), tmp_path / "out")
    assert merged.keys() == expected.keys()
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.parametrize("heads", [None, 3])
def test_rows_whose_order_the_config_does_not_tell_are_refused(heads: int | None, tmp_path: Path) -> None:
    published = _published(1)
    config = {**KIMI, "vision_config": {"num_attention_heads": heads, "depth": 1}}
    base = write_checkpoint(tmp_path / "base", published, config)
    other = write_checkpoint(tmp_path / "other", _as_modules(published), config)
    problems = "\n".join(refusals(linear(base, other)))
    assert f"{TOWER}.q_proj.weight" in problems
    assert f"{WQKV}.weight" in problems or "attn.q_proj.weight" in problems


@pytest.mark.sample(2)
@pytest.mark.parametrize("numbers", [(HEADS, None), (None, HEADS), (None, None)])
def test_rows_of_one_order_whose_heads_a_config_does_not_tell(
    numbers: tuple[int | None, int | None], tmp_path: Path
) -> None:
    """They are not taken for rows that take turns."""
    models = [_as_modules(_published(seed)) for seed in (1, 2)]
    roots = [
        write_checkpoint(
            tmp_path / str(n), model, {**KIMI, "vision_config": {"num_attention_heads": numbers[n]}}
        )
        for n, model in enumerate(models)
    ]
    if numbers != (None, None):
        sentence = f"{roots[numbers.index(None)]}: the rows of each head lie in two halves in 4 tensors"
        (problem,) = refusals(linear(*roots))
        assert problem.startswith(sentence)
        assert "vision_config.num_attention_heads of its config" in problem
        return
    for name, value in merge_here(mean_of(*roots), tmp_path / "out").items():
        torch.testing.assert_close(value, (models[0][name] + models[1][name]) / 2, msg=name)


def test_an_adapter_to_rows_in_another_order_is_refused(tmp_path: Path) -> None:
    config = {**KIMI, "vision_config": {"num_attention_heads": HEADS}}
    factors = {"lora_A": torch.ones(4, WIDTH), "lora_B": torch.ones(ROWS, 4)}
    for word, is_refused in (("q", True), ("v", False)):
        module = f"base_model.model.{TOWER}.{word}_proj"
        lora = write_adapter(tmp_path / word, {f"{module}.{each}.weight": v for each, v in factors.items()})
        for base in (_published(1), _as_modules(_published(1))):
            root = write_checkpoint(tmp_path / f"{word}{len(base)}", base, config)
            problems = refusals(linear(f"{root}+{lora}", root))
            is_other = is_refused and f"{WQKV}.weight" in base
            sentences = ("its rows are not in the order in which", f"stores {WQKV}.weight")
            assert any(all(each in problem for each in sentences) for problem in problems) == is_other
            assert is_other or not problems


def test_what_an_adapter_has_instead_lies_as_in_its_model(tmp_path: Path) -> None:
    model, name = _as_modules(_published(1)), f"{TOWER}.q_proj.weight"
    config = {**KIMI, "vision_config": {"num_attention_heads": HEADS}}
    root = write_checkpoint(tmp_path / "base", model, config)
    instead = _as_modules(_published(2))[name]
    saved = {f"base_model.model.{TOWER}.q_proj.modules_to_save.weight": instead}
    lora = write_adapter(tmp_path / "lora", saved)
    merged = merge_here(mean_of(root, f"{root}+{lora}"), tmp_path / "out")
    torch.testing.assert_close(merged[name], (model[name] + instead) / 2)


@pytest.mark.parametrize("kinds", [["full", "shared", "full", "full"], ["full"] * 4])
def test_layers_that_share_an_indexer_lack_none(kinds: list[str], tmp_path: Path) -> None:
    names = [f"model.layers.{n}.self_attn.{w}.weight" for n in range(4) for w in ("q_a_proj", "indexer.wk")]
    specs: Specs = {**ENDS, **{name: (BF16, (4, 4)) for name in names if ".1.self_attn.indexer." not in name}}
    config = {"model_type": "glm_moe_dsa", "num_hidden_layers": 4, "tie_word_embeddings": True}
    root = header_checkpoint(tmp_path, specs, {**config, "indexer_types": kinds})
    assert bool(refusals(linear(root, root))) == ("shared" not in kinds)


@pytest.mark.parametrize("prefix", ["model", "model.language_model"])
def test_layers_behind_the_last_are_of_prediction_whatever_the_prefix(prefix: str) -> None:
    names = [f"{prefix}.layers.{n}.mlp.up_proj.weight" for n in range(4)] + [
        f"{prefix}.layers.3.eh_proj.weight"
    ]
    config = {
        "model_type": "glm5_next",
        "text_config": {"num_hidden_layers": 3, "num_nextn_predict_layers": 1},
    }
    reader = NameReader(load_rules("glm5_next"), stacks=stacks(names, config))
    assert [reader.describe(name).role for name in names] == [*[Role.MLP] * 3, Role.MTP, Role.MTP]


def test_canonical_names_stay_as_they_are() -> None:
    """Names of both spellings go to one, and that goes nowhere else."""
    pairs = {
        "mistral_large4": ("layers.1.gate.weight", "model.language_model.layers.1.mlp.gate.weight"),
        "hy_v3": ("model.layers.1.mlp.router.gate.weight", "model.layers.1.mlp.gate.weight"),
        "deepseek_v4": (
            "layers.1.attn.indexer.wq_b.weight",
            "model.layers.1.self_attn.compressor.indexer.q_b_proj.weight",
        ),
        "nemotron_h": (
            "backbone.layers.1.mixer.experts.0.up_proj.weight",
            "model.layers.1.mixer.experts.0.up_proj.weight",
        ),
    }
    for model_type, (published, held) in pairs.items():
        rules = load_rules(model_type)
        canonical = logical_name(published, rules)
        assert logical_name(held, rules) == canonical == logical_name(canonical, rules)
