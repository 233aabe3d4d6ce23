"""The models and data of `large_models.py`: GPT-2, ResNet-50 and ViT-B/16 of transformers, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from paceline import linear_cross_entropy

Batch = tuple[torch.Tensor, torch.Tensor]
FILES = 512  # different images on the disk


class Logits(nn.Module):
    """A model of transformers with a tensor as input and output. Images are bytes."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32, memory_format=torch.channels_last) / 255 if x.ndim == 4 else x
        logits: torch.Tensor = self.model(x, **self.options).logits
        return logits


class Hidden(nn.Module):
    """GPT-2 without its last layer; returns the weight of that layer too, for a loss that needs no logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Batch:
        return self.model.transformer(x, use_cache=False).last_hidden_state, self.model.lm_head.weight


def of_logits(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy, of images or of tokens."""
    return cross_entropy(logits.flatten(0, -2), target.flatten())


def of_hidden(output: Batch, target: torch.Tensor) -> torch.Tensor:
    """The same without the logits."""
    return linear_cross_entropy(*output, target)


class Gpt2:
    """GPT-2 124 M of transformers as it is, with its mask and its vocabulary, or a tiny one."""

    unit = "tokens"

    def __init__(self, tiny: bool, batch: int | None) -> None:
        self.layers, self.width, self.length, self.classes = (2, 64, 32, 257) if tiny else (12, 768, 1024, 50_257)
        self.batch, self.units = batch or (2 if tiny else 32), self.length
        self.title = f"GPT-2, {self.layers} layers × {self.width}, batch {self.batch} × {self.length}"

    def model(self, has_logits: bool = True) -> nn.Module:
        """The model; without logits it returns the last hidden states and the weight of the last layer."""
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"n_layer": self.layers, "n_head": self.width // 64, "n_embd": self.width, "n_positions": self.length}
        ends = {"bos_token_id": self.classes - 1, "eos_token_id": self.classes - 1}
        made = GPT2LMHeadModel(GPT2Config(**sizes, **ends, vocab_size=self.classes))
        return Logits(made, use_cache=False) if has_logits else Hidden(made)

    def in_memory(self, samples: int) -> TensorDataset:
        tokens = torch.randint(self.classes, (samples, self.length + 1), generator=torch.Generator().manual_seed(0))
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def on_disk(self, folder: Path, samples: int) -> Dataset[Batch]:
        """A data set that reads tokens from a memory map."""
        tokens = np.random.default_rng(0).integers(self.classes, size=samples * self.length + 1, dtype=np.uint16)
        tokens.tofile(folder / "tokens.bin")
        return MappedTokens(folder / "tokens.bin", samples, self.length)


class MappedTokens(Dataset[Batch]):
    """Sequences of a file of 16-bit tokens, and the tokens that follow each."""

    def __init__(self, path: Path, samples: int, length: int) -> None:
        self.tokens, self.samples, self.length = np.memmap(path, np.uint16, "r"), samples, length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Batch:
        start = index * self.length
        tokens = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        return tokens[:-1], tokens[1:]


class Images:
    """What the models of images have in common: bytes of 224 × 224 pixels, 1,000 classes."""

    unit, units = "images", 1

    def __init__(self, tiny: bool, batch: int | None) -> None:
        self.is_tiny, self.side, self.batch = tiny, 32 if tiny else 224, batch or (2 if tiny else self.full_batch)
        self.title = f"{self.name}{', tiny' if tiny else ''}, {self.side} × {self.side}, batch {self.batch}"

    name: str
    full_batch: int

    def in_memory(self, samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        some = torch.randint(256, (self.batch, 3, self.side, self.side), dtype=torch.uint8, generator=generator)
        images = some.repeat(-(-samples // self.batch), 1, 1, 1)[:samples]
        return TensorDataset(images, torch.randint(1000, (samples,), generator=generator))

    def on_disk(self, folder: Path, samples: int) -> Dataset[Batch]:
        """A data set that decodes and cuts JPEG files."""
        from PIL import Image

        random = np.random.default_rng(0)
        for number in range(min(FILES, samples)):
            rough = Image.fromarray(random.integers(256, size=(16, 16, 3), dtype=np.uint8))
            rough.resize((self.side + 32, self.side + 32)).save(folder / f"{number}.jpg", quality=90)
        return JpegFiles(folder, samples, self.side)


class JpegFiles(Dataset[Batch]):
    """Squares cut out of the decoded images of a folder, which are repeated if there are fewer than samples."""

    def __init__(self, folder: Path, samples: int, side: int) -> None:
        self.folder, self.samples, self.side = folder, samples, side

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Batch:
        from PIL import Image

        with Image.open(self.folder / f"{index % min(FILES, self.samples)}.jpg") as image:
            pixels = np.array(image.convert("RGB"))
        cut = pixels[16 : 16 + self.side, 16 : 16 + self.side].transpose(2, 0, 1)
        return torch.from_numpy(np.ascontiguousarray(cut)), torch.tensor(index % 1000)


class ResNet50(Images):
    """ResNet-50, or a tiny residual network."""

    name, full_batch = "ResNet-50", 256

    def model(self, has_logits: bool = True) -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        torch.manual_seed(0)
        small = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
        config = ResNetConfig(num_labels=1000, **(small if self.is_tiny else {}))
        return Logits(ResNetForImageClassification(config))


class VitB16(Images):
    """ViT-B/16, or a tiny one."""

    name, full_batch = "ViT-B/16", 256

    def model(self, has_logits: bool = True) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        torch.manual_seed(0)
        small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        config = ViTConfig(num_labels=1000, image_size=self.side, **(small if self.is_tiny else {}))
        return Logits(ViTForImageClassification(config))


WORKLOADS: dict[str, Any] = {"gpt2": Gpt2, "resnet50": ResNet50, "vit": VitB16}
