"""Exports of a finished run; nothing is trained, no rank is started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import safetensors.torch
import torch
import yaml
from torch import nn

import paceline
from paceline import cli
from paceline.checkpoint.weights import save_weights
from paceline.cli.arguments import find_config
from paceline.config import build, read_yaml
from paceline.engine.digest import sha256_of
from paceline.engine.ema import Ema
from paceline.engine.replica import make_model
from paceline.errors import ConfigError, DataError, MissingExtra, PacelineError
from paceline.tools.export.card import loading_weights
from paceline.tools.export.task import ExportTask
from paceline.worker.result import write_result
from support.runs import create_run

LAB = '''
import json
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset

def get_model(width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.BatchNorm1d(width))

class Fixed(nn.Module):
    """Has a fixed batch size when it is traced."""
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 3)
    def forward(self, pixels):
        return self.layer(pixels.reshape(8, 12)) if len(pixels) == 8 else self.layer(pixels.flatten(1))

class Forgetful(nn.Module):
    """Has random numbers that are not saved with its weights."""
    def __init__(self):
        super().__init__()
        self.register_buffer("directions", torch.randn(12, 12), persistent=False)
        self.layer = nn.Linear(12, 3)
    def forward(self, pixels):
        return self.layer((pixels.flatten(1) @ self.directions).cos())

class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 3)
    def forward(self, pixels):
        return self.layer(pixels.flatten(1)) * (2.0 if pixels.sum().item() > 0 else 1.0)

class Named(nn.Module):
    """Takes a dict and returns one."""
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, ids, mask=None):
        scores = self.layer(ids) * mask[:, None]
        return {"logits": scores, "best": scores.argmax(1)}

class Hub(nn.Module):
    """Has the methods and the config of models of Hugging Face."""
    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Linear(12, width)
        self.config = type("Config", (), {"id2label": {n: f"LABEL_{n}" for n in range(width)}, "label2id": {}})()
    def forward(self, pixels):
        return self.layer(pixels.flatten(1))
    def save_pretrained(self, folder):
        torch.save(self.state_dict(), Path(folder) / "model.bin")
        (Path(folder) / "config.json").write_text(json.dumps({"id2label": self.config.id2label}))
    @classmethod
    def from_pretrained(cls, folder):
        model = cls()
        model.load_state_dict(torch.load(Path(folder) / "model.bin"))
        return model

class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Hub()
    def forward(self, pixels):
        return self.model(pixels) * 2

class Tied(nn.Module):
    """Has a tensor with two names."""
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
    def forward(self, pixels):
        return self.second(self.first(pixels.flatten(1)))

class Tokenizer:
    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")

class Images(TensorDataset):
    classes = ["cat", "dog", "owl"]
    tokenizer = Tokenizer()

def get_images():
    pixels = torch.arange(20 * 12, dtype=torch.uint8).reshape(20, 3, 2, 2)
    return Images(pixels, torch.arange(20) % 3)

def get_floats():
    return [(torch.arange(12.0) + n, n % 3) for n in range(5)]

def get_table(table):
    return [(torch.full((12,), float(x)), 0) for x in table["x"]]

def get_named():
    return [{"mask": torch.tensor(1.0 + n), "ids": torch.arange(4.0) - n, "labels": n} for n in range(20)]

def get_answered():
    return [{**sample, "answer": sample.pop("labels")} for sample in get_named()]

def step(model, batch):
    answer = batch.pop("answer")
    return nn.functional.cross_entropy(model(**batch)["logits"], answer)
'''
KEYS = {"loss_fn": "cross_entropy", "dataset_fn": "pl_export:get_floats"}
NORMALIZE = {"augment": {"normalize": {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}, "flip": "random"}}
FACTS = {"metrics": {"val_loss": 0.25}, "step": 9, "epoch": 1, "world_size": 1, "lanes": 2, "optimizer_sha256": None}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Any]:
    """Creates the folder of a finished run with random weights, and loads it."""
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "pl_export.py").write_text(LAB)

    def make(model: str = "get_model", *, has_average: bool = False, **keys: Any) -> Any:
        raw = {**KEYS, "model_fn": f"pl_export:{model}", "run_dir": tmp_path / "run", **keys}
        config = build(raw, folder=lab)
        folder, trained = create_run(config), config.function("model_fn")(**config.model_args)
        for buffer in trained.buffers():
            if buffer.is_floating_point():
                nn.init.uniform_(buffer, 1.0, 2.0)
        ema = Ema(trained, 0.9) if has_average else None
        for tensor in ema.averages().values() if ema is not None else ():
            nn.init.constant_(tensor, 0.5)
        write_result(folder, trained, ema, None, **FACTS, history=[], seconds=1.0, samples=8)
        return paceline.load(folder.path)

    return make


def in_fresh_process(code: str, folder: Path) -> Any:
    """The JSON that code prints in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def images() -> torch.Tensor:
    return torch.arange(12 * 5, dtype=torch.uint8).reshape(5, 3, 2, 2)


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(NORMALIZE["augment"]["normalize"][key]).reshape(3, 1, 1) for key in ("mean", "std"))
    return (pixels / 255 - mean) / std


# --- formats --------------------------------------------------------------------------------------------------


def test_safetensors_hold_the_average_of_the_weights_and_the_card_describes_the_run(
    make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(has_average=True, model_args={"width": 4}, name="tiny")
    folder = run.export("safetensors", tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.yaml", "weights.safetensors"]
    weights = safetensors.torch.load_file(folder / "weights.safetensors")
    assert weights["1.weight"].unique().tolist() == [0.5]
    assert yaml.safe_load((folder / "config.yaml").read_text())["name"] == "tiny"
    card = (folder / "README.md").read_text()
    for part in (
        "# tiny", "step 9 (last), the average of the weights (ema)", "| epochs | 1 |", "| val_loss | 0.25 |",
        sha256_of(run.model.state_dict()), f"torch {torch.__version__}", "batches of 8, 3, 1 samples",
    ):  # fmt: skip
        assert part in card
    names: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    exec(card.split("```")[1].removeprefix("python"), names)  # the code on the card loads the model
    assert sha256_of(names["model"].state_dict()) == sha256_of(run.model.state_dict())


def test_the_code_on_the_card_loads_tied_weights(make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("Tied")
    folder = run.export("safetensors", tmp_path / "out")
    assert len(safetensors.torch.load_file(folder / "weights.safetensors")) == 3
    names: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    exec((folder / "README.md").read_text().split("```")[1].removeprefix("python"), names)
    assert sha256_of(names["model"].state_dict()) == sha256_of(run.model.state_dict())


def test_samples_are_of_the_given_file_else_of_the_validation_data_else_of_the_data(make_run, tmp_path: Path) -> None:
    paths = {}
    for name, values in {"df": [1], "val": [2], "given": [3, 4]}.items():
        paths[name] = tmp_path / f"{name}.csv"
        pd.DataFrame({"x": values}).to_csv(paths[name])
    run = make_run(dataset_fn="pl_export:get_table", df=paths["df"], val_df=paths["val"])

    dataset_fn = run.config.dataset_fn

    def first_values(data: Path | None) -> list[float]:
        inputs, _ = ExportTask(run, tmp_path, data, on_progress=print).batch
        return inputs[:, 0].tolist()

    assert first_values(paths["given"]) == [3, 4] * 4
    assert first_values(None) == [2] * 8
    calls = []
    run.config.dataset_fn, run.config.val_dataset_fn = calls.append, lambda table: [(torch.zeros(12), 0)]
    assert first_values(None) == [0] * 8
    assert len(calls) == 1  # as in a run: val_dataset_fn may use what dataset_fn has set
    run.config.dataset_fn, run.config.val_dataset_fn = dataset_fn, None
    run.config.val_df = None
    assert first_values(None) == [1] * 8
    run.config.df, run.config.dataset_fn = None, lambda: {1, 2}
    with pytest.raises(DataError, match="dataset_fn returned a set, whose samples have no index"):
        first_values(None)
    run.config.dataset_fn = list
    with pytest.raises(DataError, match="dataset_fn returned an empty data set"):
        first_values(None)


def test_weights_are_exported_without_data_and_the_card_notes_it(make_run, tmp_path: Path) -> None:
    run = make_run(dataset_fn="pl_export:get_table", df=pd.DataFrame({"x": [1]}))
    card = (run.export("safetensors", tmp_path / "out") / "README.md").read_text()
    assert "all weights are bitwise identical" in card
    assert "Outputs were not compared: df=<DataFrame> was given in memory" in card


def test_a_torch_program_normalises_images_itself_and_takes_any_batch_in_a_fresh_process(
    make_run, tmp_path: Path
) -> None:
    run = make_run(dataset_fn="pl_export:get_images", **NORMALIZE)
    folder = run.export("torch", tmp_path / "out")
    code = """if True:
        import json, torch, warnings
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch 2.11, of its own archive
        model = torch.export.load("model.pt2").module()
        pixels = torch.arange(60, dtype=torch.uint8).reshape(5, 3, 2, 2)
        print(json.dumps([model(pixels).tolist(), model(pixels[:1]).tolist()]))
    """
    several, one = map(torch.tensor, in_fresh_process(code, folder))
    expected = run.model(normalized(images())).detach()
    torch.testing.assert_close(several, expected)
    torch.testing.assert_close(one, expected[:1])
    card = (folder / "README.md").read_text()
    assert "Input `input`: uint8, shape (batch, 3, 2, 2)." in card
    assert "The model normalises images itself" in card


def test_a_model_with_a_fixed_batch_size_is_exported_with_it(make_run, tmp_path: Path) -> None:
    run = make_run("Fixed")
    folder = run.export("torch", tmp_path / "out")
    card = (folder / "README.md").read_text()
    assert "Input `pixels`: float32, shape (8, 12)." in card
    assert "The batch size must be 8" in card
    assert torch.export.load(folder / "model.pt2").module()(torch.ones(8, 12)).shape == (8, 3)


def test_onnx_names_inputs_and_outputs_and_takes_any_batch(make_run, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    run = make_run("Named", dataset_fn="pl_export:get_named")
    folder = run.export("onnx", tmp_path / "out")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert {each.name: each.shape for each in session.get_inputs()} == {"mask": ["batch"], "ids": ["batch", 4]}
    ids, mask = torch.randn(5, 4), torch.rand(5)
    logits, best = session.run(["logits", "best"], {"ids": ids.numpy(), "mask": mask.numpy()})
    with torch.no_grad():
        expected = run.model(ids=ids, mask=mask)
    torch.testing.assert_close(torch.from_numpy(logits), expected["logits"])
    assert best.tolist() == expected["best"].tolist()


def test_hf_is_what_save_pretrained_writes_with_labels_and_tokenizer(make_run, tmp_path: Path) -> None:
    run = make_run("Around", dataset_fn="pl_export:get_images", **NORMALIZE)
    folder = run.export("hf", tmp_path / "out")
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "config.json", "config.yaml", "model.bin", "tokenizer.json"
    }  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "cat", "1": "dog", "2": "owl"}
    card = (folder / "README.md").read_text()
    assert 'from pl_export import Hub\nmodel = Hub.from_pretrained(".")' in card
    assert "Normalise images first" in card
    assert "the attribute `model`" in card


def test_a_model_of_transformers_is_loaded_by_from_pretrained(make_run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "lab" / "pl_bert.py").write_text(
        "import torch\nfrom transformers import BertConfig, BertForSequenceClassification\n"
        "def get_model():\n"
        "    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)\n"
        "    return BertForSequenceClassification(BertConfig(vocab_size=20, num_labels=3, **sizes))\n"
        "def get_dataset():\n"
        "    return [{'input_ids': torch.arange(6) + n, 'labels': n % 3} for n in range(10)]\n"
    )
    run = make_run(model_fn="pl_bert:get_model", dataset_fn="pl_bert:get_dataset")
    folder = run.export("hf", tmp_path / "out")
    loaded = transformers.BertForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        # Not to the last bit: transformers maps weights from their file, where some kernels round otherwise.
        torch.testing.assert_close(loaded(ids).logits, run.model(ids).logits)
    assert sha256_of(loaded.state_dict()) == sha256_of(run.model.state_dict())
    assert "from transformers import BertForSequenceClassification" in (folder / "README.md").read_text()


# --- errors leave no files -------------------------------------------------------------------------------------


def test_a_model_with_state_outside_its_weights_is_not_exported_as_safetensors(make_run, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="the outputs of the exported model differ from those of the trained one"):
        make_run("Forgetful").export("safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_weights_of_a_recipe_are_loaded_by_the_code_on_their_card(tmp_path: Path) -> None:
    path = find_config("digits")
    config = build(read_yaml(path), folder=path.parent)
    save_weights(make_model(config), tmp_path / "weights.safetensors")
    code = f"{loading_weights(config, is_tied=False)}\nprint(type(model).__name__, model.training)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "Sequential False\n"


@pytest.mark.parametrize("format", ["safetensors", "torch", "hf"])
def test_a_difference_is_an_error_and_leaves_nothing(make_run, tmp_path: Path, monkeypatch, format: str) -> None:
    run = make_run("Hub")
    expected = ExportTask.expected
    monkeypatch.setattr(ExportTask, "expected", lambda task, batch: expected(task, batch) * 1.001)
    with pytest.raises(PacelineError, match="differ from those of the trained one, for a batch of 8 samples"):
        run.export(format, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lab", "run"]


def test_existing_files_are_kept_and_those_of_a_killed_export_are_removed(make_run, tmp_path: Path) -> None:
    run, to = make_run(), tmp_path / "out"
    to.mkdir()
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "half").touch()
    run.export("safetensors", to)
    assert not (to / "half").exists()
    with pytest.raises(ConfigError, match="out already exists and is not an empty folder; choose another name"):
        run.export("safetensors", to)
    assert (to / "weights.safetensors").exists()


def test_a_model_that_cannot_be_exported_is_an_error_of_one_sentence(make_run, tmp_path: Path, hide_package) -> None:
    run, to = make_run("Untraceable"), tmp_path / "out"
    with pytest.raises(PacelineError, match=r"torch\.export cannot trace this model: .*; use format safetensors$"):
        run.export("torch", to)
    with pytest.raises(ConfigError, match=r"format=hf needs a model with save_pretrained.*returned a Untraceable"):
        run.export("hf", to)
    with pytest.raises(ConfigError, match="format=keras is unknown; use safetensors, torch, onnx, hf"):
        run.export("keras", to)
    hide_package("onnx")
    with pytest.raises(MissingExtra, match=r"format=onnx needs onnx; run: pip install 'paceline\[onnx\]'"):
        run.export("onnx", to)
    assert not to.exists()


def test_the_command_exports_a_run_and_prints_which_weights(make_run, tmp_path: Path, capsys) -> None:
    run = make_run()
    words = ["export", str(run.run_dir), "--format", "safetensors", "--to", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=r"gone\.csv does not exist"):
        cli.app([*words, "--data", "gone.csv"], standalone_mode=False)
    cli.app([*words, "--checkpoint", "last"], standalone_mode=False)
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{tmp_path / 'out'}: safetensors, weights: step 9 (last); ")
    assert "comparing with the trained model …" in printed.err


def test_weights_of_a_model_that_only_a_step_function_can_call_are_exported(make_run, tmp_path: Path) -> None:
    run = make_run("Named", loss_fn=None, step_fn="pl_export:step", dataset_fn="pl_export:get_answered")
    run.export("safetensors", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Outputs were not compared: only step_fn defines how the model is called." in card
    with pytest.raises(PacelineError, match=r"unexpected keyword argument 'answer'; use format safetensors"):
        run.export("torch", tmp_path / "traced")


def test_a_model_that_does_not_accept_the_samples_is_an_error(make_run, tmp_path: Path) -> None:
    run = make_run("Named")
    with pytest.raises(PacelineError, match=r"the trained model cannot be called with samples of the data: .+"):
        run.export("torch", tmp_path / "out")
