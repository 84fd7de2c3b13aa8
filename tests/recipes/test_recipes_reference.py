"""References to models: the grammar, paths that look like it, maps, faults, writing back."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.documents.fields import Fault, FaultError
from raymerge.recipes.entry import ModelReference, parse_reference, plain_reference, read_reference

PIECES = st.text("abc/.-_+@ ", min_size=1, max_size=8).filter(lambda text: bool(text.strip()))
OPTIONAL = st.none() | PIECES


def faults_in(value: object) -> list[Fault]:
    with pytest.raises(FaultError) as caught:
        read_reference(value)
    return list(caught.value.faults)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("models/base", ModelReference("models/base")),
        ("org/name@main", ModelReference("org/name", "main")),
        ("base+lora", ModelReference("base", None, "lora")),
        ("base@v1+lora@v2", ModelReference("base", "v1", "lora", "v2")),
        ("base+lora@v2", ModelReference("base", None, "lora", "v2")),
        ("/data/my model", ModelReference("/data/my model")),
    ],
)
def test_the_grammar(text: str, reference: ModelReference) -> None:
    assert parse_reference(text) == reference
    assert str(reference) == text


@pytest.mark.parametrize("path", ["models/a+b", "me@work/model", "a+b+c", "a@b@c", "v1+v2@x"])
def test_a_directory_of_exactly_that_name_is_taken_as_it_stands(path: str) -> None:
    assert parse_reference(path, exists=lambda text: text == path) == ModelReference(path)


def test_the_disk_is_asked_only_about_texts_that_could_mean_two_things() -> None:
    asked: list[str] = []

    def exists(path: str) -> bool:
        asked.append(path)
        return False

    parse_reference("models/base", exists=exists)
    assert asked == []
    parse_reference("models/base+lora", exists=exists)
    assert asked == ["models/base+lora"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a+b+c", "more than one adapter"),
        ("a@b@c", "two revisions"),
        ("", "empty"),
        ("a+", "empty"),
        ("@main", "empty"),
        ("a@+b", "empty"),
    ],
)
def test_what_the_grammar_does_not_allow(text: str, words: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_reference(text)
    (fault,) = caught.value.faults
    assert words in fault.what
    assert f"'{text}'" in fault.what
    assert "path: PATH" in fault.remedy


@pytest.mark.parametrize(
    ("value", "reference"),
    [
        ({"model": "base"}, ModelReference("base")),
        ({"model": {"path": "a+b@c"}}, ModelReference("a+b@c")),
        (
            {"model": {"path": "base", "revision": "v1"}, "lora": "l@v2"},
            ModelReference("base", "v1", "l", "v2"),
        ),
        ({"model": "base", "lora": {"path": "l+m"}}, ModelReference("base", None, "l+m")),
        (
            {"model": "base", "override_architecture": "LlamaForCausalLM"},
            ModelReference("base", override_architecture="LlamaForCausalLM"),
        ),
    ],
)
def test_maps(value: object, reference: ModelReference) -> None:
    assert read_reference(value) == reference
    assert read_reference(reference) is reference


def test_a_text_within_a_map_may_be_a_directory_with_an_at_sign() -> None:
    value = {"model": "me@work/model"}
    assert read_reference(value, exists=lambda _: True) == ModelReference("me@work/model")
    assert read_reference(value) == ModelReference("me", "work/model")


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        (5, (), "5 is a number"),
        ({}, (), "names no model"),
        ({"model": 3}, ("model",), "3 is a number"),
        ({"model": {"revision": "x"}}, ("model",), "has no path"),
        ({"model": {"path": "a", "revison": "x"}}, ("model", "revison"), "unknown key 'revison'"),
        ({"model": "a", "override_architecture": 1}, ("override_architecture",), "1 is a number"),
        ("a\0b", (), "U+0000"),
    ],
)
def test_a_fault_has_its_place_within_the_reference(
    value: object, path: tuple[object, ...], words: str
) -> None:
    faults = faults_in(value)
    assert [fault.path for fault in faults if words in fault.what] == [path]
    assert all(fault.remedy for fault in faults)


@pytest.mark.parametrize("value", [{"path": "a", "revision": "main"}, {"model": "a", "revision": "main"}])
def test_path_and_revision_a_level_too_high_get_the_form_that_works(value: dict[str, str]) -> None:
    (fault,) = faults_in(value)
    written = yaml.safe_load(fault.remedy.removeprefix("Write ").removesuffix("."))
    assert read_reference(written) == ModelReference("a", "main")


@settings(deadline=None, max_examples=200)
@given(PIECES, OPTIONAL, OPTIONAL, OPTIONAL, st.none() | st.just("LlamaForCausalLM"))
def test_any_reference_survives_being_written_and_read(
    path: str, revision: str | None, lora: str | None, lora_revision: str | None, architecture: str | None
) -> None:
    reference = ModelReference(path, revision, lora, lora_revision if lora else None, architecture)
    assert read_reference(plain_reference(reference)) == reference
