"""Fixtures of all tests. Run folders are in a temporary folder, and warnings are errors in the ranks too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
BIN = Path(sys.executable).parent
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def run_in() -> Run:
    """Runs a command of the installed environment in a folder to its end and returns its output."""

    def run_in(
        folder: Path, *command: str, timeout_s: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        program = BIN / command[0]
        inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        return subprocess.run(
            [str(program) if program.exists() else command[0], *command[1:]], cwd=folder,
            env={**inherited, "PYTHONWARNINGS": "error", **variables}, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    return run_in


@pytest.fixture
def run(run_in: Run, tmp_path: Path) -> Run:
    """Runs a command of the installed environment in the test's folder to its end and returns its output."""
    return partial(run_in, tmp_path)


@pytest.fixture
def tiny_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an encoder in $PACELINE_HOME/models: a few words, random weights."""
    transformers = pytest.importorskip("transformers")
    import tokenizers
    import torch

    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # in ranks
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # here, where that has been read already
    folder = tmp_path / "home" / "models" / "lab" / "tiny"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "very", "a", "[MASK]"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(folder)  # fmt: skip
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=32, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    return "lab/tiny"
