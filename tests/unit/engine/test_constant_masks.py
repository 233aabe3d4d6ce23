"""Constant attention masks in graphs that are compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.nn.functional import dropout, scaled_dot_product_attention

from paceline.engine.constant_masks import drop_constant_masks

SIZE = 6
Mask = Callable[[torch.Tensor], torch.Tensor]  # from the query


def lower(query: torch.Tensor) -> torch.Tensor:
    return torch.ones(SIZE, SIZE, dtype=torch.bool, device=query.device).tril()


def by_positions(query: torch.Tensor) -> torch.Tensor:
    at = torch.arange(query.shape[-2], device=query.device)
    return (at[None, :] <= at[:, None])[None, None].expand(query.shape[0], 1, -1, -1)


def lowest_number(query: torch.Tensor) -> torch.Tensor:
    return torch.full((SIZE, SIZE), torch.finfo(query.dtype).min, device=query.device).triu(1)


def minus_infinity(query: torch.Tensor) -> torch.Tensor:
    return torch.zeros(SIZE, SIZE, device=query.device).masked_fill(~lower(query), float("-inf"))


def all_positions(query: torch.Tensor) -> torch.Tensor:
    return (torch.arange(SIZE, device=query.device)[None, None, :, None] >= 0).expand(len(query), -1, SIZE, SIZE)


def zeros(query: torch.Tensor) -> torch.Tensor:
    return torch.zeros(SIZE, SIZE, device=query.device)


def window(query: torch.Tensor) -> torch.Tensor:
    return lower(query) & ~torch.ones(SIZE, SIZE, dtype=torch.bool).tril(-3)


def bias(query: torch.Tensor) -> torch.Tensor:
    at = torch.arange(SIZE, device=query.device)
    return minus_infinity(query) - (at[:, None] - at[None, :]) * 0.1


def padding(query: torch.Tensor) -> torch.Tensor:
    return lower(query) & (query[:, :, :1, :1] > -100)


def ones(query: torch.Tensor) -> torch.Tensor:
    return torch.ones(SIZE, SIZE, dtype=torch.bool, device=query.device)


def written_by_a_method(query: torch.Tensor) -> torch.Tensor:
    return ones(query).tril_()


def written_by_an_index(query: torch.Tensor) -> torch.Tensor:
    mask = ones(query)
    mask[:, 5:] = False
    return mask


def written_through_a_view(query: torch.Tensor) -> torch.Tensor:
    mask = ones(query)
    mask[:, 5:].fill_(False)
    return mask


def written_through_data(query: torch.Tensor) -> torch.Tensor:
    mask = ones(query)
    mask.data.tril_()
    return mask


def written_as_out(query: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(SIZE, SIZE)
    torch.mul(lowest_number(query), 1.0, out=mask)
    return mask


def narrowed(query: torch.Tensor) -> torch.Tensor:
    return lower(query).clone().triu_(-3)


def copied_from_the_batch(query: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(SIZE, SIZE)
    return mask.copy_(query[0, 0, :, :1])


def small_penalty(query: torch.Tensor) -> torch.Tensor:
    return torch.full((SIZE, SIZE), -1e4, device=query.device).triu(1)


def dropped_in(mask: Mask, key_size: int = SIZE) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The number of masks dropped from two layers of attention, and the values with and without that."""
    counts: list[int] = []

    def backend(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        counts.append(drop_constant_masks(module.graph))
        module.recompile()
        return module

    def attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        made = mask(query)
        for _ in range(2):
            query = scaled_dot_product_attention(query, key, key, made)
        return query

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, size, 4, generator=generator) for size in (SIZE, key_size))
    compiled = torch.compile(attend, backend=backend, dynamic=False)
    value = compiled(query, key)
    return sum(counts), value, attend(query, key)


@pytest.mark.parametrize("mask", [lower, by_positions, lowest_number, minus_infinity, all_positions, zeros])
def test_constant_masks_are_dropped_with_the_same_result(mask: Mask) -> None:
    dropped, value, expected = dropped_in(mask)
    assert dropped == 2
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(
    "mask",
    [
        window, bias, padding, small_penalty, written_by_a_method, written_by_an_index, written_through_a_view,
        written_through_data, written_as_out, narrowed, copied_from_the_batch,
    ],
)  # fmt: skip
def test_other_masks_are_kept(mask: Mask) -> None:
    dropped, value, expected = dropped_in(mask)
    assert dropped == 0
    assert torch.equal(value, expected)


def by_a_method(query: torch.Tensor) -> torch.Tensor:
    return lower(query) | (torch.empty(1).uniform_() < 2)


def by_a_function(query: torch.Tensor) -> torch.Tensor:
    return lower(query) | (torch.rand(1) < 2)


def by_dropout(query: torch.Tensor) -> torch.Tensor:
    return lower(query) | (dropout(torch.ones(1), 0.5) >= 0)


@pytest.mark.parametrize("mask", [by_a_method, by_a_function, by_dropout])
def test_random_masks_are_kept(mask: Mask) -> None:
    assert dropped_in(mask)[0] == 0


def test_a_mask_that_is_written_to_between_two_layers_is_kept() -> None:
    def attend(query: torch.Tensor) -> torch.Tensor:
        mask = lower(query)
        first = scaled_dot_product_attention(query, query, query, mask)
        mask.fill_(True)
        return scaled_dot_product_attention(first, first, first, mask)

    query = torch.randn(2, 3, SIZE, 4, generator=torch.Generator().manual_seed(0))
    assert compared(attend, query) == 0


def test_what_else_the_graph_writes_to_is_still_written_to() -> None:
    seen = torch.zeros(())

    def attend(query: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        found = scaled_dot_product_attention(query, query, query, lower(query)) + 0
        found[:, 0].zero_()
        return found

    query = torch.randn(2, 3, SIZE, 4, generator=torch.Generator().manual_seed(0))
    assert compared(attend, query) == 1
    assert seen == 2  # once compiled, once eagerly


def compared(attend: Callable[[torch.Tensor], torch.Tensor], query: torch.Tensor) -> int:
    """The number of masks dropped from a function that gives the same value with and without that."""
    counts: list[int] = []

    def backend(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        counts.append(drop_constant_masks(module.graph))
        module.recompile()
        return module

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, dynamic=False)(query)
    torch.testing.assert_close(compiled, attend(query))
    return sum(counts)


def test_a_mask_of_more_samples_than_the_query_is_kept() -> None:
    def of_three(query: torch.Tensor) -> torch.Tensor:
        return torch.ones(3, 1, SIZE, SIZE, dtype=torch.bool)

    with pytest.raises(RuntimeError):
        dropped_in(of_three)


def test_a_mask_for_more_keys_than_queries_is_kept() -> None:
    def with_more_keys(query: torch.Tensor) -> torch.Tensor:
        return torch.ones(SIZE, SIZE + 2, dtype=torch.bool).tril()

    assert dropped_in(with_more_keys, key_size=SIZE + 2)[0] == 0


def test_a_full_mask_for_more_keys_than_queries_is_dropped() -> None:
    def all_keys(query: torch.Tensor) -> torch.Tensor:
        return torch.ones(SIZE, SIZE + 2, dtype=torch.bool, device=query.device)

    dropped, value, expected = dropped_in(all_keys, key_size=SIZE + 2)
    assert dropped == 2
    torch.testing.assert_close(value, expected)


def test_masks_of_transformers_models_are_dropped() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": SIZE}
    ends = {"bos_token_id": 1, "eos_token_id": 1, "use_cache": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).eval()
    tokens = torch.arange(2 * SIZE).reshape(2, SIZE) % 11
    masks: list[object] = []

    def backend(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        drop_constant_masks(module.graph)
        module.recompile()
        masks.extend(n.kwargs["attn_mask"] for n in module.graph.nodes if "scaled_dot_product" in str(n.target))
        return module

    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: model(input_ids=ids).logits, backend=backend, dynamic=False)
    torch.testing.assert_close(compiled(tokens), model(input_ids=tokens).logits)
    assert masks == [None, None]
