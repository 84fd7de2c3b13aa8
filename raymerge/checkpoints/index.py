"""Which files of a directory hold the weights: one answer, or a refusal that says why there is none."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raymerge.checkpoints.header import FileHeader
from raymerge.checkpoints.no_weights import describe_no_weights
from raymerge.checkpoints.strict_json import parse_strict_json
from raymerge.errors import CheckpointError, Problem
from raymerge.storage.store import FileInfo, ReadStore

SINGLE_FILE = "model.safetensors"
"""The name of the weights file of a checkpoint that has one."""
INDEX_FILE = "model.safetensors.index.json"
"""The name of the index of a checkpoint that has several."""

_INDEX_NAME = re.compile(r"model.*\.safetensors\.index\.json", re.DOTALL)
_PART_NAME = re.compile(r"model-([0-9]{5,6})-of-([0-9]{5,6})\.safetensors")
_NUM_NAMED = 3
_NUM_LINES = 8
_GET_A_FIT = "Download the checkpoint again, or ask its publisher for an index that fits."


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """The files that hold a checkpoint's weights, and what its index promises of them."""

    keys: tuple[str, ...]
    """The files, sorted."""
    weight_map: Mapping[str, str] | None
    """Tensor name to file by the index; None where there is no index and the headers alone count."""
    total_size: int | None
    """Bytes of all tensors by the index, where it says so."""
    notes: tuple[str, ...]
    """Things worth telling that stand in nobody's way."""
    problems: tuple[Problem, ...] = ()
    """What makes the checkpoint unusable though it is clear which files are meant; ``keys`` has the rest."""


def find_weights(store: ReadStore, files: Sequence[FileInfo]) -> WeightIndex:
    """Choose the weights files among ``files``, those of ``store``.

    Raises:
        CheckpointError: there are none, or several sets of weights lie together and nothing says which of
            them counts, or the index cannot be read.
    """
    names = {info.key: info for info in files if "/" not in info.key}
    parts = sorted(name for name in names if _PART_NAME.fullmatch(name))
    indexes = sorted(name for name in names if _INDEX_NAME.fullmatch(name))
    where = store.location(".")
    if indexes and (problem := _wrong_index(indexes, where)):
        raise CheckpointError(problem)
    if indexes:
        found = _by_index(store, names, parts)
    elif SINGLE_FILE in names and parts:
        what = (
            f"holds {SINGLE_FILE} and also {_some(parts)}, without an index that says which of them counts."
        )
        raise CheckpointError(Problem(where, what, "Delete the set that is not the model."))
    elif SINGLE_FILE in names:
        found = WeightIndex((SINGLE_FILE,), None, None, ())
    elif parts:
        found = _by_numbers(parts, where)
    else:
        raise CheckpointError(describe_no_weights(names, where))
    return replace(found, notes=found.notes + _left_alone(names, found))


def check_index(
    index: WeightIndex, headers: Iterable[FileHeader], where: str
) -> tuple[list[Problem], list[str]]:
    """Compare what the index promises with what the headers of its files hold.

    Returns the problems (names in one and not in the other, names held twice, a total size that cannot be
    meant) and the notes (a total size that is a little wrong, as publishers often get it).
    """
    holders: dict[str, list[str]] = defaultdict(list)
    total = 0
    for header in headers:
        for tensor in header.tensors:
            holders[tensor.name].append(header.key)
            total += tensor.nbytes
    problems = _held_twice(holders, where)
    if index.weight_map is None:
        return problems, []
    problems += _disagreements(index.weight_map, holders, where)
    if index.total_size is None or index.total_size == total:
        return problems, []
    sizes = f"{INDEX_FILE} gives metadata.total_size as {index.total_size}, the headers add up to {total}"
    if index.total_size * 2 < total:
        problems.append(Problem(where, f"{sizes} bytes: the index is of another model.", _GET_A_FIT))
        return problems, []
    return problems, [f"{sizes} bytes; the headers count."]


def _wrong_index(indexes: Sequence[str], where: str) -> Problem | None:
    if len(indexes) > 1:
        what = f"holds {len(indexes)} indexes ({_some(indexes)}), and nothing says which of them counts."
        return Problem(where, what, "Delete or move all but one, with the files only they name.")
    if indexes == [INDEX_FILE]:
        return None
    what = f"has its index under the name {indexes[0]}, which loaders do not look for."
    return Problem(where, what, f"Rename it to {INDEX_FILE} if it describes the model.")


def _by_index(store: ReadStore, names: Mapping[str, FileInfo], parts: Sequence[str]) -> WeightIndex:
    where = store.location(INDEX_FILE)
    parsed = _parse_index(store.read(INDEX_FILE, 0, names[INDEX_FILE].nbytes), where)
    weight_map = _weight_map(parsed, where)
    listed = sorted(set(weight_map.values()))
    problems = _unfit_files(listed, weight_map, names, where)
    problems += _second_sets(listed, names, parts, store.location("."))
    total, notes = _total_size(parsed)
    keys = tuple(key for key in listed if key in names and key.endswith(".safetensors"))
    return WeightIndex(keys, weight_map, total, notes, tuple(problems))


def _parse_index(raw: bytes, where: str) -> dict[str, Any]:
    try:
        parsed = parse_strict_json(raw)
    except ValueError as error:
        raise CheckpointError(Problem(where, f"the index {error}.", _GET_A_FIT)) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(Problem(where, "the index is not a JSON object.", _GET_A_FIT))
    return parsed


def _weight_map(parsed: Mapping[str, Any], where: str) -> dict[str, str]:
    found = parsed.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        what = "weight_map is missing or is not a map from tensor names to file names."
        raise CheckpointError(Problem(where, what, _GET_A_FIT))
    if not found:
        raise CheckpointError(Problem(where, "weight_map names no tensor.", _GET_A_FIT))
    return found


def _unfit_files(
    listed: Sequence[str], weight_map: Mapping[str, str], names: Mapping[str, FileInfo], where: str
) -> list[Problem]:
    outside = [key for key in listed if not _is_plain_name(key)]
    missing = [key for key in listed if _is_plain_name(key) and key not in names]
    foreign = [key for key in listed if key in names and not key.endswith(".safetensors")]
    problems = []
    if outside:
        tensor = next(name for name, key in weight_map.items() if key == outside[0])
        what = f"places tensor {tensor!r} in {outside[0]!r}, which is not the name of a file beside it"
        what += f" ({len(outside)} such names in all)." if len(outside) > 1 else "."
        remedy = "No honest tool writes such an index: do not use this checkpoint unless you know why."
        problems.append(Problem(where, what, remedy))
    if missing:
        absent = frozenset(missing)
        count = sum(key in absent for key in weight_map.values())
        verb = "is" if len(missing) == 1 else "are"
        what = f"names {_some(missing)}, which {verb} not in the directory ({count} tensors)."
        problems.append(Problem(where, what, "Download or copy what is missing again."))
    if foreign:
        what = f"names {_some(foreign)}: no safetensors."
        problems.append(Problem(where, what, _GET_A_FIT))
    return problems


def _second_sets(
    listed: Sequence[str], names: Mapping[str, FileInfo], parts: Sequence[str], where: str
) -> list[Problem]:
    problems = []
    named = frozenset(listed)
    strays = [part for part in parts if part not in named]
    if SINGLE_FILE in names and SINGLE_FILE not in named:
        what = f"holds {SINGLE_FILE} beside {INDEX_FILE}, which does not name it: two sets of weights."
        remedy = f"Delete {SINGLE_FILE} if the index is the model's, else the index and the files it names."
        problems.append(Problem(where, what, remedy))
    if strays:
        what = f"holds {_some(strays)}, which {INDEX_FILE} does not name: remains of another set of weights."
        problems.append(Problem(where, what, "Delete them, or take the index that belongs to them."))
    return problems


def _is_plain_name(key: str) -> bool:
    return key not in ("", ".", "..") and not any(mark in key for mark in "/\\\0")


def _total_size(parsed: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    metadata = parsed.get("metadata")
    found = metadata.get("total_size") if isinstance(metadata, dict) else None
    if found is None:
        return None, ()
    if isinstance(found, bool) or not isinstance(found, int | float) or found != found // 1:
        return None, (f"{INDEX_FILE} gives metadata.total_size as {str(found)[:40]!r}, not a size; ignored.",)
    return int(found), ()


def _by_numbers(parts: Sequence[str], where: str) -> WeightIndex:
    """Numbered files without an index: fine when exactly one complete set is there."""
    sets: dict[str, set[str]] = defaultdict(set)
    for part in parts:
        match = _PART_NAME.fullmatch(part)
        assert match is not None
        sets[match.group(2)].add(match.group(1))
    if len(sets) > 1:
        counts = " and ".join(f"{len(found)} files of {int(of)}" for of, found in sorted(sets.items()))
        what = f"holds {counts}: several sets of weights, and no index that says which of them counts."
        raise CheckpointError(Problem(where, what, "Delete the sets that are not the model."))
    ((of, found),) = sets.items()
    if problem := _incomplete(of, found, where):
        raise CheckpointError(problem)
    note = f"there is no {INDEX_FILE}; the {len(parts)} numbered files are complete, so their headers count."
    return WeightIndex(tuple(parts), None, None, (note,))


def _incomplete(of: str, found: set[str], where: str) -> Problem | None:
    numbers = {int(number) for number in found}
    expected = int(of)
    strange = len(found) != len(numbers) or 0 in numbers or max(numbers) > expected
    if strange:
        what = f"holds files numbered {_some(sorted(found))} of {expected}, which is no sequence from 1."
        return Problem(where, what, "Delete the files that are not the model's.")
    if len(numbers) == expected:
        return None
    missing = expected - len(numbers)
    first: list[str] = []
    for number in range(1, expected + 1):
        if number not in numbers and len(first) < _NUM_NAMED:
            first.append(f"model-{number:05d}-of-{of}.safetensors")
        if len(first) == _NUM_NAMED:
            break
    named = ", ".join(first) + (" and others" if missing > len(first) else "")
    what = f"holds {len(numbers)} of {expected} numbered files and no index; {missing} missing: {named}."
    return Problem(where, what, "Download or copy the checkpoint again.")


def _left_alone(names: Mapping[str, FileInfo], found: WeightIndex) -> tuple[str, ...]:
    others = sorted(name for name in names if name.endswith(".safetensors") and name not in found.keys)
    return (f"left alone, because not part of the model's weights: {_some(others)}.",) if others else ()


def _held_twice(holders: Mapping[str, Sequence[str]], where: str) -> list[Problem]:
    twice = [name for name, keys in holders.items() if len(keys) > 1]
    if not twice:
        return []
    keys = " and ".join(holders[twice[0]][:_NUM_NAMED])
    what = f"holds {_tensors(twice)} in more than one file (the first in {keys})."
    return [Problem(where, what, _GET_A_FIT)]


def _disagreements(
    weight_map: Mapping[str, str], holders: Mapping[str, Sequence[str]], where: str
) -> list[Problem]:
    absent, unnamed = defaultdict(list), defaultdict(list)
    for name, key in weight_map.items():
        if key not in holders.get(name, ()):
            absent[key].append(name)
    for name, keys in holders.items():
        for key in keys:
            if weight_map.get(name) != key:
                unnamed[key].append(name)
    problems = [
        f"{INDEX_FILE} places {_tensors(names)} in {key}, which does not hold them."
        for key, names in sorted(absent.items())
    ]
    problems += [
        f"{key} holds {_tensors(names)} that {INDEX_FILE} does not place there."
        for key, names in sorted(unnamed.items())
    ]
    more = len(problems) - _NUM_LINES
    rest = [f"there are {more} more such disagreements with {INDEX_FILE}."] if more > 0 else []
    return [Problem(where, what, _GET_A_FIT) for what in (*problems[:_NUM_LINES], *rest)]


def _tensors(names: Sequence[str]) -> str:
    noun = "tensor" if len(names) == 1 else "tensors"
    some = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
    return f"{len(names)} {noun} ({some})"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
