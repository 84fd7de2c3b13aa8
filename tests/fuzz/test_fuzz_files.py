"""Files that somebody else wrote, changed at random: a plan comes out, or an error of ours, and soon."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.fuzz_targets import TARGETS, Target, make_targets
from kits.hostile import bounded, changed_bytes, changed_values, refuses_or_takes
from kits.marks import slow_but

JSON = (
    *("index", "config", "quantisation", "adapter", "tokenizer", "tokenizer config", "signed manifest"),
    "sweep",
    "search",
)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return make_targets(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", TARGETS)
def test_sound_files_are_taken(targets: dict[str, Target], name: str) -> None:
    assert refuses_or_takes(lambda: targets[name].read(targets[name].sample))


@pytest.mark.sample(6)
@pytest.mark.parametrize("examples", slow_but([5, 30], 5))
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_bytes(targets: dict[str, Target], name: str, examples: int) -> None:
    target = targets[name]

    @bounded(examples)
    @given(changed_bytes(target.sample))
    def check(data: bytes) -> None:
        refuses_or_takes(lambda: target.read(data))

    check()


@pytest.mark.sample(4)
@pytest.mark.parametrize("examples", slow_but([5, 30], 5))
@pytest.mark.parametrize("name", JSON)
def test_other_values(targets: dict[str, Target], name: str, examples: int) -> None:
    target = targets[name]

    @bounded(examples)
    @given(changed_values(target.value), st.booleans())
    def check(value: object, is_ascii: bool) -> None:
        text = json.dumps(value, ensure_ascii=is_ascii)
        refuses_or_takes(lambda: target.read(text.encode("utf-8", "surrogatepass")))

    check()
