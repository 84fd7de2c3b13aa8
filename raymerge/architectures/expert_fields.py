"""Expert fields of configs: their number, what they compute, and the dense family they can become."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raymerge.architectures.moe_targets import dense_families, full_config, target_table
from raymerge.architectures.rules import QUANTISATION_TABLES, Rules, sections, text_section, value_at

_GROUPS = ("n_group", "num_expert_group")
# Experts are chosen among those of the best groups of neighbours ...
_USED_GROUPS = ("topk_group", "n_limited_groups")
# ... of which there are so many.
_FOLLOWING = ("moe_capacity",)
# Fields that repeat the number of experts for purposes of their own.
_NAMES_EXPERT = re.compile(r"experts\W{1,3}[0-9]")
_ONE_EXPERT = re.compile(r"((?:\w+\.)*experts)\.([0-9]{1,9})(\.[\w.]+)?")


@dataclass(frozen=True, slots=True)
class Field:
    key: str
    value: int


@dataclass(frozen=True, slots=True)
class ExpertFields:
    count: Field
    chosen: Field | None
    groups: Field | None
    used_groups: Field | None

    @property
    def num_groups(self) -> int:
        return self.groups.value if self.groups is not None else 1

    def objections(self, count: int, *, by_pairs: bool) -> Iterator[str]:
        """Why there cannot be ``count`` experts; ``by_pairs``: a group is judged by its two best."""
        per_token, groups = self.chosen, self.num_groups
        if per_token is not None and count < per_token.value:
            yield f"{per_token.key} is {per_token.value}, but there would be {count} experts."
        if self.groups is None:
            return
        if count % groups:
            yield f"{self.groups.key} is {groups}, and {count} experts are not so many equal groups."
            return
        least = 2 if by_pairs else 1
        if count // groups < least:
            yield f"{self.groups.key} is {groups}, and a group is judged by its {least} best experts."
        used = min(groups, self.used_groups.value if self.used_groups is not None else groups)
        within = used * count // groups
        if per_token is not None and within < per_token.value <= count:
            yield (
                f"{per_token.key} is {per_token.value}, but {used} of {groups} groups "
                f"would hold {within} experts."
            )

    def nearest(self, count: int, *, by_pairs: bool) -> tuple[int, ...]:
        def works(number: int) -> bool:
            return not any(self.objections(number, by_pairs=by_pairs))

        top = max(count, self.count.value, self.chosen.value if self.chosen is not None else 0)
        below = next((n for n in range(count - 1, 0, -1) if works(n)), None)
        above = next((n for n in range(count + 1, top + 4 * self.num_groups + 1) if works(n)), None)
        return tuple(number for number in (below, above) if number is not None)


def expert_fields(config: Mapping[str, Any], rules: Rules) -> ExpertFields | None:
    count = _first(config, rules.sizes["num_experts"])
    if count is None or count.value < 1:
        return None
    groups = _first(config, _GROUPS)
    is_grouped = groups is not None and groups.value > 1
    return ExpertFields(
        count=count,
        chosen=_first(config, rules.sizes["chosen_experts"]),
        groups=groups if is_grouped else None,
        used_groups=_first(config, _USED_GROUPS) if is_grouped else None,
    )


def with_expert_count(config: Mapping[str, Any], rules: Rules, count: int) -> dict[str, Any]:
    fields = expert_fields(config, rules)
    result = copy.deepcopy(dict(config))
    if fields is None:
        return result
    old = fields.count.value
    for _, section in sections(result):
        for key in (*rules.sizes["num_experts"], *_FOLLOWING):
            *parents, leaf = key.split(".")
            holder = value_at(section, parents)
            value = holder.get(leaf) if isinstance(holder, dict) else None
            if value == old and type(value) is int:
                holder[leaf] = count
            elif isinstance(value, list) and value and set(map(repr, value)) == {str(old)}:
                holder[leaf] = [count] * len(value)
    return result


def with_expert_names(config: Mapping[str, Any], before: int, after: int) -> dict[str, Any] | None:
    """A copy whose quantisation tables name ``after`` experts where they name ``before``.

    None where they single some out or use patterns with numbers, which cannot be reordered."""
    result = copy.deepcopy(dict(config))
    for _, section in sections(result):
        for key in QUANTISATION_TABLES:
            if isinstance(section, dict) and section.get(key):
                try:
                    section[key] = _renumbered(section[key], before, after)
                except ValueError:
                    return None
    return result


def _renumbered(value: Any, before: int, after: int) -> Any:
    if isinstance(value, Mapping):
        if any(_NAMES_EXPERT.search(str(key)) for key in value):
            raise ValueError("keys name experts")
        return {key: _renumbered(each, before, after) for key, each in value.items()}
    if not isinstance(value, list):
        if _NAMES_EXPERT.search(str(value)):
            raise ValueError("a value names an expert")
        return value
    named = [_ONE_EXPERT.fullmatch(each) if isinstance(each, str) else None for each in value]
    numbers: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, named):
        numbers.setdefault((match[1], match[3] or ""), set()).add(int(match[2]))
    if any(present != set(range(before)) for present in numbers.values()):
        raise ValueError("some experts are named, and others not")
    rest = (_renumbered(each, before, after) for each, match in zip(value, named, strict=True) if not match)
    names = (f"{head}.{number}{tail}" for head, tail in numbers for number in range(after))
    return [*rest, *names]


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> Field | None:
    for path, section in reversed([*sections(config)]):
        for key in keys:
            value = _largest(value_at(section, key.split(".")))
            if value is not None:
                return Field(".".join((*path, key)), value)
    return None


def _largest(value: Any) -> int | None:
    if type(value) is int:
        return value
    is_list = isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
    return max(value) if is_list else None


@dataclass(frozen=True, slots=True)
class ExpertMeaning:
    """Functions of expert and router; None where neither config nor family tells."""

    activation: str | None = None
    """Name of ``act`` in ``down(act(gate(x)) * up(x))``."""
    scoring: str | None = None
    sums_to_one: bool | None = None
    factor: float | None = None


def expert_meaning(config: Mapping[str, Any]) -> ExpertMeaning:
    section, table = text_section(config), target_table("experts")
    family, activation = str(section.get("model_type") or config.get("model_type") or ""), None
    plain = family.removesuffix("_text")
    known: Mapping[str, Any] = next((each for each in table["meanings"] if plain in each["families"]), {})

    def stated(key: str, kind: type | tuple[type, ...]) -> Any:
        paths = () if key in known.get("ignored", ()) else table["meaning_fields"][key]
        given = (value for value in _values(section, paths) if isinstance(value, kind))
        return next(given, known.get("meaning", {}).get(key))

    dense = dense_families().get(family)
    if dense is not None:
        own = {key: value for key, value in section.items() if value is not None}
        full = full_config({**own, "model_type": family})
        activation = next((each for each in _values(full, dense.activation) if isinstance(each, str)), None)
    return ExpertMeaning(
        activation=activation or stated("activation", str),
        scoring=stated("scoring", str),
        sums_to_one=stated("sums_to_one", bool),
        factor=stated("factor", (int, float)),
    )


def _values(section: Mapping[str, Any], fields: Iterable[str]) -> Iterator[Any]:
    return (value_at(section, path.split(".")) for path in fields)


_ONLY_EXPERTS = frozenset(
    {
        *("num_local_experts", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step"),
        *("mlp_only_layers", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
        *("qkv_bias", "auto_map"),
    }
)
# Fields that a dense model has no use for. Code that comes with a checkpoint is for its experts.


@dataclass(frozen=True, slots=True)
class DenseCounterpart:
    model_type: str
    architecture: str
    meant: Mapping[str, Any]
    """Defaults of the mixture family that differ from the dense family."""
    rope_theta: float
    """Default of the mixture family."""
    has_own_width: bool
    """Whether the default head width is fixed instead of derived from the hidden size."""


def dense_counterparts() -> Mapping[str, DenseCounterpart]:
    return {
        name: DenseCounterpart(
            family["model_type"],
            family["architecture"],
            {**dict.fromkeys(family.get("null", ())), **family.get("meant", {})},
            family.get("rope_theta", 10_000.0),
            family.get("has_own_width", False),
        )
        for name, family in target_table("experts")["dense_counterparts"].items()
    }


def dense_objections(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("use_sliding_window") and not config.get("layer_types"):
        yield (
            "use_sliding_window is true without layer_types, "
            "and the dense family gives windows to other layers."
        )
    if config.get("qkv_bias") is False:
        yield "qkv_bias is false, and the dense family has these biases."


def dense_config(config: Mapping[str, Any], family: DenseCounterpart, *, width: int) -> dict[str, Any]:
    result = {key: copy.deepcopy(value) for key, value in config.items() if key not in _ONLY_EXPERTS}
    for key, value in family.meant.items():
        result.setdefault(key, value)
    if "rope_theta" not in result and not result.get("rope_parameters"):
        result["rope_theta"] = family.rope_theta
    if family.has_own_width and result.get("head_dim") is None:
        result["head_dim"] = result["hidden_size"] // result.get("num_attention_heads", 32)
    result["architectures"] = [family.architecture]
    result["model_type"] = family.model_type
    result["intermediate_size"] = width
    return result
