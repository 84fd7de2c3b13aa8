"""Heads and embeddings: tied, of their own, and of vocabularies of different length."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import llama_config, llama_shapes, read_tensors, tiny_llama, write_checkpoint
from kits.marks import one_in
from kits.merges import merge_here
from kits.plan_maker import Planned, good, planned, refusals
from kits.recipe_maker import linear, piece, stack
from kits.tokenizer_maker import word_level

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def _llama(root: Path, seed: int, *, tie: bool | None, head: str = "absent", **config: Any) -> Path:
    """A Llama whose head is ``absent``, ``equal`` to the embedding, or ``own``; no flag where tie is None."""
    tiny_llama(root, seed, layers=2, tie=head != "own")
    tensors = read_tensors(root)
    if head == "equal":
        tensors[HEAD] = tensors[EMBEDDING].clone()
    fields = {**llama_config(layers=2), **config, "tie_word_embeddings": tie}
    if tie is None:
        del fields["tie_word_embeddings"]
    return write_checkpoint(root, tensors, fields)


def _linear(*models: Path, **more: Any) -> Planned:
    return good(linear(*models, **more))


def _stack(*models: Path) -> Planned:
    return good(stack(*(piece(m, 0, 2) for m in models)))


def _flag(made: Planned) -> object:
    return made.config.get("tie_word_embeddings")


def test_tied_parents_that_store_no_head_give_none(tmp_path: Path) -> None:
    made = _linear(_llama(tmp_path / "a", 1, tie=True), _llama(tmp_path / "b", 2, tie=True))
    assert HEAD not in made.names()
    assert _flag(made) is True
    assert made.plan.manifest["tie"]["tied"] is None


@pytest.mark.parametrize(("first", "written"), [("equal", True), ("absent", False)])
def test_a_stored_copy_of_the_embedding_follows_the_lead(tmp_path: Path, first: str, written: bool) -> None:
    second = "absent" if first == "equal" else "equal"
    made = _linear(
        _llama(tmp_path / "a", 1, tie=True, head=first), _llama(tmp_path / "b", 2, tie=True, head=second)
    )
    assert (HEAD in made.names()) is written
    assert _flag(made) is True
    stored = 0 if first == "equal" else 1
    assert made.fate(stored, HEAD) == ("dropped", "equals_embedding", EMBEDDING)
    if written:
        assert made.reads(HEAD) == made.reads(EMBEDDING) == [(0, EMBEDDING), (1, EMBEDDING)]
        assert {row["copy_of"] >= 0 for name in (HEAD, EMBEDDING) for row in made.rows(name)} == {True, False}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("one", "other", "reads", "flag"),
    [
        # A stored head that differs is not dropped, whatever the config says.
        ((True, "own"), (True, "own"), (HEAD, HEAD), False),
        ((False, "own"), (False, "own"), (HEAD, HEAD), False),
        ((None, "own"), (None, "own"), (HEAD, HEAD), None),
        ((False, "own"), (True, "absent"), (HEAD, EMBEDDING), False),
        ((None, "absent"), (None, "own"), (EMBEDDING, HEAD), False),
        ((True, "absent"), (False, "own"), (EMBEDDING, HEAD), False),
        ((True, "equal"), (False, "own"), (EMBEDDING, HEAD), False),
    ],
)
def test_a_head_is_made_of_what_each_parent_has_for_it(
    tmp_path: Path, one: tuple[Any, str], other: tuple[Any, str], reads: tuple[str, str], flag: bool | None
) -> None:
    parents = [
        _llama(tmp_path / str(seed), seed, tie=tie, head=head)
        for seed, (tie, head) in enumerate((one, other))
    ]
    made = _linear(*parents)
    assert made.reads(HEAD) == list(enumerate(reads))
    assert _flag(made) is flag
    assert made.fate(0, HEAD)[0] == "merged" if reads[0] == HEAD else True
    assert made.reads(EMBEDDING) == [(0, EMBEDDING), (1, EMBEDDING)]
    if one[0] and reads[0] == EMBEDDING:
        tie = made.plan.manifest["tie"]
        assert (tie["head"], tie["embedding"], tie["tied"]) == (HEAD, EMBEDDING, False)
        assert "both are written" in tie["reason"]


@pytest.mark.parametrize("ends", [((True, "absent"), (False, "own")), ((False, "own"), (True, "absent"))])
def test_a_stack_ends_in_the_head_of_its_last_model(
    tmp_path: Path, ends: tuple[tuple[bool, str], ...]
) -> None:
    """Whatever the config says, which is the first one's."""
    a, b = (_llama(tmp_path / str(n), n, tie=tie, head=head) for n, (tie, head) in enumerate(ends))
    made = _stack(a, b)
    assert made.reads(HEAD) == [(1, HEAD if ends[1][1] == "own" else EMBEDDING)]
    assert made.reads(EMBEDDING) == [(0, EMBEDDING)]
    assert _flag(made) is False


def test_a_headless_lead_refuses_a_head(tmp_path: Path) -> None:
    a, b = _llama(tmp_path / "a", 1, tie=False), _llama(tmp_path / "b", 2, tie=False, head="own")
    (problem,) = refusals(linear(a, b))
    assert f"1 of its tensors have no place in the output, since {a} lacks them: {HEAD}." in problem


def test_a_head_follows_the_base_of_delta_methods(tmp_path: Path) -> None:
    base = _llama(tmp_path / "base", 1, tie=True)
    tuned = _llama(tmp_path / "tuned", 2, tie=False, head="own")
    entries = [{"model": tuned, "parameters": {"weight": 1}}]
    made = good({"merge_method": "task_arithmetic", "base_model": base, "models": entries})
    assert made.reads(HEAD) == [(0, EMBEDDING), (1, HEAD)]
    assert _flag(made) is False


def test_a_tied_head_draws_and_filters_as_its_embedding_does(tmp_path: Path) -> None:
    """Or equal bytes in all parents would come out different."""
    base = _llama(tmp_path / "base", 1, tie=True, head="equal")
    tuned = _llama(tmp_path / "tuned", 2, tie=True, head="equal")
    weight = [{"filter": "embed_tokens", "value": 0.25}, {"value": 1}]
    entries = [{"model": tuned, "parameters": {"weight": weight, "density": 0.5}}]
    made = good({"merge_method": "dare_linear", "base_model": base, "models": entries})
    assert made.weights(HEAD) == made.weights(EMBEDDING) == [0.25]
    (part,) = made.parts(made.rows(HEAD)[0])
    assert part["logical"] == EMBEDDING
    assert _flag(made) is True


@pytest.mark.parametrize("head", ["absent", "equal"])
def test_a_stack_of_tied_models_ends_in_the_last_one_s_embedding(tmp_path: Path, head: str) -> None:
    """Each model's layers read its own embedding and are read by it: the tie is cut."""
    a = _llama(tmp_path / "a", 1, tie=True, head=head)
    b = _llama(tmp_path / "b", 2, tie=True, head=head)
    made = _stack(a, b)
    assert made.reads(EMBEDDING) == [(0, EMBEDDING)]
    assert made.reads(HEAD) == [(1, EMBEDDING)]
    assert _flag(made) is False
    assert made.fate(1, EMBEDDING) == ("copied", "one_source", HEAD)


def test_a_stack_that_ends_where_it_began_keeps_one_embedding(tmp_path: Path) -> None:
    a, b = _llama(tmp_path / "a", 1, tie=True), _llama(tmp_path / "b", 2, tie=True)
    made = _stack(a, b, a)
    assert HEAD not in made.names()
    assert _flag(made) is True
    assert made.fate(1, EMBEDDING) == ("dropped", "outside_slices", "")


def _ends(models: tuple[Path, ...], others: tuple[Path, ...], **more: Any) -> dict[str, Any]:
    """Two slices, each merged of its own models with other weights."""
    slices = [
        piece(members, layer, layer + 1, parameters={"weight": layer + 1})
        for layer, members in enumerate((models, others))
    ]
    return {"merge_method": "linear", "slices": slices, **more}


def test_ends_of_the_same_sources_stay_tied_whatever_their_weights(tmp_path: Path) -> None:
    a, b = _llama(tmp_path / "a", 1, tie=True), _llama(tmp_path / "b", 2, tie=True)
    for others in ((a, b), (b, a)):
        made = good(_ends((a, b), others))
        assert HEAD not in made.names()
        assert _flag(made) is True


def test_a_base_that_leads_both_ends_keeps_the_tie(tmp_path: Path) -> None:
    a, b, c = (_llama(tmp_path / name, seed, tie=True) for seed, name in enumerate("abc"))
    made = good(_ends((a, b), (a, c), base_model=a))
    assert HEAD not in made.names()
    assert _flag(made) is True
    made = good(_ends((b,), (c,), base_model=a))
    assert made.reads(HEAD) == [(2, EMBEDDING)]


@pytest.mark.parametrize(("family", "written"), [("LlamaForCausalLM", True), ("LlamaModel", False)])
def test_a_silent_config_of_a_model_with_a_head_is_tied(tmp_path: Path, family: str, written: bool) -> None:
    a, b = (_llama(tmp_path / name, 1, tie=None, architectures=[family]) for name in "ab")
    made = _stack(a, b)
    assert (HEAD in made.names()) is written
    assert _flag(made) is (False if written else None)


def _vision(root: Path, seed: int, *, tie: bool) -> Path:
    tiny_llama(root, seed, layers=2, tie=tie)
    tensors = {
        name if name == HEAD else name.replace("model.", "model.language_model.", 1): value
        for name, value in read_tensors(root).items()
    }
    tensors["model.vision_tower.layers.0.w.weight"] = torch.ones(8, 8) * seed
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": llama_config(layers=2, tie=tie),
        "vision_config": {"num_hidden_layers": 1},
        "tie_word_embeddings": tie,
    }
    return write_checkpoint(root, tensors, config)


def test_a_tie_is_left_alone_where_the_text_model_is(tmp_path: Path) -> None:
    a, b = _vision(tmp_path / "a", 1, tie=True), _vision(tmp_path / "b", 2, tie=False)
    towers = {"vision_tower": {"models": [{"model": m} for m in (a, b)]}}
    data = {"merge_method": "linear", "parameters": {"weight": 0.5}, "modules": towers}
    made = good({**data, "base_model": a})
    assert HEAD not in made.names()
    assert _flag(made) is True
    assert made.plan.manifest["tie"] == {
        "head": "",
        "embedding": "",
        "tied": None,
        "reason": "the text model is copied, and with it what it ties",
    }
    made = good({**data, "base_model": b})
    assert made.reads(HEAD) == [(0, HEAD)]
    assert _flag(made) is False


def test_a_head_whose_role_is_not_told_by_its_name_meets_every_member(tmp_path: Path) -> None:
    """Slices of unlike numbers of sources: the head's members are those of its own slice."""
    a, b = (_llama(tmp_path / name, seed, tie=True, head="equal") for seed, name in enumerate("ab"))
    slices = [piece(a, 0, 1), piece((a, b), 1, 2)]
    made = good({"merge_method": "linear", "slices": slices, "parameters": {"weight": 1}})
    assert made.reads(HEAD) == [(0, EMBEDDING), (1, EMBEDDING)]
    assert made.reads(EMBEDDING) == [(0, EMBEDDING)]
    assert _flag(made) is False


def test_a_model_without_a_token_embedding_has_no_tie(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "a", {"w": torch.zeros(2, 2)}, {"model_type": "thing"})
    made = good(linear(root))
    assert made.plan.manifest["tie"] == {
        "head": "",
        "embedding": "",
        "tied": None,
        "reason": "the model has no token embedding that a head could share",
    }


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Three Llamas in float32 with 64, 70 and 60 rows."""
    sizes = {"a": 64, "b": 70, "c": 60}
    a, b, c = (
        tiny_llama(tmp_path / name, seed, dtype=torch.float32, vocab=rows)
        for seed, (name, rows) in enumerate(sizes.items())
    )
    return a, b, c


def test_other_numbers_of_rows_are_refused_with_three_ways_out(models: tuple[Path, Path, Path]) -> None:
    a, b, c = models
    problems = refusals(linear(a, b, c))
    assert len(problems) == 2
    assert f"{b}: 2 of its tensors have 70 rows, one for each token, where {a} has 64" in problems[0]
    assert f"{c}: 2 of its tensors have 60 rows" in problems[1]
    for word in ("tokenizer_source: union", "embedding_sizes: common", "embedding_sizes: pad"):
        assert word in problems[0]


def test_the_refusal_counts_tokens_that_agree_moved_or_are_new(tmp_path: Path) -> None:
    def tokenizer(vocabulary: Mapping[str, int]) -> dict[str, str]:
        model = {"type": "WordLevel", "vocab": dict(vocabulary), "unk_token": "a"}
        return {"tokenizer.json": json.dumps({"version": "1.0", "added_tokens": [], "model": model})}

    generator = torch.Generator().manual_seed(0)

    def model(name: str, vocabulary: Mapping[str, int], rows: int) -> Path:
        tensors = {EMBEDDING: torch.randn(rows, 8, generator=generator)}
        config = {**llama_config(layers=0, hidden=8, vocab=rows, tie=True)}
        return write_checkpoint(tmp_path / name, tensors, config, extra=tokenizer(vocabulary))

    one = model("one", {"a": 0, "b": 1, "c": 2}, 3)
    two = model("two", {"a": 0, "c": 1, "b": 2, "d": 3}, 4)
    (problem,) = refusals(linear(one, two))
    assert "(1 tokens have the same id in both, 2 another, 1 are only here)" in problem


def test_common_keeps_the_rows_that_all_have(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    recipe = linear(*models, embedding_sizes="common")
    found = merge_here(recipe, tmp_path / "out")
    parents = [read_tensors(each) for each in models]
    for name in (EMBEDDING, HEAD):
        expected = sum(parent[name][:60].double() for parent in parents) / 3
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-6, atol=1e-8)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 60
    made = good(recipe)
    assert made.fate(1, EMBEDDING) == ("merged", "method", EMBEDDING)


def test_pad_keeps_every_row_and_fills_from_those_that_go_on(
    models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    a, b, c = (read_tensors(each)[EMBEDDING].double() for each in models)
    found = merge_here(linear(*models, embedding_sizes="pad"), tmp_path / "out")[EMBEDDING].double()
    assert found.shape == (70, 32)
    torch.testing.assert_close(found[:60], (a[:60] + b[:60] + c[:60]) / 3, rtol=1e-6, atol=1e-8)
    beyond = (a[60:64] + b[60:64]) / 2
    torch.testing.assert_close(found[60:64], (a[60:64] + b[60:64] + beyond) / 3, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found[64:], b[64:], rtol=1e-6, atol=1e-8)


def test_a_base_that_has_a_row_fills_the_gap_alone(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, base, short = models
    recipe = linear(short, base_model=str(base), embedding_sizes="pad") | {"merge_method": "task_arithmetic"}
    found = merge_here(recipe, tmp_path / "out")[EMBEDDING]
    assert torch.equal(found[60:], read_tensors(base)[EMBEDDING][60:])
    torch.testing.assert_close(found[:60], read_tensors(short)[EMBEDDING])


def test_models_of_one_size_need_no_word(tmp_path: Path) -> None:
    a, b = (tiny_llama(tmp_path / name, seed) for seed, name in enumerate("ab"))
    plain, asked = good(linear(a, b)), good(linear(a, b, embedding_sizes="pad"))
    assert plain.rows(EMBEDDING) == asked.rows(EMBEDDING)
    assert len(plain.plan["gathers"]) == len(asked.plan["gathers"]) == 0
    assert asked.config == plain.config


def test_rows_of_another_width_are_no_matter_of_vocabulary(tmp_path: Path) -> None:
    a = tiny_llama(tmp_path / "a", 0)
    b = tiny_llama(tmp_path / "b", 1, hidden=16, vocab=70)
    problems = planned(linear(a, b, embedding_sizes="common")).plan.problems
    assert any("other shapes" in problem.what for problem in problems)


# Vocabulary tensors beside the pair, and sizes that do not fit together

A, B = ("<unk>", "a", "b", "c", "d", "e"), ("<unk>", "e", "d", "c", "b", "a", "new")
"""Words of two vocabularies by id; the second one moves all and adds one."""


def _speaker(
    root: Path, seed: int, words: tuple[str, ...], more: Mapping[str, tuple[int, ...]], **config: Any
) -> Path:
    """A Llama with a row for each word, further tensors, and its tokenizer."""
    made = llama_config(layers=1, hidden=8, vocab=len(words), dtype=torch.float32) | config
    generator = torch.Generator().manual_seed(seed)
    shapes = {**llama_shapes(made), **more}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tokenizer = {"tokenizer.json": json.dumps(word_level(words))}
    return write_checkpoint(root, tensors, made, extra=tokenizer)


def _one_and_other(
    root: Path, shapes: Callable[[int], Mapping[str, tuple[int, ...]]], **config: Any
) -> tuple[Path, Path]:
    """Speakers of both vocabularies, with further tensors by their number of words."""
    a, b = (
        _speaker(root / key, seed, words, shapes(len(words)), **config)
        for seed, (key, words) in enumerate((("a", A), ("b", B)))
    )
    return a, b


def _mean(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The mean of two tables by words, of A's words first."""
    own = [(a[A.index(word)] + b[B.index(word)]) / 2 for word in A]
    return torch.stack([*own, b[B.index("new")]])


@pytest.mark.parametrize(
    "name",
    one_in(
        2,
        [
            "mtp_layers.0.shared_head.head.weight",
            "model.mtp.embed_tokens.weight",
            "encoder.embed_tokens.weight",
        ],
    ),
)
def test_every_embedding_and_head_goes_by_the_tokens(tmp_path: Path, name: str) -> None:
    a, b = _one_and_other(tmp_path, lambda size: {name: (size, 8)})
    found = merge_here(linear(a, b, tokenizer_source="union"), tmp_path / "out")
    for each in (EMBEDDING, HEAD, name):
        torch.testing.assert_close(found[each], _mean(read_tensors(a)[each], read_tensors(b)[each]))


@pytest.mark.parametrize("name", one_in(2, ["lm_head.bias", "predictions.bias", "final_logits_bias"]))
@pytest.mark.parametrize("is_row", one_in(2, [True, False]))
def test_a_bias_for_each_token_goes_by_the_tokens_too(tmp_path: Path, name: str, is_row: bool) -> None:
    a, b = _one_and_other(tmp_path, lambda size: {name: (1, size) if is_row else (size,)})
    found = merge_here(linear(a, b, tokenizer_source="union"), tmp_path / "out")[name]
    assert found.shape == ((1, 7) if is_row else (7,))
    mine, theirs = (read_tensors(each)[name].flatten() for each in (a, b))
    torch.testing.assert_close(found.flatten(), _mean(mine, theirs))


def test_a_bias_beside_its_matrix_is_none_of_tokens(tmp_path: Path) -> None:
    a, b = _one_and_other(tmp_path, lambda _: {"dense.bias": (6,), "dense.weight": (6, 4)})
    found = merge_here(linear(a, b, tokenizer_source="union"), tmp_path / "out")
    mean = (read_tensors(a)["dense.bias"] + read_tensors(b)["dense.bias"]) / 2
    torch.testing.assert_close(found["dense.bias"], mean)


def test_a_vocabulary_tensor_that_lies_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.embed_tokens_per_layer.weight"
    a, b = _one_and_other(tmp_path, lambda _: {name: (4, 8)}, vocab_size_per_layer_input=4)
    (problem,) = refusals(linear(a, b, tokenizer_source="union"))
    assert (
        "the output has 7 rows, one for each token of its vocabulary, and 1 tensors would not have" in problem
    )
    assert f"{name} [4, 8]" in problem
    # With one vocabulary there is nothing to tell.
    c = _speaker(tmp_path / "c", 3, A, {name: (4, 8)}, vocab_size_per_layer_input=4)
    assert good(linear(a, c, tokenizer_source="union")).config["vocab_size"] == 6


def test_a_head_of_fewer_rows_lacks_the_tokens_beyond(tmp_path: Path) -> None:
    a = _speaker(tmp_path / "a", 1, A, {})
    b = _speaker(tmp_path / "b", 2, B, {HEAD: (5, 8)})
    for models in ((a, b), (b, a)):
        found = merge_here(linear(*models, tokenizer_source="union"), tmp_path / f"out-{models[0].name}")
        words = (*A, "new") if models[0] is a else B
        mine, theirs = read_tensors(a)[HEAD], read_tensors(b)[HEAD]
        assert found[HEAD].shape == found[EMBEDDING].shape == (7, 8)
        torch.testing.assert_close(found[HEAD][words.index("a")], mine[1])
        torch.testing.assert_close(found[HEAD][words.index("e")], (mine[5] + theirs[1]) / 2)
        assert not found[HEAD][words.index("new")].any()


@pytest.mark.parametrize("sizes", ["pad", "common"])
def test_tensors_that_would_end_with_other_rows_are_refused(tmp_path: Path, sizes: str) -> None:
    a = tiny_llama(tmp_path / "a", 0, vocab=64)
    b = tiny_llama(tmp_path / "b", 1, vocab=70)
    rule = [{"role": "head", "merge_method": "passthrough", "sources": [str(b if sizes == "common" else a)]}]
    problems = refusals(linear(a, b, embedding_sizes=sizes, methods=rule))
    text = "\n".join(problems)
    assert "would not have the same tokens in the same order: lm_head.weight" in text
    assert "Correct vocab_size" not in text


def test_only_who_takes_part_counts(tmp_path: Path) -> None:
    a, c, b = (tiny_llama(tmp_path / key, n, vocab=rows) for n, (key, rows) in enumerate(
        (("a", 64), ("c", 64), ("b", 70))
    ))  # fmt: skip
    rules = [
        {"role": role, "merge_method": "linear", "sources": [str(a), str(c)]}
        for role in ("head", "embedding")
    ]
    made = good(linear(a, c, b, methods=rules))
    shapes = {row["name"]: row["shape"] for row in made.plan["tensors"].to_pylist()}
    assert shapes[EMBEDDING] == shapes[HEAD] == [64, 32]
    assert made.fate(2, EMBEDDING)[1] == "not_chosen"
    only_b = [{**rule, "sources": [str(b), str(b)][:1], "merge_method": "passthrough"} for rule in rules]
    (problem,) = refusals(linear(a, c, b, methods=only_b))
    assert f"{b}: 2 of its tensors have 70 rows" in problem
    # What is asked for on purpose is consistent, and the config follows.
    assert good(linear(a, c, b, methods=only_b, embedding_sizes="pad")).config["vocab_size"] == 70


def test_a_stack_that_ends_in_another_vocabulary_is_refused(tmp_path: Path) -> None:
    a = tiny_llama(tmp_path / "a", 0, vocab=64)
    b = tiny_llama(tmp_path / "b", 1, vocab=70)
    problems = refusals(stack(piece(a, 0, 1), piece(b, 0, 1)))
    (problem,) = (each for each in problems if "the output has 64 rows" in each)
    assert "lm_head.weight [70, 32]" in problem


def test_rows_that_end_below_special_tokens_are_refused(tmp_path: Path) -> None:
    a = _speaker(tmp_path / "a", 1, A, {}, pad_token_id=5, eos_token_id=[0, 4], bos_token_id=0)
    (a / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "top_k": 5}))
    b = _speaker(tmp_path / "b", 2, A[:4], {})
    problems = refusals(linear(a, b, embedding_sizes="common"))
    assert len(problems) == 2
    assert "2 tokens of its tokenizer ('d', 'e') would have no row: the output has 4 and" in problems[0]
    named = "pad_token_id 5, eos_token_id 4, generation_config.json: eos_token_id 5"
    for each in named.split(", "):
        assert each in problems[1]
    assert "tokenizer_source: base" in problems[1]
    # The other way round nothing is lost.
    assert good(linear(b, a, embedding_sizes="common")).config["vocab_size"] == 4


def test_spare_rows_may_be_cut(tmp_path: Path) -> None:
    a = _speaker(tmp_path / "a", 1, A, {EMBEDDING: (8, 8), HEAD: (8, 8)}, pad_token_id=5)
    b = _speaker(tmp_path / "b", 2, A, {})
    assert good(linear(a, b, embedding_sizes="common")).config["vocab_size"] == 6
