"""Evaluation on a single rank: metrics, losses and their errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config import Config
from paceline.data.feed import Feed
from paceline.engine.digest import sha256_of
from paceline.errors import ConfigError, DataError
from paceline.worker.evaluate import Evaluator, in_fp32
from support.models import RunningLoss
from support.worlds import world_of

MakeConfig = Callable[..., Config]
UNLABELLED: Any = [{"input": torch.ones(3)}, {"input": torch.zeros(3)}]
HERE = world_of()


def measured(config: Config) -> dict[str, float]:
    return Evaluator(Feed(UNLABELLED, config, HERE), config, HERE).measure(nn.Linear(3, 2), lambda done, total: None)


def test_samples_without_labels_are_an_error_of_the_measure_that_needs_them(make_config: MakeConfig) -> None:
    with pytest.raises(DataError, match=r"no labels, and val_loss needs them .*; use paceline predict"):
        measured(make_config(loss_fn=nn.functional.cross_entropy, batch_size=2))


def test_a_loss_that_needs_no_labels_is_measured_without_them(make_config: MakeConfig) -> None:
    def size(output: torch.Tensor, target: Any) -> torch.Tensor:
        assert target is None
        return output.abs().mean()

    assert measured(make_config(loss_fn=size, batch_size=2))["val_loss"] > 0


def test_an_error_of_a_measures_own_stays_as_it_is(make_config: MakeConfig) -> None:
    def wrong(output: torch.Tensor, target: Any) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        measured(make_config(loss_fn=wrong, batch_size=2))


class Table:
    """Keeps what it is given, and computes something that is no number."""

    def __init__(self, value: Any) -> None:
        self.value, self.calls = value, []

    def reset(self) -> None:
        self.calls.append("reset")

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.calls.append("update")

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.update(output, target)

    def compute(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Half:
    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> float:
        return self.compute()

    def compute(self) -> float:
        return 1.0


def tried(config: Config) -> list[str] | None:
    data: Any = [(torch.ones(3), n % 2) for n in range(6)]
    return Evaluator(Feed(data, config, HERE), config, HERE).try_measures(nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (Table(torch.ones(2, 2)), r"metrics\.mine returned a tensor of shape \(2, 2\); it must return one number"),
        (Table({"a": 1.0}), r"metrics\.mine returned a dict; it must return one number"),
        (lambda output, target: {"a": 1.0}, r"mine returned a dict; return a mean over the batch"),
        (Half(), r"metrics\.mine has a method compute, so it also needs reset and update"),
    ],
)
def test_a_wrong_metric_is_an_error_before_the_first_step(make_config: MakeConfig, metric: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tried(make_config(loss_fn=nn.functional.cross_entropy, metrics={"mine": metric}, batch_size=2))


def accuracy_of(model: nn.Module, batch: Any) -> dict[str, Any]:
    output = model(batch[0])
    return {"loss": output.square().mean(), "right": (output.argmax(1) == batch[1]).double().mean()}


def test_evaluate_fn_replaces_the_loss_and_is_measured_beside_metrics(make_config: MakeConfig) -> None:
    config = make_config(loss_fn=nn.functional.cross_entropy, evaluate_fn=accuracy_of, batch_size=2)
    data: Any = [(torch.ones(3), n % 2) for n in range(6)]
    model = nn.Linear(3, 2)
    alone = Evaluator(Feed(data, config, HERE), config, HERE).measure(model, lambda done, total: None)
    assert alone == {"val_loss": pytest.approx(float(model(torch.ones(3)).square().mean().detach())), "right": 0.5}
    config = make_config(loss_fn=nn.functional.cross_entropy, evaluate_fn=accuracy_of, metrics=["mse"], batch_size=2)
    config.metrics = {"accuracy": lambda output, target: torch.tensor(0.25)}
    both = Evaluator(Feed(data, config, HERE), config, HERE).measure(model, lambda done, total: None)
    assert both == {**alone, "accuracy": 0.25}
    assert tried(config) == ["val_loss", "right", "accuracy"]


def returning(**values: Any) -> Callable[..., Any]:
    return lambda model, batch: values


def scaling(model: Any, batch: Any) -> dict[str, Any]:
    model.weight.data.mul_(1.1)
    return {"loss": 1.0}


def in_mode(model: Any, batch: Any) -> dict[str, Any]:
    model.train()
    return {"loss": model(batch[0]).mean()}


@pytest.mark.parametrize(
    ("evaluate_fn", "message"),
    [
        (returning(accuracy=1.0), r"metrics\.accuracy has the name of a value of evaluate_fn; rename one of them"),
        (
            returning(train_right=1.0),
            "evaluate_fn returned a value named 'train_right', which is reserved in events; choose an",
        ),
        (returning(loss=1.0, val_loss=2.0), "returned loss and val_loss, which are the same number here; return one"),
        (scaling, "evaluate_fn changes weight, which is trained; do that in a callback's on_step"),
        (
            lambda model, batch: {"a": model(batch[0]).mean().backward()},
            "evaluate_fn computes gradients, which are disabled in validation; return only numbers",
        ),
    ],
)
def test_what_evaluate_fn_must_not_do_is_one_sentence_before_the_first_step(
    make_config: MakeConfig, evaluate_fn: Any, message: str
) -> None:
    keys = {"loss_fn": nn.functional.cross_entropy, "metrics": ["accuracy"], "batch_size": 2}
    with pytest.raises(ConfigError, match=message):
        tried(make_config(**keys, evaluate_fn=evaluate_fn))
    tried(make_config(**keys, evaluate_fn=in_mode))


def test_a_trial_leaves_nothing_behind(make_config: MakeConfig) -> None:
    metric = Table(ZeroDivisionError("more samples, please"))
    tried(make_config(loss_fn=nn.functional.cross_entropy, metrics={"mine": metric}, batch_size=2))
    assert metric.calls == ["reset", "update", "reset"]


class Moving(nn.Linear):
    """Changes a frozen parameter and a buffer whenever it is called."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.weight.requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.9)
        self.seen += 1
        return super().forward(x)


def test_an_evaluation_changes_neither_frozen_parameters_nor_the_loss(make_config: MakeConfig) -> None:
    model, loss = Moving(), RunningLoss()
    data: Any = [(torch.full((3,), float(n)), n % 2) for n in range(6)]
    before = sha256_of(model.state_dict()), loss.mean.item()
    values = []
    for size in (2, 6):
        config = make_config(loss_fn=loss, batch_size=size)
        evaluator = Evaluator(Feed(data, config, HERE), config, HERE, {("", "weight")})
        evaluator.try_measures(model)
        evaluator.try_losses(model)
        values += [evaluator.measure(model, lambda done, total: None) for _ in range(2)]
        assert (sha256_of(model.state_dict()), loss.mean.item()) == before
    assert values[0] == values[1]
    assert values[2] == values[3]


def predicted(config: Config, model: Any, size: int) -> torch.Tensor:
    data: Any = [(torch.full((3,), float(n)), n) for n in range(size)]
    return Evaluator(Feed(data, config, HERE), config, HERE).predict(model, lambda done, total: None)


class Squeezing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze()


def test_a_last_batch_of_one_sample_may_be_squeezed(make_config: MakeConfig) -> None:
    assert predicted(make_config(batch_size=2), Squeezing(3, 1), 5).shape == (5,)
    assert predicted(make_config(batch_size=2), Squeezing(3, 4), 5).shape == (5, 4)


class Growing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1].repeat(1, 1 + int(x[0, 0]))


def test_outputs_that_fit_no_table_are_errors(make_config: MakeConfig) -> None:
    with pytest.raises(DataError, match=r"one row of output for each sample; 2 samples gave .* \(6,\); check"):
        predicted(make_config(batch_size=2), nn.Flatten(0), 4)
    with pytest.raises(DataError, match=r"outputs of one shape for all samples, not \(1,\) and \(3,\)"):
        predicted(make_config(batch_size=2), Growing(), 4)


@pytest.mark.parametrize("kind", ["dict", "tuple", "list", "transformers"])
def test_outputs_of_autocast_are_measured_in_full_whatever_holds_them(kind: str) -> None:
    half = torch.full((2,), 1.2, dtype=torch.bfloat16)
    whole = half.float()
    if kind == "transformers":
        outputs = pytest.importorskip("transformers").modeling_outputs
        output = outputs.SequenceClassifierOutput(logits=half, hidden_states=(half, half))
        full = in_fp32(output)
        assert type(full) is type(output)
        assert full.logits.dtype == full["logits"].dtype == full.hidden_states[1].dtype == torch.float32
        assert output.logits.dtype == torch.bfloat16  # the model may keep it
        return
    output = {"dict": {"logits": half, "of": {"ids": torch.tensor(3)}}, "tuple": (half, None), "list": [half]}[kind]
    wanted = {"dict": {"logits": whole, "of": {"ids": torch.tensor(3)}}, "tuple": (whole, None), "list": [whole]}[kind]
    assert str(in_fp32(output)) == str(wanted)


def test_the_last_layer_and_what_goes_into_it_stay_in_the_format_that_the_loss_wants() -> None:
    half, weight = torch.ones(2, 3, dtype=torch.bfloat16), nn.Parameter(torch.ones(5, 3))
    hidden, same = in_fp32((half, weight))
    assert hidden is half
    assert same is weight


class RemembersOutputs(nn.Linear):
    """A linear layer that knows its earlier outputs, and how many of them exist when it is called again."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.alive.append(sum(output() is not None for output in self.outputs))
        output = super().forward(x)
        self.outputs.append(weakref.ref(output))
        return output


def test_the_outputs_of_a_batch_are_freed_before_the_next_one(make_config: MakeConfig) -> None:
    config = make_config(loss_fn=nn.functional.cross_entropy, metrics=["accuracy"], batch_size=2)
    data: Any = [(torch.ones(3), n % 2) for n in range(6)]
    model = RemembersOutputs()
    Evaluator(Feed(data, config, HERE), config, HERE).measure(model, lambda done, total: None)
    assert model.alive == [0, 0, 0]
