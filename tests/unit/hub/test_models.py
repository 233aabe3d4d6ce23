"""hub/models.py with a local hub: download, the folder in the home, and errors without a network."""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from paceline import cli, models
from paceline.errors import ConfigError, DataError, MissingExtra

SMALL = {"config.json": b"{}", "tokenizer.json": b"{}", "vocab.txt": b"a\nb\n"}
SHARDS = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
COMMIT = "1" * 40


class Hub(ThreadingHTTPServer):
    """The part of the hub's API that a download needs: a model's list of files, and the files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: dict[str, dict[str, bytes]] = {}
        self.cuts: set[str] = set()  # files whose first response ends in the middle
        self.requested: list[tuple[str, str | None]] = []  # requested files, and the Range of each request


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        for name, files in self.server.models.items():
            if path.startswith(f"/api/models/{name}/tree/"):
                listed = [{"type": "file", "path": each, "size": len(files[each]), "oid": each} for each in files]
                return self.answer(json.dumps(listed).encode())
            if path.startswith(f"/api/models/{name}"):
                listed = [{"rfilename": each} for each in files]
                return self.answer(json.dumps({"id": name, "sha": COMMIT, "siblings": listed}).encode())
            if path.startswith(f"/{name}/resolve/"):
                return self.send_file(path.partition(COMMIT)[2].strip("/"), files)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_file(self, name: str, files: dict[str, bytes]) -> None:
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if self.command == "GET":
            self.server.requested.append((name, self.headers.get("Range")))
        is_cut = self.command == "GET" and name in self.server.cuts
        self.server.cuts -= {name} if is_cut else set()
        self.answer(files[name], start, 206 if start else 200, is_cut)

    def answer(self, content: bytes, start: int = 0, status: int = 200, is_cut: bool = False) -> None:
        self.send_response(status)
        self.send_header("ETag", f'"{len(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[start : len(content) // 2] if is_cut else content[start:])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{hub.server_address[1]}"
        monkeypatch.setattr(huggingface_hub, "HfApi", functools.partial(huggingface_hub.HfApi, endpoint=address))
        yield hub
        hub.shutdown()
        thread.join()


def make_files(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_the_files_that_a_model_needs_are_downloaded_once(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    others = {"model.onnx": b"?", "onnx/config.json": b"?", "pytorch_model.bin": b"?", "README.md": b"?"}
    hub.models["lab/tiny"] = {**SMALL, "model.safetensors": b"12345678", **others}
    lines: list[str] = []
    folder = models.get("lab/tiny", say=lines.append)
    assert folder == tmp_path / "home" / "models" / "lab" / "tiny"
    assert visible(folder) == {*SMALL, "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"12345678"
    count = len(hub.requested)
    models.get("lab/tiny", say=lines.append)
    assert (lines, len(hub.requested)) == (["lab/tiny already exists"], count)
    assert models.find("lab/tiny") == str(folder)


def test_a_model_without_safetensors_is_downloaded_with_its_other_weights(hub: Hub, tmp_path: Path) -> None:
    hub.models["lab/old"] = {**SMALL, "pytorch_model.bin": b"12345678"}
    assert visible(models.get("lab/old", tmp_path / "to")) == {*SMALL, "pytorch_model.bin"}


def test_a_partial_download_is_resumed(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 256)  # resumption starts at a multiple of it
    weights = bytes(range(256)) * 8
    hub.models["lab/tiny"] = {**SMALL, "model.safetensors": weights}
    hub.cuts = {"model.safetensors"}
    folder = models.get("lab/tiny", tmp_path / "to")
    assert (folder / "model.safetensors").read_bytes() == weights
    assert [since for name, since in hub.requested if name == "model.safetensors"] == [None, "bytes=1024-"]


def test_models_and_files_that_are_not_on_the_hub_are_reported(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lab/none is not on the hub, or is private; correct the name, or run"):
        models.get("lab/none", tmp_path / "to")
    with pytest.raises(ConfigError, match=r"a/b/c is not a model name; write, for example, google-bert/"):
        models.get("a/b/c", tmp_path / "to")
    hub.models["lab/code"] = {"config.json": b"{}"}
    with pytest.raises(DataError, match=r"lab/code has no model\.safetensors, tokenizer\.json on the hub; put these"):
        models.get("lab/code", tmp_path / "to")


def test_without_a_network_the_error_names_the_files_and_their_folder(hub: Hub, tmp_path: Path) -> None:
    make_files(tmp_path / "to", "config.json")
    hub.shutdown()
    hub.server_close()
    with pytest.raises(DataError) as raised:
        models.get("lab/tiny", tmp_path / "to")
    advice = "put model.safetensors, tokenizer.json into"
    assert str(raised.value) == (
        f"lab/tiny could not be downloaded (Connection refused); {advice} {tmp_path / 'to'} by hand, "
        "or retry with a network connection"
    )


def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        MissingExtra, match=r"paceline model get needs huggingface_hub; run: pip install 'paceline\[hf\]'"
    ):
        models.get("lab/tiny", tmp_path / "to")


def test_the_command_accepts_files_that_were_copied_by_hand(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    folder = make_files(tmp_path / "models" / "lab" / "tiny", "config.json", "model.safetensors", "vocab.txt")
    cli.app(["model", "get", "lab/tiny"], standalone_mode=False)
    assert capsys.readouterr().out == f"lab/tiny already exists\nlab/tiny is complete in {folder}\n"


def test_missing_files_of_split_weights_are_listed(tmp_path: Path) -> None:
    folder = make_files(tmp_path / "big", "config.json", "spiece.model", "model-1-of-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(SHARDS))
    assert models.missing_in(folder) == ["model-2-of-2.safetensors"]


def test_find_returns_a_complete_folder_or_the_name_itself(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    whole = make_files(tmp_path / "models" / "whole", "config.json", "model.safetensors", "tokenizer.json")
    make_files(tmp_path / "models" / "partial", "config.json")
    assert models.find("whole") == str(whole)
    assert models.find(str(whole)) == str(whole)
    assert models.find("partial") == "partial"
    assert models.find("lab/tiny") == "lab/tiny"
