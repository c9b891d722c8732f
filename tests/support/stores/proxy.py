"""Stands between a store's client and its server: counts requests, and makes faults.

An example, which lets the store be busy for three requests:

    proxy = Proxy(endpoint())
    use(proxy.url)  # the stores that are opened from now on go through it
    fault = proxy.inject(answered(503, "SlowDown"), "PUT", "partNumber=2", times=3)
    ...
    assert fault.seen == 3
    assert proxy.counts() == {"PUT": 7, "POST": 2}
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """Of the server."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    nbytes: int | None = None
    """What it says that it has; of an answer to HEAD, which has no body."""


class Exchange:
    """One request, whose body is still to be read, and what becomes of it. All that a fault may do."""

    def __init__(self, handler: BaseHTTPRequestHandler, target: str) -> None:
        self._handler = handler
        self._target = target
        self._body: bytes | None = None
        self.headers = {k: v for k, v in handler.headers.items() if k.lower() != "connection"}
        self.nbytes = int(handler.headers.get("Content-Length") or 0)

    def read(self, nbytes: int) -> bytes:
        """The next bytes of the request's body."""
        return self._handler.rfile.read(nbytes)

    def forward(self) -> Answer:
        """Let the server do what is asked. Each call sends a request."""
        if self._body is None:
            self._body = self.read(self.nbytes)
        server = http.client.HTTPConnection(self._target, timeout=60)
        try:
            server.request(self._handler.command, self._handler.path, self._body, self.headers)
            answer = server.getresponse()
            data = answer.read()
        finally:
            server.close()
        head = self._handler.command == "HEAD"
        length = answer.getheader("Content-Length") if head else None
        return Answer(answer.status, answer.getheaders(), data, int(length) if length else None)

    def reply(self, answer: Answer, at_most: int | None = None) -> None:
        """Answer the client; with ``at_most`` bytes of the body only, behind headers that announce all."""
        if self._body is None:
            self._body = self.read(self.nbytes)
        handler = self._handler
        handler.send_response(answer.status)
        for name, value in answer.headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                handler.send_header(name, value)
        nbytes = len(answer.body) if answer.nbytes is None else answer.nbytes
        handler.send_header("Content-Length", str(nbytes))
        handler.end_headers()
        handler.wfile.write(answer.body[:at_most])

    def cut(self) -> None:
        """End the connection to the client."""
        self._handler.wfile.flush()
        self._handler.close_connection = True
        self._handler.connection.shutdown(socket.SHUT_RDWR)


Fault = Callable[[Exchange], None]


def answered(status: int, code: str, message: str = "made by a test") -> Fault:
    """The server does nothing, and answers with an error, in S3's words."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return lambda exchange: exchange.reply(
        Answer(status, [("Content-Type", "application/xml")], body.encode())
    )


def cut_request(after_bytes: int = 0) -> Fault:
    """The connection ends after that much of the request's body. The server does nothing."""

    def fault(exchange: Exchange) -> None:
        exchange.read(min(after_bytes, exchange.nbytes))
        exchange.cut()

    return fault


def cut_answer(after_bytes: int) -> Fault:
    """The server does what is asked; the connection ends after that much of the answer's body."""

    def fault(exchange: Exchange) -> None:
        exchange.reply(exchange.forward(), at_most=after_bytes)
        exchange.cut()

    return fault


def lost_answer(exchange: Exchange) -> None:
    """The server does what is asked, and the client does not hear of it."""
    exchange.forward()
    exchange.cut()


def duplicated(exchange: Exchange) -> None:
    """The server gets the request twice, and the client the second answer."""
    exchange.forward()
    exchange.reply(exchange.forward())


def stalled(until: threading.Event) -> Fault:
    """The server does what is asked after ``until`` is set; the client waits."""

    def fault(exchange: Exchange) -> None:
        until.wait()
        exchange.reply(exchange.forward())

    return fault


def whole_for_range(exchange: Exchange) -> None:
    """The server sends the whole object, with status 200, whatever range was asked for."""
    exchange.headers = {k: v for k, v in exchange.headers.items() if k.lower() != "range"}
    exchange.reply(exchange.forward())


@dataclass
class Injected:
    """A fault, and the requests that have it."""

    fault: Fault
    method: str
    path: re.Pattern[str]
    left: int
    skip: int
    seen: int = field(default=0)
    """How many requests had it so far."""


class Proxy:
    """Forwards to the server at ``url``.

    ``requests`` has method and path (with query) of each request so far. While ``down``, connections are cut at the
    first request: an outage.
    """

    def __init__(self, url: str) -> None:
        self.requests: list[tuple[str, str]] = []
        self.down = False
        self._target = urlsplit(url).netloc
        self._lock = threading.Lock()  # guards requests and faults
        self._faults: list[Injected] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                try:
                    proxy._pass(self)
                except ConnectionError:  # the client has gone
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def inject(
        self, fault: Fault, method: str, path: str = "", *, times: int = 1, skip: int = 0
    ) -> Injected:
        """The next ``times`` requests whose path (with query) has the expression ``path`` have ``fault``; the first
        ``skip`` of them do not.
        """
        injected = Injected(fault, method, re.compile(path), times, skip)
        with self._lock:
            self._faults.append(injected)
        return injected

    def counts(self) -> Counter[str]:
        """How many requests there were, by method."""
        return Counter(method for method, _ in self.requests)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _pass(self, handler: BaseHTTPRequestHandler) -> None:
        exchange = Exchange(handler, self._target)
        with self._lock:
            self.requests.append((handler.command, handler.path))
            fault = self._fault_of(handler.command, handler.path)
        if self.down:
            exchange.cut()
        elif fault is not None:
            fault(exchange)
        else:
            exchange.reply(exchange.forward())

    def _fault_of(self, method: str, path: str) -> Fault | None:
        for injected in self._faults:
            if injected.left and injected.method == method and injected.path.search(path):
                if injected.skip:
                    injected.skip -= 1
                    continue
                injected.left -= 1
                injected.seen += 1
                return injected.fault
        return None
