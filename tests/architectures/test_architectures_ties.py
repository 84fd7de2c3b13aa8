"""Heads and embeddings that may be one tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kits import family_names as families

from raymerge.architectures import TiedPair, declared_tie, tied_pair


@pytest.mark.parametrize(
    ("make", "head", "embedding", "declared"),
    [
        (families.llama, "lm_head.weight", "model.embed_tokens.weight", None),
        (families.granitemoe, "lm_head.weight", "model.embed_tokens.weight", True),
        (lambda: families.gpt2(""), "lm_head.weight", "wte.weight", None),
        (families.bert, "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight", None),
        (
            lambda: families.llava(new=True),
            "lm_head.weight",
            "model.language_model.embed_tokens.weight",
            None,
        ),
        (families.whisper, "proj_out.weight", "model.decoder.embed_tokens.weight", None),
    ],
)
def test_pairs_of_families(
    make: Callable[[], families.Family], head: str, embedding: str, declared: bool | None
) -> None:
    family = make()
    assert tied_pair(family.names, family.config) == TiedPair(head, embedding, declared)


@pytest.mark.parametrize(
    ("names", "pair"),
    [
        (["gpt_neox.embed_in.weight", "embed_out.weight"], ("embed_out.weight", "gpt_neox.embed_in.weight")),
        (["roberta.embeddings.word_embeddings.weight"], ("lm_head.decoder.weight",) * 1),
        (["model.decoder.embed_tokens.weight", "lm_head.weight"], ("lm_head.weight",)),
        (["embeddings.word_embeddings.weight"], ("cls.predictions.decoder.weight",)),
        (["x.embed_tokens.weight", "y.lm_head.weight"], ("y.lm_head.weight", "x.embed_tokens.weight")),
    ],
)
def test_pairs_by_table_and_by_role(names: list[str], pair: tuple[str, ...]) -> None:
    found = tied_pair(names, {})
    assert found is not None
    assert (found.head, found.embedding)[: len(pair)] == pair


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.3.embed_tokens.weight", "lm_head.weight"],
        ["a.embed_tokens.weight", "b.embed_tokens.weight"],
        ["x.embed_tokens.weight", "y.lm_head.weight", "z.lm_head.weight"],
    ],
)
def test_no_pair_where_it_would_be_a_guess(names: list[str]) -> None:
    assert tied_pair(names, {"tie_word_embeddings": True}) is None


@pytest.mark.parametrize(
    ("config", "declared"),
    [
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
        ({"tie_word_embeddings": None, "llm_config": {"tie_word_embeddings": True}}, True),
        ({"thinker_config": {"text_config": {"tie_word_embeddings": True}}}, True),
    ],
)
def test_what_a_config_declares(config: dict[str, object], declared: bool | None) -> None:
    assert declared_tie(config) is declared


def test_a_head_and_an_embedding_of_two_spellings_are_a_pair() -> None:
    """As transformers saves DeepSeek-V4: the embedding by its own name, the head by the Hub's."""
    names = ["model.embed_tokens.weight", "head.weight", "model.layers.0.attn.wq_a.weight"]
    pair = TiedPair("head.weight", "model.embed_tokens.weight", False)
    assert tied_pair(names, {"model_type": "deepseek_v4", "tie_word_embeddings": False}) == pair
    assert tied_pair(names[:1], {}) == TiedPair("lm_head.weight", "model.embed_tokens.weight", None)
