import torch
from torch.nn.functional import cross_entropy


def train(model, train_loader, val_loader, device, num_epochs, run):
    """Your own training loop. `run` saves, resumes, sums over processes and logs; everything else is plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=run.total_steps)
    run.track(optimizer=optimizer, scheduler=scheduler)  # saved in each checkpoint, restored here when the run resumes
    for _ in run.epochs(num_epochs):  # a resumed run continues at the epoch and batch where it stopped
        model.train()
        for points, labels in train_loader:  # this process's batches, on its device
            with run.autocast():  # in the precision of config.yaml
                loss = cross_entropy(model(points), labels)
            run.backward(loss)
            if run.step(optimizer, clip_norm=1.0):  # True after the last micro-batch (lane) of a step
                scheduler.step()
            run.log(loss=loss)
        correct, seen = count(model, val_loader)
        run.log(accuracy=run.sum(correct) / run.sum(seen))  # over all processes' shares


@torch.no_grad()
def count(model, loader):
    """Return the number of correct samples and of all samples in this process's share."""
    model.eval()
    correct = seen = 0
    for points, labels in loader:
        correct += (model(points).argmax(dim=1) == labels).sum().item()
        seen += len(labels)
    return correct, seen
