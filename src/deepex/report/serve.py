"""The report of what is running, over HTTP on this machine alone: for a login node and a port forward.

    with Watch([Path("runs")], port=0) as watch:
        print(watch.address)              # http://127.0.0.1:41235/TOKEN/
        watch.serve()

It can be read and nothing else. Who does not know the token gets 404, whatever is asked for, and so does a page of another site
that points a name of its own at this machine (Host must be this one's). The report is made again only when a record has changed,
and at most every few seconds; requests are answered few at a time, with a limit on how long one may take.
"""

import hmac
import secrets
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any, Final, Self

from typing_extensions import override

from deepex.errors import DeepexError, StorageError
from deepex.record import RunDirectory
from deepex.report.build import make_report

_LEAST_SECONDS: Final = 3.0  # between two makings of the report
_AT_ONCE: Final = 8
_REQUEST_SECONDS: Final = 20.0
_TEXT: Final = "text/plain; charset=utf-8"
_NOT_FOUND: Final = (404, _TEXT, b"not found\n")
_ASKS: Final = """<script>
(() => {
  const key = "deepex-watch-scroll", seen = "@SEEN@";
  addEventListener("load", () => { const y = sessionStorage.getItem(key); if (y) scrollTo(0, Number(y)); });
  const ask = async () => {
    try {
      const reply = await fetch("state");
      if (reply.ok && (await reply.text()) !== seen) { sessionStorage.setItem(key, String(scrollY)); location.reload(); }
    } catch { /* the server has ended, or the forward is down: what is shown stays */ }
  };
  setInterval(ask, 3000);
})();
</script>"""


class Watch:
    """Serves the report of `directories` at `address` until it is closed."""

    def __init__(self, directories: Sequence[Path], *, port: int, token: str | None = None) -> None:
        self._directories, self._token = list(directories), token or secrets.token_urlsafe(24)
        self._made, self._seen, self._page = -_LEAST_SECONDS, "", b""
        self._lock, self._slots = threading.Lock(), threading.BoundedSemaphore(_AT_ONCE)
        watch = self

        class Handler(_Handler):
            """One request."""

            owner = watch

        try:
            self._server = _Server(("127.0.0.1", port), Handler)
        except OSError as error:
            raise StorageError(f"port {port} cannot be used: {error.strerror}; choose another --port, or 0 for any") from error
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}/{self._token}/"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()

    def serve(self) -> None:
        """Answer requests until `stop`, from another thread, or an interrupt."""
        self._server.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        """End `serve`."""
        self._server.shutdown()

    def answer(self, path: str, host: str) -> tuple[int, str, bytes]:
        """Status, content type and body for a path: 404 for whatever is not there, or not for this caller."""
        name = host.rsplit(":", 1)[0]
        parts = path.split("?", 1)[0].split("/")
        known = len(parts) == 3 and hmac.compare_digest(parts[1].encode(), self._token.encode())
        if name not in ("127.0.0.1", "localhost") or not known:
            return _NOT_FOUND
        if not self._slots.acquire(blocking=False):
            return 503, _TEXT, b"busy\n"
        try:
            return self._answer(parts[2])
        finally:
            self._slots.release()

    def _answer(self, name: str) -> tuple[int, str, bytes]:
        if name == "state":
            return 200, _TEXT, self._state().encode()
        return (200, "text/html; charset=utf-8", self._report()) if name in ("", "report.html") else _NOT_FOUND

    def _state(self) -> str:
        """What the records look like now: it changes when one of them does."""
        files = [
            path
            for directory in self._directories
            for pattern in ("**/epochs.jsonl", "**/run.json", "**/study.json", "**/measurements.json")
            for path in sorted(directory.glob(pattern))
        ]
        at_work = sum(map(_at_work, files))  # a process that is killed changes no file
        return f"{len(files)}-{at_work}-{max(map(_changed, files), default=0)}"

    def _report(self) -> bytes:
        with self._lock:
            state = self._state()
            if not self._page or (state != self._seen and monotonic() - self._made > _LEAST_SECONDS):
                self._page, self._seen, self._made = self._make(state), state, monotonic()
            return self._page

    def _make(self, state: str) -> bytes:
        try:
            html = make_report(self._directories).html
        except DeepexError as error:  # nothing there yet: the page says so, and looks again
            text = str(error).replace("&", "&amp;").replace("<", "&lt;")
            html = f"<!doctype html><html lang=en><title>DeepEx</title><body><p>{text}</p></body></html>"
        html = html.replace("default-src 'none';", "default-src 'none'; connect-src 'self';", 1)  # the page asks for its state
        head, end, tail = html.rpartition("</body>")
        return f"{head}{_ASKS.replace('@SEEN@', state)}{end}{tail}".encode()


def _changed(path: Path) -> int:
    """When a file last changed; a run that begins anew may have removed it by now."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _at_work(path: Path) -> bool:
    """Whether this is of a run that somebody holds."""
    with suppress(DeepexError, OSError):
        return path.name == "run.json" and RunDirectory(path.parent).outcome[0] == "running"
    return False


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a browser may leave whenever it likes
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    owner: Watch
    timeout = _REQUEST_SECONDS
    server_version, sys_version = "DeepEx", ""

    def do_GET(self) -> None:
        """Answer with the report, its state, or nothing."""
        status, kind, body = self.owner.answer(self.path, self.headers.get("Host", ""))
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address has the token in it."""
