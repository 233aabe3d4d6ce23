import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


def get_dataset():
    points = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) > 1.2).long())


class Circle(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self.model(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        accuracy = (self.model(x).argmax(dim=1) == y).float().mean()
        self.log("accuracy", accuracy, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    lightning.seed_everything(0)
    train_set, val_set = random_split(get_dataset(), [0.9, 0.1], torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        max_epochs=5,
        devices=2,
        strategy="ddp",
        gradient_clip_val=1.0,
        log_every_n_steps=10,
    )
    trainer.fit(Circle(), DataLoader(train_set, 32, shuffle=True), DataLoader(val_set, 32))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")
