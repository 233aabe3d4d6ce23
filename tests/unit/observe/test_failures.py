"""failures.py: capturing, finding the first and describing the failures of ranks."""

from __future__ import annotations

import json
import socket
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch.utils.data import DataLoader

from paceline.errors import ConfigError, MissingExtra, RankFailed
from paceline.observe import failures
from paceline.observe.failures import Failure
from paceline.observe.progress import Progress
from paceline.run.layout import RunFolder
from paceline.system.processes import ENDED_EARLY
from support.datasets import MapDataset

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    return folder


def capture(error: BaseException, folder: RunFolder, rank: int = 0) -> Failure:
    return failures.capture(error, rank=rank, progress=Progress("training", epoch=2, step=140), folder=folder)


def caught(call: Any, *arguments: Any) -> BaseException:
    with pytest.raises(BaseException) as info:  # noqa: PT011 - any error is accepted
        call(*arguments)
    return info.value


def write(folder: RunFolder, rank: int, text: str, *, time: float) -> Failure:
    """Write a failure as its rank does, with the given time."""
    written = replace(capture(RuntimeError(text), folder, rank), time=time)
    failures.write(written, folder)
    return written


# --- the first of several failures --------------------------------------------------------------------------


def test_what_a_rank_wrote_is_what_the_launcher_reads(folder: RunFolder) -> None:
    written = write(folder, 1, "loss is nan\nat step 3", time=5)
    assert failures.first(folder, {1: 1}) == written


def test_the_earliest_failure_comes_first_whatever_the_order_of_the_ranks(folder: RunFolder) -> None:
    write(folder, 0, "later", time=20)
    write(folder, 1, "earliest", time=10)
    write(folder, 2, "latest", time=30)
    assert failures.first(folder, {0: 1, 1: 1, 2: 1}).text == "earliest"


def test_an_echo_of_another_ranks_failure_is_never_the_cause(folder: RunFolder) -> None:
    # Clocks differ between machines, so the echo may even carry the earlier time.
    write(folder, 0, GLOO, time=10)
    write(folder, 1, "index 7 is out of bounds", time=11)
    assert failures.first(folder, {0: 1, 1: 1}).rank == 1


def test_a_killed_rank_comes_before_the_echoes_of_others(folder: RunFolder) -> None:
    write(folder, 0, GLOO, time=10)
    found = failures.first(folder, {0: 1, 1: -9})
    assert (found.rank, found.error) == (1, "SIGKILL")


def test_ranks_that_the_launcher_ended_are_never_the_cause(folder: RunFolder) -> None:
    found = failures.first(folder, {0: -15, 1: -15, 2: -11, 3: -15})
    assert (found.rank, found.error) == (2, "SIGSEGV")


def test_a_written_failure_comes_before_ranks_that_the_launcher_ended(folder: RunFolder) -> None:
    write(folder, 2, "index 7 is out of bounds", time=11)
    assert failures.first(folder, {0: -15, 1: -15, 2: 1}).rank == 2


def test_among_echoes_the_earliest_comes_first(folder: RunFolder) -> None:
    write(folder, 0, GLOO, time=12)
    write(folder, 1, GLOO, time=11)
    assert failures.first(folder, {0: 1, 1: 1}).rank == 1


def test_a_rank_that_exited_early_comes_before_the_echoes_of_others(folder: RunFolder) -> None:
    write(folder, 0, GLOO, time=10)
    found = failures.first(folder, {0: 1, 1: ENDED_EARLY})
    assert (found.rank, found.error, found.is_killed) == (1, "Exit", False)
    assert "exit code 0 before the run was over" in found.text


def test_exit_code_0_is_not_a_failure(folder: RunFolder) -> None:
    found = failures.first(folder, {0: 0, 1: 3})
    assert (found.rank, found.error, found.text) == (1, "Exit", "the process ended with exit code 3")


@pytest.mark.parametrize(
    "text",
    [
        GLOO,
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:1: Connection reset by peer",
        "Application timeout caused pair closure",
        "NCCL communicator was aborted on rank 1.",
        "NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited or there was a network error",
        "[c10d] recvValue failed on SocketImpl(fd=3)",
    ],
)
def test_errors_of_gloo_and_nccl_about_another_rank_are_echoes(text: str, folder: RunFolder) -> None:
    assert capture(RuntimeError(text), folder).is_echo


@pytest.mark.parametrize("text", ["CUDA out of memory", "mat1 and mat2 shapes cannot be multiplied", ""])
def test_other_errors_are_not_echoes(text: str, folder: RunFolder) -> None:
    assert not capture(RuntimeError(text), folder).is_echo


@pytest.mark.parametrize(
    "error",
    [ConnectionResetError(104, "Connection reset by peer"), BrokenPipeError(32, "Broken pipe")],
    ids=["reset", "pipe"],
)
def test_a_network_error_in_the_users_code_is_not_an_echo(error: OSError, folder: RunFolder) -> None:
    failures.write(replace(capture(error, folder, rank=1), time=10), folder)
    assert failures.first(folder, {0: -15, 1: 1}).rank == 1


# --- descriptions -------------------------------------------------------------------------------------------


def test_a_kill_is_described_with_its_likely_cause_and_the_last_output(folder: RunFolder) -> None:
    folder.log(1).write_text("epoch 1\nepoch 2: loss 0.5\n\n")
    found = failures.first(folder, {0: -15, 1: -9}).describe()
    assert "SIGKILL: the process was killed" in found
    assert "memory" in found
    assert "last output: epoch 2: loss 0.5" in found
    assert str(folder.log(1)) in found


def test_the_last_output_of_a_long_log_is_found(folder: RunFolder) -> None:
    folder.log(0).write_text("x" * 100_000 + "\nthe end\n")
    assert "last output: the end" in failures.first(folder, {0: -6}).text


def test_a_signal_without_a_name_is_described_by_its_number(folder: RunFolder) -> None:
    assert "signal 40" in failures.first(folder, {0: -40}).text


def test_the_description_has_rank_position_error_line_and_log(folder: RunFolder) -> None:
    error = caught(json.loads, "{")
    lines = capture(error, folder, rank=3).describe().splitlines()
    assert lines[0] == f"rank 3 on {socket.gethostname()} failed (training, epoch 3, step 140)"
    assert lines[1].startswith("  JSONDecodeError: Expecting property name")
    assert lines[2].startswith(f"  at {__file__}:")
    assert lines[3:] == [f"  full log: {folder.log(3)}"]


@pytest.mark.parametrize(
    "text", ["line\n" * 12, "line\n" * 1000, "x" * 100_000, "\n\n\n", "", "a\n\n\nb\n\n\nc\n\n\nd\n\ne\n\n\nf"]
)
def test_the_description_is_short_even_if_the_message_is_long(text: str, folder: RunFolder) -> None:
    found = replace(capture(RuntimeError(text), folder), location="/home/me/train.py:12").describe()
    assert len(found.splitlines()) <= 10
    assert max(map(len, found.splitlines())) < 400
    assert "at /home/me/train.py:12" in found
    assert "full log: " in found


def test_the_location_is_the_users_innermost_line_not_the_librarys(folder: RunFolder) -> None:
    def users_function() -> NoReturn:
        json.loads("{")
        raise AssertionError

    location = capture(caught(users_function), folder).location
    assert location == f"{__file__}:{users_function.__code__.co_firstlineno + 1}"


def test_an_error_outside_the_users_code_has_no_location(folder: RunFolder) -> None:
    assert capture(RuntimeError("raised nowhere"), folder).location is None


def test_a_call_of_sys_exit_is_described(folder: RunFolder) -> None:
    assert capture(SystemExit(3), folder).text == "sys.exit(3) was called during the run"


# --- mistakes in the config ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConfigError(["lanes=6 is odd", "seed=x is no number"]), MissingExtra("a", "b", "c")])
def test_a_config_error_of_a_rank_is_raised_as_a_config_error_with_the_same_problems(
    error: ConfigError, folder: RunFolder
) -> None:
    failures.write(capture(error, folder), folder)
    raised = failures.first(folder, {0: 1}).to_error()
    assert isinstance(raised, ConfigError)
    assert raised.problems == error.problems


def test_any_other_error_of_a_rank_is_raised_with_the_whole_description(folder: RunFolder) -> None:
    class ConfigError(Exception):
        """A class of the user with the same name."""

    captured = capture(ConfigError("odd"), folder)
    raised = captured.to_error()
    assert isinstance(raised, RankFailed)
    assert str(raised) == captured.describe()


# --- errors of DataLoader workers ---------------------------------------------------------------------------


def broken_sample(kind: str, index: int) -> Any:
    """Raise the requested kind of error."""
    if kind == "text":
        raise ValueError("sample 0 is too long\nhint: crop it")
    if kind == "key":
        return {}["label"]
    if kind == "extra":
        raise MissingExtra("pandas", "pandas", "reading sample 0")
    if kind == "silent":
        raise LookupError
    if kind == "chain":
        try:
            return {}["label"]
        except KeyError as error:
            raise ValueError("sample 0 has no label") from error
    return None


def from_worker(kind: str, folder: RunFolder) -> Failure:
    dataset = MapDataset(1, partial(broken_sample, kind))
    batches = iter(DataLoader(dataset, num_workers=1, multiprocessing_context="fork"))
    try:
        next(batches)
    except Exception as error:  # noqa: BLE001 - the error of the data set, as torch raises it again
        captured = capture(error, folder)
        # The frames hold the worker in a cycle; torch waits seconds for one that the garbage collector finds.
        traceback.clear_frames(error.__traceback__)
    return captured


def line_of(text: str) -> str:
    """file:line of a line of `broken_sample`."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{__file__}:{1 + next(n for n, line in enumerate(lines) if line.strip().startswith(text))}"


# Python warns of forks in a process with threads from 3.12 on; DataLoaders fork all the same.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
class TestWorkers:
    def test_the_original_type_text_and_line_are_captured(self, folder: RunFolder) -> None:
        found = from_worker("text", folder)
        assert (found.error, found.text) == ("ValueError", "sample 0 is too long\nhint: crop it")
        assert found.location == line_of('raise ValueError("sample 0 is too long')

    def test_a_missing_key_is_captured(self, folder: RunFolder) -> None:
        found = from_worker("key", folder)
        assert (found.error, found.text) == ("KeyError", "'label'")
        assert found.location == line_of('return {}["label"]')

    def test_a_config_error_of_a_worker_is_a_config_error(self, folder: RunFolder) -> None:
        found = from_worker("extra", folder)
        assert (found.error, found.is_config) == ("MissingExtra", True)
        assert found.text == "reading sample 0 needs pandas; run: pip install 'paceline[pandas]'"

    def test_the_last_of_a_chain_of_errors_is_captured(self, folder: RunFolder) -> None:
        found = from_worker("chain", folder)
        assert (found.error, found.text) == ("ValueError", "sample 0 has no label")
        assert found.location == line_of('raise ValueError("sample 0 has no label")')

    def test_an_error_without_a_message_is_captured_without_torchs_frames(self, folder: RunFolder) -> None:
        found = from_worker("silent", folder)
        assert (found.error, found.text) == ("LookupError", "")
        assert found.location == line_of("raise LookupError")


def test_a_failure_is_read_from_the_spare_folder_if_the_run_folder_cannot_be_written_to(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    spare.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("a file where a folder belongs: nothing can be written below it")
    folder = RunFolder(tmp_path / "run")
    failed = failures.capture(OSError(28, "No space left on device"), rank=0, progress=Progress(), folder=folder)
    failures.write(failed, folder, spare=spare)
    assert failures.first(folder, {0: 1}, spare=spare).text == "[Errno 28] No space left on device"
    with pytest.raises(OSError, match="logs"):
        failures.write(failed, folder)
