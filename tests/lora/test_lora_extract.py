"""Adapters from two models: with them the base is the trained model, as nearly as the rank allows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import peft_merge
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint

from raymerge.checkpoints.adapters import open_adapter
from raymerge.errors import CheckpointError, NonFiniteError, OptionError, PlanError, TargetError, UserError
from raymerge.lora import Extraction, ExtractOptions, Limits, Selection, extract_lora, matrices

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.0"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base and its fine-tune, float32."""
    base = tiny_llama(tmp_path / "base", 0, dtype=torch.float32)
    return tiny_llama(tmp_path / "tuned", 1, base=base, dtype=torch.float32), base


def options(rank: int = 64, energy: float | None = None, **selection: Any) -> ExtractOptions:
    return ExtractOptions(Limits(rank, energy), Selection(**selection), "cpu")


def written(root: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    return write_checkpoint(root, tensors, llama_config(layers=1) | config)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    squares = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return math.sqrt(squares)


def check(extraction: Extraction, model: Path, base: Path) -> None:
    """peft would use every tensor, raymerge reads every tensor, and the stated error is the true one."""
    new, old = read_tensors(model), read_tensors(base)
    merged = peft_merge(old, Path(extraction.output))
    adapter = open_adapter(extraction.output, "m")
    assert set(adapter.factors) == {module.name for module in extraction.modules}
    for module in extraction.modules:
        assert adapter.factors[module.name].rank == module.rank
    new = {name: new[name] for name in old}
    assert distance(merged, new) == pytest.approx(
        extraction.relative_error * distance(new, old), rel=1e-3, abs=1e-5
    )


def refusal(model: Path, base: Path, out: Path, chosen: ExtractOptions | None = None) -> str:
    with pytest.raises(UserError) as caught:
        extract_lora(model, base, out, chosen)
    assert not out.exists()
    assert all(problem.remedy for problem in caught.value.problems)
    return str(caught.value)


class TestWholeModels:
    @pytest.mark.parametrize("rank", [4, 64])
    def test_as_near_as_it_says(self, pair: tuple[Path, Path], tmp_path: Path, rank: int) -> None:
        extraction = extract_lora(*pair, tmp_path / "out", options(rank))
        check(extraction, *pair)
        assert (extraction.relative_error < 1e-6) == (rank == 64)
        assert len(extraction.modules) == 21
        assert {m.rank for m in extraction.modules} == {min(rank, 32), min(rank, 16)}
        assert len(extraction.saved) == 9
        assert (extraction.left_out, extraction.notes, extraction.num_unchanged) == ((), (), 0)

    def test_a_change_of_low_rank_is_found_whole(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        old = read_tensors(pair[1])
        name = f"{LAYER}.mlp.up_proj.weight"
        new = old | {name: old[name] + random(64, 2) @ random(2, 32, seed=1)}
        model = write_checkpoint(tmp_path / "new", new, llama_config(dtype=torch.float32))
        extraction = extract_lora(model, pair[1], tmp_path / "out", options(2))
        check(extraction, model, pair[1])
        assert [module.name for module in extraction.modules] == [f"{LAYER}.mlp.up_proj"]
        assert extraction.modules[0].energy == pytest.approx(1.0)
        assert (extraction.saved, extraction.num_unchanged) == ((), 29)

    def test_energy_makes_ranks_smaller(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        extraction = extract_lora(*pair, tmp_path / "out", options(64, 0.5))
        check(extraction, *pair)
        assert all(module.energy >= 0.5 for module in extraction.modules)
        assert len({module.rank for module in extraction.modules}) > 2
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert config["r"] == config["lora_alpha"] == max(module.rank for module in extraction.modules)

    def test_models_of_two_dtypes(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        halves = {name: tensor.half() for name, tensor in read_tensors(pair[1]).items()}
        base = write_checkpoint(tmp_path / "half", halves, llama_config(dtype=torch.float16))
        check(extract_lora(pair[0], base, tmp_path / "out", options()), pair[0], base)

    def test_another_dtype_alone_is_no_change(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        wide = {name: tensor.double() for name, tensor in read_tensors(pair[1]).items()}
        model = write_checkpoint(tmp_path / "wide", wide, llama_config(dtype=torch.float64))
        assert "there is no change to extract" in refusal(model, pair[1], tmp_path / "out")


class TestSelection:
    def test_include_and_exclude(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        chosen = options(4, include=("*self_attn*", "*norm*"), exclude=("*.q_proj.*",))
        extraction = extract_lora(*pair, tmp_path / "out", chosen)
        check(extraction, *pair)
        leaves = {module.name.rpartition(".")[2] for module in extraction.modules}
        assert leaves == {"k_proj", "v_proj", "o_proj"}
        assert len(extraction.saved) == 7
        assert {each.reason for each in extraction.left_out} == {"excluded"}
        assert f"{LAYER}.self_attn.q_proj.weight" in {each.name for each in extraction.left_out}

    def test_embeddings_as_factors(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        extraction = extract_lora(*pair, tmp_path / "out", options(embeddings="adapter"))
        check(extraction, *pair)
        assert extraction.relative_error < 1e-6
        factors = open_adapter(tmp_path / "out", "m").factors
        assert factors["model.embed_tokens"].kind == "embedding"
        assert factors["lm_head"].kind == "linear"

    def test_unchanged_tensors_stay_out(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        new, old = read_tensors(pair[0]), read_tensors(pair[1])
        mixed = {name: (new if "q_proj" in name else old)[name] for name in old}
        model = write_checkpoint(tmp_path / "new", mixed, llama_config(dtype=torch.float32))
        extraction = extract_lora(model, pair[1], tmp_path / "out", options(4))
        config = open_adapter(tmp_path / "out", "m").config.fields
        assert (config["target_modules"], config["modules_to_save"]) == (["q_proj"], None)
        assert (extraction.saved, extraction.num_unchanged) == ((), 27)

    def test_some_layers_alone_are_named_by_path(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        extraction = extract_lora(*pair, tmp_path / "out", options(4, include=("*.layers.1.mlp.*",)))
        check(extraction, *pair)
        targets = open_adapter(tmp_path / "out", "m").config.fields["target_modules"]
        assert targets == [f"model.layers.1.mlp.{leaf}_proj" for leaf in ("down", "gate", "up")]


class TestForms:
    """What becomes of modules that are not plain matrices."""

    Q = f"{LAYER}.self_attn.q_proj"

    def extracted(
        self, root: Path, old: Tensors, new: Tensors, chosen: ExtractOptions | None = None, **config: Any
    ) -> Extraction:
        base, model = written(root / "base", old, **config), written(root / "model", new, **config)
        extraction = extract_lora(model, base, root / "out", chosen or options())
        check(extraction, model, base)
        return extraction

    def test_biases_stand_beside_factors(self, tmp_path: Path) -> None:
        old = {f"{self.Q}.weight": random(6, 5), f"{self.Q}.bias": random(6)}
        old |= {f"{LAYER}.self_attn.o_proj.bias": random(5), f"{LAYER}.self_attn.o_proj.weight": random(5, 6)}
        new = old | {f"{self.Q}.weight": random(6, 5, seed=1), f"{self.Q}.bias": random(6, seed=1)}
        extraction = self.extracted(tmp_path, old, new)
        assert extraction.biases == (f"{self.Q}.bias",)
        adapter = open_adapter(tmp_path / "out", "m")
        assert list(adapter.replaced) == [f"{self.Q}.bias"]
        assert f"base_model.model.{self.Q}.base_layer.bias" in adapter.tensors
        assert adapter.config.fields["bias"] == "all"

    def test_a_bias_that_changed_alone_keeps_its_name(self, tmp_path: Path) -> None:
        old = {f"{self.Q}.weight": random(6, 5), f"{self.Q}.bias": random(6), f"{LAYER}.mlp.up_proj.weight": random(4, 4)}  # fmt: skip  # noqa: E501
        new = old | {f"{self.Q}.bias": random(6, seed=1), f"{LAYER}.mlp.up_proj.weight": random(4, 4, seed=1)}
        base, model = written(tmp_path / "base", old), written(tmp_path / "model", new)
        extract_lora(model, base, tmp_path / "out", options())
        adapter = open_adapter(tmp_path / "out", "m")
        assert list(adapter.replaced) == [f"{self.Q}.bias"]
        assert f"base_model.model.{self.Q}.bias" in adapter.tensors

    def test_experts_are_all_there_with_one_rank(self, tmp_path: Path) -> None:
        old = {f"{LAYER}.mlp.experts.{e}.{p}_proj.weight": random(6, 6, seed=e) for e in range(3) for p in ("gate", "up")}  # fmt: skip  # noqa: E501
        old |= {name.replace("layers.0", "layers.1"): tensor for name, tensor in old.items()}
        changed = f"{LAYER}.mlp.experts.1.up_proj.weight"
        new = old | {changed: old[changed] + random(6, 1) @ random(1, 6, seed=1)}
        extraction = self.extracted(tmp_path, old, new, options(2, 0.5), model_type="qwen3_moe")
        assert [module.name for module in extraction.modules] == [
            f"{LAYER}.mlp.experts.{e}.{p}_proj" for e in range(3) for p in ("gate", "up")
        ]
        assert {module.rank for module in extraction.modules} == {2}
        assert min(module.energy for module in extraction.modules) == pytest.approx(1.0)
        assert extraction.num_unchanged == 6

    def test_modules_that_peft_takes_for_saved_ones_are_saved_too(self, tmp_path: Path) -> None:
        old = {f"{LAYER}.input_layernorm.weight": random(6), "norm.weight": random(6), f"{self.Q}.weight": random(6, 6)}  # fmt: skip  # noqa: E501
        new = old | {"norm.weight": random(6, seed=1), f"{self.Q}.weight": random(6, 6, seed=1)}
        extraction = self.extracted(tmp_path, old, new)
        assert extraction.saved == ("norm", f"{LAYER}.input_layernorm")
        assert extraction.num_unchanged == 0

    def test_a_parameter_beside_modules_cannot_be_saved(self, tmp_path: Path) -> None:
        old = {f"{LAYER}.mixer.in_proj.weight": random(6, 6), f"{LAYER}.mixer.A_log": random(6)}
        new = {name: tensor + 1 for name, tensor in old.items()}
        base, model = written(tmp_path / "base", old), written(tmp_path / "model", new)
        text = refusal(model, base, tmp_path / "out")
        assert f"1 changed tensors ({LAYER}.mixer.A_log) lie beside other modules" in text
        extraction = extract_lora(model, base, tmp_path / "out", options(exclude=("*.A_log",)))
        assert extraction.relative_error > 0

    def test_a_larger_vocabulary_is_saved_whole_with_a_note(self, tmp_path: Path) -> None:
        old = {f"{self.Q}.weight": random(6, 6), "model.embed_tokens.weight": random(8, 6)}
        new = {f"{self.Q}.weight": random(6, 6, seed=1), "model.embed_tokens.weight": random(9, 6)}
        base, model = written(tmp_path / "base", old), written(tmp_path / "model", new)
        extraction = extract_lora(model, base, tmp_path / "out", options())
        assert extraction.saved == ("model.embed_tokens",)
        assert "model.embed_tokens.weight have other numbers of rows" in extraction.notes[0]
        assert open_adapter(tmp_path / "out", "m").replaced["model.embed_tokens.weight"].shape == (9, 6)
        text = refusal(model, base, tmp_path / "two", options(embeddings="adapter"))
        assert "has the shape [9, 6], but [8, 6]" in text
        assert "--embeddings full" in text

    @pytest.mark.parametrize("embeddings", ["full", "adapter"])
    def test_a_tied_embedding_ties_the_adapter(self, tmp_path: Path, embeddings: str) -> None:
        base = tiny_llama(tmp_path / "base", 0, tie=True)
        model = tiny_llama(tmp_path / "model", 1, base=base, tie=True)
        extraction = extract_lora(model, base, tmp_path / "out", options(embeddings=embeddings))
        assert "ensure_weight_tying" in extraction.notes[0]
        assert open_adapter(tmp_path / "out", "m").config.fields["ensure_weight_tying"] is True
        skipped = extract_lora(model, base, tmp_path / "two", options(embeddings="skip"))
        assert skipped.notes == ()

    def test_a_stored_copy_of_a_tied_head_is_no_matter(self, tmp_path: Path) -> None:
        old = {f"{self.Q}.weight": random(6, 6), "model.embed_tokens.weight": random(8, 6)}
        new = {name: tensor + 1 for name, tensor in old.items()}
        base = written(tmp_path / "base", old, tie_word_embeddings=True)
        copied = new | {"lm_head.weight": new["model.embed_tokens.weight"]}
        model = written(tmp_path / "model", copied, tie_word_embeddings=True)
        extract_lora(model, base, tmp_path / "out", options())
        other = written(
            tmp_path / "other", copied | {"lm_head.weight": random(8, 6)}, tie_word_embeddings=True
        )
        assert "1 tensor (lm_head.weight) not in" in refusal(other, base, tmp_path / "two")


class TestRefusals:
    def test_equal_models(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        assert "there is no change to extract" in refusal(pair[1], pair[1], tmp_path / "out")

    def test_no_matrix_changed(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        text = refusal(*pair, tmp_path / "out", options(include=("*norm*",)))
        assert "peft loads no adapter without factors" in text

    @pytest.mark.parametrize(
        ("chosen", "said"),
        [
            (options(0), "--rank: the rank is 0"),
            (options(4, 0.0), "--energy: 0.0 is not a share"),
            (options(4, 1.5), "--energy: 1.5 is not a share"),
        ],
    )
    def test_options(
        self, pair: tuple[Path, Path], tmp_path: Path, chosen: ExtractOptions, said: str
    ) -> None:
        with pytest.raises(OptionError, match=said):
            extract_lora(*pair, tmp_path / "out", chosen)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_no_gpu(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="no GPU here"):
            extract_lora(*pair, tmp_path / "out", ExtractOptions(device="cuda"))

    def test_models_that_do_not_fit_are_told_at_once(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        other = tiny_llama(tmp_path / "other", 2, layers=4, hidden=16)
        with pytest.raises(PlanError) as caught:
            extract_lora(other, pair[1], tmp_path / "out")
        text = str(caught.value)
        assert "9 tensors (model.layers.3.input_layernorm.weight" in text
        assert "has the shape [16, 16], but [32, 32]" in text
        assert len(caught.value.problems) > 20

    def test_a_missing_tensor_can_be_excluded(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        tensors = read_tensors(pair[0])
        del tensors["lm_head.weight"]
        model = write_checkpoint(tmp_path / "new", tensors, llama_config(dtype=torch.float32))
        assert "1 tensor (lm_head.weight) not in" in refusal(model, pair[1], tmp_path / "out")
        extract_lora(model, pair[1], tmp_path / "out", options(4, exclude=("lm_head*",)))

    @pytest.mark.parametrize("name", [f"{LAYER}.mlp.up_proj", f"{LAYER}.input_layernorm"])
    def test_nan(self, pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
        tensors = read_tensors(pair[0])
        tensors[f"{name}.weight"].view(-1)[0] = float("nan")
        model = write_checkpoint(tmp_path / "new", tensors, llama_config(dtype=torch.float32))
        with pytest.raises(NonFiniteError, match=f"{name}.weight: has elements"):
            extract_lora(model, pair[1], tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "new", "tuned"]

    def test_a_taken_place(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        with pytest.raises(TargetError):
            extract_lora(*pair, pair[1])

    def test_both_models_are_looked_at(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError) as caught:
            extract_lora(tmp_path / "no", tmp_path / "nor", tmp_path / "out")
        assert len(caught.value.problems) == 2

    @pytest.mark.parametrize(
        ("text", "said"), [("a+b", "names an adapter on a model"), ("a+b+c", "more than one")]
    )
    def test_names_that_are_no_models(self, tmp_path: Path, text: str, said: str) -> None:
        with pytest.raises(CheckpointError, match=said):
            extract_lora(text, tiny_llama(tmp_path / "base", 0), tmp_path / "out")


# A GPU that fails


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (
            RuntimeError("cusolver error: 7, when calling `f`"),
            "the GPU failed: cusolver error: 7, when calling `f`",
        ),
        (torch.OutOfMemoryError("CUDA out of memory."), "the GPU has too little memory: CUDA out of memory."),
    ],
)
def test_matrices_that_a_gpu_fails_at_are_decomposed_on_the_processor(
    error: Exception, failed: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = extract_lora(*pair, tmp_path / "expected", options(8))
    read = matrices._as_tensor

    class OnGpu(torch.Tensor):
        """A stored tensor that does not get to the GPU."""

        def to(self, device: torch.device, *others: Any) -> torch.Tensor:  # type: ignore[override]
            if device.type == "cuda":
                raise error
            return self.as_subclass(torch.Tensor).to(device, *others)

    monkeypatch.setattr(matrices, "_as_tensor", lambda *args: read(*args).as_subclass(OnGpu))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("raymerge.device_numerics.check_full_float32", lambda _: None)
    found = extract_lora(*pair, tmp_path / "found", replace(options(8), device="cuda"))
    first, second = (tmp_path / each / "adapter_model.safetensors" for each in ("expected", "found"))
    assert first.read_bytes() == second.read_bytes()
    (note,) = set(found.notes) - set(expected.notes)
    assert note == f"{len(found.modules)} of the matrices were decomposed on the processor: {failed}"
