"""Stands between a store's client and the S3 server: counts requests, and delays what is sent."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Proxy"]


class Proxy:
    """Forwards to the server at ``url``. With ``bytes_per_second``, all bodies of requests pass at that rate together.

    ``requests`` has method and path (with query) of each request so far.
    """

    def __init__(self, url: str, bytes_per_second: float | None = None) -> None:
        self.requests: list[tuple[str, str]] = []
        target = urlsplit(url).netloc
        lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _forward(self) -> None:
                nbytes = int(self.headers.get("Content-Length") or 0)
                if bytes_per_second is not None and nbytes:
                    with lock:
                        time.sleep(nbytes / bytes_per_second)
                body = self.rfile.read(nbytes)
                with lock:
                    proxy.requests.append((self.command, self.path))
                server = http.client.HTTPConnection(target, timeout=60)
                headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
                server.request(self.command, self.path, body, headers)
                answer = server.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                server.close()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def counts(self) -> Counter[str]:
        """How many requests there were, by method."""
        return Counter(method for method, _ in self.requests)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
