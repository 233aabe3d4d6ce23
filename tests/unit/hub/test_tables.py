"""hub/tables.py: Covertype with and without a header, SST-2's tables, and errors for damaged files."""

from __future__ import annotations

import gzip
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import datasets
from paceline.errors import ConfigError, DataError
from paceline.hub import catalog
from paceline.hub.tables import FEATURES, TARGET

ROWS = [[*range(54), 7], [*range(1, 55), 1]]
PLAIN = "".join(",".join(map(str, row)) + "\n" for row in ROWS).encode()
HEADER = ",".join([*FEATURES, TARGET]).encode() + b"\n"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog, with the sizes of these few rows."""
    [file] = catalog.COVTYPE.files
    [content] = file.contents
    [other] = content.others
    content = replace(content, size=len(PLAIN), others=(replace(other, size=len(HEADER + PLAIN)),))
    dataset = replace(catalog.COVTYPE, files=(replace(file, contents=(content,)),))
    monkeypatch.setitem(catalog.ALL, "covtype", dataset)


@pytest.mark.parametrize(
    ("name", "data"),
    [("covtype.data.gz", gzip.compress(PLAIN)), ("covtype.data", PLAIN), ("covtype.csv", HEADER + PLAIN)],
    ids=["gz", "data", "csv"],
)
def test_covertype_is_read_with_and_without_a_header(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    rows = datasets.table("covtype", root=tmp_path)
    assert list(rows.columns) == [*FEATURES, TARGET]
    assert rows.to_numpy().tolist() == ROWS
    features, classes = datasets.read("covtype", root=tmp_path).tensors
    assert (features.dtype, features.shape) == (torch.float32, (2, 54))
    assert (features[1, 53], classes.tolist()) == (54, [6, 0])


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("covtype.data", PLAIN[:-9], rf"contains {len(PLAIN) - 9} bytes, not {len(PLAIN)} or {len(HEADER + PLAIN):,}"),
        ("covtype.data", b"?" * len(PLAIN), "is not the table of Covertype"),
        ("covtype.csv", HEADER.replace(b"Aspect", b"aspect") + PLAIN, "is not the table of Covertype"),
        ("covtype.data.gz", gzip.compress(PLAIN, mtime=0)[:-9], "is damaged: "),
    ],
)
def test_a_damaged_table_is_refused_by_name(name: str, data: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name} {problem}.*; remove that file, then run: paceline data get covtype"):
        datasets.table("covtype", root=tmp_path)


@pytest.mark.parametrize(
    "text", ["sentence\tlabel\nfine \t2\n", "text\tlabel\nfine \t1\n", "sentence\tlabel\nfine \t\n"]
)
def test_a_damaged_file_of_sentences_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(text)
    with pytest.raises(DataError, match=r"train\.tsv (is not a table of sentences|does not have the columns)"):
        datasets.read("sst2", root=tmp_path)


def test_the_archive_of_sst2_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "SST-2.zip", "w") as archive:
        archive.writestr("SST-2/train.tsv", 'sentence\tlabel\na "good film \t1\nnan \t0\n')
        archive.writestr("SST-2/dev.tsv", "sentence\tlabel\n10\t1\n")
    train = datasets.read("sst2", root=tmp_path)
    assert ([*train.texts], train.classes.tolist()) == (['a "good film ', "nan "], [1, 0])
    text, label = train[0]
    assert (text, int(label), len(train)) == ('a "good film ', 1, 2)
    assert datasets.table("sst2", train=False, root=tmp_path).to_dict("list") == {"sentence": ["10"], "label": [1]}


def test_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="covtype has no test split"):
        datasets.read("covtype", train=False)
    with pytest.raises(ConfigError, match="mnist is not a table; the tables are covtype and sst2"):
        datasets.table("mnist")
    with pytest.raises(DataError, match=f"{tmp_path}/train.tsv does not exist; run: paceline data get sst2 --to"):
        datasets.read("sst2", root=tmp_path)
