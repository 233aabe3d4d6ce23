"""Your loop: fine-tuning a language model, with two learning rates, a scheduler of torch and a loss per token.

python loop_lm.py [PROCESSES]
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline

SYMBOLS = "0123456789+= "


class Additions(torch.utils.data.Dataset):
    """Lines such as "7+35=42" as numbers; the loss counts the digits of the result only."""

    def __len__(self):
        return 600

    def __getitem__(self, index):
        first, second = index % 25, index // 25
        question, answer = f"{first}+{second}=", f"{first + second}"
        symbols = [SYMBOLS.index(symbol) for symbol in f"{question}{answer}".ljust(9)]
        targets = [-100] * len(question) + [SYMBOLS.index(symbol) for symbol in answer]
        return torch.tensor(symbols[:-1]), torch.tensor((targets + [-100] * 9)[1:9])


class Language(nn.Module):
    """A small transformer that predicts the next symbol."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.places = nn.Embedding(len(SYMBOLS), width), nn.Embedding(8, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, len(SYMBOLS))

    def forward(self, symbols):
        places = torch.arange(symbols.shape[1], device=symbols.device)
        mask = nn.Transformer.generate_square_subsequent_mask(len(places), device=symbols.device)
        return self.head(self.body(self.embed(symbols) + self.places(places), mask, is_causal=True))


def get_model():
    """The model to fine-tune. A real one loads its weights here; its embeddings stay as they are."""
    model = Language()
    model.embed.requires_grad_(False)
    return model


def token_loss(model, symbols, targets):
    """The sum of the loss over the tokens that count, and their number."""
    total = cross_entropy(model(symbols).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def train(model, train_loader, val_loader, device, num_epochs, run):
    head = [parameter for name, parameter in model.named_parameters() if "head" in name]
    body = [p for name, p in model.named_parameters() if "head" not in name and p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": body, "lr": 1e-3}, {"params": head, "lr": 5e-3}], weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.total_steps - 10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [10])
    run.track(optimizer=optimizer, scheduler=scheduler)
    for _ in run.epochs(num_epochs):
        model.train()
        for symbols, targets in train_loader:
            with run.autocast():
                total, count = token_loss(model, symbols, targets)
            run.backward(paceline.Sum(total, count))  # each token has the same weight, in whichever batch it is
            if run.step(optimizer, clip_norm=1.0):
                scheduler.step()
            run.log(perplexity=(total / count).exp())
        model.eval()
        with torch.no_grad():
            losses = [token_loss(model, symbols, targets) for symbols, targets in val_loader]
        total, count = (run.sum(sum(each.item() for each in part)) for part in zip(*losses, strict=True))
        run.log(val_loss=total / count)


result = paceline.Trainer(
    name="loop-lm",
    model_fn=get_model,
    dataset_fn=Additions,
    train_fn=train,
    batch_size=16,
    lanes=2,
    num_epochs=3,
    procs=int(sys.argv[1]) if sys.argv[1:] else 2,
).start()
print(f"hash {result.weights_sha256}")
