"""`paceline profile`: reading traces, the figures of a step, and the advice that follows from them."""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.callbacks import Run
from paceline.cli.profile import show
from paceline.config import Config
from paceline.engine.clock import BACKWARD, DATA, FORWARD, OTHER, PHASES, REDUCTION, PhaseClock
from paceline.errors import ConfigError
from paceline.observe.events import Events
from paceline.run.layout import RunFolder
from paceline.tools.profile import trace
from paceline.tools.profile.advice import advice_on
from paceline.tools.profile.facts import Operator, Profile, StepSettings
from paceline.tools.profile.profile import profile, shortened
from paceline.tools.profile.task import RankProfile, StepProfiler, last_in, operators_in, put_together
from paceline.tools.profile.trace import OperatorCost, PhaseStart, Span

SETTING = StepSettings(
    workers=0, batch_size=32, lanes=2, threads=2, cores=8, ranks_here=2, backend="gloo", precision="fp32",
    has_bf16=False, step_mode="auto", is_replayed=False, has_rows=False, is_tensors=False, is_stream=False,
    is_exact=True, compression="none", is_fused=True, could_fuse=True, log_every_steps=10, check_replicas_every=100,
    log_digests=False,
)  # fmt: skip


def found(
    device: str = "cpu",
    data_ms: float = 0.0,
    setting: dict[str, Any] | None = None,
    last_in: list[float] | None = None,
    **phases: Any,
) -> Profile:
    """A profile of steps of 100 ms; phases are numbers, or lists of one for each rank; the first phase is the rest."""
    ranks = max([len(ms) for ms in phases.values() if isinstance(ms, list)], default=1)
    phase_ms = {name: ms if isinstance(ms, list) else [float(ms)] * ranks for name, ms in phases.items()}
    rest = [100.0 - sum(ms[rank] for ms in phase_ms.values()) for rank in range(ranks)]
    first = "compute" if device == "cuda" else "forward"
    waits = phase_ms.get("data", [data_ms] * ranks)
    changed = replace(SETTING, ranks_here=ranks, **(setting or {}))
    if "threads" not in (setting or {}):
        changed = replace(changed, threads=changed.cores // ranks)
    return Profile(
        "runs/x", device, 10, [f"node{rank}" for rank in range(ranks)], [100.0] * ranks, {first: rest, **phase_ms},
        waits, last_in or [], [], [], changed,
    )  # fmt: skip


def on_gpu(**setting: Any) -> dict[str, Any]:
    return {"backend": "nccl", "precision": "bf16", "has_bf16": True, "is_replayed": True, **setting}


CASES = {
    "no workers": (
        found(data=72.0, setting={"cores": 4}),
        ["72 % of a step is spent waiting for data with workers=0; try workers=4"],
    ),
    "cores are shared by ranks": (
        found(data=[40.0] * 4),
        ["40 % of a step is spent waiting for data with workers=0; try workers=2"],
    ),
    "few workers": (
        found(data=30.0, setting={"workers": 2}),
        ["30 % of a step is spent waiting for data with workers=2; try workers=8"],
    ),
    "all cores are workers": (
        found(data=30.0, setting={"workers": 8}),
        [
            "30 % of a step is spent waiting for data with workers=8, the maximum for these cores; provide the samples "
            "as tensors (a TensorDataset, or as_tensors()), or fetch whole batches at once (__getitems__)"
        ],
    ),
    "a stream": (
        found(data=30.0, setting={"workers": 8, "is_stream": True}),
        [
            "30 % of a step is spent waiting for data with workers=8, the maximum for these cores; "
            "do less work in __iter__"
        ],
    ),
    "tensors that are not on the device": (
        found(data=30.0, setting={"is_tensors": True}),
        [
            "30 % of a step is spent waiting for data, although the data is tensors; allow it more of the "
            "device's memory: data_on_device=0.9"
        ],
    ),
    "tensors on the device": (
        found(data=30.0, setting={"is_tensors": True, "has_rows": True}),
        [
            "30 % of a step is spent waiting for data, although the data is on the device: steps are short; "
            "try batch_size=64"
        ],
    ),
    "a rank is late": (
        found(reduction=[50.0, 0.0], backward=[10.0, 60.0], last_in=[0.1, 0.9]),
        [
            "rank 1 on node1 is late: the others wait 50.0 ms per step for it (backward), 50 %; check for other "
            "programs there, and see its trace"
        ],
    ),
    "different ranks are late": (
        found(reduction=[50.0, 0.0], backward=[10.0, 60.0], last_in=[0.4, 0.6]),
        ["25 % of a step is reduction, because different ranks are late; check for other programs on these cores"],
    ),
    "a GPU is late": (
        found("cuda", reduction=[50.0, 0.0], idle=[0.0, 50.0], setting=on_gpu()),
        [
            "rank 1 on node1 is late: the others wait 50.0 ms per step for it (idle), 50 %; check for other "
            "programs there, and see its trace",
            "the GPU is idle for 25 % of a step, although steps are CUDA graphs: steps are short; try batch_size=64",
        ],
    ),
    "the sums take long": (
        found(reduction=[30.0, 31.0]),
        [
            "30 % of a step is reduction; batch_size=64 or lanes=4 halves the number of sums, "
            "compression=bf16 with exact=false halves the bytes sent"
        ],
    ),
    "the sums are compressed": (
        found(reduction=[30.0, 30.0], setting={"compression": "bf16", "is_exact": False}),
        ["30 % of a step is reduction; batch_size=64 or lanes=4 halves the number of sums"],
    ),
    "too many threads": (
        found(reduction=[30.0, 30.0], setting={"threads": 8}),
        ["30 % of a step is reduction: 2 ranks × 8 threads share 8 cores; try threads=4"],
    ),
    "too many ranks": (
        found(reduction=[30.0] * 4, setting={"threads": 1, "cores": 2}),
        ["30 % of a step is reduction: 4 ranks × 1 threads share 2 cores; try --procs 2"],
    ),
    "cores without work": (
        found(setting={"threads": 1, "lanes": 8}),
        ["1 of 8 cores are used; try --procs 8"],
    ),
    "threads without work": (
        found(setting={"threads": 1, "lanes": 1}),
        ["1 of 8 cores are used; try threads=8"],
    ),
    "the optimizer": (
        found(optimizer=26.0),
        ["26 % of a step is the optimizer; batch_size=64 halves the number of updates"],
    ),
    "the optimizer is not fused": (
        found(optimizer=26.0, setting={"is_fused": False}),
        [
            "26 % of a step is the optimizer, which is not fused; set fused=true, or batch_size=64 halves "
            "the number of updates"
        ],
    ),
    "logging": (
        found(other=20.0, setting={"log_every_steps": 1}),
        ["20 % of a step is neither data nor model, with log.every_steps=1; remove it"],
    ),
    "digests": (
        found(other=20.0, setting={"log_digests": True}),
        ["20 % of a step is neither data nor model; try log.digests=false"],
    ),
    "checks": (
        found(other=20.0, setting={"check_replicas_every": 1}),
        ["20 % of a step is neither data nor model, with check_replicas_every=1; try check_replicas_every=100"],
    ),
    "short steps": (
        found(other=20.0),
        ["20 % of a step is neither data nor model: steps are short; try batch_size=64"],
    ),
    "a GPU without graphs": (
        found("cuda", idle=50.0, setting=on_gpu(is_replayed=False, step_mode="eager")),
        [
            "the GPU is idle for 50 % of a step, because step_mode=eager launches kernels one by one; "
            "try step_mode=graph"
        ],
    ),
    "a GPU whose steps cannot be graphs": (
        found("cuda", idle=50.0, setting=on_gpu(is_replayed=False)),
        [
            "the GPU is idle for 50 % of a step: steps are not CUDA graphs (see the warning for the reason); "
            "fix that, or increase batch_size"
        ],
    ),
    "a GPU with graphs": (
        found("cuda", idle=50.0, setting=on_gpu()),
        [
            "the GPU is idle for 50 % of a step, although steps are CUDA graphs: steps are short; "
            "try batch_size=64"
        ],
    ),
    "a GPU that waits for data": (
        found("cuda", data_ms=70.0, idle=75.0, setting=on_gpu()),
        ["70 % of a step is spent waiting for data with workers=0; try workers=8"],
    ),
    "ranks that share a GPU": (
        found("cuda", idle=[50.0, 50.0], setting=on_gpu(backend="gloo")),
        [
            "the GPU is idle for 50 % of a step: gloo reduces on the CPU; use one process per GPU, so that "
            "NCCL reduces on the GPUs"
        ],
    ),
    "fp32 on a GPU": (
        found("cuda", idle=10.0, setting=on_gpu(precision="fp32")),
        ["the GPU computes for 90 % of a step in fp32; try precision=bf16"],
    ),
    "a GPU that was not recorded": (
        found("cuda", idle=100.0, setting=on_gpu()),
        ["the profiler recorded no GPU activity, possibly for lack of permission; set KINETO_LOG_LEVEL=1 for details"],
    ),
    "two things": (
        found(data=40.0, optimizer=30.0, setting={"cores": 2}),
        [
            "40 % of a step is spent waiting for data with workers=0; try workers=2",
            "30 % of a step is the optimizer; batch_size=64 halves the number of updates",
        ],
    ),
    "nothing": (
        found(data=2.0, backward=60.0, optimizer=7.0),
        ["nothing to improve in the config: forward and backward take 91 % of a step"],
    ),
    "nothing on a GPU": (
        found("cuda", idle=5.0, setting=on_gpu()),
        ["nothing to improve in the config: the GPU computes for 95 % of a step"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_advice_follows_from_the_numbers(case: str) -> None:
    given, expected = CASES[case]
    assert advice_on(given) == expected


def test_advice_names_keys_that_exist() -> None:
    named = {key for _, sentences in CASES.values() for text in sentences for key in re.findall(r"([a-z_.]+)=", text)}
    assert {"workers", "log.every_steps"} <= named
    for key in named - {"fused"}:
        first, _, rest = key.partition(".")
        section = Config.model_fields[first].annotation
        assert not rest or rest in section.model_fields  # type: ignore[union-attr]


# --- phases and kernels ----------------------------------------------------------------------------------------------


def test_the_time_between_two_moments_is_divided_among_the_phases() -> None:
    marks = [PhaseStart(OTHER, 0), PhaseStart(DATA, 10), PhaseStart(FORWARD, 30), PhaseStart(DATA, 60)]
    spent = dict(zip(PHASES, trace.spent_ns(marks, 20, 65), strict=True))
    assert {name: ns for name, ns in spent.items() if ns} == {"data": 15, "forward": 30}


def span(category: str, name: str, begin: float, end: float, track: int = 1) -> Span:
    return Span(category, name, (1, track), begin, end)


def test_work_that_overlaps_with_computing_counts_only_where_it_does_not() -> None:
    spans = [
        span("kernel", "gemm", 0, 10), span("kernel", "gemm", 5, 20, track=2),
        span("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 15, 40),
        span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 18, 44), span("gpu_memset", "Memset (Device)", 44, 45),
        span("kernel", "relu", 100, 110), span("cpu_op", "aten::mm", 0, 500),
    ]  # fmt: skip
    assert trace.busy_us(spans) == {"compute": 30, "reduction": 20, "copies": 5}
    assert trace.costs_of(spans, "cuda")["gemm"] == OperatorCost(25, 2)
    assert trace.costs_of(spans, "cuda")[spans[2].name] == OperatorCost(25, 1)  # in full, also where it overlaps
    assert "aten::mm" not in trace.costs_of(spans, "cuda")


def test_named_ranges_are_not_counted_as_work() -> None:
    categories = ["kernel", "gpu_user_annotation", "user_annotation", "cuda_runtime", "gpu_memcpy", "cpu_op"]
    place = {"ph": "X", "name": "x", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0}
    events = [{"ph": "M", "name": "x", "pid": 0}, *({**place, "cat": category} for category in categories)]
    spans = trace.spans_in(json.dumps({"traceEvents": events}))
    assert [item.category for item in spans] == ["kernel", "gpu_memcpy", "cpu_op"]
    assert {(item.begin, item.end) for item in spans} == {(1.0, 3.0)}


def test_an_operator_costs_its_time_without_those_that_it_calls() -> None:
    spans = [
        span("cpu_op", "inner", 20, 30), span("cpu_op", "outer", 0, 100), span("cpu_op", "inner", 20, 60),
        span("cpu_op", "outer", 100, 150), span("cpu_op", "aside", 10, 50, track=2),
    ]  # fmt: skip
    assert trace.costs_of(spans, "cpu") == {
        "outer": OperatorCost(110, 2),
        "inner": OperatorCost(40, 1),
        "aside": OperatorCost(40, 1),
    }


def test_the_phases_in_a_trace_contain_the_operators_that_ran_in_them(tmp_path: Path) -> None:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
    profiler.start()
    marks = [PhaseStart(FORWARD, time.time_ns())]
    loss = torch.ones(3, requires_grad=True).exp().sum()
    marks.append(PhaseStart(BACKWARD, time.time_ns()))
    with torch.profiler.record_function("a named range"):
        loss.backward()  # type: ignore[no-untyped-call]
    marks.append(PhaseStart(OTHER, time.time_ns()))
    profiler.stop()
    path = tmp_path / "profile" / "rank-0.json.gz"
    spans = trace.write(profiler, marks, path, os.getpid())

    assert [file.name for file in path.parent.iterdir()] == [path.name]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    phases = {event["name"]: event for event in events if event.get("cat") == "phase"}
    assert list(phases) == ["forward", "backward"]
    operators = {event["name"]: event for event in events if event["ph"] == "X"}
    for name, phase in (("aten::exp", "forward"), ("ExpBackward0", "backward")):
        assert phases[phase]["ts"] <= operators[name]["ts"] <= phases[phase]["ts"] + phases[phase]["dur"]
    costs = trace.costs_of(spans, "cpu")
    assert costs["aten::exp"].calls == 1
    assert costs["aten::exp"].us > 0
    assert "a named range" not in costs  # it is not an operator


def test_the_phases_of_the_timed_steps_add_up_and_waiting_for_sums_is_not_a_rank_s_own_time() -> None:
    clock = PhaseClock()
    watch = StepProfiler(clock, torch.device("cpu"), 1, 2, Events(None))
    run = Run(rank=0, world_size=1, device=torch.device("cpu"), folder=Path(), model=torch.nn.Identity(), total_steps=6)
    while not run.asked_to_stop:
        for phase in (DATA, FORWARD, REDUCTION, OTHER):
            clock.enter(phase)
            time.sleep(0.001)
        run.step_number += 1
        watch.on_step(run, {})
    assert run.step_number == 5  # one to warm up, two that are timed, two that are traced
    account = watch.rank_profile([])
    assert sum(account.host_ms) == pytest.approx(account.step_ms)
    assert len(account.own_ms) == 2
    assert sum(account.own_ms) / 2 == pytest.approx(account.step_ms - account.host_ms[REDUCTION])
    assert [mark.phase for mark in watch.traced_marks] == [OTHER, *2 * [DATA, FORWARD, REDUCTION, OTHER], OTHER]


# --- one profile of all ranks ----------------------------------------------------------------------------------------


def account(step_ms: float, busy_ms: dict[str, float] | None = None, **costs: float) -> RankProfile:
    return RankProfile(
        "here", step_ms, [1.0, 2.0, 3.0, 0.0, 0.0, 0.0], busy_ms or {},
        {name: OperatorCost(us, 20) for name, us in costs.items()},
        traced_ms=2 * step_ms, own_ms=[step_ms],
    )  # fmt: skip


def test_operators_are_means_over_ranks_and_steps_and_the_costliest_are_first() -> None:
    accounts = [account(4.0, mm=20_000.0, add=10_000.0), account(4.0, mm=20_000.0, relu=2_000.0)]
    rows = operators_in(accounts, steps=10, device="cpu")
    assert [(row.name, row.ms, row.calls, row.share) for row in rows] == [
        ("mm", 2.0, 2.0, 0.25), ("add", 0.5, 1.0, 0.0625), ("relu", 0.1, 1.0, 0.0125),
    ]  # fmt: skip


def test_the_last_rank_of_each_step_is_counted() -> None:
    assert last_in([[1.0, 5.0, 2.0, 2.0], [3.0, 1.0, 4.0, 4.0]]) == [0.25, 0.75]


def test_the_rest_of_a_step_of_a_gpu_is_idle() -> None:
    accounts = [account(10.0, {"compute": 6.0, "reduction": 1.0, "copies": 0.5})] * 2
    made = put_together(accounts, SETTING, "cuda", 10, RunFolder(Path("runs/x")))
    assert made.phase_ms == {"compute": [6.0] * 2, "reduction": [1.0] * 2, "copies": [0.5] * 2, "idle": [2.5] * 2}
    assert made.data_ms == [1.0, 1.0]
    assert [Path(path).name for path in made.traces] == ["rank-0.json.gz", "rank-1.json.gz"]


# --- the short run ---------------------------------------------------------------------------------------------------


def test_the_short_run_has_no_checkpoints_or_trackers_and_does_not_resume(
    make_config: Callable[..., Config],
) -> None:
    given = make_config(
        resume="auto", time_limit=60, log={"trackers": "wandb", "every_steps": 3}, checkpoint={"every_steps": 1},
        batch_size=7, max_restarts=2, num_epochs=2,
    )  # fmt: skip
    short = shortened(given, 25)
    assert (short.max_steps, short.batch_size, short.log.every_steps) == (25, 7, 3)
    assert short.num_epochs >= 25  # however few samples there are
    assert (short.checkpoint.every_steps, short.checkpoint.every_minutes, short.checkpoint.best) == (None, None, None)
    assert (short.log.trackers, short.log.tensorboard) == ([], False)
    assert (short.resume, short.max_restarts, short.time_limit) == ("never", 0, None)
    assert given.resume == "auto"
    assert shortened(make_config(), 25).log.every_steps == 100  # as often as later in a run


def test_a_loop_of_the_users_own_is_refused(make_config: Callable[..., Config]) -> None:
    config = make_config(train_fn=print, loss_fn=None)
    with pytest.raises(ConfigError, match=r"^train_fn=\S+ is your own loop, whose steps cannot be profiled; profile"):
        profile(config, 10, Path())


def test_the_tables_show_phases_operators_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    row = Operator("[b]" + "a" * 80, 2.0, 4.5, 0.02)
    shown = replace(found(reduction=[30.0, 10.0]), operators=[row], traces=["/lab/profile/rank-0.json.gz"])
    show(shown, ["try another model"])
    out = capsys.readouterr().out
    assert out.startswith("2 ranks on cpu, steps: 10, 100.00 ms each\n")
    lines = [line.split() for line in out.splitlines()]
    assert ["reduction", "20.00", "10.00", "30.00", "20.0%"] in lines
    assert ["[b]" + "a" * 56 + "…", "2.000", "4.5", "2.0%"] in lines
    assert ["→", "try", "another", "model"] in lines
    assert lines[-1][-1] == "/lab/profile/rank-*.json.gz"
