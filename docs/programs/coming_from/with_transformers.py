import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


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


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(axis=1) == prediction.label_ids).mean()}


arguments = TrainingArguments(
    output_dir="output",
    learning_rate=3e-3,
    lr_scheduler_type="linear",
    warmup_steps=10,
    per_device_train_batch_size=32,
    num_train_epochs=4,
    max_grad_norm=1.0,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=10,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model_init=get_model,
    args=arguments,
    train_dataset=Sequences(2000, seed=0),
    eval_dataset=Sequences(200, seed=1),
    compute_metrics=accuracy,
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_model("model")
if trainer.is_world_process_zero():
    print(f"accuracy {metrics['eval_accuracy']:.4f}")
