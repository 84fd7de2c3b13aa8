"""Places as text: local paths, and addresses of what lies elsewhere. The only module that looks at schemes.

A place in an object store carries its ``StoreOptions`` as its query, as the addresses of pyarrow do
(``s3://bucket/prefix?region=eu-west-1``), so that a place says all that is needed to read it, in whatever
process. ``shown`` gives it as the user wrote it.
"""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode

from raymerge.errors import OptionError, Problem
from raymerge.storage.options import NO_OPTIONS, StoreOptions, options_as_text, options_from_text

OBJECT_SCHEMES = ("s3", "gs", "az")
"""Object stores, which are read and written."""
HUB_SCHEME = "hf"
"""The Hugging Face Hub, by byte ranges."""
HDFS_SCHEMES = ("hdfs", "viewfs")
"""HDFS, through pyarrow. Read only."""
FSSPEC_SCHEMES = ("abfs", "abfss", "oss", "webhdfs")
"""File systems of fsspec that are opened, read only. Of others that it knows, some read any file of this
machine or connect to any server."""
OPTIONS_BEHIND = "has options behind it ('?')."
"""What is wrong with an address of a user that says more than a place."""
PLACE_ALONE = "Write the place alone. Its server and region belong to storage: in a profile."
"""What to do about it: else those options would take the place of all that the profile says."""
_FILE = "file"
_SCHEMES = (_FILE, *OBJECT_SCHEMES, HUB_SCHEME, *HDFS_SCHEMES, *FSSPEC_SCHEMES)
_WEB = ("http", "https")
_CHAIN = "::"
"""Separates the file systems that fsspec lays over one another."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(rf"({'|'.join((*OBJECT_SCHEMES, HUB_SCHEME, _FILE))}):/(?!/)", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/@?#]*@")


@dataclass(frozen=True, slots=True)
class Address:
    """A place, taken apart."""

    scheme: str
    """``file`` for a local path, else what stands before ``://``, in small letters."""
    text: str
    """A local path; else what stands behind ``://``, without options: ``bucket/prefix``."""
    options: StoreOptions = NO_OPTIONS

    @property
    def bucket(self) -> str:
        """What stands before the first slash: bucket, container or host."""
        return self.text.partition("/")[0]

    @property
    def prefix(self) -> str:
        """What stands behind the first slash."""
        return self.text.partition("/")[2]

    def __str__(self) -> str:
        if self.scheme == _FILE:
            return self.text
        query = urlencode(options_as_text(self.options))
        return f"{self.scheme}://{self.text}" + (f"?{query}" if query else "")


def parse_place(place: str) -> Address:
    """What a place says.

    Raises:
        OptionError: an address that says no place, or says more than one, or is of a scheme that is not
            supported. The message does not repeat what may be a secret.
    """
    match = _SCHEME.match(place)
    if match is None:
        _check_slashes(place)
        return Address(_FILE, os.path.expanduser(place))
    scheme, rest = match.group(1).lower(), place[match.end() :]
    if scheme == _FILE:
        return Address(_FILE, _local_path(place))
    _check_scheme(place, scheme)
    if scheme not in OBJECT_SCHEMES:
        return Address(scheme, rest.rstrip("/"))
    path, _, query = rest.partition("?")
    bucket = path.partition("/")[0]
    if _USER.search(place) or bucket in ("", ".", ".."):
        what = f"is not a place in an object store, such as {scheme}://bucket/directory."
        remedy = "Write the bucket's name and the path in it; credentials come from the environment."
        raise OptionError(Problem(shown(place), what, remedy))
    if ".." in path.split("/"):
        what = "has '..' in it, and there are no directories in an object store to go up from."
        raise OptionError(Problem(shown(place), what, "Write the path that is meant."))
    try:
        path = posixpath.normpath(path)
        return Address(scheme, path, options_from_text(dict(parse_qsl(query, keep_blank_values=True))))
    except OptionError as error:
        problems = (
            Problem(f"{shown(place)}: {each.where}", each.what, each.remedy) for each in error.problems
        )
        raise OptionError(problems) from error


def check_output_address(place: str) -> None:
    """See that a place can be that of an output, and says nothing that others must not read.

    Raises:
        OptionError: nothing can be written there, or as ``parse_place`` does.
    """
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
    """See that an address says no more than a place: how a store is reached is for the profile to say.

    Raises:
        OptionError: it has options behind it.
    """
    if is_object_place(place) and "?" in place:
        raise OptionError(Problem(shown(place), OPTIONS_BEHIND, PLACE_ALONE))


def is_remote(place: str) -> bool:
    """Whether a place is elsewhere than in a directory of this machine."""
    match = _SCHEME.match(place)
    return match is not None and match.group(1).lower() != _FILE


def is_path(place: str) -> bool:
    """Whether a place is a plain local path, and written as no address."""
    return _SCHEME.match(place) is None and _ONE_SLASH.match(place) is None


def as_path(place: str) -> str:
    """The path that a ``file://`` address means; every other place as it is."""
    match = _SCHEME.match(place)
    if match is None or match.group(1).lower() != _FILE:
        return place
    try:
        return _local_path(place)
    except OptionError:
        return place  # it is a path of another machine


def is_object_place(place: str) -> bool:
    """Whether a place is in an object store, which can be written to as well."""
    match = _SCHEME.match(place)
    return match is not None and match.group(1).lower() in OBJECT_SCHEMES


def with_options(place: str, options: StoreOptions) -> str:
    """A place in an object store with the user's options; others, and those with their own, as they are.

    Raises:
        OptionError: as ``parse_place`` does.
    """
    if not is_object_place(place):
        return place
    address = parse_place(place)
    return place if address.options != NO_OPTIONS else str(Address(address.scheme, address.text, options))


def join(place: str, key: str) -> str:
    """The place of a key below a place.

    Raises:
        OptionError: as ``parse_place`` does.
    """
    address = parse_place(place)
    if address.scheme == _FILE:
        return os.path.join(address.text, key)
    return str(Address(address.scheme, f"{address.text.rstrip('/')}/{key.strip('/')}", address.options))


def parent_and_name(place: str) -> tuple[str, str]:
    """The place that a place lies in, and its name there.

    Raises:
        OptionError: it lies in none, as a bucket does; or as ``parse_place`` does.
    """
    address = parse_place(place)
    if address.scheme == _FILE:
        path = Path(os.path.abspath(address.text))
        return str(path.parent), path.name
    parent, _, name = address.text.rpartition("/")
    if not parent:
        what = "is a whole bucket and lies in no directory."
        raise OptionError(Problem(shown(place), what, "Give a directory in it."))
    return str(Address(address.scheme, parent, address.options)), name


def shown(place: str) -> str:
    """A place for messages and records: without user, password, options or query."""
    match = _SCHEME.match(place)
    if match is None or match.group(1).lower() in (_FILE, HUB_SCHEME):
        return place  # the Hub's addresses have a revision behind "@"
    return _USER.sub("", place).partition("?")[0]


def _check_scheme(place: str, scheme: str) -> None:
    if scheme in _WEB:
        what = "is an address of the web, where directories cannot be listed."
        remedy = "Write ORG/NAME or hf://ORG/NAME for a model of the Hub; copy others to a directory."
        raise OptionError(Problem(shown(place), what, remedy))
    if scheme not in _SCHEMES:
        what = f"addresses of the kind {scheme}:// are not supported."
        remedy = f"Give a local path, or an address of one of {', '.join(_SCHEMES)}."
        raise OptionError(Problem(shown(place), what, remedy))
    if scheme in FSSPEC_SCHEMES and _CHAIN in place:
        what = f"names several file systems, one behind another ('{_CHAIN}')."
        raise OptionError(Problem(shown(place), what, "Write the address of one directory."))


def _check_slashes(place: str) -> None:
    """See that a local path was not meant for an address."""
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
        what = f"names the machine {machine}, but a file:// address is a path on this one."
        raise OptionError(Problem(place, what, "Write file:///path, or just the path."))
    return unquote(slash + path)
