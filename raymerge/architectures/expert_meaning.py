"""What experts compute and how a router weighs what they give: as a config says, or its family means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from raymerge.architectures.dense_models import dense_families, full_config
from raymerge.architectures.sections import text_section

_ACTIVATION = ("hidden_act", "hidden_activation", "mlp_hidden_act", "ffn_config.ffn_act_fn.name")
_SCORING = ("scoring_func", "moe_router_activation_func", "score_function")
_SUMS = ("norm_topk_prob", "moe_renormalize", "route_norm")
_FACTOR = ("routed_scaling_factor", "router_scaling_factor", "moe_router_scaling_factor", "route_scale")


@dataclass(frozen=True, slots=True)
class ExpertMeaning:
    """What the numbers of an expert and of its router row mean. None: neither config nor family tells."""

    activation: str | None = None
    """Name of ``act`` in ``down(act(gate(x)) * up(x))``."""
    scoring: str | None = None
    """What makes weights of a router's scores."""
    sums_to_one: bool | None = None
    """Whether the weights of a token's experts are made to sum to 1."""
    factor: float | None = None
    """Factor on all these weights."""


_SOFTMAX = ExpertMeaning("silu", "softmax", True, 1.0)
_UNSUMMED = ExpertMeaning("silu", "softmax", False, 1.0)
_SIGMOID = ExpertMeaning("silu", "sigmoid", True, 1.0)
_DEEPSEEK = ExpertMeaning("silu", "sigmoid", True, 2.5)

_FAMILIES: Mapping[str, ExpertMeaning] = MappingProxyType(
    {
        **dict.fromkeys(
            ("mixtral", "minimax", "granitemoe", "granitemoehybrid", "qwen3_next", "dbrx"), _SOFTMAX
        ),
        **dict.fromkeys(("hunyuan_v1_moe", "ernie4_5_moe"), _SOFTMAX),
        **dict.fromkeys(
            ("qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "deepseek", "deepseek_v2"), _UNSUMMED
        ),
        **dict.fromkeys(("glm4_moe", "lfm2_moe", "minimax_m2"), _SIGMOID),
        **dict.fromkeys(("deepseek_v3", "deepseek_v32"), _DEEPSEEK),
        # Their code takes the sparse mixer (arXiv 2409.12136), and a sigmoid on what goes into an expert.
        "phimoe": ExpertMeaning("silu", "sparse mixer", False, 1.0),
        "llama4": ExpertMeaning("silu", "sigmoid on inputs", False, 1.0),
        "gpt_oss": ExpertMeaning("clamped SwiGLU", "softmax", True, 1.0),
    }
)
_IGNORED: Mapping[str, tuple[str, ...]] = MappingProxyType({"gpt_oss": _ACTIVATION})
# Fields that stand in a family's configs, and that its code does not look at.


def expert_meaning(config: Mapping[str, Any]) -> ExpertMeaning:
    """What the experts of a mixture, or the feed-forward layers of a dense model, compute.

    Args:
        config: its ``config.json``.
    """
    section = text_section(config)
    family = str(section.get("model_type") or config.get("model_type") or "")
    silent = _FAMILIES.get(family.removesuffix("_text"), ExpertMeaning())

    def said(fields: tuple[str, ...], kind: type | tuple[type, ...]) -> Any:
        values = _values(section, fields) if fields != _IGNORED.get(family) else ()
        return next((value for value in values if isinstance(value, kind)), None)

    sums, factor = said(_SUMS, bool), said(_FACTOR, (int, float))
    return ExpertMeaning(
        activation=_of_dense(section, family) or said(_ACTIVATION, str) or silent.activation,
        scoring=said(_SCORING, str) or silent.scoring,
        sums_to_one=sums if sums is not None else silent.sums_to_one,
        factor=factor if factor is not None else silent.factor,
    )


def _of_dense(section: Mapping[str, Any], family: str) -> str | None:
    """The activation of a family of dense models, by the fields that its code looks at."""
    known = dense_families().get(family)
    if known is None:
        return None
    stated = {key: value for key, value in section.items() if value is not None}
    full = full_config({**stated, "model_type": family})
    return next((value for value in _values(full, known.activation) if isinstance(value, str)), None)


def _values(section: Mapping[str, Any], fields: tuple[str, ...]) -> Iterator[Any]:
    """What stands at dotted paths."""
    for field in fields:
        value: Any = section
        for key in field.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        yield value
