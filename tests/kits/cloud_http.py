"""Serves the fakes of object stores on 127.0.0.1, and fails as they are told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import formatdate
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from kits.cloud_server import BUCKET, Answer, Asked, CloudServer, Kind, RefusedError, Request, StrangeError
from kits.local_http import Handler, listening

_NUMBERS: Mapping[str, int] = {"error": 500, "throttle": 503, "forbid": 403}
_OTHERS = ("AWS_", "AZURE_", "GOOGLE_", "GCE_", "IDENTITY_", "MSI_", "SERVICE_ACCOUNT")


@contextmanager
def serving(cloud: CloudServer) -> Iterator[CloudServer]:
    with listening(_Handler, cloud=cloud) as cloud.endpoint, pytest.MonkeyPatch.context() as patch:
        for name in [each for each in os.environ if each.startswith(_OTHERS)]:
            patch.delenv(name)
        for name, text in cloud.environment.items():
            patch.setenv(name, text)
        yield cloud


class _Handler(Handler):
    cloud: CloudServer

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        headers = {name.lower(): text for name, text in self.headers.items()}
        request = Request(self.command, parts.path, key, query, headers, body)
        if self.cloud.before is not None:
            self.cloud.before(request)
        with self.cloud.lock:
            kind = self._struck(request)
            answer = None if kind == "reset" else self._answer(request, kind)
            is_lost = answer is None or kind == "lose"
            self.cloud.asked.append(Asked(request, 0 if is_lost or answer is None else answer.status))
        if answer is None or is_lost:
            self.break_off()
        else:
            self._send(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815

    def _struck(self, request: Request) -> Kind | None:
        for each in self.cloud.faults:
            if each.times > 0 and each.method == request.method and each.key in request.key:
                each.times -= 1
                return each.kind
        return None

    def _answer(self, request: Request, kind: Kind | None) -> Answer:
        try:
            if kind in _NUMBERS:
                raise RefusedError(_NUMBERS[kind], "AsTheTestHasIt")
            return self.cloud.answer(request)
        except RefusedError as error:
            status, code = error.status, error.code
        except StrangeError as error:
            self.cloud.strange.append(f"{request.method} {self.path}: {error}")
            status, code = 400, "Strange"
        said = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>of the fake</Message></Error>'
        return Answer(status, {"Content-Type": "application/xml"}, said.encode())

    def _send(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        for name, text in answer.headers.items():
            self.send_header(name, text)
        self.send_header("Date", formatdate(time.time(), usegmt=True))
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(OSError):
                self.wfile.write(answer.body)
