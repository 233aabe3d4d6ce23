"""hub/download.py with a local server that sends a file correctly, partly, with errors, or not at all."""

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
from paceline.hub.catalog import KnownDataset, RemoteFile, UnpackedFile
from paceline.hub.download import fetch, get

CONTENT = bytes(range(256)) * 4000
PACKED = gzip.compress(CONTENT, 0, mtime=0)
FILE = RemoteFile("things.gz", len(PACKED), hashlib.sha256(PACKED).hexdigest(), (UnpackedFile("things", len(CONTENT)),))
HALF = len(PACKED) // 2


class Server(ThreadingHTTPServer):
    """Serves the file; the first part of the path selects the fault."""

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
        requested = self.headers.get("Range")
        self.server.requests.append((kind, requested))
        if kind == "absent":
            return self.send_error(404)
        data = PACKED
        if kind == "wrong":
            data = PACKED[:-1] + b"?"
        elif kind == "longer":
            data = PACKED + b"?"
        start = int(requested.removeprefix("bytes=").removesuffix("-")) if requested and kind != "rangeless" else 0
        if start >= (10 if kind == "short" and start else len(data)):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        # Cut: the first response ends after one half, although its header promises all.
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
def make_dataset(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that adds a data set `things` of one file, with mirrors of the given kinds."""

    def make(*kinds: str) -> None:
        mirrors = tuple(map(server.url, kinds))
        monkeypatch.setitem(catalog.ALL, "things", KnownDataset("things", "idx", (FILE,), mirrors))

    return make


def download(tmp_path: Path) -> list[str]:
    """Download the data set, check that the folder has only its file, and return the log lines."""
    lines: list[str] = []
    assert get("things", tmp_path / "to", log=lines.append) == tmp_path / "to"
    assert (tmp_path / "to" / "things.gz").read_bytes() == PACKED
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["things.gz"]
    return lines


def put_part(tmp_path: Path, data: bytes) -> Path:
    part = tmp_path / "to" / "things.gz.part"
    part.parent.mkdir()
    part.write_bytes(data)
    return part


def test_a_file_is_downloaded_once(server: Server, make_dataset, tmp_path: Path) -> None:
    make_dataset("good")
    assert download(tmp_path) == ["things.gz downloaded, checksum correct"]
    assert download(tmp_path) == ["things.gz already exists"]
    assert server.requests == [("good", None)]


def test_the_default_folder_is_in_the_home(make_dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dataset("good")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    assert get("things", log=lambda text: None) == tmp_path / "home" / "datasets" / "things"
    monkeypatch.delenv("PACELINE_HOME")
    assert catalog.folder_of("things") == Path("shared_data/datasets/things")


def test_unpacked_and_differently_compressed_files_are_used(server: Server, make_dataset, tmp_path: Path) -> None:
    make_dataset("good")
    (tmp_path / "things").write_bytes(CONTENT)
    get("things", tmp_path)
    (tmp_path / "things").rename(tmp_path / "aside")
    (tmp_path / "things.gz").write_bytes(gzip.compress(CONTENT, 9))
    get("things", tmp_path)
    assert server.requests == []


@pytest.mark.parametrize(
    "data",
    [PACKED[:-1], gzip.compress(CONTENT + b"?", mtime=0), PACKED[:HALF] + PACKED[HALF + 1 :] + b"?"],
    ids=[
        "cut",
        "longer",
        "changed",
    ],  # gzip data contains the time, so pytest's names would change
)
def test_a_wrong_file_is_replaced(make_dataset, tmp_path: Path, data: bytes) -> None:
    make_dataset("good")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "things.gz").write_bytes(data)
    assert download(tmp_path) == ["things.gz downloaded, checksum correct"]


def test_a_partial_file_is_resumed(server: Server, make_dataset, tmp_path: Path) -> None:
    make_dataset("good")
    put_part(tmp_path, PACKED[:1000])
    download(tmp_path)
    assert server.requests == [("good", "bytes=1000-")]


def test_a_download_is_resumed_after_the_connection_was_closed(server: Server, make_dataset, tmp_path: Path) -> None:
    make_dataset("cut")
    download(tmp_path)
    assert server.requests == [("cut", None), ("cut", f"bytes={HALF}-")]


def test_a_server_without_ranges_sends_the_whole_file(server: Server, make_dataset, tmp_path: Path) -> None:
    make_dataset("rangeless")
    put_part(tmp_path, PACKED[:1000])
    download(tmp_path)
    assert len(server.requests) == 1


@pytest.mark.parametrize(("kind", "size"), [("good", 1000), ("good", len(PACKED)), ("short", 1000)])
def test_a_wrong_partial_file_is_downloaded_again(make_dataset, tmp_path: Path, kind: str, size: int) -> None:
    make_dataset(kind)
    put_part(tmp_path, b"?" * size)
    download(tmp_path)


@pytest.mark.parametrize("first", ["absent", "wrong", "longer"])
def test_the_next_mirror_is_used_after_a_failure(server: Server, make_dataset, tmp_path: Path, first: str) -> None:
    make_dataset(first, "good")
    download(tmp_path)
    assert server.requests == [(first, None), ("good", None)]


def test_the_next_mirror_resumes_the_partial_file(server: Server, tmp_path: Path) -> None:
    put_part(tmp_path, PACKED[:HALF])
    urls = [server.url("absent") + FILE.name, server.url("good") + FILE.name]
    fetch(urls, FILE, tmp_path / "to" / FILE.name)
    assert server.requests == [("absent", f"bytes={HALF}-"), ("good", f"bytes={HALF}-")]


def test_a_wrong_checksum_at_every_mirror_leaves_no_file(make_dataset, tmp_path: Path) -> None:
    make_dataset("wrong")
    with pytest.raises(DataError, match=f"it has the SHA-256 [0-9a-f]{{64}}, not {FILE.sha256}"):
        get("things", tmp_path / "to")
    assert list((tmp_path / "to").iterdir()) == []


def test_without_a_network_the_error_names_the_files_and_their_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as closed:  # bound, but not listening
        closed.bind(("127.0.0.1", 0))
        mirror = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        files = tuple(RemoteFile(name, 1, "", (UnpackedFile(name, 1),)) for name in ("a", "b", "c"))
        monkeypatch.setitem(catalog.ALL, "things", KnownDataset("things", "idx", files, (mirror,)))
        (tmp_path / "a").write_bytes(b"1")
        with pytest.raises(DataError) as raised:
            get("things", tmp_path)
    assert str(raised.value).startswith("b could not be downloaded (127.0.0.1:")
    assert f"Connection refused); put b, c into {tmp_path} by hand" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_two_processes_do_not_write_one_partial_file(make_dataset, tmp_path: Path) -> None:
    make_dataset("good")
    part = put_part(tmp_path, b"")
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=f"{part} is being downloaded by another process"):
            get("things", tmp_path / "to")
    download(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_named(make_dataset, tmp_path: Path) -> None:
    make_dataset("good")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=f"{tmp_path}/file/to cannot be written to: Not a directory; use --to DIR"):
        get("things", tmp_path / "file" / "to")


@pytest.mark.parametrize("name", sorted(catalog.ALL))
def test_the_catalog_is_consistent(name: str) -> None:
    entry = catalog.ALL[name]
    assert all(mirror.startswith("https://") and mirror.endswith("/") for mirror in entry.mirrors)
    for file in entry.files:
        assert len(bytes.fromhex(file.sha256)) == hashlib.sha256().digest_size
        assert all(content.size > 0 for content in file.contents)
