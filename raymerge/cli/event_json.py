"""Events from their JSON form: what a run far away tells, as values that can be rendered here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from raymerge import events
from raymerge.events import Event


def event_from_json(found: Mapping[str, Any]) -> Event | None:
    """The event that ``Event.to_json`` gave; None for what is no event, or one of another version."""
    kind = _kinds().get(str(found.get("event")))
    if kind is None:
        return None
    wanted = [each.name for each in fields(kind)]
    try:
        return kind(**{name: _value(name, found[name]) for name in wanted if name in found})
    except (TypeError, KeyError):
        return None


def _kinds() -> dict[str, type[Event]]:
    """Every kind of event by the name that it has in JSON."""
    kinds = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)]
    return {_name(each): each for each in kinds if each is not Event}


def _name(kind: type[Event]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _value(name: str, value: Any) -> Any:
    """A field as it was before: JSON knows neither tuples nor the values that some events hold."""
    if name in ("groups", "unforeseen"):
        from raymerge.merge_plan.duplicates import DuplicateGroup

        return tuple(DuplicateGroup(**each) for each in value)
    if name == "roles":
        from raymerge.merge_plan.encoding_errors import RoleError, TensorError

        return tuple(RoleError(**{**each, "worst": TensorError(**each["worst"])}) for each in value)
    if name == "above" and value is not None:
        from raymerge.merge_plan.encoding_errors import ErrorsAbove, TensorError

        return ErrorsAbove(**{**value, "worst": TensorError(**value["worst"])})
    return tuple(value) if isinstance(value, list) else value
