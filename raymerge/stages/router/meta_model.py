"""The base model as transformers builds it, without a single number in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from raymerge.architectures.sections import class_names
from raymerge.errors import PlanError, Problem
from raymerge.planner.inputs.quantised import CONVERT_FIRST, USE_PLAIN, quantised_tensors, stored_formats
from raymerge.planner.inputs.source import Source

NO_PROMPTS_REMEDY = "Use gate_mode: cheap_embed or random, which do not run the base model."
"""What helps wherever a base model cannot be run."""

_NOT_OURS = ("auto_map", "quantization_config")
# Names code that is not run; and a quantisation, of which no tensor may be left.


def bare_model(base: Source) -> nn.Module:
    """The model for causal language of the base's config, on the meta device, to be computed in float32.

    Attention is the plain one, which every family has and which adds up in one order.

    Raises:
        PlanError: transformers has no such model, or it cannot be fed with the base's tensors.
    """
    # Slow to import, and only wanted where a base model is run.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    problems = list(_unfit(base))
    if base.model_type not in CONFIG_MAPPING:
        raise PlanError([*problems, _unknown(base)])
    config: Any = None
    try:
        config = CONFIG_MAPPING[base.model_type].from_dict(_config(base))
    except Exception as error:  # what a config's checks raise depends on its class and version
        problems.append(_misread(base, error))
    if config is not None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = f"transformers has no model for causal language of the kind {base.model_type}."
        problems.append(Problem(base.name, what, NO_PROMPTS_REMEDY))
    if problems:
        raise PlanError(problems)
    try:
        return _built(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    except Exception as error:  # as above
        raise PlanError(_misread(base, error)) from error


def _built(architecture: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = architecture._from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
    return model.eval()


def _config(base: Source) -> dict[str, Any]:
    stated = base.checkpoint.config
    return {key: _decoded(value) for key, value in stated.items() if key not in _NOT_OURS}


def _decoded(value: Any) -> Any:
    """Infinities as transformers writes them, as numbers."""
    if isinstance(value, dict):
        is_number = value.keys() == {"__float__"}
        return (
            float(value["__float__"]) if is_number else {key: _decoded(each) for key, each in value.items()}
        )
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def _unfit(base: Source) -> Iterator[Problem]:
    if base.checkpoint.config.get("is_encoder_decoder"):
        what = "is an encoder with a decoder; the router's prompts are read by a decoder alone."
        yield Problem(base.name, what, NO_PROMPTS_REMEDY)
    found = quantised_tensors(base.checkpoint)
    formats = sorted({*stored_formats(found).values(), *found.unknown.values()})
    if formats:
        what = f"holds tensors that are quantised ({', '.join(formats)}), and prompts cannot be run on codes."
        yield Problem(base.name, what, USE_PLAIN if found.unknown else CONVERT_FIRST)


def _unknown(base: Source) -> Problem:
    said = f"its config says model_type {base.model_type!r}" if base.model_type else "it has no model_type"
    own = "; its own code (auto_map) is not run" if base.checkpoint.config.get("auto_map") else ""
    return Problem(
        base.name,
        f"{said}, which the installed transformers does not know{own}.",
        f"Install a transformers that has it. {NO_PROMPTS_REMEDY}",
    )


def _misread(base: Source, error: Exception) -> Problem:
    names = ", ".join(class_names(base.checkpoint.config)) or base.model_type
    reason = " ".join(str(error).split())[:160]
    what = f"transformers cannot build {names} of its config ({type(error).__name__}: {reason})."
    return Problem(base.name, what, f"Mend its config.json. {NO_PROMPTS_REMEDY}")
