"""A small GPT on plain text: it learns to predict the next byte, and generates text.

Data: A. Karpathy's "tiny Shakespeare", 1.1 MB of plays, `input.txt` in `$PACELINE_HOME/datasets/tinyshakespeare`; or
any text file.

    paceline data get tinyshakespeare
    paceline train lm --procs 2
    paceline train lm dataset_args.path=mine.txt
    python -c 'import paceline; print(paceline.load("runs/lm/DATE-TIME").model.generate("ROMEO:"))'

The defaults suit two CPU cores. On a GPU, use 10.9 million parameters and a longer context:

    paceline train lm model_args='{width: 384, depth: 6, heads: 6, context: 256, dropout: 0.2}' \\
        dataset_args.context=256 optimizer.lr=1e-3 max_steps=5000
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from paceline import datasets, errors

BYTES = 256  # each byte is a token, so no vocabulary has to be built or stored
TRAINING = 0.9  # the fraction of the text for training; the rest is for validation

source = {}  # the options given to get_dataset; get_val_dataset uses them, too


def get_dataset(**options):
    """Return every window of `context` bytes of the training text, and the byte that follows each of them."""
    global source
    source = options
    return windows(**options, is_training=True)


def get_val_dataset():
    """Return the windows of the last tenth of the text, without overlap."""
    return windows(**source, is_training=False)


def windows(path=None, context=64, is_training=True):
    """Return windows of a text as a data set of inputs and targets."""
    path = Path(path or datasets.folder_of("tinyshakespeare") / "input.txt")
    if not path.is_file():
        raise errors.DataError(
            f"{path.resolve()} does not exist; run: paceline data get tinyshakespeare, or give a dataset_args.path"
        )
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    cut = int(len(text) * TRAINING)
    text = text[:cut] if is_training else text[cut:]
    if len(text) <= context:
        raise errors.DataError(f"{path} is too short for windows of {context} bytes; lower dataset_args.context")
    step = 1 if is_training else context
    # Views of the text: a million windows need no additional memory.
    return TensorDataset(text[:-1].unfold(0, context, step), text[1:].unfold(0, context, step))


def loss_fn(scores, following):
    """Return the sum over all bytes and their number, so that every byte has equal weight in batches of any size."""
    loss = functional.cross_entropy(scores.flatten(0, 1), following.flatten().long(), reduction="sum")
    return loss, following.numel()


class Block(nn.Module):
    """Causal self-attention, then a network of two layers at each position."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # queries, keys and values of all heads
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attend(self.attention_norm(x)))
        return x + self.drop(self.mlp(self.mlp_norm(x)))

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (batch, heads, length, width)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Maps bytes to the logits of the following byte, at each position of the text."""

    def __init__(self, width=128, depth=4, heads=4, context=64, dropout=0.0):
        super().__init__()
        self.context = context
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.drop, self.norm = nn.Dropout(dropout), nn.LayerNorm(width)
        self.scores = nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_last = name.endswith(("out.weight", "mlp.2.weight"))  # keeps the sum of residuals small
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if is_last else 0.02)

    def forward(self, text):
        length = text.shape[1]
        if length > self.context:
            raise errors.ConfigError(
                f"dataset_args.context={length} is longer than model_args.context={self.context}; make them equal"
            )
        x = self.bytes(text.long()) + self.places(torch.arange(length, device=text.device))
        return self.scores(self.norm(self.blocks(self.drop(x))))

    @torch.no_grad()
    def generate(self, prompt="\n", length=500, temperature=0.8, seed=0):
        """Return the prompt and `length` more bytes that the model generates; a lower temperature is less random."""
        self.eval()
        device = self.scores.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        text = torch.tensor([list(prompt.encode())], device=device)
        for _ in range(length):
            scores = self(text[:, -self.context :])[:, -1] / temperature
            following = torch.multinomial(scores.softmax(1), 1, generator=generator)
            text = torch.cat([text, following], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")
