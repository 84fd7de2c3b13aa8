"""Prompts as tokens: what begins a sequence, how files are cut, and every refusal at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.layer_streams import open_base
from kits.plan_maker import llama
from kits.tokenizer_maker import CHATML_CONFIG, bpe, word_level, write_tokenizer

from raymerge.errors import PlanError
from raymerge.planner.inputs.sources import ExpertPrompts, GateSpec, Source
from raymerge.stages.router.prompts import FEWEST_TOKENS, MOST_TOKENS, TokenRun, tokenized

WORDS = ["<unk>", "<s>", "</s>", *"abcdefghij"]
BEGIN = WORDS.index("<s>")
IDS = {word: number for number, word in enumerate(WORDS)}


def make_base(root: Path, tokenizer_config: Mapping[str, Any] = CHATML_CONFIG, **config: Any) -> Source:
    """A model whose tokenizer knows a few words, and ``<s>`` and ``</s>``."""
    llama(root, 1, **config)
    tokenizer = word_level(WORDS, added=["<s>", "</s>"])
    write_tokenizer(root, tokenizer, {**tokenizer_config, "unk_token": "<unk>"})
    return open_base(root)


def spec_of(base: Source, *experts: ExpertPrompts, shared: tuple[ExpertPrompts, ...] = ()) -> GateSpec:
    """Router rows of one layer for these experts."""
    return GateSpec(base, "hidden", experts, shared, (0,), 32, 0, 1.0, 0.1, ())


def ids(text: str) -> tuple[int, ...]:
    """Words with blanks between them as the base's tokenizer knows them."""
    return tuple(IDS[word] for word in text.split())


def refused(spec: GateSpec) -> list[str]:
    """Every problem with the prompts."""
    with pytest.raises(PlanError) as caught:
        tokenized(spec)
    assert all(problem.remedy for problem in caught.value.problems)
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_base(tmp_path_factory.mktemp("prompts") / "base", max_position_embeddings=2048)


def test_each_expert_in_turn_and_shared_ones_last(base: Source) -> None:
    first = ExpertPrompts("expert 0", ("a b", "c"), ("d",), text="e f", held_out=("g h i",))
    second = ExpertPrompts("expert 1", ("j",))
    shared = ExpertPrompts("shared expert", ("a",), ("b",))
    assert tokenized(spec_of(base, first, second, shared=(shared,))) == (
        TokenRun(0, 1, ids("<s> a b")),
        TokenRun(0, 1, ids("<s> c")),
        TokenRun(0, 1, ids("<s> e f")),
        TokenRun(0, -1, ids("<s> d")),
        TokenRun(0, 0, ids("<s> g h i")),
        TokenRun(1, 1, ids("<s> j")),
        TokenRun(2, 1, ids("<s> a")),
        TokenRun(2, -1, ids("<s> b")),
    )


def test_without_a_beginning_the_prompt_alone(tmp_path: Path) -> None:
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    base = make_base(tmp_path / "base", fast, max_position_embeddings=2048)
    runs = tokenized(spec_of(base, ExpertPrompts("e", ("a b",), text="c " * 600)))
    assert runs[0].tokens == ids("a b")
    assert [len(run.tokens) for run in runs[1:]] == [512, 88]


def test_an_empty_prompt_is_the_beginning_of_a_sequence(tmp_path: Path, base: Source) -> None:
    runs = tokenized(spec_of(base, ExpertPrompts("e", ("",), ("a", ""))))
    assert [(run.sign, run.tokens) for run in runs] == [(1, ids("<s>")), (-1, ids("<s> a")), (-1, ids("<s>"))]
    without = make_base(tmp_path / "base", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (problem,) = refused(spec_of(without, ExpertPrompts("e", ("",))))
    assert problem == (
        f"e: the prompt '': gives no tokens in the tokenizer of {without.name}. "
        "Write a text, or remove the prompt."
    )


def test_the_tokenizer_adds_nothing_by_itself(tmp_path: Path) -> None:
    llama(tmp_path / "base", 1)
    tokenizer = bpe(["<s>", "</s>", "a", "b"], added=["<s>", "</s>"])
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    write_tokenizer(tmp_path / "base", tokenizer, CHATML_CONFIG)
    base = open_base(tmp_path / "base")
    assert tokenized(spec_of(base, ExpertPrompts("e", ("ab",)))) == (TokenRun(0, 1, (0, 2, 3)),)


def test_special_tokens_in_a_prompt_are_read_as_such(base: Source) -> None:
    (run,) = tokenized(spec_of(base, ExpertPrompts("e", ("a</s>b",))))
    assert run.tokens == ids("<s> a </s> b")


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 3 * MOST_TOKENS))
def test_files_are_cut_into_pieces(base: Source, count: int) -> None:
    words = [WORDS[3 + number % 10] for number in range(count)]
    runs = tokenized(spec_of(base, ExpertPrompts("e", text=" ".join(words))))
    own = MOST_TOKENS - 1
    assert all(run.tokens[0] == BEGIN and run.sign == 1 for run in runs)
    read = [token for run in runs for token in run.tokens[1:]]
    assert read == list(ids(" ".join(words)))[: len(read)]
    assert all(len(run.tokens) == MOST_TOKENS for run in runs[:-1])
    rest = count % own
    dropped = rest if count > own and 0 < rest < FEWEST_TOKENS else 0
    assert len(read) == count - dropped


def test_files_are_cut_to_what_the_model_reads_at_once(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", max_position_embeddings=40)
    runs = tokenized(spec_of(base, ExpertPrompts("e", text="a " * 100)))
    assert [len(run.tokens) for run in runs] == [40, 40, 23]


def test_no_limit_where_the_config_names_none(tmp_path: Path) -> None:
    root = tmp_path / "base"
    make_base(root)
    config = json.loads((root / "config.json").read_text())
    del config["max_position_embeddings"]
    (root / "config.json").write_text(json.dumps(config))
    base = open_base(root)
    (run,) = tokenized(spec_of(base, ExpertPrompts("e", ("a " * 3000,))))
    assert len(run.tokens) == 3001


def test_every_problem_at_once(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", max_position_embeddings=20)
    one = ExpertPrompts("expert 0 (code)", ("a " * 20 + "a", "b"), ("d",), held_out=("c " * 29 + "c",))
    two = ExpertPrompts("expert 1 (law)", ("a",), text=" ")
    found = refused(spec_of(base, one, two))
    assert found == [
        "expert 0 (code): the prompt 'a a a a a a a a a a a a a a a a a a a...': is 22 tokens long, and "
        f"{base.name} reads 20 at once. Shorten it; router_input, centroid and ridge take a "
        "prompt_file, which is cut into pieces.",
        "expert 0 (code): the prompt 'c c c c c c c c c c c c c c c c c c c...': is 31 tokens long, and "
        f"{base.name} reads 20 at once. Shorten it; router_input, centroid and ridge take a "
        "prompt_file, which is cut into pieces.",
        f"expert 1 (law): its prompt file: gives no tokens in the tokenizer of {base.name}. "
        "Name a file with text in it.",
    ]


def test_tokens_beyond_the_embedding(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    rows = base.checkpoint.tensors["model.embed_tokens.weight"].shape[0]
    words = [*WORDS, *(f"w{number}" for number in range(rows))]
    tokenizer = word_level(words, added=["<s>", "</s>"])
    write_tokenizer(tmp_path / "base", tokenizer, {**CHATML_CONFIG, "unk_token": "<unk>"})
    beyond = words[rows + 2]
    experts = ExpertPrompts("e", ("a",), text=beyond), ExpertPrompts("f", (beyond, words[rows - 1]))
    found = refused(spec_of(open_base(tmp_path / "base"), *experts))
    assert len(found) == 2
    assert all(f"has the token {rows + 2}, and the embedding of" in each for each in found)


def test_a_base_without_a_tokenizer(tmp_path: Path) -> None:
    llama(tmp_path / "base", 1)
    (found,) = refused(spec_of(open_base(tmp_path / "base"), ExpertPrompts("e", ("a",))))
    assert "tokenizer" in found
    assert "Put the tokenizer's files beside its config.json, or use gate_mode: random." in found


def test_a_tokenizer_that_comes_as_code_is_not_run(tmp_path: Path) -> None:
    root = llama(tmp_path / "base", 1, model_type="nimbus")
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (root / "tokenizer_config.json").write_text(json.dumps(own))
    (root / "own.py").write_text("raise SystemExit('this was run')\n")
    (found,) = refused(spec_of(open_base(root), ExpertPrompts("e", ("a",))))
    assert "transformers cannot load its tokenizer" in found


def test_a_broken_tokenizer_file(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{")
    (found,) = refused(spec_of(base, ExpertPrompts("e", ("a",))))
    assert found.startswith(base.name)
