from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline import Sum
from paceline.engine import losses
from paceline.engine.losses import accuracy, mae, make_metrics, mean_of, mse, number_on, sum_and_count
from paceline.errors import ConfigError


def values(pair: tuple[Any, Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


def test_accuracy_takes_the_largest_of_several_logits() -> None:
    output = torch.tensor([[0.1, 2.0, -1.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert values(accuracy(output, torch.tensor([1, 0, 0]))) == (2, 3)


def test_accuracy_of_two_logits_is_not_taken_for_single_ones() -> None:
    assert values(accuracy(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([1, 1]))) == (1, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 2)])
def test_accuracy_takes_the_sign_of_a_single_logit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    output = torch.tensor([2.0, -0.5, 0.5, -3.0]).reshape(shape)
    assert values(accuracy(output, torch.tensor([1, 0, 0, 1]).to(dtype).reshape(shape))) == (2, 4)


def test_accuracy_of_one_column_of_logits_takes_their_sign() -> None:
    assert values(accuracy(torch.tensor([[2.0], [-1.0], [1.0]]), torch.tensor([1, 0, 1]))) == (3, 3)


def test_accuracy_of_images_takes_the_classes_where_cross_entropy_has_them() -> None:
    output = torch.zeros(2, 3, 4, 5)
    output[:, 1] = 1
    assert values(accuracy(output, torch.ones(2, 4, 5, dtype=torch.int64))) == (40, 40)


def test_accuracy_of_one_channel_of_logits_takes_their_sign() -> None:
    target = torch.tensor([[[1, 0], [1, 0]], [[0, 0], [1, 1]]])
    assert values(accuracy(target[:, None] - 0.5, target)) == (8, 8)


def test_accuracy_of_classes_in_bytes_counts_them_all() -> None:
    target = torch.tensor([156, 3], dtype=torch.uint8)  # as a byte, -100 would be 156
    assert values(accuracy(torch.eye(200)[target.long()], target)) == (2, 2)


def test_accuracy_of_several_logits_takes_targets_in_a_column() -> None:
    output = torch.tensor([[0.1, 2.0, -1.0], [3.0, 0.0, 0.0]])
    assert values(accuracy(output, torch.tensor([[1], [2]]))) == (1, 2)


def test_accuracy_leaves_out_what_cross_entropy_leaves_out() -> None:
    output = torch.zeros(2, 4, 3)  # two sentences of four tokens
    output[..., 1] = 1
    target = torch.tensor([[1, 1, -100, -100], [0, 1, 1, -100]])
    assert values(accuracy(output, target)) == (4, 5)
    assert values(accuracy(output.transpose(1, 2), target)) == (4, 5)


LOSS = torch.ones((), requires_grad=True) * 2


@pytest.mark.parametrize(
    ("returned", "described"),
    [
        ((LOSS, LOSS / 2), "Tensor float32, Tensor float32"),
        ((LOSS, torch.tensor(3.0)), "Tensor float32, Tensor float32"),
        ((LOSS, 0.75), "Tensor float32, 0.75"),
        ((LOSS, 3.0), "Tensor float32, 3.0"),
        ((LOSS, True), "Tensor float32, True"),
        ((LOSS, torch.tensor(True)), "Tensor float32, Tensor bool"),
        ((LOSS, torch.tensor([1, 2])), "Tensor float32, Tensor int64"),
        ((LOSS, {"accuracy": 0.5}), "Tensor float32, dict"),
        ((LOSS, None), "Tensor float32, NoneType"),
        ((LOSS, -1), "Tensor float32, -1"),
        ((LOSS, 0), "Tensor float32, 0"),
        ((LOSS, torch.tensor(0)), "Tensor float32, Tensor int64"),
        ([LOSS, LOSS, 4], "Tensor float32, Tensor float32, 4"),
    ],
)
def test_what_may_be_a_loss_with_extras_is_refused_with_both_readings(returned: Any, described: str) -> None:
    with pytest.raises(ConfigError) as refused:
        sum_and_count(returned, 4, "loss_fn")
    assert str(refused.value) == (
        f"loss_fn returned ({described}), which is not a sum and a whole count from 1; if it is a value with extras, "
        "return the value alone; if it is a sum, return paceline.Sum(total, count)"
    )


def test_the_count_of_a_sum_is_any_number_without_a_gradient() -> None:
    for count in (0.5, 0, 3, torch.tensor(0.5), np.float32(0.5), torch.tensor([2])):
        assert values(sum_and_count(Sum(LOSS.detach(), count), 4, "loss_fn")) == (2, float(count))
    for count in (LOSS, torch.ones(2), "3", -1, torch.tensor(-0.5)):
        with pytest.raises(ConfigError, match=r"loss_fn returned paceline\.Sum, whose count must be one number from 0"):
            sum_and_count(Sum(LOSS, count), 4, "loss_fn")  # type: ignore[arg-type]


def test_no_sample_may_count_where_the_sum_is_of_nothing() -> None:
    assert values(sum_and_count((torch.tensor(0.0), 0), 4, "loss_fn")) == (0, 0)
    assert values(sum_and_count((torch.tensor(0.0), torch.tensor(0)), 4, "loss_fn")) == (0, 0)
    assert sum_and_count((torch.tensor(torch.nan), 0), 4, "loss_fn")[0].isnan()  # steps that are not finite are skipped


def test_a_sum_passes_through_compiled_code() -> None:
    compiled = torch.compile(lambda x: Sum(x.sum(), x.numel()), backend="eager", fullgraph=True)
    assert compiled(torch.ones(3)) == Sum(torch.tensor(3.0), 3)
    assert type(compiled(torch.ones(3))) is Sum


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_fn returned None; return a mean over the batch, or paceline\.Sum"):
        sum_and_count(None, 4, "loss_fn")


def test_errors_are_summed_over_all_numbers() -> None:
    output, target = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 8.0]])
    assert values(mse(output, target)) == (4 + 9 + 16, 4)
    assert values(mae(output, target)) == (2 + 3 + 4, 4)


@pytest.mark.parametrize("metric", [mse, mae])
def test_errors_of_a_column_against_a_row_are_not_those_of_a_square(metric: Any) -> None:
    # All samples against all others would be 9 errors over 3 samples.
    assert values(metric(torch.zeros(3, 1), torch.ones(3))) == (3, 3)


def test_metrics_add_up_over_batches() -> None:
    output, target = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 4
    parts = [values(accuracy(output[part], target[part])) for part in (slice(0, 3), slice(3, 10))]
    assert tuple(map(sum, zip(*parts, strict=True))) == values(accuracy(output, target))


@pytest.mark.parametrize("mean", [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]])])
def test_a_mean_counts_as_often_as_there_are_samples(mean: Any) -> None:
    total, count = sum_and_count(mean, 8, "loss_fn")
    assert values((total, count)) == (4, 8)
    assert total.shape == ()


@pytest.mark.parametrize(
    "pair", [(torch.tensor(6.0), 3), [6, 3], (torch.tensor(6.0), torch.tensor(3)), (6.0, np.int64(3))]
)
def test_a_sum_and_count_stays_as_it_is(pair: Any) -> None:
    assert values(sum_and_count(pair, 100, "loss_fn")) == (6, 3)


def test_a_mean_stays_differentiable() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    total, _ = sum_and_count(weight * 3, 5, "loss_fn")
    total.backward()
    assert weight.grad == 15


def test_a_loss_for_each_sample_is_an_error_that_names_the_function_and_the_shape() -> None:
    with pytest.raises(ConfigError, match=r"my_loss returned a tensor of shape \(4,\); return a mean over"):
        sum_and_count(torch.zeros(4), 4, "my_loss")


def test_what_is_no_number_is_an_error_that_names_the_function() -> None:
    with pytest.raises(ConfigError, match=r"f1 returned a dict; return a mean over the batch"):
        sum_and_count({"a": 1.0}, 4, "f1")
    with pytest.raises(ConfigError, match=r"f1 returned a tensor of shape \(3,\); return a mean over"):
        sum_and_count((torch.ones(3), 3), 3, "f1")


@pytest.mark.parametrize("metric", [mse, mae])
def test_errors_of_yes_and_no_are_those_of_one_and_zero(metric: Any) -> None:
    assert values(metric(torch.tensor([1.0, 1.0]), torch.tensor([True, False]))) == (1, 2)


def test_metrics_are_found_by_name_or_taken_as_given() -> None:
    assert make_metrics(["mse", "accuracy"]) == {"mse": mse, "accuracy": accuracy}
    assert make_metrics({"mine": mae}) == {"mine": mae}
    assert make_metrics([]) == {}


CPU = torch.device("cpu")


def test_plain_numbers_are_made_once_and_tensors_are_taken_as_they_are() -> None:
    assert number_on(3, CPU) is number_on(3.0, CPU)
    assert number_on(3, CPU).item() == 3.0
    assert number_on(3, CPU) is not number_on(3, torch.device("meta"))
    assert number_on(1 / 3, CPU, torch.float64).item() == 1 / 3 != number_on(1 / 3, CPU).item()
    count = torch.tensor([5], requires_grad=False)
    assert number_on(count, CPU).shape == ()
    assert number_on(count, CPU).dtype == torch.int64
    assert not number_on(torch.tensor(2.0, requires_grad=True), CPU).requires_grad


def test_numbers_that_a_graph_reads_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when other numbers have displaced them from the cache."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(losses, "_constant", lambda number, device, dtype: torch.tensor(number))
    monkeypatch.setattr(losses, "_recorded", set())
    recorded = number_on(7, torch.device("cuda"))
    assert recorded in losses._recorded
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    number_on(8, torch.device("cuda"))
    assert len(losses._recorded) == 1


def test_a_complex_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss_fn returned a complex number; return its absolute value, or its real"):
        mean_of(torch.tensor(1j), "loss_fn")
