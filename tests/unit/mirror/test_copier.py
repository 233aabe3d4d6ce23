"""What is copied to a mirror, in which order, and what is removed there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline.checkpoint.store import MANIFEST, Manifest, Store, verify
from paceline.mirror.copier import Retention, obsolete, status_of
from paceline.mirror.place import MirrorPlace, Mismatch
from support.mirrors import copier_of, copy_all, make_run, names_in, publish


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "lab" / "run"


def test_everything_that_a_run_needs_is_copied_and_nothing_else(tmp_path: Path, place: Path) -> None:
    folder = make_run(tmp_path / "run", 3, 6)
    folder.job.write_bytes(b"data")
    folder.pickled_value.write_bytes(b"pickle")
    folder.weights.write_bytes(b"weights")
    folder.result.write_text("{}")
    folder.log(0).write_text("short")
    folder.log(1).write_bytes(bytes(2_000_000))
    folder.image("samples", 3).parent.mkdir()
    folder.image("samples", 3).write_bytes(b"png")
    copy_all(copier_of(folder, tmp_path / "disk"))
    checkpoints = {
        f"checkpoints/step-0000000{n}/{f}" for n in (3, 6) for f in ("state.pt", "weights.safetensors", MANIFEST)
    }
    assert names_in(place) == checkpoints | {
        "config.yaml", "events.jsonl", "weights.safetensors", "result.json", "mirrored.json", "logs/rank-0.log",
        "images/samples-00000003.png",
    }  # fmt: skip
    for path in Store(place / "checkpoints").paths():
        verify(path)


def test_what_others_remove_from_a_mirror_is_found_and_copied_again(tmp_path: Path, place: Path) -> None:
    folder = make_run(tmp_path / "run", 3, 6)
    copier = copier_of(folder, tmp_path / "disk")
    copy_all(copier)
    complete = names_in(place)
    assert not copier.forget_removed()
    shutil.rmtree(place)
    assert copier.forget_removed()
    copy_all(copier)
    assert names_in(place) == complete
    assert not copier.forget_removed()


def test_the_newest_checkpoint_is_copied_first_and_a_newer_one_overtakes_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 3, 6)
    mirrored: list[int] = []
    copier = copier_of(folder, tmp_path / "disk", on_mirrored=lambda manifest, seconds: mirrored.append(manifest.step))
    copier.copy_next(is_last=False)  # the config
    copier.copy_next(is_last=False)  # a file of step 6
    publish(folder, 9)
    copy_all(copier)
    assert mirrored == [9, 6, 3]


def test_a_checkpoint_has_a_manifest_only_when_its_files_are_verified(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", 3)
    copier = copier_of(folder, tmp_path / "disk")
    send = MirrorPlace._send

    def truncating(self: MirrorPlace, target: str, source: object, size: int, on_bytes: object) -> str:
        sent = send(self, target, source, size, on_bytes)  # type: ignore[arg-type]
        if "state.pt" in target:
            Path(target).write_bytes(b"half")
        return sent

    monkeypatch.setattr(MirrorPlace, "_send", truncating)
    with pytest.raises(Mismatch, match=r"state\.pt differs"):
        copy_all(copier)
    assert not list(place.rglob(MANIFEST))
    monkeypatch.setattr(MirrorPlace, "_send", send)
    copy_all(copier)
    verify(place / "checkpoints" / "step-00000003")


def test_a_checkpoint_that_is_damaged_here_is_not_copied(tmp_path: Path, place: Path) -> None:
    folder = make_run(tmp_path / "run", 3, 6)
    (Store(folder.checkpoints).path(6) / "state.pt").write_bytes(b"damaged")
    copy_all(copier_of(folder, tmp_path / "disk"))
    assert [path.parent.name for path in place.rglob(MANIFEST)] == ["step-00000003"]


def test_metrics_that_are_added_later_are_copied_without_the_files(tmp_path: Path, place: Path) -> None:
    folder = make_run(tmp_path / "run", 3)
    copier = copier_of(folder, tmp_path / "disk")
    copy_all(copier)
    store = Store(folder.checkpoints)
    store.partial(3).mkdir()
    store.publish(3, [], {}, {"accuracy": 0.5})
    assert status_of(copier).left_bytes == 0
    copy_all(copier)
    assert verify(place / "checkpoints" / "step-00000003").metrics == {"accuracy": 0.5}


def test_the_mirror_is_pruned_like_the_run_folder(tmp_path: Path, place: Path) -> None:
    folder, retention = make_run(tmp_path / "run"), Retention(2, ("accuracy", "max"))
    copier, store = copier_of(folder, tmp_path / "disk", retention), Store(folder.checkpoints)
    for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.4)):
        publish(folder, step, accuracy=accuracy)
        store.retain(*retention)
        copy_all(copier)
    assert {path.parent.name for path in place.rglob(MANIFEST)} == {path.name for path in store.paths()}
    assert len(list((place / "checkpoints").iterdir())) == 3


def test_a_new_process_continues_a_mirror_without_copying_checkpoints_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 3)
    copy_all(copier_of(folder, tmp_path / "disk"))
    copied: list[int] = []
    copy_all(copier_of(folder, tmp_path / "disk", on_mirrored=lambda manifest, seconds: copied.append(manifest.step)))
    assert copied == []


@pytest.mark.parametrize(
    ("present", "local", "gone"),
    [
        ({3, 6, 9}, {6, 9}, {3}),
        ({3, 6, 9}, {6}, {9}),  # the run was resumed from step 6
        ({3, 6, 9}, {12}, set()),  # 12 is not there yet
        ({3, 6, 9}, set(), set()),  # the run folder was deleted
        ({3, 6, 12}, {12}, {3}),
    ],
)
def test_obsolete_checkpoints(present: set[int], local: set[int], gone: set[int]) -> None:
    manifests = {step: Manifest(step, [], {}) for step in present}
    assert obsolete(manifests, local, Retention(2, None)) == gone


def test_the_best_checkpoint_stays_in_the_mirror_after_the_run_folder_has_lost_it() -> None:
    manifests = {step: Manifest(step, [], {}, {"loss": loss}) for step, loss in ((3, 0.1), (6, 0.5), (9, 0.4))}
    assert obsolete(manifests, {9}, Retention(1, ("loss", "min"))) == {6}


def test_events_that_grow_are_copied_up_to_each_checkpoint(tmp_path: Path, place: Path) -> None:
    folder = make_run(tmp_path / "run", 3)
    copier = copier_of(folder, tmp_path / "disk")
    copy_all(copier)
    with folder.events.open("a") as events:
        events.write('{"event": "step", "time": 2.0, "step": 6}\n')
    assert not copier.copy_next(is_last=False)  # not after every step
    publish(folder, 6)
    while copier.copy_next(is_last=False):
        pass
    assert json.loads((place / "events.jsonl").read_text().splitlines()[-1])["step"] == 6
