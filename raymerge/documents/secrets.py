"""Keys and passwords in what a user wrote: it is kept and sent about, so that they would be too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from raymerge.documents.faults import DocumentKind, Fault, FieldPath
from raymerge.errors import Problem

_SECRETS = {
    "a token of the Hugging Face Hub": re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}"),
    "an access key of AWS": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a token of GitHub": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})"),
    "a token of GitLab": re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}"),
    "a secret of Google": re.compile(
        r"\b(?:GOCSPX-[A-Za-z0-9_-]{20,}|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,})"
    ),
    "a key of a model's service": re.compile(
        r"\bsk-(?:(?:proj|svcacct|admin|ant|or|lf)-[A-Za-z0-9_-]{20,}|[A-Za-z0-9]{32,})"
    ),
    "a token of Slack": re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
    "a token of a package registry": re.compile(r"\b(?:npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,})"),
    "a signed token (JWT)": re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a signature in an address": re.compile(
        r"[?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|sig)=[^\s&]{8}",
        re.IGNORECASE,
    ),
    "a user or password in an address": re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s/@'\"]{1,300}@"),
    "a key or token with its name": re.compile(
        # In variables, connection strings, YAML and JSON; $NAME and <name> stand for a value and are none.
        r"(?:access[_-]?key|account[_-]?key|api[_-]?key|secret[_-]?key|shared[_-]?access[_-]?key"
        r"|(?:access|api|auth|bearer|github|gitlab|hf|hub|refresh|session)[_-]?token)"
        r"['\"]?\s{0,3}[=:]\s{0,3}['\"]?(?=[^\s'\"]{0,80}[0-9])[A-Za-z0-9+/_.=-]{16}",
        re.IGNORECASE,
    ),
    "a password": re.compile(
        r"(?:password|passwd|client[_-]?secret|\bsecret)['\"]?\s{0,3}[=:]\s{0,3}['\"]?"
        r"(?=[^\s'\"]{0,80}[0-9])[^\s'\"$<{\[]{6}",
        re.IGNORECASE,
    ),
}


def check_text(text: str, name: str, kind: DocumentKind) -> None:
    """Refuse a text that holds a secret, be it in a comment. The message does not repeat it.

    Raises:
        UserError: of the kind of document, with the place of each.
    """
    problems = []
    for what, pattern in _SECRETS.items():
        for found in pattern.finditer(text):
            before = text[: found.start()]
            line, column = before.count("\n") + 1, found.start() - before.rfind("\n")
            problems.append(Problem(f"{name}:{line}:{column}", f"{what} stands here.", kind.about_secrets))
    if problems:
        raise kind.error(problems)


def secrets_in(value: Any, kind: DocumentKind, path: FieldPath = ()) -> Iterator[Fault]:
    """Secrets in the values of a document, also where the text spells them in another way."""
    if isinstance(value, str):
        held = [what for what, pattern in _SECRETS.items() if pattern.search(value)]
        yield from (Fault(path, f"{what} stands here.", kind.about_secrets) for what in held)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from secrets_in(key, kind, path)
            own = (*path, key)
            found = list(secrets_in(inner, kind, own))
            if isinstance(inner, str) and not found:
                # Some are known only by the name before them.
                found = list(secrets_in(f"{key}={inner}", kind, own))
            yield from found
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from secrets_in(inner, kind, (*path, index))
