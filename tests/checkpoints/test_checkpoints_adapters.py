"""Adapters as peft saves them: every tensor has a meaning, or the adapter is refused with all reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.adapter_maker import PREFIX, factor_tensors, lora_config, peft_merge, write_adapter
from kits.checkpoint_maker import tiny_llama, write_json

from raymerge.checkpoints.adapters import Adapter, is_adapter, open_adapter, parse_adapter_config, pattern_of
from raymerge.checkpoints.source import open_checkpoint
from raymerge.errors import CheckpointError

Q = "model.layers.0.self_attn.q_proj"
EMBEDDING = "model.embed_tokens"


def linear(module: str = Q, rank: int = 4) -> dict[str, torch.Tensor]:
    return factor_tensors(module, (6, 5), rank, torch.Generator().manual_seed(0))


def embedding() -> dict[str, torch.Tensor]:
    name = f"{PREFIX}{EMBEDDING}.lora_embedding"
    return {f"{name}_A": torch.randn(4, 9), f"{name}_B": torch.randn(5, 4)}


def opened(root: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Adapter:
    return open_adapter(write_adapter(root, tensors, lora_config(**changes)), "mine")


def refusal(root: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> str:
    if tensors is not None:
        write_adapter(root, tensors, lora_config(**changes))
    with pytest.raises(CheckpointError) as caught:
        open_adapter(root, "mine")
    assert all(problem.remedy for problem in caught.value.problems)
    return str(caught.value)


def applied(adapter: Adapter, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the reader's facts say of the merged model, float64."""
    data = (Path(adapter.root) / "adapter_model.safetensors").read_bytes()

    def read(tensor: Any) -> torch.Tensor:
        dtype = getattr(torch, tensor.dtype.torch_name)
        raw = bytearray(data[tensor.offset : tensor.offset + tensor.nbytes])
        return torch.frombuffer(raw, dtype=dtype).view(tensor.shape).double()

    merged = {name: tensor.double() for name, tensor in base.items()}
    merged |= {name: read(tensor) for name, tensor in adapter.replaced.items()}
    for factor in adapter.factors.values():
        name = f"{factor.module}.weight"
        assert merged[name].shape == factor.weight_shape
        flipped = factor.transposed or factor.kind == "embedding"
        weight = merged[name].T if flipped else merged[name]
        weight = weight + factor.scale * (read(factor.up) @ read(factor.down))
        if factor.magnitude is not None:
            weight = weight * (read(factor.magnitude) / weight.norm(dim=1))[:, None]
        merged[name] = weight.T if flipped else weight
        if factor.up_bias is not None:
            merged[f"{factor.module}.bias"] += factor.scale * read(factor.up_bias)
    return merged


DOWN, UP = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
UP_BIAS, MAGNITUDE = f"{PREFIX}{Q}.lora_B.bias", f"{PREFIX}{Q}.lora_magnitude_vector"
SAVED, BIAS = f"{PREFIX}lm_head.weight", torch.ones(6)


class TestOpening:
    def test_says_what_it_is(self, tmp_path: Path) -> None:
        root = write_adapter(tmp_path, linear())
        (root / "tokenizer.json").write_text("{}")
        (root / "README.md").write_text("")
        adapter = open_adapter(str(root), "mine")
        assert (adapter.name, adapter.root) == ("mine", str(root))
        assert (adapter.config.base_model, adapter.config.task_type) == ("base", "CAUSAL_LM")
        assert adapter.companions == ("tokenizer.json",)
        assert [file.key for file in adapter.files] == ["adapter_model.safetensors"]
        assert set(adapter.tensors) == set(linear())

    def test_an_embedding(self, tmp_path: Path) -> None:
        factor = opened(tmp_path, embedding(), fan_in_fan_out=True).factors[EMBEDDING]
        assert (factor.kind, factor.weight_shape, factor.transposed) == ("embedding", (9, 5), False)

    @pytest.mark.parametrize("suffix", ["", ".weight"])
    def test_dora_has_magnitudes(self, tmp_path: Path, suffix: str) -> None:
        tensors = linear() | {f"{PREFIX}{Q}.lora_magnitude_vector{suffix}": torch.ones(6)}
        magnitude = opened(tmp_path, tensors, use_dora=True).factors[Q].magnitude
        assert magnitude is not None
        assert magnitude.shape == (6,)

    @pytest.mark.parametrize("declared", [True, None])
    def test_a_bias_of_the_up_factor(self, tmp_path: Path, declared: bool | None) -> None:
        tensors = linear() | {f"{PREFIX}{Q}.lora_B.bias": torch.ones(6)}
        adapter = opened(tmp_path, tensors, lora_bias=declared)
        assert adapter.factors[Q].up_bias is not None

    @pytest.mark.parametrize(
        ("stored", "name"),
        [
            ("lm_head.weight", "lm_head.weight"),
            ("lm_head.modules_to_save.weight", "lm_head.weight"),
            (f"{EMBEDDING}.base_layer.weight", f"{EMBEDDING}.weight"),
            ("model.layers.0.mlp.gate.correction_bias", "model.layers.0.mlp.gate.correction_bias"),
        ],
    )  # fmt: skip
    def test_what_is_saved_whole_has_the_models_name(self, tmp_path: Path, stored: str, name: str) -> None:
        adapter = opened(tmp_path, linear() | {PREFIX + stored: torch.zeros(9, 5)})
        assert list(adapter.replaced) == [name]

    def test_a_resized_embedding_with_factors_is_one_change(self, tmp_path: Path) -> None:
        tensors = embedding() | {f"{PREFIX}{EMBEDDING}.base_layer.weight": torch.zeros(9, 5)}
        adapter = opened(tmp_path, tensors)
        assert (len(adapter.factors), len(adapter.replaced)) == (1, 1)

    def test_models_and_adapters_are_told_apart(self, tmp_path: Path) -> None:
        model, adapter = tiny_llama(tmp_path / "model", 0), write_adapter(tmp_path / "adapter", linear())
        assert (is_adapter(model), is_adapter(str(adapter)), is_adapter(tmp_path)) == (False, True, False)
        write_json(model / "adapter_config.json", lora_config())
        assert not is_adapter(model)


class TestScales:
    def scale(self, module: str = Q, **changes: Any) -> float:
        raw = json.dumps(lora_config(**changes)).encode()
        return parse_adapter_config(raw, "here").scale(module)

    def test_patterns_change_rank_and_alpha(self) -> None:
        assert self.scale(rank_pattern={"q_proj": 2}) == 4.0
        assert self.scale(alpha_pattern={"q_proj": 2.5}) == 0.625
        assert self.scale(rank_pattern={"v_proj": 2}, alpha_pattern={"_proj": 99}) == 2.0

    @pytest.mark.parametrize(
        ("pattern", "matches"),
        [
            ("q_proj", True),
            (Q, True),
            (r"layers\.[0-3]\.self_attn\.q_proj", True),
            ("model.layers.*q_proj", True),
            ("proj", False),
            ("model", False),
            ("layers.1.self_attn.q_proj", False),
            ("v_proj|k_proj", False),
        ],
    )
    def test_a_pattern_speaks_of_the_end_of_a_path_from_a_dot(self, pattern: str, matches: bool) -> None:
        assert pattern_of(pattern).matches(Q) == matches


class TestRefusals:
    def test_a_model_in_the_place_of_an_adapter(self, tmp_path: Path) -> None:
        text = refusal(tiny_llama(tmp_path, 0))
        assert "is a model, not an adapter: it has no adapter_config.json. Name the directory of an" in text
        assert "(a model stands before a '+', or is listed in a recipe without 'adapter')" in text

    def test_an_adapter_in_the_place_of_a_model(self, tmp_path: Path) -> None:
        root = write_adapter(tmp_path, linear())
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(root, "m")
        assert f"is a LoRA adapter (adapter_config.json), not a model. Name it behind the model that it was trained on: MODEL+{root}." in str(caught.value)  # fmt: skip  # noqa: E501

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        text = refusal(tmp_path)
        assert "is no adapter: it has no adapter_config.json. Check the path: the directory of an" in text
        assert "+" not in text.partition("is no adapter")[2]

    def test_two_tensors_for_one_part(self, tmp_path: Path) -> None:
        names = [f"{PREFIX}{Q}.lora_magnitude_vector{suffix}" for suffix in ("", ".weight")]
        text = refusal(tmp_path, linear() | {name: torch.ones(6) for name in names}, use_dora=True)
        assert f"1 tensor ({names[1]}) can be neither" in text

    def test_no_weights(self, tmp_path: Path) -> None:
        write_json(tmp_path / "adapter_config.json", lora_config())
        assert "adapter_model.safetensors is not there" in refusal(tmp_path)

    def test_pickled_weights_that_are_refused(self, tmp_path: Path) -> None:
        write_json(tmp_path / "adapter_config.json", lora_config())
        (tmp_path / "adapter_model.bin").write_bytes(b"")
        text = refusal(tmp_path)
        assert "pickled weights are refused (pickled_weights: refuse). Take that out" in text
        assert f"torch.load('{tmp_path}/adapter_model.bin', weights_only=True)" in text

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"peft_type": "LOHA"}, "is an adapter of type LOHA"),
            ({"layer_replication": [[0, 2], [1, 3]]}, "'layer_replication'"),
            ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "'target_parameters'"),
            ({"trainable_token_indices": [1]}, "'trainable_token_indices'"),
            ({"use_qalora": True}, "'use_qalora'"),
            ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights 'pissa_niter_16'"),
            ({"r": 0}, "r is 0, not a whole number from 1"),
            ({"r": True}, "r is True"),
            ({"lora_alpha": "8"}, "lora_alpha is '8', not a number"),
            ({"rank_pattern": [4]}, "rank_pattern is [4], not a map"),
            ({"alpha_pattern": {"q(": 1}}, "'q(' is no regular expression"),
            ({"use_rslora": "yes"}, "use_rslora is 'yes', not true or false"),
            ({"task_type": 3}, "task_type is 3, not a text"),
        ],
    )  # fmt: skip
    def test_configs(self, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
        assert said in refusal(tmp_path, linear(), **changes)

    @pytest.mark.parametrize("beginning", [True, False, None, "gaussian", "eva", "orthogonal"])
    def test_beginnings_that_leave_the_model_alone(self, tmp_path: Path, beginning: object) -> None:
        assert opened(tmp_path, linear(), init_lora_weights=beginning).factors

    @pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b'{"peft_type": 1}', b"\xff", b"[" * 100_000])
    def test_configs_that_are_none(self, tmp_path: Path, content: bytes) -> None:
        root = write_adapter(tmp_path, linear())
        (root / "adapter_config.json").write_bytes(content)
        assert "adapter_config.json" in refusal(root)

    def test_a_cut_file_and_a_bad_config_are_told_at_once(self, tmp_path: Path) -> None:
        root = write_adapter(tmp_path, linear(), lora_config(r=0))
        path = root / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        text = refusal(root)
        assert "1 too few" in text
        assert "r is 0" in text

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.0.self_attn.q_proj.lora_A.weight",
            f"{PREFIX}{Q}.lora_A.default.weight",
            f"{PREFIX}model.layers.0.mlp.experts.base_layer.lora_A.weight",
            f"{PREFIX}{Q}.modules_to_save.default.weight",
        ],
    )
    def test_a_tensor_without_a_meaning(self, tmp_path: Path, name: str) -> None:
        text = refusal(tmp_path, linear() | {name: torch.zeros(4, 5)})
        assert f"1 tensor ({name}) can be neither factors" in text

    @pytest.mark.parametrize(
        ("tensors", "changes", "words"),
        [
            ({}, {}, "holds no tensors"),
            (
                {name: each.to(torch.int8) for name, each in linear().items()},
                {},
                "is of I8, not a plain float",
            ),
            ({UP: linear()[UP]}, {}, "but no lora_A.weight"),
            ({DOWN: linear()[DOWN]}, {}, "but no lora_B.weight"),
            (
                embedding() | linear(EMBEDDING),
                {},
                "has factors of an embedding, and lora_A.weight, lora_B.weight",
            ),
            (linear() | {UP: torch.zeros(6, 3)}, {}, "[4, 5] and [6, 3], which cannot be multiplied"),
            (
                linear() | dict.fromkeys([SAVED, SAVED.replace("weight", "modules_to_save.weight")], BIAS),
                {},
                "1 tensor",
            ),
            ({DOWN: torch.zeros(4, 3, 3, 3), UP: torch.zeros(8, 4, 1, 1)}, {}, "is a convolution"),
            (
                linear(),
                {"r": 8, "rank_pattern": {"v_proj": 4}},
                f"the factors of {Q} have rank 4, but by adapter_config.json it is 8",
            ),
            (linear() | {UP_BIAS: BIAS}, {}, "lora_bias is false"),
            (linear() | {MAGNITUDE: BIAS}, {}, "but use_dora is false"),
            (linear(), {"use_dora": True}, "but use_dora is true"),
            (linear() | {MAGNITUDE: BIAS[:5]}, {"use_dora": True}, "has the shape [5]; [6] is expected"),
        ],
    )
    def test_tensors_that_make_no_change(
        self, tmp_path: Path, tensors: dict[str, torch.Tensor], changes: dict[str, Any], words: str
    ) -> None:
        assert words in refusal(tmp_path, tensors, **changes)

    def test_everything_at_once(self, tmp_path: Path) -> None:
        tensors = linear() | linear("v", rank=2) | {"stray": torch.zeros(1)}
        del tensors[f"{PREFIX}{Q}.lora_A.weight"]
        assert len(refusal(tmp_path, tensors).splitlines()) == 3


class TestAgainstPeftsRule:
    """The facts that are read say the same merged model as peft's own arithmetic."""

    def same(self, root: Path, base: dict[str, torch.Tensor]) -> None:
        expected, found = peft_merge(base, root), applied(open_adapter(root, "m"), base)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor)

    @settings(deadline=None, max_examples=13)
    @given(
        rank=st.integers(1, 6),
        alpha=st.integers(1, 64),
        rslora=st.booleans(),
        dora=st.booleans(),
        flipped=st.booleans(),
        patterns=st.dictionaries(
            st.sampled_from(["q_proj", "v_proj", Q, "layers.1.mlp.down_proj"]), st.integers(1, 6)
        ),
    )
    def test_any_scale(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        rank: int,
        alpha: int,
        rslora: bool,
        dora: bool,
        flipped: bool,
        patterns: dict[str, int],
    ) -> None:
        root = tmp_path_factory.mktemp("adapter")
        generator = torch.Generator().manual_seed(rank)
        modules = (Q, "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj")
        config = lora_config(
            r=rank, lora_alpha=alpha, use_rslora=rslora, use_dora=dora, fan_in_fan_out=flipped,
            rank_pattern=patterns, alpha_pattern={"v_proj": alpha + 1},
        )  # fmt: skip
        facts = parse_adapter_config(json.dumps(config).encode(), "here")
        base: dict[str, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        for module in modules:
            base[f"{module}.weight"] = torch.randn((5, 6) if flipped else (6, 5), generator=generator)
            tensors |= factor_tensors(module, (6, 5), facts.ranks.of(module), generator)
            if dora:
                tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = torch.rand(6, generator=generator)
        self.same(write_adapter(root, tensors, config), base)

    def test_embeddings_biases_and_saved_modules(self, tmp_path: Path) -> None:
        base = {f"{Q}.weight": torch.randn(6, 5), f"{Q}.bias": torch.randn(6)}
        base |= {f"{EMBEDDING}.weight": torch.randn(9, 5), "model.norm.weight": torch.randn(5)}
        tensors = linear() | embedding() | {f"{PREFIX}model.norm.weight": torch.randn(5)}
        tensors[f"{PREFIX}{Q}.lora_B.bias"] = torch.randn(6)
        config = lora_config(
            target_modules=["q_proj", "embed_tokens"], modules_to_save=["norm"], lora_bias=True
        )
        self.same(write_adapter(tmp_path, tensors, config), base)
