"""Addresses on the Hugging Face Hub: ``hf://org/name[@revision][/directory]``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

from raymerge.errors import CheckpointError, Problem
from raymerge.storage.store import is_key

USUAL_REVISION = "main"
_SCHEME = "hf://"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_MOST_LETTERS = 96
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What the Hub keeps of pull requests and conversions has slashes in its names; other names have %2F for them.
_REVISION = re.compile(r"(refs/(?:pr|convert)/[^/]+|[^/]+)(?:/(.*))?")
_USER = re.compile(r"(?<=://)[^/@]*:[^/@]*@")
_PLAIN = re.compile(r"refs/(?:pr|convert)/[^/@%]+|[^/@%]+")
_FORM = "Write hf://ORG/NAME, hf://ORG/NAME@REVISION or hf://ORG/NAME@REVISION/DIRECTORY."


@dataclass(frozen=True, slots=True)
class HubPlace:
    repository: str
    revision: str = USUAL_REVISION
    directory: str = ""
    """Path within the repository, without slashes at its ends; "" for the root."""

    @property
    def commit(self) -> str | None:
        """The commit, if the revision is a full one: then the place never changes."""
        return self.revision if _COMMIT.fullmatch(self.revision) else None

    def at(self, commit: str) -> HubPlace:
        return replace(self, revision=commit)

    def path(self, key: str) -> str:
        return f"{self.directory}/{key}" if self.directory else key

    def __str__(self) -> str:
        behind = f"/{self.directory}" if self.directory else ""
        is_plain = _PLAIN.fullmatch(self.revision) is not None
        revision = self.revision if is_plain else quote(self.revision, safe="")
        return f"{_SCHEME}{self.repository}@{revision}{behind}"


def is_hub_place(text: str) -> bool:
    return text[: len(_SCHEME)].lower() == _SCHEME


def hub_place(text: str, revision: str | None = None) -> HubPlace:
    """Parse an address.

    Args:
        revision: what a recipe has after the first ``@``: ``main``, or ``main/directory``.

    Raises:
        CheckpointError: not a valid address, or one with two revisions.
    """
    text = text if revision is None else _with_revision(text, revision)
    inner = text[len(_SCHEME) :].rstrip("/")
    organization, _, rest = inner.partition("/")
    name, at, behind = rest.partition("@")
    if not at:
        name, _, directory = rest.partition("/")
        named = USUAL_REVISION
    else:
        found = _REVISION.fullmatch(behind)
        named, directory = (unquote(found[1]), found[2] or "") if found else ("", "")
    repository = f"{organization}/{name}"
    is_good = (
        _REPOSITORY.fullmatch(repository) and ".." not in repository and len(repository) <= _MOST_LETTERS
    )
    if not is_good or not _is_name(named) or "@" in directory or (directory and not is_key(directory)):
        what = "is not the address of a model on the Hub."
        raise CheckpointError(Problem(_shown(text), what, _FORM))
    return HubPlace(repository, named, directory)


def _is_name(revision: str) -> bool:
    """Whether Git allows such a name: parts of dots alone would lead to other paths."""
    return revision.isprintable() and not any(part in ("", ".", "..") for part in revision.split("/"))


def _shown(text: str) -> str:
    """An address, valid or not, without possible secrets."""
    return _USER.sub("", text).partition("?")[0]


def _with_revision(text: str, revision: str) -> str:
    organization, _, rest = text[len(_SCHEME) :].partition("/")
    name, _, directory = rest.partition("/")
    if "@" in rest:
        what = f"names a revision, and {revision!r} is asked for beside it."
        raise CheckpointError(Problem(_shown(text), what, "Name one."))
    if directory:
        # In a map they stand apart, so that the revision is all of it.
        return f"{_SCHEME}{organization}/{name}@{quote(revision, safe='')}/{directory}"
    return f"{_SCHEME}{organization}/{name}@{revision}"
