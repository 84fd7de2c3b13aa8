"""Small files that would become large or take for ever: refused, in bounded memory and time."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from kits.adapter_maker import lora_config, tiny_lora
from kits.checkpoint_maker import read_tensors, tiny_llama, write_json
from kits.fuzz_targets import plan_of
from kits.hostile import ends, refuses_or_takes
from kits.marks import slow_but
from kits.pickle_maker import PICKLE, pickled_twin, repacked
from kits.plan_maker import good

from raymerge.checkpoints import json_files
from raymerge.checkpoints.adapters import open_adapter
from raymerge.checkpoints.header import read_header
from raymerge.checkpoints.json_files import MAX_DEPTH, foreign_pattern, load_json
from raymerge.checkpoints.pickles import check_extent
from raymerge.checkpoints.source import open_checkpoint
from raymerge.errors import CheckpointError, PlanError, RecipeError
from raymerge.merge_plan.tables import load_plan, save_plan
from raymerge.recipes.load import parse_recipes
from raymerge.storage.local.store import LocalStore

MiB = 1 << 20


def _peak(action: Callable[[], object]) -> int:
    """Bytes that Python holds at most during an action."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model", 0, layers=1, hidden=8, vocab=8)


class TestHeaders:
    @pytest.mark.parametrize(
        "unit", slow_but([b"[],", b"{},", b"7,", b'"",', b'{"":[]},'], b"7,", b'{"":[]},')
    )
    def test_a_header_takes_at_most_forty_times_its_bytes(self, unit: bytes, tmp_path: Path) -> None:
        raw = b'{"a":[' + unit * (MiB // 4 // len(unit)) + b"0]}"
        data = len(raw).to_bytes(8, "little") + raw
        (tmp_path / "x").write_bytes(data)
        with LocalStore(tmp_path) as store:
            peak = _peak(lambda: refuses_or_takes(lambda: read_header(store, "x", len(data), "1")))
        assert peak < 40 * len(data)

    def test_nor_does_one_of_many_names(self, tmp_path: Path) -> None:
        raw = b"{" + b",".join(b'"%x":{"":0}' % number for number in range(MiB // 60)) + b"}"
        (tmp_path / "x").write_bytes(len(raw).to_bytes(8, "little") + raw)
        with LocalStore(tmp_path) as store:
            peak = _peak(lambda: refuses_or_takes(lambda: read_header(store, "x", len(raw) + 8, "1")))
        assert peak < 40 * len(raw)

    def test_lists_in_lists_are_refused_though_they_can_be_read(self, tmp_path: Path) -> None:
        """As deep as JSON may be here, the sentence about them would be too deep to be written."""
        for depth in (150, 300, 600, 900):
            raw = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
            (tmp_path / "x").write_bytes(len(raw).to_bytes(8, "little") + raw)
            with LocalStore(tmp_path) as store, pytest.raises(CheckpointError):
                read_header(store, "x", len(raw) + 8, "1")


class TestJson:
    @pytest.mark.parametrize("key", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
    def test_a_large_file_is_not_read(self, key: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with (model / key).open("ab") as file:
            file.truncate(json_files.MAX_NBYTES + 1)
        reads: list[int] = []
        read = LocalStore.read
        monkeypatch.setattr(LocalStore, "read", lambda *args: reads.append(args[3]) or read(*args))
        with pytest.raises(
            (CheckpointError, PlanError), match=r"has 134217729 bytes; a file of this kind has at most"
        ):
            plan_of({"merge_method": "passthrough", "models": [{"model": model}], "tokenizer_source": "base",
                     "base_model": model})  # fmt: skip
        assert max(reads, default=0) < MiB

    def test_depth_is_bounded(self) -> None:
        for depth in (MAX_DEPTH, MAX_DEPTH - 1):
            text = b"[" * depth + b"]" * depth
            if depth < MAX_DEPTH:
                load_json(text)
            else:
                with pytest.raises(RecursionError, match="nested deeper than 100 levels"):
                    load_json(b"[" + text + b"]")
        mixed: Any = 0
        for _ in range(MAX_DEPTH):
            mixed = {"a": [0, mixed]}
        with pytest.raises(RecursionError):
            load_json(json.dumps(mixed).encode())

    @pytest.mark.parametrize(
        "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    )
    def test_what_is_nested_deeper_is_refused_and_no_accident(self, file: str, model: Path) -> None:
        value = json.loads((model / file).read_text())
        deep: Any = []
        for _ in range(250):
            deep = {"a": [deep]}
        write_json(model / file, {**value, "more": deep})
        recipe = {"merge_method": "passthrough", "base_model": model, "models": [{"model": model}],
                  "tokenizer_source": "base"}  # fmt: skip
        refuses_or_takes(lambda: plan_of(recipe))

    def test_no_bomb_of_yaml(self) -> None:
        laughs = "a0: &a0 [x]\n" + "".join(
            f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
        )
        with pytest.raises(RecipeError):
            parse_recipes(laughs)
        assert _peak(lambda: refuses_or_takes(lambda: parse_recipes(laughs))) < 64 * MiB


EVIL = (
    *("(?:.|.)*[0-4][0-4][0-4]", r"(?:(.|.)(.|.))*[A-Z]", r"(?:a|a|[^a]|.)*(?<=[A-Z])"),
    *("(.*)*=", "((.+)+)+="),
)


class TestPatterns:
    """Patterns that do not match a path of thirty letters within the age of the universe."""

    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(json_files, "_MOST_SECONDS", 0.1)
        with ends():
            yield

    @pytest.mark.parametrize("pattern", EVIL)
    def test_matching_ends(self, pattern: str) -> None:
        found = foreign_pattern(pattern)
        refuses_or_takes(lambda: found.matches("model.layers.10.self_attn.q_proj." * 3))

    def test_what_was_given_up_is_an_error_with_the_pattern(self) -> None:
        with pytest.raises(
            CheckpointError, match=r"^model\.a.*: this pattern of its config is still not matched"
        ):
            foreign_pattern(EVIL[0]).matches("model." + "a" * 60)

    def test_of_an_adapter(self, model: Path, tmp_path: Path) -> None:
        lora = tiny_lora(tmp_path / "lora", read_tensors(model), 1)
        write_json(lora / "adapter_config.json", lora_config(rank_pattern={EVIL[0]: 4}))
        with pytest.raises(CheckpointError, match="not matched"):
            open_adapter(lora, "lora")

    def test_of_a_quantisation(self, model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        table = {"quant_method": "fp8", "modules_to_not_convert": [EVIL[0]]}
        write_json(model / "config.json", {**config, "quantization_config": table})
        refuses_or_takes(lambda: plan_of({"merge_method": "passthrough", "models": [{"model": model}]}))


def _doubled(levels: int) -> bytes:
    """A map whose key is a tuple that holds another one twice, and so on."""
    steps = b"".join(b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(levels))
    return b"\x80\x02})q\x00" + steps + b"K\x01s."


def _deep(levels: int) -> bytes:
    """A map whose key is a tuple in a tuple in a tuple."""
    return b"\x80\x02})" + b"\x85" * levels + b"K\x01s."


PICKLES = {
    "doubled": _doubled(60),
    "deep": _deep(2_000_000),
    "deep-list": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "marks": b"\x80\x02" + b"(" * 50_000 + b"t" * 50_000 + b".",
    "nothing": b"\x80\x02.",
    "a mark": b"\x80\x02(.",
    "empty": b"",
    "endless": b"\x80\x02}" + b"h\x00" * 10,
}


class TestPickles:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize("kind", PICKLES)
    def test_a_description_larger_than_its_file_is_refused(
        self, kind: str, model: Path, tmp_path: Path
    ) -> None:
        """torch takes hours for the first, and ends the process with a segmentation fault for the second."""
        twin = pickled_twin(model, tmp_path / "twin")
        whole = tmp_path / "whole.bin"
        (twin / PICKLE).rename(whole)
        repacked(whole, twin / PICKLE, change={"data.pkl": PICKLES[kind]})
        recipe = {"merge_method": "passthrough", "models": [{"model": twin}], "pickled_weights": "read"}
        with pytest.raises(PlanError):
            refuses_or_takes(lambda: plan_of(recipe)) or plan_of(recipe)

    def test_many_tensors_are_not(self) -> None:
        """Items are added to a map by the thousand; that makes it no deeper."""
        item = b"X\x01\x00\x00\x00a)"
        check_extent(b"\x80\x02}" + (b"(" + item * 10 + b"u") * 201 + b".")


class TestPlans:
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def saved(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        root = tmp_path_factory.mktemp("plan")
        model = tiny_llama(root / "model", 0, layers=1, hidden=8, vocab=8)
        save_plan(good({"merge_method": "passthrough", "models": [{"model": model}]}).plan, root / "plan")
        return root / "plan"

    @pytest.mark.parametrize("codec", ["zstd", "lz4"])
    def test_compressed_tables_are_refused_before_they_are_unpacked(
        self, codec: str, saved: Path, tmp_path: Path
    ) -> None:
        for path in saved.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        with pyarrow.ipc.open_file(saved / "runs.arrow") as reader:
            schema = reader.read_all().schema
        zeros = pa.table([pa.array([0] * 1_000_000, type=field.type) for field in schema], schema=schema)
        options = pyarrow.ipc.IpcWriteOptions(compression=codec)
        with pyarrow.ipc.new_file(tmp_path / "runs.arrow", schema, options=options) as writer:
            writer.write_table(zeros)
        assert (tmp_path / "runs.arrow").stat().st_size < MiB
        before = pa.total_allocated_bytes()
        pool = pa.default_memory_pool()
        most = pool.max_memory()
        with pytest.raises(PlanError, match="was not saved by raymerge"):
            load_plan(tmp_path)
        assert pool.max_memory() in (most, before) or pool.max_memory() - before < MiB

    def test_a_table_too_large_is_not_read(self, saved: Path, tmp_path: Path) -> None:
        for path in saved.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        with (tmp_path / "inputs.arrow").open("ab") as file:
            file.truncate(3 << 30)
        with pytest.raises(PlanError, match="more than a plan needs"):
            load_plan(tmp_path)


_LIMITED = """
import resource, sys
from raymerge.checkpoints.source import open_checkpoint
from raymerge.errors import RaymergeError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
for root in sys.argv[1:]:
    try:
        open_checkpoint(root, root)
        print("taken")
    except RaymergeError as error:
        print("refused")
"""


def test_files_that_announce_terabytes_cost_a_process_no_memory(model: Path, tmp_path: Path) -> None:
    """Of a file of 8 TB that is one hole, or that says of its header that it had 100 MB, 8 bytes are read."""
    roots = []
    cases = ("long", 100_000_001, 1 << 43), ("lie", (1 << 63) - 1, 4096), ("cut", 90_000_000, 64)
    for name, start, nbytes in cases:
        root = tiny_llama(tmp_path / name, 0, layers=1, hidden=8, vocab=8)
        with (root / "model.safetensors").open("r+b") as file:
            file.write(start.to_bytes(8, "little"))
            file.truncate(nbytes)
        roots.append(str(root))
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, *roots, str(model)],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["refused"] * 3 + ["taken"], done.stderr


def test_of_an_unreadable_directory_only_names_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / ("x" * 5000), "x")
