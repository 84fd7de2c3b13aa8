"""What fuzzing has found, each as the smallest input that showed it: once it ended as a bug of raymerge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import tiny_llama, write_json
from kits.fuzz_targets import Target, make_targets
from kits.hostile import refuses_or_takes
from kits.merge_cases import digests, make_family, merge, recipes

from raymerge.execute.receipts import Receipt
from raymerge.planner.tokenizer.vocabulary import convert_slow_tokenizer
from raymerge.publish.record import Ledger
from raymerge.runtime.driver import run as run_module

DEEP = "[" * 900 + "]" * 900

Values = Mapping[str, Any]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    names = ("adapter", "tokenizer", "tokenizer config", "signed manifest")
    return make_targets(tmp_path_factory.mktemp("found"), names)


def _read(target: Target, value: Any) -> bool:
    return refuses_or_takes(lambda: target.read(json.dumps(value).encode()))


@pytest.mark.parametrize("key", ["lora_alpha", "r"])
def test_a_number_of_an_adapter_that_is_too_large_for_a_float(targets: dict[str, Target], key: str) -> None:
    assert not _read(targets["adapter"], {**targets["adapter"].value, key: 10**400})


@pytest.mark.parametrize("found", [5, "<more>", True, 0.5])
def test_extra_tokens_that_are_no_list(targets: dict[str, Target], found: Any) -> None:
    target = targets["tokenizer config"]
    assert _read(target, {**target.value, "additional_special_tokens": found})


def test_an_id_of_thousands_of_digits(targets: dict[str, Target]) -> None:
    target = targets["tokenizer config"]
    decoder = {"9" * 5000: {"content": "<long>"}}
    assert not _read(target, {**target.value, "added_tokens_decoder": decoder})


@pytest.mark.parametrize(
    "change",
    [
        *({"merges": merges} for merges in (5, [7], [["a"]], [["a", 1]], ["ab"], {"a": "b"}, [None])),
        *({"unk_token": unknown} for unknown in ([], 5)),
        *({"continuing_subword_prefix": 5}, {"unk_id": "x"}),
    ],
    ids=str,
)
def test_a_tokenizer_s_model_with_fields_of_other_kinds(targets: dict[str, Target], change: Values) -> None:
    target = targets["tokenizer"]
    # An added token in the place of one of the model's makes that the model is cut.
    model = {**target.value["model"], "vocab": {**target.value["model"]["vocab"], "far": 90}, **change}
    assert not _read(target, {**target.value, "model": model})


@pytest.mark.parametrize(
    "change",
    [
        {"tie": {"head": [1], "embedding": "x", "tied": None}},
        {"tie": {"head": "x", "embedding": "y", "tied": "perhaps"}},
        {"expressions": [{"method": {}, "has_base": False, "settings": "{}", "cast": "F32", "encode": None}]},
        {
            "expressions": [
                {"method": "copy", "has_base": False, "settings": 5, "cast": "F32", "encode": None}
            ]
        },
        {"recipe": []},
        {"sources": {}},
    ],
    ids=str,
)
def test_a_plan_whose_digest_fits_and_whose_values_are_of_other_kinds(
    targets: dict[str, Target], change: Values
) -> None:
    target = targets["signed manifest"]
    assert not _read(target, {**target.value, **change})


RECEIPT = Receipt(0, 1, 1, 0.5, "w", {"0": "0" * 32}).to_json()
LINES = (
    *({**RECEIPT, "encoding_errors": errors} for errors in ({"0": ["x"]}, {"0": 5}, None, {"x": [1.0, 2.0]})),
    *({**RECEIPT, "segment": segment} for segment in ("0", 1.5, None, True, [0])),
    *({**RECEIPT, "digests": digests} for digests in (None, [], {"x": "y"}, {"9" * 5000: "y"})),
    *({**RECEIPT, "note": 5}, {**RECEIPT, "seconds": "long"}, {**RECEIPT, "more": 1}, [], 5, None, "x"),
)


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_receipts_that_are_none_are_left_out(line: Any, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", {})
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write(json.dumps({"receipt": line}) + "\n" + json.dumps({"receipt": RECEIPT}) + "\n")
    assert ledger.receipts() == {0: Receipt.from_json(RECEIPT)}


def test_lines_of_a_ledger_in_which_lists_lie_in_lists(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text(f"{DEEP * 10}\n" + "[" * 100_000 + "\n")
    assert Ledger.conditions(tmp_path / "ledger.jsonl") is None
    assert Ledger(tmp_path / "ledger.jsonl", {}).receipts() == {}


@pytest.mark.parametrize("versions", [5, "x", {"a": 1}])
def test_conditions_whose_versions_are_no_list(versions: Any, tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text(json.dumps({"conditions": {"versions": versions}}) + "\n")
    assert Ledger.conditions(tmp_path / "ledger.jsonl") is None


def test_a_receipt_of_a_segment_that_the_plan_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipes(make_family(tmp_path / "models", layers=1))["linear"]
    merge(recipe, tmp_path / "sound")
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "finish_config", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            merge(recipe, tmp_path / "out")
    (ledger,) = tmp_path.glob(".out.raymerge-*/raymerge/ledger.jsonl")
    for number in (10**6, -1):
        with ledger.open("a") as file:
            file.write(json.dumps({"receipt": {**RECEIPT, "segment": number}}) + "\n")
    merge(recipe, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "sound")


def test_nobody_is_asked_whether_to_run_a_tokenizer_s_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks at the terminal unless it is told; a yes would run it."""
    root = tiny_llama(tmp_path / "model", 0, layers=1)
    (root / "tokenizer.json").unlink()
    (root / "tokenization_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    write_json(root / "tokenizer_config.json", {
        "tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]},
    })  # fmt: skip
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(Exception, match="transformers cannot make one"):
        convert_slow_tokenizer(root)
    assert not (tmp_path / "ran").exists()
