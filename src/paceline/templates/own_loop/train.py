import torch
from torch import nn


def train(model, train_loader, val_loader, device, num_epochs):
    """An ordinary loop. The model is on its device and wrapped in DDP; the loaders yield this rank's share."""
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(num_epochs):
        model.train()
        for points, labels in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(model(points.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, val_loader, device)
        print(f"epoch {epoch + 1}: validation accuracy {accuracy:.3f} (this rank's share)")
    return accuracy


@torch.no_grad()
def evaluate(model, val_loader, device):
    model.eval()
    right = total = 0
    for points, labels in val_loader:
        predicted = model(points.to(device)).argmax(dim=1).cpu()
        right += (predicted == labels).sum().item()
        total += len(labels)
    return right / total
