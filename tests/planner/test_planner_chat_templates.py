"""The chat template that a recipe asks for, and the text that the known formats give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from kits.tokenizer_maker import bpe, read, recipe_of, vocabulary, write_plan, write_tokenizer
from transformers import PreTrainedTokenizerFast

from raymerge.planner.tokenizer.files import BUILT_IN, resolve_template
from raymerge.planner.tokenizer.tokens import ModelVocabulary
from raymerge.planner.tokenizer.vocabulary import plan_chat_template

_TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
_SYSTEM = {"role": "system", "content": "Be brief"}
_TEMPLATE = "{% for m in messages %}{{ m['content'] }};{% endfor %}"


def _render(name: str, messages: list[dict[str, str]], *, prompt: bool = True) -> str:
    """As transformers renders templates."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(BUILT_IN[name])
    return template.render(messages=messages, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>")


def _model(root: Path, index: int, **files: Any) -> ModelVocabulary:
    contents = {key.replace("__", "."): each for key, each in files.items()}
    return vocabulary(root / f"m{index}", bpe(["a"], added=["<s>", "</s>"]), index=index, files=contents)


def _stated(template: Any) -> dict[str, Any]:
    return {"tokenizer_config__json": {"chat_template": template}}


def _resolve(models: list[ModelVocabulary], asked: str | None) -> tuple[str | None, list[str]]:
    more = {} if asked is None else {"chat_template": asked}
    found, problems = resolve_template(recipe_of(models, **more), [model.tokenizer for model in models])
    return found, [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral", "<s>[INST] Be brief\n\nHi [/INST] Hello</s>[INST] Bye [/INST]"),
        (
            "alpaca",
            "Be brief\n\n### Instruction:\nHi\n\n### Response:\nHello</s>\n\n"
            "### Instruction:\nBye\n\n### Response:\n",
        ),
        (
            "exaone",
            "[|system|]Be brief[|endofturn|]\n[|user|]Hi\n[|assistant|]Hello[|endofturn|]\n"
            "[|user|]Bye\n[|assistant|]",
        ),
    ],
)
def test_built_in_formats(name: str, expected: str) -> None:
    assert _render(name, [_SYSTEM, *_TALK]) == expected


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_formats_without_a_system_turn_or_a_prompt(name: str) -> None:
    text = _render(name, _TALK[:2], prompt=False)
    assert "Be brief" not in text
    assert text.rstrip().endswith(
        ("Hello", "Hello</s>", "Hello<|im_end|>", "Hello<|eot_id|>", "Hello[|endofturn|]")
    )
    assert text.startswith("[|system|][|endofturn|]\n[|user|]Hi\n") or name != "exaone"


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_formats_in_transformers(tmp_path: Path, name: str) -> None:
    donor = write_tokenizer(
        tmp_path / "donor", bpe(["a"], added=["<s>", "</s>"]), {"bos_token": "<s>", "eos_token": "</s>"}
    )
    model = vocabulary(donor, bpe(["a"], added=["<s>", "</s>"]))
    changes, problems = plan_chat_template(recipe_of([model], chat_template=name), [model], 0)
    assert changes is not None
    assert not problems
    out = write_plan(tmp_path / "out", donor, changes.files, changes.left_out)
    loaded = PreTrainedTokenizerFast.from_pretrained(out)
    assert loaded.apply_chat_template(_TALK, tokenize=False, add_generation_prompt=True) == _render(
        name, _TALK
    )


def test_auto_takes_the_most_frequent_one_white_space_aside(tmp_path: Path) -> None:
    models = [
        _model(tmp_path, 0),
        _model(tmp_path, 1, **_stated("{{ one }}")),
        _model(tmp_path, 2, **_stated({"default": "{{ two }}", "rag": "{{ one }}"})),
        _model(tmp_path, 3, chat_template__jinja="\n{{ two }}\n"),
    ]
    assert _resolve(models, "auto") == ("{{ two }}", [])
    assert _resolve(models[:3], "auto") == ("{{ one }}", [])
    assert _resolve(models[:1], None) == (None, [])


def test_auto_without_any_template_is_refused(tmp_path: Path) -> None:
    models = [_model(tmp_path, 0), _model(tmp_path, 1, **_stated("  "))]
    found, problems = _resolve(models, "auto")
    assert found is None
    assert problems == [
        "recipe: chat_template: no model has a chat template. "
        "Write one of: alpaca, chatml, exaone, llama3, mistral; or a template."
    ]


def test_a_literal_of_any_length_is_taken_as_it_is(tmp_path: Path) -> None:
    models = [_model(tmp_path, 0)]
    for text in ("{{ messages[0].role }}", _TEMPLATE * 500, f"/{'x' * 300}/{{{{ a }}}}"):
        assert _resolve(models, text) == (text, [])


@pytest.mark.parametrize(
    ("asked", "guess"),
    [("chat-ml", "Did you mean 'chatml'?"), ("{{ short }}", "Write one of"), ("a" * 300, "Write one of")],
)
def test_what_is_neither_a_name_nor_a_template_is_refused(tmp_path: Path, asked: str, guess: str) -> None:
    found, (problem,) = _resolve([_model(tmp_path, 0)], asked)
    assert found is None
    assert f"{asked[:60]!r} is neither a built-in name nor a template. {guess}" in problem


@pytest.mark.parametrize(
    ("files", "written", "removed"),
    [
        ({"tokenizer_config.json": {"chat_template": "old"}}, {"tokenizer_config.json"}, ()),
        ({"tokenizer_config.json": {}}, {"tokenizer_config.json"}, ()),
        ({"tokenizer_config.json": {}, "chat_template.jinja": "old"}, {"chat_template.jinja"}, ()),
        (
            {"tokenizer_config.json": {"chat_template": "old"}, "chat_template.jinja": "old"},
            {"tokenizer_config.json", "chat_template.jinja"},
            (),
        ),
        ({}, {"chat_template.jinja"}, ()),
        (
            {
                "tokenizer_config.json": {},
                "chat_template.json": {"chat_template": "old"},
                "chat_template.jinja": "old",
                "additional_chat_templates/rag.jinja": "old",
            },
            {"chat_template.json", "chat_template.jinja"},
            ("additional_chat_templates/rag.jinja",),
        ),
    ],
)
def test_a_template_goes_where_the_donor_keeps_its_own(
    tmp_path: Path, files: dict[str, Any], written: set[str], removed: tuple[str, ...]
) -> None:
    donor = tmp_path / "donor"
    model = vocabulary(donor, bpe(["a"]), files={**files, "merges.txt": "#", "LICENSE": "free"})
    changes, problems = plan_chat_template(recipe_of([model], chat_template=_TEMPLATE), [model], 0)
    assert changes is not None
    assert not problems
    assert (set(changes.files), changes.left_out) == (written, removed)
    out = write_plan(tmp_path / "out", donor, changes.files, changes.left_out)
    assert read(out).templates == {"default": _TEMPLATE}
    assert "old" not in "".join(path.read_text() for path in out.rglob("*") if path.is_file())
    assert (out / "tokenizer.json").read_bytes() == (donor / "tokenizer.json").read_bytes()


def test_a_donor_without_a_tokenizer_cannot_take_a_template(tmp_path: Path) -> None:
    model = vocabulary(tmp_path / "m0", None)
    changes, problems = plan_chat_template(recipe_of([model], chat_template="auto"), [model], 0)
    assert changes is None
    found = " ".join(map(str, problems))
    assert "no model has a chat template" in found
    assert "m0 has no tokenizer that a chat template could go with" in found


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.content }", "cannot be compiled"),
        ("{{ messages[0].content }} and {% endfor %}", "line 1"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused(template: str, words: str, tmp_path: Path) -> None:
    found, problems = resolve_template(recipe_of([_model(tmp_path, 0)], chat_template=template), [])
    assert found is None
    assert words in str(problems[0])


def test_what_transformers_adds_to_the_language_is_no_fault(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{%- endgeneration -%}{% break %}{% endfor %}"
    )
    assert resolve_template(recipe_of([_model(tmp_path, 0)], chat_template=template), []) == (template, [])
