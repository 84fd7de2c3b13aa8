"""Object stores that send requests on: what is sent to one host is seen by no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from raymerge.errors import CheckpointError, TargetError
from raymerge.storage.objects.writer import ObjectWriter
from raymerge.storage.open import open_store

_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "s3": {
        "AWS_ENDPOINT_URL": "{endpoint}",
        "AWS_ACCESS_KEY_ID": "AKIDTESTING",
        "AWS_SECRET_ACCESS_KEY": "SECRET",
        "AWS_SESSION_TOKEN": "SECRET",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent/config",
        "AWS_ALLOW_HTTP": "true",
    },
    "gs": {"GOOGLE_BASE_URL": "{endpoint}", "GOOGLE_BEARER_TOKEN": "SECRET", "GOOGLE_ALLOW_HTTP": "true"},
    "az": {
        "AZURE_STORAGE_ENDPOINT": "{endpoint}",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_SAS_KEY": "sv=2023-01-01&sig=SECRET",
        "AZURE_ALLOW_HTTP": "true",
    },
}
"""A server of each kind, and credentials of the kind that travels farthest."""
_OBJECT = {"Content-Length": "5", "ETag": '"a"', "Last-Modified": "Mon, 23 Nov 2026 00:00:00 GMT"}


class _Server:
    """Answers everything with one answer, and writes down what it was asked."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.seen: list[str] = []
        """Lines and headers of the requests, one text each."""
        self.listener = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(status, headers, body))
        self.port = self.listener.server_address[1]

    def _handler(self, status: int, headers: Mapping[str, str], body: bytes) -> Any:
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                seen.append(f"{self.requestline}\n{self.headers}")
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler


@contextmanager
def _serving(status: int, headers: Mapping[str, str], body: bytes = b"") -> Iterator[_Server]:
    server = _Server(status, headers, body)
    thread = threading.Thread(target=server.listener.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.listener.shutdown()
        server.listener.server_close()
        thread.join()


def _go_to(scheme: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in _ENVIRONMENTS[scheme].items():
        monkeypatch.setenv(name, value.format(endpoint=endpoint))


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize("scheme", _ENVIRONMENTS)
def test_no_redirect_to_another_host_is_followed(
    scheme: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _serving(200, _OBJECT, b"other") as other:
        onward = {"Location": f"http://localhost:{other.port}/x", "Content-Length": "0"}
        with _serving(status, onward) as first:
            _go_to(scheme, f"http://127.0.0.1:{first.port}", monkeypatch)
            with (
                open_store(f"{scheme}://bucket/a") as store,
                pytest.raises(CheckpointError, match="sends requests on to another host"),
            ):
                store.read("model.safetensors", 0, 5)
            with pytest.raises(TargetError, match=r"sends requests on to another host|is in another region"):
                ObjectWriter(f"{scheme}://bucket/a").put("model.safetensors", b"bytes")
        assert first.seen
        assert other.seen == []


def test_a_proxy_of_the_user_is_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with _serving(200, _OBJECT, b"bytes") as proxy:
        _go_to("s3", "http://s3.example", monkeypatch)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        with open_store("s3://bucket/a") as store:
            assert store.info("model.safetensors") is not None
    assert proxy.seen[0].startswith("HEAD http://s3.example/bucket/a/model.safetensors")
