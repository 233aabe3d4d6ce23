"""hangs.py: reading stacks, the table of positions, and the sentence that names the rank that the others wait for."""

from __future__ import annotations

import faulthandler
import site
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.observe import failures
from paceline.observe.failures import Failure
from paceline.observe.hangs import (
    DDP,
    EXCHANGE,
    REDUCTION,
    WORKERS,
    RankPosition,
    StackFrame,
    cause_sentence,
    explain,
    hang_report,
    location_in,
    read_position,
    stacks_in,
    write_hang,
)
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder

TORCH = str(Path(torch.__file__).parent)
PACELINE = str(Path(failures.__file__).parent)
TRAIN = StackFrame("/home/me/train.py", 20, "train")
ALL_REDUCE = StackFrame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce")
BY_USER = ALL_REDUCE._replace(file=f"{site.getusersitepackages()}/torch/distributed/distributed_c10d.py")  # pip --user
WRAPPER = StackFrame(f"{TORCH}/distributed/c10d_logger.py", 80, "wrapper")
ENGINE = StackFrame(f"{TORCH}/autograd/graph.py", 800, "_engine_run_backward")
GLOO_ABORTS = "  what():  [enforce fail] 8 vs 4. Is there a distributed collective mismatch in your code?\n"
GLOO_ECHO = "gloo/transport/tcp/pair.cc: Connection closed by peer"
DUMP = """Fatal Python error: Aborted

Thread 0x01 (most recent call first):
  File "/home/me/other.py", line 5 in beside

Thread 0x02 (most recent call first):
  File "{engine}", line 800 in _engine_run_backward
  File "/home/me/train.py", line 12 in train

Extension modules: numpy (total: 1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    return folder


def position(rank: int, location: str | None = None, waits_in: str | None = None, **fields: Any) -> RankPosition:
    known: dict[str, Any] = {"phase": "training", "place": "training, step 7", "step": 7, **fields}
    return RankPosition(rank, "here", 100 + rank, 5, location=location, waits_in=waits_in, **known)


def echo(rank: int, folder: RunFolder) -> None:
    failures.write(Failure(rank, "here", "training", "RuntimeError", GLOO_ECHO, None, "", 1.0, is_echo=True), folder)


# --- reading stacks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "location", "waits_in"),
    [
        ([TRAIN], "/home/me/train.py:20", None),
        ([ALL_REDUCE, WRAPPER, TRAIN], "/home/me/train.py:20", "all_reduce"),
        ([BY_USER, TRAIN], "/home/me/train.py:20", "all_reduce"),
        ([ENGINE, TRAIN], "/home/me/train.py:20", REDUCTION),
        (
            [TRAIN, ENGINE, StackFrame("/home/me/main.py", 1, "f")],
            "/home/me/train.py:20",
            None,
        ),  # an autograd function
        ([ENGINE, StackFrame(f"{PACELINE}/step.py", 9, "_run_lane")], None, REDUCTION),
        ([ALL_REDUCE, StackFrame(f"{PACELINE}/reduce.py", 9, "sum_after_backward")], None, REDUCTION),
        ([StackFrame(f"{TORCH}/distributed/utils.py", 9, "_sync_module_states")], None, DDP),
        ([StackFrame(f"{PACELINE}/world.py", 9, "end")], None, EXCHANGE),
        ([StackFrame(f"{TORCH}/utils/data/dataloader.py", 9, "_try_get_data"), TRAIN], "/home/me/train.py:20", WORKERS),
        ([StackFrame(f"{TORCH}/nn/modules/conv.py", 9, "forward")], None, None),
        ([], None, None),
    ],
)
def test_a_stack_gives_the_users_line_and_what_is_waited_for(
    stack: list[StackFrame], location: str | None, waits_in: str | None
) -> None:
    assert location_in(stack) == (location, waits_in)


def test_the_function_names_that_are_recognized_in_stacks_exist_in_torch() -> None:
    from torch.autograd import graph
    from torch.distributed import distributed_c10d, utils
    from torch.nn.parallel.distributed import DistributedDataParallel
    from torch.utils.data import dataloader

    from paceline.engine.reduce import sum_after_backward

    for function, waits_in in [
        (distributed_c10d.all_reduce.__wrapped__, "all_reduce"),
        (graph._engine_run_backward, REDUCTION),
        (sum_after_backward, REDUCTION),
        (utils._sync_module_states, DDP),
        (DistributedDataParallel._pre_forward, DDP),
        (dataloader._MultiProcessingDataLoaderIter._try_get_data, WORKERS),
    ]:
        code = function.__code__
        assert location_in([StackFrame(code.co_filename, 1, code.co_name)])[1] == waits_in


def test_the_last_stack_of_a_faulthandler_dump_is_the_main_threads(tmp_path: Path) -> None:
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        innermost = stacks_in(file.read())[-1][0]
    assert (innermost.file, innermost.function) == (__file__, sys._getframe().f_code.co_name)


# --- the sentence -------------------------------------------------------------------------------------------


def test_one_rank_in_the_users_code_is_named_and_the_others_wait_for_it() -> None:
    positions = [position(rank, waits_in=REDUCTION) for rank in range(4)]
    positions[1] = position(1, "/home/me/dataset_fn.py:41")
    assert cause_sentence(positions, 600) == (
        "rank 1 is in `dataset_fn.py:41`; ranks 0, 2, 3 wait for it in the gradient reduction of step 7"
    )


def test_several_ranks_in_the_users_code_are_named_together() -> None:
    positions = [position(0, "/a/x.py:1"), position(1, "/a/x.py:1"), position(2, "/a/t.py:9", "barrier")]
    assert cause_sentence(positions, 600) == "ranks 0, 1 are in `x.py:1`; rank 2 waits for them in barrier at t.py:9"


def test_ranks_that_wait_in_different_places_do_not_match() -> None:
    positions = [position(0, "/a/train.py:20", "all_reduce"), position(1, "/a/train.py:12", REDUCTION, batch=3)]
    assert cause_sentence(positions, 600) == (
        "the ranks wait for each other in different places: rank 0 in all_reduce at train.py:20, "
        "rank 1 in the gradient reduction of batch 3 at train.py:12; their collectives do not match"
    )


def test_same_wait_at_different_steps_does_not_match_either() -> None:
    assert "do not match" in cause_sentence(
        [position(0, waits_in=REDUCTION), position(1, waits_in=REDUCTION, step=8)], 600
    )


def test_ranks_that_all_wait_in_same_wait_point_to_the_network() -> None:
    found = cause_sentence([position(0, waits_in=REDUCTION), position(1, waits_in=REDUCTION)], 600)
    assert found.startswith("all ranks wait in the gradient reduction of step 7; check the network")


def test_a_single_rank_is_reported_with_the_time_it_has_not_moved() -> None:
    cause = cause_sentence([position(0, "/a/x.py:12")], 600)
    assert cause == "rank 0 is in `x.py:12` and has made no progress for 600 s"


def test_others_wait_for_a_rank_that_never_started() -> None:
    found = cause_sentence([position(0, waits_in="init_process_group"), RankPosition(1)], 600)
    assert found == "rank 1 is not started yet; rank 0 waits for it in init_process_group (training, step 7)"


def test_others_wait_for_a_silent_rank_even_if_it_was_last_seen_waiting() -> None:
    found = cause_sentence([position(0, waits_in=REDUCTION), position(1, "/a/x.py:3", REDUCTION, is_silent=True)], 600)
    assert found.startswith("rank 1 is stuck in `x.py:3` (its interpreter does not respond); rank 0 waits for it")


def test_waiting_for_data_loader_workers_is_not_waiting_for_a_rank() -> None:
    found = cause_sentence([position(0, "/a/ds.py:3", WORKERS), position(1, waits_in=REDUCTION)], 600)
    assert found.startswith("rank 0 is waiting for DataLoader workers, in `ds.py:3`; rank 1 waits for it")


def test_the_table_has_a_row_per_rank_with_host_step_phase_and_line() -> None:
    lines = hang_report(
        [position(0, waits_in=REDUCTION), position(1, "/a/x.py:1"), RankPosition(2)], "head", "cause", Path("/r/logs")
    )
    rows = [line.split() for line in lines.splitlines()]
    assert rows[1][:4] == ["rank", "host", "step", "phase"]
    assert rows[2] == ["0", "here", "7", "training", "–", "waits", "in", "the", "gradient", "reduction"]
    assert rows[3] == ["1", "here", "7", "training", "/a/x.py:1"]
    assert rows[4] == ["2", "?", "–", "not", "started", "yet", "–"]
    assert lines.splitlines()[-1] == "  all stacks: /r/logs/rank-*.log"


# --- the launcher's side ------------------------------------------------------------------------------------


def explained(folder: RunFolder, codes: dict[int, int]) -> Failure:
    return explain(failures.first(folder, codes), folder, len(codes))


def test_a_hang_is_written_as_a_failure_with_its_sentence_and_its_table(folder: RunFolder) -> None:
    report = write_hang([position(0, waits_in=REDUCTION), position(1, "/a/x.py:1")], 0, 600, folder)
    found = explained(folder, {0: 1, 1: 0})
    assert (found.error, found.place, found.is_killed) == (failures.HANG, "training, step 7", False)
    assert found.text == "rank 1 is in `x.py:1`; rank 0 waits for it in the gradient reduction of step 7"
    assert str(found.to_error()) == report == folder.hang.read_text().rstrip()
    assert report.startswith("no rank has made progress for 600 s (hang_timeout_s=600; 0 waits forever)\n  rank  host")
    assert found.text in report


def test_a_hang_in_collectives_that_do_not_match_is_written_as_a_mismatch(folder: RunFolder) -> None:
    write_hang([position(0, "/a/x.py:1", "barrier"), position(1, waits_in=REDUCTION)], 0, 600, folder)
    assert explained(folder, {0: 1, 1: 0}).error == failures.MISMATCH
    for same_wait in ("/a/x.py:1", "barrier"), (None, REDUCTION):
        write_hang([position(0, *same_wait), position(1, *same_wait)], 0, 600, folder)
        assert explained(folder, {0: 1, 1: 0}).error == failures.HANG
    write_hang([position(0, waits_in=EXCHANGE), position(1, waits_in=REDUCTION)], 0, 600, folder)
    assert explained(folder, {0: 1, 1: 0}).error == failures.HANG


def test_an_ordinary_failure_is_not_a_hang(folder: RunFolder) -> None:
    failures.write(Failure(1, "here", "training", "ValueError", "broken", None, "", 1.0), folder)
    folder.log(0).write_text(GLOO_ABORTS)
    assert explained(folder, {0: -6, 1: 1}).error == "ValueError"


def test_a_killed_rank_and_the_echo_of_another_rank_are_not_a_hang(folder: RunFolder) -> None:
    echo(0, folder)
    assert explained(folder, {0: 1, 1: -9}).error == "SIGKILL"


def test_a_rank_that_gloo_aborted_is_reported_as_a_mismatch_with_the_line_of_its_dump(folder: RunFolder) -> None:
    write_json(folder.place(0), asdict(position(0, "/a/train.py:20", "all_reduce")))
    write_json(folder.place(1), asdict(position(1, "/a/train.py:1")))
    folder.log(1).write_text(GLOO_ABORTS + DUMP.format(engine=ENGINE.file))
    echo(0, folder)
    found = explained(folder, {0: 1, 1: -6}).describe()
    assert "rank 0 in all_reduce at train.py:20, rank 1 in the gradient reduction at train.py:12" in found
    assert "their collectives do not match" in found


def test_what_gloo_printed_in_an_earlier_attempt_is_not_reported_again(folder: RunFolder) -> None:
    folder.log(1).write_text(GLOO_ABORTS)
    write_json(folder.place(1), asdict(replace(position(1), log_start=len(GLOO_ABORTS))))
    assert explained(folder, {0: 0, 1: -6}).error == "SIGABRT"


def test_echoes_of_all_ranks_without_a_cause_are_reported_as_a_mismatch(folder: RunFolder) -> None:
    for rank, waits_in in ((0, "all_reduce"), (1, "barrier")):
        write_json(folder.place(rank), asdict(position(rank, f"/a/train.py:{rank}", waits_in)))
        echo(rank, folder)
    assert "do not match" in explained(folder, {0: 1, 1: 1}).describe()


@pytest.mark.parametrize("content", ["", "{", '{"rank": 0, "odd": 1}'], ids=["empty", "incomplete", "unknown field"])
def test_a_position_that_cannot_be_read_is_that_of_a_rank_that_has_not_started(content: str, folder: RunFolder) -> None:
    folder.place(0).write_text(content)
    assert not read_position(folder, 0).pid
