"""Pretrained models: brought from a hub of the test's own, found in the home, and what is said without a network."""

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
    """As much of the hub as a download needs: what a model has, and its files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: dict[str, dict[str, bytes]] = {}
        self.cuts: set[str] = set()  # files whose first answer ends in the middle
        self.asked: list[tuple[str, str | None]] = []  # files that were asked for, and from where on


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
            self.server.asked.append((name, self.headers.get("Range")))
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


def put(folder: Path, *names: str) -> Path:
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
    said: list[str] = []
    folder = models.get("lab/tiny", say=said.append)
    assert folder == tmp_path / "home" / "models" / "lab" / "tiny"
    assert visible(folder) == {*SMALL, "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"12345678"
    asked = len(hub.asked)
    models.get("lab/tiny", say=said.append)
    assert (said, len(hub.asked)) == (["lab/tiny is already there"], asked)
    assert models.find("lab/tiny") == str(folder)


def test_a_model_without_safetensors_comes_with_its_other_weights(hub: Hub, tmp_path: Path) -> None:
    hub.models["lab/old"] = {**SMALL, "pytorch_model.bin": b"12345678"}
    assert visible(models.get("lab/old", tmp_path / "to")) == {*SMALL, "pytorch_model.bin"}


def test_a_download_that_was_cut_is_gone_on_with(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 256)  # what it has come to when it counts
    weights = bytes(range(256)) * 8
    hub.models["lab/tiny"] = {**SMALL, "model.safetensors": weights}
    hub.cuts = {"model.safetensors"}
    folder = models.get("lab/tiny", tmp_path / "to")
    assert (folder / "model.safetensors").read_bytes() == weights
    assert [since for name, since in hub.asked if name == "model.safetensors"] == [None, "bytes=1024-"]


def test_what_is_not_on_the_hub_is_said(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"lab/none is not on the hub, or not for everybody; correct the name, or run"
    ):
        models.get("lab/none", tmp_path / "to")
    with pytest.raises(ConfigError, match=r"a/b/c is no model's name; write for instance google-bert/"):
        models.get("a/b/c", tmp_path / "to")
    hub.models["lab/code"] = {"config.json": b"{}"}
    with pytest.raises(DataError, match=r"lab/code has no model\.safetensors, tokenizer\.json on the hub; put such"):
        models.get("lab/code", tmp_path / "to")


def test_without_a_network_the_error_says_which_files_to_put_where(hub: Hub, tmp_path: Path) -> None:
    put(tmp_path / "to", "config.json")
    hub.shutdown()
    hub.server_close()
    with pytest.raises(DataError) as raised:
        models.get("lab/tiny", tmp_path / "to")
    put_what = "put model.safetensors, tokenizer.json into"
    assert str(raised.value) == (
        f"lab/tiny could not be downloaded (Connection refused); {put_what} {tmp_path / 'to'} by hand, "
        "or run this again with a network"
    )


def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        MissingExtra, match=r"paceline model get needs huggingface_hub; run: pip install 'paceline\[hf\]'"
    ):
        models.get("lab/tiny", tmp_path / "to")


def test_files_put_there_by_hand_are_used_by_the_command(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    folder = put(tmp_path / "models" / "lab" / "tiny", "config.json", "model.safetensors", "vocab.txt")
    cli.app(["model", "get", "lab/tiny"], standalone_mode=False)
    assert capsys.readouterr().out == f"lab/tiny is already there\nlab/tiny is complete in {folder}\n"


def test_weights_in_several_files_are_missed_one_by_one(tmp_path: Path) -> None:
    folder = put(tmp_path / "big", "config.json", "spiece.model", "model-1-of-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(SHARDS))
    assert models.missing_in(folder) == ["model-2-of-2.safetensors"]


def test_a_name_means_its_folder_in_the_home_a_path_or_the_hub(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    whole = put(tmp_path / "models" / "whole", "config.json", "model.safetensors", "tokenizer.json")
    put(tmp_path / "models" / "begun", "config.json")
    assert models.find("whole") == str(whole)
    assert models.find(str(whole)) == str(whole)
    assert models.find("begun") == "begun"
    assert models.find("lab/tiny") == "lab/tiny"
