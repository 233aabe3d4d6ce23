"""Any step: a detector with a dict of losses, each logged, and an evaluation of its own.

python step_detection.py [PROCESSES]
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import paceline


class Squares(torch.utils.data.Dataset):
    """Images with one bright square; the target is its box, as centre and size between 0 and 1, and its class."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        size = int(torch.randint(3, 8, (1,), generator=generator))
        top, left = torch.randint(0, 16 - size, (2,), generator=generator).tolist()
        image = 0.1 * torch.randn(1, 16, 16, generator=generator)
        image[:, top : top + size, left : left + size] += 1
        box = torch.tensor([left + size / 2, top + size / 2, size, size]) / 16
        return {"image": image, "box": box, "label": torch.tensor(int(size > 5))}


class Detector(nn.Module):
    """Returns its losses in training, and its boxes and labels otherwise, as the detectors of torchvision do."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU())
        self.box, self.label = nn.Linear(64, 4), nn.Linear(64, 2)

    def forward(self, image, box=None, label=None):
        features = self.features(image)
        boxes, labels = self.box(features).sigmoid(), self.label(features)
        if not self.training:
            return boxes, labels
        return {"box": functional.smooth_l1_loss(boxes, box), "label": functional.cross_entropy(labels, label)}


def step(model, batch):
    losses = model(**batch)
    return {"loss": sum(losses.values()), **losses}


def evaluate(model, batch):
    boxes, labels = model(batch["image"])
    right = (labels.argmax(1) == batch["label"]).sum()
    return {
        "distance": (boxes - batch["box"]).abs().mean(),
        "accuracy": paceline.Sum(right, len(labels)),
    }


result = paceline.Trainer(
    name="step-detection",
    model_fn=Detector,
    dataset_fn=Squares,
    step_fn=step,
    evaluate_fn=evaluate,
    predict_fn=lambda model, batch: model(batch["image"])[0],
    optimizer={"name": "adamw", "lr": 3e-3},
    batch_size=16,
    lanes=2,
    num_epochs=3,
    procs=int(sys.argv[1]) if sys.argv[1:] else 2,
).start()
print(f"accuracy {result.metrics['accuracy']:.3f}, boxes of {len(result.predict(procs=1))} images")
print(f"hash {result.weights_sha256}")
