"""Texts of every kind of document are read and refused in its own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymerge.documents.fields import DocumentKind
from raymerge.documents.positions import (
    MAX_TEXT_BYTES,
    check_text,
    read_document,
    read_file,
    secrets_in,
    split_documents,
)
from raymerge.errors import PlanError

LETTER = DocumentKind(
    noun="letter", opening="dear: ...", error=PlanError, about_secrets="Letters are read by all."
)


def test_a_file_is_read_whatever_its_mark(tmp_path: Path) -> None:
    path = tmp_path / "l.yml"
    path.write_bytes(b"\xef\xbb\xbfdear: you\n")
    assert read_file(str(path), LETTER) == "dear: you\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a" * (MAX_TEXT_BYTES + 1), "the letter has more than"),
        (b"a\n\xff", ":2:1: the byte 0xff is not UTF-8. Save the letter as UTF-8."),
    ],
)
def test_a_file_that_is_no_such_text_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "l.yml"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        read_file(str(path), LETTER)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "l:1:1: the letter is empty. Start with 'dear: ...'."),
        ("- a", "l:1:1: a letter is a map of keys to values. Start with 'dear: ...'."),
    ],
)
def test_what_is_no_map_is_refused_in_words_of_its_kind(text: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_document(split_documents(text, "l", LETTER)[0], "l", LETTER)
    assert said in str(caught.value)


def test_secrets_are_found_in_text_and_values_and_not_repeated() -> None:
    secret = "hf_" + "a" * 34
    with pytest.raises(PlanError) as caught:
        check_text(f"dear: you\n# {secret}\n", "l", LETTER)
    assert str(caught.value) == "l:2:3: a token of the Hugging Face Hub stands here. Letters are read by all."
    (fault,) = secrets_in({"a": ["b", secret]}, LETTER)
    assert (fault.path, fault.remedy) == (("a", 1), "Letters are read by all.")
    assert secret not in fault.what
