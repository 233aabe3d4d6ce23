"""Advice from the figures of a profile: changes that make a step faster (pure).

Each private function checks one part of a step, and yields a sentence with the figure on which it is based.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.observe.bottleneck import find_bottleneck
from paceline.tools.profile.facts import Profile

# Shares of a step; there is advice if a part takes more.
DATA_SHARE = 0.2
REDUCTION_SHARE = 0.2
LATE_SHARE = 0.1
OPTIMIZER_SHARE = 0.25
OTHER_SHARE = 0.15
IDLE_SHARE = 0.2
MODEL_SHARE = 0.5
LATE_STEPS = 0.8  # the share of steps in which a rank must be the last to count as late
MAX_WORKERS = 8  # per rank: more seldom help, and each needs memory
RARE_LOG_STEPS, RARE_CHECK_STEPS = 10, 100  # intervals with a negligible cost


def advice_on(profile: Profile) -> list[str]:
    """Sentences, the most important first; a single one if there is nothing to improve."""
    if profile.device == "cuda" and not profile.share("compute"):
        return [
            "the profiler recorded no GPU activity, possibly for lack of permission; set KINETO_LOG_LEVEL=1 for details"
        ]
    checks = (_data, _reduction, _idle, _idle_cores, _precision, _optimizer, _other)
    return [sentence for check in checks for sentence in check(profile)] or [_nothing(profile)]


def percent(share: float) -> str:
    """A share as text, such as "72 %"."""
    return f"{100 * share:.0f} %"


def _data(profile: Profile) -> Iterator[str]:
    setting, share = profile.setting, profile.share_of(profile.data_ms)
    if share <= DATA_SHARE:
        return
    begin = f"{percent(share)} of a step is spent waiting for data"
    most = min(MAX_WORKERS, max(1, setting.cores // setting.ranks_here))
    if setting.has_rows:
        yield f"{begin}, although the data is on the device: steps are short; try batch_size={2 * setting.batch_size}"
    elif setting.is_tensors:
        yield f"{begin}, although the data is tensors; allow it more of the device's memory: data_on_device=0.9"
    elif setting.workers < most:
        yield f"{begin} with workers={setting.workers}; try workers={most}"
    elif setting.is_stream:
        yield f"{begin} with workers={setting.workers}, the maximum for these cores; do less work in __iter__"
    else:
        yield (
            f"{begin} with workers={setting.workers}, the maximum for these cores; provide the samples as tensors "
            "(a TensorDataset, or as_tensors()), or fetch whole batches at once (__getitems__)"
        )


def _reduction(profile: Profile) -> Iterator[str]:
    """Advice if reduction takes long because of a late rank, the cores, or the all-reduce itself."""
    setting, share = profile.setting, profile.share("reduction")
    if profile.ranks < 2 or share <= REDUCTION_SHARE:
        return
    begin = f"{percent(share)} of a step is reduction"
    found = find_bottleneck(profile.step_ms, profile.phase_ms, setting.lanes)
    if found is not None and found.rank is not None and found.share > LATE_SHARE:
        if profile.device == "cpu" and profile.last_in[found.rank] < LATE_STEPS:
            yield f"{begin}, because different ranks are late; check for other programs on these cores"
            return
        yield (
            f"rank {found.rank} on {profile.hosts[found.rank]} is late: the others wait {found.behind_ms:.1f} ms per "
            f"step for it ({found.phase}), {percent(found.share)}; check for other programs there, and see its trace"
        )
        return
    if profile.device == "cpu" and setting.ranks_here * setting.threads > setting.cores:
        yield (
            f"{begin}: {setting.ranks_here} ranks × {setting.threads} threads share {setting.cores} cores; "
            f"try {_fewer(setting.cores, setting.ranks_here, setting.threads)}"
        )
        return
    doubled = f"batch_size={2 * setting.batch_size} or lanes={2 * setting.lanes}"
    smaller = f"compression=bf16{' with exact=false' if setting.is_exact else ''} halves the bytes sent"
    yield f"{begin}; {doubled} halves the number of sums" + (f", {smaller}" if setting.compression == "none" else "")


def _fewer(cores: int, ranks: int, threads: int) -> str:
    """The key or option that gives each thread a core."""
    return f"threads={max(1, cores // ranks)}" if threads > 1 else f"--procs {cores}"


def _idle(profile: Profile) -> Iterator[str]:
    """Advice if a GPU waits for something other than data."""
    setting, share = profile.setting, profile.share("idle")
    if share - profile.share_of(profile.data_ms) <= IDLE_SHARE:
        return
    begin = f"the GPU is idle for {percent(share)} of a step"
    if profile.ranks > 1 and setting.backend == "gloo":
        yield f"{begin}: gloo reduces on the CPU; use one process per GPU, so that NCCL reduces on the GPUs"
    elif setting.is_replayed:
        yield f"{begin}, although steps are CUDA graphs: steps are short; try batch_size={2 * setting.batch_size}"
    elif setting.step_mode == "eager":
        yield f"{begin}, because step_mode=eager launches kernels one by one; try step_mode=graph"
    else:
        yield f"{begin}: steps are not CUDA graphs (see the warning for the reason); fix that, or increase batch_size"


def _idle_cores(profile: Profile) -> Iterator[str]:
    setting = profile.setting
    used = setting.ranks_here * (setting.threads + setting.workers)
    if profile.device == "cpu" and 2 * used <= setting.cores and _model_share(profile) > MODEL_SHARE:
        most = max(min(setting.cores // setting.threads, setting.lanes), 1)
        more = f"--procs {most}" if most > profile.ranks else f"threads={setting.cores // setting.ranks_here}"
        yield f"{used} of {setting.cores} cores are used; try {more}"


def _precision(profile: Profile) -> Iterator[str]:
    setting = profile.setting
    if profile.device == "cuda" and setting.precision == "fp32" and setting.has_bf16:
        yield f"the GPU computes for {percent(profile.share('compute'))} of a step in fp32; try precision=bf16"


def _optimizer(profile: Profile) -> Iterator[str]:
    setting, share = profile.setting, profile.share("optimizer")
    if share <= OPTIMIZER_SHARE:
        return
    begin = f"{percent(share)} of a step is the optimizer"
    larger = f"batch_size={2 * setting.batch_size} halves the number of updates"
    is_slow = setting.could_fuse and not setting.is_fused
    yield f"{begin}, which is not fused; set fused=true, or {larger}" if is_slow else f"{begin}; {larger}"


def _other(profile: Profile) -> Iterator[str]:
    setting, share = profile.setting, profile.share("other")
    if share <= OTHER_SHARE:
        return
    begin = f"{percent(share)} of a step is neither data nor model"
    if setting.log_digests:
        yield f"{begin}; try log.digests=false"
    elif setting.log_every_steps is not None and setting.log_every_steps < RARE_LOG_STEPS:
        yield f"{begin}, with log.every_steps={setting.log_every_steps}; remove it"
    elif setting.check_replicas_every < RARE_CHECK_STEPS:
        given, better = (f"check_replicas_every={steps}" for steps in (setting.check_replicas_every, RARE_CHECK_STEPS))
        yield f"{begin}, with {given}; try {better}"
    else:
        yield f"{begin}: steps are short; try batch_size={2 * setting.batch_size}"


def _nothing(profile: Profile) -> str:
    subject = "the GPU computes for" if profile.device == "cuda" else "forward and backward take"
    return f"nothing to improve in the config: {subject} {percent(_model_share(profile))} of a step"


def _model_share(profile: Profile) -> float:
    """The share of a step that is spent in forward and backward."""
    return sum(map(profile.share, ("forward", "backward", "compute")))
