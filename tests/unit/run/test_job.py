from __future__ import annotations

import hashlib
import mmap
import pickle
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from paceline.config import Config
from paceline.errors import PicklingError
from paceline.run import job

MakeConfig = Callable[..., Config]
ROWS = 1_000_000


def a_task(*arguments: object) -> None:
    """Takes the place of a task of the ranks."""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def owner(array: np.ndarray[Any, Any]) -> Any:
    """The object that owns the memory of an array."""
    holder: Any = array
    while isinstance(holder, (np.ndarray, memoryview)):
        holder = holder.base if isinstance(holder, np.ndarray) else holder.obj
    return holder


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return pd.DataFrame({"x": np.arange(ROWS, dtype=np.float64), "y": np.arange(ROWS, dtype=np.float64) * 2})


@pytest.fixture
def saved(make_config: MakeConfig, table: pd.DataFrame, tmp_path: Path) -> Path:
    path = tmp_path / "job.bin"
    job.save(job.pack(make_config(df=table, model_args={"weights": np.arange(1000.0)}), a_task), path)
    return path


def test_lambdas_and_closures_work_after_loading(make_config: MakeConfig, tmp_path: Path) -> None:
    width, made = 3, []

    def build(depth: int) -> int:
        made.append(depth)
        return width * depth

    job.save(
        job.pack(make_config(model_fn=build, model_args={"depth": 5}, dataset_fn=lambda: [width] * 4, seed=9), a_task),
        tmp_path / "job.bin",
    )
    loaded, _ = job.load(tmp_path / "job.bin")
    assert loaded.function("model_fn")(5) == 15
    assert loaded.function("dataset_fn")() == [3, 3, 3, 3]
    assert loaded.seed == 9
    assert made == []  # the loaded function has a copy of the list


def test_classes_defined_in_a_function_are_loaded(make_config: MakeConfig, tmp_path: Path) -> None:
    class Numbers:
        def __len__(self) -> int:
            return 7

    job.save(job.pack(make_config(dataset_fn=Numbers), a_task), tmp_path / "job.bin")
    assert len(job.load(tmp_path / "job.bin")[0].function("dataset_fn")()) == 7


def test_the_whole_config_is_loaded(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(optimizer={"name": "sgd", "lr": 0.5, "momentum": 0.9}, lanes=4, metrics=["mse"])
    job.save(job.pack(config, a_task), tmp_path / "job.bin")
    assert job.load(tmp_path / "job.bin") == (config, a_task)


def test_only_the_owner_may_read_the_job(saved: Path) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600


def test_a_job_never_overwrites_another(saved: Path, make_config: MakeConfig) -> None:
    before = sha256(saved)
    with pytest.raises(FileExistsError):
        job.save(job.pack(make_config(), a_task), saved)
    assert sha256(saved) == before


def test_large_tables_are_stored_outside_of_the_pickle(saved: Path) -> None:
    with saved.open("rb") as file:
        header = pickle.load(file)
        header_bytes = file.tell()
    assert header_bytes < 64_000
    assert sum(header["sizes"]) >= 2 * 8 * ROWS
    assert saved.stat().st_size < header_bytes + sum(header["sizes"]) + 64 * (len(header["sizes"]) + 1)


def test_tables_are_loaded_equal_and_mapped_not_copied(saved: Path, table: pd.DataFrame) -> None:
    loaded, _ = job.load(saved)
    pd.testing.assert_frame_equal(loaded.df, table)
    assert isinstance(owner(loaded.df["x"].to_numpy()), mmap.mmap)
    assert isinstance(owner(loaded.model_args["weights"]), mmap.mmap)


def test_arrays_are_aligned(saved: Path) -> None:
    loaded, _ = job.load(saved)
    for array in (loaded.df["x"].to_numpy(), loaded.model_args["weights"]):
        assert array.__array_interface__["data"][0] % 64 == 0


def test_writing_to_an_array_does_not_change_the_file(saved: Path) -> None:
    before = sha256(saved)
    first, second = job.load(saved)[0], job.load(saved)[0]
    weights = first.model_args["weights"]
    assert weights.flags.writeable
    weights[:] = -1
    first.df.loc[0, "x"] = -1.0
    assert first.df["x"].iloc[0] == -1
    assert second.df["x"].iloc[0] == 0
    assert second.model_args["weights"].tolist() == list(range(1000))
    assert job.load(saved)[0].model_args["weights"][5] == 5
    assert sha256(saved) == before


def test_the_ranks_get_the_import_path_of_the_caller(make_config: MakeConfig, tmp_path: Path) -> None:
    sys.path.insert(0, "/a/folder/of/the/caller")
    job.save(job.pack(make_config(), a_task), tmp_path / "job.bin")
    sys.path.remove("/a/folder/of/the/caller")
    job.load(tmp_path / "job.bin")
    assert sys.path[0] == "/a/folder/of/the/caller"


def test_the_ranks_get_the_options_of_the_script(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "--lr", "0.5"])
    job.save(job.pack(make_config(), a_task), tmp_path / "job.bin")
    monkeypatch.setattr(sys, "argv", ["paceline.worker.main"])
    job.load(tmp_path / "job.bin")
    assert sys.argv == ["script.py", "--lr", "0.5"]


def test_a_value_that_cannot_be_pickled_is_named_by_its_key(make_config: MakeConfig) -> None:
    lock = threading.Lock()
    config = make_config(model_fn=lambda: 3, metrics={"mine": lambda output, target: lock})
    with pytest.raises(PicklingError, match=r"^metrics → key 'mine' → closure 'lock' cannot be pickled for the ranks"):
        job.pack(config, a_task)


def test_model_arguments_that_cannot_be_pickled_are_named(make_config: MakeConfig) -> None:
    with pytest.raises(PicklingError, match=r"^model_args → key 'guard' cannot be pickled for the ranks: it is a lock"):
        job.pack(make_config(model_args={"guard": threading.Lock()}), a_task)


def test_functions_of_a_script_share_a_new_module_that_torch_compile_finds(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    script = {"__name__": "__main__", "factor": 3, "__file__": "script.py"}
    exec(
        "def build(name=None, made=None): return double(factor)\n"
        "def double(x): return 2 * x\n"
        "def name(): return __name__\n"
        "class Made:\n"
        "    def get(self): return factor\n",
        script,
    )
    arguments = {"name": script["name"], "made": script["Made"]()}
    job.save(job.pack(make_config(model_fn=script["build"], model_args=arguments), a_task), tmp_path / "job.bin")
    config, _ = job.load(tmp_path / "job.bin")
    build, made = config.function("model_fn"), config.model_args["made"]
    assert build() == 6
    assert made.get() == 3
    own = sys.modules[build.__globals__["__name__"]]
    assert vars(own) is build.__globals__ is type(made).get.__globals__
    assert config.model_args["name"]() == own.__name__ != "__main__"
    assert own.__file__ == "script.py"
    # Their names in pickles and messages are unchanged.
    assert build.__module__ == type(made).__module__ == "__main__"
    assert not hasattr(sys.modules["__main__"], "factor")
