"""Parts of a model merged alone: what the recipe does not name is copied from the base, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from kits.checkpoint_maker import read_tensors
from kits.marks import one_in
from kits.model_parents import Parents, load_as_strictly
from kits.model_types import ModelType
from kits.model_types_others import OTHERS

import raymerge

ALL: Mapping[str, ModelType] = {kind.name: kind for kind in OTHERS}
ParentsOf = Callable[[ModelType], Parents]

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


@pytest.mark.parametrize(("name", "module"), one_in(3, CASES))
def test_one_module_is_merged_and_the_others_copied(
    name: str, module: str, parents_of: ParentsOf, tmp_path: Path
) -> None:
    kind, parents = ALL[name], parents_of(ALL[name])
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


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_and_decoder_merged_in_ways_of_their_own(
    name: str, parents_of: ParentsOf, tmp_path: Path
) -> None:
    kind, parents = ALL[name], parents_of(ALL[name])
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
