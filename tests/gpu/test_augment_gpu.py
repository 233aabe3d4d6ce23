"""Augmentation on a GPU: the bits of the CPU, also when it is replayed as a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from paceline.config import Augmentation
from paceline.data.augment import Augment

SECTION = {
    "normalize": {"mean": [0.5, 0.25, 0.4], "std": [0.2, 0.3, 0.25]},
    "flip": "alternating",
    "translate": 4,
    "cutout": 8,
}


def make_images(samples: int) -> torch.Tensor:
    return torch.randint(0, 256, (samples, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_gpu_gives_the_bits_of_the_cpu(memory_format: torch.memory_format) -> None:
    augment, images = Augment(Augmentation.model_validate(SECTION), 3), make_images(500)
    images = images.contiguous(memory_format=memory_format)
    indices, epoch = torch.arange(1000, 1500), torch.tensor(2)
    out = augment.train(images.cuda(), indices.cuda(), epoch.cuda())
    assert out.is_contiguous(memory_format=memory_format)
    assert torch.equal(out.cpu(), augment.train(images, indices, epoch))
    assert torch.equal(augment.evaluate(images.cuda()).cpu(), augment.evaluate(images))


def test_a_graph_follows_the_indices_and_the_epoch() -> None:
    augment, images = Augment(Augmentation.model_validate(SECTION), 3), make_images(64)
    fixed = images.cuda(), torch.arange(64).cuda(), torch.tensor(0).cuda()
    augment.train(*fixed)  # its constants are on the device from now on
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = augment.train(*fixed)
    for first, epoch in ((0, 0), (100, 0), (100, 7)):
        fixed[1].copy_(torch.arange(first, first + 64))
        fixed[2].fill_(epoch)
        graph.replay()
        assert torch.equal(out.cpu(), augment.train(images, torch.arange(first, first + 64), torch.tensor(epoch)))
