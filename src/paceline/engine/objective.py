"""The objective of a run for a batch: the value of `loss_fn` for the model's output, or that of `step_fn`.

The value is a loss alone, or a dict with `loss` and further scalars; `parts_of` separates them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paceline.config import Settings
from paceline.config.functions import is_model_loss
from paceline.engine.constant_masks import drop_constant_masks
from paceline.errors import ConfigError, DataError
from paceline.observe.event_types import RESERVED_NAMES
from paceline.user_code import with_place

PART_BYTES = 25 * 2**20  # of parameters that are compiled together: those of a bucket of DDP
LOSS = "loss"  # the name of the loss among the values of a step
SAME_NAME = "logs a value {name}, as does an earlier phase; rename the value or the phase"
Model = Callable[..., Any]


class Objective(NamedTuple):
    """A function of the model and a batch that returns a loss, or a dict with a loss."""

    key: str  # of the config, for messages: loss_fn or step_fn
    function: Any  # `loss_fn(output, target)`, "model", or a function of the model and the batch
    takes_model: bool  # whether the function calls the model itself, in any way

    @property
    def source(self) -> str:
        """The key with the place of the function, for messages about what it has returned."""
        return with_place(self.key, self.function)

    @property
    def is_models_own(self) -> bool:
        """Whether the model computes the loss."""
        return is_model_loss(self.key, self.function)

    def __call__(self, model: Model, batch: Any) -> Any:
        """The value for a batch."""
        if self.takes_model:
            return self.function(model, batch)
        output, target = run_model(model, batch, with_labels=self.is_models_own)
        return loss_in(output) if self.is_models_own else self.function(output, target)

    def compiled(self, *, pads_products: bool = False) -> Objective:
        """The objective with its function and the model compiled together.

        On a GPU, `pads_products` pads the matrices of all products whose sizes are odd, such as a vocabulary of 50,257
        words. The compiler would otherwise measure whether that is faster, which exact runs do not allow.
        """
        options = {"force_shape_pad": True} if pads_products else {}
        function = torch.compile(_with_model(self), dynamic=False, backend=_Compiler(options))
        return self._replace(function=function, takes_model=True)


class _Compiler:
    """Torch's own compiler, which gets constant attention masks as flags, and a large model in parts.

    The gradients of a compiled function are all complete at its end. So that sums over ranks can start earlier, each
    PART_BYTES of parameters are compiled as a function of their own, with the same parts on any number of ranks: code
    that is compiled together rounds in another way.
    """

    compiler_name = "inductor"  # as torch knows it

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Compile a graph; called by torch."""
        from torch._dynamo.backends.distributed import DDPOptimizer  # takes seconds to load

        if drop_constant_masks(module.graph):
            module.recompile()
        return DDPOptimizer(PART_BYTES, self._compile_part, PART_BYTES).compile_fn(module, list(inputs))

    def _compile_part(self, module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, inputs, config_patches=self._options)  # type: ignore[return-value]


def _with_model(objective: Objective) -> Callable[[Model, Any], Any]:
    """The objective as a plain function, which can be compiled."""
    function, is_models_own = objective.function, objective.is_models_own
    if objective.takes_model:
        return function  # type: ignore[no-any-return]

    def value_of(model: Model, batch: Any) -> Any:
        output, target = run_model(model, batch, with_labels=is_models_own)
        return loss_in(output) if is_models_own else function(output, target)

    return value_of


def objectives_of(settings: Settings) -> dict[str, Objective]:
    """The objectives of the settings, by the names of the phases; a step without phases has one, named ""."""
    if settings.step_fn is None:
        return {} if settings.loss_fn is None else {"": Objective("loss_fn", settings.loss_fn, takes_model=False)}
    if not isinstance(settings.step_fn, Mapping):
        return {"": Objective("step_fn", settings.step_fn, takes_model=True)}
    return {name: Objective(f"step_fn.{name}", each, takes_model=True) for name, each in settings.step_fn.items()}


def parts_of(value: Any, source: str) -> tuple[Any, dict[str, Any]]:
    """The loss and the further values in the value of an objective; `source` is named in errors."""
    if not isinstance(value, Mapping):
        return value, {}
    if LOSS not in value:
        names = ", ".join(map(repr, value)) or "nothing"
        raise ConfigError(f"{source} returned a dict with {names}; it must have 'loss'")
    further = {name: each for name, each in value.items() if name != LOSS}
    for name in further:
        if not isinstance(name, str) or name in RESERVED_NAMES:
            raise ConfigError(
                f"{source} returned a value named {name!r}, which is reserved in events; choose another name"
            )
    return value[LOSS], further


def run_model(model: Model, batch: Any, *, with_labels: bool = False) -> tuple[Any, Any]:
    """The model's output and the target: `(*inputs, target)` of a tuple, `labels` of a dict.

    The model also gets the target if it computes its own loss.
    """
    if isinstance(batch, Mapping):
        named = {key: value for key, value in batch.items() if with_labels or key != "labels"}
        return model(**named), batch.get("labels")
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise DataError(
            f"a batch is a {type(batch).__name__}; each sample of the data set must be (*inputs, target), or a dict "
            "with labels"
        )
    *inputs, target = batch
    return model(*(batch if with_labels else inputs)), target


def loss_in(output: Any) -> Any:
    """The loss that a model has returned with its output."""
    loss = output.get(LOSS) if isinstance(output, Mapping) else getattr(output, LOSS, None)
    if loss is None:
        raise ConfigError(
            f"loss_fn=model but the model returns a {type(output).__name__} without a loss; add labels to the "
            "batch, or use loss_fn or step_fn"
        )
    return loss


def logits_in(output: Any) -> Any:
    """The logits of an output with such an attribute, as in transformers; any other output unchanged."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, torch.Tensor) else output
