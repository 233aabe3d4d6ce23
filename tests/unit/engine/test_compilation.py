"""compilation.py: which lanes are compiled, without running the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import nn

from paceline.config import build
from paceline.data.feed import Feed, LaneInputs
from paceline.data.lanes import Lane
from paceline.engine import compilation, compile_gain
from paceline.engine.compilation import Compilation
from paceline.engine.compiled_lanes import form_of
from paceline.engine.replica import PlainModel
from paceline.engine.step import Stepper
from support.configs import settings_of
from support.worlds import world_of

HERE = world_of()

Make = Callable[..., Compilation]
FORM = "0: float32 4×3, 1: int64 4"


class Counting(nn.Linear):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def make(lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes the compilation of a step on the CPU as if that were a device where it is worth it."""
    monkeypatch.setattr(compilation, "DEVICES", ("cpu",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def make(*, steps: int | None = 1000, **keys: Any) -> Compilation:
        functions = {"model_fn": Counting, "dataset_fn": list, "loss_fn": nn.functional.cross_entropy}
        config = settings_of(build({**functions, "batch_size": 4, **keys}), lanes=1)
        model = Counting()
        stepper = Stepper(
            PlainModel(model), torch.optim.SGD(model.parameters(), lr=0.1), config, Feed([], config, HERE), world=HERE,
            warn=lines.append, report=lines.append, total_steps=steps,
        )  # fmt: skip
        return stepper.compilation

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, recompile_limit=8):  # restores them
        yield make


def batch(samples: int = 4, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(samples, width), torch.zeros(samples, dtype=torch.long)


def begin(made: Compilation, samples: int = 4) -> None:
    made.begin_step([lane(samples)], [LaneInputs(batch(samples), None, None)])


def lane(samples: int = 4) -> Lane:
    return Lane(0, 0, samples, samples, list(range(samples)), None)


def test_the_form_of_a_batch_is_text_with_names_types_and_shapes() -> None:
    assert form_of(batch()) == FORM
    assert form_of({"x": torch.ones(2, 3), "n": 1}) == "x: float32 2×3"


def test_compile_waits_for_a_full_step_and_keeps_its_form(make: Make, lines: list[str]) -> None:
    made = make(step_mode="compile")
    begin(made, samples=3)
    assert made.form is None
    begin(made)
    assert made.form == FORM
    assert made.counters() == {"compiled": FORM}
    assert len(lines) == 1


def test_only_full_lanes_of_that_form_are_compiled(make: Make, lines: list[str]) -> None:
    made = make(step_mode="compile")
    begin(made)
    backward = made._backwards[0]
    assert backward.compiled is not None
    lines.clear()
    assert backward.compiled.for_lane(lane(), batch()) is not backward.objective
    assert backward.compiled.for_lane(lane(3), batch(3)) is backward.objective
    assert lines == []  # a short lane is nothing unusual
    for _ in range(2):
        assert backward.compiled.for_lane(lane(), batch(width=5)) is backward.objective
    assert len(lines) == 1
    assert FORM in lines[0]


def test_auto_compiles_nothing_where_the_estimate_is_not_clear(make: Make, lines: list[str]) -> None:
    made = make()
    begin(made)
    assert made.counters() == {}
    assert lines == []


@pytest.mark.parametrize(
    "keys",
    [
        {"steps": None},
        {"collate_fn": lambda samples: samples},
        {"find_unused_parameters": True},
        {"step_mode": "eager"},
    ],
    ids=["length unknown", "a collate_fn may pad", "unused parameters", "eager"],
)
def test_auto_does_not_even_estimate(make: Make, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_gain, "SAVED_S_PER_BYTE", 1.0)
    assert make(**keys)._is_settled


def test_auto_continues_without_compiling_where_the_compiler_fails(
    make: Make, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_gain, "SAVED_S_PER_BYTE", 1.0)
    made = make()
    model = made._replica.module
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        begin(made)
    assert made.counters() == {}
    assert made._backwards[0].compiled is None
    assert lines[0].startswith("step_mode: auto compiles the step, which takes about")
    assert "1,000 steps" in lines[0]
    assert "no-such-compiler" in lines[1]
    assert len(lines) == 2
    # Nothing of the trials is left in the model.
    assert model.get_buffer("calls").item() == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_resumed_run_keeps_its_decision(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, eager = make(), make()
    compiled.set_counters(FORM)
    assert compiled.form == FORM
    monkeypatch.setattr(compile_gain, "SAVED_S_PER_BYTE", 1.0)  # as if the run were much longer now
    eager.set_counters(None)
    begin(eager)
    assert eager.form is None


def test_another_step_mode_takes_precedence_over_the_decision_of_the_run(make: Make) -> None:
    made = make(step_mode="eager")
    made.set_counters(FORM)
    assert made.form is None
