"""The model card: front matter that parses, fences that hold, and no path of somebody's machine."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raymerge.publish.finish import Parent, model_card, shown_name, without_places

RECIPE = "merge_method: ties\nmodels:\n  - model: org/code\n  - model: org/french\nbase_model: org/base\n"
PARENTS = (Parent("org/base"), Parent("org/code", "abc123"), Parent("org/french"))


def card(recipe: str = RECIPE, parents: tuple[Parent, ...] = PARENTS, **changes: Any) -> str:
    manifest: dict[str, Any] = {
        "method": "ties",
        "recipe": {"base_model": changes.pop("base", "org/base")},
        "recipe_text": recipe,
        "seed": 7,
        "raymerge": "0.1.0",
        "config": {"model_type": "llama"},
    }
    return model_card(manifest | changes, "d1g35t", parents)


def front_matter(text: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n", text, flags=re.DOTALL)
    assert match is not None
    parsed: dict[str, Any] = yaml.safe_load(match[1])
    return parsed


def fenced(text: str) -> str:
    """The recipe as a Markdown reader finds it: up to the first line that closes the opening fence."""
    lines = text.split("\n")
    start = next(index for index, line in enumerate(lines) if re.match(r"`{3,}yaml$", line))
    fence = lines[start].removesuffix("yaml")
    closing = re.compile(rf" {{0,3}}`{{{len(fence)},}} *$")
    end = next(index for index in range(start + 1, len(lines)) if closing.match(lines[index]))
    return "\n".join(lines[start + 1 : end])


def test_what_a_card_says() -> None:
    text = card()
    assert front_matter(text) == {
        "base_model": ["org/base", "org/code", "org/french"],
        "library_name": "transformers",
        "tags": ["merge", "raymerge"],
    }
    assert "with the method `ties` on the base `org/base`." in text
    assert "- `org/code`, revision `abc123`\n" in text
    assert "- `org/french`\n" in text
    assert "Plan digest: `d1g35t`. Seed: 7." in text
    assert "raymerge 0.1.0" in text
    assert text.endswith("\n")
    assert fenced(text) == RECIPE.rstrip()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("org/model", "org/model"),
        ("../models/base", "../models/base"),
        ("/data/alice/models/base", "models/base"),
        ("/base", "base"),
        ("C:\\data\\models\\base", "models/base"),
        ("\\\\server\\share\\models\\base", "models/base"),
    ],
)
def test_absolute_paths_lose_their_beginning(name: str, shown: str) -> None:
    assert shown_name(name) == shown


def test_local_parents_are_listed_but_no_hub_models() -> None:
    text = card(
        recipe="merge_method: linear", parents=(Parent("/data/alice/models/base"),), base="/data/alice/m/b"
    )
    assert "base_model" not in front_matter(text)
    assert "- `models/base`\n" in text
    assert "alice" not in text
    assert "on the base `m/b`." in text


@example(recipe="chat_template: |\n  ```yaml\n  ``````\n")
@given(recipe=st.text(alphabet="`ab: \n~#-", max_size=60))
@settings(deadline=None, max_examples=80)
def test_fences_survive_any_recipe(recipe: str) -> None:
    assert fenced(card(recipe=recipe)) == recipe.rstrip()


@pytest.mark.parametrize("name", ["a`b", "a``b", "a\nb", "---\nlicense: mit", "`"])
def test_names_cannot_break_out(name: str) -> None:
    text = card(parents=(Parent(name, revision=name),))
    assert set(front_matter(text)) == {"library_name", "tags"}
    listed = text.split("## Parents\n\n")[1].split("\n\n## Recipe")[0]
    assert "\n" not in listed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model: /data/alice/models/base", "model: models/base"),
        ("{model: /data/alice/a/b+/data/alice/c/lora@main}", "{model: a/b+c/lora@main}"),
        ("- file:///data/alice/models/base", "- models/base"),
        ("prompts: C:\\\\data\\\\prompts.txt".replace("\\\\", "\\"), "prompts: data/prompts.txt"),
        ("# see /data/alice/notes.txt, and more", "# see alice/notes.txt, and more"),
        # What is no place of a machine stays.
        ("model: org/name", "model: org/name"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("chat_template: <s>{{ x }}</s>", "chat_template: <s>{{ x }}</s>"),
    ],
)
def test_a_recipes_text_is_shown_without_places(text: str, shown: str) -> None:
    assert without_places(text) == shown


def test_parents_are_found_whatever_their_paths_hold() -> None:
    """Also where one is the beginning of another."""
    names = ("/data/my models/x, y", "/data/my models/x, y z")
    text = f"- '{names[0]}'\n- '{names[1]}'"
    assert without_places(text, names) == "- 'my models/x, y'\n- 'my models/x, y z'"


def test_a_local_directory_is_no_model_of_the_hub() -> None:
    text = card(parents=(Parent("models/base", is_local=True), Parent("org/base")))
    assert front_matter(text)["base_model"] == ["org/base"]
    assert "- `models/base`\n" in text
