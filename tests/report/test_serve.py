"""The live report: read by those who have the token, refreshed when a record changes, and nothing else."""

import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import sync_playwright

from deepex.errors import StorageError
from deepex.record.run import hold
from deepex.report.serve import Watch
from tests.report.records import Made, epoch_of, write_run


@contextmanager
def serving(*directories: Path) -> Iterator[Watch]:
    with Watch(directories, port=0) as watch:
        thread = threading.Thread(target=watch.serve)
        thread.start()
        try:
            yield watch
        finally:
            watch.stop()
            thread.join()


def ask(watch: Watch, path: str = "", *, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    address = urlsplit(watch.address)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    whole = path if path.startswith("/") else address.path + path
    connection.request(method, whole, headers={} if host is None else {"Host": host})
    reply = connection.getresponse()
    return reply.status, reply.read()


def test_who_has_the_token_reads_the_report(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Made(epochs=2))
    with serving(tmp_path) as watch:
        status, body = ask(watch)
        assert status == 200
        assert b"<html" in body
        assert ask(watch, "state")[0] == 200


def test_a_run_that_is_killed_is_news(tmp_path: Path) -> None:
    """Though no file changes."""
    run = write_run(tmp_path / "run", Made(epochs=2), status="running", reason="")
    with serving(tmp_path) as watch:
        with hold(run):
            before = ask(watch, "state")
            assert before == ask(watch, "state")
        assert ask(watch, "state") != before


def test_a_browser_that_leaves_is_no_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", Made(epochs=2))
    with serving(tmp_path) as watch:
        address = urlsplit(watch.address)
        for _ in range(3):
            with socket.create_connection((address.hostname, address.port)) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                connection.sendall(f"GET {address.path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                connection.recv(1)
        assert ask(watch)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("path", ["/", "/wrong/", "/wrong/state", "/../etc/passwd", "run.json", "../", "%2e%2e/run.json"])
def test_others_get_nothing(path: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run", Made(epochs=2))
    with serving(tmp_path) as watch:
        assert ask(watch, path) == (404, b"not found\n")


def test_a_page_of_another_site_gets_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Made(epochs=2))
    with serving(tmp_path) as watch:
        assert ask(watch, host="evil.example")[0] == 404
        assert ask(watch, host="localhost:1")[0] == 200


def test_who_asks_while_it_is_busy_is_told_so(tmp_path: Path) -> None:
    """With a status that the page does not take for news: it would reload, and keep the server busy."""
    write_run(tmp_path / "run", Made(epochs=2))
    all_in, go_on = threading.Barrier(9), threading.Event()

    def slow() -> str:
        all_in.wait(30)
        go_on.wait(30)
        return "state"

    with serving(tmp_path) as watch, patch.object(watch, "_state", slow):
        asking = [threading.Thread(target=ask, args=(watch, "state")) for _ in range(8)]
        for thread in asking:
            thread.start()
        all_in.wait(30)
        assert ask(watch, "state") == (503, b"busy\n")
        go_on.set()
        for thread in asking:
            thread.join()


def test_a_record_that_vanishes_while_it_is_looked_at_is_no_error(tmp_path: Path) -> None:
    gone = tmp_path / "run/run.json"
    write_run(tmp_path / "run", Made(epochs=2))
    with serving(tmp_path) as watch, patch.object(Path, "glob", lambda *_: iter([gone])):
        gone.unlink()  # after it was found
        assert ask(watch, "state") == (200, b"4-0-0")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_can_be_read_and_nothing_else(method: str, tmp_path: Path) -> None:
    with serving(tmp_path) as watch:
        assert ask(watch, method=method)[0] == 501


def test_it_listens_on_this_machine_alone(tmp_path: Path) -> None:
    with serving(tmp_path) as watch:
        assert watch.address.startswith("http://127.0.0.1:")
        assert watch._server.server_address[0] == "127.0.0.1"


def test_nothing_there_yet_is_said_and_no_failure(tmp_path: Path) -> None:
    with serving(tmp_path) as watch:
        status, body = ask(watch)
        assert (status, b"no run" in body or b"holds no" in body) == (200, True)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with serving(tmp_path) as watch, pytest.raises(StorageError, match=r"port \d+ cannot be used: .*choose another --port"):
        Watch([tmp_path], port=urlsplit(watch.address).port or 0)


@pytest.mark.slow
def test_an_open_page_shows_the_next_epoch_by_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Made(epochs=2), status="running")
    with serving(tmp_path) as watch, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        troubles: list[str] = []
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(watch.address)
        assert page.locator("text=after 2 epochs").count() > 0
        with (run / "epochs.jsonl").open("a") as file:
            file.write(json.dumps(asdict(epoch_of(Made(epochs=3), 3, Random(1)))) + "\n")
        page.wait_for_selector("text=after 3 epochs", timeout=30_000)
        assert [trouble for trouble in troubles if "favicon" not in trouble] == []
        browser.close()
