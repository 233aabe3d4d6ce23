"""`data get --from`: files from a folder, or from a mirror on this machine, with the checksums of the catalog."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.errors import ConfigError, DataError, PacelineError
from paceline.hub import catalog
from paceline.hub.catalog import KnownDataset, RemoteFile, UnpackedFile
from paceline.hub.download import get


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


ARCHIVE, TRAIN, OTHER, DEV = b"archive", b"10,000 \t1\n", b"10000\t1\n", b"fine \t1\n"
TEXTS = KnownDataset(
    "texts", "sst2",
    (
        RemoteFile(
            "texts.zip", len(ARCHIVE), sha256(ARCHIVE),
            (
                UnpackedFile(
                    "train.tsv", len(TRAIN), sha256(TRAIN), (UnpackedFile("train.tsv", len(OTHER), sha256(OTHER)),)
                ),
                UnpackedFile("dev.tsv", len(DEV), sha256(DEV)),
            ),
        ),
    ),
    ("https://mirror.invalid/",),
)  # fmt: skip


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=["folder", "mirror"])
def source(
    request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """What is given to `--from`: a folder, or the address of a server of its files."""
    monkeypatch.setitem(catalog.ALL, "texts", TEXTS)
    if request.param == "folder":
        yield str(folder)
        return
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "from"
    folder.mkdir()
    return folder


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


PARTS = {"train.tsv": TRAIN, "dev.tsv": DEV}


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        ({"texts.zip": ARCHIVE}, {"texts.zip": ARCHIVE}),
        ({"texts/texts.zip": ARCHIVE, **PARTS}, {"texts.zip": ARCHIVE}),
        (PARTS, PARTS),
        ({"texts/train.tsv.gz": gzip.compress(OTHER, mtime=0), "dev.tsv": DEV}, {"train.tsv": OTHER, "dev.tsv": DEV}),
    ],
)
def test_files_are_taken_as_they_are_distributed_or_unpacked(
    files: dict[str, bytes], taken: dict[str, bytes], source: str, folder: Path, tmp_path: Path
) -> None:
    write(folder, files)
    log: list[str] = []
    get("texts", tmp_path / "to", log=log.append, source=source)
    get("texts", tmp_path / "to", log=log.append, source=source)
    assert log == [f"{', '.join(taken)} copied from {source}, checksum correct", "texts.zip already exists"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()} == taken


@pytest.mark.parametrize(
    ("files", "name", "expected", "found"),
    [
        ({"texts.zip": b"Archive"}, "texts.zip", ARCHIVE, b"Archive"),
        ({**PARTS, "dev.tsv": b"bad\t1\n"}, "dev.tsv", DEV, b"bad\t1\n"),
        ({"train.tsv": TRAIN, "dev.tsv.gz": gzip.compress(b"bad", mtime=0)}, "dev.tsv", DEV, b"bad"),
    ],
)
def test_a_wrong_file_is_named_with_both_hashes(
    files: dict[str, bytes], name: str, expected: bytes, found: bytes, source: str, folder: Path, tmp_path: Path
) -> None:
    write(folder, files)
    with pytest.raises(DataError) as caught:
        get("texts", tmp_path / "to", source=source)
    assert all(text in str(caught.value) for text in (name, sha256(expected), sha256(found)))
    assert not list((tmp_path / "to").glob(f"{name}*"))


def test_a_missing_or_damaged_file_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.ALL, "texts", TEXTS)
    write(folder, {"train.tsv": TRAIN})
    with pytest.raises(DataError) as caught:
        get("texts", tmp_path / "to", source=str(folder))
    assert f"does not contain texts.zip (SHA-256 {sha256(ARCHIVE)}), train.tsv (" in str(caught.value)
    assert f"dev.tsv (SHA-256 {sha256(DEV)}); give another folder" in str(caught.value)
    write(folder, {"dev.tsv.gz": gzip.compress(DEV)[:-9]})
    with pytest.raises(DataError, match=r"dev\.tsv\.gz is damaged: .*; copy the original file there"):
        get("texts", tmp_path / "to", source=str(folder))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("http://example.org/data", "is not an https:// address; only localhost may use http://"),
        ("file:///data", "is not an https:// address"),
        ("nowhere", "is not a folder; give a folder or an https:// address"),
    ],
)
def test_other_sources_are_refused(source: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--from {source} {problem}"):
        get("mnist", tmp_path, source=source)


def test_a_mirror_without_the_file_is_reported(source: str, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"texts\.zip"):
        get("texts", tmp_path / "to", source=source)


def test_names_that_are_also_in_use_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    used = {"covertype": "covtype", "Covertype": "covtype", "SST-2": "sst2", "MNIST": "mnist", "cifar-10": "cifar10"}
    assert {name: catalog.find(name).name for name in used} == used
    assert {name: catalog.folder_of(name).name for name in used} == used
