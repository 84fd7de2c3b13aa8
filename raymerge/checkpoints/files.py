"""Which files of a directory hold the weights, and which others are copied or left out.

Every file other than weights is a companion, is left out by a named rule, or holds weights without a rule."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from raymerge.checkpoints.dcp.layout import CHUNKS_ENDING
from raymerge.checkpoints.dcp.metadata import METADATA_FILE
from raymerge.checkpoints.header import FileHeader
from raymerge.checkpoints.json_files import read_bounded, strict_object
from raymerge.errors import CheckpointError, Problem, shortlist
from raymerge.storage.file_rules import EXPORT, rule_of
from raymerge.storage.store import FileInfo, ReadStore

ADAPTER_CONFIG_FILE = "adapter_config.json"
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "m = M.from_pretrained('{path}', dtype='auto'); m.save_pretrained('{path}-safetensors')\""
)


def describe_no_weights(names: Iterable[str], where: str, *, pickled: bool = False) -> Problem:
    """Describe what the directory ``where`` with the files ``names`` is, given that it is not a checkpoint.

    Adapters are checked first, since their weights are safetensors or pickles too. ``pickled``: whether
    pickles would have been read."""
    ordered = sorted(names)
    pickles = [name for name in ordered if name.endswith(PICKLE_ENDINGS)]
    others = [name for name in ordered if name.endswith(".safetensors")]
    ggufs = [name for name in ordered if name.endswith(".gguf")]
    if ADAPTER_CONFIG_FILE in ordered:
        what = "is a LoRA adapter (adapter_config.json), not a model."
        return Problem(where, what, f"Name it behind the model that it was trained on: MODEL+{where}.")
    if METADATA_FILE not in ordered and any(name.endswith(CHUNKS_ENDING) for name in ordered):
        what = f"holds chunks of a training checkpoint (*{CHUNKS_ENDING}) without {METADATA_FILE}, which is"
        what += " saved last: the save did not finish, or that file was not copied with the others."
        return Problem(where, what, f"Copy {METADATA_FILE} too, or take an earlier checkpoint.")
    if others:
        what = f"holds {', '.join(others[:3])}, but neither model.safetensors nor an index of several files."
        return Problem(where, what, "If that is the model in the Hugging Face layout, rename it.")
    if pickles and pickled:
        what = f"holds {', '.join(pickles[:3])}, but neither pytorch_model.bin nor an index of several files."
        return Problem(where, what, "If one of them is the model, rename it to pytorch_model.bin.")
    if pickles:
        what = f"has its weights in {pickles[0]}, and pickled weights are refused (pickled_weights: refuse)."
        remedy = "Take that out: no code of the file is run. Or convert it: "
        return Problem(where, what, remedy + _CONVERT.format(path=where))
    if ggufs:
        what = f"has its weights in {ggufs[0]}; GGUF is a format for running models, not for merging them."
        return Problem(where, what, "Take the checkpoint in safetensors that it was made from.")
    what = "holds no weights: neither model.safetensors nor model.safetensors.index.json."
    return Problem(where, what, "Check the path, and whether the download came to its end.")


_NUM_NAMED = 3
_NUM_LINES = 8
_GET_A_FIT = "Download the checkpoint again, or ask its publisher for an index that fits."


@dataclass(frozen=True, slots=True)
class WeightNames:
    """File names of the weights of one format."""

    stem: str
    endings: tuple[str, ...]
    """Suffixes; numbered files and the index have the first."""
    kind: str

    @property
    def singles(self) -> tuple[str, ...]:
        return tuple(f"{self.stem}{ending}" for ending in self.endings)

    @property
    def index(self) -> str:
        return f"{self.singles[0]}.index.json"

    def part(self, number: int, of: str) -> str:
        return f"{self.stem}-{number:05d}-of-{of}{self.endings[0]}"

    def part_numbers(self, name: str) -> tuple[str, str] | None:
        stem, ending = re.escape(self.stem), re.escape(self.endings[0])
        match = re.fullmatch(rf"{stem}-([0-9]{{5,6}})-of-([0-9]{{5,6}}){ending}", name)
        return (match.group(1), match.group(2)) if match else None

    def is_index(self, name: str) -> bool:
        return name.startswith(self.stem) and name.endswith(f"{self.endings[0]}.index.json")

    def are_in(self, names: Iterable[str]) -> bool:
        return any(name in self.singles or self.is_index(name) or self.part_numbers(name) for name in names)


SAFETENSORS = WeightNames("model", (".safetensors",), "safetensors")
PICKLES = WeightNames("pytorch_model", PICKLE_ENDINGS, "pickled weights")
INDEX_FILE = SAFETENSORS.index


@dataclass(frozen=True, slots=True)
class WeightIndex:
    keys: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    """File by tensor name; None without an index."""
    total_size: int | None
    notes: tuple[str, ...]
    problems: tuple[Problem, ...] = ()
    """Faults that leave it clear which files are meant; ``keys`` has those that can be read."""
    names: WeightNames = SAFETENSORS


def find_weights(store: ReadStore, files: Sequence[FileInfo], *, pickled: bool = False) -> WeightIndex:
    """Choose the weights files among ``files``, those of ``store``; safetensors go before pickles. Raises
    CheckpointError: no weights, several sets of weights of equal standing, or an unreadable index."""
    names = {info.key: info for info in files if "/" not in info.key}
    where = store.location(".")
    kinds = (SAFETENSORS, PICKLES) if pickled else (SAFETENSORS,)
    kind = next((kind for kind in kinds if kind.are_in(names)), None)
    if kind is None:
        raise CheckpointError(describe_no_weights(names, where, pickled=pickled))
    index = weights_of(store, names, kind)
    if kind is SAFETENSORS:
        return index
    note = f"its tensors are read from pickled files: {shortlist(index.keys)}."
    return replace(index, notes=(*index.notes, note))


def weights_of(
    store: ReadStore, names: Mapping[str, FileInfo], kind: WeightNames, directory: str = ""
) -> WeightIndex:
    """The weights of one kind among the files of a ``directory``, which ends in a slash, by their ``names``
    in it. Raises CheckpointError: several sets of weights of equal standing, or an unreadable index."""
    where = store.location(directory or ".")
    indexes = sorted(name for name in names if kind.is_index(name))
    if len(indexes) > 1:
        what = f"holds {len(indexes)} indexes ({shortlist(indexes)}), and nothing says which of them counts."
        remedy = "Delete or move all but one, with the files only they name."
        raise CheckpointError(Problem(where, what, remedy))
    if indexes and indexes != [kind.index]:
        what = f"has its index under the name {indexes[0]}, which loaders do not look for."
        remedy = f"Rename it to {kind.index} if it describes the model."
        raise CheckpointError(Problem(where, what, remedy))
    return _by_index(store, names, kind, where) if indexes else _by_names(names, kind, where)


def check_index(
    index: WeightIndex, headers: Sequence[FileHeader], where: str
) -> tuple[list[Problem], list[str]]:
    """Compare the index with the headers of its files.

    Returns problems (names in only one of them, duplicate names, an impossible total size) and notes (a
    total size that is slightly wrong, as many publishers have it)."""
    # An index names files beside it.
    keys = [header.key.rpartition("/")[2] for header in headers]
    tensors = [
        (tensor.name, key) for key, header in zip(keys, headers, strict=True) for tensor in header.tensors
    ]
    total = sum([tensor.nbytes for header in headers for tensor in header.tensors])
    files, problems = dict(tensors), list[Problem]()
    if len(files) < len(tensors) or index.weight_map not in (None, files):
        problems = _wrong_files(index, tensors, where)
    if index.weight_map is None:
        return problems, []
    if index.total_size is None or index.total_size == total:
        return problems, []
    sizes = (
        f"{index.names.index} gives metadata.total_size as {index.total_size}, the headers add up to {total}"
    )
    # Some tools write 0 where they do not count.
    if index.total_size != 0 and index.total_size * 2 < total:
        problems.append(Problem(where, f"{sizes} bytes: the index is of another model.", _GET_A_FIT))
        return problems, []
    return problems, [f"{sizes} bytes; the headers count."]


def _by_names(names: Mapping[str, FileInfo], kind: WeightNames, where: str) -> WeightIndex:
    """The weights files without an index: a single file, or one numbered set."""
    singles = [name for name in kind.singles if name in names]
    parts = _parts(names, kind)
    if not singles:
        return _by_numbers(parts, where, kind)
    if parts or len(singles) > 1:
        second = shortlist(parts or singles[1:])
        what = f"holds {singles[0]} and also {second}, without an index that says which of them counts."
        raise CheckpointError(Problem(where, what, "Delete the set that is not the model."))
    return WeightIndex((singles[0],), None, None, (), names=kind)


def _parts(names: Iterable[str], kind: WeightNames) -> list[str]:
    return sorted(name for name in names if kind.part_numbers(name))


def _by_index(
    store: ReadStore, names: Mapping[str, FileInfo], kind: WeightNames, directory: str
) -> WeightIndex:
    info = names[kind.index]
    where = store.location(info.key)
    raw = read_bounded(store, info.key, info.nbytes)
    parsed = strict_object(raw, where, "the index", _GET_A_FIT)
    weight_map = _weight_map(parsed, where)
    listed = sorted(set(weight_map.values()))
    problems = _unfit_files(listed, weight_map, names, where, kind=kind)
    problems += _second_sets(listed, names, directory, kind)
    total, notes = _total_size(parsed, kind)
    keys = tuple(key for key in listed if key in names and key.endswith(kind.endings))
    return WeightIndex(keys, weight_map, total, notes, tuple(problems), kind)


def _weight_map(parsed: Mapping[str, Any], where: str) -> dict[str, str]:
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        what = "weight_map is missing or is not a map from tensor names to file names."
        raise CheckpointError(Problem(where, what, _GET_A_FIT))
    if not weight_map:
        raise CheckpointError(Problem(where, "weight_map names no tensor.", _GET_A_FIT))
    return weight_map


def _unfit_files(
    listed: Sequence[str],
    weight_map: Mapping[str, str],
    names: Mapping[str, FileInfo],
    where: str,
    *,
    kind: WeightNames,
) -> list[Problem]:
    outside = [key for key in listed if not _is_plain_name(key)]
    missing = [key for key in listed if _is_plain_name(key) and key not in names]
    foreign = [key for key in listed if key in names and not key.endswith(kind.endings)]
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
        what = f"names {shortlist(missing)}, which {verb} not in the directory ({count} tensors)."
        problems.append(Problem(where, what, "Download or copy what is missing again."))
    if foreign:
        what = f"names {shortlist(foreign)}: no {kind.kind}."
        problems.append(Problem(where, what, _GET_A_FIT))
    return problems


def _second_sets(
    listed: Sequence[str], names: Mapping[str, FileInfo], where: str, kind: WeightNames
) -> list[Problem]:
    problems = []
    named = frozenset(listed)
    strays = [part for part in _parts(names, kind) if part not in named]
    for single in kind.singles:
        if single in names and single not in named:
            what = f"holds {single} beside {kind.index}, which does not name it: two sets of weights."
            remedy = f"Delete {single} if the index is the model's, else the index and the files it names."
            problems.append(Problem(where, what, remedy))
    if strays:
        what = (
            f"holds {shortlist(strays)}, which {kind.index} does not name: remains of another set of weights."
        )
        problems.append(Problem(where, what, "Delete them, or take the index that belongs to them."))
    return problems


def _is_plain_name(key: str) -> bool:
    return key not in ("", ".", "..") and not any(mark in key for mark in "/\\\0")


def _total_size(parsed: Mapping[str, Any], kind: WeightNames) -> tuple[int | None, tuple[str, ...]]:
    metadata = parsed.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        return None, ()
    if isinstance(total, bool) or not isinstance(total, int | float) or total != total // 1:
        return None, (f"{kind.index} gives metadata.total_size as {str(total)[:40]!r}, not a size; ignored.",)
    return int(total), ()


def _by_numbers(parts: Sequence[str], where: str, kind: WeightNames) -> WeightIndex:
    """Numbered files without an index: accepted if they are exactly one complete set."""
    sets: dict[str, set[str]] = defaultdict(set)
    for part in parts:
        numbers = kind.part_numbers(part)
        assert numbers is not None
        sets[numbers[1]].add(numbers[0])
    if len(sets) > 1:
        counts = " and ".join(f"{len(present)} files of {int(of)}" for of, present in sorted(sets.items()))
        what = f"holds {counts}: several sets of weights, and no index that says which of them counts."
        raise CheckpointError(Problem(where, what, "Delete the sets that are not the model."))
    ((of, present),) = sets.items()
    _check_complete(of, present, where, kind)
    note = f"there is no {kind.index}; the {len(parts)} numbered files are complete, so their headers count."
    return WeightIndex(tuple(parts), None, None, (note,), names=kind)


def _check_complete(of: str, present: set[str], where: str, kind: WeightNames) -> None:
    numbers, expected = {int(number) for number in present}, int(of)
    if len(present) != len(numbers) or 0 in numbers or max(numbers) > expected:
        what = (
            f"holds files numbered {shortlist(sorted(present))} of {expected}, which is no sequence from 1."
        )
        raise CheckpointError(Problem(where, what, "Delete the files that are not the model's."))
    if len(numbers) == expected:
        return
    missing = [number for number in range(1, expected + 1) if number not in numbers]
    first = ", ".join(kind.part(number, of) for number in missing[:_NUM_NAMED])
    named = first + (" and others" if len(missing) > _NUM_NAMED else "")
    what = f"holds {len(numbers)} of {expected} numbered files and no index; {len(missing)} missing: {named}."
    raise CheckpointError(Problem(where, what, "Download or copy the checkpoint again."))


def _wrong_files(index: WeightIndex, tensors: Iterable[tuple[str, str]], where: str) -> list[Problem]:
    """Tensors that are stored twice or in another file than the index says; ``tensors`` is (name, file)."""
    files: dict[str, list[str]] = defaultdict(list)
    for name, key in tensors:
        files[name].append(key)
    sentences = []
    if twice := [name for name, keys in files.items() if len(keys) > 1]:
        keys = " and ".join(files[twice[0]][:_NUM_NAMED])
        sentences.append(f"holds {_tensors(twice)} in more than one file (the first in {keys}).")
    if index.weight_map is not None:
        sentences += _disagreements(index.names.index, index.weight_map, files)
    return [Problem(where, what, _GET_A_FIT) for what in sentences]


def _disagreements(
    index: str, weight_map: Mapping[str, str], files: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    absent, unnamed = defaultdict(list), defaultdict(list)
    for name, key in weight_map.items():
        if key not in files.get(name, ()):
            absent[key].append(name)
    for name, keys in files.items():
        for key in keys:
            if weight_map.get(name) != key:
                unnamed[key].append(name)
    sentences = [
        f"{index} places {_tensors(names)} in {key}, which does not hold them."
        for key, names in sorted(absent.items())
    ]
    sentences += [
        f"{key} holds {_tensors(names)} that {index} does not place there."
        for key, names in sorted(unnamed.items())
    ]
    yield from sentences[:_NUM_LINES]
    if (more := len(sentences) - _NUM_LINES) > 0:
        yield f"there are {more} more such disagreements with {index}."


def _tensors(names: Sequence[str]) -> str:
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{len(names)} {noun} ({shortlist(names)})"


MODEL_CARD = "README.md"
RECORD_DIRECTORY = "raymerge"

_CARD_RULE = "model card"
_RECORD_RULE = "record of a merge"
_ADAPTER_RULE = "adapter"
_PICKLE_RULE = "pickled copy"
_MODEL_RULE = "model beside an adapter"
LINK_RULE = "link to a directory"
"""Rule for links to directories without weights, or to files that the source has anyway."""
_MADE_ANEW = {MODEL_CARD: _CARD_RULE, RECORD_DIRECTORY: _RECORD_RULE, "config.json": "config"}
"""Rules for top-level names that the output writes itself, files or directories."""
REASONS: Mapping[str, str] = {
    "hidden": "files and directories whose names begin with a dot",
    "training state": "optimizers, schedulers, random states and checkpoints of a training",
    "original release": "the weights once more, in the layout of their publisher",
    "export for other software": "the weights once more, in a format that other software runs",
    "variant in another precision": "the weights once more, in another precision",
    _CARD_RULE: "written anew for the output",
    _RECORD_RULE: "of the merge that made this source",
    _ADAPTER_RULE: "name it behind the model to merge it: MODEL+ADAPTER",
    _PICKLE_RULE: "safetensors of the same model lie beside it and are read",
    _MODEL_RULE: "only the adapter is read",
    LINK_RULE: "not followed; no weights that a merge needs lie behind it",
    "config": "written anew for the output",
}
_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"),
    *("*.safetensors.index.json", "*.bin.index.json", "weights*.npz"),
)
_ADAPTER_FILES = (
    ADAPTER_CONFIG_FILE,
    "adapter_model*.safetensors",
    "adapter_model*.bin",
    "adapter_model*.pt",
)
_ASSETS: Mapping[str, str] = {"spk_dict.pt": "the voices of Qwen2.5-Omni"}
"""Files that look like weights but are not, with their contents; they are copied."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    key: str
    """A link to a directory ends in a slash."""
    nbytes: int
    rule: str | None
    is_weights: bool


def is_companion(key: str) -> bool:
    return rule_by_name(key) is None and not holds_weights(key)


def rule_by_name(key: str) -> str | None:
    """Rule that excludes a file, or a directory (ending in a slash), by its name alone."""
    return _Rules([key]).of_file(key)


def holds_weights(key: str) -> bool:
    name = key.rpartition("/")[2]
    return _any(name, _WEIGHTS) and not _any(name, _ASSETS)


def sort_files(
    files: Mapping[str, int], read: Collection[str], *, is_adapter: bool = False
) -> tuple[tuple[str, ...], tuple[LeftOut, ...]]:
    """Companions among the files of a model or adapter, and the files left out."""
    companions: list[str] = []
    left_out: list[LeftOut] = []
    rules = _Rules(files)
    for key in sorted(files.keys() - set(read)):
        rule, is_weights = rules.of_file(key), holds_weights(key)
        if is_adapter and rule is None and (SAFETENSORS.are_in([key]) or PICKLES.are_in([key])):
            rule = _MODEL_RULE
        if rule is None and not is_weights:
            companions.append(key)
        else:
            left_out.append(LeftOut(key, files[key], rule, is_weights or rule == EXPORT.name))
    return tuple(companions), tuple(left_out)


class _Rules:
    def __init__(self, files: Collection[str]) -> None:
        parts = [key.rpartition("/")[::2] for key in files]
        self._adapters = {directory for directory, name in parts if name == ADAPTER_CONFIG_FILE} - {""}
        self._models = {directory for directory, name in parts if SAFETENSORS.are_in([name])}

    def of_file(self, key: str) -> str | None:
        directory, _, name = key.rpartition("/")
        top = key.partition("/")[0]
        if top in _MADE_ANEW:
            return _MADE_ANEW[top]
        if (rule := rule_of(key)) is not None:
            return rule.name
        if _any(name, _ADAPTER_FILES) or any(key.startswith(f"{each}/") for each in self._adapters):
            return _ADAPTER_RULE
        is_pickle = PICKLES.are_in([name]) or fnmatchcase(name, f"{PICKLES.stem}.*.bin")
        return _PICKLE_RULE if is_pickle and directory in self._models else None


def _any(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


_MAX_FILES = 10_000
"""Files behind a link that are examined; a link to more is assumed to hold weights."""


def linked_directories(root: Path) -> Iterator[LeftOut]:
    """Links to directories below a local source, which are not followed.

    One that may lead to weights outside the source has no rule, so a merge refuses it."""
    for folder, directories, _ in os.walk(root):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in directories:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                key = Path(path).relative_to(root).as_posix() + "/"
                rule = rule_by_name(key) or (None if _may_hold_weights(path, key, root) else LINK_RULE)
                yield LeftOut(key, 0, rule, is_weights=rule is None)


def _may_hold_weights(link: str, key: str, root: Path) -> bool:
    """Whether weights without a rule may lie behind a link and outside the source."""
    target, inside = os.path.realpath(link), os.path.realpath(root)
    if os.path.commonpath((target, inside)) == inside:
        return False
    errors: list[OSError] = []
    num_files = 0
    for folder, directories, names in os.walk(target, onerror=errors.append):
        num_files += len(names)
        below = Path(key) / Path(folder).relative_to(target)
        is_linked = any(os.path.islink(os.path.join(folder, name)) for name in directories)
        has_weights = any(
            holds_weights(name) and rule_by_name((below / name).as_posix()) is None for name in names
        )
        if is_linked or has_weights or num_files > _MAX_FILES:
            return True
    return bool(errors)


def stray_links(root: Path, keys: Sequence[str]) -> Iterator[Problem]:
    """Companions that are links to files outside the model's directory.

    Links into the Hub's cache, where snapshots are made of links, are accepted."""
    allowed = _places(os.path.realpath(root))
    for key in keys:
        path = os.path.join(root, key)
        if not os.path.islink(path):
            continue
        target = os.path.realpath(path)
        if not any(target.startswith(place + os.sep) for place in allowed):
            what = f"is a link to {target}, outside of the model, and would be copied into the result."
            yield Problem(
                path,
                what,
                f"If it belongs to the model, copy it there: cp --remove-destination {target} {path}",
            )


def _places(root: str) -> list[str]:
    """The directory, and those where the Hub's cache keeps the files of a snapshot."""
    above, _ = os.path.split(root)
    repository, name = os.path.split(above)
    if name != "snapshots":
        return [root]
    return [root, os.path.join(repository, "blobs"), os.path.join(os.path.dirname(repository), "blobs")]
