"""Guesses at misspelled words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.documents.fields import closest, did_you_mean

KEYS = ("merge_method", "models", "slices", "modules", "dtype", "out_dtype", "density", "weight")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dtpye", "dtype"),
        ("densty", "density"),
        ("Merge-Method", "merge_method"),
        ("--out-dtype", "out_dtype"),
        ("wieght", "weight"),
        ("WEIGHT", "weight"),
    ],
)
def test_a_misspelled_word_is_recognised(word: str, meant: str) -> None:
    assert closest(word, KEYS) == meant
    assert did_you_mean(word, KEYS) == f"Did you mean '{meant}'?"


@pytest.mark.parametrize("word", ["", "zzz", "t", "chat"])
def test_a_word_like_no_other_gets_no_guess(word: str) -> None:
    assert closest(word, KEYS) is None
    assert did_you_mean(word, KEYS) == ""


def test_nothing_is_close_when_there_are_no_choices() -> None:
    assert did_you_mean("weight", ()) == ""


def test_choices_may_be_any_iterable() -> None:
    assert did_you_mean("tiess", iter(["linear", "ties"])) == "Did you mean 'ties'?"


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(KEYS), st.data())
def test_one_letter_too_many_is_forgiven(key: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(key)))
    assert closest(f"{key[:cut]}x{key[cut:]}", [key]) == key
