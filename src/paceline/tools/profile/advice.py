"""What to change so that a step takes less time, from what a profile has found (pure).

Each function below looks at one thing, and gives a sentence for what it finds, with the number that it follows from.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.observe.bottleneck import find_bottleneck
from paceline.tools.profile.facts import Profile

MUCH_DATA = 0.2  # shares of a step, from which something is worth a sentence
MUCH_REDUCTION = 0.2
LATE = 0.1
MOSTLY = 0.8  # of the steps, from which a rank is late by itself and not by chance
MUCH_OPTIMIZER = 0.25
MUCH_OTHER = 0.15
MUCH_IDLE = 0.2
MUCH_WORK = 0.5
MOST_WORKERS = 8  # of a rank: more seldom help, and each takes memory
RARE_LOG, RARE_CHECK = 10, 100  # steps


def advice_on(profile: Profile) -> list[str]:
    """Sentences, what matters most first; one that says so where there is nothing to improve."""
    if profile.device == "cuda" and not profile.share("compute"):
        return ["the profiler saw nothing of the GPU, which it may not be allowed to; KINETO_LOG_LEVEL=1 tells why"]
    looks = (_data, _reduction, _idle, _idle_cores, _precision, _optimizer, _other)
    found = [sentence for look in looks for sentence in look(profile)]
    return found or [_nothing(profile)]


def percent(share: float) -> str:
    """Such as "72 %"."""
    return f"{100 * share:.0f} %"


def _data(profile: Profile) -> Iterator[str]:
    setting, share = profile.setting, profile.share_of(profile.data_ms)
    if share <= MUCH_DATA:
        return
    begin = f"{percent(share)} of a step waits for data"
    room = min(MOST_WORKERS, max(1, setting.cores // setting.ranks_here))
    if setting.has_rows:
        yield f"{begin}, although it is tensors on the device: a step is short; try batch_size={2 * setting.batch_size}"
    elif setting.is_tensors:
        yield f"{begin}, although it is tensors; let more of the device's memory take them: data_on_device=0.9"
    elif setting.workers < room:
        yield f"{begin} with workers={setting.workers}; try workers={room}"
    elif setting.is_stream:
        yield f"{begin} with workers={setting.workers}, all that the cores allow; do less for a sample in __iter__"
    else:
        yield (
            f"{begin} with workers={setting.workers}, all that the cores allow; give the samples as tensors "
            "(a TensorDataset, or as_tensors()), or fetch whole batches at once (__getitems__)"
        )


def _reduction(profile: Profile) -> Iterator[str]:
    """What ranks wait for while they add up: one of them, or the sums."""
    setting, share = profile.setting, profile.share("reduction")
    if profile.ranks < 2 or share <= MUCH_REDUCTION:
        return
    begin = f"{percent(share)} of a step is reduction"
    found = find_bottleneck(profile.step_ms, profile.phase_ms)
    if found is not None and found.rank is not None and found.share > LATE:
        if profile.device == "cpu" and profile.last_in[found.rank] < MOSTLY:
            yield f"{begin}, for ranks that are late in turns; see what else runs on these cores"
            return
        yield (
            f"rank {found.rank} on {profile.hosts[found.rank]} is late: the others wait {found.behind_ms:.1f} ms a "
            f"step for it ({found.phase}), {percent(found.share)}; see what else runs there, and its trace"
        )
        return
    if profile.device == "cpu" and setting.ranks_here * setting.threads > setting.cores:
        yield (
            f"{begin}: {setting.ranks_here} ranks × {setting.threads} threads share {setting.cores} cores; "
            f"try {_fewer(setting.cores, setting.ranks_here, setting.threads)}"
        )
        return
    larger = (
        f"twice the samples a step (batch_size={2 * setting.batch_size} or lanes={2 * setting.lanes}) halve the sums"
    )
    smaller = f"compression=bf16{' with exact=false' if setting.is_exact else ''} halves what is sent"
    yield f"{begin}; {larger}" + (f", {smaller}" if setting.compression == "none" else "")


def _fewer(cores: int, ranks: int, threads: int) -> str:
    return f"threads={max(1, cores // ranks)}" if threads > 1 else f"--procs {cores}"


def _idle(profile: Profile) -> Iterator[str]:
    """What a GPU waits for, where it is not the data."""
    setting, share = profile.setting, profile.share("idle")
    if share - profile.share_of(profile.data_ms) <= MUCH_IDLE:
        return
    begin = f"the GPU is idle for {percent(share)} of a step"
    if profile.ranks > 1 and setting.backend == "gloo":
        yield f"{begin}: gloo adds up on the host; use one process for each GPU, whose sums NCCL does there"
    elif setting.is_replayed:
        yield f"{begin}, although steps are CUDA graphs: a step is short; try batch_size={2 * setting.batch_size}"
    elif setting.step_mode == "eager":
        yield f"{begin}, whose kernels are started one by one with step_mode=eager; try step_mode=graph"
    else:
        yield f"{begin}: steps are not CUDA graphs, for the reason in the warning; mend that, or enlarge batch_size"


def _idle_cores(profile: Profile) -> Iterator[str]:
    setting = profile.setting
    used = setting.ranks_here * (setting.threads + setting.workers)
    if profile.device == "cpu" and 2 * used <= setting.cores and _working(profile) > MUCH_WORK:
        most = next(n for n in range(setting.cores // setting.threads, 0, -1) if setting.lanes % n == 0 or n == 1)
        more = f"--procs {most}" if most > profile.ranks else f"threads={setting.cores // setting.ranks_here}"
        yield f"{used} of {setting.cores} cores have work; try {more}"


def _precision(profile: Profile) -> Iterator[str]:
    setting = profile.setting
    if profile.device == "cuda" and setting.precision == "fp32" and setting.has_bf16:
        yield f"the GPU computes for {percent(profile.share('compute'))} of a step in fp32; try precision=bf16"


def _optimizer(profile: Profile) -> Iterator[str]:
    setting, share = profile.setting, profile.share("optimizer")
    if share <= MUCH_OPTIMIZER:
        return
    begin = f"{percent(share)} of a step is the optimizer"
    larger = f"batch_size={2 * setting.batch_size} updates half as often"
    is_slow = setting.could_fuse and not setting.is_fused
    yield f"{begin}, which is not fused; give it fused=true, or {larger}" if is_slow else f"{begin}; {larger}"


def _other(profile: Profile) -> Iterator[str]:
    setting, share = profile.setting, profile.share("other")
    if share <= MUCH_OTHER:
        return
    begin = f"{percent(share)} of a step is neither data nor model"
    if setting.log_digests:
        yield f"{begin}; try log.digests=false"
    elif setting.log_every_steps is not None and setting.log_every_steps < RARE_LOG:
        yield f"{begin}, with log.every_steps={setting.log_every_steps}; leave it out"
    elif setting.check_replicas_every < RARE_CHECK:
        yield (
            f"{begin}, with check_replicas_every={setting.check_replicas_every}; try check_replicas_every={RARE_CHECK}"
        )
    else:
        yield f"{begin}: a step is short; try batch_size={2 * setting.batch_size}"


def _nothing(profile: Profile) -> str:
    who = "the GPU computes for" if profile.device == "cuda" else "forward and backward take"
    return f"nothing to improve by the config: {who} {percent(_working(profile))} of a step"


def _working(profile: Profile) -> float:
    """What part of a step the model itself takes."""
    return sum(map(profile.share, ("forward", "backward", "compute")))
