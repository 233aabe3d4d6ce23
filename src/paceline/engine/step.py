"""One optimizer step: inputs, lanes, sums over lanes and ranks, the check for finite numbers, the update, the result.

`Stepper.take` is the step as the loop calls it, `Stepper.work` is its work on the device, which may be recorded as CUDA
graphs, and `Stepper._update` follows the last lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from paceline.config import Settings
from paceline.data.feed import Feed, LaneInputs
from paceline.data.lanes import Lane, StepInputs
from paceline.data.seeding import seed_generators
from paceline.data.sources import size_of
from paceline.engine.clock import FORWARD, OPTIMIZER, OTHER, DeviceClock, PhaseClock
from paceline.engine.cuda_graph import StepGraph
from paceline.engine.digest import sha256_of_each, sha256_of_optimizer
from paceline.engine.ema import Ema
from paceline.engine.gradients import Backward
from paceline.engine.losses import number_on
from paceline.engine.nonfinite import Guard, nonfinite_flag
from paceline.engine.optimizers import can_skip
from paceline.engine.probe import probe_forward, uneven_warning
from paceline.engine.replica import PlainModel, Replica
from paceline.engine.schedule import LearningRates
from paceline.engine.sharding import Sharding
from paceline.errors import ConfigError
from paceline.world import World

Number = torch.Tensor | float
Segment = Callable[[Lane], AbstractContextManager[None]]  # what surrounds the work of one lane

OPTIONS_OBSTACLE = "scheduler_fn sets options of the optimizer besides lr, which a recording would repeat"
NO_NORM = -1.0  # stands for the norm of gradients where it was not computed


class StepResult(NamedTuple):
    """The numbers of one step on its device, in one tensor, so that one copy brings them to the host.

    The rows of several steps or ranks can be stacked in front; the properties then have these dimensions, too.
    """

    row: torch.Tensor
    names: tuple[str, ...] = ()  # of the further values of each lane, besides the loss

    @classmethod
    def of(cls, lane_sums: Sequence[torch.Tensor], grad_norm: Number, is_skipped: Number) -> StepResult:
        """The result of the lanes of one rank: the sums and counts of their losses, then those of each further value.

        `lane_sums` has the sum and the count of each lane in turn.
        """
        device = lane_sums[0].device
        return cls(torch.stack([*lane_sums, number_on(grad_norm, device), number_on(is_skipped, device)]))

    @property
    def lane_losses(self) -> torch.Tensor:
        """The loss of each lane of the rank: its sum and its count."""
        return self._lane_sums[..., 0, :, :]

    @property
    def lane_values(self) -> torch.Tensor:
        """For each of `names`, the sum and the count of each lane of the rank."""
        return self._lane_sums[..., 1:, :, :]

    @property
    def _lane_sums(self) -> torch.Tensor:
        return self.row[..., :-2].reshape(*self.row.shape[:-1], 1 + len(self.names), -1, 2)

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of the gradients before clipping, NO_NORM where nothing is clipped; equal on all ranks."""
        return self.row[..., -2]

    @property
    def is_skipped(self) -> torch.Tensor:
        """1 if the device has skipped the update, else 0; equal on all ranks."""
        return self.row[..., -1]


class Stepper:
    """Takes the lanes of a step through forward, backward, reduction and update; as CUDA graphs where possible."""

    def __init__(
        self,
        replica: Replica | PlainModel,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        feed: Feed,
        *,
        rates: LearningRates | None = None,
        lanes_per_rank: int,
        world: World,
        warn: Callable[[str], None],
        through_ddp: bool | None = None,
    ) -> None:
        """A single rank has nothing to reduce and does not use DDP, unless `through_ddp` is true. All ranks."""
        self.replica, self.optimizer, self.settings, self.feed, self.world = replica, optimizer, settings, feed, world
        self.rates, self.lanes_per_rank, self.warn = rates or LearningRates(optimizer), lanes_per_rank, warn
        if settings.step_mode == "graph" and world.device.type != "cuda":
            raise ConfigError("step_mode=graph needs a GPU, but the ranks run on the CPU; use step_mode: auto")
        optimizer.zero_grad()  # the first call makes torch load its compiler, which is not part of the first step
        self.lr = self.rates.base_lrs[0]  # of the first group, in the last step
        self.ema = Ema(replica.module, settings.ema) if settings.ema is not None else None
        self.guard = self._make_guard()
        self.sharding: Sharding | None = None
        if settings.shard_optimizer and world.size > 1:
            self.sharding = Sharding(optimizer, world, bucket_bytes=settings.bucket_mb * 2**20)
        self.clock = DeviceClock(is_alone=world.size == 1) if world.device.type == "cuda" else PhaseClock()
        self.backward = Backward(
            replica, settings, feed, self.guard, lanes_per_rank=lanes_per_rank, world=world, clock=self.clock,
            through_ddp=world.size > 1 if through_ddp is None else through_ddp,
        )  # fmt: skip
        self.parameters = self.backward.parameters
        self.graph = self._make_graph()
        self._is_probed = False
        self._frozen: list[torch.nn.Parameter] = []
        self._frozen_names: frozenset[str] = frozenset()

    def _make_guard(self) -> Guard | None:
        """The check for numbers that are not finite, unless it is off and not needed for fp16."""
        settings = self.settings
        if settings.nan == "off" and settings.precision != "fp16":
            return None
        return Guard(
            self.replica.forward_state,
            settings,
            self.world,
            on_bad=self.warn,
            original=self.feed.original_indices,
            is_deferred=settings.nan == "skip" and settings.precision != "fp16" and can_skip(self.optimizer),
        )

    def _make_graph(self) -> StepGraph | None:
        """The step as CUDA graphs, on a GPU, unless the config asks for another mode. All ranks."""
        if self.settings.step_mode == "eager" or not isinstance(self.clock, DeviceClock):
            return None
        return StepGraph(
            self.work, self.replica.module, self.settings, self.world, self.clock,
            full_step=self.settings.batch_size * self.lanes_per_rank * self.world.size,
            has_one_form=self.feed.rows is not None, obstacle=self._graph_obstacle(),
            is_in_ddp=self.backward.hook is not None, warn=self.warn,
        )  # fmt: skip

    # --- the step ----------------------------------------------------------------------------------------------

    def take(self, inputs: StepInputs) -> StepResult:
        """One update. A step whose numbers are not finite changes nothing. All ranks.

        The counts in the result are 0 if the host has skipped the step.
        """
        self.lr = self.rates.apply(inputs.step)
        of_lanes = [self.feed.inputs(lane, inputs.epoch) for lane in inputs.lanes]
        if not self._is_probed:
            self._probe(of_lanes[0])
        self.clock.enter(FORWARD)
        row = self.graph.take(inputs.lanes, of_lanes) if self.graph is not None else None
        if row is None:
            row = self.work(inputs.lanes, of_lanes, self._eagerly)
        self.clock.enter(OTHER)
        self.rates.after_update()
        if self.rates.changes_options and self.graph is not None and not self.graph.is_given_up:
            self.graph.give_up(OPTIONS_OBSTACLE)
        return StepResult(row, self.backward.values.names or ())

    def freeze(self, names: frozenset[str]) -> None:
        """Leave the parameters with these names unchanged in all steps until the next call. All ranks, with the same.

        They keep their place in DDP and in the optimizer. Backward computes their gradients, and the update ignores
        them.
        """
        if names is not self._frozen_names and names != self._frozen_names:
            self._frozen = [parameter for name, parameter in self.backward.named if name in names]
            if self.graph is not None:
                self.graph.restart()
        self._frozen_names = names

    def work(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs], segment: Segment) -> torch.Tensor:
        """The work of a step on the device: a segment for each lane; the last one includes the update. All ranks."""
        self.backward.begin(lanes)
        for lane, of_lane in zip(lanes, inputs, strict=True):
            with segment(lane):
                if self.guard is not None and lane is lanes[0]:
                    self.guard.begin()
                self.backward.run_lane(lane, of_lane)
                if lane is lanes[-1]:
                    row = self._update(lanes, inputs)
        return row

    @contextmanager
    def _eagerly(self, lane: Lane) -> Iterator[None]:
        seed_generators(self.settings.seed, "forward", lane.step, lane.lane)
        yield

    def _update(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs]) -> torch.Tensor:
        """Complete the sums, check them and update the weights; return the row of the result. All ranks."""
        losses, values = self.backward.finish(), self.backward.values.finish()
        self.clock.enter(OPTIMIZER)
        is_bad: torch.Tensor | None = None
        # Before clipping, whose norm would spread one NaN over all gradients.
        if self.guard is not None and self.guard.is_deferred:
            is_bad = nonfinite_flag(self.backward.sums())
        elif self.guard is not None and not self.guard.allows(self.backward.sums()):
            self._skip(self.guard, lanes, inputs, torch.stack(tuple(losses)))
            return StepResult.of([number_on(0, self.world.device)] * (len(losses) + len(values)), NO_NORM, 0).row
        for parameter in self._frozen:
            parameter.grad = None
        norm: Number = NO_NORM  # without clipping it would cost a pass over the gradients
        if self.settings.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm)
        if is_bad is not None:
            self.optimizer.found_inf = is_bad  # type: ignore[attr-defined]
        (self.sharding or self.optimizer).step()
        if self.ema is not None:
            self.ema.update(is_bad)
        if self.guard is not None and is_bad is not None:
            self.guard.undo_if(is_bad)
        return StepResult.of([*losses, *values], norm, is_bad if is_bad is not None else 0).row

    def _skip(self, guard: Guard, lanes: Sequence[Lane], inputs: Sequence[LaneInputs], losses: torch.Tensor) -> None:
        """Undo the step and find the lanes whose numbers are not finite. All ranks."""
        inputs_of = {lane.lane: of_lane for lane, of_lane in zip(lanes, inputs, strict=True)}

        def rerun(lane: Lane) -> list[torch.Tensor]:
            with self._eagerly(lane):
                return self.backward.lane_gradients(lane, inputs_of[lane.lane])

        guard.skip(lanes[0].step, lanes, losses.view(-1, 2), rerun)

    # --- before the first step ---------------------------------------------------------------------------------

    def _probe(self, inputs: LaneInputs) -> None:
        """Find out, before the first step, what a forward pass changes and sends. All ranks."""
        self._is_probed, lanes = True, self.lanes_per_rank * self.world.size
        seed_generators(self.settings.seed, "probe")
        found = probe_forward(self.replica.module, self.settings, self.feed.batch(inputs), lanes, self.world)
        self.replica.add_moving(found.moving)
        if found.collective is not None and lanes > 1 and not self.settings.sync_batchnorm:
            warning = uneven_warning(found.collective, size_of(self.feed.dataset), self.settings, lanes)
            if warning is not None:
                self.warn(warning)

    def _graph_obstacle(self) -> str | None:
        """Why a step of this run cannot be a CUDA graph, if that is known beforehand."""
        name = type(self.optimizer).__name__
        if self.sharding is not None:
            return "shard_optimizer=true sends weights between the ranks in each step, which is not recorded"
        if self.world.size > 1 and self.world.backend != "nccl":
            return f"{self.world.backend} sums the gradients of {self.world.size} ranks on the host"
        if self.world.size > 1 and self.settings.compression == "powersgd":
            return "compression=powersgd counts its steps on the host"
        if any(isinstance(module, torch.jit.ScriptModule) for module in self.replica.module.modules()):
            return "TorchScript does not show what its modules keep on the host"
        if self.settings.precision == "fp16":
            return "precision=fp16 adapts its loss scale on the host"
        if self.rates.changes_options:
            return OPTIONS_OBSTACLE
        if self.settings.nan == "stop":
            return "nan=stop checks the gradients of each step on the host"
        if self.guard is not None and not self.guard.is_deferred:
            return f"{name}, as it is set, cannot skip a step that is not finite; use fused: true, or nan: off"
        if not all(isinstance(group["lr"], torch.Tensor) for group in self.optimizer.param_groups):
            return f"{name}, as it is set, takes its learning rate from the host; use fused: true"
        return None

    # --- state -------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """What steps depend on, besides weights, optimizer and averages, for a checkpoint."""
        counters: dict[str, Any] = {**self.guard.counters()} if self.guard is not None else {}
        rates = self.rates.state_dict()
        return {**counters, "rates": rates} if rates else counters

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Set what `counters` returned."""
        self.rates.load_state_dict(counters.get("rates", {}))
        if self.guard is not None:
            self.guard.set_counters(counters)

    def optimizer_sha256(self) -> str | None:
        """The fingerprint of the optimizer's state, on rank 0. All ranks."""
        if self.sharding is not None:
            return sha256_of_each(self.sharding.gathered_state())
        return sha256_of_optimizer(self.optimizer) if self.world.is_main else None
