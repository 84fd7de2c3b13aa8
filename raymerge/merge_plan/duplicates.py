"""Output that equals other output: what the plan knows beforehand, and what the bytes turn out to be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from raymerge.merge_plan.plan import Plan

_EXAMPLES = 5
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class DuplicateGroup:
    """Tensors alike in name that equal others."""

    pattern: str
    """Their names, with ``*`` for each number."""
    tensors: int
    """How many equal an earlier one, in whole or in part."""
    nbytes: int
    """Bytes of what is equal."""


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Output that equals other output: computed once, written to each place."""

    policy: str
    """``duplicates`` of the recipe."""
    tensors: int
    """Tensors that equal an earlier one, in whole or in part."""
    nbytes: int
    """Bytes that are not computed again."""
    groups: tuple[DuplicateGroup, ...]
    """The same by names, those with most bytes first."""
    examples: tuple[tuple[str, str], ...]
    """The first such tensors with the one that each equals."""


@dataclass(frozen=True, slots=True)
class FoundDuplicates:
    """What a finished run knows of output that equals other output."""

    planned: Duplicates
    """What was made once and written to several places."""
    shared_bytes: int | None
    """Bytes of it that share storage; None where that was not asked for, or an earlier run saw to it."""
    unforeseen: tuple[DuplicateGroup, ...]
    """What was made more than once, since only its bytes tell that it is equal; most bytes first."""

    def __bool__(self) -> bool:
        """Whether there is anything to say."""
        return bool(self.planned.tensors or self.unforeseen)


def found_duplicates(plan: Plan, digests: Mapping[int, str], *, shared_bytes: int | None) -> FoundDuplicates:
    """What there is to say of equal output once all of it is made.

    Args:
        plan: what was made.
        digests: digest of the bytes of each row that was made.
        shared_bytes: bytes that were made to share storage.
    """
    return FoundDuplicates(planned_duplicates(plan), shared_bytes, equal_tensors(plan, digests))


def planned_duplicates(plan: Plan) -> Duplicates:
    """What the plan makes once and writes more than once."""
    names = plan["tensors"].column("name").to_pylist()
    rows = plan["rows"].select(["tensor", "copy_of", "nbytes"]).to_pylist()
    pairs: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for row in rows:
        if row["copy_of"] >= 0:
            name = names[row["tensor"]]
            pairs.setdefault(name, names[rows[row["copy_of"]]["tensor"]])
            sizes[name] = sizes.get(name, 0) + row["nbytes"]
    examples = tuple(pairs.items())[:_EXAMPLES]
    policy = str(plan.manifest["duplicates"])
    return Duplicates(policy, len(pairs), sum(sizes.values()), _groups(sizes.items()), examples)


def equal_tensors(plan: Plan, digests: Mapping[int, str]) -> tuple[DuplicateGroup, ...]:
    """Tensors whose bytes turned out to be those of an earlier one, though the plan did not know it.

    Args:
        plan: what was made.
        digests: digest of the bytes of each row that was made.
    """
    return _groups(_found_equal(plan, digests))


def _found_equal(plan: Plan, digests: Mapping[int, str]) -> Iterator[tuple[str, int]]:
    rows = plan["rows"].select(["tensor", "copy_of", "expression"]).to_pylist()
    is_constant = [each.is_constant for each in plan.expressions]
    contents: dict[int, list[str]] = {}
    is_known: dict[int, bool] = {}
    for index, row in enumerate(rows):
        made = row["copy_of"] if row["copy_of"] >= 0 else index
        contents.setdefault(row["tensor"], []).append(digests.get(made, f"row {index}"))
        knows = row["copy_of"] >= 0 or is_constant[row["expression"]]
        is_known[row["tensor"]] = is_known.get(row["tensor"], True) and knows
    seen: set[tuple[str, ...]] = set()
    for number, tensor in enumerate(plan["tensors"].select(["name", "nbytes"]).to_pylist()):
        content = tuple(contents.get(number, ()))
        if content in seen and tensor["nbytes"] and not is_known[number]:
            yield tensor["name"], tensor["nbytes"]
        seen.add(content)


def _groups(sizes: Iterable[tuple[str, int]]) -> tuple[DuplicateGroup, ...]:
    found: dict[str, list[int]] = {}
    for name, nbytes in sizes:
        found.setdefault(_NUMBER.sub("*", name), []).append(nbytes)
    groups = [DuplicateGroup(pattern, len(each), sum(each)) for pattern, each in found.items()]
    return tuple(sorted(groups, key=lambda group: (-group.nbytes, group.pattern)))
