"""What encoding as codes changed in the numbers of an output, by tensor and by role."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raymerge.architectures import NameReader, Role, load_rules, stacks
from raymerge.merge_plan.plan import Plan

_DIGITS = 3
"""Digits that errors are told with. How sums over tiles are rounded hangs on the cut, and is far below."""

_Sums = tuple[float, float]
"""Sum of squared errors, and of the squares of the true values."""


@dataclass(frozen=True, slots=True)
class TensorError:
    """What encoding changed in one tensor."""

    name: str
    """The tensor of codes."""
    role: str
    """What it does in the model."""
    relative_error: float
    """Norm of what was changed, as a part of the norm of the true values."""


@dataclass(frozen=True, slots=True)
class RoleError:
    """What encoding changed in all tensors of a role."""

    role: str
    """Name of the role."""
    tensors: int
    """How many of them were encoded."""
    relative_error: float
    """That of all of them as if they were one tensor."""
    worst: TensorError
    """The one with the largest error."""


@dataclass(frozen=True, slots=True)
class ErrorsAbove:
    """Tensors in which encoding changed more than the recipe takes without a word."""

    limit: float
    """``warn_encoding_error`` of the recipe."""
    tensors: int
    """How many."""
    worst: TensorError
    """The one with the largest error."""


@dataclass(frozen=True, slots=True)
class EncodingErrors:
    """What encoding changed in an output. What is only copied is not in it."""

    tensors: tuple[TensorError, ...]
    """Tensors that were encoded, in the order of the plan."""
    roles: tuple[RoleError, ...]
    """The same by role."""

    def __bool__(self) -> bool:
        """Whether anything was encoded."""
        return bool(self.tensors)

    def above(self, limit: float | None) -> ErrorsAbove | None:
        """The tensors with larger errors than a limit; None where there are none, and without a limit."""
        found = [] if limit is None else [each for each in self.tensors if each.relative_error > limit]
        return ErrorsAbove(limit, len(found), _worst(found)) if limit is not None and found else None

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def encoding_errors(plan: Plan, sums: Mapping[int, _Sums]) -> EncodingErrors:
    """What encoding changed in each tensor of an output.

    A tensor whose codes were made for another one has the error of that one.

    Args:
        plan: what was made.
        sums: of each row that was encoded, the squared errors and the squared true values.
    """
    totals = _by_tensor(plan, sums)
    if not totals:
        return EncodingErrors((), ())
    roles = _roles(plan, totals)
    names = plan["tensors"].column("name").to_pylist()
    tensors = {each: TensorError(names[each], roles[each], _relative(totals[each])) for each in totals}
    order = [role.value for role in Role]
    lines = (_role_error(role, tensors, totals) for role in sorted(set(roles.values()), key=order.index))
    return EncodingErrors(tuple(tensors.values()), tuple(lines))


def _by_tensor(plan: Plan, sums: Mapping[int, _Sums]) -> dict[int, _Sums]:
    """The sums over all rows of each tensor."""
    rows = (plan["rows"].column(name).to_pylist() for name in ("tensor", "copy_of"))
    found: dict[int, list[_Sums]] = {}
    for row, (tensor, copy_of) in enumerate(zip(*rows, strict=True) if sums else ()):
        own = sums.get(row if copy_of < 0 else copy_of)
        if own is not None:
            found.setdefault(tensor, []).append(own)
    return {tensor: _added(found[tensor]) for tensor in sorted(found)}


def _roles(plan: Plan, tensors: Iterable[int]) -> dict[int, str]:
    """What tensors do in the model, by their numbers."""
    names, config = plan["tensors"].column("name").to_pylist(), plan.manifest["config"]
    rules, found = load_rules(str(config.get("model_type") or "") or None), stacks(names, config)
    reader = NameReader(rules, stacks=found)
    return {each: reader.describe(names[each]).role.value for each in tensors}


def _role_error(role: str, tensors: Mapping[int, TensorError], totals: Mapping[int, _Sums]) -> RoleError:
    own = [number for number, each in tensors.items() if each.role == role]
    worst = _worst([tensors[number] for number in own])
    return RoleError(role, len(own), _relative(_added(totals[number] for number in own)), worst)


def _worst(tensors: Sequence[TensorError]) -> TensorError:
    return max(tensors, key=lambda each: each.relative_error)


def _added(sums: Iterable[_Sums]) -> _Sums:
    errors, values = zip(*sums, strict=True)
    return math.fsum(errors), math.fsum(values)


def _relative(sums: _Sums) -> float:
    errors, values = sums
    # Zeros are encoded as zeros.
    exact = math.sqrt(errors / values) if values else 0.0
    return float(f"{exact:.{_DIGITS}g}")
