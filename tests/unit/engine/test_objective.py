"""What a run computes for a batch, and the parts of its value."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Sum
from paceline.data.lanes import RankLanes
from paceline.engine import objective
from paceline.engine.compilation import prepare_compiler
from paceline.engine.lane_values import LaneValues
from paceline.engine.objective import Objective, logits_in, loss_in, parts_of, run_model
from paceline.errors import ConfigError
from support.worlds import fake_world, world_of

STEP = Objective("step_fn", lambda model, batch: None, takes_model=True)


def test_the_parts_of_a_value() -> None:
    assert parts_of(1.5, "step_fn") == (1.5, {})
    assert parts_of(Sum(3, 2), "step_fn") == (Sum(3, 2), {})
    assert parts_of({"a": 1, "loss": 2}, "step_fn") == (2, {"a": 1})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "step_fn returned a dict with nothing; it must have 'loss'"),
        ({"losses": 1}, "step_fn returned a dict with 'losses'; it must have 'loss'"),
        ({"loss": 1, "lr": 2}, "step_fn returned a value named 'lr', which is reserved in events; choose another name"),
        ({"loss": 1, 3: 2}, "step_fn returned a value named 3, which is reserved in events; choose another name"),
    ],
)
def test_a_dict_without_a_loss_or_with_a_reserved_name_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parts_of(value, "step_fn")
    assert str(caught.value) == message


def test_a_model_with_a_loss_of_its_own_gets_the_labels() -> None:
    seen: list[Any] = []

    def model(*inputs: Any, **named: Any) -> Any:
        seen.append((inputs, named))
        return SimpleNamespace(loss=1.0, logits=torch.ones(2))

    output, target = run_model(model, {"x": 1, "labels": 2}, with_labels=True)
    assert (loss_in(output), target) == (1.0, 2)
    run_model(model, {"x": 1, "labels": 2})
    run_model(model, (1, 2), with_labels=True)
    run_model(model, (1, 2))
    assert seen == [((), {"x": 1, "labels": 2}), ((), {"x": 1}), ((1, 2), {}), ((1,), {})]
    assert logits_in(output) is output.logits
    assert logits_in({"logits": 1}) == {"logits": 1}
    assert loss_in({"loss": 3}) == 3
    with pytest.raises(ConfigError, match="loss_fn=model but the model returns a Tensor without a loss"):
        loss_in(torch.ones(2))


# --- further values ------------------------------------------------------------------------------------------------


def numbers(values: LaneValues) -> list[float]:
    return [number.item() for number in values.finish()]


def test_a_mean_is_weighted_by_the_samples_and_a_sum_by_its_own_count() -> None:
    values = LaneValues(RankLanes(3, 1, 0), world_of(), STEP)
    values.add(0, {"a": 0.5, "b": Sum(torch.tensor(6.0, requires_grad=True), 4)}, samples=2)
    values.add(2, {"b": torch.tensor(3.0)}, samples=5)
    assert numbers(values) == [1, 2, 0, 0, 0, 0, 6, 4, 0, 0, 15, 5]
    assert values.names == ("a", "b")
    values.restart()
    values.add(1, {"b": 2}, samples=1)
    assert numbers(values) == [0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0]
    with pytest.raises(ConfigError, match=r"step_fn returned 'c', which it did not return in the first step"):
        values.add(2, {"c": 2}, samples=1)


def test_names_are_those_of_all_ranks_in_the_order_of_the_lanes() -> None:
    world = fake_world(rank=1, size=2, gathered=lambda mine: [["c", "a"], mine])
    values = LaneValues(RankLanes(2, 2, 1), world, STEP)
    values.add(1, {"a": 1.0, "b": 2.0}, samples=1)
    assert numbers(values) == [0, 0, 1, 1, 2, 1]
    assert values.names == ("c", "a", "b")


def test_a_loss_fn_needs_no_agreement() -> None:
    def fail(mine: Any) -> list[Any]:
        raise AssertionError("the ranks exchange names")

    objective = Objective("loss_fn", None, takes_model=False)
    assert LaneValues(RankLanes(1, 1, 0), fake_world(gathered=fail), objective).finish() == []


def test_a_compiled_objective_has_parts_whose_gradients_are_complete_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    prepare_compiler(torch.device("cpu"), is_exact=False)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    monkeypatch.setattr(objective, "PART_BYTES", 80)  # the bytes of a layer
    compiled = Objective("loss_fn", nn.functional.mse_loss, takes_model=False).compiled()
    loss = compiled(nn.Sequential(*layers), (torch.ones(2, 4), torch.zeros(2, 4)))
    incomplete: list[int] = []  # when the gradients of a layer are complete, how many layers are still missing
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: incomplete.append(sum(each.weight.grad is None for each in layers))
        )
    backwards, to_visit = set(), [loss.grad_fn]
    while to_visit:
        node = to_visit.pop()
        backwards |= {node} if "CompiledFunction" in type(node).__name__ else set()
        to_visit += [each for each, _ in node.next_functions if each is not None]
    loss.backward()
    assert len(backwards) == 3
    assert incomplete == [2, 1, 0]
