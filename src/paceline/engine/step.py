"""One optimizer step: the gradients of this rank's lanes, the update, and what leaves a bad step out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from paceline.config import Settings
from paceline.data.feed import Feed, LaneInputs
from paceline.data.lanes import Lane, StepInputs
from paceline.data.seeding import seed_generators
from paceline.data.sources import size_of
from paceline.engine.clock import FORWARD, OPTIMIZER, DeviceClock, PhaseClock
from paceline.engine.cuda_graph import StepGraph
from paceline.engine.digest import sha256_of_each, sha256_of_optimizer
from paceline.engine.ema import Ema
from paceline.engine.gradients import Backward
from paceline.engine.losses import number_on
from paceline.engine.nonfinite import Guard, found_bad
from paceline.engine.optimizers import can_skip, lrs_of, set_lr
from paceline.engine.probe import probe_forward, uneven_warning
from paceline.engine.replica import Replica, Single
from paceline.engine.sharding import Sharding
from paceline.errors import ConfigError
from paceline.world import World

Number = torch.Tensor | float
Segment = Callable[[Lane], AbstractContextManager[None]]

NO_NORM = -1.0  # of gradients whose norm was not computed


class StepResult(NamedTuple):
    """The numbers of one step on its device, as one row, so that they travel to the host together.

    The rows of several steps or ranks, stacked in front, have the same names.
    """

    row: torch.Tensor

    @classmethod
    def of(cls, lane_losses: Sequence[torch.Tensor], grad_norm: Number, is_skipped: Number) -> StepResult:
        """The result of the lanes of one rank: for each lane the sum of its loss and the count, one after the other."""
        device = lane_losses[0].device
        return cls(torch.stack([*lane_losses, number_on(grad_norm, device), number_on(is_skipped, device)]))

    @property
    def lane_losses(self) -> torch.Tensor:
        """The loss of each lane of the rank: its sum and its count."""
        return self.row[..., :-2].reshape(*self.row.shape[:-1], -1, 2)

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of the gradients before they were clipped, NO_NORM where nothing is clipped; equal on all ranks."""
        return self.row[..., -2]

    @property
    def is_skipped(self) -> torch.Tensor:
        """1 if the device has skipped the update, else 0; equal on all ranks."""
        return self.row[..., -1]


class Stepper:
    """Takes the lanes of a step through forward, backward, reduction and update; as CUDA graphs where that works."""

    def __init__(
        self,
        replica: Replica | Single,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        feed: Feed,
        *,
        lr_factor: Callable[[int], float],
        lanes_per_rank: int,
        world: World,
        say: Callable[[str], None],
        through_ddp: bool | None = None,
    ) -> None:
        """`say` takes a warning. A single rank has nothing to reduce and does without DDP, unless asked. All ranks."""
        self.replica, self.optimizer, self.settings, self.feed, self.world = replica, optimizer, settings, feed, world
        self.lr_factor, self.lanes_per_rank = lr_factor, lanes_per_rank
        if settings.step_mode == "graph" and world.device.type != "cuda":
            raise ConfigError("step_mode=graph needs a GPU, but the ranks run on the CPU; use step_mode: auto")
        optimizer.zero_grad()  # the first call makes torch load its compiler, which is not part of the first step
        self.base_lrs = lrs_of(optimizer)
        self.lr = self.base_lrs[0]  # of the first group, as of the last step
        self.ema = Ema(replica.module, settings.ema) if settings.ema is not None else None
        self.guard: Guard | None = None
        if settings.nan != "off" or settings.precision == "fp16":
            is_deferred = settings.nan == "skip" and settings.precision != "fp16" and can_skip(optimizer)
            self.guard = Guard(
                replica.forward_state,
                settings,
                world,
                on_bad=say,
                original=feed.original_indices,
                is_deferred=is_deferred,
            )
        self.sharding: Sharding | None = None
        if settings.shard_optimizer and world.size > 1:
            self.sharding = Sharding(optimizer, world, bucket_bytes=settings.bucket_mb * 2**20)
        self.clock = DeviceClock(is_alone=world.size == 1) if world.device.type == "cuda" else PhaseClock()
        self.backward = Backward(
            replica, settings, feed, self.guard, lanes_per_rank=lanes_per_rank, world=world, clock=self.clock,
            through_ddp=world.size > 1 if through_ddp is None else through_ddp,
        )  # fmt: skip
        self.parameters = self.backward.parameters
        self.graph: StepGraph | None = None
        if settings.step_mode != "eager" and isinstance(self.clock, DeviceClock):
            is_in_ddp = self.backward.hook is not None
            full_step = settings.batch_size * lanes_per_rank * world.size
            self.graph = StepGraph(
                self.work, replica.module, settings, world, self.clock,
                full_step=full_step, has_one_form=feed.rows is not None, obstacle=self._obstacle(), is_in_ddp=is_in_ddp,
                say=say,
            )  # fmt: skip
        self.say, self._is_probed = say, False

    def counters(self) -> dict[str, float]:
        """What steps depend on beside weights, optimizer and averages, as plain numbers."""
        return self.guard.counters() if self.guard is not None else {}

    def set_counters(self, counters: Mapping[str, float]) -> None:
        """Go on from what `counters` gave."""
        if self.guard is not None:
            self.guard.set_counters(counters)

    def optimizer_sha256(self) -> str | None:
        """The fingerprint of the optimizer's state, on rank 0. All ranks."""
        if self.sharding is not None:
            return sha256_of_each(self.sharding.brought())
        return sha256_of_optimizer(self.optimizer) if self.world.is_main else None

    def take(self, turn: StepInputs) -> StepResult:
        """One update, unless the step is not finite: then nothing changes. All ranks.

        A step that the host has skipped has counts of 0 in its result.
        """
        factor = self.lr_factor(turn.step)
        set_lr(self.optimizer, [base * factor for base in self.base_lrs])
        self.lr = self.base_lrs[0] * factor
        inputs = [self.feed.inputs(lane, turn.epoch) for lane in turn.lanes]
        if not self._is_probed:
            self._probe(inputs[0])
        self.clock.enter(FORWARD)
        replayed = self.graph.take(turn.lanes, inputs) if self.graph is not None else None
        return StepResult(replayed if replayed is not None else self.work(turn.lanes, inputs, self._eagerly))

    def _probe(self, inputs: LaneInputs) -> None:
        """Find out, before the first step, what a forward pass changes and sends. All ranks."""
        self._is_probed, lanes = True, self.lanes_per_rank * self.world.size
        seed_generators(self.settings.seed, "probe")
        found = probe_forward(self.replica.module, self.settings, self.feed.batch(inputs), lanes, self.world)
        self.replica.adopt(found.moving)
        if found.collective is not None and lanes > 1 and not self.settings.sync_batchnorm:
            warning = uneven_warning(found.collective, size_of(self.feed.dataset), self.settings, lanes)
            if warning is not None:
                self.say(warning)

    def work(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs], segment: Segment) -> torch.Tensor:
        """All that a step does on the device: a segment for each lane, the update in the last one's. All ranks."""
        self.backward.begin(lanes)
        for lane, brought in zip(lanes, inputs, strict=True):
            with segment(lane):
                if self.guard is not None and lane is lanes[0]:
                    self.guard.begin()
                self.backward.ride(lane, brought)
                if lane is lanes[-1]:
                    row = self._update(lanes, inputs)
        return row

    @contextmanager
    def _eagerly(self, lane: Lane) -> Iterator[None]:
        seed_generators(self.settings.seed, "forward", lane.step, lane.lane)
        yield

    def _update(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> torch.Tensor:
        totals = self.backward.finish()
        self.clock.enter(OPTIMIZER)
        is_bad: torch.Tensor | None = None
        # Before clipping, whose norm would spread one NaN over everything.
        if self.guard is not None and self.guard.is_deferred:
            is_bad = found_bad(self.backward.sums())
        elif self.guard is not None and not self.guard.allows(self.backward.sums()):
            self._skip(lanes, inputs, torch.stack(tuple(totals)))
            return StepResult.of([number_on(0, self.world.device)] * len(totals), NO_NORM, 0).row
        norm: torch.Tensor | float = NO_NORM  # without clipping it would cost a pass over the gradients
        if self.settings.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm)
        if is_bad is not None:
            self.optimizer.found_inf = is_bad  # type: ignore[attr-defined]
        (self.sharding or self.optimizer).step()
        if self.ema is not None:
            self.ema.update(is_bad)
        if self.guard is not None and is_bad is not None:
            self.guard.undo_if(is_bad)
        return StepResult.of(totals, norm, is_bad if is_bad is not None else 0).row

    def _skip(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs], totals: torch.Tensor) -> None:
        assert self.guard is not None
        brought = {lane.lane: one for lane, one in zip(lanes, inputs, strict=True)}

        def ride_again(lane: Lane) -> list[torch.Tensor]:
            with self._eagerly(lane):
                return self.backward.alone(lane, brought[lane.lane])

        self.guard.skip(lanes[0].step, lanes, totals.view(-1, 2), ride_again)

    def _obstacle(self) -> str | None:
        """Why a step of this run cannot be a CUDA graph, if that is known beforehand."""
        name = type(self.optimizer).__name__
        if self.sharding is not None:
            return "shard_optimizer=true sends weights between the ranks in each step, which is not recorded"
        if self.world.size > 1 and self.world.backend != "nccl":
            return f"{self.world.backend} adds up the gradients of {self.world.size} ranks on the host"
        if self.world.size > 1 and self.settings.compression == "powersgd":
            return "compression=powersgd counts its steps on the host"
        if any(isinstance(module, torch.jit.ScriptModule) for module in self.replica.module.modules()):
            return "TorchScript does not show what its modules keep on the host"
        if self.settings.precision == "fp16":
            return "precision=fp16 adapts its loss scale on the host"
        if self.settings.nan == "stop":
            return "nan=stop looks at the gradients of each step on the host"
        if self.guard is not None and not self.guard.is_deferred:
            return f"{name}, as it is set, cannot skip a step that is not finite; use fused: true, or nan: off"
        if not all(isinstance(group["lr"], torch.Tensor) for group in self.optimizer.param_groups):
            return f"{name}, as it is set, takes its learning rate from the host; use fused: true"
        return None
