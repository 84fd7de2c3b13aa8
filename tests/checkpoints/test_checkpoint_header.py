"""Headers, layouts and indices of files: read, written, and every damage refused."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import index_json
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from raymerge.checkpoints.files import WeightIndex, check_index, find_weights
from raymerge.checkpoints.header import (
    MAX_HEADER_NBYTES,
    FileHeader,
    FileLayout,
    TensorSpec,
    lay_out,
    read_header,
    shard_names,
    split_into_shards,
)
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError
from raymerge.storage.local.store import LocalStore

Entry = dict[str, Any]


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> Entry:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_of(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def read(root: Path, content: bytes) -> FileHeader:
    (root / "model.safetensors").write_bytes(content)
    with LocalStore(root) as store:
        return read_header(store, "model.safetensors", len(content), "v1")


def refusal(root: Path, content: bytes) -> str:
    """The message, which must name the file and leave no doubt about what to do."""
    with pytest.raises(CheckpointError) as caught:
        read(root, content)
    for problem in caught.value.problems:
        assert problem.where == str(root / "model.safetensors")
    assert caught.value.problems[0].remedy
    return str(caught.value)


def is_refused_by_safetensors(root: Path) -> bool:
    try:
        with safe_open(root / "model.safetensors", "pt") as file:
            file.keys()
    except SafetensorError:
        return True
    return False


class TestGoodFiles:
    def test_says_what_safetensors_wrote(self, tmp_path: Path) -> None:
        tensors = {
            "b": torch.arange(6, dtype=torch.int64).reshape(2, 3),
            "a": torch.ones(4, dtype=torch.bfloat16),
            "scalar": torch.tensor(7.0),
            "empty": torch.zeros(0, 5),
            "ünï.0": torch.zeros(3, dtype=torch.uint8),
        }
        content = save(tensors, metadata={"format": "pt", "author": "jemand"})
        header = read(tmp_path, content)
        assert {t.name: (t.shape, t.nbytes) for t in header.tensors} == {
            name: (tuple(tensor.shape), tensor.numel() * tensor.element_size())
            for name, tensor in tensors.items()
        }
        assert header.metadata == {"format": "pt", "author": "jemand"}
        assert (header.key, header.version, header.nbytes) == ("model.safetensors", "v1", len(content))
        for tensor in header.tensors:
            piece = content[tensor.offset : tensor.offset + tensor.nbytes]
            assert piece == tensors[tensor.name].contiguous().flatten().view(torch.uint8).numpy().tobytes()

    @pytest.mark.parametrize("shape", [[0], [3, 0, 2], [0, 0]])
    def test_tensors_without_elements_take_no_room(self, tmp_path: Path, shape: list[int]) -> None:
        content = file_of(
            {"a": entry(shape=shape, offsets=[0, 0]), "x": entry(), "z": entry(shape=shape, offsets=[8, 8])},
            bytes(8),
        )
        header = read(tmp_path, content)
        assert [t.name for t in header.tensors] == ["a", "x", "z"]
        assert header.tensors[0].num_elements == 0

    def test_padding_behind_the_json_is_part_of_the_header(self, tmp_path: Path) -> None:
        raw = json.dumps({"x": entry()}).encode().ljust(4088)
        header = read(tmp_path, file_of(raw, bytes(8)))
        assert header.data_start == 4096
        assert header.tensors[0].offset == 4096

    def test_the_digest_is_of_the_header_alone(self, tmp_path: Path) -> None:
        one = read(tmp_path, file_of({"x": entry()}, b"12345678"))
        other_data = read(tmp_path, file_of({"x": entry()}, b"abcdefgh"))
        other_name = read(tmp_path, file_of({"y": entry()}, b"12345678"))
        assert one.digest == other_data.digest != other_name.digest
        assert len(one.digest) == 32


GOOD = {"x": entry()}
BROKEN_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes, too few"),
    "length bomb": (file_of(GOOD, bytes(8), length=2**63), f"header of {2**63} bytes"),
    "length above the file": (file_of(b"{}", length=3), "header of 3 bytes, but the file has 10 bytes"),
    "git lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "git lfs pull",
    ),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not UTF-8 text (byte 2)"),
    "not JSON": (file_of(b'{"x": '), "not JSON (Expecting value at line 1, column 7)"),
    "a list": (file_of(b"[]"), "not a JSON object"),
    "white space first": (file_of(b" {}"), "not a JSON object"),
    "nested too deep": (file_of(b'{"x":' * 100_000), "nested too deep"),
    "a name twice": (file_of(b'{"x": {}, "x": {}}'), "names 'x' twice"),
    "not a number": (file_of(b'{"x": NaN}'), "holds NaN"),
    "a number of thousands of digits": (file_of(b'{"x": ' + b"9" * 5000 + b"}"), "not JSON that can be read"),
    "metadata of numbers": (
        file_of({"__metadata__": {"a": 1}}),
        "__metadata__ that is not a map from text to text",
    ),
    "one byte short": (file_of(GOOD, bytes(7)), "1 too few"),
    "one byte extra": (file_of(GOOD, bytes(9)), "1 too many"),
    "not from the start": (file_of({"x": entry(offsets=[4, 12])}, bytes(12)), "leaves a hole before it"),
    "hole": (file_of({"x": entry(), "y": entry(offsets=[9, 17])}, bytes(17)), "tensor 'y' begins at byte"),
    "overlap": (
        file_of({"x": entry(), "y": entry(offsets=[7, 15])}, bytes(15)),
        "overlaps what is before it",
    ),
    "an empty one inside another": (
        file_of({"x": entry(), "y": entry(shape=[0], offsets=[4, 4])}, bytes(8)),
        "overlaps",
    ),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_a_broken_file_is_refused(tmp_path: Path, case: str) -> None:
    content, message = BROKEN_FILES[case]
    assert message in refusal(tmp_path, content)


# safetensors takes the last of equal keys, and white space that the format forbids; mmap refuses no bytes.
OURS_ALONE = {"a name twice", "a field twice", "white space first", "empty"}


@pytest.mark.parametrize("case", sorted(BROKEN_FILES.keys() - OURS_ALONE))
def test_safetensors_refuses_it_too(tmp_path: Path, case: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(BROKEN_FILES[case][0])
    assert is_refused_by_safetensors(tmp_path)


BAD_ENTRIES: dict[str, tuple[Any, str]] = {
    "null": (None, "is described by None"),
    "no dtype": ({"shape": [2], "data_offsets": [0, 8]}, "not by dtype, shape and data_offsets"),
    "unknown dtype": (entry("F128"), "has the dtype 'F128', which raymerge does not know"),
    "dtype as a list": (entry(["F32"]), "has the dtype ['F32']"),
    "shape true": (entry(shape=[True, 2]), "has the shape [True, 2]"),
    "shape negative": (entry(shape=[-2]), "has the shape [-2]"),
    "shape of 2**63": (entry(shape=[2**63]), "not a list of whole numbers from 0 to 2**63 - 1"),
    "shape that wraps around": (
        entry(shape=[2**32, 2**32, 0], offsets=[0, 0]),
        "more elements than 2**63 - 1",
    ),
    "offsets true": (entry(offsets=[False, 8]), "has the data_offsets [False, 8]"),
    "offsets negative": (entry(offsets=[-8, 0]), "has the data_offsets [-8, 0]"),
    "offsets backwards": (entry(offsets=[8, 0]), "has the data_offsets [8, 0]"),
    "offsets of three": (entry(offsets=[0, 4, 8]), "has the data_offsets [0, 4, 8]"),
    "offsets huge": (entry(offsets=[0, 2**64]), "not a begin and an end"),
    "too many bytes": (entry(offsets=[0, 9]), "occupies 9 bytes, but F32 [2] needs 8 bytes"),
    "half a byte": (entry("F4", [3], [0, 1]), "occupies 1 bytes, but F4 [3] needs no whole number of bytes"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_a_bad_entry_is_refused_with_the_tensor(tmp_path: Path, case: str) -> None:
    bad, message = BAD_ENTRIES[case]
    text = refusal(tmp_path, file_of({"model.x": bad}, bytes(8)))
    assert "tensor 'model.x' " in text
    assert message in text


def test_half_a_surrogate_pair_is_no_name(tmp_path: Path) -> None:
    text = refusal(
        tmp_path, file_of(rb'{"\ud800": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}', b"1")
    )
    assert "cannot be written as UTF-8" in text
    text.encode()


def test_all_defects_are_told_at_once(tmp_path: Path) -> None:
    text = refusal(
        tmp_path, file_of({"a": entry("Q8"), "b": entry(), "c": entry(shape=[-1]), "__metadata__": 1})
    )
    assert len(text.splitlines()) == 3


def test_but_not_thousands(tmp_path: Path) -> None:
    text = refusal(tmp_path, file_of({str(number): entry("Q8") for number in range(1000)}))
    assert len(text.splitlines()) == 9
    assert text.endswith("has 992 more defects of this kind.")


def test_a_length_bomb_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 90_000_000_000))
        file.truncate(10**11)
    tracemalloc.start()
    with LocalStore(tmp_path) as store, pytest.raises(CheckpointError, match="a header may have 100000000"):
        read_header(store, path.name, 10**11, "")
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_a_file_that_shrank_since_it_was_listed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(file_of(GOOD, bytes(8))[:30])
    with LocalStore(tmp_path) as store, pytest.raises(CheckpointError, match="ends at byte 30"):
        read_header(store, "x", 200, "")


@settings(deadline=None, max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.sampled_from(["F32", "x"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["x", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    ),
    st.binary(max_size=16),
)
def test_no_json_gets_past_but_as_a_header_or_a_refusal(tmp_path: Path, header: Any, data: bytes) -> None:
    content = file_of(header, data)
    try:
        found = read(tmp_path, content)
    except CheckpointError:
        return
    assert sum(tensor.nbytes for tensor in found.tensors) == len(data)


@settings(deadline=None, max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_byte_never_crashes(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(save({"a.weight": torch.zeros(2, 3), "b": torch.zeros(1, dtype=torch.int8)}))
    at = data.draw(st.integers(0, len(content) - 26))
    content[at] = data.draw(st.integers(0, 255))
    try:
        found = read(tmp_path, bytes(content))
    except CheckpointError:
        return
    assert sum(tensor.nbytes for tensor in found.tensors) == 25


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

    @settings(deadline=None, max_examples=50)
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
    @settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(
            st.builds(
                TensorSpec,
                st.text(st.characters(codec="utf-8"), min_size=1, max_size=200).filter("__metadata__".__ne__),
                st.sampled_from(list(DType)),
                st.lists(st.integers(0, 4).map(lambda size: size * 4), max_size=3).map(lambda s: (*s, 4)),
            ),
            max_size=30,
            unique_by=lambda spec: spec.name,
        )
    )
    def test_our_reader_finds_what_was_laid_out(self, tmp_path: Path, specs: list[TensorSpec]) -> None:
        layout = lay_out(specs)
        (tmp_path / "x").write_bytes(layout.header.ljust(layout.nbytes, b"\0"))
        with LocalStore(tmp_path) as store:
            header = read_header(store, "x", layout.nbytes, "")
        assert sorted(header.tensors) == sorted(layout.stored("x"))
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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([TensorSpec("x", DType.F32, ()), TensorSpec("x", DType.F16, ())], "'x' stands twice"),
        ([TensorSpec("__metadata__", DType.F32, ())], "'__metadata__' is reserved"),
        ([TensorSpec("x", DType.F4, (3,))], "do not fill whole bytes"),
        ([TensorSpec("x" * 100_000_000, DType.U8, ())], "above the format's limit"),
    ],
    ids=["a name twice", "the reserved name", "part of a byte", "more header than readers take"],
)
def test_what_no_file_can_hold_is_not_laid_out(specs: list[TensorSpec], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lay_out(specs)


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

    def test_no_shard_has_more_names_than_its_header_may_hold(self) -> None:
        specs = [TensorSpec("x" * 1_000_000 + str(number), DType.U8, (2, 3)) for number in range(110)]
        shards = split_into_shards(specs, 1 << 40)
        assert [spec for shard in shards for spec in shard] == specs
        assert [len(shard) for shard in shards] == [99, 11]
        assert len(lay_out(shards[0]).header) < MAX_HEADER_NBYTES

    @settings(deadline=None, max_examples=50)
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


INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def put_weights(root: Path, key: str, *names: str) -> None:
    save_file({name: torch.zeros(4) for name in names}, root / key)


def put_index(root: Path, weight_map: object, *, key: str = INDEX, **metadata: Any) -> None:
    (root / key).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def find(root: Path) -> WeightIndex:
    with LocalStore(root) as store:
        return find_weights(store, store.files())


def check(root: Path) -> tuple[str, list[str]]:
    """The problems as text, and the notes."""
    with LocalStore(root) as store:
        files = store.files()
        index = find_weights(store, files)
        headers = [read_header(store, i.key, i.nbytes, i.version) for i in files if i.key in index.keys]
        problems, notes = check_index(index, headers, store.location("."))
    return "\n".join(map(str, (*index.problems, *problems))), notes


def index_refusal(root: Path) -> str:
    try:
        problems = find(root).problems
    except CheckpointError as error:
        problems = error.problems
    assert problems, "the directory was taken as a checkpoint"
    assert all(problem.remedy for problem in problems)
    return "\n".join(map(str, problems))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    put_weights(tmp_path, ONE, "a", "b")
    put_weights(tmp_path, TWO, "c")
    put_index(tmp_path, {"a": ONE, "b": ONE, "c": TWO}, total_size=48)
    return tmp_path


class TestAccepted:
    def test_a_single_file(self, tmp_path: Path) -> None:
        put_weights(tmp_path, "model.safetensors", "a")
        assert find(tmp_path) == WeightIndex(("model.safetensors",), None, None, ())
        assert check(tmp_path) == ("", [])

    def test_several_files_with_an_index(self, sharded: Path) -> None:
        index = find(sharded)
        assert index.keys == (ONE, TWO)
        assert index.weight_map == {"a": ONE, "b": ONE, "c": TWO}
        assert (index.total_size, index.notes, index.problems) == (48, (), ())
        assert check(sharded) == ("", [])

    def test_an_index_may_name_files_as_it_likes(self, tmp_path: Path) -> None:
        put_weights(tmp_path, "weights.part_a.safetensors", "a")
        put_index(tmp_path, {"a": "weights.part_a.safetensors"})
        assert find(tmp_path).keys == ("weights.part_a.safetensors",)
        assert find(tmp_path).notes == ()

    @pytest.mark.parametrize("of", ["00003", "000003"])
    def test_a_complete_set_without_an_index(self, tmp_path: Path, of: str) -> None:
        for number in (1, 2, 3):
            put_weights(tmp_path, f"model-{number:05d}-of-{of}.safetensors", f"x{number}")
        index = find(tmp_path)
        assert len(index.keys) == 3
        assert index.weight_map is None
        assert "the 3 numbered files are complete" in index.notes[0]
        assert check(tmp_path) == ("", [])


class TestTwoSets:
    def test_a_single_file_beside_the_index(self, sharded: Path) -> None:
        put_weights(sharded, "model.safetensors", "a")
        text = index_refusal(sharded)
        assert "holds model.safetensors beside model.safetensors.index.json, which does not name it" in text
        assert "Delete model.safetensors if" in text

    def test_a_single_file_beside_numbered_ones(self, tmp_path: Path) -> None:
        put_weights(tmp_path, "model.safetensors", "a")
        put_weights(tmp_path, ONE, "a")
        assert f"holds model.safetensors and also {ONE}" in index_refusal(tmp_path)

    @pytest.mark.parametrize("of", ["00009", "000009"])
    def test_remains_of_another_run(self, sharded: Path, of: str) -> None:
        for number in range(1, 6):
            put_weights(sharded, f"model-{number:05d}-of-{of}.safetensors", "a")
        text = index_refusal(sharded)
        assert f"holds model-00001-of-{of}.safetensors, model-00002-of-{of}.safetensors" in text
        assert "and 2 more, which" in text
        assert "remains of another set" in text

    @pytest.mark.parametrize(
        "second", ["model.fp16.safetensors.index.json", "model-old.safetensors.index.json"]
    )
    def test_a_second_index(self, sharded: Path, second: str) -> None:
        put_index(sharded, {"a": ONE}, key=second)
        text = index_refusal(sharded)
        assert "holds 2 indexes" in text
        assert second in text

    def test_an_index_under_another_name_alone(self, sharded: Path) -> None:
        (sharded / INDEX).rename(sharded / "model.fp16.safetensors.index.json")
        assert "Rename it to model.safetensors.index.json" in index_refusal(sharded)

    def test_two_numbered_sets_without_an_index(self, tmp_path: Path) -> None:
        for name in (ONE, TWO, "model-00001-of-00001.safetensors"):
            put_weights(tmp_path, name, name)
        text = index_refusal(tmp_path)
        assert "1 files of 1 and 2 files of 2" in text
        assert "several sets" in text


class TestIncomplete:
    def test_a_missing_file_is_named_with_its_tensors(self, sharded: Path) -> None:
        (sharded / ONE).unlink()
        text = index_refusal(sharded)
        assert f"names {ONE}, which is not in the directory (2 tensors)" in text

    def test_missing_numbers_are_named(self, tmp_path: Path) -> None:
        for number in (1, 4):
            put_weights(tmp_path, f"model-{number:05d}-of-00007.safetensors", "x")
        text = index_refusal(tmp_path)
        assert "holds 2 of 7 numbered files and no index; 5 missing" in text
        assert "model-00002-of-00007.safetensors, model-00003-of-00007.safetensors" in text
        assert "model-00005-of-00007.safetensors and others" in text

    @pytest.mark.parametrize(
        "numbers", [["00000", "00001"], ["00001", "00002", "00003"], ["00001", "000001"]]
    )
    def test_numbers_that_are_no_sequence(self, tmp_path: Path, numbers: list[str]) -> None:
        for number in numbers:
            put_weights(tmp_path, f"model-{number}-of-00002.safetensors", number)
        assert "no sequence from 1" in index_refusal(tmp_path)


class TestHostileIndex:
    @pytest.mark.parametrize("key", ["../outside.safetensors", "a/b.safetensors", "", ".."])
    def test_only_files_beside_it(self, sharded: Path, key: str) -> None:
        put_index(sharded, {"a": ONE, "b": key, "c": TWO})
        text = index_refusal(sharded)
        assert f"places tensor 'b' in {key!r}, which is not the name of a file beside it" in text

    def test_only_safetensors(self, sharded: Path) -> None:
        (sharded / "x.bin").write_bytes(b"")
        put_index(sharded, {"a": ONE, "b": "x.bin", "c": TWO})
        assert "names x.bin: no safetensors" in index_refusal(sharded)
        assert find(sharded).keys == (ONE, TWO)

    def test_thousands_of_files_are_counted_quickly(self, sharded: Path) -> None:
        put_index(sharded, {f"x{n}": f"{n:06d}.safetensors" if n % 2 else f"../{n}" for n in range(60_000)})
        text = index_refusal(sharded)
        assert "(30000 such names in all)" in text
        assert (
            "names 000001.safetensors, 000003.safetensors, 000005.safetensors and 29997 more, which are"
            in text
        )
        assert len(text) < 2000

    def test_all_of_it_at_once(self, sharded: Path) -> None:
        put_index(sharded, {"a": "../a.safetensors", "b": "b.safetensors", "c": TWO})
        put_weights(sharded, "model.safetensors", "a")
        assert len(index_refusal(sharded).splitlines()) == 4

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "is not JSON"),
            ("[]", "the index is not a JSON object"),
            ("{}", "weight_map is missing"),
            ('{"weight_map": {"a": 1}}', "is not a map from tensor names to file names"),
            ('{"weight_map": {}}', "weight_map names no tensor"),
            ('{"weight_map": {"a": "x", "a": "y"}}', "names 'a' twice"),
            ("[" * 100_000, "nested too deep"),
        ],
    )
    def test_other_contents(self, sharded: Path, text: str, message: str) -> None:
        (sharded / INDEX).write_text(text)
        found = index_refusal(sharded)
        assert message in found
        assert found.startswith(str(sharded / INDEX))


class TestAgainstHeaders:
    @pytest.mark.parametrize(
        ("weight_map", "words"),
        [
            (
                {"a": ONE, "b": ONE, "c": TWO, "d": TWO},
                [f"{INDEX} places 1 tensor (d) in {TWO}, which does not hold them"],
            ),
            ({"a": ONE, "c": TWO}, [f"{ONE} holds 1 tensor (b) that {INDEX} does not place there"]),
            ({"a": ONE, "b": TWO, "c": TWO}, [f"places 1 tensor (b) in {TWO}", f"{ONE} holds 1 tensor (b)"]),
        ],
        ids=["the file lacks it", "the index lacks it", "in the wrong file"],
    )
    def test_a_tensor_in_one_of_both(
        self, sharded: Path, weight_map: dict[str, str], words: list[str]
    ) -> None:
        put_index(sharded, weight_map)
        text, _ = check(sharded)
        assert text.startswith(f"{sharded}: ")
        assert all(each in text for each in words)

    def test_many_files_that_disagree_are_not_all_listed(self, tmp_path: Path) -> None:
        files = [f"x{number:02d}.safetensors" for number in range(20)]
        for file in files:
            put_weights(tmp_path, file, file)
        put_index(tmp_path, {f"ghost.{file}": file for file in files})
        text, _ = check(tmp_path)
        assert len(text.splitlines()) == 9
        assert f"there are 32 more such disagreements with {INDEX}." in text

    @pytest.mark.parametrize("with_index", [True, False])
    def test_a_tensor_in_two_files(self, sharded: Path, with_index: bool) -> None:
        put_weights(sharded, TWO, "a", "c")
        if not with_index:
            (sharded / INDEX).unlink()
        text, _ = check(sharded)
        assert f"holds 1 tensor (a) in more than one file (the first in {ONE} and {TWO})" in text

    @pytest.mark.parametrize("size", [47, 49, 24, 10**15, 47.0, 0])
    def test_a_wrong_total_is_a_note(self, sharded: Path, size: float) -> None:
        put_index(sharded, {"a": ONE, "b": ONE, "c": TWO}, total_size=size)
        text, notes = check(sharded)
        assert text == ""
        assert f"total_size as {int(size)}, the headers add up to 48 bytes" in notes[0]

    @pytest.mark.parametrize("size", [23, 1, -5])
    def test_a_total_below_half_is_another_model(self, sharded: Path, size: int) -> None:
        put_index(sharded, {"a": ONE, "b": ONE, "c": TWO}, total_size=size)
        text, notes = check(sharded)
        assert "the index is of another model" in text
        assert notes == []

    @pytest.mark.parametrize("size", ["48", True, 1.5, [48], {}, 1e308])
    def test_a_total_that_is_no_number_of_bytes(self, sharded: Path, size: object) -> None:
        put_index(sharded, {"a": ONE, "b": ONE, "c": TWO}, total_size=size)
        if size == 1e308:
            assert check(sharded)[0] == ""
            return
        index = find(sharded)
        assert index.total_size is None
        assert "not a size; ignored" in index.notes[0]


class TestNoWeights:
    def holding(self, root: Path, *names: str) -> str:
        for name in names:
            (root / name).write_bytes(b"")
        return index_refusal(root)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
    def test_pickles(self, tmp_path: Path, name: str) -> None:
        text = self.holding(tmp_path, name)
        assert f"has its weights in {name}, and pickled weights are refused (pickled_weights: refuse)" in text
        assert f"M.from_pretrained('{tmp_path}'" in text
        assert f"m.save_pretrained('{tmp_path}-safetensors')" in text

    def test_gguf(self, tmp_path: Path) -> None:
        assert "has its weights in x.Q4_K_M.gguf; GGUF is" in self.holding(tmp_path, "x.Q4_K_M.gguf")

    @pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
    def test_adapter(self, tmp_path: Path, weights: str) -> None:
        assert "is a LoRA adapter" in self.holding(tmp_path, "adapter_config.json", weights)

    def test_safetensors_under_other_names(self, tmp_path: Path) -> None:
        text = self.holding(tmp_path, "consolidated.safetensors", "foo.safetensors")
        assert "holds consolidated.safetensors, foo.safetensors, but neither model.safetensors" in text

    def test_weights_in_a_directory_below_do_not_count(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        put_weights(tmp_path / "a", "model.safetensors", "x")
        assert "holds no weights" in index_refusal(tmp_path)
