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
    method: str
    target: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Asked:
    request: Request
    status: int
    """0 where the connection was broken off."""

    @property
    def is_write(self) -> bool:
        query, method = self.request.query, self.request.method
        in_one = method == "PUT" and not {"partNumber", "comp"} & set(query)
        return in_one or query.get("comp") == "blocklist" or (method == "POST" and "uploadId" in query)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class RefusedError(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code = status, code


class StrangeError(Exception): ...


@dataclass(frozen=True, slots=True)
class Stored:
    data: bytes
    tag: str
    generation: int
    attributes: Mapping[str, str]


@dataclass(slots=True)
class Fault:
    kind: Kind
    method: str
    key: str
    times: int


class CloudServer(ABC):
    attribute: ClassVar[str]
    scheme: ClassVar[str]
    secret: ClassVar[str]

    def __init__(self) -> None:
        self.endpoint = ""
        self.objects: dict[str, Stored] = {}
        self.asked: list[Asked] = []
        self.strange: list[str] = []
        self.faults: list[Fault] = []
        self.before: Callable[[Request], None] | None = None
        self.page = 1000
        self.smallest_part = 0
        self.is_public = False
        self.lock = threading.RLock()
        self._writes = 0

    @property
    @abstractmethod
    def environment(self) -> dict[str, str]: ...

    @abstractmethod
    def answer(self, request: Request) -> Answer: ...

    @abstractmethod
    def uploads(self) -> list[str]: ...

    @abstractmethod
    def forget_uploads(self) -> None: ...

    def clear(self) -> None:
        with self.lock:
            for each in (self.objects, self.asked, self.strange, self.faults):
                each.clear()
            self.before, self.page, self.smallest_part, self.is_public = None, 1000, 0, False
            self.forget_uploads()

    def place(self, path: str) -> str:
        return f"{self.scheme}://{BUCKET}/{path}"

    def put(self, key: str, data: bytes) -> None:
        with self.lock:
            self.store(key, data, {}, tag="")

    def upload(self, directory: Path, prefix: str) -> str:
        for path in sorted(each for each in directory.rglob("*") if each.is_file()):
            self.put(f"{prefix}/{path.relative_to(directory).as_posix()}", path.read_bytes())
        return self.place(prefix)

    def below(self, prefix: str) -> dict[str, bytes]:
        with self.lock:
            return {key: each.data for key, each in sorted(self.objects.items()) if key.startswith(prefix)}

    def fail(self, kind: Kind, *, method: str = "GET", key: str = "", times: int = 1) -> None:
        with self.lock:
            self.faults.append(Fault(kind, method, key, times))

    def written(self) -> list[str]:
        with self.lock:
            return [each.request.key for each in self.asked if each.is_write and each.status in (200, 201)]

    def of(self, method: str, key: str = "") -> list[Asked]:
        with self.lock:
            return [each for each in self.asked if each.request.method == method and key in each.request.key]

    # For the services

    def store(self, key: str, data: bytes, attributes: Mapping[str, str], *, tag: str) -> Stored:
        self._writes += 1
        mark = tag or f'"0x8D{self._writes:013X}"'
        self.objects[key] = Stored(data, mark, 1_700_000_000_000_000 + self._writes, attributes)
        return self.objects[key]

    def attributes_of(self, request: Request) -> dict[str, str]:
        return {name: text for name, text in request.headers.items() if name.startswith(self.attribute)}

    def check_known(self, request: Request, headers: frozenset[str], query: frozenset[str]) -> None:
        usual = {"host", "accept", "user-agent", "content-length", "authorization"}
        others = {name for name in request.headers if not name.startswith(self.attribute)} - usual - headers
        if others or set(request.query) - query:
            raise StrangeError(f"headers {sorted(others)}, parameters {sorted(request.query)}")

    def given(self, request: Request, found: Stored, extra: Mapping[str, str]) -> Answer:
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
