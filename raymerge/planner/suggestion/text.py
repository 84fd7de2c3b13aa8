"""A suggestion as a recipe to read and to change: YAML with comments.

Prose begins with "# ". What begins with "#" alone is a setting to try: without the "#" it is part of the
recipe."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

import yaml

from raymerge.documents.positions import YamlDumper
from raymerge.dtypes import config_name
from raymerge.planner.suggestion.choice import Kind, Suggestion
from raymerge.planner.suggestion.models import NamedModel, Trust
from raymerge.recipes.entry import plain_reference
from raymerge.units import format_size

_SENTENCES = {
    "ties": "Of each model's changes to the base the largest stay; where signs disagree, the majority holds.",
    "task_arithmetic": "The base plus a share of the model's changes: weight 0 is the base, 1 the model.",
    "slerp": "From the first model (t = 0) to the second (t = 1), along the arc between them.",
    "linear": "The weighted mean of the models.",
}
_SHARES = "weight: the share of a model"
_KEPT = f"{_SHARES}; density: the fraction of its changes that stay"
_FITTING = {
    "ties": ("task_arithmetic", "dare_ties", "della", "breadcrumbs_ties", "model_stock"),
    "linear": ("geometric_median", "karcher", "multislerp"),
}
"""Methods that take the same settings, or leave them without effect."""
_PARAMETERS = {
    "ties": "{weight: 1.0, density: 0.5}",
    "task_arithmetic": "{weight: 0.5}",
    "linear": "{weight: 1.0}",
}
_TRUST = {
    Trust.SURE: "The base, by",
    Trust.LIKELY: "Likely the base, by",
    Trust.GUESS: "Perhaps the base (check it), by",
}


def write(suggestion: Suggestion, file: str = "recipe.yml") -> str:
    """The text of the recipe, to be kept as ``file``."""
    body = {Kind.MERGE: _merge, Kind.MIXTURE: _mixture, Kind.ADAPTERS: _adapters}[suggestion.kind]
    return "\n".join([*_head(suggestion, file), *body(suggestion)]) + "\n"


def next_commands(
    suggestion: Suggestion, file: str, options: Sequence[str] = (), *, is_placed: bool = False
) -> tuple[tuple[str, str], ...]:
    """What to type next, and what it does; a merge of adapters has no plan. ``options``: of both commands;
    ``is_placed``: they say where the result goes."""
    given = " ".join(shlex.quote(each) for each in (file, *options))
    if suggestion.kind is Kind.ADAPTERS:
        return ((f"raymerge submit {given} -o merged-adapter", "merges, and writes the adapter"),)
    plan = f"raymerge plan {given}", "what it would do; writes nothing"
    return plan, (f"raymerge submit {given}{'' if is_placed else ' -o merged'}", "does it")


def title(suggestion: Suggestion) -> str:
    count = len(suggestion.models)
    if suggestion.kind is Kind.ADAPTERS:
        return f"one adapter of {count}, by {suggestion.method}"
    if suggestion.kind is Kind.MIXTURE:
        return "a mixture of experts from " + (f"{count} models" if count > 1 else "copies of one model")
    return f"{count} model{'s' if count > 1 else ''} merged by {suggestion.method}"


def facts(model: NamedModel) -> str:
    """A model in a few words: ``llama, 32 layers, bfloat16``."""
    if model.checkpoint is None:
        assert model.adapter is not None
        return f"adapter of rank {model.adapter.config.ranks.default}, {len(model.adapter.factors)} modules"
    numbers = [*model.formats] or ([config_name(model.dtype)] if model.dtype is not None else [])
    layers = [f"{model.num_layers} layers"] if model.num_layers else []
    experts = [f"{model.num_experts} experts"] if model.num_experts else []
    return ", ".join((model.family, *layers, *experts, *numbers))


def base_words(suggestion: Suggestion, model: NamedModel) -> str:
    """What is known of the model as the base of the others."""
    guess = suggestion.guess
    if guess is None or model is not suggestion.base or model.name != guess.name:
        return ""
    return {Trust.SURE: "yes", Trust.LIKELY: "likely", Trust.GUESS: "perhaps"}[guess.trust]


def _head(suggestion: Suggestion, file: str) -> Iterator[str]:
    first = title(suggestion)
    yield f"# {first[0].upper()}{first[1:]}. Next: {next_commands(suggestion, file)[0][0]}"
    yield "# A line that begins with '#' and no blank is a setting to try: take the '#' away."
    yield ""


def _merge(suggestion: Suggestion) -> Iterator[str]:
    method = suggestion.method
    yield f"# {_SENTENCES[method]}"
    if fitting := _FITTING.get(method):
        yield f"# {', '.join(fitting)} fit too: change the word."
        yield "# 'raymerge methods NAME' explains a method and its parameters."
    yield f"merge_method: {method}"
    if suggestion.base is not None:
        yield ""
        yield from _base(suggestion)
    elif suggestion.guess is not None:
        yield from _unused(suggestion)
    yield ""
    if method in _PARAMETERS:
        yield f"# {_KEPT if 'density' in _PARAMETERS[method] else _SHARES}."
    yield "models:"
    for model in suggestion.models:
        yield f"  - model: {_scalar(model)}{_fetched(model)}"
        if method in _PARAMETERS:
            yield f"    parameters: {_PARAMETERS[method]}"
    yield from _settings(suggestion)
    yield from _experts(suggestion)
    yield from _vocabulary(suggestion)
    yield from _stored(suggestion)


def _base(suggestion: Suggestion) -> Iterator[str]:
    base, guess = suggestion.base, suggestion.guess
    assert base is not None
    if suggestion.method == "slerp":
        yield from _unused(suggestion)
        yield "# The first model also gives config, tokenizer and the other small files."
    elif guess is not None:
        yield f"# {_TRUST[guess.trust]} {guess.reason}."
    yield f"base_model: {_scalar(base)}{_fetched(base)}"


def _unused(suggestion: Suggestion) -> Iterator[str]:
    """Where a recipe does without a base: how to get one of the changes to a base."""
    names = " ".join(shlex.quote(each.name) for each in suggestion.models)
    if suggestion.guess is None:
        yield f"# No base is known. If you have it: raymerge init --force BASE {names}"
        return
    base, reason = suggestion.guess.name, suggestion.guess.reason
    yield f"# The base is {base}, by {reason}, and cannot be used from here."
    yield f"# If you have it: raymerge init --force {shlex.quote(base)} {names}"


def _settings(suggestion: Suggestion) -> Iterator[str]:
    if suggestion.method == "slerp":
        yield "parameters:"
        yield "  t:"
        yield "# Attention nearer to the first model, feed-forward layers nearer to the second:"
        yield "#    - {role: attention, value: 0.3}"
        yield "#    - {role: mlp, value: 0.7}"
        yield "    - value: 0.5"
    elif suggestion.method == "ties":
        yield "# All changes together, made smaller or larger:"
        yield "#parameters: {lambda: 0.8}"


def _experts(suggestion: Suggestion) -> Iterator[str]:
    if not all(each.num_experts for each in suggestion.everyone):
        return
    yield ""
    yield f"# The routers of one model instead of merged ones:\n#router: {_scalar(suggestion.donor)}"
    is_of_one_base = suggestion.base is not None
    if not is_of_one_base and not any(each.formats for each in suggestion.models):
        yield "# Mixtures that were trained apart have their experts in another order: match them first."
        yield "#align: experts"


def _vocabulary(suggestion: Suggestion) -> Iterator[str]:
    everyone = suggestion.everyone
    tokenizers = [each.tokenizer for each in everyone if each.tokenizer is not None]
    if any(each.tokens != tokenizers[0].tokens for each in tokenizers):
        yield "\n# The vocabularies differ: the result has the tokens of all, and rows are matched by token."
        yield "tokenizer:\n  source: union\n#  pad_to_multiple_of: 64"
    elif len({each.num_rows for each in everyone}) > 1:
        least = min(each.num_rows or 0 for each in everyone)
        is_padding = bool(tokenizers) and max(tokenizers[0].tokens.values(), default=0) < least
        what = "beyond the tokens: those that all have stay" if is_padding else "and every row is kept"
        yield f"\n# The embeddings have different numbers of rows, {what}."
        yield f"embedding_sizes: {'common' if is_padding else 'pad'}"
    templates = {each.chat_template for each in tokenizers}
    if len(templates) > 1:
        yield f"\n# Chat templates differ. What most models have, and not that of {suggestion.donor.title}:"
        yield "#chat_template: auto"


def _stored(suggestion: Suggestion) -> Iterator[str]:
    donor = suggestion.donor
    if donor.formats:
        yield f"\n# Stored as {donor.title} is ({', '.join(donor.formats)}). As plain numbers instead:"
        yield "#out_format: bf16"
    elif donor.dtype is not None:
        others = {each.dtype for each in suggestion.everyone} - {donor.dtype}
        yield f"\n# As {f'{donor.title} is' if others else 'all of them are'} stored."
        yield f"dtype: {config_name(donor.dtype)}"
        if not (donor.num_experts or donor.is_raw) and suggestion.kind is Kind.MERGE:
            yield "# Half the size, in FP8:"
            yield "#out_format: fp8_block"


def _mixture(suggestion: Suggestion) -> Iterator[str]:
    assert suggestion.base is not None
    yield "# Attention, norms and embeddings come from the base; a model's feed-forward becomes an expert."
    if suggestion.guess is not None and suggestion.guess.name == suggestion.base.name:
        yield f"# {_TRUST[suggestion.guess.trust]} {suggestion.guess.reason}."
    elif len(suggestion.models) > 1:
        yield "# The first model, since no base is known."
    yield f"base_model: {_scalar(suggestion.base)}{_fetched(suggestion.base)}"
    yield ""
    if suggestion.method == "random":
        yield from _copies(suggestion.models[0])
    else:
        yield from _routed(suggestion.models)
    if suggestion.has_shared_expert:
        yield from _shared(suggestion)
    yield from _stored(suggestion)


def _copies(model: NamedModel) -> Iterator[str]:
    yield "# Nothing tells equal experts apart, so the router begins at random. Train the result."
    yield "gate_mode: random"
    yield "experts_per_token: 2"
    yield "experts:"
    yield f"  - source_model: {_scalar(model)}{_fetched(model)}"
    yield "    copies: 8"
    yield "# The share of each copy's neurons that is drawn anew, so that copies differ:"
    yield "    reinit_fraction: 0.5"
    yield "#    noise_scale: 0.01"


def _routed(models: Sequence[NamedModel]) -> Iterator[str]:
    yield "# The base reads the prompts, and what its layers see of them becomes the router."
    yield "# hidden, hidden_avg, cheap_embed, centroid, ridge fit too: change the word."
    yield "gate_mode: router_input"
    yield "experts_per_token: 2"
    yield ""
    yield "# REPLACE the prompts: three or more texts of the kind that each expert is good at."
    yield "experts:"
    for model in models:
        yield f"  - source_model: {_scalar(model)}{_fetched(model)}"
        yield "    positive_prompts:"
        yield f"      - {_quoted(f'Replace this by a text that {model.title} is good at.')}"
    yield "# Attention and the rest as the mean of the experts' models (Branch-Train-MiX):"
    yield "#trunk: {merge_method: linear, parameters: {weight: 1}}"


def _shared(suggestion: Suggestion) -> Iterator[str]:
    assert suggestion.base is not None
    yield "\n# Every token goes through it; the families that these models fit need one."
    yield "shared_experts:"
    yield f"  - source_model: {_scalar(suggestion.base)}"
    if suggestion.method != "random":
        yield "    positive_prompts:"
        yield f"      - {_quoted('Replace this by a text of any kind.')}"


def _adapters(suggestion: Suggestion) -> Iterator[str]:
    yield "# The weighted mean of what the adapters change, as an adapter again."
    yield "# ties, dare_ties, task_arithmetic fit too: change the word."
    yield "merge_method: linear"
    if suggestion.guess is not None:
        names = " ".join(shlex.quote(each.name) for each in suggestion.models)
        base = shlex.quote(suggestion.guess.name)
        yield "# To merge models that have these adapters instead:"
        yield f"# raymerge init --force {base} {names}"
    yield ""
    yield f"# {_SHARES}."
    yield "models:"
    for model in suggestion.models:
        yield f"  - model: {_scalar(model)}"
        yield "    parameters: {weight: 1.0}"
    yield ""
    yield "# svd: the best factors of the rank; concatenate: exact, and ranks add up."
    yield "adapter:"
    yield "  combine: svd"
    yield "# The largest rank, and the share of the change that is enough:"
    yield "#  rank: 16\n#  energy: 0.99"


def _fetched(model: NamedModel) -> str:
    if not model.fetched_nbytes:
        return ""
    return f"  # not in the Hub's cache: plan and submit fetch {format_size(model.fetched_nbytes)}"


def _scalar(model: NamedModel) -> str:
    return _quoted(plain_reference(model.reference))


def _quoted(value: object) -> str:
    text = yaml.dump([value], Dumper=YamlDumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    return str(text)[1:-2]
