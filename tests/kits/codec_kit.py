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
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.codec_reference import (
    ELEMENTS,
    Array,
    nearest_codes,
    reference_decode,
    scale_numbers,
    steps_of,
    unpack,
)
from kits.counted_gpu import GPU, counted_waits
from kits.simulated_gpu import simulated_gpu, without_gpu
from torch import Tensor

from raymerge.checkpoints.quantisation.block_codec import Codec, Encoded
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


def as_bytes(encoded: Encoded) -> tuple[bytes, bytes]:
    return encoded.codes.cpu().numpy().tobytes(), encoded.scales.cpu().numpy().tobytes()


def random_values(quant_spec: QuantSpec, seed: int, *, spread_exponents: int = 3) -> Tensor:
    generator = np.random.default_rng(seed)
    shape = (quant_spec.rows, quant_spec.columns)
    exponents = generator.integers(-spread_exponents, spread_exponents + 1, shape)
    values = np.ldexp(generator.standard_normal(shape) * 0.02, exponents)
    values[generator.random(shape) < 0.02] = 0.0
    values[generator.random(shape) < 0.02] = -0.0
    height, width = quant_spec.block
    if quant_spec.grid[1] > 1:
        values[:height, :width] = 0.0
    return torch.from_numpy(values.astype(np.float32))


def random_stored(quant_spec: QuantSpec, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes and scales as they may lie in a file: any code but NaN, scales of all usual magnitudes."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 256, quant_spec.codes_nbytes(quant_spec.rows), dtype=np.uint8)
    if quant_spec.format.is_fp8:
        codes[(codes & 0x7F) == 0x7F] = 0x11
    count = quant_spec.grid[0] * quant_spec.scale_row_length
    tensor_scale = None
    if quant_spec.tensor_scale_dtype is not None:
        wanted = torch.tensor(float(np.ldexp(1 + generator.random(), generator.integers(-9, 9))))
        tensor_scale = wanted.bfloat16().float() if quant_spec.tensor_scale_dtype is DType.BF16 else wanted
    stored = random_scales(quant_spec, generator, count)
    return torch.from_numpy(codes), torch.from_numpy(stored), tensor_scale


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


class CodecKit:
    quant_specs: ClassVar[Sequence[QuantSpec]]

    def each(self) -> Iterator[tuple[Codec, QuantSpec]]:
        for quant_spec in self.quant_specs:
            yield codec_of(quant_spec.format), quant_spec

    def scale_for(self, codec: Codec, quant_spec: QuantSpec, values: Tensor) -> Tensor | None:
        if quant_spec.tensor_scale_dtype is None:
            return None
        return codec.fresh_tensor_scale(quant_spec, values.abs().max())

    @inherited
    @given(seed=seeds)
    def test_decoding_gives_the_exact_products_rounded_once(self, seed: int) -> None:
        for codec, quant_spec in self.each():
            codes, scales, tensor_scale = random_stored(quant_spec, seed)
            found = codec.decode(quant_spec, codes, scales, tensor_scale=tensor_scale)
            number = None if tensor_scale is None else tensor_scale.item()
            wanted = reference_decode(quant_spec, codes.numpy(), scales.numpy(), number)
            assert found.dtype is torch.float32
            assert found.shape == (quant_spec.rows, quant_spec.columns)
            assert bits(found) == bits(wanted)

    @inherited
    @given(seed=seeds)
    def test_codes_are_the_nearest_under_the_scale_that_is_chosen(self, seed: int) -> None:
        for codec, quant_spec in self.each():
            values = random_values(quant_spec, seed)
            tensor_scale = self.scale_for(codec, quant_spec, values)
            encoded = codec.encode(quant_spec, values, tensor_scale=tensor_scale)
            number = None if tensor_scale is None else tensor_scale.item()
            steps = steps_of(quant_spec, encoded.scales.numpy(), number, quant_spec.rows)
            quotients = (values.numpy().astype(np.float64) / steps).astype(np.float32).astype(np.float64)
            wanted = nearest_codes(quant_spec.format, quotients)
            assert np.array_equal(unpack(quant_spec, encoded.codes.numpy()), wanted)

    @inherited
    @given(seed=seeds)
    def test_scales_make_use_of_the_codes(self, seed: int) -> None:
        """The largest element of a block that has any is within a quarter of the largest there is."""
        for codec, quant_spec in self.each():
            values = random_values(quant_spec, seed)
            tensor_scale = self.scale_for(codec, quant_spec, values)
            encoded = codec.encode(quant_spec, values, tensor_scale=tensor_scale)
            largest = np.abs(ELEMENTS[quant_spec.format][unpack(quant_spec, encoded.codes.numpy())])
            largest_there_is = np.nanmax(np.abs(ELEMENTS[quant_spec.format]))
            height, width = quant_spec.block
            for top, left in itertools.product(
                range(0, quant_spec.rows, height), range(0, quant_spec.columns, width)
            ):
                found = largest[top : top + height, left : left + width].max()
                assert found == 0 or found >= 0.44 * largest_there_is

    @inherited
    @given(seed=seeds)
    def test_what_was_decoded_gives_its_bytes_when_scales_are_kept(self, seed: int) -> None:
        for codec, quant_spec in self.each():
            codes, scales, tensor_scale = random_stored(quant_spec, seed)
            values = codec.decode(quant_spec, codes, scales, tensor_scale=tensor_scale)
            assert codec.fits(quant_spec, values, scales, tensor_scale=tensor_scale).all()
            again = codec.encode(quant_spec, values, given_scales=scales, tensor_scale=tensor_scale)
            assert as_bytes(again) == (codes.numpy().tobytes(), scales.numpy().tobytes())

    @inherited
    @given(seed=seeds)
    def test_encoding_is_a_fixed_point(self, seed: int) -> None:
        for codec, quant_spec in self.each():
            values = random_values(quant_spec, seed)
            tensor_scale = self.scale_for(codec, quant_spec, values)
            first = codec.encode(quant_spec, values, tensor_scale=tensor_scale)
            decoded = codec.decode(quant_spec, *first, tensor_scale=tensor_scale)
            kept = first.scales if quant_spec.scale_row_length else None
            second = codec.encode(quant_spec, decoded, given_scales=kept, tensor_scale=tensor_scale)
            assert as_bytes(second) == as_bytes(first)

    def test_only_a_block_that_changed_loses_its_scale(self) -> None:
        for codec, quant_spec in self.each():
            if quant_spec.scale_row_length < 2:
                continue
            codes, scales, tensor_scale = random_stored(quant_spec, 5)
            values = codec.decode(quant_spec, codes, scales, tensor_scale=tensor_scale)
            values[-1, -1] = values[-1, -1] * 1.03 + 1e-3 * values[-1].abs().max()
            fits = codec.fits(quant_spec, values, scales, tensor_scale=tensor_scale)
            assert not fits[-1, -1]
            assert int((~fits).sum()) == 1
            found = codec.encode(quant_spec, values, given_scales=scales, tensor_scale=tensor_scale)
            fresh = codec.encode(quant_spec, values, tensor_scale=tensor_scale)
            nbytes = quant_spec.scale_dtype.bits // 8
            assert found.scales[:-nbytes].equal(scales[:-nbytes])
            assert found.scales[-nbytes:].equal(fresh.scales[-nbytes:])
            unchanged = unpack(quant_spec, found.codes.numpy()) == unpack(quant_spec, codes.numpy())
            height, width = quant_spec.block
            top, left = (quant_spec.grid[0] - 1) * height, (quant_spec.grid[1] - 1) * width
            assert unchanged[:top].all()
            assert unchanged[:, :left].all()

    @inherited
    @given(data=st.data(), seed=seeds)
    def test_a_matrix_cut_between_bands_gives_the_same_bytes(self, data: st.DataObject, seed: int) -> None:
        for codec, quant_spec in self.each():
            scale_rows = range(quant_spec.scale_row_height, quant_spec.rows, quant_spec.scale_row_height)
            inner = data.draw(st.sets(st.sampled_from(scale_rows))) if scale_rows else set()
            cuts = [0, *sorted(inner), quant_spec.rows]
            codes, scales, tensor_scale = random_stored(quant_spec, seed)
            had = codec.decode(quant_spec, codes, scales, tensor_scale=tensor_scale)
            changed = torch.where(random_values(quant_spec, seed) > 0.05, had * 1.5, had)
            kept = scales if quant_spec.scale_row_length else None
            whole = codec.encode(quant_spec, changed, given_scales=kept, tensor_scale=tensor_scale)
            pieces = []
            for top, bottom in itertools.pairwise(cuts):
                part = self._rows(quant_spec, codes, scales, top, bottom)
                values = codec.decode(quant_spec, *part, tensor_scale=tensor_scale)
                assert bits(values) == bits(had[top:bottom])
                mine = part.scales if quant_spec.scale_row_length else None
                piece = codec.encode(
                    quant_spec, changed[top:bottom], given_scales=mine, tensor_scale=tensor_scale
                )
                pieces.append(as_bytes(piece))
            assert tuple(b"".join(parts) for parts in zip(*pieces, strict=True)) == as_bytes(whole)

    def test_sizes_are_what_the_packing_says(self) -> None:
        for codec, quant_spec in self.each():
            values = random_values(quant_spec, 3)
            encoded = codec.encode(quant_spec, values, tensor_scale=self.scale_for(codec, quant_spec, values))
            assert encoded.codes.dtype is encoded.scales.dtype is torch.uint8
            assert encoded.codes.shape == (quant_spec.codes_nbytes(quant_spec.rows),)
            assert encoded.scales.shape == (quant_spec.scales_nbytes(quant_spec.rows),)
            assert np.prod(quant_spec.codes_shape) * quant_spec.format.code_dtype.bits // 8 == (
                quant_spec.codes_nbytes(quant_spec.rows) * quant_spec.num_matrices
            )

    def test_zeros_have_the_scale_one(self) -> None:
        for codec, quant_spec in self.each():
            values = torch.zeros(quant_spec.rows, quant_spec.columns)
            tensor_scale = self.scale_for(codec, quant_spec, values)
            encoded = codec.encode(quant_spec, values, tensor_scale=tensor_scale)
            if tensor_scale is not None:
                # Where blocks have scales too, zeros have the tensor's scale that others have.
                others = codec.fresh_tensor_scale(quant_spec, torch.tensor(0.5)).item()
                assert tensor_scale.item() == (others if quant_spec.scale_row_length else 1.0)
            assert set(scale_numbers(quant_spec.scale_dtype, encoded.scales.numpy())) <= {1.0}
            assert codec.decode(quant_spec, *encoded, tensor_scale=tensor_scale).equal(values)

    def test_zeros_that_had_the_scale_zero_keep_it(self) -> None:
        for codec, quant_spec in self.each():
            if quant_spec.scale_dtype in (DType.U8, DType.F8_E8M0) or quant_spec.scale_row_length == 0:
                continue
            values = torch.zeros(quant_spec.rows, quant_spec.columns)
            tensor_scale = self.scale_for(codec, quant_spec, values)
            kept = torch.zeros(quant_spec.scales_nbytes(quant_spec.rows), dtype=torch.uint8)
            encoded = codec.encode(quant_spec, values, given_scales=kept, tensor_scale=tensor_scale)
            assert encoded.scales.equal(kept)
            assert codec.decode(quant_spec, *encoded, tensor_scale=tensor_scale).equal(values)

    @pytest.mark.parametrize("exponent", [-148, -140, -126, -120, -60, -20, 0, 20, 60, 100, 120, 126])
    def test_every_magnitude_comes_back(self, exponent: int) -> None:
        """To within a part of the largest of its block; what no scale can reach, to within the least step."""
        for codec, quant_spec in self.each():
            if quant_spec.scale_dtype is DType.F16 and not -12 < exponent < 15:
                continue  # a float16 is no scale for such numbers, or a coarse one
            tiny = random_values(quant_spec, 11, spread_exponents=0).double() * 8
            values = torch.ldexp(tiny.clamp(-1.9, 1.9), torch.tensor(float(exponent))).float()
            tensor_scale = self.scale_for(codec, quant_spec, values)
            encoded = codec.encode(quant_spec, values, tensor_scale=tensor_scale)
            decoded = codec.decode(quant_spec, *encoded, tensor_scale=tensor_scale)
            assert decoded.isfinite().all()
            share = 2**-4 if quant_spec.format.is_fp8 else 0.26
            bound = share * values.abs().max().double() + 2.0**-127
            assert (decoded.double() - values.double()).abs().max() <= bound

    def test_error_sums_are_those_of_the_numbers(self) -> None:
        for codec, quant_spec in self.each():
            values = random_values(quant_spec, 13)
            tensor_scale = self.scale_for(codec, quant_spec, values)
            encoded = codec.encode(quant_spec, values, tensor_scale=tensor_scale)
            found = codec.error_sums(quant_spec, values, encoded, tensor_scale=tensor_scale)
            number = None if tensor_scale is None else tensor_scale.item()
            decoded = reference_decode(quant_spec, encoded.codes.numpy(), encoded.scales.numpy(), number)
            true = values.numpy().astype(np.float64)
            assert found.squared_errors == pytest.approx(((decoded - true) ** 2).sum(), rel=1e-6)
            assert found.squared_values == pytest.approx((true**2).sum(), rel=1e-12)

    def test_inputs_are_left_as_they_were(self) -> None:
        for codec, quant_spec in self.each():
            codes, scales, tensor_scale = random_stored(quant_spec, 17)
            had = codes.clone(), scales.clone()
            values = codec.decode(quant_spec, codes, scales, tensor_scale=tensor_scale)
            copy = values.clone()
            kept = scales if quant_spec.scale_row_length else None
            encoded = codec.encode(quant_spec, values, given_scales=kept, tensor_scale=tensor_scale)
            codec.error_sums(quant_spec, values, encoded, tensor_scale=tensor_scale)
            assert bits(values) == bits(copy)
            assert codes.equal(had[0])
            assert scales.equal(had[1])

    @without_gpu
    def test_a_simulated_gpu_gives_the_same_bytes(self) -> None:
        for seed, (codec, quant_spec) in enumerate(self.each()):
            codes, scales, tensor_scale = random_stored(quant_spec, 3)
            changed = random_values(quant_spec, 3, spread_exponents=20)
            run = self._round_trip(codec, quant_spec, codes, scales, changed, tensor_scale)
            with simulated_gpu(seed):
                on_gpu = run("cuda")
            assert on_gpu == run("cpu")

    def test_a_gpu_is_waited_for_once(self) -> None:
        """For what encoding changed, which tells as well whether all of it was finite."""
        for codec, quant_spec in self.each():
            stored = random_stored(quant_spec, 3)
            values = random_values(quant_spec, 3, spread_exponents=20)
            expected = self._round_trip(codec, quant_spec, *stored[:2], values, stored[2])("cpu")
            with counted_waits() as waits:
                found = self._round_trip(codec, quant_spec, *stored[:2], values, stored[2])("meta")
                brought = waits.total()
                one = None if stored[2] is None else stored[2].to(GPU)
                for number, last in enumerate((0.0, torch.inf, torch.nan), 1):
                    values[-1, -1] = last
                    far = values.to(GPU)
                    encoded = codec.encode(quant_spec, far, tensor_scale=one)
                    sums = codec.error_sums(quant_spec, far, encoded, tensor_scale=one)
                    assert math.isfinite(sums.squared_values) is math.isfinite(last)
                    assert waits.total() == brought + number
            assert found == expected
            # What was compared, and nothing on the way there.
            assert brought == 3

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_a_gpu_gives_the_same_bytes(self) -> None:
        for (codec, quant_spec), seed in itertools.product(self.each(), range(20)):
            codes, scales, tensor_scale = random_stored(quant_spec, seed)
            changed = random_values(quant_spec, seed, spread_exponents=20)
            run = self._round_trip(codec, quant_spec, codes, scales, changed, tensor_scale)
            assert run("cpu") == run("cuda")

    @staticmethod
    def _round_trip(
        codec: Codec,
        quant_spec: QuantSpec,
        codes: Tensor,
        scales: Tensor,
        changed: Tensor,
        tensor_scale: Tensor | None,
    ) -> Callable[[str], tuple[Any, ...]]:
        def run(device: str) -> tuple[Any, ...]:
            one = None if tensor_scale is None else tensor_scale.to(device)
            kept = scales.to(device)
            had = codec.decode(quant_spec, codes.to(device), kept, tensor_scale=one)
            mixed = torch.where(changed.to(device) > 0, changed.to(device), had)
            encoded = codec.encode(
                quant_spec,
                mixed,
                given_scales=kept if quant_spec.scale_row_length else None,
                tensor_scale=one,
            )
            return bits(had.cpu()), as_bytes(encoded)

        return run

    @staticmethod
    def _rows(quant_spec: QuantSpec, codes: Tensor, scales: Tensor, top: int, bottom: int) -> Encoded:
        first, last = quant_spec.codes_nbytes(top), quant_spec.codes_nbytes(bottom)
        begin, end = quant_spec.scales_nbytes(top), quant_spec.scales_nbytes(bottom)
        return Encoded(codes[first:last], scales[begin:end])
