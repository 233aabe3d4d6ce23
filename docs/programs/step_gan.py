"""Any step: a GAN with two optimizers as two phases. The generator is trained at each second step.

python step_gan.py [PROCESSES]
"""

import sys

import torch
from torch import nn
from torch.nn.functional import softplus

import paceline


def get_dataset():
    """Points on a circle."""
    angle = 2 * torch.pi * torch.rand(1024, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(torch.stack((angle.cos(), angle.sin()), dim=1))


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))

    def sample(self, like):
        return self.generator(torch.randn(len(like), 4, device=like.device))


def critic_step(model, batch):
    (real,) = batch
    fake = model.sample(real).detach()
    return (softplus(-model.critic(real)) + softplus(model.critic(fake))).mean()


def generator_step(model, batch):
    fake = model.sample(batch[0])
    return {"loss": softplus(-model.critic(fake)).mean(), "radius": fake.norm(dim=1).mean()}


def get_optimizers(model):
    return {
        "critic": torch.optim.Adam(model.critic.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        "generator": torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
    }


result = paceline.Trainer(
    name="step-gan",
    model_fn=Gan,
    dataset_fn=get_dataset,
    step_fn={"critic": critic_step, "generator": paceline.every(2, generator_step)},
    optimizer_fn=get_optimizers,
    batch_size=32,
    lanes=2,
    num_epochs=5,
    val_fraction=0,
    procs=int(sys.argv[1]) if sys.argv[1:] else 2,
).start()
print(f"radius {result.history[-1]['train_generator_radius']:.3f}")
print(f"hash {result.weights_sha256}")
