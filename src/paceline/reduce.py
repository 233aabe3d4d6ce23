"""How gradients are added up across ranks: a communication hook of DDP, which overlaps with the backward pass."""

import torch
import torch.distributed as dist


class SumReduction:
    """Adds the buckets of all ranks; weights are already in the losses, so nothing is divided. All ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.reduced = 0  # gradient elements that have gone through since `start_step`

    def start_step(self) -> None:
        """Begin to count anew."""
        self.reduced = 0


# DDP compares these annotations with the classes themselves, so this module has no postponed annotations.
def reduce_bucket(state: SumReduction, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP calls this for each bucket of gradients as it becomes ready, in the same order on all ranks."""
    buffer = bucket.buffer()
    state.reduced += buffer.numel()
    if state.world_size == 1:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[union-attr, no-any-return]
