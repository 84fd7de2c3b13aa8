"""What the fakes of Google's and Azure's object stores share: objects, records, and faults.

They are strict: a request with a method, a header or a parameter that a fake does not know is refused with
400 and written down in ``strange``, so that a test which looks there fails.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import ClassVar, Literal

BUCKET = "models"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
Kind = Literal["error", "throttle", "forbid", "reset", "lose"]
"""500; 503; 403; a connection that breaks before anything is done, and one that does when all is done."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it came."""

    method: str
    target: str
    """Path, as it was sent."""
    key: str
    """The object; "" for a request about the bucket."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By their names in small letters."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was answered."""

    request: Request
    status: int
    """0 where the connection was broken off."""

    @property
    def is_write(self) -> bool:
        """Whether an object is there by it, in one request or at the end of several."""
        query, method = self.request.query, self.request.method
        in_one = method == "PUT" and not {"partNumber", "comp"} & set(query)
        return in_one or query.get("comp") == "blocklist" or (method == "POST" and "uploadId" in query)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is answered."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class RefusedError(Exception):
    """A refusal in the words of the service."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code = status, code


class StrangeError(Exception):
    """A request that the fake does not know."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that is there."""

    data: bytes
    tag: str
    """Its entity tag, with quotes."""
    generation: int
    """The number of the write that made it."""
    attributes: Mapping[str, str]
    """User metadata, by the whole names of the headers."""


@dataclass(slots=True)
class Fault:
    """What goes wrong, and how often."""

    kind: Kind
    method: str
    key: str
    """A part of the keys that it strikes."""
    times: int


class CloudServer(ABC):
    """One bucket, and what was asked of it."""

    attribute: ClassVar[str]
    """What headers of user metadata begin with."""
    scheme: ClassVar[str]
    secret: ClassVar[str]
    """What must be in no file and no message."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.objects: dict[str, Stored] = {}
        self.asked: list[Asked] = []
        self.strange: list[str] = []
        self.faults: list[Fault] = []
        self.before: Callable[[Request], None] | None = None
        """Called before each request is looked at; may write objects."""
        self.page = 1000
        """Objects that a listing gives at once."""
        self.smallest_part = 0
        """Bytes of the smallest part of an upload that is not its last."""
        self.is_public = False
        """Whether everybody may read."""
        self.lock = threading.RLock()
        self._writes = 0

    @property
    @abstractmethod
    def environment(self) -> dict[str, str]:
        """What a machine is told of the store, with credentials."""

    @abstractmethod
    def answer(self, request: Request) -> Answer:
        """What the service answers; raises ``RefusedError`` or ``StrangeError``."""

    @abstractmethod
    def uploads(self) -> list[str]:
        """Keys of what was begun in parts, and is neither complete nor aborted."""

    @abstractmethod
    def forget_uploads(self) -> None:
        """Have the store clear them away, as it does after a time."""

    def clear(self) -> None:
        """As it was in the beginning."""
        with self.lock:
            for each in (self.objects, self.asked, self.strange, self.faults):
                each.clear()
            self.before, self.page, self.smallest_part, self.is_public = None, 1000, 0, False
            self.forget_uploads()

    def place(self, path: str) -> str:
        """The place of a path in the bucket."""
        return f"{self.scheme}://{BUCKET}/{path}"

    def put(self, key: str, data: bytes) -> None:
        """Write an object past the service."""
        with self.lock:
            self.store(key, data, {}, tag="")

    def upload(self, directory: Path, prefix: str) -> str:
        """Copy a directory into the bucket; its place."""
        for path in sorted(each for each in directory.rglob("*") if each.is_file()):
            self.put(f"{prefix}/{path.relative_to(directory).as_posix()}", path.read_bytes())
        return self.place(prefix)

    def below(self, prefix: str) -> dict[str, bytes]:
        """Every object whose key begins so."""
        with self.lock:
            return {key: each.data for key, each in sorted(self.objects.items()) if key.startswith(prefix)}

    def fail(self, kind: Kind, *, method: str = "GET", key: str = "", times: int = 1) -> None:
        """Have requests fail from now on."""
        with self.lock:
            self.faults.append(Fault(kind, method, key, times))

    def written(self) -> list[str]:
        """Keys that clients wrote, in order."""
        with self.lock:
            return [each.request.key for each in self.asked if each.is_write and each.status in (200, 201)]

    def of(self, method: str, key: str = "") -> list[Asked]:
        """What was asked so far by a method of keys that hold a text."""
        with self.lock:
            return [each for each in self.asked if each.request.method == method and key in each.request.key]

    # For the services

    def store(self, key: str, data: bytes, attributes: Mapping[str, str], *, tag: str) -> Stored:
        """Have an object there; with a tag of its own where none is given."""
        self._writes += 1
        mark = tag or f'"0x8D{self._writes:013X}"'
        self.objects[key] = Stored(data, mark, 1_700_000_000_000_000 + self._writes, attributes)
        return self.objects[key]

    def attributes_of(self, request: Request) -> dict[str, str]:
        """The user metadata of a request."""
        return {name: text for name, text in request.headers.items() if name.startswith(self.attribute)}

    def check_known(self, request: Request, headers: frozenset[str], query: frozenset[str]) -> None:
        """See that a request says nothing that the fake would pass over."""
        usual = {"host", "accept", "user-agent", "content-length", "authorization"}
        others = {name for name in request.headers if not name.startswith(self.attribute)} - usual - headers
        if others or set(request.query) - query:
            raise StrangeError(f"headers {sorted(others)}, parameters {sorted(request.query)}")

    def given(self, request: Request, found: Stored, extra: Mapping[str, str]) -> Answer:
        """An object or a range of it."""
        headers = {"ETag": found.tag, "Last-Modified": formatdate(usegmt=True), "Accept-Ranges": "bytes"}
        headers = {**headers, "Content-Type": "application/octet-stream", **found.attributes, **extra}
        if "range" not in request.headers:
            return Answer(200, headers, found.data)
        span = _RANGE.fullmatch(request.headers["range"])
        if span is None:
            raise StrangeError(f"range {request.headers['range']}")
        begin, end, size = int(span[1]), min(int(span[2]) + 1, len(found.data)), len(found.data)
        if begin >= size:
            raise RefusedError(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        return Answer(206, headers, found.data[begin:end])
