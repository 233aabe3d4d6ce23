"""Attention masks that a model makes from its sizes alone: causal ones become `is_causal`, full ones no mask.

Models often pass such a mask to torch's attention, as transformers' models do while they are compiled. The fastest
kernels take no mask. A mask that depends on the batch, such as one for padding, is left as it is.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = (scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
MAX_ELEMENTS = 2**28  # a larger mask is not computed
BATCHED = ("torch._functorch", "torch._C._functorch")  # modules of operators of vmap, which depend on a state


Kind = Literal["full", "causal", "other"]


def drop_constant_masks(graph: fx.Graph) -> int:
    """Replace constant masks in a graph of torch's functions, before it is compiled; return how many."""
    kinds: dict[fx.Node, Kind] = {}  # by mask: the layers of a model share one
    dropped = 0
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in ATTENTION:
            continue
        arguments = dict(zip(PARAMETERS, node.args, strict=False)) | node.kwargs
        mask = arguments.get("attn_mask")
        if not isinstance(mask, fx.Node) or arguments.get("is_causal"):
            continue
        if mask not in kinds:
            kinds[mask] = _kind_of(_value_of(mask)) if _is_constant(mask) else "other"
        queries, keys = (_sizes(arguments[name])[-2:-1] for name in ("query", "key"))
        is_square = queries == keys and _sizes(mask)[-2:] == queries + keys
        if kinds[mask] == "full" or (kinds[mask] == "causal" and is_square):
            node.args, node.kwargs = (), arguments | {"attn_mask": None, "is_causal": kinds[mask] == "causal"}
            dropped += 1
    if dropped:
        graph.eliminate_dead_code()
    return dropped


def _sizes(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _is_constant(node: fx.Node) -> bool:
    """Whether the value follows from the graph alone, by ordinary operators."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.numel() > MAX_ELEMENTS:
        return False
    return all(
        each.op in ("call_function", "call_method")
        and not getattr(each.target, "__module__", "").startswith(BATCHED)
        and not each.is_impure()
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


def _value_of(node: fx.Node) -> torch.Tensor:
    """The value of a constant node."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for each in _ancestors(node):
        copies[each] = copy.node_copy(each, copies.__getitem__)
    copy.output(copies[node])
    with torch.no_grad():
        value: torch.Tensor = fx.GraphModule({}, copy)()
    return value


def _kind_of(mask: torch.Tensor) -> Kind:
    """Whether a mask lets each position attend to all positions, to itself and those before it, or to others."""
    if mask.dtype == torch.bool:
        allowed, denied = mask, ~mask
    else:  # it is added to the scores; the lowest number is as good as minus infinity
        allowed, denied = mask == 0, mask <= torch.finfo(mask.dtype).min
    if bool(allowed.all()):
        return "full"
    lower = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return "causal" if bool(torch.where(lower, allowed, denied).all()) else "other"
