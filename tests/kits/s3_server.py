"""An S3 server on this machine that fails when told to, and says what was asked of it.

moto keeps the objects, or a server of its own (``seaweed_server``). In front stands a proxy, which counts
requests and injects faults. It also mends two answers of moto: to CompleteMultipartUpload, whose root element
is not that of S3, and to parts of uploads that were aborted, which moto stumbles over. An abort that meets
parts may be answered with 500.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import pytest
from kits.local_http import Handler, listening, serving

from raymerge.storage.addresses import Place, StoreOptions, with_options
from raymerge.storage.objects import store, writer

BUCKET = "models"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIDTESTING",
    "AWS_SECRET_ACCESS_KEY": "testing-secret-access-key",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent/config",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials",
}
_CHUNK = 64 << 10
_HOP = frozenset({"connection", "host", "keep-alive", "transfer-encoding", "content-length"})

Answer = tuple[int, Sequence[tuple[str, str]], bytes]
Kind = Literal["error", "throttle", "forbid", "reset", "lose", "cut", "tear", "long", "delay", "hang"]


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    key: str
    query: str
    range: tuple[int, int] | None
    if_match: str | None
    received: int
    status: int
    sent: int
    headers: Mapping[str, str]


@dataclass(slots=True)
class Fault:
    kind: Kind
    """``error`` 500, ``throttle`` 503 SlowDown, ``forbid`` 403, ``reset`` in place of an answer, and ``lose``
    when the server has done what was asked; ``cut`` in the middle of the body and ``tear`` there with a
    reset, which loses bytes that were sent; ``long`` sends more bytes than the range has; ``delay`` answers
    after ``seconds``, ``hang`` never, but breaks off then."""
    method: str = "GET"
    key: str = ""
    times: int = 1
    every: int = 1
    """It strikes each so-manieth of them."""
    seconds: float = 0.0
    met: int = 0

    def strikes(self, method: str, key: str) -> bool:
        if method != self.method or self.key not in key or self.times <= 0:
            return False
        self.met += 1
        if self.met % self.every:
            return False
        self.times -= 1
        return True


@dataclass
class S3Server(ABC):
    endpoint: str
    behind: str
    """Where the real server answers without a fault and without a note of it."""
    bucket: str = BUCKET
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    most_at_once: int = 0
    now: int = 0
    before: Callable[[str, str], None] | None = None
    drops: str | None = None

    @property
    def options(self) -> StoreOptions:
        return StoreOptions(region="us-east-1", endpoint=self.endpoint, allow_http=True)

    def place(self, path: str) -> str:
        return with_options(f"s3://{self.bucket}/{path}", self.options)

    def fail(self, kind: Kind, **how: Any) -> None:
        with self.lock:
            self.faults.append(Fault(kind, **how))

    def calm(self) -> None:
        with self.lock:
            self.requests.clear()
            self.faults.clear()
            self.before = self.drops = None
            self.most_at_once = 0

    def client(self) -> Any:
        return self._client

    @cached_property
    def _client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.behind,
            region_name="us-east-1",
            aws_access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        )

    def put(self, key: str, data: bytes) -> None:
        self.client().put_object(Bucket=self.bucket, Key=key, Body=data)

    def upload(self, directory: Path, prefix: str) -> str:
        client = self.client()
        for path in sorted(each for each in directory.rglob("*") if each.is_file()):
            key = f"{prefix}/{path.relative_to(directory).as_posix()}"
            client.put_object(Bucket=self.bucket, Key=key, Body=path.read_bytes())
        return self.place(prefix)

    def empty(self) -> None:
        self.calm()
        self.delete()

    @abstractmethod
    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Status, headers and body of the real server's answer to a request."""

    @abstractmethod
    def delete(self) -> None:
        """Delete every object."""

    @abstractmethod
    def objects(self, prefix: str = "") -> dict[str, bytes]: ...

    @abstractmethod
    def uploads(self) -> list[str]:
        """Keys of uploads that are not complete, sorted."""

    @abstractmethod
    def abort_uploads(self, prefix: str) -> list[str]: ...

    def asked(self, method: str, key: str = "") -> list[Request]:
        with self.lock:
            return [each for each in self.requests if each.method == method and key in each.key]


@dataclass
class MotoServer(S3Server):
    moto: Any = None
    """The server, called in this process."""

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        answer = self.moto.open(
            path, base_url=self.endpoint, method=method, headers=headers, data=body, buffered=True
        )
        return answer.status_code, list(answer.headers.items()), answer.get_data()

    def delete(self) -> None:
        self._memory.keys.clear()

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        keys = sorted(key for key in [*self._memory.keys] if key.startswith(prefix))
        return {key: self._memory.keys[key].value for key in keys}

    def uploads(self) -> list[str]:
        return sorted(each.key_name for each in [*self._memory.multiparts.values()])

    def abort_uploads(self, prefix: str) -> list[str]:
        left = [each for each in [*self._memory.multiparts.values()] if each.key_name.startswith(prefix)]
        for each in left:
            del self._memory.multiparts[each.id]
        return [each.key_name for each in left]

    @property
    def _memory(self) -> Any:
        """The bucket in moto's memory."""
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[self.bucket]


@contextmanager
def s3_server() -> Iterator[S3Server]:
    from botocore.utils import parse_to_aware_datetime
    from moto.moto_api._internal import moto_api_backend
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server
    from werkzeug.test import Client

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # All servers of a process have one memory, and an earlier file's objects are in it.
    moto_api_backend.reset()
    moto = create_backend_app("s3")
    behind = make_server("127.0.0.1", 0, moto, threaded=True, request_handler=MotoRequestHandler)
    with pytest.MonkeyPatch.context() as patch, serving(behind):
        patch.setattr("moto.core.serialize.parse_to_aware_datetime", cache(parse_to_aware_datetime))
        server = MotoServer("", f"http://127.0.0.1:{behind.port}", moto=Client(moto, use_cookies=False))
        with in_front(server):
            yield server


@contextmanager
def in_front(server: S3Server) -> Iterator[None]:
    """Put the proxy before a server, and its credentials into the environment."""
    with pytest.MonkeyPatch.context() as patch:
        # moto reads credentials itself.
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr(store, "_boto3_provider", _once(store._boto3_provider))
        patch.setattr(writer, "_client", _once(writer._client))
        server.client().create_bucket(Bucket=server.bucket)
        with listening(_Proxy, s3=server) as server.endpoint:
            yield


def _once(make: Callable[..., Any]) -> Callable[..., Any]:
    """What boto3 takes a fifth of a second for: made once for each place, in the same environment."""
    made: dict[Any, Any] = {}

    def remembered(*given: Any) -> Any:
        places = [str(each) for each in given if isinstance(each, Place)]
        variables = [item for item in os.environ.items() if item[0].startswith("AWS_")]
        key = (*places, *sorted(variables), writer._ATTEMPTS)
        if key not in made:
            made[key] = make(*given)
        return made[key]

    return remembered


class _Proxy(Handler):
    s3: S3Server

    def serve(self) -> None:
        with self.s3.lock:
            self.s3.now += 1
            self.s3.most_at_once = max(self.s3.most_at_once, self.s3.now)
        try:
            self._serve()
        finally:
            with self.s3.lock:
                self.s3.now -= 1

    def _serve(self) -> None:
        body = self._body()
        parts = urlsplit(self.path)
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        self.about = (key, parts.query, len(body))
        before = self.s3.before
        if before is not None:
            before(self.command, key)
        with self.s3.lock:
            struck = [each for each in self.s3.faults if each.strikes(self.command, key)]
        kinds = {each.kind for each in struck}
        for each in struck:
            if each.kind in ("delay", "hang"):
                time.sleep(each.seconds)
        if "reset" in kinds or "hang" in kinds:
            self._break(0)
        elif "error" in kinds:
            self._refuse(500, "InternalError")
        elif "throttle" in kinds:
            self._refuse(503, "SlowDown")
        elif "forbid" in kinds:
            self._refuse(403, "AccessDenied")
        else:
            self._pass_on(body, end=next(iter(kinds & {"lose", "cut", "tear", "long"}), None))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _pass_on(self, body: bytes, *, end: str | None) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        if self.s3.drops is not None:
            headers = {name: each for name, each in headers.items() if not name.startswith(self.s3.drops)}
        try:
            status, said, data = self.s3.answer(self.command, self.path, headers, body)
        except Exception:
            status, said, data = 500, [], b""
        if end == "lose":
            self._break(0)
            return
        if end == "long":
            data, end = data + b"?", None
        if self.command == "POST" and b"CompleteMultipartUploadRes" in data:
            data = data.replace(b"CompleteMultipartUploadResponse", b"CompleteMultipartUploadResult")
        if status == 500 and "uploadId=" in self.path and self.command != "DELETE":
            self._refuse(404, "NoSuchUpload")
            return
        self._answer(status, said, data, end=end)

    def _answer(
        self, status: int, headers: Sequence[tuple[str, str]], data: bytes, *, end: str | None
    ) -> None:
        length = str(len(data))
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        if not (end and data):
            # Before the client has the answer, and the test looks.
            self._note(status, len(data))
        self.end_headers()
        if end and data:
            half = data[: len(data) // 2]
            self.wfile.write(half)
            self.wfile.flush()
            self._break(len(half), status, lossy=end == "tear")
            return
        with suppress(OSError):
            for start in range(0, len(data), _CHUNK):
                self.wfile.write(data[start : start + _CHUNK])

    def _refuse(self, status: int, code: str) -> None:
        said = f"<Error><Code>{code}</Code><Message>as the test has it</Message></Error>"
        self._answer(status, [("Content-Type", "application/xml")], said.encode(), end=None)

    def _break(self, sent: int, status: int = 0, *, lossy: bool = True) -> None:
        self._note(status, sent)
        self.close_connection = True
        if lossy:
            self.break_off()

    def _note(self, status: int, sent: int) -> None:
        key, query, received = self.about
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        asked = (int(found.group(1)), int(found.group(2)) + 1) if found else None
        headers = {name.lower(): value for name, value in self.headers.items()}
        match = headers.get("if-match")
        note = Request(self.command, key, query, asked, match, received, status, sent, headers)
        with self.s3.lock:
            self.s3.requests.append(note)
