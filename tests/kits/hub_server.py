"""A server on 127.0.0.1 that speaks what the Hub's client uses of the Hub's API, and fails as it is told.

There are two: one that knows repositories, and one that serves large files under signed addresses, as the
Hub's CDN does. Both write down what they were asked.
"""

from __future__ import annotations

import base64
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
_WRITE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<what>preupload|commit)/main")
_BATCH = re.compile(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
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
    is_private: bool = False
    messages: dict[str, str] = field(default_factory=dict)
    """Of commits that were made by its API."""

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.refs["main"]]

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


class HubServer:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.objects: dict[str, bytes] = {}
        """Large files that were uploaded, whether a commit has them or not, by SHA-256."""
        self.may_write = True
        self.ignored: re.Pattern[str] | None = None
        """As a repository's .gitignore has it."""
        self.most_uploads: int | None = None
        """Uploads that are answered; later ones hang until the server ends."""
        self._num_uploads = 0
        self.ended = threading.Event()
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

    def commit(self, repo: str, files: dict[str, bytes], message: str = "") -> str:
        repository = self.repositories.setdefault(repo, Repository())
        number = hashlib.sha1(f"{repo} {len(repository.commits)}".encode()).hexdigest()
        repository.commits[number], repository.messages[number] = files, message
        repository.refs["main"] = number
        return number

    def admits_upload(self) -> bool:
        """Whether one more upload is answered."""
        with self._lock:
            self._num_uploads += 1
            return self.most_uploads is None or self._num_uploads <= self.most_uploads

    def uploads(self) -> list[str]:
        return [each.path for each in self.asked if each.method == "PUT" and each.status == 200]

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
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "ENDPOINT", server.endpoint)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.delenv("HF_TOKEN", raising=False)
        patch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
        patch.setattr(constants, "HF_STORED_TOKENS_PATH", "/nonexistent/tokens")
        try:
            yield server
        finally:
            server.ended.set()
            close_session()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(key: str) -> bool:
    return key.endswith((".safetensors", ".bin"))


class _Handler(Handler):
    hub: HubServer
    body = b""

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        fault = self.hub.fault_of(f"{self.command} {path}")
        self._cut = fault == "cut"
        if fault == "reset":
            self._drop()
        elif fault in ("500", "429"):
            self._answer(path, int(fault), b"not now", {"Retry-After": "0"})
        else:
            self._serve(urlsplit(self.path).path)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

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
        if path == "/api/whoami-v2" or self.command == "POST":
            self._take(unquote(path))
            return
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

    # What a push asks

    def _take(self, path: str) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._refuse(path, 401, "", "Invalid credentials in Authorization header")
        elif path == "/api/whoami-v2":
            self._json(path, {"type": "user", "name": "somebody"})
        elif not self.hub.may_write:
            self._refuse(path, 403, "", "Forbidden: no write access")
        elif path == "/api/repos/create":
            self._create(path, json.loads(self.body))
        elif path == "/api/validate-yaml":
            self._json(path, {"errors": [], "warnings": []})
        elif found := _BATCH.fullmatch(path):
            self._batch(path, json.loads(self.body))
        elif (found := _WRITE.fullmatch(path)) and found["what"] == "preupload":
            self._preupload(path, self.hub.repositories[found["repo"]], json.loads(self.body))
        elif found is not None:
            self._commit(path, found["repo"], [json.loads(line) for line in self.body.splitlines()])
        else:
            self.send_error(404)

    def _json(self, path: str, told: object, status: int = 200) -> None:
        self._answer(path, status, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _create(self, path: str, asked: Mapping[str, Any]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        told = {"url": f"{self.hub.endpoint}/{repo}"}
        if repo in self.hub.repositories:
            self._json(path, {**told, "error": "You already created this model repo"}, 409)
            return
        self.hub.commit(repo, {".gitattributes": b"*.safetensors filter=lfs"}, "initial commit")
        self.hub.repositories[repo].is_private = asked["visibility"] == "private"
        self._json(path, told)

    def _preupload(self, path: str, repository: Repository, asked: Mapping[str, Any]) -> None:
        told = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if is_large(each["path"]) else "regular",
                "shouldIgnore": self.hub.ignored is not None
                and bool(self.hub.ignored.fullmatch(each["path"])),
                "oid": self._oid(each["path"], repository.files.get(each["path"])),
            }
            for each in asked["files"]
        ]
        self._json(path, {"files": told})

    def _oid(self, key: str, data: bytes | None) -> str | None:
        if data is None:
            return None
        return hashlib.sha256(data).hexdigest() if is_large(key) else blob_id(data)

    def _batch(self, path: str, asked: Mapping[str, Any]) -> None:
        told = []
        for each in asked["objects"]:
            upload = {"href": f"{self.hub.cdn}/upload/{each['oid']}"}
            actions = {} if each["oid"] in self.hub.objects else {"actions": {"upload": upload}}
            told.append({**each, **actions})
        self._json(path, {"transfer": "basic", "objects": told})

    def _commit(self, path: str, repo: str, lines: list[dict[str, Any]]) -> None:
        repository = self.hub.repositories[repo]
        header, *changes = lines
        if header["value"].get("parentCommit") not in (None, repository.refs["main"]):
            self._refuse(path, 412, "", "A commit has happened since. Please refresh and try again.")
            return
        files = dict(repository.files)
        for change in changes:
            value = change["value"]
            if change["key"] == "deletedFile":
                del files[value["path"]]
            elif change["key"] == "lfsFile" and value["oid"] not in self.hub.objects:
                self._refuse(path, 400, "", f"{value['path']} was not uploaded")
                return
            elif change["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        number = self.hub.commit(repo, files, header["value"]["summary"])
        told = {"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{number}", "commitOid": number}
        self._json(path, {**told, "pullRequestUrl": None})

    def _tell(self, path: str, found: re.Match[str], commit: str, files: Mapping[str, bytes]) -> None:
        if found["what"] == "tree":
            told: Any = [{"type": "file", "path": key, **_blob(key, data)} for key, data in files.items()]
        else:
            has_blobs = "blobs" in parse_qs(urlsplit(self.path).query)
            told = {"id": found["repo"], "sha": commit, "siblings": list(_siblings(files, has_blobs))}
            told["private"] = self.hub.repositories[found["repo"]].is_private
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
        if self.command == "PUT":
            digest = path.removeprefix("/upload/")
            if not self.hub.admits_upload():
                self.hub.ended.wait()
            is_right = hashlib.sha256(self.body).hexdigest() == digest
            if is_right:
                self.hub.objects[digest] = self.body
            self._answer(path, 200 if is_right else 400, b"", {})
            return
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
