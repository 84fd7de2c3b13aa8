"""What the fake services on 127.0.0.1 share: how they listen, and how they break off."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Answers go out in two pieces; waiting for the first to be acknowledged takes 40 ms.
    disable_nagle_algorithm = True

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None: ...

    def break_off(self) -> None:
        """By a reset, which loses bytes that were sent."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    # Connections of clients that went away are not waited for.
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None: ...


@contextmanager
def listening(handler: type[Handler], **attributes: object) -> Iterator[str]:
    """Yields the address at which the handler answers, each of its instances with these attributes."""
    listener = _Listener(("127.0.0.1", 0), type("Handler", (handler,), attributes))
    with serving(listener):
        yield f"http://127.0.0.1:{listener.server_address[1]}"


@contextmanager
def serving(listener: HTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
