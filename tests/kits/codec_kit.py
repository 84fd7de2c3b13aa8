"""Tests that every codec inherits, against numbers made here from the definitions of the formats.

A codec's test is a subclass that names the quant_specs it is to be tried with::

    class TestMxfp4(CodecKit):
        quant_specs = (usual_packing(MXFP4, (5, 96)),)

What they are compared with is in ``codec_reference``, which takes nothing from the codecs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.codec_reference import (
    Array,
    elements_of,
    nearest_codes,
    num_steps,
    reference_decode,
    scale_numbers,
    steps_of,
    unpack,
    zeros_of,
)
from kits.counted_gpu import GPU, counted_waits
from kits.simulated_gpu import simulated_gpu, without_gpu
from torch import Tensor

from raymerge.checkpoints.quantisation.block_codec import Encoded, StoredScales
from raymerge.checkpoints.quantisation.encoding import QuantSpec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.dtypes import DType

inherited = hypothesis_settings(
    deadline=None, max_examples=13, suppress_health_check=[HealthCheck.differing_executors]
)
seeds = st.integers(0, 2**32 - 1)


def bits(values: Tensor | Array) -> list[int]:
    array = values.numpy() if isinstance(values, Tensor) else values
    return [int(word) for word in np.ascontiguousarray(array, np.float32).view(np.uint32).reshape(-1)]


class Stored(Encoded):
    """A matrix as it may lie in a file."""

    def to(self, device: str) -> Stored:
        return Stored(*(None if part is None else part.to(device) for part in self))  # type: ignore[arg-type]

    def as_bytes(self) -> tuple[bytes, ...]:
        """Of what is stored by blocks."""
        return tuple(part.cpu().numpy().tobytes() for part in self[:3] if part is not None)

    def arrays(self) -> tuple[Array, Array, float | None, Array | None]:
        """As the reference takes them."""
        one = None if self.tensor_scale is None else self.tensor_scale.item()
        zeros = None if self.zero_points is None else self.zero_points.numpy()
        return self.codes.numpy(), self.scales.numpy(), one, zeros


def random_scales(quant_spec: QuantSpec, generator: np.random.Generator, count: int) -> Array:
    """Positive scales that make no product a float32 cannot hold to the last bit; uint8 [bytes]."""
    dtype = quant_spec.scale_dtype
    if dtype in (DType.U8, DType.F8_E8M0):
        return generator.integers(0, 245, count, dtype=np.uint8)
    if dtype is DType.F8_E4M3:
        return generator.integers(1, 127, count, dtype=np.uint8)
    reach = 13 if dtype is DType.F16 else 100
    mantissas = 1.0 if quant_spec.power_of_two else 1 + generator.random(count)
    scales = np.ldexp(mantissas, generator.integers(-reach, reach, count)).astype(np.float32)
    if dtype is DType.BF16:
        return (scales.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return scales.astype(np.float16 if dtype is DType.F16 else np.float32).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Case:
    """A codec with the shape that it is tried with."""

    quant_spec: QuantSpec

    def values(self, seed: int, *, spread_exponents: int = 3) -> Tensor:
        generator = np.random.default_rng(seed)
        shape = (self.quant_spec.rows, self.quant_spec.columns)
        exponents = generator.integers(-spread_exponents, spread_exponents + 1, shape)
        values = np.ldexp(generator.standard_normal(shape) * 0.02, exponents)
        values[generator.random(shape) < 0.02] = 0.0
        values[generator.random(shape) < 0.02] = -0.0
        height, width = self.quant_spec.block
        if self.quant_spec.grid[1] > 1:
            values[:height, :width] = 0.0
        return torch.from_numpy(values.astype(np.float32))

    def stored(self, seed: int) -> Stored:
        """Any code but NaN, any zero point, scales of all usual magnitudes."""
        quant_spec, generator = self.quant_spec, np.random.default_rng(seed)
        codes = generator.integers(0, 256, quant_spec.codes_nbytes(quant_spec.rows), dtype=np.uint8)
        if quant_spec.format.is_fp8:
            codes[(codes & 0x7F) == 0x7F] = 0x11
        scales = random_scales(quant_spec, generator, quant_spec.grid[0] * quant_spec.scale_row_length)
        one = None
        if quant_spec.tensor_scale_dtype is not None:
            one = torch.tensor(float(np.ldexp(1 + generator.random(), generator.integers(-9, 9))))
            one = one.bfloat16().float() if quant_spec.tensor_scale_dtype is DType.BF16 else one
        zeros = None
        if quant_spec.format.zero_points is not None:
            shape = (*quant_spec.zero_points_shape, quant_spec.format.zero_points.bits // 8)
            packed = generator.integers(0, 256, shape, dtype=np.uint8)
            if unused := -quant_spec.rows % 8 if quant_spec.format.code_bits == 4 else 0:
                # Of rows that are not there nothing is stored: they have the last codes of an int32.
                packed[-1].view("<u4")[...] >>= np.uint32(4 * unused)
            zeros = torch.from_numpy(packed.reshape(-1))
        return Stored(torch.from_numpy(codes), torch.from_numpy(scales), zeros, one)

    def decode(self, stored: Stored) -> Tensor:
        return codec_of(self.quant_spec.format).decode(self.quant_spec, stored)

    def fits(self, values: Tensor, stored: Stored) -> Tensor:
        return codec_of(self.quant_spec.format).fits(self.quant_spec, values, stored.stored)

    def encode(self, values: Tensor, kept: Stored | None = None) -> Stored:
        """With the scales of what was stored, where they serve, or with fresh ones."""
        codec, one = codec_of(self.quant_spec.format), None if kept is None else kept.tensor_scale
        if kept is None and self.quant_spec.tensor_scale_dtype is not None:
            one = codec.fresh_tensor_scale(self.quant_spec, values.abs().max())
        return self.encode_under(one, values, kept)

    def encode_under(self, one: Tensor | None, values: Tensor, kept: Stored | None = None) -> Stored:
        given = StoredScales() if kept is None else kept.stored
        codec = codec_of(self.quant_spec.format)
        return Stored(*codec.encode(self.quant_spec, values, given._replace(tensor_scale=one)))

    def error_sums(self, values: Tensor, stored: Stored) -> Any:
        return codec_of(self.quant_spec.format).error_sums(self.quant_spec, values, stored)

    def rows(self, stored: Stored, top: int, bottom: int) -> Stored:
        """Of what is stored the part of some rows; both are multiples of the rows that may be cut off."""
        spec, zeros = self.quant_spec, stored.zero_points
        first, last = spec.codes_nbytes(top), spec.codes_nbytes(bottom)
        begin, end = spec.scales_nbytes(top), spec.scales_nbytes(bottom)
        if zeros is not None:
            by_run = zeros.view(spec.zero_points_shape[0], -1)
            height = spec.format.rows_of_zeros
            zeros = by_run[top // height : -(-bottom // height)].reshape(-1)
        return Stored(stored.codes[first:last], stored.scales[begin:end], zeros, stored.tensor_scale)

    def peaks(self, stored: Stored) -> Iterator[float]:
        """Of each block the largest element, or how far the outermost are apart, of the most there can be."""
        codes, _, _, packed = stored.arrays()
        elements, zeros = elements_of(self.quant_spec, codes), zeros_of(self.quant_spec, packed)
        apart = elements - zeros
        height, width = self.quant_spec.block
        for top, left in itertools.product(
            range(0, self.quant_spec.rows, height), range(0, self.quant_spec.columns, width)
        ):
            block = apart[top : top + height, left : left + width]
            largest = np.abs(block).max() if packed is None else max(block.max(), 0) - min(block.min(), 0)
            yield largest / num_steps(self.quant_spec.format)


class CodecKit:
    quant_specs: ClassVar[Sequence[QuantSpec]]

    def each(self) -> Iterator[tuple[Case, QuantSpec]]:
        for quant_spec in self.quant_specs:
            yield Case(quant_spec), quant_spec

    @inherited
    @given(seed=seeds)
    def test_decoding_gives_the_exact_products_rounded_once(self, seed: int) -> None:
        for case, quant_spec in self.each():
            stored = case.stored(seed)
            decoded = case.decode(stored)
            assert decoded.dtype is torch.float32
            assert decoded.shape == (quant_spec.rows, quant_spec.columns)
            assert bits(decoded) == bits(reference_decode(quant_spec, *stored.arrays()))

    @inherited
    @given(seed=seeds)
    def test_codes_are_the_nearest_under_the_scale_that_is_chosen(self, seed: int) -> None:
        for case, quant_spec in self.each():
            values = case.values(seed)
            codes, scales, one, packed = case.encode(values).arrays()
            steps = steps_of(quant_spec, scales, one, quant_spec.rows)
            quotients = (values.numpy().astype(np.float64) / steps).astype(np.float32)
            if packed is not None:
                quotients = quotients + zeros_of(quant_spec, packed).astype(np.float32)
            nearest = nearest_codes(quant_spec.format, quotients.astype(np.float64))
            assert np.array_equal(unpack(quant_spec, codes), nearest)

    @inherited
    @given(seed=seeds)
    def test_scales_make_use_of_the_codes(self, seed: int) -> None:
        """The largest element of a block that has any is within a quarter of the largest there is."""
        for case, _ in self.each():
            assert all(peak == 0 or peak >= 0.44 for peak in case.peaks(case.encode(case.values(seed))))

    @inherited
    @given(seed=seeds)
    def test_what_was_decoded_gives_its_bytes_when_scales_are_kept(self, seed: int) -> None:
        for case, _ in self.each():
            stored = case.stored(seed)
            values = case.decode(stored)
            assert case.fits(values, stored).all()
            assert case.encode(values, stored).as_bytes() == stored.as_bytes()

    @inherited
    @given(seed=seeds)
    def test_encoding_is_a_fixed_point(self, seed: int) -> None:
        for case, _ in self.each():
            first = case.encode(case.values(seed))
            assert case.encode(case.decode(first), first).as_bytes() == first.as_bytes()

    def test_only_a_block_that_changed_loses_its_scale(self) -> None:
        for case, quant_spec in self.each():
            if quant_spec.scale_row_length < 2:
                continue
            stored = case.stored(5)
            values = case.decode(stored)
            values[-1, -1] = values[-1, -1] * 1.03 + 1e-3 * values[-1].abs().max()
            fits = case.fits(values, stored)
            assert not fits[-1, -1]
            assert int((~fits).sum()) == 1
            again, fresh = case.encode(values, stored), case.encode_under(stored.tensor_scale, values)
            nbytes = quant_spec.scale_dtype.bits // 8
            assert again.scales[:-nbytes].equal(stored.scales[:-nbytes])
            assert again.scales[-nbytes:].equal(fresh.scales[-nbytes:])
            unchanged = unpack(quant_spec, again.codes.numpy()) == unpack(quant_spec, stored.codes.numpy())
            height, width = quant_spec.block
            top, left = (quant_spec.grid[0] - 1) * height, (quant_spec.grid[1] - 1) * width
            assert unchanged[:top].all()
            assert unchanged[:, :left].all()

    @inherited
    @given(data=st.data(), seed=seeds)
    def test_a_matrix_cut_between_scale_rows_gives_the_same_bytes(
        self, data: st.DataObject, seed: int
    ) -> None:
        for case, quant_spec in self.each():
            heights = range(quant_spec.cut_height, quant_spec.rows, quant_spec.cut_height)
            inner = data.draw(st.sets(st.sampled_from(heights))) if heights else set()
            stored = case.stored(seed)
            had = case.decode(stored)
            changed = torch.where(case.values(seed) > 0.05, had * 1.5, had)
            whole, pieces = case.encode(changed, stored), []
            for top, bottom in itertools.pairwise([0, *sorted(inner), quant_spec.rows]):
                part = case.rows(stored, top, bottom)
                assert bits(case.decode(part)) == bits(had[top:bottom])
                pieces.append(case.encode(changed[top:bottom], part).as_bytes())
            assert tuple(b"".join(parts) for parts in zip(*pieces, strict=True)) == whole.as_bytes()

    def test_sizes_are_what_the_packing_says(self) -> None:
        for case, quant_spec in self.each():
            codes, scales, zeros, _ = case.encode(case.values(3))
            assert codes.dtype is scales.dtype is torch.uint8
            assert codes.shape == (quant_spec.codes_nbytes(quant_spec.rows),)
            assert scales.shape == (quant_spec.scales_nbytes(quant_spec.rows),)
            assert np.prod(quant_spec.codes_shape) * quant_spec.format.code_dtype.bits // 8 == (
                quant_spec.codes_nbytes(quant_spec.rows) * quant_spec.num_matrices
            )
            dtype = quant_spec.format.zero_points
            assert (zeros is None) == (dtype is None)
            if zeros is not None and dtype is not None:
                assert zeros.shape == (dtype.nbytes(math.prod(quant_spec.zero_points_shape)),)

    def test_zeros_have_the_scale_one(self) -> None:
        for case, quant_spec in self.each():
            values = torch.zeros(quant_spec.rows, quant_spec.columns)
            encoded = case.encode(values)
            if encoded.tensor_scale is not None:
                # Where blocks have scales too, zeros have the tensor's scale that others have.
                others = case.encode(values + 0.5).tensor_scale
                assert encoded.tensor_scale == (others if quant_spec.scale_row_length else 1.0)
            assert set(scale_numbers(quant_spec.scale_dtype, encoded.scales.numpy())) <= {1.0}
            assert case.decode(encoded).equal(values)

    def test_zeros_that_had_the_scale_zero_keep_it(self) -> None:
        for case, quant_spec in self.each():
            if quant_spec.scale_dtype in (DType.U8, DType.F8_E8M0) or quant_spec.scale_row_length == 0:
                continue
            values = torch.zeros(quant_spec.rows, quant_spec.columns)
            usual = case.encode(values)
            kept = usual._replace(scales=torch.zeros_like(usual.scales))
            encoded = case.encode(values, kept)
            assert encoded.scales.equal(kept.scales)
            assert case.decode(encoded).equal(values)

    @pytest.mark.parametrize("exponent", [-148, -140, -126, -120, -60, -20, 0, 20, 60, 100, 120, 126])
    def test_every_magnitude_comes_back(self, exponent: int) -> None:
        """To within a part of the largest of its block; what no scale can reach, to within the least step."""
        for case, quant_spec in self.each():
            if quant_spec.scale_dtype is DType.F16 and not -12 < exponent < 15:
                continue  # a float16 is no scale for such numbers, or a coarse one
            tiny = case.values(11, spread_exponents=0).double() * 8
            values = torch.ldexp(tiny.clamp(-1.9, 1.9), torch.tensor(float(exponent))).float()
            decoded = case.decode(case.encode(values))
            assert decoded.isfinite().all()
            share = 2**-4 if quant_spec.format.is_fp8 else 0.26
            bound = share * values.abs().max().double() + 2.0**-127
            assert (decoded.double() - values.double()).abs().max() <= bound

    def test_error_sums_are_those_of_the_numbers(self) -> None:
        for case, quant_spec in self.each():
            values = case.values(13)
            encoded = case.encode(values)
            sums = case.error_sums(values, encoded)
            decoded = reference_decode(quant_spec, *encoded.arrays())
            true = values.numpy().astype(np.float64)
            assert sums.squared_errors == pytest.approx(((decoded - true) ** 2).sum(), rel=1e-6)
            assert sums.squared_values == pytest.approx((true**2).sum(), rel=1e-12)

    def test_inputs_are_left_as_they_were(self) -> None:
        for case, _ in self.each():
            stored = case.stored(17)
            had = stored.as_bytes()
            values = case.decode(stored)
            copy = values.clone()
            case.error_sums(values, case.encode(values, stored))
            assert bits(values) == bits(copy)
            assert stored.as_bytes() == had

    @without_gpu
    def test_a_simulated_gpu_gives_the_same_bytes(self) -> None:
        for seed, (case, _) in enumerate(self.each()):
            run = _round_trip(case, case.stored(3), case.values(3, spread_exponents=20))
            with simulated_gpu(seed):
                on_gpu = run("cuda")
            assert on_gpu == run("cpu")

    def test_a_gpu_is_waited_for_once(self) -> None:
        """For what encoding changed, which tells as well whether all of it was finite."""
        for case, _ in self.each():
            stored, values = case.stored(3), case.values(3, spread_exponents=20)
            expected = _round_trip(case, stored, values)("cpu")
            with counted_waits() as waits:
                on_gpu = _round_trip(case, stored, values)("meta")
                brought = waits.total()
                one = None if stored.tensor_scale is None else stored.tensor_scale.to(GPU)
                for number, last in enumerate((0.0, torch.inf, torch.nan), 1):
                    values[-1, -1] = last
                    far = values.to(GPU)
                    sums = case.error_sums(far, case.encode_under(one, far))
                    assert math.isfinite(sums.squared_values) is math.isfinite(last)
                    assert waits.total() == brought + number
            assert on_gpu == expected
            # What was compared, and nothing on the way there.
            assert brought == 1 + len(stored.as_bytes())

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_a_gpu_gives_the_same_bytes(self) -> None:
        for (case, _), seed in itertools.product(self.each(), range(20)):
            run = _round_trip(case, case.stored(seed), case.values(seed, spread_exponents=20))
            assert run("cpu") == run("cuda")


def _round_trip(case: Case, stored: Stored, changed: Tensor) -> Callable[[str], tuple[Any, ...]]:
    """Decoded, changed where numbers are positive, and encoded: bits and bytes, on a device."""

    def run(device: str) -> tuple[Any, ...]:
        there = stored.to(device)
        had = case.decode(there)
        mixed = torch.where(changed.to(device) > 0, changed.to(device), had)
        return bits(had.cpu()), case.encode(mixed, there).as_bytes()

    return run
