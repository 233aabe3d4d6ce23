"""Downloading, from a server of the test's own: whole, cut, wrong, absent, by several mirrors, or not at all."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.hub import catalog
from paceline.hub.catalog import Content, File, Known
from paceline.hub.download import fetch, get

CONTENT = bytes(range(256)) * 4000
PACKED = gzip.compress(CONTENT, 0)
FILE = File("things.gz", len(PACKED), hashlib.sha256(PACKED).hexdigest(), (Content("things", len(CONTENT)),))
HALF = len(PACKED) // 2


class Server(ThreadingHTTPServer):
    """Serves the file; the first part of an address says how well."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str | None]] = []  # path and Range

    def url(self, kind: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{kind}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        asked = self.headers.get("Range")
        self.server.requests.append((kind, asked))
        if kind == "absent":
            return self.send_error(404)
        data = PACKED
        if kind == "wrong":
            data = PACKED[:-1] + b"?"
        elif kind == "longer":
            data = PACKED + b"?"
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and kind != "rangeless" else 0
        if start >= (10 if kind == "short" and start else len(data)):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        # Cut: a first answer of one half, whatever was promised.
        self.wfile.write(data[start : start + HALF] if kind == "cut" and not start else data[start:])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def known(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a data set `things` of one file, from mirrors of the given kinds."""

    def make(*kinds: str) -> None:
        mirrors = tuple(map(server.url, kinds))
        monkeypatch.setitem(catalog.ALL, "things", Known("things", "idx", (FILE,), mirrors))

    return make


def got(tmp_path: Path) -> list[str]:
    """Get the data set into a folder; what was said. Nothing but the file is left there."""
    said: list[str] = []
    assert get("things", tmp_path / "to", say=said.append) == tmp_path / "to"
    assert (tmp_path / "to" / "things.gz").read_bytes() == PACKED
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["things.gz"]
    return said


def put_part(tmp_path: Path, data: bytes) -> Path:
    part = tmp_path / "to" / "things.gz.part"
    part.parent.mkdir()
    part.write_bytes(data)
    return part


def test_a_file_is_downloaded_once(server: Server, known, tmp_path: Path) -> None:
    known("good")
    assert got(tmp_path) == ["things.gz downloaded, its checksum is right"]
    assert got(tmp_path) == ["things.gz is already there"]
    assert server.requests == [("good", None)]


def test_the_default_place_is_in_the_home(known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known("good")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    assert get("things", say=lambda text: None) == tmp_path / "home" / "datasets" / "things"
    monkeypatch.delenv("PACELINE_HOME")
    assert catalog.folder_of("things") == Path("shared_data/datasets/things")


def test_what_is_unpacked_or_packed_otherwise_is_used(server: Server, known, tmp_path: Path) -> None:
    known("good")
    (tmp_path / "things").write_bytes(CONTENT)
    get("things", tmp_path)
    (tmp_path / "things").rename(tmp_path / "aside")
    (tmp_path / "things.gz").write_bytes(gzip.compress(CONTENT, 9))
    get("things", tmp_path)
    assert server.requests == []


@pytest.mark.parametrize(
    "data",
    [PACKED[:-1], gzip.compress(CONTENT + b"?"), PACKED[:HALF] + PACKED[HALF + 1 :] + b"?"],
    ids=["cut", "longer", "changed"],  # gzip writes the time into its data, so pytest's own names would differ
)
def test_a_file_that_is_wrong_is_replaced(known, tmp_path: Path, data: bytes) -> None:
    known("good")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "things.gz").write_bytes(data)
    assert got(tmp_path) == ["things.gz downloaded, its checksum is right"]


def test_a_partial_file_is_gone_on_with(server: Server, known, tmp_path: Path) -> None:
    known("good")
    put_part(tmp_path, PACKED[:1000])
    got(tmp_path)
    assert server.requests == [("good", "bytes=1000-")]


def test_a_cut_connection_is_gone_on_with(server: Server, known, tmp_path: Path) -> None:
    known("cut")
    got(tmp_path)
    assert server.requests == [("cut", None), ("cut", f"bytes={HALF}-")]


def test_a_server_without_ranges_sends_all_of_it(server: Server, known, tmp_path: Path) -> None:
    known("rangeless")
    put_part(tmp_path, PACKED[:1000])
    got(tmp_path)
    assert len(server.requests) == 1


@pytest.mark.parametrize(("kind", "size"), [("good", 1000), ("good", len(PACKED)), ("short", 1000)])
def test_a_partial_file_that_is_wrong_is_begun_again(known, tmp_path: Path, kind: str, size: int) -> None:
    known(kind)
    put_part(tmp_path, b"?" * size)
    got(tmp_path)


@pytest.mark.parametrize("first", ["absent", "wrong", "longer"])
def test_the_next_mirror_is_asked(server: Server, known, tmp_path: Path, first: str) -> None:
    known(first, "good")
    got(tmp_path)
    assert server.requests == [(first, None), ("good", None)]


def test_what_one_mirror_began_the_next_one_ends(server: Server, tmp_path: Path) -> None:
    put_part(tmp_path, PACKED[:HALF])
    urls = [server.url("absent") + FILE.name, server.url("good") + FILE.name]
    fetch(urls, FILE, tmp_path / "to" / FILE.name)
    assert server.requests == [("absent", f"bytes={HALF}-"), ("good", f"bytes={HALF}-")]


def test_a_wrong_checksum_everywhere_leaves_nothing_under_the_name(known, tmp_path: Path) -> None:
    known("wrong")
    with pytest.raises(DataError, match="another checksum than expected"):
        get("things", tmp_path / "to")
    assert list((tmp_path / "to").iterdir()) == []


def test_without_a_network_the_error_says_which_files_to_put_where(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        mirror = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        files = tuple(File(name, 1, "", (Content(name, 1),)) for name in ("a", "b", "c"))
        monkeypatch.setitem(catalog.ALL, "things", Known("things", "idx", files, (mirror,)))
        (tmp_path / "a").write_bytes(b"1")
        with pytest.raises(DataError) as raised:
            get("things", tmp_path)
    assert str(raised.value).startswith("b could not be downloaded (127.0.0.1:")
    assert f"Connection refused); put b, c into {tmp_path} by hand" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_two_processes_do_not_write_one_part(known, tmp_path: Path) -> None:
    known("good")
    part = put_part(tmp_path, b"")
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=f"{part} is being downloaded by another process"):
            get("things", tmp_path / "to")
    got(tmp_path)


def test_a_place_that_cannot_be_written_to_is_named(known, tmp_path: Path) -> None:
    known("good")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=f"{tmp_path}/file/to cannot be written to: Not a directory; use --to DIR"):
        get("things", tmp_path / "file" / "to")


@pytest.mark.parametrize("name", sorted(catalog.ALL))
def test_the_catalog_holds_together(name: str) -> None:
    entry = catalog.ALL[name]
    assert all(mirror.startswith("https://") and mirror.endswith("/") for mirror in entry.mirrors)
    for file in entry.files:
        assert len(bytes.fromhex(file.sha256)) == hashlib.sha256().digest_size
        assert all(content.size > 0 for content in file.contents)
