from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import paceline
from paceline import keywords, trainer
from paceline.config import Config
from paceline.config.descriptions import section_of
from paceline.config.sections import ScheduleName, Section
from paceline.errors import ConfigError
from paceline.results.result import Result
from support.configs import MANAGED, problems


def test_every_mistake_is_reported_together(tmp_path: Path) -> None:
    found = problems(
        {
            "bath_size": 4,
            "num_epochs": "three",
            "val_fraction": 1.0,
            "log": {"evry_steps": 5},
            "model_fn": "paceline_no_such_module:get_model",
            "train_fn": lambda model: None,
            "optimizer": {"name": "sdg"},
            "metrics": ["accurcy"],
            "df": "missing.csv",
            "device": "cpu",
            "backend": "nccl",
        },
        tmp_path,
    )
    beginnings = [
        "val_fraction=1.0 must be less than 1",
        "num_epochs='three' must be a valid integer",
        "log.evry_steps is not a known key; did you mean log.every_steps?",
        "bath_size is not a known key; did you mean batch_size?",
        "dataset_fn is missing;",
        "backend=nccl needs a GPU, but device=cpu;",
        "model_fn='paceline_no_such_module:get_model' names a module that does not exist",
        "train_fn=",
        "metrics, optimizer belong to the managed loop;",
        "optimizer.name='sdg' is not an optimizer of torch.optim; did you mean sgd?",
        "metrics='accurcy' is not known;",
        "df='missing.csv' does not exist;",
    ]
    assert [problem[: len(start)] for problem, start in zip(found, beginnings, strict=True)] == beginnings


def test_a_trainer_reports_the_mistakes_of_config_and_engine_together() -> None:
    with pytest.raises(ConfigError) as caught:
        paceline.Trainer(**MANAGED, procs=2, ddp=False, optimizer="sdg")
    assert caught.value.problems == [
        "procs=2 needs DDP; remove ddp=False, or use procs=1",
        "optimizer.name='sdg' is not an optimizer of torch.optim; did you mean sgd?",
    ]


# --- the signature ------------------------------------------------------------------------------------------

FIRST = ["model_fn", "dataset_fn", "df", "train_fn", "batch_size", "num_epochs"]  # may be given by position
PARAMETERS = inspect.signature(paceline.Trainer).parameters
KEYWORDS = {name: parameter for name, parameter in PARAMETERS.items() if name != "other_names"}


def hints() -> dict[str, Any]:
    """The types of Trainer's keywords."""
    known = {**vars(trainer), **vars(keywords), "Never": None, "Callback": paceline.Callback}
    return get_type_hints(paceline.Trainer.__init__, {**known, "ScheduleName": ScheduleName})


def test_the_keywords_are_the_keys_in_the_order_of_the_groups() -> None:
    assert list(KEYWORDS) == [*FIRST, *(key for key in Config.model_fields if key not in FIRST)]
    kinds = {name: parameter.kind for name, parameter in KEYWORDS.items()}
    by_position = [name for name, kind in kinds.items() if kind is not inspect.Parameter.KEYWORD_ONLY]
    assert by_position == FIRST


@pytest.mark.parametrize("key", KEYWORDS)
def test_a_keyword_has_the_default_of_its_key(key: str) -> None:
    shown, default = KEYWORDS[key].default, Config.model_fields[key].get_default(call_default_factory=True)
    if isinstance(default, Section):  # by its name, or None
        assert shown == getattr(default, "name", None)
    elif isinstance(default, (dict, list)):
        assert shown == (None if isinstance(default, dict) else ())
    else:
        assert (shown, type(shown)) == (default, type(default))


@pytest.mark.parametrize("key", KEYWORDS)
def test_a_keyword_takes_the_words_of_its_key(key: str) -> None:
    def words(kind: Any) -> set[Any]:
        inner = get_args(kind)
        return set(inner) if get_origin(kind) is Literal else {word for each in inner for word in words(each)}

    if section_of(Config.model_fields[key]) is None:
        assert words(hints()[key]) == words(Config.model_fields[key].annotation)


@pytest.mark.parametrize(
    "options",
    [each for name, each in vars(keywords).items() if name.endswith("Options")],
    ids=lambda each: each.__name__,
)
def test_a_dict_of_options_has_the_keys_of_its_section(options: Any) -> None:
    sections = {"Augment": "Augmentation", "Curriculum": "Pacing"}
    name = options.__name__.removesuffix("Options")
    section = getattr(paceline.config.sections, sections.get(name, name))
    plain = {field.alias or key: field for key, field in section.model_fields.items()}
    assert list(options.__annotations__) == list(plain)
    for key, kind in get_type_hints(options, vars(keywords)).items():
        if section_of(plain[key]) is None and key not in ("trackers", "mean", "std"):
            assert kind == plain[key].annotation, key


def test_every_section_has_a_dict_of_options() -> None:
    shown = {key: str(PARAMETERS[key].annotation) for key, field in Config.model_fields.items() if section_of(field)}
    del shown["optimizer"]  # takes the arguments of any optimizer
    assert [key for key, kind in shown.items() if "Options" not in kind] == []


def test_only_keys_that_were_given_are_in_the_config_that_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[dict[str, Any]] = []
    monkeypatch.setattr(trainer, "build_config", lambda raw: built.append(dict(raw)))
    paceline.Trainer(list, df="t.csv", num_epochs=3, optimizer={"lr": 1}, tf32=False, max_steps=None, callbacks=[])
    paceline.Trainer()
    assert built == [
        {"model_fn": list, "df": "t.csv", "num_epochs": 3, "optimizer": {"lr": 1}, "tf32": False, "callbacks": []},
        {},
    ]


def test_an_unknown_keyword_is_answered_with_the_word_to_write() -> None:
    with pytest.raises(ConfigError) as caught:
        paceline.Trainer(**MANAGED, bath_size=4, epochs=5, lr=0.1)
    assert caught.value.problems == [
        "bath_size is not a known key; did you mean batch_size?",
        "epochs=5 is called num_epochs in Paceline; write num_epochs=5",
        'lr=0.1 is called optimizer.lr in Paceline; write optimizer={"lr": 0.1}',
    ]


def test_the_public_names_are_completed() -> None:
    assert dir(paceline) == sorted([*paceline.__all__, "__version__"])


@pytest.mark.parametrize("name", ["fit", "train", "run"])
def test_methods_of_other_libraries_are_answered(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"Trainer has no method {name}\(\); call start\(\)"):
        getattr(trainer.Trainer.__new__(trainer.Trainer), name)
    assert not hasattr(trainer.Trainer.__new__(trainer.Trainer), "other")


def test_names_of_the_result_are_answered_where_start_was_forgotten() -> None:
    with pytest.raises(
        AttributeError, match=r"^Trainer has no attribute metrics; call start\(\), which returns"
    ) as caught:
        trainer.Trainer.__new__(trainer.Trainer).metrics  # type: ignore[attr-defined]  # noqa: B018
    assert isinstance(caught.value, ConfigError)  # shown with the user's lines alone; a script exits with 2
    assert all(hasattr(Result, name) or name in Result.__dataclass_fields__ for name in trainer.RESULT_NAMES)
