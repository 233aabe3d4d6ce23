"""Your loop: a GAN with two optimizers. Two steps train the critic, the third one trains the generator.

python loop_gan.py [PROCESSES]
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


def train(model, train_loader, val_loader, device, num_epochs, run):
    generator, critic = run.model.generator, run.model.critic
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    run.track(for_generator=for_generator, for_critic=for_critic)
    for _ in run.epochs(num_epochs):
        for (real,) in train_loader:
            fake = generator(torch.randn(len(real), 4, device=device))
            if run.step_number % 3 < 2:  # the same number for all lanes of a step, on all processes
                run.backward((softplus(-critic(real)) + softplus(critic(fake.detach()))).mean())
                run.step(for_critic)
            else:
                run.backward(softplus(-critic(fake)).mean())
                run.step(for_generator)  # updates the generator, and clears its gradients
                for_critic.zero_grad()  # the critic has gradients of this loss as well
            run.log(radius=fake.detach().norm(dim=1).mean())


result = paceline.Trainer(
    name="loop-gan",
    model_fn=Gan,
    dataset_fn=get_dataset,
    train_fn=train,
    batch_size=32,
    lanes=2,
    num_epochs=5,
    val_fraction=0,
    procs=int(sys.argv[1]) if sys.argv[1:] else 2,
).start()
print(f"hash {result.weights_sha256}")
