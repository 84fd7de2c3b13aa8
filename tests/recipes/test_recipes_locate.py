"""YAML with places: positions, aliases and their bounds, and texts that are no recipe."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.documents.fields import Fault
from raymerge.documents.positions import (
    MAX_DOCUMENTS,
    MAX_NODES,
    Located,
    Part,
    read_document,
    split_documents,
)
from raymerge.errors import RecipeError
from raymerge.recipes.entry import RECIPE

TEXT = """\
# a comment
merge_method: linear
models:
  - model: a
    parameters: {weight: 0.5}
  - model: b
    parameters:
      weight:
        - filter: mlp
          value: [1, 2]
"""


def read(text: str) -> Located:
    (part,) = split_documents(text, "r.yml", RECIPE)
    return read_document(part, "r.yml", RECIPE)


def texts(text: str) -> list[str]:
    parts: tuple[Part, ...] = split_documents(text, "r.yml", RECIPE)
    assert "".join(part.text for part in parts) == text
    return [part.text for part in parts]


def refusal(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read(text)
    (problem,) = caught.value.problems
    assert problem.what.endswith(".")
    assert problem.remedy.endswith((".", '".'))
    return str(problem)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ((), "r.yml:1:1"),
        (("merge_method",), "r.yml:2:1"),
        (("models",), "r.yml:3:1"),
        (("models", 0), "r.yml:4:5"),
        (("models", 0, "parameters"), "r.yml:5:5"),
        (("models", 0, "parameters", "weight"), "r.yml:5:18"),
        (("models", 1), "r.yml:6:5"),
        (("models", 1, "parameters", "weight", 0, "value", 1), "r.yml:10:22"),
    ],
)
def test_every_key_and_item_has_its_place(path: tuple[str | int, ...], place: str) -> None:
    assert read(TEXT).places.at(path) == place


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (("models", 0, "parameters", "density"), "r.yml:5:5"),
        (("models", 7, "model"), "r.yml:3:1"),
        (("base_model",), "r.yml:1:1"),
    ],
)
def test_what_is_not_there_has_the_place_of_its_nearest_parent(
    path: tuple[str | int, ...], place: str
) -> None:
    assert read(TEXT).places.at(path) == place


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: 1\n", ["a: 1\n"]),
        ("# x\n\na: 1\n---\nb: 2\n", ["# x\n\na: 1\n", "---\nb: 2\n"]),
        ("--- {a: 1}\n--- {b: 2}", ["--- {a: 1}\n", "--- {b: 2}"]),
        ("a: 1\r\n---\r\nb: 2\r\n", ["a: 1\r\n", "---\r\nb: 2\r\n"]),
        ("a: 1\n...\n# y\n---\nb: 2\n", ["a: 1\n...\n# y\n", "---\nb: 2\n"]),
        (
            "%YAML 1.1\n---\na: 1\n...\n%YAML 1.1\n---\nb: 2\n",
            ["%YAML 1.1\n---\na: 1\n...\n", "%YAML 1.1\n---\nb: 2\n"],
        ),
        ("a: |\n  x\n  ---\n  y\n", ["a: |\n  x\n  ---\n  y\n"]),
        ("é: 1\n---\nü: 2\n", ["é: 1\n", "---\nü: 2\n"]),
        ("---\n---\na: 1\n---\n# nothing\n", ["---\n---\na: 1\n---\n# nothing\n"]),
        ("a: 1\n---\n---\nb: 2\n---\n", ["a: 1\n---\n", "---\nb: 2\n---\n"]),
    ],
)
def test_documents_have_their_own_part_of_the_text_and_empty_ones_none(text: str, parts: list[str]) -> None:
    assert texts(text) == parts


def test_places_in_later_documents_are_lines_of_the_file() -> None:
    first, second = split_documents("a: 1\n\n---\n# x\nb:\n  - c: 2\n", "r.yml", RECIPE)
    assert read_document(first, "r.yml", RECIPE).places.at(()) == "r.yml:1:1"
    places = read_document(second, "r.yml", RECIPE).places
    assert places.at(()) == "r.yml:3:1"
    assert places.at(("b", 0, "c")) == "r.yml:6:5"
    assert places.at(("z",)) == "r.yml:3:1"


def test_a_file_has_a_bounded_number_of_documents() -> None:
    assert len(split_documents("--- {a: 1}\n" * MAX_DOCUMENTS, "r.yml", RECIPE)) == MAX_DOCUMENTS
    assert f"r.yml:{MAX_DOCUMENTS + 1}:1: the file has more than {MAX_DOCUMENTS} YAML documents." in refusal(
        "---\n" * 100_000
    )


def test_problems_come_in_the_order_of_the_text() -> None:
    faults = [Fault(("models", 1), "late.", ""), Fault(("merge_method",), "early.", "Mend it.")]
    assert [str(problem) for problem in read(TEXT).places.problems(faults)] == [
        "r.yml:2:1: merge_method: early. Mend it.",
        "r.yml:6:5: late.",
    ]


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1000, 1000)
    | st.floats(-1e3, 1e3)
    | st.text("ab:#-[]{}*& '\"\n"),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.text("abcxyz", min_size=1), PLAIN, min_size=1, max_size=4))
def test_data_is_what_a_safe_yaml_reader_gives(data: dict[str, object]) -> None:
    document = read(yaml.safe_dump(data))
    assert document.data == data
    assert document.faults == ()


def test_dates_stay_texts() -> None:
    assert read("a: 2024-01-31\n").data == {"a": "2024-01-31"}


def test_anchors_and_merge_keys() -> None:
    text = "x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: {<<: [{a: 5}, *x]}\nw: *x\n"
    document = read(text)
    assert document.data["y"] == {"a": 1, "b": 3}
    assert document.data["z"] == {"a": 5, "b": 2}
    assert document.data["w"] == {"a": 1, "b": 2}
    assert document.places.at(("y", "a")) == "r.yml:1:8"
    assert document.places.at(("y", "b")) == "r.yml:2:13"


def test_a_merge_key_takes_maps_only() -> None:
    (fault,) = read("a: {<<: 3, b: 1}\n").faults
    assert fault.path == ("a",)
    assert "'<<' takes a map" in fault.what


def test_repeated_keys_name_the_first_line() -> None:
    document = read("a: 1\nb: {c: 1, c: 2}\na: 3\na: 4\n")
    assert document.data == {"a": 1, "b": {"c": 1}}
    assert [str(problem) for problem in document.places.problems(list(document.faults))] == [
        "r.yml:2:11: the key 'c' was given before, on line 2. Remove one of the two.",
        "r.yml:3:1: the key 'a' was given before, on line 1. Remove one of the two.",
        "r.yml:4:1: the key 'a' was given before, on line 1. Remove one of the two.",
    ]


def test_a_number_is_a_key_as_it_is_spelled_and_a_text() -> None:
    located = read("0: a\nb: {12: [c], x: d}\n")
    assert located.data == {"0": "a", "b": {"12": ["c"], "x": "d"}}
    assert located.places.at(("b", "12", 0)) == "r.yml:2:10"
    assert refusal_of_keys("1: a\n'1': b\n") == ["the key '1' was given before, on line 1."]


def refusal_of_keys(text: str) -> list[str]:
    return [fault.what for fault in read(text).faults]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("1_0: a\n", "r.yml:1:1: the key '1_0' is not a text."),
        ("a: {[1, 2]: a}\n", "r.yml:1:5: the key a list or map is not a text."),
        ("a: !x 3\n", "r.yml:1:1: a: the tag !x has no meaning"),
        ("a: !!python/name:os.system ''\n", "python/name:os.system has no meaning"),
        ("a: " + "9" * 5000 + "\n", "cannot be read"),
        ("a: !!int x\n", "r.yml:1:1: a: 'x' cannot be read"),
    ],
)
def test_yaml_that_no_recipe_needs(text: str, what: str) -> None:
    document = read(text)
    (problem,) = document.places.problems(list(document.faults))
    assert what in str(problem)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "r.yml:1:1: the recipe is empty."),
        ("- a\n", "r.yml:1:1: a recipe is a map of keys to values."),
        ("a: 1\n--- b: 2\n", "r.yml:2:6: this is not YAML"),
        ("a: 1\n\tb: 2\n", "r.yml:2:1: a tab stands here. Indent with spaces"),
        ("a: 'x\n", "this is not YAML"),
        ("a: *x\n", "r.yml:1:4: this is not YAML: found undefined alias 'x'."),
        ("filter: *\n", "r.yml:1:10: '*' starts an alias here. Put it in quotes"),
        ("a: 1\nb: \x07\n", "r.yml:2:4: the character U+0007 may not stand in YAML."),
    ],
)
def test_texts_that_are_no_recipe(text: str, what: str) -> None:
    assert what in refusal(text)


def test_a_list_that_holds_itself() -> None:
    assert "nested more than 64 levels" in refusal("a: &a [*a]\n")
    assert "nested more than 64 levels" in refusal("a: &a\n  <<: *a\n")
    assert "nested more than 64 levels" in refusal("a: &a {b: &b {c: *a}}\n")


def test_many_brackets_do_not_exhaust_the_stack() -> None:
    assert "levels inside one another" in refusal("[" * 100_000)
    assert "nested more than 64 levels" in refusal("a: " + "[" * 70 + "]" * 70)


def test_aliases_cannot_blow_up() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert f"more than {MAX_NODES} values" in refusal("\n".join(lines))


def test_merge_keys_cannot_blow_up() -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 9)]
    assert f"more than {MAX_NODES} values" in refusal("\n".join(lines))


def test_a_long_recipe_within_the_bound_is_read() -> None:
    text = "a: [" + ", ".join(["1"] * (MAX_NODES - 10)) + "]"
    assert len(read(text).data["a"]) == MAX_NODES - 10  # type: ignore[arg-type]
