"""``adapter_config.json``: what peft wrote beside an adapter's weights, so far as it says what they mean."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from raymerge.checkpoints.json_files import ForeignPattern, foreign_pattern, load_json
from raymerge.errors import CheckpointError, Problem

ADAPTER_CONFIG_FILE = "adapter_config.json"
"""The file that makes a directory an adapter."""

# A pattern of words and dots alone, as ``pattern_of`` makes it; a dot stands for any one character.
_PLAIN = re.compile(r"\(\?:\.\*\\\.\)\?\(\?:[\w.]*?(\w*)\)\$")
_T = TypeVar("_T", int, float)

_TOO_LARGE = 2**63
_MEND = "Mend the file, or copy it again from the place the adapter comes from."
_MERGE_WITH_PEFT = "Merge it into its model with peft (merge_and_unload), save that and name the result."
# What changes the meaning of the factors, or adds to them what no sum of a weight and a product can say.
_VARIANTS: Mapping[str, str] = {
    "layer_replication": "it is for a model with repeated layers",
    "target_parameters": "peft's versions disagree about the order of its experts and axes",
    "trainable_token_indices": "it changes single rows of the embedding",
    "alora_invocation_tokens": "it acts only behind certain tokens",
    "arrow_config": "it is chosen token by token",
    "use_qalora": "it acts on groups of inputs",
    "use_bdlora": "its factors are cut into blocks",
    "kasa_config": "it changes the weights of its model as well",
    "velora_config": "it is a variant of LoRA that raymerge does not know",
    "monteclora_config": "it is a variant of LoRA that raymerge does not know",
}
# Beginnings that leave the model's weights as they are; the others (pissa, olora, corda, loftq) change them.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Patterns(Generic[_T]):
    """A number that holds for most modules, and exceptions by pattern."""

    default: _T
    """What holds where no pattern matches."""
    exceptions: tuple[tuple[ForeignPattern, _T], ...]
    """Patterns for the end of a module's path, in the order of the file; the first that matches holds."""
    _by_ending: Mapping[str, Sequence[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # An adapter of experts has tens of thousands of modules, and a pattern for each of its others.
        found: dict[str, list[int]] = {}
        for place, (pattern, _) in enumerate(self.exceptions):
            found.setdefault(_ending(pattern), []).append(place)
        object.__setattr__(self, "_by_ending", found)

    def of(self, module: str) -> _T:
        """The number for a module, by its path in the model."""
        places = [
            each for ending, them in self._by_ending.items() if module.endswith(ending) for each in them
        ]
        likely = (self.exceptions[place] for place in sorted(places))
        return next((value for pattern, value in likely if pattern.matches(module)), self.default)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The facts of an ``adapter_config.json``."""

    ranks: Patterns[int]
    """``r`` and ``rank_pattern``."""
    alphas: Patterns[float]
    """``lora_alpha`` and ``alpha_pattern``."""
    use_rslora: bool
    """Whether products count alpha / sqrt(rank) times instead of alpha / rank."""
    use_dora: bool
    """Whether rows have a magnitude of their own (DoRA, arXiv 2402.09353)."""
    fan_in_fan_out: bool
    """Whether the model stores the weights of its linear modules [in, out], as GPT-2 does."""
    lora_bias: bool | None
    """Whether up factors may have a bias; None where the file is silent."""
    base_model: str
    """What the adapter was trained on, as its maker called it; may be empty."""
    task_type: str | None
    """peft's name of the task, such as ``CAUSAL_LM``."""
    fields: Mapping[str, Any]
    """The whole file."""

    def scale(self, module: str) -> float:
        """How many times the product of a module's factors counts."""
        rank = self.ranks.of(module)
        return self.alphas.of(module) / (math.sqrt(rank) if self.use_rslora else rank)


def parse_adapter_config(raw: bytes, where: str) -> AdapterConfig:
    """Read the bytes of an ``adapter_config.json``.

    Args:
        raw: the file.
        where: what messages call it.

    Raises:
        CheckpointError: it is no such file, or of an adapter that raymerge cannot apply; with all reasons.
    """
    fields = _parse(raw, where)
    sentences = [*_foreign(fields), *_wrong(fields)]
    if sentences:
        raise CheckpointError([Problem(where, what, remedy) for what, remedy in sentences])
    return AdapterConfig(
        ranks=_patterns(fields["r"], fields.get("rank_pattern")),
        alphas=_patterns(float(fields["lora_alpha"]), fields.get("alpha_pattern")),
        use_rslora=bool(fields.get("use_rslora")),
        use_dora=bool(fields.get("use_dora")),
        fan_in_fan_out=bool(fields.get("fan_in_fan_out")),
        lora_bias=fields.get("lora_bias"),
        base_model=str(fields.get("base_model_name_or_path") or ""),
        task_type=fields.get("task_type"),
        fields=fields,
    )


def pattern_of(text: str) -> ForeignPattern:
    """A key of ``rank_pattern`` or ``alpha_pattern``: a regular expression for the end of a module's path.

    Raises:
        ValueError: it is no regular expression.
    """
    try:
        return foreign_pattern(rf"(?:.*\.)?(?:{text})$")
    except ValueError as error:
        raise ValueError(f"{text!r} is no regular expression ({error})") from error


def _ending(pattern: ForeignPattern) -> str:
    """What every path that a pattern matches ends in; "" where that is not plain to see."""
    found = _PLAIN.fullmatch(pattern.pattern)
    return found[1] if found else ""


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    try:
        fields = load_json(raw)
    except (ValueError, RecursionError) as error:
        what = f"is not JSON text that can be read ({str(error)[:80]})."
        raise CheckpointError(Problem(where, what, _MEND)) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("peft_type"), str):
        what = "is not a JSON object that names its 'peft_type'."
        raise CheckpointError(Problem(where, what, _MEND))
    return fields


def _foreign(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is no plain LoRA or DoRA, as sentence and remedy."""
    kind = fields["peft_type"]
    if kind.upper() != "LORA":
        yield f"is an adapter of type {kind[:40]}; raymerge applies LoRA only.", _MERGE_WITH_PEFT
        return
    for key, reason in _VARIANTS.items():
        if fields.get(key):
            yield f"has '{key}', which raymerge does not apply: {reason}.", _MERGE_WITH_PEFT
    beginning = fields.get("init_lora_weights", True)
    if not any(beginning is plain or beginning == plain for plain in _PLAIN_BEGINNINGS):
        what = (
            f"has init_lora_weights {str(beginning)[:40]!r}: that changes the weights of the model as well,"
        )
        remedy = "Save it with peft's path_initial_model_for_weight_conversion, or merge it with peft first."
        yield f"{what} so the factors alone do not say the change.", remedy


def _wrong(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Values that no LoRA can have, as sentence and remedy."""
    if fields["peft_type"].upper() != "LORA":
        return
    yield from _wrong_number("r", fields.get("r"), whole=True)
    yield from _wrong_number("lora_alpha", fields.get("lora_alpha"), whole=False)
    yield from _wrong_patterns("rank_pattern", fields.get("rank_pattern"), whole=True)
    yield from _wrong_patterns("alpha_pattern", fields.get("alpha_pattern"), whole=False)
    for key in ("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"):
        if not isinstance(fields.get(key), bool | None):
            yield f"{key} is {_brief(fields[key])}, not true or false.", _MEND
    if not isinstance(fields.get("task_type"), str | None):
        yield f"task_type is {_brief(fields['task_type'])}, not a text.", _MEND


def _wrong_patterns(key: str, found: Any, *, whole: bool) -> Iterator[tuple[str, str]]:
    if found is None:
        return
    if not isinstance(found, dict):
        yield f"{key} is {_brief(found)}, not a map from patterns to numbers.", _MEND
        return
    for text, value in found.items():
        yield from _wrong_number(f"{key}[{text!r}]", value, whole=whole)
        try:
            pattern_of(text)
        except ValueError as error:
            yield f"in {key}, {error}.", _MEND


def _wrong_number(key: str, found: Any, *, whole: bool) -> Iterator[tuple[str, str]]:
    kinds: Sequence[type] = (int,) if whole else (int, float)
    # type() and not isinstance(): true is an int to Python.
    if type(found) not in kinds or not abs(found) < _TOO_LARGE or (whole and found < 1):
        wanted = "a whole number from 1" if whole else "a number"
        yield f"{key} is {_brief(found)}, not {wanted}.", _MEND


def _patterns(default: _T, exceptions: Mapping[str, _T] | None) -> Patterns[_T]:
    pairs = (exceptions or {}).items()
    return Patterns(default, tuple((pattern_of(text), type(default)(value)) for text, value in pairs))


def _brief(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= 60 else f"{text[:57]}..."
