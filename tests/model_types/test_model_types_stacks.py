"""Layers of two models stacked anew: the config must speak of them as they are, and the head be there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.marks import one_in
from kits.model_parents import Parents, load_as_strictly
from kits.model_types import ModelType
from kits.model_types_decoders import BOUND, DENSE, RECURRENT, SPARSE
from kits.model_types_others import ENCODERS, SEEING

import raymerge
from raymerge.errors import PlanError

ParentsOf = Callable[[ModelType], Parents]
INLINE = raymerge.RunOptions(inline=True)

ALONE = {kind.name: kind for kind in ENCODERS if kind.name != "albert"}
"""Encoders. ALBERT stores one layer and runs it again and again."""
TIED = tuple(kind for kind in ALONE.values() if "tied" in kind.groups)
"""Those whose head and its bias are tied, a tie that a stack of two models parts."""
STACKED = {kind.name: kind for kind in (*DENSE, *SPARSE, *RECURRENT, *SEEING, *TIED)}
BOUND_BY_NAME = {kind.name: kind for kind in BOUND}
_NUMBER = re.compile(r"^(?P<stack>[\w.]*?)\.(?P<layer>\d+)\.")


def stacked(pieces: Sequence[tuple[Path, tuple[int, int]]]) -> dict[str, object]:
    """A recipe that puts runs of layers one behind another."""
    slices = [{"sources": [{"model": str(path), "layer_range": list(layers)}]} for path, layers in pieces]
    return {"merge_method": "passthrough", "slices": slices}


@pytest.mark.parametrize("name", one_in(4, STACKED))
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


@pytest.mark.parametrize("name", ALONE)
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
