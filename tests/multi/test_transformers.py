"""Models of transformers with their own loss, and adapters of peft, without a wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faults import saved_steps
from torch.utils.data import Dataset

from paceline import Sum, Trainer, load
from paceline.errors import ConfigError

transformers = pytest.importorskip("transformers")


class Tokens(Dataset[Any]):
    """Words, and a label that depends on the first one."""

    def __init__(self, size: int = 40) -> None:
        self.ids = torch.randint(0, 30, (size, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": (self.ids[index, 0] > 15).long()}


def few() -> Tokens:
    return Tokens(21)


def bert() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=30, num_labels=2, **sizes))


def adapted() -> Any:
    import peft

    adapter = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    return peft.get_peft_model(bert(), adapter)


def right(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output.argmax(1) == target).sum(), len(target)


class Right:
    """The same with state, as the metrics of torchmetrics."""

    def reset(self) -> None:
        self.right = self.seen = 0

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.right, self.seen = self.right + int(right(output, target)[0]), self.seen + len(target)

    def compute(self) -> float:
        return self.right / self.seen

    __call__ = update


def start(**keys: Any) -> Any:
    defaults: dict[str, Any] = {
        "model_fn": bert, "dataset_fn": Tokens, "val_dataset_fn": few, "loss_fn": "model",
        "batch_size": 4, "lanes": 2, "num_epochs": 2, "threads": 1, "device": "cpu", "run_dir": "run",
    }  # fmt: skip
    return Trainer(**{**defaults, **keys}).start()


def test_a_model_with_its_own_loss_needs_no_wrapper() -> None:
    metrics = {"function": right, "stateful": Right()}
    one, two = (start(metrics=metrics, procs=procs, run_dir=str(procs)) for procs in (1, 2))
    assert one.weights_sha256 == two.weights_sha256
    assert one.history == two.history
    assert one.metrics["function"] == one.metrics["stateful"]
    assert two.evaluate(procs=1) == two.metrics
    logits, labels = two.predict(procs=2), torch.tensor([sample["labels"] for sample in Tokens(21)])
    assert logits.shape == (21, 2)
    assert (logits.argmax(1) == labels).double().mean().item() == two.metrics["function"]


def test_an_adapter_is_trained_resumed_and_exported_without_its_base() -> None:
    peft = pytest.importorskip("peft")
    whole = start(model_fn=adapted, procs=2, checkpoint={"every_steps": 3, "keep": 10})
    step = saved_steps()[1]
    resumed = start(model_fn=adapted, procs=1, resume=f"run/checkpoints/step-{step:08d}", run_dir="other")
    assert resumed.weights_sha256 == whole.weights_sha256
    load("run").export("hf", "out")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in Path("out").iterdir()}
    assert Path("out/adapter_model.safetensors").stat().st_size < 4_000
    loaded = peft.PeftModel.from_pretrained(whole.load_model().unload(), "out").eval()
    ids = Tokens(5).ids
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, whole.load_model()(ids).logits)


class Text(Tokens):
    """Words, whose labels are the words themselves."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2))


def next_right(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    return Sum((logits[:, :-1].argmax(-1) == labels[:, 1:]).sum(), (labels[:, 1:] != -100).sum())


def test_accuracy_of_a_causal_model_must_be_shifted_by_the_user() -> None:
    keys: dict[str, Any] = {"model_fn": gpt2, "dataset_fn": Text, "loss_fn": "model", "batch_size": 5, "threads": 1}
    with pytest.raises(ConfigError, match=r"metrics=accuracy compares .* the model predicts the next token"):
        Trainer(**keys, metrics=["accuracy"], run_dir="refused").start()
    result = Trainer(**keys, metrics={"accuracy": next_right}, run_dir="run").start()
    assert 0 <= result.metrics["accuracy"] <= 1
