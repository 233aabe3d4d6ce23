"""`paceline data get` as a user types it."""

from __future__ import annotations

from pathlib import Path

NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}  # no process listens there


def test_without_a_network_one_sentence_says_which_files_to_put_where(run, tmp_path: Path) -> None:
    ended = run("paceline", "data", "get", "mnist", "--to", "digits", **NO_NETWORK)
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith("paceline: train-images-idx3-ubyte.gz could not be downloaded (")
    assert f"t10k-labels-idx1-ubyte.gz into {tmp_path / 'digits'} by hand" in line


def test_a_mistyped_name_gets_the_nearest_one(run) -> None:
    ended = run("paceline", "data", "get", "cifar")
    assert (ended.returncode, ended.stderr) == (2, "paceline: cifar is not a known data set; did you mean cifar10?\n")


def test_help_names_every_recipe(run) -> None:
    ended = run("paceline", "train", "--help", COLUMNS="200")
    assert "cifar10, cifar10-fast, digits, linear, lm, mnist, tabular, text" in " ".join(ended.stdout.split())
