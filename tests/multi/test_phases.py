"""Steps with several optimizers: the phases run in order, each with its own parameters, through stops and resizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness_cases import GAN, Images, NotFinite, critic_step, gan_optimizers, generator_step
from faults import events, options, outcome, saved_steps, start, stop_step
from test_resume import stopping
from torch import nn
from torch.nn import functional

from paceline import Trainer, every, indices_at
from paceline.data.seeding import seed_generators
from paceline.errors import ConfigError
from support.configs import problems
from support.runs import warnings_in

PHASES: dict[str, Any] = {
    **GAN, "loss_fn": None, "step_fn": {"critic": critic_step, "generator": every(3, generator_step)}
}  # fmt: skip


def test_a_stopped_run_resumes_on_other_numbers_of_ranks_with_all_optimizers() -> None:
    whole = outcome(start(**PHASES, run_dir="whole"))
    stopped_at = stop_step(**PHASES, dataset_fn=stopping(2), procs=2)
    assert 0 < stopped_at < whole["step"]
    result = start(**PHASES, procs=4, resume="auto")
    assert outcome(result) == whole
    assert [event.get("values") for event in events("step")] == [e.get("values") for e in events("step", "whole")]
    assert result.evaluate(procs=1) == result.metrics


def test_a_checkpoint_before_the_first_update_of_a_phase_holds_what_there_is() -> None:
    keys = {**PHASES, "step_fn": {"critic": critic_step, "generator": every(9, generator_step)}}
    whole = start(**keys, checkpoint={"every_steps": 2, "keep": 30, "async": False})
    first = saved_steps()[0]
    assert first < 9
    resumed = start(**keys, resume=f"run/checkpoints/step-{first:08d}", run_dir="other", procs=2)
    assert (resumed.weights_sha256, resumed.optimizer_sha256) == (whole.weights_sha256, whole.optimizer_sha256)


class Pair(nn.Module):
    """Two layers, the second on top of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(36, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(x.flatten(1)))
        return output


def first_step(model: Any, batch: Any) -> torch.Tensor:
    return model.first(batch[0].flatten(1)).square().mean()


def second_step(model: Any, batch: Any) -> torch.Tensor:  # its gradients of the first layer are dropped
    return functional.cross_entropy(model(batch[0]), batch[1])


def optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "second": torch.optim.SGD(model.second.parameters(), lr=0.2, momentum=0.9),
        "first": torch.optim.SGD(model.first.parameters(), lr=0.1),
    }


def test_phases_compute_what_a_plain_loop_computes() -> None:
    """A loop written here, without lanes, DDP or any of our loaders, to rounding."""
    data = Images()
    result = Trainer(
        model_fn=Pair, dataset_fn=Images, val_fraction=0,
        step_fn={"first": first_step, "second": every(2, second_step)},
        optimizer_fn=optimizers, batch_size=4, lanes=5, num_epochs=1, threads=1, device="cpu", log={"every_steps": 1},
        procs=1, run_dir="run",
    ).start()  # fmt: skip
    seed_generators(0, "model")
    model = Pair()
    own = optimizers(model)
    order = torch.from_numpy(indices_at(seed=0, epoch=0, size=len(data), positions=range(len(data))))
    expected = []
    for number, chosen in enumerate(order.split(20)):
        batch, values = (data.images[chosen], data.labels[chosen]), {"second_loss": None}
        for name, step in (("first", first_step), ("second", second_step)):
            if name == "second" and number % 2 == 0:
                continue
            model.zero_grad()
            loss = step(model, batch)
            loss.backward()
            own[name].step()
            values[f"{name}_loss"] = pytest.approx(loss.item(), rel=1e-5)
        expected.append({name: value for name, value in values.items() if number or name == "first_loss"})
    assert [event["values"] for event in events("step")] == expected
    torch.testing.assert_close(dict(result.load_model().state_dict()), dict(model.state_dict()))


def test_a_phase_that_is_not_finite_is_skipped_alone() -> None:
    keys = {**PHASES, "step_fn": {"critic": critic_step, "generator": generator_step}, "precision": "fp32"}
    result = start(**keys, dataset_fn=lambda: NotFinite(80), procs=2)
    found = [text for text in warnings_in(result.run_dir) if "is skipped" in text]
    assert found
    assert all(re.match(r"phase critic: step \d+ is skipped, it is not finite: rank", text) for text in found)
    skipped = {int(re.findall(r"step (\d+)", text)[0]) for text in found}
    values = {event["step"]: event["values"] for event in events("step")}
    assert result.history[-1]["train_generator_loss"] is not None
    assert all(values[step]["generator_loss"] is not None for step in skipped if step in values)


def test_the_config_in_the_run_folder_names_the_phases() -> None:
    start(**PHASES, num_epochs=1)
    text = Path("run/config.yaml").read_text()
    assert "step_fn:\n  critic: exactness_cases:critic_step\n  generator:\n    every: 3\n" in text
    assert "    fn: exactness_cases:generator_step\n" in text


def similar_optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
    """Optimizers of one class, whose groups have the same form: only the names of the phases tell them apart."""
    return {name: torch.optim.SGD(model.first.parameters(), lr=0.1) for name in ("first", "other")}


def test_phases_in_another_order_do_not_resume_the_run() -> None:
    keys = {**PHASES, "model_fn": Pair, "optimizer_fn": similar_optimizers, "ema": None}
    start(**{**keys, "step_fn": {"first": first_step, "other": second_step}}, num_epochs=1)
    with pytest.raises(ConfigError, match="the phase other is first in the checkpoint; keep the phases"):
        start(**{**keys, "step_fn": {"other": second_step, "first": first_step}}, resume="auto")


def test_phases_with_another_optimizer_do_not_resume_the_run() -> None:
    start(**PHASES, num_epochs=1)
    turned = {"generator": generator_step, "critic": critic_step}
    with pytest.raises(ConfigError, match="has an optimizer with"):
        start(**{**PHASES, "step_fn": turned}, resume="auto")


def one_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_optimizers_that_do_not_fit_the_phases_are_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer_fn returned SGD, but step_fn has the phases critic, generator"):
        start(**{**PHASES, "optimizer_fn": one_optimizer})
    with pytest.raises(
        ConfigError, match="optimizer_fn returned a dict; step_fn must also be a dict with the same keys"
    ):
        start(**{**PHASES, "step_fn": critic_step}, run_dir="other")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"optimizer_fn": None}, "step_fn has the phases critic, generator; give optimizer_fn(model), which returns a"),
        ({"shard_optimizer": True}, "shard_optimizer=true needs one optimizer, but step_fn has the phases critic"),
        ({"step_fn": {}}, "step_fn is a dict without names of phases; give a function"),
        ({"step_fn": {"a": 3}}, "step_fn={'a': 3} has the phase a=3; use a function, or {every: 5, fn: function}"),
        ({"step_fn": {"a": {"every": 0, "fn": "x:y"}}}, "step_fn={'a': {'every': 0, 'fn': 'x:y'}} has the phase a at"),
    ],
    ids=["no optimizers", "sharded", "empty", "a number", "never"],
)
def test_mistakes_are_found_before_a_process_starts(keys: dict[str, Any], problem: str) -> None:
    found = problems(options(**{**PHASES, "optimizer_fn": gan_optimizers, **keys}))
    assert any(text.startswith(problem) for text in found), found


def test_a_phase_needs_a_number_of_steps() -> None:
    with pytest.raises(ConfigError, match=r"every\(0, …\) needs a positive number of steps"):
        every(0, critic_step)


def same_name(model: Any, batch: Any) -> dict[str, Any]:
    return {"loss": first_step(model, batch), "second_loss": 1.0}


@pytest.mark.parametrize("data", [{}, {"val_dataset_fn": None, "val_fraction": 0}])
def test_values_of_two_phases_with_one_name_are_refused(data: dict[str, Any]) -> None:
    def optimizers(model: Any) -> dict[str, Any]:
        parts = {"a": model.first, "a_second": model.second}
        return {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in parts.items()}

    steps = {"a": same_name, "a_second": second_step}
    keys = {
        "model_fn": Pair,
        "loss_fn": None,
        "step_fn": steps,
        "optimizer_fn": optimizers,
        "optimizer": None,
        "metrics": [],
    }
    with pytest.raises(ConfigError, match=r"logs a value a_second_loss, as does an earlier phase; rename the value"):
        start(**{**keys, **data})


def test_parameters_that_no_optimizer_updates_are_reported_once() -> None:
    start(
        model_fn=Pair, optimizer_fn=lambda model: torch.optim.SGD([model.first.weight], lr=0.1), num_epochs=1,
        dataset_fn=lambda: Images(24), metrics=[], procs=2, optimizer=None,
    )  # fmt: skip
    [text] = [text for text in warnings_in(Path("run")) if "optimizer_fn" in text]
    assert text.startswith("optimizer_fn omits second, first.bias, which will not be trained; pass them to an optim")
