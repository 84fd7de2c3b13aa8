"""Adapters laid over models, and files of tensors as sources: what they replace, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import PREFIX, factor_tensors, lora_config, write_adapter
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint
from kits.marks import one_in
from kits.merges import check_close, merge_here
from kits.pickle_maker import PICKLE, pickled_twin
from kits.recipe_maker import linear, one, slerp
from safetensors.torch import save_file

import raymerge
from raymerge.api import plan, read_recipe
from raymerge.errors import CheckpointError, PlanError
from raymerge.merge_plan.tables import Plan
from raymerge.planner.inputs.consistency import config_problems
from raymerge.planner.inputs.sources import names_file, open_models, open_raw, open_reference, opener_of
from raymerge.recipes.entry import ModelReference

EXPERTS, WIDTH, HIDDEN = 4, 6, 8
BLOCK = "model.layers.0.mlp.experts"
Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
UP = "model.layers.0.mlp.up_proj"


def _refusal(recipe: Mapping[str, Any]) -> str:
    with pytest.raises(PlanError) as caught:
        raymerge.plan(json.loads(json.dumps(recipe, default=str))).require()
    return str(caught.value)


def _generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _saved(root: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    return write_adapter(root, {PREFIX + name: each for name, each in tensors.items()}, lora_config(**config))


def _product(factors: Mapping[str, torch.Tensor], module: str) -> torch.Tensor:
    up, down = (factors[f"{PREFIX}{module}.lora_{part}.weight"].double() for part in "BA")
    return 2.0 * up @ down


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A Llama of one layer in float32."""
    return tiny_llama(tmp_path / "llama", 1, layers=1, hidden=32, dtype=torch.float32)


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    generator = _generator(4)
    shapes = {
        "model.embed_tokens.weight": (16, HIDDEN),
        "lm_head.weight": (16, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.mlp.gate.weight": (EXPERTS, HIDDEN),
        f"{BLOCK}.gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN),
        f"{BLOCK}.down_proj": (EXPERTS, HIDDEN, WIDTH),
    }
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": EXPERTS,
        "moe_intermediate_size": WIDTH,
        "vocab_size": 16,
        "tie_word_embeddings": False,
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return write_checkpoint(tmp_path / "fused", tensors, config)


class TestFused:
    """What is saved whole of one expert, over a tensor that holds all."""

    def test_one_expert_is_replaced_and_the_others_stay(self, tmp_path: Path, fused: Path) -> None:
        own = torch.randn(HIDDEN, WIDTH, generator=_generator())
        lora = _saved(tmp_path / "lora", {f"{BLOCK}.2.down_proj.weight": own})
        expected = read_tensors(fused)
        expected[f"{BLOCK}.down_proj"][2] = own
        model = f"{fused}+{lora}"
        for number, recipe in enumerate((one(model), linear(model))):
            check_close(merge_here(recipe, tmp_path / f"out{number}"), expected)

    def test_half_of_an_expert(self, tmp_path: Path, fused: Path) -> None:
        own = torch.randn(WIDTH, HIDDEN, generator=_generator())
        lora = _saved(tmp_path / "lora", {f"{BLOCK}.1.up_proj.weight": own})
        expected = read_tensors(fused)
        expected[f"{BLOCK}.gate_up_proj"][1, WIDTH:] = own
        check_close(merge_here(one(f"{fused}+{lora}"), tmp_path / "out"), expected)

    def test_all_experts_leave_nothing_of_the_model_s(self, tmp_path: Path, fused: Path) -> None:
        own = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=_generator())
        lora = _saved(tmp_path / "lora", {f"{BLOCK}.{n}.down_proj.weight": own[n] for n in range(EXPERTS)})
        recipe = linear(f"{fused}+{lora}")
        check_close(merge_here(recipe, tmp_path / "out"), read_tensors(fused) | {f"{BLOCK}.down_proj": own})
        assert "deltas applied 4 of 4" in "\n".join(raymerge.plan(recipe).manifest["notes"])

    def test_beside_a_model_without_it(self, tmp_path: Path, fused: Path) -> None:
        own = torch.randn(HIDDEN, WIDTH, generator=_generator())
        lora = _saved(tmp_path / "lora", {f"{BLOCK}.0.down_proj.weight": own})
        tensors = read_tensors(fused)
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        expected[f"{BLOCK}.down_proj"][0] = (own + tensors[f"{BLOCK}.down_proj"][0]) / 2
        for number, models in enumerate(((f"{fused}+{lora}", fused), (fused, f"{fused}+{lora}"))):
            check_close(merge_here(linear(*models), tmp_path / f"out{number}"), expected)

    def test_a_replaced_expert_takes_its_factor_too(self, tmp_path: Path, fused: Path) -> None:
        own = torch.randn(HIDDEN, WIDTH, generator=_generator())
        module = f"{BLOCK}.3.down_proj"
        factors = factor_tensors(module, (HIDDEN, WIDTH), 4, _generator(2))
        lora = write_adapter(tmp_path / "lora", factors | {f"{PREFIX}{module}.weight": own}, lora_config())
        expected = read_tensors(fused)
        expected[f"{BLOCK}.down_proj"][3] = own.double() + _product(factors, module)
        check_close(merge_here(one(f"{fused}+{lora}"), tmp_path / "out"), expected)

    def test_an_expert_of_another_size(self, tmp_path: Path, fused: Path) -> None:
        lora = _saved(tmp_path / "lora", {f"{BLOCK}.2.down_proj.weight": torch.zeros(HIDDEN, WIDTH + 1)})
        text = _refusal(one(f"{fused}+{lora}"))
        assert f"{lora}: {BLOCK}.2.down_proj.weight: what it holds in place of" in text
        assert f"is [8, 7], but that of {fused}+{lora} is [8, 6]" in text


class TestReplaced:
    def test_another_shape_names_adapter_and_model(self, tmp_path: Path, llama: Path) -> None:
        own = {f"{UP}.weight": torch.zeros(40, 32), f"{Q}.weight": torch.zeros(4)}
        lora = _saved(tmp_path / "lora", own | {"model.embed_tokens.weight": torch.zeros(70, 31)})
        text = _refusal(linear(f"{llama}+{lora}", llama))
        assert f"{lora}: {UP}.weight: what it holds in place of {UP}.weight is [40, 32]" in text
        assert f"{lora}: {Q}.weight: what it holds in place of {Q}.weight is [4]" in text
        assert "is [70, 31], but that of" in text
        assert "other shapes than" not in text

    def test_two_of_one_target(self, tmp_path: Path, llama: Path) -> None:
        names = (f"{UP}.weight", f"{UP.removeprefix('model.')}.weight")
        lora = _saved(tmp_path / "lora", {name: torch.zeros(64, 32) for name in names})
        text = _refusal(one(f"{llama}+{lora}"))
        assert f"it changes {UP}.weight of {llama}+{lora}, and {PREFIX}" in text
        assert "does the same; one of them is expected" in text

    def test_a_projection_of_what_is_stored_as_one(self, tmp_path: Path) -> None:
        config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "num_hidden_layers": 1}
        block = "gpt_neox.layers.0.attention"
        tensors = {"gpt_neox.embed_in.weight": torch.zeros(16, 8)}
        tensors |= {f"{block}.query_key_value.weight": torch.zeros(24, 8)}
        base = write_checkpoint(tmp_path / "base", tensors, config)
        lora = _saved(tmp_path / "lora", {f"{block}.q_proj.weight": torch.ones(8, 8)})
        assert "0 of its 1 changes have a tensor to go to" in _refusal(one(f"{base}+{lora}"))


def _gpt2(root: Path, model_type: str = "gpt2") -> Path:
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": model_type, "n_layer": 1, "n_head": 2}
    config |= {"n_embd": 8, "vocab_size": 32, "tie_word_embeddings": False}
    shapes = {
        "transformer.wte.weight": (32, 8),
        "transformer.h.0.attn.c_attn.weight": (8, 24),
        "transformer.h.0.attn.c_proj.weight": (8, 8),
        "transformer.h.0.mlp.c_fc.weight": (8, 16),
        "transformer.h.0.mlp.c_proj.weight": (16, 8),
        "lm_head.weight": (32, 8),
    }
    generator = _generator(9)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return write_checkpoint(root, tensors, config)


C_PROJ = "transformer.h.0.attn.c_proj"
OTHERS = {"transformer.h.0.attn.c_attn": (24, 8), "transformer.h.0.mlp.c_proj": (8, 16), "lm_head": (32, 8)}


class TestSquares:
    """peft goes by the class of a module; what its file says of the orientation is that of the last."""

    @pytest.mark.sample(3)
    @pytest.mark.parametrize("declared", [True, False])
    @pytest.mark.parametrize("others", [(), tuple(OTHERS)[1:2], tuple(OTHERS)[2:], tuple(OTHERS)])
    def test_on_gpt2(self, tmp_path: Path, declared: bool, others: tuple[str, ...]) -> None:
        base = _gpt2(tmp_path / "base")
        factors = factor_tensors(C_PROJ, (8, 8), 4, _generator())
        for other in others:
            factors |= factor_tensors(other, OTHERS[other], 4, _generator(2))
        lora = write_adapter(tmp_path / "lora", factors, lora_config(fan_in_fan_out=declared))
        expected = {name: tensor.double() for name, tensor in read_tensors(base).items()}
        for module in (C_PROJ, *others):
            change = _product(factors, module)
            expected[f"{module}.weight"] += change if module == "lm_head" else change.T
        check_close(merge_here(one(f"{base}+{lora}"), tmp_path / "out"), expected)

    @pytest.mark.parametrize("declared", [True, False])
    def test_on_a_llama(self, tmp_path: Path, llama: Path, declared: bool) -> None:
        rows = read_tensors(llama)[f"{K}.weight"].shape[0]
        shapes = {Q: (32, 32), UP: (64, 32), K: (rows, 32)}
        factors: dict[str, torch.Tensor] = {}
        for module, shape in shapes.items():
            factors |= factor_tensors(module, shape, 4, _generator(len(module)))
        lora = write_adapter(tmp_path / "lora", factors, lora_config(fan_in_fan_out=declared))
        expected = {name: tensor.double() for name, tensor in read_tensors(llama).items()}
        for module in shapes:
            expected[f"{module}.weight"] += _product(factors, module)
        check_close(merge_here(one(f"{llama}+{lora}"), tmp_path / "out"), expected)

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("declared", "others", "decoder", "is_turned"),
        [
            # Nothing else tells, so the file does.
            (True, {}, "of_its_own", True),
            (False, {}, "of_its_own", False),
            # Modules disagree: those of the same name tell.
            (False, OTHERS, "of_its_own", True),
            # A GPT-2 within another model.
            (False, {}, "gpt2", True),
        ],
    )
    def test_within_a_model_that_is_not_known(
        self, tmp_path: Path, declared: bool, others: Mapping[str, Any], decoder: str, is_turned: bool
    ) -> None:
        base = _gpt2(tmp_path / "base", "of_its_own")
        config = json.loads((base / "config.json").read_text()) | {"decoder": {"model_type": decoder}}
        write_checkpoint(base, read_tensors(base), config)
        factors = factor_tensors(C_PROJ, (8, 8), 4, _generator())
        for other, shape in others.items():
            factors |= factor_tensors(other, shape, 4, _generator(2))
        lora = write_adapter(tmp_path / "lora", factors, lora_config(fan_in_fan_out=declared))
        found = merge_here(one(f"{base}+{lora}"), tmp_path / "out")[f"{C_PROJ}.weight"].double()
        change, own = _product(factors, C_PROJ), read_tensors(base)[f"{C_PROJ}.weight"].double()
        torch.testing.assert_close(found, own + (change.T if is_turned else change), rtol=3e-6, atol=3e-7)

    def test_dora_on_a_square_of_gpt2(self, tmp_path: Path) -> None:
        base = _gpt2(tmp_path / "base")
        factors = factor_tensors(C_PROJ, (8, 8), 4, _generator())
        factors |= {f"{PREFIX}{C_PROJ}.lora_magnitude_vector": torch.ones(8)}
        lora = write_adapter(tmp_path / "lora", factors, lora_config(use_dora=True))
        text = _refusal(one(f"{base}+{lora}"))
        assert f"{C_PROJ}: it is a DoRA adapter on a weight that is stored [in, out]" in text


def test_dora_on_an_embedding_is_called_that(tmp_path: Path, llama: Path) -> None:
    module = f"{PREFIX}model.embed_tokens"
    rows = read_tensors(llama)["model.embed_tokens.weight"].shape[0]
    factors = {
        f"{module}.lora_embedding_A": torch.zeros(4, rows),
        f"{module}.lora_embedding_B": torch.zeros(32, 4),
        f"{module}.lora_magnitude_vector": torch.ones(32),
    }
    lora = write_adapter(tmp_path / "lora", factors, lora_config(use_dora=True))
    text = _refusal(one(f"{llama}+{lora}"))
    assert "model.embed_tokens: it is a DoRA adapter on an embedding, which raymerge does not apply" in text


class TestStacks:
    """A model with an encoder and a decoder, and one with a decoder alone."""

    @staticmethod
    def _model(root: Path, *stacks: str) -> Path:
        names = [f"model.{stack}.layers.0.fc1.weight" for stack in stacks]
        tensors = {name: torch.zeros(8, 8) for name in names} | {"model.shared.weight": torch.zeros(16, 8)}
        return write_checkpoint(root, tensors, {"model_type": "of_its_own", "num_hidden_layers": 1})

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("stack", ["encoder", "model.of_its_own.decoder", "transformer.encoder"])
    def test_each_finds_its_own(self, tmp_path: Path, stack: str) -> None:
        base = self._model(tmp_path / "base", "encoder", "decoder")
        lora = _saved(tmp_path / "lora", {f"{stack}.layers.0.fc1.weight": torch.ones(8, 8)})
        found = merge_here(one(f"{base}+{lora}"), tmp_path / "out")
        assert [name for name, tensor in found.items() if tensor.any()] == [
            f"model.{stack.rpartition('.')[2]}.layers.0.fc1.weight"
        ]

    @pytest.mark.parametrize(("stacks", "is_found"), [(("decoder",), True), (("encoder", "decoder"), False)])
    def test_the_decoder_s_word_counts_beside_an_encoder(
        self, tmp_path: Path, stacks: tuple[str, ...], is_found: bool
    ) -> None:
        base = self._model(tmp_path / "base", *stacks)
        lora = _saved(tmp_path / "lora", {"model.layers.0.fc1.weight": torch.ones(8, 8)})
        if is_found:
            found = merge_here(one(f"{base}+{lora}"), tmp_path / "out")
            assert found["model.decoder.layers.0.fc1.weight"].all()
        else:
            assert "0 of its 1 changes have a tensor" in _refusal(one(f"{base}+{lora}"))


def put(path: Path, seed: int, *, layers: int = 3) -> str:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"blocks.{n}.attn.weight": torch.randn(4, 4, generator=generator) for n in range(layers)}
    tensors["in.weight"] = torch.randn(8, 4, generator=generator)
    save_file(tensors, path)
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return put(tmp_path / "one.safetensors", 1), put(tmp_path / "two.safetensors", 2)


def refusal(asked: Mapping[str, Any]) -> str:
    with pytest.raises(PlanError) as caught:
        open_models(read_recipe(asked)).require()
    assert all(problem.remedy for problem in caught.value.problems)
    return "\n".join(map(str, caught.value.problems))


def settings_by_layer(made: Plan) -> dict[str, float]:
    """The parameter ``t`` of every tensor of a slerp."""
    names = made["tensors"].column("name").to_pylist()
    return {
        names[row["tensor"]]: made.expressions[row["expression"]].bind(keys=(), shape=()).number("t")
        for row in made["ops"].to_pylist()
    }


class TestOpened:
    def test_a_file_of_this_machine(self, files: tuple[str, str]) -> None:
        found = open_reference(ModelReference(files[0]))
        assert found.is_single_file
        assert (found.name, found.config) == (files[0], {})
        assert open_reference(ModelReference(f"file://{files[0]}")).root == found.root

    def test_home_is_understood(self, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(Path(files[0]).parent))
        assert names_file(ModelReference("~/one.safetensors"))
        assert open_reference(ModelReference("~/one.safetensors")).tensors

    def test_what_is_no_file_is_none(self, tmp_path: Path) -> None:
        for path in ("x" * 5000, "no/such.safetensors", "nul\0", "", str(tmp_path)):
            assert not names_file(ModelReference(path))

    def test_it_has_no_revisions(self, files: tuple[str, str]) -> None:
        with pytest.raises(CheckpointError, match="'main' is asked for, but this is a file"):
            open_raw(files[0], files[0], revision="main", pickled=False)

    @pytest.mark.parametrize("name", ["config.json", "model.gguf", "model.safetensors.index.json"])
    def test_other_files_are_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("{}")
        with pytest.raises(CheckpointError, match=r"does not end in \.safetensors"):
            open_reference(ModelReference(str(tmp_path / name)))

    @pytest.mark.parametrize("name", one_in(3, ["x.bin", "x.pt", "x.pth", "x.ckpt"]))
    def test_pickled_ones_only_if_they_are_allowed(self, tmp_path: Path, name: str) -> None:
        torch.save({"a": torch.ones(3)}, tmp_path / name)
        reference = ModelReference(str(tmp_path / name))
        with pytest.raises(CheckpointError, match=r"pickled_weights: refuse.*x\.safetensors"):
            open_reference(reference, pickled=False)
        assert list(open_reference(reference).tensors) == ["a"]

    def test_the_recipe_decides_how_models_are_opened(self, tmp_path: Path) -> None:
        model = pickled_twin(tiny_llama(tmp_path / "one", 1), tmp_path / "two")
        asked = linear(str(model))
        (source,) = open_models(read_recipe(asked)).require()
        assert [file.key for file in source.checkpoint.files] == [PICKLE]
        refusing = {**asked, "pickled_weights": "refuse"}
        assert "(pickled_weights: refuse)" in refusal(refusing)
        with pytest.raises(CheckpointError):
            opener_of(read_recipe(refusing))(ModelReference(str(model)))

    def test_there_is_no_config_to_disagree_with(self, tmp_path: Path) -> None:
        save_file(
            {"model.layers.0.w": torch.ones(2), "model.layers.7.v": torch.ones(3)}, tmp_path / "x.safetensors"
        )
        assert list(config_problems(open_reference(ModelReference(str(tmp_path / "x.safetensors"))))) == []


class TestPlanned:
    def test_gradients_follow_the_numbers_of_layers(self, files: tuple[str, str]) -> None:
        asked = {**slerp(*files), "parameters": {"t": [0, 1]}}
        found = settings_by_layer(plan(asked).require())
        assert [found[f"blocks.{n}.attn.weight"] for n in range(3)] == pytest.approx([0, 0.5, 1])

    def test_head_and_embedding_are_tensors_like_any_other(self, tmp_path: Path) -> None:
        one = tiny_llama(tmp_path / "one", 1) / "model.safetensors"
        two = tiny_llama(tmp_path / "two", 2) / "model.safetensors"
        weights = [{"filter": "lm_head", "value": 1.0}, {"value": 0.5}]
        models = [
            {"model": str(one), "parameters": {"weight": 0.5}},
            {"model": str(two), "parameters": {"weight": weights}},
        ]
        made = plan({"merge_method": "linear", "models": models}).require()
        assert made.manifest["config"] == {}
        assert "lm_head.weight" in made["tensors"].column("name").to_pylist()

    def test_a_tensor_that_one_file_lacks_is_told(self, tmp_path: Path, files: tuple[str, str]) -> None:
        more = put(tmp_path / "more.safetensors", 3, layers=4)
        assert "blocks.3.attn.weight" in "\n".join(map(str, plan(linear(files[0], more)).problems))
        assert not plan(linear(files[0], more, extra_tensors="drop")).problems


class TestRefused:
    def test_beside_models(self, tmp_path: Path, files: tuple[str, str]) -> None:
        model = str(tiny_llama(tmp_path / "model", 1))
        text = refusal(linear(model, *files))
        assert f"recipe: models[1].model: {files[0]} has tensors only, while {model} is a model" in text
        assert f"recipe: models[2].model: {files[1]} has tensors only" in text
        assert len(text.splitlines()) == 2
        assert "has tensors only" in refusal(linear(*files, base_model=model))

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("tokenizer", {"source": "union"}, "has no tokenizer"),
            ("tokenizer_source", "union", "has no tokenizer"),
            ("chat_template", "auto", "has no tokenizer, so a chat template has no place"),
        ],
    )
    def test_what_needs_a_tokenizer(self, files: tuple[str, str], key: str, value: Any, said: str) -> None:
        text = refusal(linear(*files, **{key: value}))
        assert text.startswith(f"recipe: {key}: '{key}' is given, but {files[0]} {said}")

    def test_slices_and_modules(self, files: tuple[str, str]) -> None:
        sources = [{"model": file, "layer_range": [0, 1], "parameters": {"weight": 1}} for file in files]
        module = {"models": [{"model": files[0], "parameters": {"weight": 1}}]}
        for key, value, words in (
            ("slices", [{"sources": sources}], "has no config that counts its layers"),
            ("modules", {"text_decoder": module}, "has no config that tells the parts of a model"),
        ):
            text = refusal({"merge_method": "linear", key: value})
            assert f"'{key}' is given" in text
            assert words in text

    def test_everything_at_once(self, tmp_path: Path, files: tuple[str, str]) -> None:
        model = str(tiny_llama(tmp_path / "model", 1))
        broken = tmp_path / "broken.safetensors"
        broken.write_bytes(b"")
        text = refusal(linear(model, files[0], str(broken), chat_template="auto"))
        assert "has tensors only" in text
        assert "too few for a safetensors file" in text
        assert "a chat template has no place" in text
