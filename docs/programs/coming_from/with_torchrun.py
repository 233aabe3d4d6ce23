import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def get_dataset():
    points = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) > 1.2).long())


def accuracy_of(model, loader, device):
    counts = torch.zeros(2, device=device)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            counts += torch.stack([(model(x).argmax(dim=1) == y).sum(), torch.tensor(len(y), device=device)])
    dist.all_reduce(counts)
    return counts[0] / counts[1]


def main(num_epochs=5, checkpoint=Path("checkpoint.pt")):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    train_set, val_set = random_split(get_dataset(), [0.9, 0.1], torch.Generator().manual_seed(0))
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 32, sampler=train_sampler)
    val_loader = DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first_epoch = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"]

    for epoch in range(first_epoch, num_epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        accuracy = accuracy_of(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch + 1}  loss {loss.item():.4f}  accuracy {accuracy:.4f}")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, checkpoint)

    accuracy = accuracy_of(model, val_loader, device)
    if rank == 0:
        print(f"accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
