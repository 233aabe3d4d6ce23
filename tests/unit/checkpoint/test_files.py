"""checkpoint/files.py: the files of a state, which rank writes which, and what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.checkpoint.files import VALUES_FILE, TensorFile, files_of_rank, split_into_files, write_values
from paceline.checkpoint.state import CheckpointState, capture
from support.models import WithExtraState, normed

from .cases import MODELS, ListOptimizer, train, write

pytestmark = pytest.mark.usefixtures("without_fsync")


def state_of(*sizes: int) -> CheckpointState:
    return CheckpointState(
        {"weights": {f"w{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}}, {}
    )


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], [[]]),
        ([10], [["w0"]]),
        ([50, 50], [["w0", "w1"]]),
        ([50, 51], [["w0"], ["w1"]]),
        ([300, 1, 300], [["w0"], ["w1"], ["w2"]]),
        ([40, 40, 40, 0, 100], [["w0", "w1"], ["w2", "w3"], ["w4"]]),
    ],
)
def test_a_group_is_split_where_a_file_would_exceed_the_limit(
    sizes: list[int], parts: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.checkpoint.files.MAX_FILE_BYTES", 100)
    split = split_into_files(state_of(*sizes))
    assert [list(file.tensor_names) for file in split] == parts
    total = len(parts)
    expected = [f"weights-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
    assert [file.name for file in split] == (expected if total > 1 else ["weights.safetensors"])
    assert sum(file.nbytes for file in split) == sum(sizes)


def test_the_files_do_not_depend_on_values_or_on_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.checkpoint.files.MAX_FILE_BYTES", 64)
    model = normed()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    found = []
    for world_size in (1, 2, 5, 40):
        state = capture(model, optimizer, None, {})
        written = write(state, tmp_path / str(world_size), world_size)
        assert len({file.name for file in written}) == len(written)  # no two ranks write the same file
        found.append(sorted(written, key=lambda file: file.name))
    assert found[1:] == found[:1] * 3
    assert sum(path.name.startswith("weights-") for path in (tmp_path / "1").iterdir()) > 1


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 12))
def test_every_file_is_written_by_one_rank_and_the_bytes_are_divided_evenly(sizes: list[int], world_size: int) -> None:
    files = [TensorFile(f"f{n}", "weights", (), size) for n, size in enumerate(sizes)]
    shares = [files_of_rank(rank, world_size, files) for rank in range(world_size)]
    assert sorted(file.name for share in shares for file in share) == sorted(file.name for file in files)
    loads = [sum(file.nbytes for file in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


# --- what is in the files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_reading_a_checkpoint_runs_no_code(model: str, tmp_path: Path) -> None:
    trained = MODELS[model]()
    optimizer = ListOptimizer(trained.parameters())
    train(trained, optimizer)
    write(capture(trained, optimizer, None, {"history": [{"loss": 0.5}], "n": 3}), tmp_path / "c")
    assert sorted({path.suffix for path in (tmp_path / "c").iterdir()}) == [".pt", ".safetensors"]
    torch.load(tmp_path / "c" / VALUES_FILE, weights_only=True)


def test_the_file_of_values_is_small_also_for_a_large_model(tmp_path: Path) -> None:
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    write(capture(model, optimizer, None, {}), tmp_path / "c")
    assert (tmp_path / "c" / VALUES_FILE).stat().st_size < 10_000


class Custom:
    """A class that `torch.load(weights_only=True)` refuses."""


def test_values_that_cannot_be_read_back_raise_when_they_are_written(tmp_path: Path) -> None:
    model = WithExtraState()
    model.extra = {"object": Custom()}
    state = capture(model, torch.optim.SGD(model.parameters()), None, {})
    with pytest.raises(Exception, match="Custom"):
        write_values(tmp_path, state)
