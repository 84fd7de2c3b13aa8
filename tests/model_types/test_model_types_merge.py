"""Models of every type: merged, their modules, rules, stacks and ties."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kits.checkpoint_maker import read_tensors
from kits.marks import one_in, slow_but
from kits.model_parents import Parents, assert_same_state, load_as_strictly, save
from kits.model_types import ModelType
from kits.model_types_decoders import BOUND, DECODERS, DENSE, RECURRENT, SPARSE
from kits.model_types_others import ENCODERS, OTHERS, SEEING
from kits.recipe_maker import stack
from safetensors import safe_open

import raymerge
from raymerge.architectures.depth import restack_config
from raymerge.architectures.roles import module_finder, stacks, tied_pair
from raymerge.architectures.rules import load_rules
from raymerge.errors import PlanError

ALL: Mapping[str, ModelType] = {kind.name: kind for kind in (*DECODERS, *OTHERS)}
INLINE = raymerge.RunOptions(inline=True)
ParentsOf = Callable[[ModelType], Parents]

AVERAGED = (
    *("llama", "qwen3", "olmo2", "phi3", "gpt2", "gpt_neox", "falcon", "mpt", "gpt_bigcode", "mamba2"),
    *("rwkv", "zamba2", "bert", "distilbert", "deberta", "wav2vec2", "bart", "switch_transformers"),
    *("pegasus", "llava", "qwen2_vl", "qwen3_vl_moe", "mllama"),
)
"""Families of every kind of layers, and those with rules of their own that no other fast test merges."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", slow_but(ALL, *AVERAGED))
def test_the_mean_of_two_models(name: str, parents_of: ParentsOf, tmp_path: Path) -> None:
    kind, parents = ALL[name], parents_of(ALL[name])
    recipe = {"merge_method": "linear", "models": parents.entries(weight=0.5)}
    raymerge.submit(recipe, tmp_path / "out", INLINE)
    model = load_as_strictly(kind, tmp_path / "out", parents.info)
    assert_same_state(model.state_dict(), parents.mean())
    assert kind.run(model).isfinite().all()


PARTED: Mapping[str, ModelType] = {kind.name: kind for kind in OTHERS}

TEXT = "text_decoder"
PARTS: Mapping[str, Mapping[str, str | tuple[str, ...]]] = {
    "llava": {
        TEXT: "language_model.",
        "vision_tower": "vision_tower.",
        "multi_modal_projector": "multi_modal_projector.",
    },
    "qwen2_5_vl": {
        TEXT: ("model.", "lm_head."),
        "vision_tower": ("visual.blocks.", "visual.patch_embed."),
        "multi_modal_projector": "visual.merger.",
    },
    "gemma3": {TEXT: "language_model.", "vision_tower": "vision_tower."},
    "idefics3": {
        TEXT: ("model.text_model.", "lm_head."),
        "vision_model": "model.vision_model.",
        "multi_modal_projector": "model.connector.",
    },
    "mllama": {TEXT: "language_model.", "vision_model": "vision_model."},
    "clip": {"vision_model": "vision_model."},
    "qwen2_audio": {TEXT: "language_model.", "audio_tower": "audio_tower."},
    "t5": {"encoder": "encoder.", "decoder": "decoder.", "shared": "shared."},
    "bart": {"encoder": "model.encoder.", "decoder": ("model.decoder.", "final_logits_bias")},
    "led": {"encoder": "led.encoder.", "shared": "led.shared."},
    "whisper": {"encoder": "model.encoder.", "decoder": "model.decoder."},
    "t5gemma": {"encoder": "model.encoder.", "decoder": "model.decoder."},
}
"""For each family modules that a recipe can name, and how the names of their tensors begin on disk."""
CASES = [(name, module) for name, parts in PARTS.items() for module in parts]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "module"), one_in(5, CASES))
def test_one_module_is_merged_and_the_others_copied(
    name: str, module: str, parents_of: ParentsOf, tmp_path: Path
) -> None:
    kind, parents = PARTED[name], parents_of(PARTED[name])
    recipe = {
        "merge_method": "linear",
        "base_model": str(parents.one),
        "modules": {module: {"models": parents.entries(weight=0.5)}},
    }
    raymerge.submit(recipe, tmp_path / "out", raymerge.RunOptions(inline=True))
    one, two, out = (read_tensors(path) for path in (parents.one, parents.two, tmp_path / "out"))
    assert set(out) == set(one)
    for key, tensor in out.items():
        if key.startswith(PARTS[name][module]):
            torch.testing.assert_close(tensor, (one[key] + two[key]) / 2, msg=key)
        else:
            assert tensor.numpy().tobytes() == one[key].numpy().tobytes(), key
    assert any(not torch.equal(out[key], one[key]) for key in out)
    load_as_strictly(kind, tmp_path / "out", parents.info)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_and_decoder_merged_in_ways_of_their_own(
    name: str, parents_of: ParentsOf, tmp_path: Path
) -> None:
    kind, parents = PARTED[name], parents_of(PARTED[name])
    one, two = ({"model": str(path)} for path in (parents.one, parents.two))
    weigh = [[0.25, 0.75], [0.75, 0.25]]
    modules = {
        module: {"models": [one | _weight(first), two | _weight(second)]}
        for module, (first, second) in zip(("encoder", "decoder"), weigh, strict=True)
    }
    recipe = {"merge_method": "linear", "base_model": str(parents.one), "modules": modules}
    raymerge.submit(recipe, tmp_path / "out", raymerge.RunOptions(inline=True))
    model = load_as_strictly(kind, tmp_path / "out", parents.info)
    first, second, out = (read_tensors(path) for path in (parents.one, parents.two, tmp_path / "out"))
    for key, tensor in out.items():
        side = key.removeprefix("model.").partition(".")[0]
        share = {"encoder": 0.75, "shared": 0.0}.get(side, 0.25)
        torch.testing.assert_close(tensor, first[key] * (1 - share) + second[key] * share, msg=key)
    assert kind.run(model).isfinite().all()


def _weight(value: float) -> dict[str, dict[str, float]]:
    return {"parameters": {"weight": value}}


BERT_LAYER = "encoder.layer.{}.attention.self.query.weight"


def layers(pattern: str, count: int) -> list[str]:
    return [pattern.format(number) for number in range(count)]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("led.encoder.layers.0.fc1.weight", "encoder"),
        ("led.decoder.layers.0.fc1.weight", "decoder"),
        ("led.shared.weight", "shared"),
        ("lm_head.weight", "decoder"),
    ],
)
def test_modules_below_the_name_of_an_inner_model(name: str, module: str) -> None:
    names = [*layers("led.encoder.layers.{}.fc1.weight", 2), *layers("led.decoder.layers.{}.fc1.weight", 2)]
    config = {"model_type": "led", "encoder_layers": 2, "decoder_layers": 2}
    assert module_finder(config, stacks(names, config))(name) == module


def test_a_connector_is_the_projector() -> None:
    config = {"model_type": "idefics3", "text_config": {"num_hidden_layers": 2}}
    found = stacks(layers("model.text_model.layers.{}.mlp.up_proj.weight", 2), config)
    name = "model.connector.modality_projection.proj.weight"
    assert module_finder(config, found)(name) == "multi_modal_projector"


def test_a_vision_encoder_on_its_own_has_a_main_stack() -> None:
    found = stacks(layers(f"vit.{BERT_LAYER}", 2), {"model_type": "vit", "num_hidden_layers": 2})
    assert [(stack.prefix, stack.is_main) for stack in found] == [("vit.encoder.layer", True)]


def test_a_vision_tower_beside_text_has_none() -> None:
    names = [*layers(f"vit.{BERT_LAYER}", 2), *layers("model.layers.{}.mlp.up_proj.weight", 2)]
    found = stacks(names, {"num_hidden_layers": 2})
    assert [(stack.prefix, stack.is_main) for stack in found] == [
        ("vit.encoder.layer", False),
        ("model.layers", True),
    ]


def test_groups_of_shared_layers_are_counted_as_layers() -> None:
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"
    config = {"model_type": "albert", "num_hidden_layers": 12, "num_hidden_groups": 1}
    (stack,) = stacks([name], config)
    assert (stack.prefix, stack.num_layers, stack.is_main) == ("albert.encoder.albert_layer_groups", 1, True)
    after, sentences = restack_config(config, [0, 0])
    assert (after["num_hidden_groups"], after["num_hidden_layers"], sentences) == (2, 12, ())


def test_a_list_of_kinds_counts_the_layers_where_no_field_does() -> None:
    config = {"layers_block_type": ["mamba", "attention", "mlp"], "mtp_layers_block_type": ["a", "b", "c"]}
    after, sentences = restack_config(config, [2, 0])
    assert after == {**config, "layers_block_type": ["mlp", "mamba"]}
    assert sentences == ()


@pytest.mark.parametrize(
    ("config", "order", "after"),
    [
        (
            {"attention_layers": ["g", "l", "g", "l"], "attention_types": [[["g", "l"], 2]]},
            [0, 0, 3],
            {"attention_layers": ["g", "g", "l"], "attention_types": [[["g", "g", "l"], 1]]},
        ),
        (
            {"attention_layers": ["g", "l", "g", "l"], "attention_types": [[["g", "l"], 2]]},
            [2, 1, 0, 3],
            {"attention_layers": ["g", "l", "g", "l"], "attention_types": [[["g", "l"], 2]]},
        ),
        ({"hybrid_layer_ids": [1, 3]}, [1, 0], {"hybrid_layer_ids": [0]}),
    ],
)
def test_kinds_of_layers_follow(config: dict[str, Any], order: list[int], after: dict[str, Any]) -> None:
    found, sentences = restack_config({"num_hidden_layers": 4, **config}, order)
    assert found == {"num_hidden_layers": len(order), **after}
    assert sentences == ()


def test_shared_blocks_allow_no_other_order() -> None:
    config = {"num_hidden_layers": 4, "num_mem_blocks": 2}
    (sentence,) = restack_config(config, [0, 1])[1]
    assert "num_mem_blocks is 2" in sentence
    assert restack_config(config, [0, 1, 2, 3])[1] == ()


def test_a_family_adds_to_the_general_rules_and_takes_their_place() -> None:
    general, albert = load_rules(None), load_rules("albert")
    assert albert.depth.counts == ("num_hidden_groups",)
    assert albert.depth.index_lists == general.depth.index_lists
    assert load_rules("bert-generation").ties[1:] == general.ties
    assert load_rules("../bert-generation").ties == general.ties


ALONE = {kind.name: kind for kind in ENCODERS if kind.name != "albert"}
"""Encoders. ALBERT stores one layer and runs it again and again."""
TIED = tuple(kind for kind in ALONE.values() if "tied" in kind.groups)
"""Those whose head and its bias are tied, a tie that a stack of two models parts."""
STACKED = {kind.name: kind for kind in (*DENSE, *SPARSE, *RECURRENT, *SEEING, *TIED)}
BOUND_BY_NAME = {kind.name: kind for kind in BOUND}
_NUMBER = re.compile(r"^(?P<stack>[\w.]*?)\.(?P<layer>\d+)\.")


def stacked(pieces: Sequence[tuple[Path, tuple[int, int]]]) -> dict[str, object]:
    slices = [{"sources": [{"model": str(path), "layer_range": list(layers)}]} for path, layers in pieces]
    return stack(*slices)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", one_in(9, STACKED))
def test_layers_of_two_models(name: str, parents_of: ParentsOf, tmp_path: Path) -> None:
    kind, parents = STACKED[name], parents_of(STACKED[name])
    recipe = stacked([(parents.one, (0, 2)), (parents.two, (1, 3))])
    raymerge.submit(recipe, tmp_path / "out", INLINE)
    model: Any = load_as_strictly(kind, tmp_path / "out", parents.info)
    origins = [(parents.state_one, 0), (parents.state_one, 1), (parents.state_two, 1), (parents.state_two, 2)]
    stack = _layers_name(parents)
    for key, tensor in model.state_dict().items():
        found = _NUMBER.match(key)
        if found and found["stack"] == stack:
            state, layer = origins[int(found["layer"])]
            assert torch.equal(tensor, state[f"{stack}.{layer}.{key[found.end() :]}"]), key
        else:
            assert any(torch.equal(tensor, each[key]) for each in (parents.state_one, parents.state_two)), key
    _ends_are_right(model, parents)
    _kinds_are_right(model.config, parents.like.config, layers=[0, 1, 1, 2])
    assert kind.run(model).isfinite().all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", one_in(4, ALONE))
def test_layers_of_one_encoder(name: str, parents_of: ParentsOf, tmp_path: Path) -> None:
    kind, parents = ALONE[name], parents_of(ALONE[name])
    recipe = stacked([(parents.one, (0, 2)), (parents.one, (1, 2))])
    raymerge.submit(recipe, tmp_path / "out", INLINE)
    model: Any = load_as_strictly(kind, tmp_path / "out", parents.info)
    assert model.config.num_hidden_layers == 3
    assert kind.run(model).isfinite().all()
    stack = _layers_name(parents)
    state = model.state_dict()
    for key in state:
        if key.startswith(f"{stack}.2."):
            assert torch.equal(state[key], parents.state_one[key.replace(f"{stack}.2.", f"{stack}.1.")]), key


def test_kinds_of_layers_that_are_told_twice(parents_of: ParentsOf, tmp_path: Path) -> None:
    parents = parents_of(STACKED["gpt_neo"])
    recipe = stacked([(parents.one, (0, 1)), (parents.one, (2, 4))])
    config = raymerge.plan(recipe).manifest["config"]
    assert config["attention_layers"] == ["global", "global", "local"]
    assert config["attention_types"] == [[["global", "global", "local"], 1]]


def test_a_group_of_layers_is_one_layer(parents_of: ParentsOf, tmp_path: Path) -> None:
    kind = next(kind for kind in ENCODERS if kind.name == "albert")
    parents = parents_of(kind)
    raymerge.submit(stacked([(parents.one, (0, 1)), (parents.one, (0, 1))]), tmp_path / "out", INLINE)
    model: Any = load_as_strictly(kind, tmp_path / "out", parents.info)
    assert (model.config.num_hidden_groups, model.config.num_hidden_layers) == (2, 3)
    assert kind.run(model).isfinite().all()


@pytest.mark.parametrize(("name", "field"), [("jamba", "attn_layer_period"), ("zamba2", "num_mem_blocks")])
def test_an_order_that_no_config_has_is_refused(name: str, field: str, parents_of: ParentsOf) -> None:
    parents = parents_of(BOUND_BY_NAME[name])
    with pytest.raises(PlanError, match=field):
        raymerge.plan(stacked([(parents.one, (0, 2)), (parents.two, (1, 3))])).require()


def test_an_order_that_keeps_the_period_is_fine(parents_of: ParentsOf, tmp_path: Path) -> None:
    kind = BOUND_BY_NAME["jamba"]
    parents = parents_of(kind)
    recipe = stacked([(parents.one, (0, 2)), (parents.two, (0, 2))])
    raymerge.submit(recipe, tmp_path / "out", INLINE)
    model = load_as_strictly(kind, tmp_path / "out", parents.info)
    assert kind.run(model).isfinite().all()


def _layers_name(parents: Parents) -> str:
    """What stands before the number of a text layer: the first such name beside towers of other kinds."""
    names = [found["stack"] for key in parents.state_one if (found := _NUMBER.match(key))]
    return next(name for name in names if not re.search("vision|visual|audio|conv_layers", name))


def _ends_are_right(model: Any, parents: Parents) -> None:
    """The embedding is that of the model which begins the stack, the head that of the one which ends it."""
    like: Any = parents.like
    names = {id(tensor): key for key, tensor in like.named_parameters(remove_duplicate=False)}
    embedding, head = (
        names[id(end.weight)] for end in (like.get_input_embeddings(), like.get_output_embeddings())
    )
    assert torch.equal(model.get_input_embeddings().weight, parents.state_one[embedding])
    assert torch.equal(model.get_output_embeddings().weight, parents.state_two[head])


def _kinds_are_right(found: Any, before: Any, *, layers: Sequence[int]) -> None:
    """Every list with one entry a layer has the entries of the layers that are now in their places."""
    found, before = (config.get_text_config() for config in (found, before))
    assert found.num_hidden_layers == len(layers)
    for key, value in vars(before).items():
        if isinstance(value, list) and len(value) == before.num_hidden_layers:
            assert getattr(found, key) == [value[layer] for layer in layers], key


TYING = {kind.name: kind for kind in (*DECODERS, *OTHERS)}
TIED_NAMES = [name for name, kind in TYING.items() if "tied" in kind.groups]
UNTIED = ["llama", "gpt2", "gpt_neox", "gemma2", "opt", "rwkv", "biogpt", "modernbert-decoder", "mamba"]
UNTIED += ["electra", "distilbert", "modernbert", "whisper", "t5gemma", "gemma3", "qwen2_vl", "idefics3"]
"""Families that can be had with and without a head of their own, each kind of name once."""
ELSEWHERE = {
    "trocr": ("output_projection.weight", "model.decoder.embed_tokens.weight"),
    "ultrabert": ("head.decoder.weight", "model.embed_tokens.weight"),
    "bert-generation": ("lm_head.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "xlm": ("pred_layer.proj.weight", "transformer.embeddings.weight"),
    "xlnet": ("lm_loss.weight", "transformer.word_embedding.weight"),
    "ctrl": ("lm_head.weight", "transformer.w.weight"),
    "openai-gpt": ("lm_head.weight", "transformer.tokens_embed.weight"),
    "florence2": ("lm_head.weight", "model.language_model.shared.weight"),
    "yoso": ("cls.predictions.decoder.weight", "yoso.embeddings.word_embeddings.weight"),
    "longformer": ("lm_head.decoder.weight", "longformer.embeddings.word_embeddings.weight"),
    "git": ("output.weight", "git.embeddings.word_embeddings.weight"),
}
"""Names of families that have no model here."""


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", TIED_NAMES)
def test_names_of_head_and_embedding(name: str) -> None:
    ties = getattr(transformers, TYING[name].architecture)._tied_weights_keys
    pairs = {(head, embedding) for head, embedding in ties.items() if head.endswith("weight")}
    found = [tied_pair([embedding], {"model_type": name}) for _, embedding in pairs]
    assert pairs & {(pair.head, pair.embedding) for pair in found if pair is not None}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_families_that_are_not_built_here(name: str) -> None:
    head, embedding = ELSEWHERE[name]
    for names in ([embedding], [head, embedding]):
        pair = tied_pair(names, {"model_type": name})
        assert pair is not None
        assert (pair.head, pair.embedding) == (head, embedding)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", one_in(3, UNTIED))
def test_a_tied_model_and_one_with_a_head_of_its_own(name: str, tmp_path: Path) -> None:
    kind: ModelType = TYING[name]
    tied, own = (kind.build(seed, tie_word_embeddings=flag) for seed, flag in ((1, True), (2, False)))
    states = save(tied, tmp_path / "tied"), save(own, tmp_path / "own")
    assert len(_names(tmp_path / "own") - _names(tmp_path / "tied")) == 1
    entries = [{"model": str(tmp_path / each), "parameters": {"weight": 0.5}} for each in ("tied", "own")]
    raymerge.submit(
        {"merge_method": "linear", "models": entries}, tmp_path / "out", raymerge.RunOptions(inline=True)
    )
    model, info = kind.load(tmp_path / "out")
    assert not any(info.values())
    assert _names(tmp_path / "out") == _names(tmp_path / "own")
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (states[0][key] + states[1][key]) / 2, msg=key)
    assert kind.run(model).isfinite().all()


def _names(root: Path) -> set[str]:
    found: set[str] = set()
    for path in root.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update(file.keys())
    return found
