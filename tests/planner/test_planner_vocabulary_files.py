"""The files of a planned tokenizer and its chat template: they load, and give every token its planned id."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from kits.tokenizer_maker import (
    CHATML_CONFIG,
    bpe,
    planned,
    read,
    recipe_of,
    refused,
    unigram,
    vocabulary,
    word_level,
    word_piece,
    write_plan,
    write_tokenizer,
)
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from raymerge.checkpoints.tokenizer import read_tokenizer
from raymerge.errors import CheckpointError, PlanError, Problem
from raymerge.planner.tokenizer.files import built_in_templates, resolve_template
from raymerge.planner.tokenizer.tokens import ModelVocabulary
from raymerge.planner.tokenizer.vocabulary import (
    VocabularyPlan,
    build_vocabulary,
    convert_slow_tokenizer,
    plan_chat_template,
)

_PLAIN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
_BASE = bpe(["a", "b", "ab"], merges=["a b"], added=["<s>", "</s>"])
_OTHER = bpe(["b", "z", "a"], added=["<s>", "</s>", "<x>"])


def _out(root: Path, plan: VocabularyPlan, donor: Path) -> Path:
    return write_plan(root / "out", donor, plan.files, plan.left_out)


def _ids(plan: VocabularyPlan) -> dict[str, int]:
    return {text: number for number, text in enumerate(plan.tokens) if text is not None}


def _check_loads(out: Path, plan: VocabularyPlan) -> Any:
    """The tokenizer in ``out``, whose ids are the plan's in both libraries."""
    text = (out / "tokenizer.json").read_text(encoding="utf-8")
    assert Tokenizer.from_str(text).get_vocab(with_added_tokens=True) == _ids(plan)
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded.get_vocab() == _ids(plan)
    assert read(out).tokens == _ids(plan)
    return loaded


def _pair(
    root: Path, first: Mapping[str, Any], second: Mapping[str, Any] = _OTHER, **more: Any
) -> tuple[list[ModelVocabulary], Path]:
    files = {"tokenizer_config.json": dict(CHATML_CONFIG), "LICENSE": "free"} | more.pop("files", {})
    donor = vocabulary(root / "m0", first, files=files, **more)
    return [donor, vocabulary(root / "m1", second, index=1)], root / "m0"


@pytest.mark.parametrize(
    "base",
    [
        _BASE,
        unigram(["<unk>", "a", "b", "▁ab"], added=["<s>", "</s>"]),
        word_piece(["[UNK]", "a", "##b"], added=["<s>", "</s>"]),
        word_level(["<unk>", "a", "b"], added=["<s>", "</s>"]),
        bpe({"a": 0, "b": 3, "ab": 7, "<s>": 1}, merges=["a b"], added=["<s>", "</s>"]),
        bpe(["<s>", "</s>", "a", "b"], added=["<s>", "</s>"]),
    ],
)
@pytest.mark.parametrize("source", ["union", "base", "m1"])
def test_every_kind_loads_with_the_planned_ids(tmp_path: Path, base: dict[str, Any], source: str) -> None:
    models, donor = _pair(tmp_path, base)
    if source == "base":
        models[0] = vocabulary(donor, base, num_rows=8)
    tokens = {"<new>": {}, "<s>": {"force": True}}
    plan = planned(models, tokenizer={"source": source, "tokens": tokens})
    loaded = _check_loads(_out(tmp_path, plan, donor), plan)
    assert loaded.convert_tokens_to_ids("<new>") == plan.num_tokens - 1
    assert (loaded.bos_token, loaded.eos_token) == (("<s>", "</s>") if source != "m1" else (None, None))


def test_texts_are_split_as_the_base_does_with_new_tokens_found_first(tmp_path: Path) -> None:
    models, donor = _pair(tmp_path, _BASE)
    plan = planned(models, tokenizer_source="union")
    loaded = _check_loads(_out(tmp_path, plan, donor), plan)
    assert loaded.tokenize("ab <x> z a") == ["ab", "<x>", "z", "a"]


def test_an_unchanged_vocabulary_leaves_every_file_alone(tmp_path: Path) -> None:
    files = {
        "merges.txt": "#",
        "added_tokens.json": {"<s>": 3},
        "generation_config.json": {"eos_token_id": 4},
    }
    models, _ = _pair(tmp_path, _BASE, files=files)
    plan = planned(models, tokenizer_source="base")
    assert (plan.files, plan.left_out, plan.config) == ({}, (), {})


def test_ids_on_which_releases_differ_are_written_out(tmp_path: Path) -> None:
    base = bpe({"a": 0, "b": 2}, added=["<s>", "</s>"])
    _restate(base, {"a": 0, "b": 2})
    models, donor = _pair(tmp_path, base, num_rows=5)
    plan = planned(models, tokenizer_source="base")
    assert plan.tokens == ("a", None, "b", "<s>", "</s>")
    assert set(plan.files) == {"tokenizer.json"}
    _check_loads(_out(tmp_path, plan, donor), plan)


def test_a_changed_vocabulary_takes_older_files_out(tmp_path: Path) -> None:
    older = ("added_tokens.json", "merges.txt", "tokenizer.model", "vocab.json")
    models, donor = _pair(tmp_path, _BASE, files=dict.fromkeys(older, "{}"))
    plan = planned(models, tokenizer_source="union")
    assert plan.left_out == older
    assert set(plan.files) == {"tokenizer.json"}
    out = _out(tmp_path, plan, donor)
    assert {path.name for path in out.iterdir()} == {"tokenizer.json", "tokenizer_config.json", "LICENSE"}


def test_another_models_tokenizer_replaces_the_bases_files(tmp_path: Path) -> None:
    models, donor = _pair(tmp_path, _BASE, files={"vocab.json": "{}", "chat_template.jinja": "old"})
    config = {**CHATML_CONFIG, "eos_token": "<x>"}
    files = {"tokenizer_config.json": config, "special_tokens_map.json": {"eos_token": "<x>"}}
    models[1] = vocabulary(tmp_path / "m1", _OTHER, index=1, files=files)
    plan = planned(models, tokenizer_source="m1")
    out = _out(tmp_path, plan, donor)
    assert plan.left_out == ("chat_template.jinja", "vocab.json")
    for key in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (out / key).read_bytes() == (tmp_path / "m1" / key).read_bytes()
    assert (out / "LICENSE").exists()
    assert "eos_token is '<x>' as in m1, also in the configs; m0 has '</s>'" in plan.notes


def test_tokens_without_a_row_are_stripped_with_their_merges(tmp_path: Path) -> None:
    base = bpe(["a", "b", "c", "ab", "abc", "bc"], merges=["a b", "ab c", "b c"], added=["<s>"])
    models, donor = _pair(tmp_path, base, num_rows=4)
    plan = planned(models, tokenizer_source="base")
    assert plan.tokens == ("a", "b", "c", "ab")
    out = _out(tmp_path, plan, donor)
    parsed = json.loads((out / "tokenizer.json").read_text())
    assert (parsed["model"]["merges"], parsed["added_tokens"]) == (["a b"], [])
    loaded = _check_loads(out, plan)
    assert loaded.tokenize("abc") == ["ab", "c"]
    # Roles of tokens that are gone go too: transformers would add them again, beyond the rows.
    assert (loaded.bos_token, loaded.eos_token) == (None, None)
    assert "bos_token '<s>' has no row and is no longer the bos_token" in plan.notes


@pytest.mark.parametrize("pairs", [False, True])
def test_merges_of_a_prefixed_encoding(tmp_path: Path, pairs: bool) -> None:
    base = bpe(["a", "##b", "##c", "ab", "ac"], merges=["a ##b", "a ##c"])
    base["model"] |= {"continuing_subword_prefix": "##", "unk_token": "ac"}
    base["model"]["merges"] = [["a", "##b"], ["a", "##c"]] if pairs else base["model"]["merges"]
    models, donor = _pair(tmp_path, base, num_rows=4, files={"tokenizer_config.json": {}})
    plan = planned(models, tokenizer_source="base")
    parsed = json.loads((_out(tmp_path, plan, donor) / "tokenizer.json").read_text())
    assert parsed["model"]["merges"] == base["model"]["merges"][:1]
    assert parsed["model"]["unk_token"] is None


def test_pieces_without_a_row_are_cut_off(tmp_path: Path) -> None:
    base = unigram(["a", "b", "<unk>"], added=["<s>"])
    base["model"]["unk_id"] = 2
    models, donor = _pair(tmp_path, base, num_rows=2, files={"tokenizer_config.json": {}})
    plan = planned(models, tokenizer_source="union")
    out = _out(tmp_path, plan, donor)
    assert json.loads((out / "tokenizer.json").read_text())["model"]["unk_id"] is None
    assert plan.tokens[:3] == ("a", "b", "z")
    assert Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab() == _ids(plan)


def test_configs_of_the_tokenizer_name_only_tokens_that_there_are(tmp_path: Path) -> None:
    config = {
        **CHATML_CONFIG,
        "eos_token": {"content": "</s>", **_PLAIN},
        "mask_token": "<gone>",
        "add_bos_token": True,
        "extra_special_tokens": {"image_token": "<gone>", "s": "<s>"},
        "added_tokens_decoder": {"3": {"content": "<s>", **_PLAIN}, "4": {"content": "</s>", **_PLAIN}},
    }
    legacy = {"bos_token": "<s>", "mask_token": "<gone>", "additional_special_tokens": ["<s>", "<gone>"]}
    files = {"tokenizer_config.json": config, "special_tokens_map.json": legacy}
    models, donor = _pair(tmp_path, _BASE, files=files, num_rows=5)
    plan = planned(models, tokenizer_source="union")
    out = _out(tmp_path, plan, donor)
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert list(written["added_tokens_decoder"]) == ["3", "4", "5", "6"]
    assert written["added_tokens_decoder"]["6"] == {"content": "<x>", **_PLAIN}
    assert "mask_token" not in written
    assert written["extra_special_tokens"] == {"s": "<s>"}
    assert written["add_bos_token"] is True
    legacy = json.loads((out / "special_tokens_map.json").read_text())
    assert legacy == {"bos_token": "<s>", "additional_special_tokens": ["<s>"]}


@pytest.mark.parametrize("class_name", ["LlamaTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_classes_that_rebuild_their_tokenizer_keep_the_ids(tmp_path: Path, class_name: str) -> None:
    vocab = ["<unk>", "<s>", "</s>", "<|endoftext|>", "a", "b", "ab"]
    base = bpe(vocab, merges=["a b"], added=["<unk>", "<s>", "</s>", "<|endoftext|>"])
    config = {"tokenizer_class": class_name, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    models, donor = _pair(tmp_path, base, files={"tokenizer_config.json": config})
    plan = planned(models, tokenizer_source="union")
    _check_loads(_out(tmp_path, plan, donor), plan)


def test_a_template_goes_with_a_changed_vocabulary(tmp_path: Path) -> None:
    models, donor = _pair(tmp_path, _BASE)
    plan = planned(models, tokenizer_source="union", chat_template="chatml")
    loaded = _check_loads(_out(tmp_path, plan, donor), plan)
    talk = [{"role": "user", "content": "Hi"}]
    assert loaded.apply_chat_template(talk, tokenize=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_ids_of_special_tokens_follow_their_tokens(tmp_path: Path) -> None:
    generation = {
        "bos_token_id": 3,
        "eos_token_id": [4, 2],
        "pad_token_id": None,
        "suppress_tokens": [0, 1],
        "top_k": 3,
    }
    config = {
        "vocab_size": 5,
        "bos_token_id": 3,
        "pad_token_id": -1,
        "image_token_index": 0,
        "sep_token_id": 2,
        "text_config": {"vocab_size": 5, "eos_token_id": 4, "decoder_start_token_id": 3},
    }
    models, donor = _pair(tmp_path, _BASE, config=config, files={"generation_config.json": generation})
    models[1] = vocabulary(
        tmp_path / "m1",
        _OTHER,
        index=1,
        files={"tokenizer_config.json": {"eos_token": "<x>", "sep_token": "z"}},
    )
    plan = planned(models, tokenizer={"source": "m1", "pad_to_multiple_of": 8})
    # a and b move, ab is gone: its role's token in the new tokenizer stands in, or nothing.
    assert plan.config == {
        "vocab_size": 8,
        "image_token_index": 2,
        "sep_token_id": 1,
        "text_config.vocab_size": 8,
        # The new tokenizer says which token ends a text; m0's does not.
        "text_config.eos_token_id": 5,
    }
    assert "config.json: text_config.vocab_size becomes 8" in plan.notes
    written = json.loads(plan.files["generation_config.json"])
    assert written == {**generation, "eos_token_id": [5, 4], "suppress_tokens": [2, 0]}
    assert json.loads((donor / "generation_config.json").read_text()) == generation


def test_roles_of_a_chosen_tokenizer_go_before_the_ids_of_the_configs(tmp_path: Path) -> None:
    generation = {"eos_token_id": 4, "bos_token_id": 3, "forced_eos_token_id": 4}
    config = {"vocab_size": 5, "eos_token_id": [4, 0], "bos_token_id": 3, "pad_token_id": None}
    files = {"generation_config.json": generation, "tokenizer_config.json": CHATML_CONFIG}
    models, _ = _pair(tmp_path, _BASE, config=config, files=files)
    files = {"tokenizer_config.json": {**CHATML_CONFIG, "eos_token": "<x>"}}
    models[1] = vocabulary(tmp_path / "m1", _OTHER, index=1, files=files)
    chosen = planned(models, tokenizer_source="m1")
    ids = {text: number for number, text in enumerate(chosen.tokens)}
    assert chosen.config["eos_token_id"] == [ids["<x>"], ids["</s>"], ids["a"]]
    assert chosen.config.get("bos_token_id", 3) == ids["<s>"]
    assert "pad_token_id" not in chosen.config
    written = json.loads(chosen.files["generation_config.json"])
    assert written["eos_token_id"] == written["forced_eos_token_id"] == ids["<x>"]
    # The base's own tokenizer leaves what its configs say, be it another token than the role's.
    kept = planned(models, tokenizer_source="union")
    assert "eos_token_id" not in kept.config
    assert "generation_config.json" not in kept.files


def test_an_adapters_tokenizer_numbers_the_rows_and_the_files_are_told_from_the_models_own(
    tmp_path: Path,
) -> None:
    config = {"vocab_size": 5, "eos_token_id": 4}
    models, donor = _pair(tmp_path, _BASE, config=config)
    grown = bpe(["a", "b", "ab"], added=["<s>", "</s>", "<y>"])
    write_tokenizer(tmp_path / "lora", grown, {**CHATML_CONFIG, "eos_token": "<y>"})
    models[0] = replace(models[0], brought=read(tmp_path / "lora"), num_rows=6)
    plan = planned(models[:1], tokenizer_source="base")
    assert plan.tokens[5] == "<y>"
    assert plan.config == {"vocab_size": 6, "eos_token_id": 5}
    out = _out(tmp_path, plan, donor)
    for key in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((out / key).read_text()) == json.loads((tmp_path / "lora" / key).read_text())


def test_ids_beyond_the_rows_are_no_ids_any_more(tmp_path: Path) -> None:
    config = {"vocab_size": 16, "pad_token_id": 15, "eos_token_id": 4}
    models, _ = _pair(tmp_path, _BASE, config=config, num_rows=16)
    plan = planned(models, tokenizer_source="base")
    assert plan.config == {"vocab_size": 5, "pad_token_id": 3}


def test_a_config_without_the_field_is_given_it(tmp_path: Path) -> None:
    models, _ = _pair(tmp_path, _BASE, config={"text_config": {"model_type": "llama"}})
    assert planned(models, tokenizer_source="base").config == {"text_config.vocab_size": 5}


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_generation_config_is_refused(tmp_path: Path, text: str) -> None:
    models, donor = _pair(tmp_path, _BASE, files={"generation_config.json": text})
    (problem,) = refused(models, tokenizer_source="union")
    assert problem.startswith(f"{donor}/generation_config.json: is not a JSON object")


def test_older_files_become_one_that_can_be_changed(tmp_path: Path) -> None:
    """A byte-level encoding in two files, as releases without tokenizer.json wrote it."""
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    vocab = json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3})
    older = {"vocab.json": vocab, "merges.txt": "#version: 0.2\na b\n"}
    donor = write_tokenizer(tmp_path / "m0", None, config, older)
    keys = ("merges.txt", "tokenizer_config.json", "vocab.json")
    files = read_tokenizer(donor, keys, convert=convert_slow_tokenizer)
    assert files is not None
    assert "tokenizer.json" not in files.files
    assert (files.tokens["ab"], files.tokens["<|endoftext|>"]) == (2, 3)
    other = vocabulary(tmp_path / "m1", _OTHER, index=1)
    base = ModelVocabulary(0, recipe_of([other]).models[0].model, files, 4, {"vocab_size": 4})
    named = recipe_of([other, other], tokenizer_source="union")
    plan = build_vocabulary(named, [base, other], 0)
    assert plan.left_out == ("merges.txt", "vocab.json")
    loaded = _check_loads(write_plan(tmp_path / "out", donor, plan.files, plan.left_out), plan)
    assert loaded.tokenize("ab") == ["ab"]
    assert planned([base], tokenizer_source="base").files == {}


def _sentencepiece(root: Path) -> tuple[Path, bytes]:
    """A model that has ``tokenizer.model`` alone, as Llama 2 and Mistral 7B have it; and that file."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "hello brave new world", "merging models"] * 4),
        model_writer=written,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        num_threads=1,
        minloglevel=2,
    )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_tokenizer(root, None, {"tokenizer_class": "LlamaTokenizer", **roles})
    (root / "tokenizer.model").write_bytes(written.getvalue())
    return root, written.getvalue()


def test_a_sentencepiece_model_alone_becomes_a_tokenizer_that_can_be_changed(tmp_path: Path) -> None:
    root, written = _sentencepiece(tmp_path / "m0")
    files = read_tokenizer(root, ("tokenizer.model", "tokenizer_config.json"), convert=convert_slow_tokenizer)
    assert files is not None
    pieces = sentencepiece.SentencePieceProcessor(model_proto=written)
    expected = {pieces.id_to_piece(number): number for number in range(pieces.vocab_size())}
    assert {**files.tokens} == expected
    made = Tokenizer.from_str(files.tokenizer_json.decode())
    for text in ("the cat sat", "hello merging world", "zebra \u00e9"):
        assert made.encode(text, add_special_tokens=False).ids == pieces.encode(text)


def test_what_transformers_cannot_convert_is_refused(tmp_path: Path) -> None:
    root = write_tokenizer(tmp_path, None, {"tokenizer_class": "LlamaTokenizer"}, {"tokenizer.model": "no"})
    with pytest.raises(CheckpointError, match="transformers cannot make one of its other files") as caught:
        convert_slow_tokenizer(root)
    (problem,) = caught.value.problems
    assert problem.where == str(root)
    assert problem.remedy.startswith("Make it where the tokenizer loads")
    assert "tokenizer.model is not a SentencePiece model" in problem.what
    assert "tiktoken" not in problem.what


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_two_vocabularies_load_with_the_planned_ids(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("pair")
    texts = [*"abcdefg", "<s>", "<t>", "<u>"]
    models = []
    for index in range(2):
        vocab = data.draw(st.lists(st.sampled_from(texts), unique=True, min_size=1))
        steps = data.draw(st.lists(st.integers(1, 3), min_size=len(vocab), max_size=len(vocab)))
        numbers = {text: sum(steps[:at]) for at, text in enumerate(vocab)}
        numbers = data.draw(st.sampled_from([numbers, {text: at for at, text in enumerate(vocab)}]))
        added = data.draw(st.lists(st.sampled_from(texts[7:]), unique=True))
        highest = max(numbers.values()) + len(added) + 1
        rows = data.draw(st.integers(1, highest + 2))
        tokenizer = bpe(numbers, added=added)
        _restate(tokenizer, numbers)
        models.append(vocabulary(root / f"m{index}", tokenizer, index=index, num_rows=rows))
    plan = planned(models, tokenizer={"source": data.draw(st.sampled_from(["union", "base", "m1"]))})
    if "tokenizer.json" in plan.files:
        loaded = Tokenizer.from_str(plan.files["tokenizer.json"].decode())
        assert loaded.get_vocab(with_added_tokens=True) == _ids(plan)


def _restate(tokenizer: dict[str, Any], numbers: Mapping[str, int]) -> None:
    """Added tokens numbered behind the highest id, as a tokenizer with holes states them."""
    following = max(numbers.values()) + 1
    for entry in tokenizer["added_tokens"]:
        if entry["content"] not in numbers:
            entry["id"] = following
            following += 1


_TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
_SYSTEM = {"role": "system", "content": "Be brief"}
_TEMPLATE = "{% for m in messages %}{{ m['content'] }};{% endfor %}"


def _render(name: str, messages: list[dict[str, str]]) -> str:
    """As transformers renders templates."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(built_in_templates()[name])
    return template.render(messages=messages, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")


def _model(root: Path, index: int, **files: Any) -> ModelVocabulary:
    contents = {key.replace("__", "."): each for key, each in files.items()}
    return vocabulary(root / f"m{index}", bpe(["a"], added=["<s>", "</s>"]), index=index, files=contents)


def _stated(template: Any) -> dict[str, Any]:
    return {"tokenizer_config__json": {"chat_template": template}}


def _resolve(models: list[ModelVocabulary], asked: str | None) -> tuple[str | None, list[str]]:
    more = {} if asked is None else {"chat_template": asked}
    problems: list[Problem] = []
    tokenizers = [model.tokenizer for model in models]
    return resolve_template(recipe_of(models, **more), tokenizers, problems), [*map(str, problems)]


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


@pytest.mark.parametrize("name", sorted(built_in_templates()))
def test_built_in_formats_in_transformers(tmp_path: Path, name: str) -> None:
    donor = write_tokenizer(
        tmp_path / "donor", bpe(["a"], added=["<s>", "</s>"]), {"bos_token": "<s>", "eos_token": "</s>"}
    )
    model = vocabulary(donor, bpe(["a"], added=["<s>", "</s>"]))
    changes = plan_chat_template(recipe_of([model], chat_template=name), [model], 0)
    out = write_plan(tmp_path / "out", donor, changes.files, changes.left_out)
    loaded = PreTrainedTokenizerFast.from_pretrained(out)
    assert loaded.apply_chat_template(_TALK, tokenize=False, add_generation_prompt=True) == _render(
        name, _TALK
    )


def test_mistrals_format_refuses_a_role_that_it_would_take_for_the_assistant() -> None:
    refusals: list[str] = []
    template = ImmutableSandboxedEnvironment().from_string(built_in_templates()["mistral"])
    talk = [*_TALK, {"role": "tool", "content": "4"}]
    template.render(messages=talk, bos_token="<s>", eos_token="</s>", raise_exception=refusals.append)
    assert len(refusals) == 1


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
    for text in ("{{ messages[0].role }}", _TEMPLATE * 50, f"/{'x' * 300}/{{{{ a }}}}"):
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
    changes = plan_chat_template(recipe_of([model], chat_template=_TEMPLATE), [model], 0)
    assert (set(changes.files), changes.left_out) == (written, removed)
    out = write_plan(tmp_path / "out", donor, changes.files, changes.left_out)
    assert read(out).templates == {"default": _TEMPLATE}
    assert "old" not in "".join(path.read_text() for path in out.rglob("*") if path.is_file())
    assert (out / "tokenizer.json").read_bytes() == (donor / "tokenizer.json").read_bytes()


def test_a_donor_without_a_tokenizer_cannot_take_a_template(tmp_path: Path) -> None:
    model = vocabulary(tmp_path / "m0", None)
    with pytest.raises(PlanError, match="no model has a chat template") as caught:
        plan_chat_template(recipe_of([model], chat_template="auto"), [model], 0)
    assert "m0 has no tokenizer that a chat template could go with" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.content }", "cannot be compiled"),
        ("{{ messages[0].content }} and {% endfor %}", "line 1"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused(template: str, words: str, tmp_path: Path) -> None:
    found, problems = _resolve([_model(tmp_path, 0)], template)
    assert found is None
    assert words in problems[0]


def test_what_transformers_adds_to_the_language_is_no_fault(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{%- endgeneration -%}{% break %}{% endfor %}"
    )
    assert _resolve([_model(tmp_path, 0)], template) == (template, [])
