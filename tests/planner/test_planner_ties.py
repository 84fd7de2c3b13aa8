"""Heads that are the embedding, heads of their own, and what a merge makes of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint
from kits.plan_maker import Planned, good, refusals

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def _llama(
    root: Path, seed: int, *, tie: bool | None, head: str = "absent", layers: int = 2, **config: Any
) -> Path:
    """A Llama whose head is ``absent``, ``equal`` to the embedding, or ``own``; no flag where tie is None."""
    tiny_llama(root, seed, layers=layers, tie=head != "own")
    tensors = read_tensors(root)
    if head == "equal":
        tensors[HEAD] = tensors[EMBEDDING].clone()
    fields = {**llama_config(layers=layers), **config, "tie_word_embeddings": tie}
    if tie is None:
        del fields["tie_word_embeddings"]
    return write_checkpoint(root, tensors, fields)


def _linear(*models: Path, **more: Any) -> Planned:
    entries = [{"model": model} for model in models]
    return good({"merge_method": "linear", "models": entries, "parameters": {"weight": 1}, **more})


def _stack(*models: Path) -> Planned:
    slices = [{"sources": [{"model": m, "layer_range": [0, 2]}]} for m in models]
    return good({"merge_method": "passthrough", "slices": slices})


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


@pytest.mark.parametrize(
    ("one", "other", "reads", "flag"),
    [
        # A stored head that differs is not dropped, whatever the config says.
        ((True, "own"), (True, "own"), (HEAD, HEAD), False),
        ((False, "own"), (False, "own"), (HEAD, HEAD), False),
        ((None, "own"), (None, "own"), (HEAD, HEAD), None),
        ((False, "own"), (True, "absent"), (HEAD, EMBEDDING), False),
        ((None, "absent"), (None, "own"), (EMBEDDING, HEAD), False),
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


@pytest.mark.parametrize("tied_head", ["absent", "equal"])
def test_a_tie_is_cut_where_one_parent_has_a_head_of_its_own(tmp_path: Path, tied_head: str) -> None:
    made = _linear(
        _llama(tmp_path / "a", 1, tie=True, head=tied_head), _llama(tmp_path / "b", 2, tie=False, head="own")
    )
    assert made.reads(HEAD) == [(0, EMBEDDING), (1, HEAD)]
    assert made.reads(EMBEDDING) == [(0, EMBEDDING), (1, EMBEDDING)]
    assert _flag(made) is False
    tie = made.plan.manifest["tie"]
    assert (tie["head"], tie["embedding"], tie["tied"]) == (HEAD, EMBEDDING, False)
    assert "both are written" in tie["reason"]


def test_a_headless_lead_refuses_a_head(tmp_path: Path) -> None:
    a, b = _llama(tmp_path / "a", 1, tie=False), _llama(tmp_path / "b", 2, tie=False, head="own")
    data = {"merge_method": "linear", "models": [{"model": a}, {"model": b}], "parameters": {"weight": 1}}
    (problem,) = refusals(data)
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
        {
            "sources": [{"model": m, "layer_range": [layer, layer + 1]} for m in members],
            "parameters": {"weight": layer + 1},
        }
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
    """A model of text and images."""
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
    a, b = (
        _llama(tmp_path / "a", 1, tie=True, head="equal"),
        _llama(tmp_path / "b", 2, tie=True, head="equal"),
    )
    one = {"sources": [{"model": a, "layer_range": [0, 1]}]}
    two = {"sources": [{"model": m, "layer_range": [1, 2]} for m in (a, b)]}
    made = good({"merge_method": "linear", "slices": [one, two], "parameters": {"weight": 1}})
    assert made.reads(HEAD) == [(0, EMBEDDING), (1, EMBEDDING)]
    assert made.reads(EMBEDDING) == [(0, EMBEDDING)]
    assert _flag(made) is False


def test_a_model_without_a_token_embedding_has_no_tie(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "a", {"w": torch.zeros(2, 2)}, {"model_type": "thing"})
    made = good({"merge_method": "linear", "models": [{"model": root}], "parameters": {"weight": 1}})
    assert made.plan.manifest["tie"] == {
        "head": "",
        "embedding": "",
        "tied": None,
        "reason": "the model has no token embedding that a head could share",
    }
