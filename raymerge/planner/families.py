"""Whether models may be merged by what their configs say: one config has to hold for all that is merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raymerge.architectures.sections import text_section
from raymerge.errors import Problem
from raymerge.planner.sources import Source, model_references
from raymerge.planner.spans import Section
from raymerge.recipes import Recipe

_MEANING = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads"),
    *("num_key_value_heads", "num_kv_heads", "head_dim", "num_experts_per_tok"),
)
# How a weight is cut into heads, or how many experts a router was trained to choose: tensors of equal shape
# mean different things where these differ.
_NOTED = (
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
    *("hidden_act", "hidden_activation", "activation_function"),
    *("attention_bias", "mlp_bias", "query_pre_attn_scalar", "attn_logit_softcapping"),
    *("final_logit_softcapping", "norm_topk_prob", "routed_scaling_factor", "scoring_func"),
)
# What models may be merged across and the user should know of.
_TEXT, _VISION, _AUDIO = "text", "vision_config", "audio_config"
_PARTS: Mapping[str | None, tuple[str, ...]] = {
    None: (_TEXT, _VISION, _AUDIO),
    **dict.fromkeys(("default", "text_decoder", "encoder", "decoder"), (_TEXT,)),
    **dict.fromkeys(("vision_tower", "vision_model"), (_VISION,)),
    "audio_tower": (_AUDIO,),
}


def other_families(recipe: Recipe, sources: Sequence[Source], *, donor: Source) -> list[Problem]:
    """A problem for each source of another architecture than the donor's, unless the recipe waives it."""
    places = {reference: path for path, reference in model_references(recipe)}
    return [
        Problem(
            recipe.where(*places[source.reference]),
            f"{source.name} is of another family ({source.model_type}: {', '.join(source.architectures)}) "
            f"than {donor.name} ({donor.model_type}: {', '.join(donor.architectures)}).",
            "Merge models of one architecture. If the tensors really are the same, say so with "
            f"'model: {{model: {source.reference.path}, override_architecture: "
            f"{next(iter(donor.architectures), '')}}}'.",
        )
        for source in sources
        if source.reference in places and _is_foreign(source, donor)
    ]


def _is_foreign(source: Source, donor: Source) -> bool:
    renamed = bool(source.reference.override_architecture)
    return source.architectures != donor.architectures or (
        source.model_type != donor.model_type and not renamed
    )


def other_meanings(
    recipe: Recipe, sections: Sequence[Section], sources: Sequence[Source], *, donor: Source
) -> list[Problem]:
    """A problem for each source whose weights mean something else than the output's config will say."""
    places = {reference: path for path, reference in model_references(recipe)}
    found: dict[int, list[str]] = {}
    for source, sentence in _differences(sections, sources, donor, _MEANING):
        found.setdefault(source.index, []).append(sentence)
    return [
        Problem(
            recipe.where(*places[sources[index].reference]),
            f"{sources[index].name} has {', '.join(sentences)}: its weights mean something else, and the one "
            "config of the output cannot hold for both.",
            "Merge models whose configs agree in this, whatever their architecture is called.",
        )
        for index, sentences in found.items()
    ]


def config_notes(sections: Sequence[Section], sources: Sequence[Source], *, donor: Source) -> list[str]:
    """A note for each source whose config differs in what a merge can bear."""
    return [
        f"{source.name} has {sentence}; the output's config is that of {donor.name}"
        for source, sentence in _differences(sections, sources, donor, _NOTED)
    ]


def _differences(
    sections: Sequence[Section], sources: Sequence[Source], donor: Source, fields: Sequence[str]
) -> Iterator[tuple[Source, str]]:
    """Every field that a source says otherwise than the first that says it, the donor before all others."""
    for part, indices in _users(sections).items():
        order = [donor, *(sources[index] for index in indices if index != donor.index)]
        said = [(source, _said(source, part)) for source in order]
        for field in fields:
            first: tuple[Source, Any] | None = None
            for source, values in said:
                value = values.get(field)
                if value is None:
                    continue
                first = first or (source, value)
                if value != first[1]:
                    yield source, f"{field} {value} where {first[0].name} has {first[1]}"


def _users(sections: Sequence[Section]) -> Mapping[str, Sequence[int]]:
    """For each part of a config the sources of which the recipe uses that part of the model, in order."""
    found: dict[str, dict[int, None]] = {}
    for section in sections:
        used = [m.source for span in section.spans for m in (span.lead, *span.members)]
        for part in _PARTS.get(section.module, ()):
            found.setdefault(part, {}).update(dict.fromkeys(used))
    return {part: list(indices) for part, indices in found.items()}


def _said(source: Source, part: str) -> Mapping[str, Any]:
    config = source.checkpoint.config
    if part == _TEXT:
        return {**config, **text_section(config)}
    inside = config.get(part)
    return inside if isinstance(inside, Mapping) else {}
