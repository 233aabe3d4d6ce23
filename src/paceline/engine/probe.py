"""One forward pass on copies of the model and the loss, before the first step, to find out what they change and send.

Each lane starts with its own copy of the tensors that a forward pass changes. Which frozen parameters it moves can only
be found by running it; a collective in it, and a loss with state that cannot be copied, are refused here.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config import Settings
from paceline.engine.diagnosis import explained
from paceline.engine.forward_state import ParameterKey
from paceline.engine.loss_checks import LossChecks
from paceline.engine.objective import objectives_of
from paceline.engine.precision import autocast
from paceline.engine.step_probe import StepProbe
from paceline.errors import ConfigError
from paceline.user_code import user_location
from paceline.world import World

COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")  # namespaces of operators


class Findings(NamedTuple):
    """The parameters that a forward pass changes, and the collective that it calls."""

    moving: frozenset[ParameterKey] = frozenset()  # frozen parameters that it changes
    collective: str | None = None  # the first one that it calls, with the place in the user's code
    problem: str | None = None  # why no step can be taken, or why the loss or the step cannot have lanes


class CollectiveFound(Exception):
    """The forward pass calls a collective that is not allowed."""


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the first collective that is called inside, and raises CollectiveFound unless it is allowed."""

    supports_higher_order_operators = True

    def __init__(self, *, is_allowed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_allowed = is_allowed
        self.first: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operator."""
        if getattr(func, "namespace", None) in COLLECTIVES:
            self.first = self.first or func.__name__.partition(".")[0].strip("_")
            if not self.is_allowed:
                raise CollectiveFound
        return func(*args, **(kwargs or {}))


def probe_forward(model: torch.nn.Module, settings: Settings, batch: Any, lanes: int, world: World) -> Findings:
    """The findings of all ranks; raises ConfigError for a model or loss that cannot have lanes. All ranks."""
    is_allowed = _allows_collectives(settings, lanes, world)
    copies = copy_or_none((model, settings.loss_fn, settings.step_fn, batch))
    mine = Findings()
    if all(world.gather_objects(copies is not None)):
        mine = _probe(copies, settings, is_allowed, world.device)
    found = _combine(world.gather_objects(mine))
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # of the copies
    if found.problem is not None:
        raise ConfigError(found.problem)
    if found.collective is not None and not is_allowed:
        raise ConfigError(_refusal(found.collective, settings, lanes, world))
    return found


def copy_or_none(value: Any) -> Any:
    """A deep copy, or None if the value cannot be copied or there is no memory for it."""
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - a model may have any attributes
        return None


def uneven_warning(collective: str, samples: int | None, settings: Settings, lanes: int) -> str | None:
    """A warning of collectives that may fail in a step that is not full, if the run has one (pure)."""
    if samples is not None and samples % (settings.batch_size * lanes) == 0:
        return None
    return (
        f"the model or loss_fn calls {collective}: in the last step of an epoch the ranks have batches of different "
        "sizes, where a collective fails or hangs if its tensors depend on the batch size; use a number of samples "
        f"that {settings.batch_size * lanes} divides, or your own train_fn"
    )


def _allows_collectives(settings: Settings, lanes: int, world: World) -> bool:
    """Whether all ranks call a collective of the forward pass together, and the user has not asked for exact bits."""
    return lanes == 1 or (not settings.exact and lanes == world.size)


def _refusal(collective: str, settings: Settings, lanes: int, world: World) -> str:
    if settings.exact:
        return (
            f"exact=true but the model or loss_fn calls {collective}, whose result depends on the number of ranks; set "
            "exact: false and leave lanes out, or use your own train_fn"
        )
    return (
        f"lanes={lanes} but the model or loss_fn calls {collective}, which needs one lane for each of {world.size} "
        "ranks; leave lanes out, use as many processes, or your own train_fn"
    )


def _probe(copies: tuple[Any, ...], settings: Settings, is_allowed: bool, device: torch.device) -> Findings:
    """The findings of this rank. An error of which nothing is known is left to the first step, unless other ranks may
    wait in a collective.
    """
    model, loss_fn, step_fn, batch = copies
    _perturb(model)
    copied = settings.model_copy(update={"loss_fn": loss_fn, "step_fn": step_fn})
    probe = StepProbe(model, copied)
    problem, place = None, None
    with Collectives(is_allowed=is_allowed) as collectives, torch.compiler.set_stance("force_eager"), LossChecks():
        try:
            with autocast(settings.precision, device):
                problem = _problem_found_by(probe, copied, batch, collectives)
        except CollectiveFound as error:
            place = user_location(error)
        except ConfigError as error:
            problem = str(error)
        except Exception as error:  # the first step reports what is not explained here
            problem = explained(error, settings)
            if problem is None and is_allowed and collectives.first is not None:
                raise
    moving = frozenset(probe.moving())
    probe.restore_outer()
    called = f"{collectives.first} ({place})" if place is not None else collectives.first
    return Findings(moving, called, problem)


def _problem_found_by(probe: StepProbe, settings: Settings, batch: Any, collectives: Collectives) -> str | None:
    """Why the objectives cannot have lanes, if a reason was found.

    What backward would need is not kept: it can be most of the memory of a step, more than a compiled step has.
    """
    objectives = list(objectives_of(settings).values())
    try:
        with saved_tensors_hooks(_drop, _refuse):
            return next(filter(None, (probe.run(each, batch) for each in objectives)), None)
    except (CollectiveFound, ConfigError):
        raise
    except Exception:  # the forward pass may compute gradients itself, or use torch.func, which allows no hooks
        if collectives.first is not None:  # other ranks may wait in it
            raise
        probe.restore_outer()
    return next(filter(None, (probe.run(each, batch) for each in objectives)), None)


def _drop(tensor: torch.Tensor) -> None:
    """Keep nothing of a tensor that backward would need."""


def _refuse(kept: None) -> torch.Tensor:
    raise RuntimeError("a gradient is computed in the forward pass")


@torch.no_grad()
def _perturb(model: torch.nn.Module) -> None:
    """Change each weight slightly, by its own factor: an average of equal weights would not show that it moves."""
    for place, parameter in enumerate(model.parameters()):
        if parameter.is_floating_point() and parameter.element_size() > 1:
            change = 0.01 * math.sin(place + 1)
            parameter.mul_(1 + change).add_(change)


def _combine(of_ranks: list[Findings]) -> Findings:
    return Findings(
        frozenset().union(*(found.moving for found in of_ranks)),
        next((found.collective for found in of_ranks if found.collective is not None), None),
        next((found.problem for found in of_ranks if found.problem is not None), None),
    )
