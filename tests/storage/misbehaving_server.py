"""A file server on 127.0.0.1 that misbehaves on request, one behaviour per request."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONTENT = b"GGUF" + bytes(range(256)) * 400
SHA256 = hashlib.sha256(CONTENT).hexdigest()

Behaviour = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers each GET with the next planned behaviour, then with `good`."""

    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_GET(self) -> None:
        self.close_connection = True
        self.server.requests.append((self.path, dict(self.headers)))
        plan = self.server.plan
        (plan.pop(0) if plan else good)(self)

    def log_message(self, *args: Any) -> None:
        pass

    @property
    def start(self) -> int | None:
        """First byte of the asked range, when the server should honour it."""
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if_range = self.headers.get("If-Range", self.server.etag)
        return int(match[1]) if match and if_range == self.server.etag else None

    def head(self, status: int, **headers: str | int) -> None:
        self.send_response(status)
        self.send_header("Connection", "close")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()


class FileServer(ThreadingHTTPServer):
    """Serves one file under every path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.etag = '"v1"'
        self.plan: list[Behaviour] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hangs up is part of the tests


@contextmanager
def run_server() -> Iterator[FileServer]:
    server = FileServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def good(handler: Handler) -> None:
    """The file, or the range of it."""
    server, start = handler.server, handler.start
    size = len(server.content)
    if start is None:
        handler.head(200, Content_Length=size, ETag=server.etag)
        handler.wfile.write(server.content)
    elif start >= size:
        handler.head(416, Content_Range=f"bytes */{size}", Content_Length=0)
    else:
        handler.head(
            206,
            Content_Length=size - start,
            Content_Range=f"bytes {start}-{size - 1}/{size}",
            ETag=server.etag,
        )
        handler.wfile.write(server.content[start:])


def cut_after(num_bytes: int) -> Behaviour:
    """Promise everything, close the connection after so many bytes."""

    def behave(handler: Handler) -> None:
        server, start = handler.server, handler.start or 0
        size = len(server.content)
        status = 206 if start else 200
        handler.head(
            status,
            Content_Length=size - start,
            Content_Range=f"bytes {start}-{size - 1}/{size}",
            ETag=server.etag,
        )
        handler.wfile.write(server.content[start : start + num_bytes])

    return behave


def stall_after(num_bytes: int) -> Behaviour:
    """Send so many bytes, then nothing, with the connection open."""

    def behave(handler: Handler) -> None:
        cut_after(num_bytes)(handler)
        handler.wfile.flush()
        handler.server.closing.wait()

    return behave


def short_ranges(num_bytes: int) -> Behaviour:
    """Answer a range with less than was asked for, as some proxies do."""

    def behave(handler: Handler) -> None:
        server, start = handler.server, handler.start or 0
        size = len(server.content)
        end = min(start + num_bytes, size)
        handler.head(
            206, Content_Length=end - start, Content_Range=f"bytes {start}-{end - 1}/{size}"
        )
        handler.wfile.write(server.content[start:end])

    return behave


def ignore_range(handler: Handler) -> None:
    """200 with the whole file, whatever was asked for."""
    handler.head(200, Content_Length=len(handler.server.content), ETag=handler.server.etag)
    handler.wfile.write(handler.server.content)


def ignore_if_range(handler: Handler) -> None:
    """A range of the present file, although the part is of another version."""
    del handler.headers["If-Range"]
    good(handler)


def status(code: int, **headers: str) -> Behaviour:
    """An error without a body."""
    return lambda handler: handler.head(code, Content_Length=0, **headers)


def send(body: bytes, **headers: str | int) -> Behaviour:
    """Any 200."""

    def behave(handler: Handler) -> None:
        handler.head(200, **({"Content_Length": len(body)} | headers))
        handler.wfile.write(body)

    return behave


def redirect(to: str, **headers: str) -> Behaviour:
    """302 to another address."""
    return lambda handler: handler.head(302, Location=to, Content_Length=0, **headers)


def hang_up(handler: Handler) -> None:
    """Close without an answer."""
