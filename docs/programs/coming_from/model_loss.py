import torch
from transformers import BertConfig, BertForSequenceClassification

from paceline import Trainer


class Sequences(torch.utils.data.Dataset):
    """Sequences of eight tokens; the label is 1 if token 7 is among them."""

    def __init__(self, size, seed):
        self.tokens = torch.randint(12, (size, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": (self.tokens[index] == 7).any().long()}


def get_model():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=12, num_labels=2, **sizes))


result = Trainer(
    model_fn=get_model,
    dataset_fn=lambda: Sequences(2000, seed=0),
    val_dataset_fn=lambda: Sequences(200, seed=1),
    loss_fn="model",
    metrics=["accuracy"],
    optimizer={"name": "adamw", "lr": 3e-3, "weight_decay": 0.0},
    schedule={"name": "linear", "warmup_steps": 10},
    clip_norm=1.0,
    batch_size=32,
    lanes=2,
    num_epochs=4,
    procs=2,
).start()
result.load_model().save_pretrained("model")
print(f"accuracy {result.metrics['accuracy']:.4f}")
