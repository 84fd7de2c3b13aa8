"""Every observed result of mergekit's methods, reproduced or knowingly not."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.golden_cases import MERGEKIT_METHODS, GoldenCase, golden_cases

from raymerge.methods import methods

# Known without the fixture: parameters are collected before fixtures exist.
CASES = golden_cases(Path(__file__).resolve().parents[2] / "shared" / "reference" / "golden.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_agrees_unless_it_is_known_to_differ(case: GoldenCase) -> None:
    """A case that is known to differ must differ indeed: otherwise its entry is out of date."""
    judged = case.judged()
    assert judged.verdict == ("DIFFERS" if case.difference else "PASS"), judged.line()


@pytest.mark.usefixtures("shared_root")
def test_every_method_is_observed_in_both_dtypes() -> None:
    known = set(MERGEKIT_METHODS) & set(methods())
    assert {(case.method, case.dtype) for case in CASES} == {
        (name, dtype) for name in known for dtype in ("float32", "bfloat16")
    }


def test_every_method_of_mergekit_is_registered() -> None:
    assert len(MERGEKIT_METHODS) == 20
    assert sorted(set(MERGEKIT_METHODS) - set(methods())) == []
