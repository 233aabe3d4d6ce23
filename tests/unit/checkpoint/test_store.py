"""checkpoint/store.py: no crash and no damage makes an incomplete checkpoint look complete."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.store import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    Store,
    content_sha256,
    read_manifest,
    step_of,
    verify,
)
from paceline.errors import CheckpointsDamaged
from paceline.run import checked_files

IDENTITY = {"lanes": 4, "config": {"seed": 1}}
FILES = {"state.pt": b"a pickle", "weights.safetensors": b"numbers of many kinds"}


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test catches it."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def write_partial(store: Store, step: int, content: Mapping[str, bytes] = FILES) -> list[checked_files.FileRecord]:
    store.partial(step).mkdir(parents=True, exist_ok=True)
    return [checked_files.write(store.partial(step) / name, [text]) for name, text in content.items()]


def save(store: Store, step: int, **metrics: float) -> Path:
    return store.publish(step, write_partial(store, step), IDENTITY, metrics)


def flip_bit(path: Path, place: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def names(store: Store) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def steps(store: Store) -> list[int]:
    return [step_of(path) for path in store.paths()]


# --- publishing -------------------------------------------------------------------------------------------------------


def test_a_published_checkpoint_has_its_files_identity_and_metrics(store: Store) -> None:
    path = save(store, 7, val_loss=0.5, accuracy=math.nan, worst=math.inf)
    assert path == store.path(7)
    assert sorted(file.name for file in path.iterdir()) == sorted([*FILES, MANIFEST])
    manifest = verify(path)
    assert (manifest.step, manifest.identity) == (7, IDENTITY)
    assert manifest.metrics == {"val_loss": 0.5, "accuracy": None, "worst": None}
    assert manifest.size == sum(map(len, FILES.values()))
    assert manifest == read_manifest(path)


def test_a_manifest_is_plain_json(store: Store) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads((save(store, 7, loss=math.nan) / MANIFEST).read_text(), parse_constant=refuse)
    assert [file["name"] for file in content["files"]] == sorted(FILES)


def test_checkpoints_are_in_the_order_of_their_steps_beyond_eight_digits(store: Store) -> None:
    for step in (99_999_999, 5, 100_000_000, 12):
        save(store, step)
    assert steps(store) == [100_000_000, 99_999_999, 12, 5]
    assert store.newest_step() == 100_000_000


def test_a_missing_folder_has_no_checkpoints(store: Store) -> None:
    assert store.paths() == []
    assert store.newest_step() == -1
    assert store.newest_valid(pytest.fail) is None
    store.remove_leftovers()
    store.discard(3)
    store.retain(1, ("val_loss", "min"))


def test_folders_with_other_names_are_not_checkpoints(store: Store) -> None:
    save(store, 3)
    for name in ("step-3", "step-00000009.bak", "my-step-00000009", "notes.txt", ".step-00000009.partial"):
        (store.folder / name).mkdir()
    assert steps(store) == [3]


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (truncate, "{name} has {less} bytes instead of {size}"),
        (flip_bit, "{name} has a wrong checksum"),
        (Path.unlink, "{name} cannot be read: No such file or directory"),
        (lambda path: (path.unlink(), path.mkdir()), "{name} "),
    ],
    ids=["truncated", "flipped bit", "missing", "a folder"],
)
def test_a_damaged_file_is_found_and_named(name: str, damage: Callable[[Path], Any], text: str, store: Store) -> None:
    path = save(store, 7)
    damage(path / name)
    size = len(FILES[name])
    with pytest.raises(DamagedCheckpoint) as caught:
        verify(path)
    assert str(caught.value).startswith(text.format(name=name, less=size - 1, size=size))


def change_a_number(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (Path.unlink, "manifest.json is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "manifest.json cannot be read"),
        (lambda path: path.write_bytes(b""), "manifest.json cannot be read"),
        (lambda path: path.write_bytes(b"\xff\x00\xfe" * 40), "manifest.json cannot be read"),
        (lambda path: path.write_text("[1, 2]"), "manifest.json cannot be read"),
        (lambda path: path.write_text("3"), "manifest.json cannot be read"),
        (lambda path: path.write_text("{}"), "manifest.json cannot be read"),
        (change_a_number, "manifest.json has changed since it was written"),
    ],
    ids=["missing", "truncated", "empty", "not text", "a list", "a number", "no checksum", "changed"],
)
def test_a_changed_manifest_is_damage(damage: Callable[[Path], Any], text: str, store: Store) -> None:
    path = save(store, 7)
    damage(path / MANIFEST)
    with pytest.raises(DamagedCheckpoint, match=text):
        verify(path)
    with pytest.raises(DamagedCheckpoint, match=text):
        read_manifest(path)


def test_a_flipped_bit_anywhere_in_the_manifest_is_detected(store: Store) -> None:
    path = save(store, 7, val_loss=0.25)
    content, manifest = (path / MANIFEST).read_bytes(), verify(path)
    for place in range(0, len(content), 3):
        (path / MANIFEST).write_bytes(content)
        flip_bit(path / MANIFEST, place)
        with suppress(DamagedCheckpoint):
            assert verify(path) == manifest  # the bit may have changed one white space into another


def test_a_manifest_of_another_format_is_refused(store: Store) -> None:
    path = save(store, 7)
    manifest = Manifest(step=7, files=[], identity={}, format=2)
    (path / MANIFEST).write_text(manifest.to_json())
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json has format 2; this version reads 1"):
        verify(path)


@pytest.mark.parametrize(
    ("field", "value", "where"),
    [
        ("step", "7", "step"),
        ("step", -1, "step"),
        ("files", {}, "files"),
        ("files", [{"name": "../../secret", "size": 1, "sha256": ""}], "files.0.name"),
        ("files", [{"name": "a", "size": None, "sha256": ""}], "files.0.size"),
        ("identity", [], "identity"),
        ("identity", {"lanes": "x"}, "identity.lanes"),
        ("metrics", {"val_loss": "low"}, "metrics.val_loss"),
        ("time", 1e300, "time"),
    ],
)
def test_a_wrong_type_with_a_valid_checksum_is_damage(store: Store, field: str, value: object, where: str) -> None:
    path = save(store, 7)
    content = {**json.loads((path / MANIFEST).read_text()), field: value}
    content.pop("sha256")
    (path / MANIFEST).write_text(json.dumps({**content, "sha256": content_sha256(content)}))
    with pytest.raises(DamagedCheckpoint, match=rf"manifest\.json has an invalid value of {where}$"):
        verify(path)


def test_an_identity_keeps_the_fields_of_a_later_version(store: Store) -> None:
    path = save(store, 7)
    content = {**json.loads((path / MANIFEST).read_text()), "identity": {"lanes": 2, "added": [1]}}
    content.pop("sha256")
    (path / MANIFEST).write_text(json.dumps({**content, "sha256": content_sha256(content)}))
    assert verify(path).identity == {"lanes": 2, "added": [1]}


# --- the newest valid checkpoint --------------------------------------------------------------------------------------


def test_the_newest_valid_checkpoint_is_used(store: Store) -> None:
    for step in (3, 10, 5):
        save(store, step)
    found = store.newest_valid(pytest.fail)
    assert found is not None
    assert (found[0], found[1].step) == (store.path(10), 10)


def test_damaged_checkpoints_are_skipped_and_the_search_changes_nothing(store: Store) -> None:
    for step in (1, 2, 3):
        save(store, step)
    truncate(store.path(3) / "state.pt")
    (store.path(2) / "weights.safetensors").unlink()
    before, damaged = names(store), dict[Path, str]()
    found = store.newest_valid(damaged.__setitem__)
    assert found is not None
    assert found[1].step == 1
    assert damaged == {
        store.path(3): "state.pt has 7 bytes instead of 8",
        store.path(2): "weights.safetensors cannot be read: No such file or directory",
    }
    assert names(store) == before
    for path in damaged:
        store.set_aside(path)
    assert names(store) == ["damaged-step-00000002", "damaged-step-00000003", "step-00000001"]
    assert store.newest_valid(pytest.fail) == found


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_the_beginning(store: Store) -> None:
    for step in (1, 2):
        truncate(save(store, step) / "state.pt")
    store.set_aside(store.path(1))  # as an earlier attempt does
    for _ in range(2):
        with pytest.raises(CheckpointsDamaged) as caught:
            store.newest_valid(lambda path, reason: None)
        text = str(caught.value)
        assert text.startswith(f"none of the checkpoints in {store.folder} can be used: ")
        assert "step-00000002 (state.pt has 7 bytes instead of 8), damaged-step-00000001; " in text
        assert "--resume never" in text


def test_two_damaged_checkpoints_of_one_step_are_both_kept(store: Store) -> None:
    for _ in range(3):
        store.set_aside(save(store, 2))
    assert [name for name in names(store) if name.startswith("damaged")] == [
        "damaged-step-00000002", "damaged-step-00000002-2", "damaged-step-00000002-3"
    ]  # fmt: skip


def test_a_new_checkpoint_is_found_after_all_older_ones_were_damaged(store: Store) -> None:
    truncate(save(store, 1) / "state.pt")
    with pytest.raises(CheckpointsDamaged):
        store.newest_valid(lambda path, reason: None)
    save(store, 2)
    found = store.newest_valid(pytest.fail)
    assert found is not None
    assert found[1].step == 2


# --- publishing, interrupted anywhere ---------------------------------------------------------------------------------


# The number of calls, for one checkpoint, of each kind of operation that can fail.
CALLS = {"fsync": 5, "rename": 1, "open": 6, "write": 3}


def break_at(call: str, count: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the count-th call of one kind raise instead of doing its work."""
    left = [count]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **keys: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise error
            return function(*arguments, **keys)

        return wrapper

    owner: Any = {"fsync": os, "rename": Path, "open": Path, "write": checked_files}[call]
    monkeypatch.setattr(owner, call, counted(getattr(owner, call)))


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "full"])
@pytest.mark.parametrize(("call", "count"), [(call, n + 1) for call, number in CALLS.items() for n in range(number)])
def test_an_interruption_never_leaves_an_incomplete_checkpoint_visible(
    call: str, count: int, error: BaseException, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)
    with monkeypatch.context() as broken:
        break_at(call, count, error, broken)
        with pytest.raises((Killed, OSError)):
            save(store, 2)
    found = store.newest_valid(pytest.fail)  # everything visible is complete
    assert found is not None
    assert found[1].step == (2 if (call, count) == ("fsync", CALLS["fsync"]) else 1)
    assert verify(store.path(1)).step == 1
    # The next attempt cleans up and saves that step.
    store.remove_leftovers()
    save(store, 2)
    assert verify(store.path(2)).step == 2
    assert names(store) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(("call", "number"), CALLS.items())
def test_publishing_makes_no_more_calls_than_listed(
    call: str, number: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_at(call, number + 1, Killed(), monkeypatch)
    save(store, 2)


def test_the_folder_is_renamed_after_everything_is_synced(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_sync(handle: int) -> None:
        order.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    def record_rename(path: Path, target: Path) -> Path:
        order.append(f"{path.name} → {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    save(store, 2)
    assert order == [
        *FILES, MANIFEST, ".step-00000002.partial", ".step-00000002.partial → step-00000002", "checkpoints"
    ]  # fmt: skip


@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_a_checkpoint_with_a_missing_or_short_file_is_not_published(
    damage: Callable[[Path], Any], store: Store
) -> None:
    written = write_partial(store, 2)
    damage(store.partial(2) / "weights.safetensors")
    with pytest.raises(OSError, match=r"weights\.safetensors"):
        store.publish(2, written, IDENTITY, {})
    assert steps(store) == []


def test_a_valid_checkpoint_of_the_same_step_is_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = verify(save(store, 2, val_loss=2.0))
    monkeypatch.setattr(Path, "rename", pytest.fail)  # it exists at every moment
    assert save(store, 2, val_loss=1.0) == store.path(2)
    assert verify(store.path(2)) == before
    assert names(store) == ["step-00000002"]


def test_metrics_are_added_to_a_checkpoint_that_was_saved_before_them(store: Store) -> None:
    save(store, 1, loss=2.0)
    save(store, 2)
    assert save(store, 2, loss=1.0) == store.path(2)
    assert verify(store.path(2)).metrics == {"loss": 1.0}
    assert store.best("loss", "min") == store.path(2)
    save(store, 2, loss=9.0)  # only once
    assert verify(store.path(2)).metrics == {"loss": 1.0}
    assert {path.name for path in store.path(2).iterdir()} == {path.name for path in store.path(1).iterdir()}


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(store: Store) -> None:
    truncate(save(store, 2) / "state.pt")
    save(store, 2)
    assert verify(store.path(2)).step == 2
    assert names(store) == ["damaged-step-00000002", "step-00000002"]


def test_a_partial_folder_of_a_killed_run_is_ignored_and_removed(store: Store) -> None:
    save(store, 1)
    write_partial(store, 2)
    assert steps(store) == [1]
    assert store.newest_valid(pytest.fail) is not None
    store.remove_leftovers()
    assert names(store) == ["step-00000001"]


def test_only_the_partial_folder_of_that_step_is_discarded(store: Store) -> None:
    save(store, 2)
    write_partial(store, 2)
    write_partial(store, 3)
    store.discard(2)
    assert names(store) == [".step-00000003.partial", "step-00000002"]


# --- retention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_the_newest_are_kept(keep: int, store: Store) -> None:
    for step in (8, 9, 10, 11):
        save(store, step)
    store.retain(keep, None)
    assert steps(store) == [11, 10, 9, 8][:keep]
    assert len(names(store)) == min(keep, 4)


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_the_best_is_kept_besides_the_newest(mode: str, best: int, store: Store) -> None:
    for step, value in enumerate([0.5, 0.1, 0.9, 0.3, 0.4], start=1):
        save(store, step, val_loss=value)
    assert store.best("val_loss", mode) == store.path(best)
    store.retain(1, ("val_loss", mode))
    assert steps(store) == [5, best]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_the_best(mode: str, value: float, store: Store) -> None:
    save(store, 1, val_loss=value)
    assert store.best("val_loss", mode) is None
    save(store, 2, val_loss=0.5)
    save(store, 3, val_loss=value)
    save(store, 4)
    assert store.best("val_loss", mode) == store.path(2)
    store.retain(1, ("val_loss", mode))
    assert steps(store) == [4, 2]


def test_a_better_checkpoint_replaces_the_best(store: Store) -> None:
    for step, value in enumerate([0.5, 0.6, 0.2, 0.7], start=1):
        save(store, step, val_loss=value)
        store.retain(1, ("val_loss", "min"))
    assert steps(store) == [4, 3]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equal_values_the_first_is_the_best(mode: str, store: Store) -> None:
    """As when it was saved: a later checkpoint with the same value was saved for another reason."""
    for step in (3, 7, 9):
        save(store, step, val_loss=0.5)
    assert store.best("val_loss", mode) == store.path(3)


def test_an_unreadable_checkpoint_is_not_the_best(store: Store) -> None:
    save(store, 1, val_loss=0.5)
    (save(store, 2, val_loss=0.1) / MANIFEST).write_text("{")
    assert store.best("val_loss", "min") == store.path(1)


def test_a_checkpoint_is_removed_completely_or_not_at_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(store, step)
    unlink = os.unlink

    def kill(*arguments: Any, **keys: Any) -> None:
        unlink(*arguments, **keys)
        raise Killed

    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", kill)
        with pytest.raises(Killed):
            store.retain(1, None)
    assert steps(store) == [2]
    assert store.newest_valid(pytest.fail) is not None
    store.remove_leftovers()
    assert names(store) == ["step-00000002"]
