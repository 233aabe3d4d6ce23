"""Pretrained models by name: `find` says where one is loaded from, `paceline model get NAME` brings its files.

The Hugging Face hub is asked through huggingface_hub, which shows progress and goes on where a download was cut.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError, DataError, MissingExtra
from paceline.system.home import in_home

SMALL_FILES = ("*.json", "*.txt", "*.model")  # configs, vocabularies, tokenizers
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # the second only where a model has no others
INDEX = "model.safetensors.index.json"  # of weights in several files
PREPARING = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "preprocessor_config.json")

Say = Callable[[str], None]


def folder_of(name: str) -> Path:
    """Where a model's files are kept unless another place is named."""
    return in_home("models", name)


def find(name: str) -> str:
    """What `from_pretrained` is to be given: a model's folder in $PACELINE_HOME/models, else the name as it is."""
    folder = folder_of(name)
    return str(folder.resolve()) if folder.is_dir() and not missing_in(folder) else name


def get(name: str, to: Path | None = None, say: Say = print) -> Path:
    """Bring a model's files into `to`, $PACELINE_HOME/models/NAME by default; the folder they are in then."""
    folder = to or folder_of(name)
    if not missing_in(folder):
        say(f"{name} is already there")
        return folder
    try:
        _download(name, folder)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what has come is kept in {folder}, and the same command goes on from there") from None
    if missing := missing_in(folder):
        raise DataError(
            f"{name} has no {', '.join(missing)} on the hub; put such files into {folder.resolve()} by hand"
        )
    return folder


def missing_in(folder: Path) -> list[str]:
    """The files that a folder lacks to be a model: its config, its weights, and what prepares its inputs."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += _missing_weights(folder)
    return missing if any((folder / name).is_file() for name in PREPARING) else [*missing, "tokenizer.json"]


def _missing_weights(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        return [name for name in names if not (folder / name).is_file()]
    return [] if any(next(folder.glob(pattern), None) for pattern in WEIGHTS) else ["model.safetensors"]


def _download(name: str, folder: Path) -> None:
    try:
        from huggingface_hub import HfApi, errors
    except ImportError:
        raise MissingExtra("huggingface_hub", "hf", "paceline model get") from None
    try:
        about = HfApi().model_info(name)
        files = _needed([each.rfilename for each in about.siblings or ()])
        HfApi().snapshot_download(name, revision=about.sha, local_dir=folder, allow_patterns=files)
    except errors.HFValidationError:
        raise ConfigError(f"{name} is no model's name; write for instance google-bert/bert-base-uncased") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{name} is not on the hub, or not for everybody; correct the name, or run: hf auth login"
        ) from None
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("http"):
            raise
        raise DataError(
            f"{name} could not be downloaded ({_words(error)}); put {', '.join(missing_in(folder))} into "
            f"{folder.resolve()} by hand, or run this again with a network"
        ) from None


def _needed(files: list[str]) -> list[str]:
    """Of all files of a model, those to download; folders hold the same weights for other programs."""
    files = [file for file in files if "/" not in file]
    weights = next(filter(None, (fnmatch.filter(files, pattern) for pattern in WEIGHTS)), [])
    return [*weights, *(file for pattern in SMALL_FILES for file in fnmatch.filter(files, pattern))]


def _words(error: BaseException) -> str:
    """What was behind an error, in a few words."""
    while (behind := error.__cause__ or error.__context__) is not None:
        error = behind
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0].rstrip(".")
