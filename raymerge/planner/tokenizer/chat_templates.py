"""The output's chat template: voted by the models, one of the known formats, or the recipe's own text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from jinja2 import Environment, TemplateSyntaxError

from raymerge.checkpoints.tokenizer import TokenizerFiles
from raymerge.errors import Problem
from raymerge.recipes import Recipe, did_you_mean

AUTO = "auto"
"""Asks for the template that most models have."""
MIN_LITERAL_CHARACTERS = 20
"""A shorter text is a misspelled name, not a template."""

_CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
    {{- message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

# The instruction format knows no system turn: it stands before the first instruction.
_MISTRAL = """\
{{- bos_token -}}
{%- set turn = namespace(system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set turn.system = message.content + '\\n\\n' -%}
    {%- elif message.role == 'user' -%}
        {{- '[INST] ' + turn.system + message.content + ' [/INST]' -}}
        {%- set turn.system = '' -%}
    {%- else -%}
        {{- ' ' + message.content + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

_ALPACA = """\
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- '### Instruction:\\n' + message.content | trim + '\\n\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '### Response:\\n' + message.content | trim + eos_token + '\\n\\n' -}}
    {%- else -%}
        {{- message.content | trim + '\\n\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '### Response:\\n' -}}
{%- endif -%}
"""

# A conversation begins with a system turn, be it empty; a user's turn ends with its line.
_EXAONE = """\
{%- if messages and messages[0].role != 'system' -%}
    {{- '[|system|][|endofturn|]\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '[|' + message.role + '|]' + message.content -}}
    {{- '\\n' if message.role == 'user' else '[|endofturn|]\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '[|assistant|]' -}}
{%- endif -%}
"""

_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")

BUILT_IN: Mapping[str, str] = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    "exaone": _EXAONE,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
}
"""Templates by the names that a recipe may use."""


def resolve_template(
    recipe: Recipe, tokenizers: Sequence[TokenizerFiles | None]
) -> tuple[str | None, list[Problem]]:
    """The template that the recipe asks for, None if it asks for none, and what stands in its way.

    Args:
        recipe: the recipe.
        tokenizers: the models' tokenizers in recipe order.
    """
    asked = recipe.chat_template
    if asked is None:
        return None, []
    if asked in BUILT_IN:
        return BUILT_IN[asked], []
    found = most_frequent(tokenizers) if asked == AUTO else asked if _is_literal(asked) else None
    place = recipe.where("chat_template")
    if found is not None:
        fault = _fault(found)
        return (found, []) if fault is None else (None, [Problem(place, fault, "Correct the template.")])
    names = (AUTO, *BUILT_IN)
    if asked == AUTO:
        what, remedy = "no model has a chat template.", f"Write one of: {', '.join(BUILT_IN)}; or a template."
    else:
        what = f"{asked[:60]!r} is neither a built-in name nor a template."
        remedy = f"{did_you_mean(asked, names)} Write one of: {', '.join(names)}; or a Jinja text.".lstrip()
    return None, [Problem(place, what, remedy)]


def most_frequent(tokenizers: Sequence[TokenizerFiles | None]) -> str | None:
    """The template that most tokenizers have, white space around it aside; of equals the first."""
    found = [each.chat_template.strip() for each in tokenizers if each is not None and each.chat_template]
    counts = Counter(text for text in found if text)
    # max gives the first of equals, and a counter keeps the order in which it met them.
    return max(counts, key=lambda text: counts[text], default=None)


def _fault(template: str) -> str | None:
    """Why a template cannot be compiled, as a sentence; None for a sound one."""
    # transformers marks what the assistant says by a tag of its own, which changes no syntax.
    plain = _GENERATION.sub("", template)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"], autoescape=False).parse(plain)
    except TemplateSyntaxError as error:
        return f"the template cannot be compiled: {error.message} (line {error.lineno})."
    return None


def _is_literal(text: str) -> bool:
    return "{" in text and len(text) >= MIN_LITERAL_CHARACTERS
