"""Places as text: local paths, and addresses of stores. The only module that knows schemes.

A place in an object store carries its ``StoreOptions`` as its query
(``s3://bucket/prefix?region=eu-west-1``), so that any process can open it; ``shown`` leaves them out."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from raymerge.errors import OptionError, Problem

_NAME = re.compile(r"[!-~]+")
_TRUTHS: Mapping[str, bool] = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How object stores are reached, without credentials. None: as each machine's environment says."""

    region: str | None = None
    endpoint: str | None = None
    """A server that speaks S3 and is not AWS: ``https://minio.example:9000``. Other stores do not use it:
    they would send that server their credentials."""
    anonymous: bool = False
    profile: str | None = None
    allow_http: bool = False
    kms_key: str | None = None
    """Id, alias or ARN of the AWS KMS key that encrypts written objects; None for the bucket's default."""
    requester_pays: bool = False
    """Let the account of the credentials pay for requests on S3."""

    def __post_init__(self) -> None:
        for name, value in (("region", self.region), ("kms_key", self.kms_key)):
            if value is not None and _NAME.fullmatch(value) is None:
                what = "is empty, or holds spaces or other characters that no such name has."
                remedy = "Write it in printable ASCII, or leave it out."
                raise OptionError(Problem(f"storage: {name}", what, remedy))
        if self.requester_pays and self.anonymous:
            what = "nobody can pay for requests that are not signed."
            raise OptionError(Problem("storage: requester_pays", what, "Take anonymous out, or this."))
        if self.endpoint is None:
            return
        parts = urlsplit(self.endpoint)
        where = "storage: endpoint"
        if parts.scheme not in ("http", "https") or not parts.hostname:
            what = "is not the address of a server, such as https://minio.example:9000."
            raise OptionError(Problem(where, what, "Write http:// or https:// and the server's name."))
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            what = "holds a user, a password or a query."
            remedy = "Take it out: credentials come from the environment of each machine."
            raise OptionError(Problem(where, what, remedy))
        if parts.scheme == "http" and not self.allow_http:
            what = f"{self.endpoint} is spoken to without TLS, which is not allowed."
            raise OptionError(Problem(where, what, "Take https://, or set allow_http: true in storage:."))


NO_OPTIONS = StoreOptions()


def options_as_text(options: StoreOptions) -> dict[str, str]:
    """Options that differ from their defaults, by name."""
    pairs = ((each.name, getattr(options, each.name), each.default) for each in fields(StoreOptions))
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value, usual in pairs
        if value != usual
    }


def options_from_text(texts: Mapping[str, str]) -> StoreOptions:
    """The inverse of ``options_as_text``. Raises OptionError: an unknown name or a wrong value; the value is
    not shown, it may be a secret."""
    known = {each.name: each.default for each in fields(StoreOptions)}
    problems = [
        Problem(f"'{name}' in an address", f"is not one of {', '.join(known)}.", "Take it out.")
        for name in texts
        if name not in known
    ]
    problems += [
        Problem(f"'{name}' in an address", "is neither true nor false.", "Write true or false.")
        for name, text in texts.items()
        if isinstance(known.get(name), bool) and text not in _TRUTHS
    ]
    if problems:
        raise OptionError(problems)
    values = {name: _TRUTHS[text] if isinstance(known[name], bool) else text for name, text in texts.items()}
    return StoreOptions(**values)  # type: ignore[arg-type]


OBJECT_SCHEMES = ("s3", "gs", "az")
HUB_SCHEME = "hf"
HDFS_SCHEMES = ("hdfs", "viewfs")
FSSPEC_SCHEMES = ("abfs", "abfss", "oss", "webhdfs")
"""Filesystems of fsspec that are opened, read only. Others that it knows read any local file or connect to
any server."""
OPTIONS_BEHIND = "has options behind it ('?')."
PLACE_ALONE = "Write the place alone. Its server and region belong to storage: in a profile."
_FILE = "file"
STORES: dict[str, str] = {
    _FILE: "raymerge.storage.open:local_store",
    **dict.fromkeys(OBJECT_SCHEMES, "raymerge.storage.objects.store:ObjectStore"),
    HUB_SCHEME: "raymerge.storage.hub:open_hub",
    **dict.fromkeys((*HDFS_SCHEMES, *FSSPEC_SCHEMES), "raymerge.storage.arrow:ArrowStore"),
}
"""What opens places of each scheme for reading, as ``module:name``, imported at first use and called as
``open_store`` is. Another store is a file and a line here."""
CHUNKED_STORE = "raymerge.checkpoints.dcp.store:ChunkedStore"
"""What gives a store of files another view of them: whole tensors in place of their chunks."""
_CHUNKED = "dcp::"
_WEB = ("http", "https")
_CHAIN = "::"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(rf"({'|'.join((*OBJECT_SCHEMES, HUB_SCHEME, _FILE))}):/(?!/)", re.IGNORECASE)
USER = re.compile(rf"(?<!{HUB_SCHEME}://)(?<=://)[^/@?#:+]*(?::[^/?#]*)?@", re.IGNORECASE)
"""A user with the password, and the "@" behind them. Addresses of the Hub have none, but revisions."""


@dataclass(frozen=True, slots=True)
class Place:
    scheme: str
    """``file`` for a local path, else the part before ``://``, in lower case."""
    text: str
    """A local path; else the part after ``://``, without options: ``bucket/prefix``."""
    options: StoreOptions = NO_OPTIONS

    @property
    def bucket(self) -> str:
        return self.text.partition("/")[0]

    @property
    def prefix(self) -> str:
        return self.text.partition("/")[2]

    def __str__(self) -> str:
        if self.scheme == _FILE:
            return self.text
        query = urlencode(options_as_text(self.options))
        return f"{self.scheme}://{self.text}" + (f"?{query}" if query else "")


def parse_place(place: str) -> Place:
    """Parse a place. Raises OptionError: no place, more than one, or an unsupported scheme. Possible secrets
    are not shown."""
    match = _SCHEME.match(place)
    if match is None:
        _check_slashes(place)
        return Place(_FILE, os.path.expanduser(place))
    scheme, rest = match.group(1).lower(), place[match.end() :]
    if scheme == _FILE:
        return Place(_FILE, _local_path(place))
    _check_scheme(place, scheme)
    if scheme not in OBJECT_SCHEMES:
        return Place(scheme, rest.rstrip("/"))
    path, _, query = rest.partition("?")
    bucket = path.partition("/")[0]
    if USER.search(place) or bucket in ("", ".", ".."):
        what = f"is not a place in an object store, such as {scheme}://bucket/directory."
        remedy = "Write the bucket's name and the path in it; credentials come from the environment."
        raise OptionError(Problem(shown(place), what, remedy))
    if ".." in path.split("/"):
        what = "has '..' in it, and there are no directories in an object store to go up from."
        raise OptionError(Problem(shown(place), what, "Write the path that is meant."))
    try:
        path = posixpath.normpath(path)
        return Place(scheme, path, options_from_text(dict(parse_qsl(query, keep_blank_values=True))))
    except OptionError as error:
        problems = (
            Problem(f"{shown(place)}: {each.where}", each.what, each.remedy) for each in error.problems
        )
        raise OptionError(problems) from error


def check_output_address(place: str) -> None:
    """Refuse what cannot be an output place, or has secrets in it. Raises OptionError: also as
    ``parse_place`` does."""
    if not place.isprintable():
        what = "the name holds characters that cannot be written."
        raise OptionError(Problem(shown(ascii(place)), what, "Choose another -o."))
    if is_remote(place) and not is_object_place(place):
        what = "nothing is written to addresses of this kind."
        schemes = ", ".join(f"{scheme}://" for scheme in OBJECT_SCHEMES)
        raise OptionError(Problem(shown(place), what, f"Give a directory, or an address of {schemes}."))
    check_alone(place)
    parse_place(place)


def check_alone(place: str) -> None:
    """Refuse an address with options: these belong in the profile; raises OptionError: it has some."""
    if is_object_place(place) and "?" in place:
        raise OptionError(Problem(shown(place), OPTIONS_BEHIND, PLACE_ALONE))


def is_remote(place: str) -> bool:
    """Whether a place is anything but a local path or ``file://`` address."""
    return _scheme_of(place) not in ("", _FILE)


def _scheme_of(place: str) -> str:
    """The part before ``://``, in lower case; "" for a path."""
    match = _SCHEME.match(place)
    return "" if match is None else match.group(1).lower()


def is_path(place: str) -> bool:
    return _SCHEME.match(place) is None and _ONE_SLASH.match(place) is None


def chunked_place(place: str) -> str:
    """The place where tensors of several chunks in the files of ``place`` are read as one. For ``open_store``
    alone."""
    return f"{_CHUNKED}{place}"


def files_of_chunked(place: str) -> str | None:
    """The inverse of ``chunked_place``; None for every other place."""
    return place.removeprefix(_CHUNKED) if place.startswith(_CHUNKED) else None


def as_path(place: str) -> str:
    """The path of a ``file://`` address; every other place unchanged."""
    if _scheme_of(place) != _FILE:
        return place
    try:
        return _local_path(place)
    except OptionError:
        return place  # it is a path of another machine


def is_object_place(place: str) -> bool:
    return _scheme_of(place) in OBJECT_SCHEMES


def with_options(place: str, options: StoreOptions) -> str:
    """An object store's place with the user's options; others, and those that have options, unchanged. Raises
    OptionError: as ``parse_place`` does."""
    if not is_object_place(place):
        return place
    address = parse_place(place)
    return place if address.options != NO_OPTIONS else str(Place(address.scheme, address.text, options))


def join(place: str, key: str) -> str:
    address = parse_place(place)
    if address.scheme == _FILE:
        return os.path.join(address.text, key)
    return str(Place(address.scheme, f"{address.text.rstrip('/')}/{key.strip('/')}", address.options))


def parent_and_name(place: str) -> tuple[str, str]:
    """The parent of a place, and its name there. Raises OptionError: it has no parent, as a bucket; or as
    ``parse_place`` does."""
    address = parse_place(place)
    if address.scheme == _FILE:
        path = Path(os.path.abspath(address.text))
        return str(path.parent), path.name
    parent, _, name = address.text.rpartition("/")
    if not parent:
        what = "is a whole bucket and lies in no directory."
        raise OptionError(Problem(shown(place), what, "Give a directory in it."))
    return str(Place(address.scheme, parent, address.options)), name


def shown(place: str) -> str:
    """A place for messages and records: without user, password, options or query."""
    hidden = USER.sub("", place)
    return hidden if _scheme_of(place) in ("", _FILE, HUB_SCHEME) else hidden.partition("?")[0]


def _check_scheme(place: str, scheme: str) -> None:
    if scheme in _WEB:
        what = "is an address of the web, where directories cannot be listed."
        remedy = "Write ORG/NAME or hf://ORG/NAME for a model of the Hub; copy others to a directory."
        raise OptionError(Problem(shown(place), what, remedy))
    if scheme not in STORES:
        what = f"addresses of the kind {scheme}:// are not supported."
        remedy = f"Give a local path, or an address of one of {', '.join(STORES)}."
        raise OptionError(Problem(shown(place), what, remedy))
    if scheme in FSSPEC_SCHEMES and _CHAIN in place:
        what = f"names several file systems, one behind another ('{_CHAIN}')."
        raise OptionError(Problem(shown(place), what, "Write the address of one directory."))


def _check_slashes(place: str) -> None:
    if (match := _ONE_SLASH.match(place)) is None:
        return
    scheme, rest = match.group(1).lower(), place[match.end() :]
    meant = shown(f"{scheme}:///{rest}" if scheme == _FILE else f"{scheme}://{rest}")
    what = f"one slash follows '{scheme}:', so that this would be a local path."
    remedy = f"Write {meant}, or ./{scheme}:/... for a directory of that name."
    raise OptionError(Problem(meant, what, remedy))


def _local_path(place: str) -> str:
    machine, slash, path = place.partition("://")[2].partition("/")
    if machine not in ("", "localhost"):
        what = f"names the machine {machine.rpartition('@')[2]}, but a file:// address is a path on this one."
        raise OptionError(Problem(shown(place), what, "Write file:///path, or just the path."))
    return unquote(slash + path)
