"""One optimizer step: inputs, lanes, sums over lanes and ranks, the check for finite numbers, the update, the result.

`Stepper.take` is the step as the loop calls it, and `Stepper.work` is its work on the device, which may be recorded as
CUDA graphs: the lanes and the update of each phase (`phase.py`).
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
from paceline.engine.clock import FORWARD, OTHER, DeviceClock, PhaseClock
from paceline.engine.compilation import Compilation
from paceline.engine.cuda_graph import StepGraph
from paceline.engine.digest import sha256_of_each, sha256_of_optimizer
from paceline.engine.ema import Ema
from paceline.engine.joined_optimizers import JoinedOptimizers
from paceline.engine.losses import number_on
from paceline.engine.objective import SAME_NAME, objectives_of
from paceline.engine.phase import NO_NORM, Number, Phase, PhaseResult
from paceline.engine.probe import probe_forward, uneven_warning
from paceline.engine.replica import PlainModel, Replica
from paceline.engine.schedule import LearningRates
from paceline.engine.sharding import Sharding
from paceline.errors import ConfigError
from paceline.world import World

Segment = Callable[[Lane], AbstractContextManager[None]]  # what surrounds the work of one lane

OPTIONS_OBSTACLE = "scheduler_fn sets options of the optimizer besides lr, which a recording would repeat"


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
        world: World,
        warn: Callable[[str], None],
        report: Callable[[str], None] = lambda text: None,
        total_steps: int | None = None,
        through_ddp: bool | None = None,
    ) -> None:
        """A single rank has nothing to reduce and does not use DDP, unless `through_ddp` is true. All ranks.

        `report` writes a line about `step_mode` for the user; `total_steps` is the length of the run, if it is known.
        """
        self.replica, self.optimizer, self.settings, self.feed, self.world = replica, optimizer, settings, feed, world
        self.rates, self.warn = rates or LearningRates(optimizer), warn
        if settings.step_mode == "graph" and world.device.type != "cuda":
            raise ConfigError("step_mode=graph needs a GPU, but the ranks run on the CPU; use step_mode: auto")
        optimizer.zero_grad()  # the first call makes torch load its compiler, which is not part of the first step
        self.lr = self.rates.base_lrs[0]  # of the first group, in the last step
        self.ema = Ema(replica.module, settings.ema) if settings.ema is not None else None
        self.sharding: Sharding | None = None
        if settings.shard_optimizer and world.size > 1:
            self.sharding = Sharding(optimizer, world, bucket_bytes=settings.bucket_mb * 2**20)
        self.clock = DeviceClock(is_alone=world.size == 1) if world.device.type == "cuda" else PhaseClock()
        self.phases = self._make_phases(world.size > 1 if through_ddp is None else through_ddp)
        backwards = [phase.backward for phase in self.phases]
        self.compilation = Compilation(backwards, settings, world, steps=total_steps, report=report)
        self.guard = self.phases[0].guard
        self.parameters = list(dict.fromkeys(p for phase in self.phases for p in phase.backward.parameters))
        self.names: tuple[str, ...] = ()  # of the further values in the last row
        self.graph = self._make_graph()
        self._is_probed = False
        self._frozen_names: frozenset[str] = frozenset()

    def _make_phases(self, through_ddp: bool) -> list[Phase]:
        """The phases of a step, in their order; all ranks."""
        joined, objectives = self.optimizer, objectives_of(self.settings)
        optimizers = joined.by_phase if isinstance(joined, JoinedOptimizers) else dict.fromkeys(objectives, joined)
        return [
            Phase(
                name, objective, optimizers[name], self.replica, self.settings, self.feed, sharding=self.sharding,
                world=self.world, clock=self.clock, warn=self.warn, through_ddp=through_ddp,
            )
            for name, objective in objectives.items()
        ]  # fmt: skip

    def _make_graph(self) -> StepGraph | None:
        """The step as CUDA graphs, on a GPU, unless the config asks for another mode. All ranks."""
        if self.settings.step_mode == "eager" or not isinstance(self.clock, DeviceClock):
            return None
        return StepGraph(
            self.work, self.replica.module, self.settings, self.world, self.clock,
            full_step=self.settings.batch_size * self.settings.lanes,
            has_one_form=self.feed.rows is not None, obstacle=self._graph_obstacle(),
            is_in_ddp=self.phases[0].backward.hook is not None, warn=self.warn,
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
        self.compilation.begin_step(inputs.lanes, of_lanes)
        self.clock.enter(FORWARD)
        row = self.graph.take(inputs.lanes, of_lanes) if self.graph is not None else None
        if row is None:
            row = self.work(inputs.lanes, of_lanes, self._eagerly)
        self.clock.enter(OTHER)
        self.rates.after_update()
        if self.rates.changes_options and self.graph is not None and not self.graph.is_given_up:
            self.graph.give_up(OPTIONS_OBSTACLE)
        return StepResult(row, self.names)

    def freeze(self, names: frozenset[str]) -> None:
        """Leave the parameters with these names unchanged in all steps until the next call. All ranks, with the same.

        They keep their place in DDP and in the optimizer. Backward computes their gradients, and the update ignores
        them.
        """
        if names is not self._frozen_names and names != self._frozen_names:
            for phase in self.phases:
                phase.frozen = [parameter for name, parameter in phase.backward.named if name in names]
            if self.graph is not None:
                self.graph.restart()
        self._frozen_names = names

    def work(self, lanes: Sequence[Lane], inputs: Sequence[LaneInputs], segment: Segment) -> torch.Tensor:
        """The work of a step on the device: a segment for each lane; the last one includes the update. All ranks."""
        due = [phase for phase in self.phases if phase.is_due(lanes[0].step)]
        results: list[PhaseResult] = []
        if not due:
            return self._finish(due, results)
        for phase in due:
            phase.begin(lanes)
            for lane, of_lane in zip(lanes, inputs, strict=True):
                with segment(lane):
                    phase.run_lane(lane, of_lane, is_first=lane is lanes[0])
                    if lane is lanes[-1]:
                        results.append(phase.update(lanes, inputs))
                        if phase is due[-1]:
                            row = self._finish(due, results)
        return row

    @contextmanager
    def _eagerly(self, lane: Lane) -> Iterator[None]:
        seed_generators(self.settings.seed, "forward", lane.step, lane.lane)
        yield

    def _finish(self, due: Sequence[Phase], results: Sequence[PhaseResult]) -> torch.Tensor:
        """Update the averages after the last phase; return the row of the result."""
        if self.ema is not None and any(result.is_updated for result in results):
            self.ema.update(results[0].is_bad)
        self.names = tuple(name for phase in due for name in phase.value_names)
        if len(set(self.names)) < len(self.names):
            repeated = next(name for name in self.names if self.names.count(name) > 1)
            raise ConfigError(f"step_fn {SAME_NAME.format(name=repeated)}")
        return self._row(due, results)

    def _row(self, due: Sequence[Phase], results: Sequence[PhaseResult]) -> torch.Tensor:
        """The row of a step: the loss of the first phase, then the values of each phase that was due."""
        zero, first = number_on(0, self.world.device), self.phases[0]
        is_first_due = bool(due) and due[0] is first
        sums = [*results[0].losses] if is_first_due else [zero] * (2 * first.backward.rank_lanes.most)
        for result in results:
            sums += [*(result.losses if first.name else ()), *result.values]
        norm, is_bad = (results[0].grad_norm, results[0].is_bad) if results else (NO_NORM, None)
        return StepResult.of(sums, norm, is_bad if is_bad is not None else 0).row

    # --- before the first step ---------------------------------------------------------------------------------

    def _probe(self, inputs: LaneInputs) -> None:
        """Find out, before the first step, what a forward pass changes and sends. All ranks."""
        self._is_probed, lanes = True, self.settings.lanes
        seed_generators(self.settings.seed, "probe")
        found = probe_forward(self.replica.module, self.settings, self.feed.batch(inputs), lanes, self.world)
        self.replica.add_moving(found.moving)
        if found.collective is not None:
            self.compilation.refuse()
        if found.collective is not None and lanes > 1 and not self.settings.sync_batchnorm:
            warning = uneven_warning(found.collective, size_of(self.feed.dataset), self.settings, lanes)
            if warning is not None:
                self.warn(warning)

    def _graph_obstacle(self) -> str | None:
        """The reason why a step of this run cannot be a CUDA graph, if it is known beforehand."""
        name = type(self.optimizer).__name__
        if self.phases[0].name:
            return "step_fn has phases, whose gradients are summed after backward"
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
        """The state on which steps depend besides weights, optimizer and averages, for a checkpoint."""
        counters = self.phases[0].counters()
        if self.phases[0].name:
            counters = {"phases": {phase.name: phase.counters() for phase in self.phases}}
        rates = self.rates.state_dict()
        return {**counters, **self.compilation.counters(), **({"rates": rates} if rates else {})}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Set what `counters` returned."""
        self.rates.load_state_dict(counters.get("rates", {}))
        self.compilation.set_counters(counters.get("compiled"))
        of_phases = counters.get("phases", {})
        for phase in self.phases:
            phase.set_counters(of_phases.get(phase.name, {}) if phase.name else counters)

    def optimizer_sha256(self) -> str | None:
        """The fingerprint of the optimizer's state, on rank 0. All ranks."""
        if self.sharding is not None:
            return sha256_of_each(self.sharding.gathered_state())
        return sha256_of_optimizer(self.optimizer) if self.world.is_main else None
