"""Factors of matrices: the nearest of their rank, whatever way they are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import write_checkpoint

from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.errors import NonFiniteError
from raymerge.lora import matrices
from raymerge.lora.matrices import (
    Factors,
    Limits,
    factorise,
    factorise_product,
    read_pieces,
    read_tensor,
    squared_difference,
)
from raymerge.storage.local.store import LocalStore

SIZES = st.integers(1, 9)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distance(factors: Factors, matrix: torch.Tensor) -> float:
    product = factors.up.double() @ factors.down.double()
    return float((product - matrix).norm())


class TestFactorise:
    @settings(deadline=None, max_examples=40)
    @given(rows=SIZES, columns=SIZES, rank=SIZES, seed=st.integers(0, 99))
    def test_nothing_of_that_rank_is_nearer(self, rows: int, columns: int, rank: int, seed: int) -> None:
        matrix = random(rows, columns, seed=seed)
        factors = factorise(matrix, Limits(rank), where="m")
        assert factors.rank == min(rank, rows, columns)
        assert (factors.up.shape, factors.down.shape) == ((rows, factors.rank), (factors.rank, columns))
        # Eckart and Young: the error is what the singular values beyond the rank hold.
        values = torch.linalg.eigvalsh(matrix.T @ matrix).clamp_min(0).flip(0)
        rest = float(values[factors.rank :].sum()) ** 0.5
        assert distance(factors, matrix) == pytest.approx(rest, abs=1e-5)
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
            factorise_product(matrix, random(4, 2), Limits(2), where="m")

    @settings(deadline=None, max_examples=40)
    @given(rows=SIZES, columns=SIZES, inner=SIZES, rank=SIZES, seed=st.integers(0, 99))
    def test_a_product_need_not_be_made(
        self, rows: int, columns: int, inner: int, rank: int, seed: int
    ) -> None:
        up, down = random(rows, inner, seed=seed), random(inner, columns, seed=seed + 1)
        direct = factorise(up @ down, Limits(rank), where="m")
        found = factorise_product(up, down, Limits(rank), where="m")
        assert found.total == pytest.approx(direct.total)
        assert found.kept == pytest.approx(direct.kept)
        assert distance(found, up @ down) == pytest.approx(distance(direct, up @ down), abs=1e-4)


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
        tensor = random(3, 5).to(dtype)
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
        one = random(7, 9).float()
        other = one.clone()
        other[6, 8] += 2.0
        other[0, 0] -= 1.0
        tensors = {"one": one, "same": one, "other": other, "half": one.half(), "wide": other.double(), "n": torch.arange(63), "m": -torch.arange(63)}  # fmt: skip  # noqa: E501
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
