"""Layouts of files not yet written, held against what safetensors writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save

from raymerge.checkpoints.header import (
    MAX_HEADER_NBYTES,
    FileLayout,
    TensorSpec,
    index_json,
    lay_out,
    read_header,
    shard_names,
    split_into_shards,
)
from raymerge.dtypes import DType
from raymerge.storage.local.store import LocalStore

TORCH_DTYPES = [dtype for dtype in DType if dtype.torch_name is not None]


def zeros(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=getattr(torch, str(spec.dtype.torch_name)))


def unpadded(layout: FileLayout) -> bytes:
    """The header that safetensors would write, which pads to 8 bytes only."""
    text = layout.header[8:].rstrip(b" ")
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def assert_as_safetensors(specs: list[TensorSpec]) -> None:
    content = save({spec.name: zeros(spec) for spec in specs}, metadata={"format": "pt"})
    layout = lay_out(specs)
    assert content.startswith(unpadded(layout))
    assert len(content) - len(unpadded(layout)) == layout.nbytes - layout.data_start


class TestSameBytesAsSafetensors:
    @pytest.mark.parametrize(
        "name",
        [
            "é",
            "\u2028",
            "\x7f",
            'a"b',
            "a\\b",
            "a/b",
            "\n\t\r\b\f\x00\x1f",
            "😀",
            "a b",
            "ﬀ",
            "\ufeff",
            "<&>",
        ],
    )
    def test_odd_names(self, name: str) -> None:
        assert_as_safetensors([TensorSpec(name, DType.F32, (1,)), TensorSpec("z", DType.F32, (1,))])

    @settings(deadline=None, max_examples=100)
    @given(
        st.lists(
            st.builds(
                TensorSpec,
                st.text(st.characters(codec="utf-8"), min_size=1, max_size=6),
                st.sampled_from(TORCH_DTYPES),
                st.lists(st.integers(0, 3), max_size=3).map(tuple),
            ),
            min_size=1,
            max_size=8,
            unique_by=lambda spec: spec.name,
        )
    )
    def test_any_tensors(self, specs: list[TensorSpec]) -> None:
        assert_as_safetensors(specs)


class TestReadBack:
    def write(self, path: Path, layout: FileLayout, data: dict[str, bytes]) -> None:
        content = bytearray(layout.header.ljust(layout.nbytes, b"\0"))
        for tensor in layout.tensors:
            content[tensor.offset : tensor.offset + tensor.nbytes] = data[tensor.name]
        path.write_bytes(content)

    def test_safetensors_reads_the_padded_file(self, tmp_path: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        tensors = {f"x.{number}": torch.randn(3, number, generator=generator) for number in range(5)}
        layout = lay_out(
            [TensorSpec(name, DType.F32, tuple(tensor.shape)) for name, tensor in tensors.items()]
        )
        path = tmp_path / "model.safetensors"
        self.write(path, layout, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()})
        found = load_file(path)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}

    @settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(
            st.builds(
                TensorSpec,
                st.text(st.characters(codec="utf-8"), min_size=1, max_size=200),
                st.sampled_from(list(DType)),
                st.lists(st.integers(0, 4).map(lambda size: size * 4), max_size=3).map(lambda s: (*s, 4)),
            ),
            max_size=30,
            unique_by=lambda spec: spec.name,
        )
    )
    def test_our_reader_finds_what_was_laid_out(self, tmp_path: Path, specs: list[TensorSpec]) -> None:
        layout = lay_out(specs)
        self.write(tmp_path / "x", layout, {spec.name: bytes(spec.nbytes) for spec in specs})
        with LocalStore(tmp_path) as store:
            header = read_header(store, "x", layout.nbytes, "")
        placed = [(t.name, t.dtype, t.shape, t.offset, t.nbytes) for t in header.tensors]
        assert sorted(placed) == sorted(layout.tensors)
        assert header.data_start == layout.data_start

    @pytest.mark.parametrize("count", [0, 1, 30, 70, 3000])
    def test_data_starts_at_a_page(self, count: int) -> None:
        layout = lay_out([TensorSpec(f"x{number}", DType.U8, ()) for number in range(count)])
        assert len(layout.header) == layout.data_start
        assert layout.data_start % 4096 == 0
        assert int.from_bytes(layout.header[:8], "little") == layout.data_start - 8
        assert layout.header.rstrip(b" ").endswith(b"}")
        assert len(layout.header.rstrip(b" ")) > layout.data_start - 4096

    def test_offsets_above_four_gigabytes(self) -> None:
        layout = lay_out([TensorSpec("a", DType.F64, (2**40,)), TensorSpec("b", DType.U8, (1,))])
        assert layout.tensors[1].offset == layout.data_start + 2**43
        assert layout.nbytes == layout.data_start + 2**43 + 1


class TestRefusals:
    def test_a_name_twice(self) -> None:
        with pytest.raises(ValueError, match="'x' stands twice"):
            lay_out([TensorSpec("x", DType.F32, ()), TensorSpec("x", DType.F16, ())])

    def test_the_reserved_name(self) -> None:
        with pytest.raises(ValueError, match="'__metadata__' is reserved"):
            lay_out([TensorSpec("__metadata__", DType.F32, ())])

    def test_part_of_a_byte(self) -> None:
        with pytest.raises(ValueError, match="do not fill whole bytes"):
            lay_out([TensorSpec("x", DType.F4, (3,))])

    def test_more_header_than_readers_take(self) -> None:
        with pytest.raises(ValueError, match="above the format's limit"):
            lay_out([TensorSpec("x" * 100_000_000, DType.U8, ())])


class TestShards:
    def specs(self, *sizes: int) -> list[TensorSpec]:
        return [TensorSpec(f"x{number}", DType.U8, (size,)) for number, size in enumerate(sizes)]

    def sizes(self, shards: tuple[tuple[TensorSpec, ...], ...]) -> list[list[int]]:
        return [[spec.nbytes for spec in shard] for shard in shards]

    @pytest.mark.parametrize(
        ("sizes", "shard_size", "expected"),
        [
            ([4, 4, 4], 8, [[4, 4], [4]]),
            ([4, 4, 4], 0, [[4, 4, 4]]),
            ([4, 4, 4], 7, [[4], [4], [4]]),
            ([4, 20, 4, 4], 8, [[4], [20], [4, 4]]),
            ([20, 0, 1], 8, [[20], [0, 1]]),
            ([], 8, []),
            ([], 0, []),
        ],
    )
    def test_cuts(self, sizes: list[int], shard_size: int, expected: list[list[int]]) -> None:
        assert self.sizes(split_into_shards(self.specs(*sizes), shard_size)) == expected

    @pytest.mark.parametrize("shard_size", [0, 1 << 40])
    def test_no_shard_has_more_names_than_its_header_may_hold(self, shard_size: int) -> None:
        specs = [TensorSpec("x" * 1_000_000 + str(number), DType.U8, (2, 3)) for number in range(110)]
        shards = split_into_shards(specs, shard_size)
        assert [spec for shard in shards for spec in shard] == specs
        assert [len(shard) for shard in shards] == [99, 11]
        assert len(lay_out(shards[0]).header) < MAX_HEADER_NBYTES

    @settings(deadline=None, max_examples=100)
    @given(st.lists(st.integers(0, 50), max_size=30), st.integers(0, 80))
    def test_keeps_every_tensor_in_order_and_wastes_no_shard(self, sizes: list[int], shard_size: int) -> None:
        specs = self.specs(*sizes)
        shards = split_into_shards(specs, shard_size)
        assert [spec for shard in shards for spec in shard] == specs
        for at, shard in enumerate(shards):
            filled = sum(spec.nbytes for spec in shard)
            assert shard
            assert not shard_size or filled <= shard_size or len(shard) == 1 or filled == shard[0].nbytes
            if at:
                assert sum(spec.nbytes for spec in shards[at - 1]) + shard[0].nbytes > shard_size

    @pytest.mark.parametrize(
        ("count", "first", "last"),
        [
            (1, "model.safetensors", "model.safetensors"),
            (2, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
            (163, "model-00001-of-00163.safetensors", "model-00163-of-00163.safetensors"),
        ],
    )
    def test_names(self, count: int, first: str, last: str) -> None:
        names = shard_names(count)
        assert (len(names), names[0], names[-1]) == (count, first, last)
        assert list(names) == sorted(set(names))

    def test_index(self) -> None:
        layouts = [lay_out(self.specs(3, 5)), lay_out([TensorSpec("ä", DType.F32, (2,))])]
        text = index_json(layouts, shard_names(2))
        assert text == (
            b"{\n"
            b'  "metadata": {\n'
            b'    "total_size": 16\n'
            b"  },\n"
            b'  "weight_map": {\n'
            b'    "x0": "model-00001-of-00002.safetensors",\n'
            b'    "x1": "model-00001-of-00002.safetensors",\n'
            b'    "\\u00e4": "model-00002-of-00002.safetensors"\n'
            b"  }\n"
            b"}\n"
        )
