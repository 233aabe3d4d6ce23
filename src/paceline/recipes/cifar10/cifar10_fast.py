"""CIFAR-10 in the shortest time on one GPU: a small convolutional network, Muon, half precision.

On one H200: 94.15 % accuracy (mean of ten seeds), 1.4 s of steps, 11 to 14 s for the command (docs/benchmarks.md).
The method is that of K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024: a frozen first layer that
decorrelates pixels, convolutions that start as the identity, flips that alternate, Muon, and an evaluation on six views
of each image. Data as for the recipe `cifar10`, in `$PACELINE_HOME/datasets/cifar10`.
"""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import paceline

try:
    from halve import Halve
except ImportError:  # no Triton
    Halve = None

# --- model ----------------------------------------------------------------------------------------------------------

# Neighbouring pixels and colours are strongly correlated. Four patterns of 2 × 2 pixels times three of colour hardly
# are; divided by their standard deviation in the training images, they are white noise.
# VARIANCES has a row for each pattern of pixels and a column for each pattern of colours.
PIXELS = [[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]
COLOURS = [[1, 1, 1], [1, 0, -1], [1, -2, 1]]
VARIANCES = [[10.2, 0.817, 0.186], [0.396, 0.0165, 0.0050], [0.331, 0.0141, 0.0045], [0.0553, 0.0016, 0.0006]]
EPSILON = 5e-4  # limits the amplification of noise


class FastNet(nn.Module):
    """Whitening, three groups of two convolutions, and a linear layer. In evaluation, the mean over six views."""

    def __init__(self, widths=(64, 256, 256), views=True):
        super().__init__()
        self.views = views
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight = nn.Parameter(whitening(), requires_grad=False)
        nn.init.zeros_(self.whiten.bias)
        self.groups = nn.Sequential(*(Group(*pair) for pair in zip((24, *widths), widths, strict=False)))
        self.head = nn.Linear(widths[-1], 10, bias=False)

    def forward(self, images):
        if self.training or not self.views:
            return self.score(images)
        padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
        corners = self.score_both_flips(padded[..., :-2, :-2]) + self.score_both_flips(padded[..., 2:, 2:])
        return (2 * self.score_both_flips(images) + corners) / 8

    def score_both_flips(self, images):
        return self.score(images) + self.score(images.flip(3))

    def score(self, images):
        x = self.groups(F.gelu(self.whiten(images)))
        return self.head(F.max_pool2d(x, x.shape[2:]).flatten(1)) / 9


class Group(nn.Module):
    """Two convolutions, the first of which halves the image."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = convolution(inputs, outputs), convolution(outputs, outputs)
        self.first_norm, self.second_norm = norm(outputs), norm(outputs)

    def forward(self, x):
        x = F.gelu(self.first_norm(halved(self.first(x))))
        return F.gelu(self.second_norm(self.second(x)))


def halved(x):
    """Return the maximum of every 2 × 2 pixels; on a GPU by the kernel in halve.py."""
    return Halve.apply(x) if Halve is not None and x.is_cuda else F.max_pool2d(x, 2)


def whitening():
    """Return the filters of the first layer and their negatives: where GELU suppresses one, the other passes."""
    patterns = torch.einsum("pk,ci->pcik", torch.tensor(PIXELS) / 2, F.normalize(torch.tensor(COLOURS).float()))
    filters = patterns / (torch.tensor(VARIANCES) + EPSILON).sqrt()[:, :, None, None]
    filters = filters.reshape(12, 3, 2, 2)
    return torch.cat([filters, -filters])


def convolution(inputs, outputs):
    """Return a convolution whose first outputs are initialized to equal its inputs."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:inputs])
    return layer


def norm(channels):
    """Return a BatchNorm of which only the bias is trained."""
    layer = nn.BatchNorm2d(channels, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


# --- training -------------------------------------------------------------------------------------------------------


def smoothed_loss(output, target):
    return F.cross_entropy(output.float(), target, label_smoothing=0.2)


def get_optimizer(model, lr=0.24, bias_lr=100.0, head_lr=1.6, decay=4e-3):
    """Return Muon for the filters, SGD for the rest. Biases of BatchNorm have tiny gradients and need a large rate."""
    filters = [p for p in model.groups.parameters() if p.requires_grad and p.dim() == 4]
    biases = [model.whiten.bias, *(p for p in model.groups.parameters() if p.requires_grad and p.dim() == 1)]
    return paceline.Muon(
        [
            {"params": filters, "lr": lr, "momentum": 0.6, "ns_steps": 3, "keep_norm": True},
            {"params": biases, "use_muon": False, "lr": bias_lr, "weight_decay": decay / bias_lr},
            {"params": [model.head.weight], "use_muon": False, "lr": head_lr, "weight_decay": decay / head_lr},
        ],
        rest={"name": "sgd", "momentum": 0.85},
    )
