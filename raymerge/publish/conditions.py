"""What must be the same for a run or a stage to go on: what its bytes depend on beside its plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raymerge.errors import Problem, TargetError

_FACTS_SHOWN = 4


def agree(before: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Whether conditions, as they were written down, are those that are wanted."""
    return before == _plain(wanted)


def check_agreement(
    before: Mapping[str, Any] | None, wanted: Mapping[str, Any], *, where: str, what: str
) -> None:
    """Refuse to mix what was made under two conditions, and to throw it away unasked.

    Versions of files that nobody has made yet are not compared.

    Args:
        before: the conditions of what is there; None where there is nothing.
        wanted: those of this run.
        where: what messages point at.
        what: what is there, as the beginning of a sentence.

    Raises:
        TargetError: they differ; it says in what.
    """
    if before is None:
        return
    old, new = _known(before, wanted), _known(wanted, wanted)
    if not agree(old, new):
        raise TargetError(
            Problem(
                where,
                f"{what} was begun under other conditions: {difference(old, new)}.",
                "Restore them to resume it, or give --replace to start again.",
            )
        )


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first few facts in which two records differ, as one phrase."""
    if not old:
        return "its record cannot be read"
    before, after = _facts(old), _facts(_plain(new))
    places = [place for place in {**before, **after} if before.get(place) != after.get(place)]
    found = [f"{place} was {_shown(before.get(place))}, is {_shown(after.get(place))}" for place in places]
    shown = found[:_FACTS_SHOWN] + ([f"and {len(found) - _FACTS_SHOWN} more"] if found[_FACTS_SHOWN:] else [])
    return "; ".join(shown) or "its plan was made of the same facts in another way"


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as it is when it was written down and read again."""
    found: dict[str, Any] = json.loads(json.dumps(dict(record)))
    return found


def _known(record: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Conditions without the holdings of which ``wanted`` does not know a version yet."""
    versions = wanted.get("versions", [])
    unmade = {number for number, each in enumerate(versions) if not all(v for _, v in each["files"])}
    kept = [each for number, each in enumerate(record.get("versions", [])) if number not in unmade]
    known = {**record, "versions": kept}
    if "companions" in wanted and wanted["companions"] is None:
        known["companions"] = None
    return known


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a record by their place, as far as they tell one run from another."""
    found: dict[str, Any] = {}
    for key in ("recipe", "raymerge", "sources", "config", "numerics", "versions", "companions", "commits"):
        found |= _flat(key, record.get(key))
    return found


def _flat(place: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        named = value.items()
    elif isinstance(value, list):
        named = {_label(each, position): each for position, each in enumerate(value)}.items()
    else:
        return {place: value}
    return {at: fact for key, each in named for at, fact in _flat(f"{place} > {key}", each).items()}


def _label(value: Any, position: int) -> str:
    """How to call an element of a list: by the model or file that it is about, else by its number."""
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value[0]
    return str(position + 1)


def _shown(value: Any) -> str:
    return "absent" if value is None else json.dumps(value)
