"""Headers of safetensors files: good ones read exactly, broken and hostile ones refused with the numbers."""

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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from raymerge.checkpoints.header import FileHeader, read_header
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


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
