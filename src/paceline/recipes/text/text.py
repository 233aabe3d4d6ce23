"""Sentences and their classes: a pretrained encoder of the Hugging Face hub, fine-tuned.

Data: R. Socher et al., "Recursive Deep Models for Semantic Compositionality Over a Sentiment Treebank", 2013, as GLUE's
SST-2 has it: `train.tsv` and `dev.tsv` in `$PACELINE_HOME/datasets/sst2`. Or a table with a column of texts and one of
classes, by name or number.

    pip install 'paceline[hf]'
    paceline model get sentence-transformers/all-MiniLM-L6-v2
    paceline train text --procs 2
    paceline train text dataset_args.model=NAME model_args.model=NAME
    paceline train text df=mails.csv val_dataset_fn=null dataset_args.text=body \\
        dataset_args.classes=[ham,spam] model_args.classes=[ham,spam]
"""

import csv
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from paceline import cached_tensors, datasets, errors, models

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
CLASSES = ("negative", "positive")
PAD_TO = 16  # few lengths, so that steps can be recorded for each; and tensor cores like them
FEW = 4  # a text of fewer words keeps them all

source, has_table = {}, False  # what get_dataset was told; get_dev_dataset does likewise


def get_dataset(df=None, **options):
    """The training sentences, or those of a table."""
    global source, has_table
    source, has_table = options, df is not None
    return Sentences(df, file="train.tsv", **options)


def get_dev_dataset(df=None):
    """The 872 sentences that SST-2 holds out, or those of a table."""
    if has_table and df is None:
        raise errors.DataError(
            "df has no validation data beside it; give val_df, or val_dataset_fn=null to hold some out"
        )
    return Sentences(df, file="dev.tsv", **source)


class Sentences(Dataset):
    """Sentences as tokens; batches are about as long as their longest sentence."""

    def __init__(self, df=None, file="train.tsv", root=None, model=MODEL, classes=CLASSES, max_length=128, **columns):
        self.classes, self.tokenizer, self.max_length = list(map(str, classes)), load_tokenizer(model), max_length
        table = read_tsv(Path(root or datasets.folder_of("sst2"), file)) if df is None else df
        texts, labels = columns_of(table, **columns)
        self.labels = None if labels is None else torch.tensor([self.number_of(label) for label in labels])
        self.tokens, self.ends = tokenized(texts, self.tokenizer, max_length - 1)

    def number_of(self, label):
        """A class by its name or its number."""
        name = str(label)
        if name in self.classes:
            return self.classes.index(name)
        if name.isdecimal() and int(name) < len(self.classes):
            return int(name)
        raise errors.DataError(f"{name} is not one of the classes {self.classes}; name all by dataset_args.classes")

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, index):
        start = self.ends[index - 1] if index else 0
        label = {} if self.labels is None else {"labels": self.labels[index]}
        return {"input_ids": self.tokens[start : self.ends[index]].long(), **label}

    def collate_fn(self, samples):
        """A batch: padded by itself, so the number of processes does not change it."""
        longest = max(len(sample["input_ids"]) for sample in samples)
        # There is always some padding: where there is none, transformers takes another way, with other last bits.
        width = min((longest // PAD_TO + 1) * PAD_TO, self.max_length)
        ids = torch.full((len(samples), width), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(samples):
            ids[row, : len(sample["input_ids"])] = sample["input_ids"]
            mask[row, : len(sample["input_ids"])] = 1
        batch = {"input_ids": ids, "attention_mask": mask}
        return batch if self.labels is None else {**batch, "labels": torch.stack([each["labels"] for each in samples])}


class Classifier(nn.Module):
    """A model of transformers that gives the scores of the classes; while it learns it must do without some words."""

    def __init__(self, model, tokenizer, masked):
        super().__init__()
        self.model, self.mask = model, tokenizer.mask_token_id
        self.masked = masked if self.mask is not None else 0.0
        self.register_buffer("special", torch.tensor(tokenizer.all_special_ids), persistent=False)

    def forward(self, input_ids, attention_mask):
        if self.training and self.masked:
            input_ids = self.with_masks(input_ids)
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits

    def with_masks(self, ids):
        is_word = (ids[..., None] != self.special).all(-1)
        is_drawn = torch.rand(ids.shape, device=ids.device) < self.masked
        return ids.masked_fill(is_word & is_drawn & (is_word.sum(1, keepdim=True) >= FEW), self.mask)


def get_model(model=MODEL, classes=CLASSES, masked=0.1, learns_embeddings=False):
    """The encoder with its pretrained weights and a new last layer.

    What the words mean stays as it was learnt from far more text than this, unless `learns_embeddings`.
    """
    check_alike(model=model, classes=classes)
    transformers = import_transformers()
    transformers.utils.logging.set_verbosity_error()  # that the last layer is new is what we want
    transformers.utils.logging.disable_progress_bar()
    names = dict(enumerate(map(str, classes)))
    encoder = loaded(
        transformers.AutoModelForSequenceClassification, model,
        num_labels=len(names), id2label=names, label2id={name: number for number, name in names.items()},
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    encoder.get_input_embeddings().requires_grad_(learns_embeddings)
    # Autocast chooses shorter formats; the weights are kept in full.
    return Classifier(encoder.float(), load_tokenizer(model), masked)


def check_alike(**given):
    """Refuse a model that was told otherwise than the data; only in ranks, where the data has just been made."""
    if not torch.distributed.is_initialized():
        return
    told = {"model": MODEL, "classes": CLASSES, **source}
    for key, value in given.items():
        if list(value) != list(told[key]):
            raise errors.ConfigError(f"model_args.{key}={value} is not dataset_args.{key}={told[key]}; give both alike")


# --- texts and tokens ---------------------------------------------------------------------------------------------


def read_tsv(path):
    """The columns of a TSV file by name."""
    if not path.is_file():
        raise errors.DataError(
            f"{path.resolve()} does not exist; put train.tsv and dev.tsv of GLUE's SST-2 there, say where they are "
            "(dataset_args.root), or give a table (df=FILE)"
        )
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    return dict(zip(head, zip(*rows, strict=True), strict=True))


def columns_of(table, text="sentence", label="label"):
    """The texts of a table, and its labels if it has any."""
    if text not in table:
        raise errors.DataError(f"the table has no column {text}; name the texts' by dataset_args.text")
    if label not in table:
        print(f"the table has no column {label} (dataset_args.label), so it is good for predictions only", flush=True)
    return [str(each) for each in table[text]], table.get(label)


def tokenized(texts, tokenizer, max_length):
    """The tokens of all texts in a row, and where each text ends: made once, by one process."""

    def make():
        ids, told = [], time.monotonic()
        for start in range(0, len(texts), 1000):
            ids += tokenizer(texts[start : start + 1000], truncation=True, max_length=max_length)["input_ids"]
            if time.monotonic() - told > 2:
                told = time.monotonic()
                print(f"{len(ids):,} of {len(texts):,} texts are tokens", flush=True)
        ends = torch.tensor([len(each) for each in ids]).cumsum(0)
        return {"tokens": torch.tensor([token for each in ids for token in each], dtype=torch.int32), "ends": ends}

    with tempfile.TemporaryDirectory() as folder:  # a tokenizer is what it saves of itself
        tokenizer.save_pretrained(folder)
        made = cached_tensors("tokens", make, texts, Path(folder), max_length)
    return made["tokens"], made["ends"]


def load_tokenizer(model):
    return loaded(import_transformers().AutoTokenizer, model)


def loaded(kind, model, **options):
    """Something of a pretrained model, from its folder or from the hub."""
    try:
        return kind.from_pretrained(models.find(model), **options)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise errors.DataError(f"{model} cannot be loaded ({reason}); run: paceline model get {model}") from None


def import_transformers():
    try:
        import transformers
    except ImportError:
        raise errors.MissingExtra("transformers", "hf", "the recipe text") from None
    return transformers
