"""Pretrained models by name: `find` returns where to load one from, `paceline model get NAME` downloads its files.

Files are downloaded from the Hugging Face hub by huggingface_hub, which shows progress and resumes partial downloads.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError, DataError, MissingExtra
from paceline.system.home import in_home

SMALL_FILES = ("*.json", "*.txt", "*.model")  # configs, vocabularies, tokenizers
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # the second only if a model does not have the first
INDEX = "model.safetensors.index.json"  # lists the files of weights that are split
PREPROCESSORS = (
    "tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "preprocessor_config.json",
)  # fmt: skip


def folder_of(name: str) -> Path:
    """The default folder of a model's files."""
    return in_home("models", name)


def find(name: str) -> str:
    """Return the argument of `from_pretrained`: the folder in $PACELINE_HOME/models if complete, else the name."""
    folder = folder_of(name)
    return str(folder.resolve()) if folder.is_dir() and not missing_in(folder) else name


def get(name: str, to: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Download a model's files into `to`, by default $PACELINE_HOME/models/NAME; return the folder."""
    folder = to or folder_of(name)
    if not missing_in(folder):
        say(f"{name} already exists")
        return folder
    try:
        _download(name, folder)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the download so far is in {folder}; run the same command to resume it") from None
    if missing := missing_in(folder):
        raise DataError(
            f"{name} has no {', '.join(missing)} on the hub; put these files into {folder.resolve()} by hand"
        )
    return folder


def missing_in(folder: Path) -> list[str]:
    """List the missing files of a model's folder: its config, its weights, and its tokenizer or preprocessor."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += _missing_weights(folder)
    return missing if any((folder / name).is_file() for name in PREPROCESSORS) else [*missing, "tokenizer.json"]


def _missing_weights(folder: Path) -> list[str]:
    """List the missing files of a model's weights."""
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        return [name for name in names if not (folder / name).is_file()]
    return [] if any(next(folder.glob(pattern), None) for pattern in WEIGHTS) else ["model.safetensors"]


def _download(name: str, folder: Path) -> None:
    """Download the needed files of a model's newest revision; turn errors of the hub into ours."""
    try:
        from huggingface_hub import HfApi, errors
    except ImportError:
        raise MissingExtra("huggingface_hub", "hf", "paceline model get") from None
    try:
        info = HfApi().model_info(name)
        files = _needed_files([file.rfilename for file in info.siblings or ()])
        HfApi().snapshot_download(name, revision=info.sha, local_dir=folder, allow_patterns=files)
    except errors.HFValidationError:
        raise ConfigError(f"{name} is not a model name; write, for example, google-bert/bert-base-uncased") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(f"{name} is not on the hub, or is private; correct the name, or run: hf auth login") from None
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("http"):
            raise
        raise DataError(
            f"{name} could not be downloaded ({_reason_of(error)}); put {', '.join(missing_in(folder))} into "
            f"{folder.resolve()} by hand, or retry with a network connection"
        ) from None


def _needed_files(files: list[str]) -> list[str]:
    """Select the files to download. Files in subfolders contain the same weights for other programs."""
    files = [file for file in files if "/" not in file]
    weights = next(filter(None, (fnmatch.filter(files, pattern) for pattern in WEIGHTS)), [])
    return [*weights, *(file for pattern in SMALL_FILES for file in fnmatch.filter(files, pattern))]


def _reason_of(error: BaseException) -> str:
    """Return the root cause of an error in a few words."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0].rstrip(".")
