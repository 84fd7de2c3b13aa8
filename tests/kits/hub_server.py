"""A server on 127.0.0.1 that speaks what the Hub's client uses of the Hub's API, and fails as it is told.

There are two: one that knows repositories, and one that serves large files under signed addresses, as the
Hub's CDN does. Both write down what they were asked.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants
from kits.local_http import Handler, listening

Fault = Literal["500", "429", "reset", "cut"]
"""An answer of that number; a connection that ends before the answer; one that ends in the middle of it."""
_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<key>.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    path: str
    offset: int
    nbytes: int
    token: str | None
    status: int


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    refusal: tuple[int, str, str] | None = None

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


class HubServer:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.token = "hf_" + "T" * 34
        self.has_ranges = True
        self._faults: list[tuple[re.Pattern[str], Fault]] = []
        self._lock = threading.Lock()
        self._signatures = 0
        self._oldest_valid = 1
        self.endpoint = ""
        self.cdn = ""

    def push(self, repo: str, directory: Path) -> str:
        files = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        digest = hashlib.sha1(repo.encode())
        for key, data in files.items():
            digest.update(key.encode() + hashlib.sha256(data).digest())
        repository = self.repositories.setdefault(repo, Repository())
        repository.commits[digest.hexdigest()] = files
        repository.refs["main"] = digest.hexdigest()
        return digest.hexdigest()

    def fail(self, pattern: str, *faults: Fault) -> None:
        with self._lock:
            self._faults += [(re.compile(pattern), fault) for fault in faults]

    def expire(self) -> None:
        with self._lock:
            self._oldest_valid = self._signatures + 1

    def forget(self) -> None:
        with self._lock:
            self.asked.clear()

    def ranges(self, repo: str, key: str) -> list[tuple[int, int]]:
        return sorted(
            (each.offset, each.nbytes)
            for each in self.asked
            if each.method == "GET" and each.path.startswith(f"/{repo}/") and each.path.endswith(f"/{key}")
            if each.status in (200, 206)
        )

    # What the handlers ask

    def fault_of(self, line: str) -> Fault | None:
        with self._lock:
            for number, (pattern, fault) in enumerate(self._faults):
                if pattern.search(line):
                    del self._faults[number]
                    return fault
        return None

    def note(self, asked: Asked) -> None:
        with self._lock:
            self.asked.append(asked)

    def signed(self, repo: str, commit: str, key: str) -> str:
        with self._lock:
            self._signatures += 1
            return f"{self.cdn}/{repo}/{commit}/{key}?X-Signature={self._signatures}"

    def is_valid(self, signature: int) -> bool:
        with self._lock:
            return self._oldest_valid <= signature <= self._signatures


@contextmanager
def hub_server(cache: Path) -> Iterator[HubServer]:
    server = HubServer()
    with (
        listening(_HubHandler, hub=server) as server.endpoint,
        listening(_CdnHandler, hub=server) as server.cdn,
        pytest.MonkeyPatch.context() as patch,
    ):
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "ENDPOINT", server.endpoint)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.delenv("HF_TOKEN", raising=False)
        patch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
        patch.setattr(constants, "HF_STORED_TOKENS_PATH", "/nonexistent/tokens")
        try:
            yield server
        finally:
            close_session()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(key: str) -> bool:
    return key.endswith((".safetensors", ".bin"))


class _Handler(Handler):
    hub: HubServer

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        fault = self.hub.fault_of(f"{self.command} {path}")
        self._cut = fault == "cut"
        if fault == "reset":
            self._drop()
        elif fault in ("500", "429"):
            self._answer(path, int(fault), b"not now", {"Retry-After": "0"})
        else:
            self._serve(urlsplit(self.path).path)

    do_HEAD = do_GET  # noqa: N815

    def _serve(self, path: str) -> None:
        raise NotImplementedError

    def _refuse(self, path: str, status: int, code: str, message: str) -> None:
        self._answer(path, status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _file(self, path: str, data: bytes, headers: Mapping[str, str]) -> None:
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted is None or not self.hub.has_ranges:
            self._answer(path, 200, data, headers)
            return
        begin, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        if begin >= len(data):
            self._answer(path, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        ranged = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        self._answer(path, 206, data[begin:end], {**headers, **ranged}, offset=begin)

    def _answer(
        self, path: str, status: int, body: bytes, headers: Mapping[str, str], *, offset: int = 0
    ) -> None:
        is_sent = self.command != "HEAD"
        token = self.headers.get("Authorization")
        served = len(body) // 2 if self._cut and is_sent else len(body)
        sent = served if is_sent else 0
        self.hub.note(Asked(self.command, unquote(path), offset, sent, token, status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if is_sent:
            self.wfile.write(body[:served])
        if served < len(body):
            self.wfile.flush()
            self._drop()

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.connection.shutdown(socket.SHUT_RDWR)


class _HubHandler(_Handler):
    def _serve(self, path: str) -> None:
        found = _API.fullmatch(path) or _RESOLVE.fullmatch(path)
        if found is None:
            # What the client asks of its own accord.
            self.send_error(404)
            return
        repository = self.hub.repositories.get(found["repo"])
        if repository is None:
            self._refuse(path, 404, "RepoNotFound", "Repository not found")
            return
        is_known = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repository.refusal is not None and not is_known:
            self._refuse(path, *repository.refusal)
            return
        revision = unquote(found["revision"] or "main")
        commit = repository.commit_of(revision)
        if commit is None:
            self._refuse(path, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif found.re is _API:
            self._tell(path, found, commit, repository.commits[commit])
        else:
            self._resolve(path, found["repo"], commit, unquote(found["key"]), repository.commits[commit])

    def _tell(self, path: str, found: re.Match[str], commit: str, files: Mapping[str, bytes]) -> None:
        if found["what"] == "tree":
            told: Any = [{"type": "file", "path": key, **_blob(key, data)} for key, data in files.items()]
        else:
            has_blobs = "blobs" in parse_qs(urlsplit(self.path).query)
            told = {"id": found["repo"], "sha": commit, "siblings": list(_siblings(files, has_blobs))}
        self._answer(path, 200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _resolve(self, path: str, repo: str, commit: str, key: str, files: Mapping[str, bytes]) -> None:
        data = files.get(key)
        if data is None:
            self._refuse(path, 404, "EntryNotFound", "Entry not found")
        elif is_large(key):
            etag, size = f'"{hashlib.sha256(data).hexdigest()}"', str(len(data))
            told = {"X-Repo-Commit": commit, "X-Linked-Etag": etag, "X-Linked-Size": size}
            self._answer(path, 302, b"Found", {**told, "Location": self.hub.signed(repo, commit, key)})
        else:
            self._file(path, data, {"X-Repo-Commit": commit, "ETag": f'"{blob_id(data)}"'})


class _CdnHandler(_Handler):
    def _serve(self, path: str) -> None:
        organization, name, commit, key = unquote(path).removeprefix("/").split("/", 3)
        signature = int(parse_qs(urlsplit(self.path).query)["X-Signature"][0])
        if not self.hub.is_valid(signature):
            self._answer(path, 403, b"<Error>Request has expired</Error>", {})
            return
        data = self.hub.repositories[f"{organization}/{name}"].commits[commit][key]
        self._file(path, data, {"ETag": '"of-the-bucket"'})


def _blob(key: str, data: bytes) -> dict[str, Any]:
    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return {"oid": blob_id(data), "size": len(data), **({"lfs": lfs} if is_large(key) else {})}


def _siblings(files: Mapping[str, bytes], has_blobs: bool) -> Iterator[dict[str, Any]]:
    for key, data in files.items():
        told: dict[str, Any] = {"rfilename": key}
        if has_blobs:
            lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            told |= {"size": len(data), "blobId": blob_id(data), **({"lfs": lfs} if is_large(key) else {})}
        yield told
