"""Keys and passwords in what a user wrote: it is kept and sent about, so that they would be too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from raymerge.documents.faults import Fault, Path
from raymerge.documents.genre import Genre
from raymerge.errors import Problem

_SECRETS = {
    "a token of the Hugging Face Hub": re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}"),
    "an access key of AWS": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a token of GitHub": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a signature in an address": re.compile(
        r"[?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|sig)=[^\s&]{8}",
        re.IGNORECASE,
    ),
    "a user or password in an address": re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s/@'\"]{1,300}@"),
}


def check_text(text: str, name: str, genre: Genre) -> None:
    """Refuse a text that holds a secret, be it in a comment. The message does not repeat it.

    Raises:
        UserError: of the genre's kind, with the place of each.
    """
    problems = []
    for kind, pattern in _SECRETS.items():
        for found in pattern.finditer(text):
            before = text[: found.start()]
            line, column = before.count("\n") + 1, found.start() - before.rfind("\n")
            problems.append(Problem(f"{name}:{line}:{column}", f"{kind} stands here.", genre.about_secrets))
    if problems:
        raise genre.error(problems)


def secrets_in(value: Any, genre: Genre, path: Path = ()) -> Iterator[Fault]:
    """Secrets in the values of a document, also where the text spells them in another way."""
    if isinstance(value, str):
        kinds = [kind for kind, pattern in _SECRETS.items() if pattern.search(value)]
        yield from (Fault(path, f"{kind} stands here.", genre.about_secrets) for kind in kinds)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from secrets_in(key, genre, path)
            yield from secrets_in(inner, genre, (*path, key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from secrets_in(inner, genre, (*path, index))
