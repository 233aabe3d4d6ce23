"""Classification of sentences: a pretrained encoder from the Hugging Face hub, fine-tuned.

Data: R. Socher et al., "Recursive Deep Models for Semantic Compositionality Over a Sentiment Treebank", 2013, as
GLUE's SST-2. Or a table with a column of texts and one of classes, by name or number.

    pip install 'paceline[hf]'
    paceline data get sst2
    paceline model get sentence-transformers/all-MiniLM-L6-v2
    paceline train text --procs 2
    paceline train text dataset_args.model=NAME model_args.model=NAME
    paceline train text df=mails.csv val_dataset_fn=null dataset_args.text=body \\
        dataset_args.classes=[ham,spam] model_args.classes=[ham,spam]
"""

import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from paceline import cached_tensors, datasets, errors, models

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
CLASSES = ("negative", "positive")
PAD_TO = 16  # so few lengths occur that each can have a CUDA graph; multiples of 16 suit tensor cores
MIN_WORDS = 4  # texts with fewer words are not masked

source, has_table = {}, False  # the options given to get_dataset; get_dev_dataset uses them, too


def get_dataset(df=None, **options):
    """Return the training sentences, or those of a table."""
    global source, has_table
    source, has_table = options, df is not None
    return Sentences(df, **options)


def get_dev_dataset(df=None):
    """Return the 872 validation sentences of SST-2, or those of a table."""
    if has_table and df is None:
        raise errors.DataError(
            "df is given without validation data; set val_df, or set val_dataset_fn=null to hold out some rows"
        )
    return Sentences(df, train=False, **source)


class Sentences(Dataset):
    """Sentences as tokens; a batch is padded to about the length of its longest sentence."""

    def __init__(self, df=None, train=True, root=None, model=MODEL, classes=CLASSES, max_length=128, **columns):
        self.classes, self.tokenizer, self.max_length = list(map(str, classes)), load_tokenizer(model), max_length
        table = datasets.table("sst2", train=train, root=root) if df is None else df
        texts, labels = columns_of(table, **columns)
        self.labels = None if labels is None else torch.tensor([self.number_of(label) for label in labels])
        self.tokens, self.ends = tokenized(texts, self.tokenizer, max_length - 1)

    def number_of(self, label):
        """Return the number of a class that is given by name or number."""
        name = str(label)
        if name in self.classes:
            return self.classes.index(name)
        if name.isdecimal() and int(name) < len(self.classes):
            return int(name)
        raise errors.DataError(f"{name} is not one of the classes {self.classes}; list all in dataset_args.classes")

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, index):
        start = self.ends[index - 1] if index else 0
        label = {} if self.labels is None else {"labels": self.labels[index]}
        return {"input_ids": self.tokens[start : self.ends[index]].long(), **label}

    def collate_fn(self, samples):
        """Return a batch, whose padding does not depend on other batches or on the number of processes."""
        longest = max(len(sample["input_ids"]) for sample in samples)
        # Always add some padding: without it, transformers uses another code path, which rounds differently.
        width = min((longest // PAD_TO + 1) * PAD_TO, self.max_length)
        ids = torch.full((len(samples), width), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(samples):
            ids[row, : len(sample["input_ids"])] = sample["input_ids"]
            mask[row, : len(sample["input_ids"])] = 1
        batch = {"input_ids": ids, "attention_mask": mask}
        return batch if self.labels is None else {**batch, "labels": torch.stack([each["labels"] for each in samples])}


class Classifier(nn.Module):
    """A model of transformers that returns the logits of the classes; in training, some words are masked."""

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
        """Return the tokens with a random part of the words replaced by the mask token."""
        is_word = (ids[..., None] != self.special).all(-1)
        is_chosen = torch.rand(ids.shape, device=ids.device) < self.masked
        return ids.masked_fill(is_word & is_chosen & (is_word.sum(1, keepdim=True) >= MIN_WORDS), self.mask)


def get_model(model=MODEL, classes=CLASSES, masked=0.1, learns_embeddings=False):
    """Return the encoder with its pretrained weights and a new last layer.

    The word embeddings stay frozen unless `learns_embeddings`, because they were trained on far more text.
    """
    check_matches_data(model=model, classes=classes)
    transformers = import_transformers()
    transformers.utils.logging.set_verbosity_error()  # no warning that the last layer is new
    transformers.utils.logging.disable_progress_bar()
    names = dict(enumerate(map(str, classes)))
    encoder = from_pretrained(
        transformers.AutoModelForSequenceClassification, model,
        num_labels=len(names), id2label=names, label2id={name: number for number, name in names.items()},
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    encoder.get_input_embeddings().requires_grad_(learns_embeddings)
    # Weights stay in fp32; autocast uses lower precision where it is safe.
    return Classifier(encoder.float(), load_tokenizer(model), masked)


def check_matches_data(**given):
    """Raise if arguments differ from those of the data; only in ranks, which create the data before the model."""
    if not torch.distributed.is_initialized():
        return
    of_data = {"model": MODEL, "classes": CLASSES, **source}
    for key, value in given.items():
        if list(value) != list(of_data[key]):
            raise errors.ConfigError(
                f"model_args.{key}={value} differs from dataset_args.{key}={of_data[key]}; make them equal"
            )


# --- texts and tokens ---------------------------------------------------------------------------------------------


def columns_of(table, text="sentence", label="label"):
    """Return the texts of a table, and its labels if it has any."""
    if text not in table:
        raise errors.DataError(f"the table has no column {text}; name the column of texts in dataset_args.text")
    if label not in table:
        print(f"the table has no column {label} (dataset_args.label): it can be used for predictions only", flush=True)
    return [str(value) for value in table[text]], table.get(label)


def tokenized(texts, tokenizer, max_length):
    """Return the concatenated tokens of all texts, and the end of each text; one process computes them for all."""

    def make():
        ids, reported = [], time.monotonic()
        for start in range(0, len(texts), 1000):
            ids += tokenizer(texts[start : start + 1000], truncation=True, max_length=max_length)["input_ids"]
            if time.monotonic() - reported > 2:
                reported = time.monotonic()
                print(f"{len(ids):,} of {len(texts):,} texts tokenized", flush=True)
        ends = torch.tensor([len(each) for each in ids]).cumsum(0)
        return {"tokens": torch.tensor([token for each in ids for token in each], dtype=torch.int32), "ends": ends}

    with tempfile.TemporaryDirectory() as folder:  # the cache key is the content of the saved tokenizer
        tokenizer.save_pretrained(folder)
        tensors = cached_tensors("tokens", make, texts, Path(folder), max_length)
    return tensors["tokens"], tensors["ends"]


def load_tokenizer(model):
    return from_pretrained(import_transformers().AutoTokenizer, model)


def from_pretrained(kind, model, **options):
    """Load a model or a tokenizer from its folder or from the hub."""
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
