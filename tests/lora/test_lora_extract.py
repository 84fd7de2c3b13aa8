"""Adapters extracted of models: ranks, matrices, files, and the command."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.adapter_maker import peft_merge
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint
from kits.command_line import run_command
from kits.simulated_gpu import simulated_gpu, without_gpu
from rich.status import Status
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from raymerge.checkpoints.adapters import PREFIX, open_adapter
from raymerge.checkpoints.header import TensorSpec
from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.cli.adapters import told_modules
from raymerge.cli.render.screen import make_console
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, NonFiniteError, OptionError, PlanError, TargetError, UserError
from raymerge.lora import matrices
from raymerge.lora.extract import ExtractOptions, Selection, extract_lora
from raymerge.lora.matrices import (
    Factors,
    Limits,
    factorise,
    factorise_product,
    read_pieces,
    read_tensor,
    squared_difference,
)
from raymerge.lora.writer import (
    AdapterFacts,
    AdapterWriter,
    Extraction,
    ModuleReport,
    output_directory,
    short_targets,
)
from raymerge.recipes.load import recipe_from_mapping
from raymerge.recipes.schema import Recipe
from raymerge.storage.local.store import LocalStore

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.0"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
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
        config = open_adapter(tmp_path / "out", "m").config.fields
        assert (config["target_modules"], config["modules_to_save"]) == ([f"{LAYER}.mlp.up_proj"], None)

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
        old = {
            f"{self.Q}.weight": random(6, 5),
            f"{self.Q}.bias": random(6),
            f"{LAYER}.mlp.up_proj.weight": random(4, 4),
        }
        new = old | {f"{self.Q}.bias": random(6, seed=1), f"{LAYER}.mlp.up_proj.weight": random(4, 4, seed=1)}
        base, model = written(tmp_path / "base", old), written(tmp_path / "model", new)
        extract_lora(model, base, tmp_path / "out", options())
        adapter = open_adapter(tmp_path / "out", "m")
        assert list(adapter.replaced) == [f"{self.Q}.bias"]
        assert f"base_model.model.{self.Q}.bias" in adapter.tensors

    def test_experts_are_all_there_with_one_rank(self, tmp_path: Path) -> None:
        old = {
            f"{LAYER}.mlp.experts.{e}.{p}_proj.weight": random(6, 6, seed=e)
            for e in range(3)
            for p in ("gate", "up")
        }
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
        old = {
            f"{LAYER}.input_layernorm.weight": random(6),
            "norm.weight": random(6),
            f"{self.Q}.weight": random(6, 6),
        }
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


@without_gpu
@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (RuntimeError("cusolver error: 7, when `f`"), "the GPU failed: cusolver error: 7, when `f`"),
        (torch.OutOfMemoryError("CUDA out of memory."), "the GPU has too little memory: CUDA out of memory."),
    ],
)
def test_matrices_that_a_gpu_fails_at_are_decomposed_on_the_processor(
    error: Exception, failed: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    expected = extract_lora(*pair, tmp_path / "expected", options(8))
    with simulated_gpu() as gpu:
        gpu.fault = lambda name: error if name == "sub_" else None
        found = extract_lora(*pair, tmp_path / "found", replace(options(8), device="cuda"))
    first, second = (tmp_path / each / "adapter_model.safetensors" for each in ("expected", "found"))
    assert first.read_bytes() == second.read_bytes()
    (note,) = set(found.notes) - set(expected.notes)
    assert note == f"{len(found.modules)} of the matrices were decomposed on the processor: {failed}"


SIZES = st.integers(1, 9)


def random_matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix_distance(factors: Factors, matrix: torch.Tensor) -> float:
    product = factors.up.double() @ factors.down.double()
    return float((product - matrix).norm())


class TestFactorise:
    @settings(deadline=None, max_examples=20)
    @given(rows=SIZES, columns=SIZES, rank=SIZES, seed=st.integers(0, 99))
    def test_nothing_of_that_rank_is_nearer(self, rows: int, columns: int, rank: int, seed: int) -> None:
        matrix = random_matrix(rows, columns, seed=seed)
        factors = factorise(matrix, Limits(rank), where="m")
        assert factors.rank == min(rank, rows, columns)
        assert (factors.up.shape, factors.down.shape) == ((rows, factors.rank), (factors.rank, columns))
        # Eckart and Young: the error is what the singular values beyond the rank hold.
        values = torch.linalg.eigvalsh(matrix.T @ matrix).clamp_min(0).flip(0)
        rest = float(values[factors.rank :].sum()) ** 0.5
        assert matrix_distance(factors, matrix) == pytest.approx(rest, abs=1e-5)
        assert factors.total == pytest.approx(float(matrix.square().sum()))
        assert factors.total - factors.kept == pytest.approx(rest**2, abs=1e-9)

    def test_half_the_roots_by_hand(self) -> None:
        factors = factorise(torch.diag(torch.tensor([4.0, 9.0])), Limits(1), where="m")
        torch.testing.assert_close(factors.up.abs(), torch.tensor([[0.0], [3.0]]))
        torch.testing.assert_close(factors.down.abs(), torch.tensor([[0.0, 3.0]]))
        assert (factors.kept, factors.total) == (81.0, 97.0)

    def test_zero_has_factors_of_zero(self) -> None:
        factors = factorise(torch.zeros(3, 4), Limits(2), where="m")
        assert not factors.up.any()
        assert (factors.kept, factors.total) == (0.0, 0.0)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_no_factors_of_what_is_not_finite(self, value: float) -> None:
        matrix = torch.zeros(3, 4)
        matrix[1, 1] = value
        with pytest.raises(NonFiniteError, match="layer 3: has elements that are NaN or infinite"):
            factorise(matrix, Limits(2), where="layer 3")
        with pytest.raises(NonFiniteError):
            factorise_product(matrix, random_matrix(4, 2), Limits(2), where="m")

    @settings(deadline=None, max_examples=20)
    @given(rows=SIZES, columns=SIZES, inner=SIZES, rank=SIZES, seed=st.integers(0, 99))
    def test_a_product_need_not_be_made(
        self, rows: int, columns: int, inner: int, rank: int, seed: int
    ) -> None:
        up, down = random_matrix(rows, inner, seed=seed), random_matrix(inner, columns, seed=seed + 1)
        direct = factorise(up @ down, Limits(rank), where="m")
        found = factorise_product(up, down, Limits(rank), where="m")
        assert found.total == pytest.approx(direct.total)
        assert found.kept == pytest.approx(direct.kept)
        assert matrix_distance(found, up @ down) == pytest.approx(
            matrix_distance(direct, up @ down), abs=1e-4
        )


class TestLimits:
    SQUARES = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0], dtype=torch.float64)

    @pytest.mark.parametrize(
        ("rank", "energy", "found"),
        [(9, None, 5), (2, None, 2), (9, 0.5, 1), (9, 0.51, 2), (9, 0.75, 2), (9, 0.9, 4), (9, 1.0, 5)],
    )  # fmt: skip
    def test_the_smaller_of_rank_and_energy(self, rank: int, energy: float | None, found: int) -> None:
        assert Limits(rank, energy).rank_of(self.SQUARES) == found

    def test_rank_is_at_least_one(self) -> None:
        assert Limits(4, 0.5).rank_of(torch.zeros(3, dtype=torch.float64)) == 1


class TestReading:
    def opened(self, root: Path, **tensors: torch.Tensor) -> tuple[Checkpoint, LocalStore]:
        write_checkpoint(root, tensors, {"model_type": "llama"})
        return open_checkpoint(root, "m"), LocalStore(root)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_tensors_of_every_plain_dtype(self, tmp_path: Path, dtype: torch.dtype) -> None:
        tensor = random_matrix(3, 5).to(dtype)
        checkpoint, store = self.opened(tmp_path, a=tensor, b=torch.zeros(0, 2))
        assert torch.equal(read_tensor(store, checkpoint.tensors["a"]), tensor)
        assert read_tensor(store, checkpoint.tensors["b"]).shape == (0, 2)

    def test_pieces_make_the_whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(matrices, "PIECE_NBYTES", 8)
        tensor = torch.arange(13, dtype=torch.int16)
        checkpoint, store = self.opened(tmp_path, a=tensor)
        assert b"".join(read_pieces(store, checkpoint.tensors["a"])) == tensor.numpy().tobytes()

    def test_differences_are_told_in_any_pieces(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(matrices, "PIECE_NBYTES", 64)
        one = random_matrix(7, 9).float()
        other = one.clone()
        other[6, 8] += 2.0
        other[0, 0] -= 1.0
        tensors = {
            "one": one,
            "same": one,
            "other": other,
            "half": one.half(),
            "wide": other.double(),
            "n": torch.arange(63),
            "m": -torch.arange(63),
        }
        checkpoint, store = self.opened(tmp_path, **tensors)

        def between(left: str, right: str) -> float | None:
            return squared_difference(store, checkpoint.tensors[left], store, checkpoint.tensors[right])

        assert between("one", "same") is None
        assert between("one", "other") == pytest.approx(5.0, rel=1e-6)
        assert between("n", "n") is None
        assert between("n", "m") == 0.0
        assert between("other", "wide") is None
        expected = float((one.double() - one.half().double()).square().sum())
        assert between("one", "half") == pytest.approx(expected)


def test_gpt2_stores_its_weights_the_other_way(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    for name in ("base", "tuned"):
        GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
    extraction = extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "out", options())
    merged = peft_merge(read_tensors(tmp_path / "base"), tmp_path / "out")
    for name, tensor in read_tensors(tmp_path / "tuned").items():
        torch.testing.assert_close(merged[name].float(), tensor, rtol=0, atol=1e-6)
    modules = dict(GPT2LMHeadModel(config).named_modules())
    factors = open_adapter(tmp_path / "out", "m").factors
    assert len(factors) == 8
    for factor in factors.values():
        assert isinstance(modules[factor.module], Conv1D)
        assert factor.transposed
    assert "transformer.wpe" in extraction.saved


def factors(rows: int, columns: int, rank: int, seed: int = 0) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, columns, generator=generator)
    return Factors(down, torch.randn(rows, rank, generator=generator), 1.0, 1.0)


class TestPublishing:
    def test_what_was_added_is_there(self, tmp_path: Path) -> None:
        with AdapterWriter(tmp_path / "deep" / "out") as writer:
            writer.add_factors("a.q", "linear", factors(4, 5, 2))
            writer.add_factors("a.e", "embedding", factors(3, 7, 2))
            spec = TensorSpec(f"{PREFIX}norm.weight", DType.I16, (3,))
            writer.add_bytes(spec, [b"\1\0\2\0", b"\3\0"])
            adapter = writer.publish(AdapterFacts("base", ("q", "e"), ("norm",), task_type="CAUSAL_LM"))
        found = load_file(tmp_path / "deep" / "out" / "adapter_model.safetensors")
        torch.testing.assert_close(found[f"{PREFIX}a.q.lora_A.weight"], factors(4, 5, 2).down)
        torch.testing.assert_close(found[f"{PREFIX}a.e.lora_embedding_B"], factors(3, 7, 2).up)
        assert found[f"{PREFIX}norm.weight"].tolist() == [1, 2, 3]
        assert adapter.factors["a.e"].weight_shape == (7, 3)
        assert list(adapter.replaced) == ["norm.weight"]
        assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["out"]
        names = ["adapter_config.json", "adapter_model.safetensors"]
        assert sorted(path.name for path in (tmp_path / "deep" / "out").iterdir()) == names

    def test_what_was_dropped_is_not(self, tmp_path: Path) -> None:
        with AdapterWriter(tmp_path / "out") as writer:
            writer.add_factors("a", "linear", factors(4, 5, 2))
            writer.add_factors("b", "linear", factors(4, 5, 3))
            writer.drop("a", "linear")
            adapter = writer.publish(AdapterFacts("base", ("b",)))
        assert (list(adapter.factors), adapter.factors["b"].scale) == (["b"], 1.0)

    def test_nothing_is_left_of_what_failed(self, tmp_path: Path) -> None:
        def fail() -> None:
            with AdapterWriter(tmp_path / "out") as writer:
                writer.add_factors("a", "linear", factors(4, 5, 2))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert list(tmp_path.iterdir()) == []

    def test_a_taken_place_is_refused_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        with pytest.raises(TargetError, match="this directory is not empty"):
            AdapterWriter(tmp_path)
        with pytest.raises(TargetError, match="a file is in the place"):
            AdapterWriter(tmp_path / "file")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_and_at_the_end(self, tmp_path: Path) -> None:
        with AdapterWriter(tmp_path / "out") as writer:
            writer.add_factors("a", "linear", factors(4, 5, 2))
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "file").write_text("mine")
            with pytest.raises(TargetError):
                writer.publish(AdapterFacts("base", ("a",)))
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


class TestConfig:
    def test_facts(self, tmp_path: Path) -> None:
        with AdapterWriter(tmp_path) as writer:
            writer.add_factors("a", "linear", factors(4, 5, 2))
            facts = AdapterFacts("org/m", ("a",), ("n",), "SEQ_CLS", True, True, True, True)
            writer.publish(facts)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 2)
        assert (config["target_modules"], config["modules_to_save"]) == (["a"], ["n"])
        assert (config["base_model_name_or_path"], config["task_type"]) == ("org/m", "SEQ_CLS")
        assert (config["bias"], config["lora_bias"], config["fan_in_fan_out"]) == ("all", True, True)
        assert config["ensure_weight_tying"] is True

    @settings(deadline=None, max_examples=15)
    @given(
        ranks=st.dictionaries(
            st.lists(st.sampled_from(["a", "b", "1", "11"]), min_size=1, max_size=4).map(".".join),
            st.integers(1, 4),
            min_size=1,
            max_size=8,
        )
    )
    def test_every_product_counts_once_whatever_the_paths(
        self, tmp_path_factory: pytest.TempPathFactory, ranks: dict[str, int]
    ) -> None:
        """Paths that end in one another are what patterns could mistake."""
        root = tmp_path_factory.mktemp("adapter") / "out"
        with AdapterWriter(root) as writer:
            for seed, (module, rank) in enumerate(ranks.items()):
                writer.add_factors(module, "linear", factors(4, 5, rank, seed))
            adapter = writer.publish(AdapterFacts("base", tuple(ranks)))
        assert {module: factor.rank for module, factor in adapter.factors.items()} == ranks
        assert {factor.scale for factor in adapter.factors.values()} == {1.0}
        merged = peft_merge({f"{module}.weight": torch.zeros(4, 5) for module in ranks}, root)
        for seed, (module, rank) in enumerate(ranks.items()):
            made = factors(4, 5, rank, seed)
            torch.testing.assert_close(merged[f"{module}.weight"], (made.up.double() @ made.down.double()))


class TestTargets:
    MODULES = ("m", "m.0", "m.0.q", "m.0.v", "m.1", "m.1.q", "m.1.v", "vision.q2")

    def test_the_last_word_where_it_says_all(self) -> None:
        assert short_targets(["m.0.q", "m.1.q"], self.MODULES) == ("q",)
        assert short_targets(["m.1.v", "m.0.q", "m.1.q", "m.0.v"], self.MODULES) == ("q", "v")

    def test_the_path_where_others_have_the_word(self) -> None:
        assert short_targets(["m.0.q"], self.MODULES) == ("m.0.q",)
        assert short_targets(["m.0.q", "m.0.v", "m.1.v"], self.MODULES) == ("v", "m.0.q")

    def test_a_word_that_names_a_parent_too(self) -> None:
        assert short_targets(["m.0.q"], ["m.0.q", "q"]) == ("m.0.q",)


def test_the_directory_that_is_meant() -> None:
    assert output_directory("file:///data/a%20b") == Path("/data/a b")
    for place in ("s3://bucket/a", "s3:/bucket/a"):
        with pytest.raises(OptionError):
            output_directory(place)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "adapters.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = tiny_llama(tmp_path / "base", 0)
    tiny_llama(tmp_path / "tuned", 1, base=base)
    return tmp_path


def test_it_writes_an_adapter_and_says_what_is_in_it(folder: Path) -> None:
    outcome = run_command("extract-lora", "tuned", "--base", "base", "-o", "out", "--rank", "4", cwd=folder)
    assert outcome.code == 0
    assert "Adapter in out" in outcome.text
    assert "21 modules, rank 4" in outcome.text
    assert "9: lm_head, model.embed_tokens, model.layers.0.input_layernorm and 6 more" in outcome.text
    assert peft_merge(read_tensors(folder / "base"), folder / "out")


def test_every_option_reaches_the_extraction(folder: Path) -> None:
    options: tuple[str, ...] = (
        *("--energy", "0.5", "--include", "*attn*", "--include", "*norm*", "--include", "*embed*"),
    )
    options += ("--exclude", "*q_proj*", "--embeddings", "adapter", "--rest", "skip", "--device", "cpu")
    command = ("extract-lora", "tuned", "--base", "base", "--output", "out", "--json", *options)
    outcome = run_command(*command, cwd=folder)
    report = json.loads(outcome.text)
    names = {module["name"].rpartition(".")[2] for module in report["modules"]}
    assert names == {"k_proj", "v_proj", "o_proj", "embed_tokens"}
    assert all(0.5 <= module["energy"] < 0.9 for module in report["modules"])
    assert (report["output"], report["saved"]) == ("out", [])
    reasons = {each["reason"] for each in report["left_out"]}
    assert reasons == {"excluded", "not a matrix, and --rest is skip"}


def test_modules_are_listed_on_demand(folder: Path) -> None:
    command = ("extract-lora", "tuned", "--base", "base", "-o", "out", "--modules")
    assert "model.layers.2.mlp.up_proj" in run_command(*command, cwd=folder).text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("tuned", "--base", "tuned", "-o", "out"), "there is no change to extract"),
        (("tuned", "-o", "out"), "--base"),
        (("tuned", "--base", "base"), "--output"),
    ],
)
def test_refusals_are_sentences_and_exit_code_2(folder: Path, args: tuple[str, ...], said: str) -> None:
    outcome = run_command("extract-lora", *args, cwd=folder)
    outcome.check_refusal(said)


def test_errors_as_json(folder: Path) -> None:
    command = ("extract-lora", "tuned", "--base", "nowhere", "-o", "out", "--json")
    outcome = run_command(*command, cwd=folder)
    assert json.loads(outcome.text)["problems"][0]["where"] == "nowhere"


def test_a_line_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Status, "update", lambda _, text: said.append(text.plain))
    with told_modules(make_console(io.StringIO()), "merging the adapters") as tell:
        tell(ModuleReport("layers.0.up\x1b[2J", 4, 1.0, 1.0), 2)
        tell(ModuleReport("layers.1.[bold]up", 3, 1.0, 1.0), 2)
    assert said == [
        "1 of 2 modules: layers.0.up\\x1b[2J, rank 4",
        "2 of 2 modules: layers.1.[bold]up, rank 3",
    ]


def test_the_line_is_for_terminals_only() -> None:
    stream = io.StringIO()
    with told_modules(make_console(stream), "merging the adapters") as tell:
        tell(ModuleReport("layers.0.up", 4, 1.0, 1.0), 1)
    assert stream.getvalue() == ""


def test_the_recipes_on_the_page_are_recipes() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        assert isinstance(recipe_from_mapping(yaml.safe_load(example)), Recipe)
