import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


def get_dataset():
    points = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) > 1.2).long())


set_seed(0)
accelerator = Accelerator(cpu=not torch.cuda.is_available())
train_set, val_set = random_split(get_dataset(), [0.9, 0.1], torch.Generator().manual_seed(0))
train_loader, val_loader = DataLoader(train_set, 32, shuffle=True), DataLoader(val_set, 32)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

for epoch in range(5):
    model.train()
    for x, y in train_loader:
        with accelerator.autocast():
            loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    correct = seen = 0
    with torch.no_grad():
        for x, y in val_loader:
            predicted, target = accelerator.gather_for_metrics((model(x).argmax(dim=1), y))
            correct, seen = correct + (predicted == target).sum().item(), seen + len(target)
    accelerator.print(f"epoch {epoch + 1}  loss {loss.item():.4f}  accuracy {correct / seen:.4f}")
    accelerator.save_state("checkpoint")

accelerator.print(f"accuracy {correct / seen:.4f}")
accelerator.end_training()
