"""What becomes of each file of a checkpoint's directory, and of links in it.

It is read, copied as a companion, left out by a rule that has a name, or holds weights that no rule is about.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from raymerge.checkpoints.adapter_config import ADAPTER_CONFIG_FILE
from raymerge.checkpoints.index import PICKLES, SAFETENSORS
from raymerge.errors import Problem
from raymerge.storage.file_rules import EXPORT, rule_of

MODEL_CARD = "README.md"
"""The model card, which is written anew."""
RECORD_DIRECTORY = "raymerge"
"""Directory of the record of a merge within a checkpoint."""

_CARD_RULE = "model card"
_RECORD_RULE = "record of a merge"
_ADAPTER_RULE = "adapter"
_PICKLE_RULE = "pickled copy"
_MODEL_RULE = "model beside an adapter"
LINK_RULE = "link to a directory"
"""Rule for links to directories that lead to no weights, or to what lies in the source anyway."""
_MADE_ANEW = {MODEL_CARD: _CARD_RULE, RECORD_DIRECTORY: _RECORD_RULE, "config.json": "config"}
"""Rules for names at the top that the output uses itself, be they of files or of directories."""
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
"""What each rule is about, in a few words."""
_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"),
    *("*.safetensors.index.json", "*.bin.index.json", "weights*.npz"),
)
"""Names of files that hold weights, or say where weights are."""
_ADAPTER_FILES = (
    ADAPTER_CONFIG_FILE,
    "adapter_model*.safetensors",
    "adapter_model*.bin",
    "adapter_model*.pt",
)
_ASSETS: Mapping[str, str] = {"spk_dict.pt": "the voices of Qwen2.5-Omni"}
"""Names of files that look like weights and are none, with what they hold; they are copied."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is neither read nor copied."""

    key: str
    """The file; a link to a directory ends in a slash."""
    nbytes: int
    """Its size in bytes."""
    rule: str | None
    """Name of the rule that leaves it out; None for weights that no rule is about."""
    is_weights: bool
    """Whether it holds weights, by its name."""


def is_companion(key: str) -> bool:
    """Whether a file belongs to the model and is copied, as far as its own name tells."""
    return rule_by_name(key) is None and not holds_weights(key)


def rule_by_name(key: str) -> str | None:
    """Name of the rule that leaves out a file, whatever lies beside it, or a directory (with a slash at the
    end)."""
    return _Rules([key]).of_file(key)


def holds_weights(key: str) -> bool:
    """Whether a file holds weights, or says where weights are, by its name."""
    name = key.rpartition("/")[2]
    return _any(name, _WEIGHTS) and not _any(name, _ASSETS)


def sort_files(
    files: Mapping[str, int], read: Collection[str], *, is_adapter: bool = False
) -> tuple[tuple[str, ...], tuple[LeftOut, ...]]:
    """The companions among the files of a model or adapter, and all that is left out.

    Args:
        files: every file with its size.
        read: keys of those that are read: weights, index and config.
        is_adapter: whether they are an adapter's, beside which the weights of its model may lie.
    """
    companions: list[str] = []
    left_out: list[LeftOut] = []
    rules = _Rules(files)
    for key in sorted(files.keys() - set(read)):
        rule, is_weights = rules.of_file(key), holds_weights(key)
        if is_adapter and rule is None and _is_model(key):
            rule = _MODEL_RULE
        if rule is None and not is_weights:
            companions.append(key)
        else:
            left_out.append(LeftOut(key, files[key], rule, is_weights or rule == EXPORT.name))
    return tuple(companions), tuple(left_out)


class _Rules:
    """Which rule leaves out a file, also by what lies beside it."""

    def __init__(self, files: Collection[str]) -> None:
        """
        Args:
            files: keys of all files of a model.
        """
        parts = [key.rpartition("/")[::2] for key in files]
        self._adapters = {directory for directory, name in parts if name == ADAPTER_CONFIG_FILE} - {""}
        self._models = {directory for directory, name in parts if SAFETENSORS.are_in([name])}

    def of_file(self, key: str) -> str | None:
        """Name of the rule that leaves out ``key``; None where none does."""
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


def _is_model(key: str) -> bool:
    """Whether it has the name of a model's weights, at the top."""
    return SAFETENSORS.are_in([key]) or PICKLES.are_in([key])


def _any(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


_MAX_FILES = 10_000
"""How many files behind a link are looked at; one with more may hold weights."""


def linked_directories(root: Path) -> Iterator[LeftOut]:
    """Links to directories below a local source, which are not followed.

    One that may lead to weights outside of the source has no rule, so that a merge refuses it.
    """
    for folder, directories, _ in os.walk(root):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in directories:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                key = Path(path).relative_to(root).as_posix() + "/"
                rule = rule_by_name(key) or (None if _may_hold_weights(path, key, root) else LINK_RULE)
                yield LeftOut(key, 0, rule, is_weights=rule is None)


def _may_hold_weights(link: str, key: str, root: Path) -> bool:
    """Whether weights that no rule is about may lie behind a link, outside of the source."""
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
    """Companions that are links to files outside of the model's directory, of which they would be copies.

    The Hub's cache is made of links, to files that it keeps for the model or for all models.
    """
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
    """The directory itself, and those where the Hub's cache keeps the files of a snapshot."""
    above, _ = os.path.split(root)
    repository, name = os.path.split(above)
    if name != "snapshots":
        return [root]
    return [root, os.path.join(repository, "blobs"), os.path.join(os.path.dirname(repository), "blobs")]
