"""Attention masks that a model makes from its sizes alone: causal ones become `is_causal`, full ones no mask.

Models often pass such a mask to torch's attention, as transformers' models do while they are compiled. The fastest
kernels take no mask. A mask that depends on the batch, such as one for padding, is left as it is, and so is one that is
random or written to after it was created: the graph does not show in which order its views are read and written.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

ATTENTION = (scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
MAX_ELEMENTS = 2**28  # a larger mask is not computed
BATCHED = ("torch._functorch", "torch._C._functorch")  # modules of operators of vmap, which depend on a state


Kind = Literal["full", "causal", "other"]


def drop_constant_masks(graph: fx.Graph) -> int:
    """Replace constant masks in a graph of torch's functions, before it is compiled; return how many.

    What computes a mask is left in the graph; the compiler removes what is not used.
    """
    kinds: dict[fx.Node, Kind] = {}  # by mask: the layers of a model share one
    written = _written_memory(graph)
    dropped = 0
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in ATTENTION:
            continue
        arguments = dict(zip(PARAMETERS, node.args, strict=False)) | node.kwargs
        mask = arguments.get("attn_mask")
        if not isinstance(mask, fx.Node) or arguments.get("is_causal"):
            continue
        if mask not in kinds:
            kinds[mask] = _kind_of(_value_of(mask)) if _is_constant(mask, written) else "other"
        scores = (*_sizes(arguments["query"])[:-1], *_sizes(arguments["key"])[-2:-1])
        is_square = len(scores) > 1 and scores[-1] == scores[-2] and _sizes(mask)[-2:] == scores[-2:]
        is_possible = kinds[mask] == "full" or (kinds[mask] == "causal" and is_square)
        if is_possible and _fits(_sizes(mask), scores):
            node.args, node.kwargs = (), arguments | {"attn_mask": None, "is_causal": kinds[mask] == "causal"}
            dropped += 1
    return dropped


def _tensor_of(node: fx.Node) -> torch.Tensor | None:
    """The tensor without data that stands for the value of a node."""
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def _sizes(node: Any) -> tuple[Any, ...]:
    value = _tensor_of(node)
    return () if value is None else tuple(value.shape)


def _fits(mask: tuple[Any, ...], scores: tuple[Any, ...]) -> bool:
    """Whether a mask can be expanded to the scores of all positions."""
    pairs = zip(reversed(mask), reversed(scores), strict=False)
    return len(mask) <= len(scores) and all(size in (1, of_scores) for size, of_scores in pairs)


def _memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors have in common if they share memory."""
    return int(tensor.untyped_storage()._cdata)


def _written_memory(graph: fx.Graph) -> set[int]:
    """The memory of all tensors that the graph writes to. Torch counts writes, also to tensors without data."""
    tensors = [tensor for node in graph.nodes if (tensor := _tensor_of(node)) is not None]
    return {_memory_of(tensor) for tensor in tensors if not tensor.is_inference() and tensor._version}


def _is_constant(node: fx.Node, written: set[int]) -> bool:
    """Whether the value follows from the graph alone, by ordinary operators that read only what is never written to."""
    value = _tensor_of(node)
    if value is None or value.numel() > MAX_ELEMENTS:
        return False
    return all(
        each.op in ("call_function", "call_method")
        and not getattr(each.target, "__module__", "").startswith(BATCHED)
        and not each.is_impure()
        and ((tensor := _tensor_of(each)) is None or (not tensor.is_inference() and _memory_of(tensor) not in written))
        for each in _ancestors(node)
    )


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """The node and all nodes on which its value depends, in the order of the graph."""
    found, to_visit = {node}, [node]
    while to_visit:
        new = set(to_visit.pop().all_input_nodes) - found
        found |= new
        to_visit += new
    return [each for each in node.graph.nodes if each in found]


class _Undefined(Exception):
    """An operator gives another value each time."""


class _Repeatable(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises _Undefined for operators that draw random numbers, or leave memory as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operator."""
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.overloadpacket.__name__:
            raise _Undefined
        return func(*args, **(kwargs or {}))


def _value_of(node: fx.Node) -> torch.Tensor | None:
    """The value of a node without inputs; None if it is another one each time."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for each in _ancestors(node):
        copies[each] = copy.node_copy(each, copies.__getitem__)
    copy.output(copies[node])
    try:
        with torch.no_grad(), _Repeatable():  # type: ignore[no-untyped-call]
            value: torch.Tensor = fx.GraphModule({}, copy)()
    except _Undefined:
        return None
    return value


def _kind_of(mask: torch.Tensor | None) -> Kind:
    """Whether a mask lets each position attend to all positions, to itself and those before it, or to others."""
    if mask is None:
        return "other"
    if mask.dtype == torch.bool:
        allowed, denied = mask, ~mask
    else:  # it is added to the scores; the lowest number is as good as minus infinity
        allowed, denied = mask == 0, mask <= torch.finfo(mask.dtype).min
    if bool(allowed.all()):
        return "full"
    lower = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return "causal" if bool(torch.where(lower, allowed, denied).all()) else "other"
