"""Which tokens an output has, whose rows they take, and what the plan says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.tokenizer_maker import bpe, planned, refused, unigram, vocabulary, word_level

from raymerge.errors import PlanError
from raymerge.planner.tokenizer.tokens import ABSENT, FixedRow, ModelVocabulary, RowRun, RowSources
from raymerge.planner.tokenizer.vocabulary import VocabularyPlan

_BASE = ("a", "b", "c")


def _models(root: Path, *tokenizers: Any, rows: dict[int, int] | None = None) -> list[ModelVocabulary]:
    return [
        vocabulary(root / f"m{index}", each, index=index, num_rows=(rows or {}).get(index))
        for index, each in enumerate(tokenizers)
    ]


def _texts(plan: VocabularyPlan) -> str:
    return " ".join(text or "_" for text in plan.tokens)


def _row_texts(plan: VocabularyPlan, models: list[ModelVocabulary], member: int) -> list[str]:
    """What each row is made of, as ``source:token`` of its terms."""
    found = []
    for run in plan.sources.runs(member, {model.index: model.num_rows for model in models}):
        for at in range(run.count):
            terms = []
            for source, first in run.inputs:
                tokenizer = models[source].tokenizer
                assert tokenizer is not None
                names = {number: text for text, number in tokenizer.tokens.items()}
                terms.append(f"{source}:{names.get(first + at, '?')}")
            found.append("+".join(terms) or "0")
    return found


def _tokens(**entries: Any) -> dict[str, Any]:
    return {
        "tokenizer": {"source": "union", "tokens": {key.strip("_"): each for key, each in entries.items()}}
    }


def test_union_keeps_the_bases_ids_and_goes_on_in_recipe_order(tmp_path: Path) -> None:
    models = _models(
        tmp_path,
        bpe(_BASE, added=["<s>"]),
        bpe(["c", "z", "b", "y"], added=["<one>", "<s>"]),
        bpe(["y", "x", "a"], added=["<two>", "<one>"]),
    )
    plan = planned(models, tokenizer_source="union")
    # Ordinary tokens of all models first, each model's in the order of its ids; added ones after them.
    assert _texts(plan) == "a b c <s> z y x <one> <two>"
    assert (plan.num_tokens, plan.num_rows) == (9, 9)
    assert _row_texts(plan, models, 1) == [
        *("0:a", "1:b", "1:c", "1:<s>", "1:z", "1:y", "2:x", "1:<one>", "2:<two>")
    ]
    assert _row_texts(plan, models, 0)[4:] == ["1:z", "1:y+2:y", "2:x", "1:<one>+2:<one>", "2:<two>"]


def test_base_and_model_keep_one_vocabulary(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe(_BASE), bpe(["c", "a", "z"], added=["<s>"]))
    plan = planned(models, tokenizer_source="base")
    assert _texts(plan) == "a b c"
    assert _row_texts(plan, models, 1) == ["1:a", "0:b", "1:c"]
    plan = planned(models, tokenizer={"source": "m1"})
    assert _texts(plan) == "c a z <s>"
    assert _row_texts(plan, models, 0) == ["0:c", "0:a", "1:z", "1:<s>"]


def test_added_tokens_keep_their_settings_and_the_first_wins(tmp_path: Path) -> None:
    loud, quiet = {"content": "<x>", "special": True}, {"content": "<x>", "special": False, "lstrip": True}
    models = _models(tmp_path, bpe(_BASE), bpe(["a"], added=[loud]), bpe(["a"], added=[quiet]))
    plan = planned(models, tokenizer_source="union")
    assert b'"special": true' in plan.files["tokenizer.json"]
    assert "'<x>' have other settings in m2; the first model's hold" in plan.notes


def test_an_ordinary_token_that_another_model_marks_becomes_an_added_one(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe(["a", "<x>"]), bpe(["a", "<y>"]), bpe(["a"], added=["<x>", "<y>"]))
    plan = planned(models, tokenizer_source="union")
    assert _texts(plan) == "a <x> <y>"
    assert plan.files["tokenizer.json"].count(b'"special": true') == 2
    assert "'<x>', '<y>' become added tokens, as in m2" in plan.notes


def test_tokens_that_no_model_has_come_last_in_recipe_order(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe(_BASE), bpe(["a", "z"]))
    wish = _tokens(new={}, z={}, also={"source": {"kind": "zero"}})
    plan = planned(models, **wish)
    assert _texts(plan) == "a b c z new also"
    assert _row_texts(plan, models, 1)[3:] == ["1:z", "0", "0"]
    assert "missing rows filled with zeros: 2 ('new', 'also')" in plan.notes


def test_holes_stay_holes(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe({"a": 0, "b": 2, "c": 5}), bpe(["c", "z"], added=["<s>"]), rows={0: 6})
    plan = planned(models, tokenizer_source="union")
    assert plan.tokens == ("a", None, "b", None, None, "c", "z", "<s>")
    assert _row_texts(plan, models, 0) == ["0:a", "0", "0:b", "0", "0", "0:c", "1:z", "1:<s>"]
    assert "ids that belong to no token, with rows of zeros: 3" in plan.notes


def test_different_kinds_are_joined_and_told(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe(_BASE), unigram(["<unk>", "a", "z"]), word_level(["<unk>", "y"]))
    plan = planned(models, tokenizer_source="union")
    assert _texts(plan) == "a b c <unk> z y"
    notes = " ".join(plan.notes)
    assert "m1 has a Unigram tokenizer and m0 a BPE one: texts are split as m0 does" in notes
    assert "m2 has a WordLevel tokenizer" in notes


def test_tokens_beyond_the_embedding_count_as_absent(tmp_path: Path) -> None:
    models = _models(
        tmp_path, bpe(_BASE, added=["<s>", "<t>"]), bpe(["a", "z"], added=["<u>", "<t>"]), rows={0: 4, 1: 3}
    )
    plan = planned(models, tokenizer_source="union")
    assert _texts(plan) == "a b c <s> z <u>"
    notes = " ".join(plan.notes)
    assert "m0: tokens beyond the 4 rows of its embedding: 1 ('<t>'); they count as absent there" in notes
    assert "m1: tokens beyond the 3 rows of its embedding: 1 ('<t>')" in notes


def test_a_token_beyond_one_embedding_may_come_from_another(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe([*_BASE, "z"]), bpe(["z", "a"]), rows={0: 3})
    plan = planned(models, tokenizer_source="union")
    assert _texts(plan) == "a b c z"
    assert _row_texts(plan, models, 0) == ["0:a", "0:b", "0:c", "1:z"]


@pytest.mark.parametrize(("multiple", "num_rows"), [(None, 5), (1, 5), (4, 8), (5, 5), (64, 64)])
def test_rows_are_rounded_up(tmp_path: Path, multiple: int | None, num_rows: int) -> None:
    models = _models(tmp_path, bpe(_BASE), bpe(["x", "y"]))
    plan = planned(models, tokenizer={"source": "union", "pad_to_multiple_of": multiple})
    assert (plan.num_tokens, plan.num_rows) == (5, num_rows)
    assert sum(run.count for run in plan.sources.runs(0, {0: 99, 1: 99})) == 5
    assert plan.config == {"vocab_size": num_rows}


def test_spare_rows_of_the_base_are_left_out_and_told(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe(_BASE), bpe(_BASE), rows={0: 8, 1: 8})
    plan = planned(models, tokenizer_source="base")
    assert (plan.num_tokens, plan.num_rows) == (3, 3)
    assert any(note.startswith("m0 has 5 rows more") for note in plan.notes)


def test_a_source_row_may_be_a_models_a_tokens_or_zeros(tmp_path: Path) -> None:
    models = _models(
        tmp_path, bpe([*_BASE, "x", "y"]), bpe(["z", "x"]), bpe(["a"], added=["<s>"]), rows={1: 9}
    )
    wish = _tokens(
        x={"source": "m1"},
        y={"source": {"kind": "model_token", "model": "m1", "token": "z"}},
        b={"source": {"kind": "model_token", "model": "m1", "token_id": 8}, "force": True},
        c={"source": {"kind": "zero"}},
        z={"force": True},
    )
    plan = planned(models, **wish)
    assert _texts(plan) == "a b c x y z <s>"
    assert _row_texts(plan, models, 0) == ["0:a", "1:?", "0:c", "0:x", "0:y", "1:z", "2:<s>"]
    assert _row_texts(plan, models, 2) == ["2:a", "1:?", "0", "1:x", "1:z", "1:z", "2:<s>"]
    assert "rows forced to be the same for all models: 2 ('b', 'z')" in plan.notes
    assert "missing rows filled with zeros: 1 ('c')" in plan.notes


def test_a_source_without_effect_is_told(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe(_BASE), bpe(_BASE))
    (note,) = [each for each in planned(models, **_tokens(a={"source": "m1"})).notes if "no effect" in each]
    assert note.startswith("the source of 'a' has no effect, since every model has the token")
    forced = planned(models, **_tokens(a={"source": "m1", "force": True}))
    assert "no effect" not in " ".join(forced.notes)
    assert forced.sources.runs(0, {0: 99, 1: 99})[0] == RowRun(0, 1, ((1, 0),))


def test_a_model_without_a_tokenizer_goes_by_the_bases_where_its_rows_are_as_many(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe(_BASE), None, bpe(["z"]), rows={1: 3})
    plan = planned(models, tokenizer_source="union")
    assert plan.sources.runs(1, {0: 99, 1: 99}) == (RowRun(0, 3, ((1, 0),)), RowRun(3, 1, ()))
    assert "m1 has no tokenizer files and is taken to go by m0's" in plan.notes
    others = _models(tmp_path / "others", bpe(_BASE), None, rows={1: 4})
    (problem,) = refused(others, tokenizer_source="union")
    assert "m1 has no tokenizer files, and its embedding has 4 rows where m0 has 3" in problem


@pytest.mark.parametrize("source", ["union", "base", "m0"])
def test_the_lead_needs_a_tokenizer(tmp_path: Path, source: str) -> None:
    (problem,) = refused(_models(tmp_path, None, bpe(_BASE), rows={0: 3}), tokenizer_source=source)
    assert "recipe: tokenizer_source: m0 has no tokenizer files. Copy" in problem


def test_a_tokenizer_may_come_from_a_model_that_gives_no_weights(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe(_BASE), bpe(["c", "b", "a", "z"]))
    merged = models[:1]
    recipe_models = {"tokenizer_source": "m1"}
    problems = refused(merged, **recipe_models)
    assert "'m1' is not one of the models of this merge. Name one of: m0." in problems[0]
    plan = planned(models, **recipe_models)
    assert plan.sources.runs(0, {0: 99})[-1] == RowRun(3, 1, ())


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"source": "m9"}, "tokenizer.tokens.a.source: 'm9' is not one of the models of this merge."),
        ({"source": "m1"}, "tokenizer.tokens.a.source: m1 has no token 'a'."),
        (
            {"source": {"kind": "model_token", "model": "m9", "token": "z"}},
            "tokenizer.tokens.a.source.model: 'm9' is not one of the models",
        ),
        (
            {"source": {"kind": "model_token", "model": "m1", "token": "<en>"}},
            "m1 has no token '<en>'. Did you mean '<end>'?",
        ),
        (
            {"source": {"kind": "model_token", "model": "m1", "token": "<end>"}},
            "the token '<end>' of m1 has the id 1, its embedding 1 rows. Name a token that has a row.",
        ),
        (
            {"source": {"kind": "model_token", "model": "m1", "token_id": 1}},
            "m1 has no token_id 1; its embedding has 1 rows. Write a number from 0 to 0.",
        ),
    ],
)
def test_a_row_that_is_not_there_is_refused(tmp_path: Path, entry: dict[str, Any], said: str) -> None:
    models = _models(tmp_path, bpe(_BASE), bpe(["z"], added=["<end>"]), rows={1: 1})
    (problem,) = refused(models, **_tokens(a=entry))
    assert said in problem


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe(_BASE), bpe(["z"]))
    wish = _tokens(a={"source": "m1"}, q={"source": "m0"}) | {"chat_template": "auto"}
    assert len(refused(models, **wish)) == 3


def test_notes_count_tokens_model_by_model(tmp_path: Path) -> None:
    models = _models(tmp_path, bpe(_BASE), bpe(["a", "c", "z", "y"]))
    notes = planned(models, tokenizer_source="base").notes
    assert "m0: 3 tokens with equal ids" in notes
    assert "m1: 1 tokens with equal ids, 1 moved ('c'), 1 added ('b'), 2 dropped ('z', 'y')" in notes


def _sources(
    ids: Sequence[Sequence[int]],
    *,
    fixed: Mapping[int, tuple[int, int] | None] | None = None,
    forced: Sequence[int] = (),
    base: int = 0,
) -> RowSources:
    rows = {at: FixedRow(f"recipe.yml:{at}:1", f"row {at}", term) for at, term in (fixed or {}).items()}
    arrays = {source: np.array(each, dtype=np.int64) for source, each in enumerate(ids)}
    return RowSources(ids=arrays, base=base, fixed=rows, forced=frozenset(forced))


def _terms(sources: RowSources, member: int, holders: Mapping[int, int], row: int) -> list[tuple[int, int]]:
    """The rule for one row, said plainly."""
    has = {source: int(sources.ids[source][row]) for source in sorted(holders)}
    has = {source: own for source, own in has.items() if ABSENT != own < holders[source]}
    if member in has and row not in sources.forced:
        return [(member, has[member])]
    if row in sources.fixed:
        term = sources.fixed[row].origin
        return [] if term is None else [term]
    if sources.base in has:
        return [(sources.base, has[sources.base])]
    return list(has.items())


def test_own_rows_then_the_base_then_the_mean_then_zeros() -> None:
    sources = _sources([[0, 1, 2, -1, -1, -1], [-1, 5, -1, 7, -1, -1], [3, -1, -1, 4, 9, -1]])
    everybody = {0: 99, 1: 99, 2: 99}
    assert sources.runs(0, everybody) == (
        RowRun(0, 3, ((0, 0),)),
        RowRun(3, 1, ((1, 7), (2, 4))),
        RowRun(4, 1, ((2, 9),)),
        RowRun(5, 1, ()),
    )
    assert sources.runs(1, everybody)[:3] == (
        RowRun(0, 1, ((0, 0),)),
        RowRun(1, 1, ((1, 5),)),
        RowRun(2, 1, ((0, 2),)),
    )
    assert sources.defaults().tolist() == [1, 1, 1, 2, 1, 0]


def test_a_fixed_row_of_a_source_without_the_tensor_is_refused_with_its_place() -> None:
    sources = _sources([[0, 1], [0, -1], [5, 6]], fixed={1: (2, 6)})
    with pytest.raises(PlanError, match=r"recipe\.yml:1:1: row 1 lacks a tensor that needs it"):
        sources.runs(1, {0: 99, 1: 99})
    assert sources.runs(1, {0: 99, 1: 99, 2: 99})[-1] == RowRun(1, 1, ((2, 6),))


def test_a_fixed_row_beyond_a_tensor_is_refused_with_its_place() -> None:
    sources = _sources([[0, 1], [0, -1]], fixed={1: (0, 6)})
    with pytest.raises(PlanError, match="or that row of it"):
        sources.runs(1, {0: 6, 1: 6})
    assert sources.runs(1, {0: 7, 1: 6})[-1] == RowRun(1, 1, ((0, 6),))


@st.composite
def _cases(draw: st.DrawFn) -> tuple[RowSources, dict[int, int], int]:
    num_sources, num_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    row = st.one_of(st.integers(ABSENT, 14), st.just(ABSENT))
    plain = st.lists(row, min_size=num_tokens, max_size=num_tokens)
    # Consecutive rows, so that runs come about.
    shifted = st.integers(0, 3).map(lambda start: list(range(start, start + num_tokens)))
    ids = [draw(st.one_of(plain, shifted)) for _ in range(num_sources)]
    rows = st.integers(6, 18)
    holders = draw(st.dictionaries(st.integers(0, num_sources - 1), rows, min_size=1))
    member = draw(st.sampled_from(sorted(holders)))
    term = st.tuples(st.sampled_from(sorted(holders)), st.integers(0, 5))
    at = st.integers(0, num_tokens - 1)
    fixed = draw(st.dictionaries(at, st.one_of(st.none(), term), max_size=3))
    forced = draw(st.lists(at, max_size=3))
    base = draw(st.integers(0, num_sources - 1))
    return _sources(ids, fixed=fixed, forced=forced, base=base), holders, member


@settings(deadline=None, max_examples=75)
@given(_cases())
def test_runs_say_what_the_rules_say_row_by_row(case: tuple[RowSources, dict[int, int], int]) -> None:
    sources, holders, member = case
    runs = sources.runs(member, holders)
    num_tokens = len(sources.ids[0])
    found = [[(s, first + at) for s, first in run.inputs] for run in runs for at in range(run.count)]
    assert found == [_terms(sources, member, holders, row) for row in range(num_tokens)]
    ends = [run.to_row + run.count for run in runs]
    assert [run.to_row for run in runs] == [0, *ends[:-1]]
    assert ends[-1] == num_tokens
    # They are as long as can be.
    for run, following in pairwise(runs):
        grown = tuple((source, first + run.count) for source, first in run.inputs)
        assert grown != following.inputs
