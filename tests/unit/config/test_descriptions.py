"""The descriptions of keys, and that the documentation and the docstring of Trainer have them."""

from __future__ import annotations

import runpy
from pathlib import Path

from paceline.config import Config
from paceline.config.descriptions import default_of, keys_of, section_of, summary_of, without_links
from paceline.config.schema import GROUPS
from paceline.config.sections import SCHEDULES, Schedule
from paceline.config.values import Otherwise

ROOT = Path(__file__).parents[3]


def test_the_page_of_keys_and_the_docstring_of_trainer_are_up_to_date() -> None:
    reference = runpy.run_path(str(ROOT / "scripts" / "reference.py"))
    for path, text in reference["generated"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not up to date; run `make reference`"


def test_every_key_is_in_one_group_and_has_a_description_of_whole_sentences() -> None:
    assert list(Config.model_fields) == [key for group in GROUPS for key in group.model_fields]
    for key, field in keys_of(Config):
        text = (field.description or "").strip()
        assert text.endswith((".", ").")), key
        assert text[0].isupper() or text[0] == "`", key
        assert len(summary_of(field)) <= 120, key


def test_the_page_of_keys_has_every_key_with_its_default() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert [key for key, field in keys_of(Config) if f"| `{key}` | {default_of(field)} |" not in text] == []
    assert "| `batch_size` | 32 |" in text
    assert "| `checkpoint.best.mode` | `min` |" in text


def test_links_in_the_descriptions_of_keys_lead_to_sections_of_the_page() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    headings = {line.lstrip("#").strip().lower() for line in text.splitlines() if line.startswith("#")}
    anchors = {"".join(c for c in heading if c.isalnum() or c in " -").replace(" ", "-") for heading in headings}
    linked = {part.partition(")")[0] for part in text.split("](#")[1:]}
    assert linked - anchors == set()
    assert "the-optimizer" in linked


def test_the_documented_defaults_of_schedules_are_those_that_apply() -> None:
    for key, field in Schedule.model_fields.items():
        documented = [each.text.strip("`") for each in field.metadata if isinstance(each, Otherwise)]
        applied = {str(options[key]) for options in SCHEDULES.values() if options.get(key) is not None}
        if documented:
            assert {str(float(text)) if text[0].isdigit() else text for text in documented} == {
                str(float(text)) if text[0].isdigit() else text for text in applied
            }, key


def test_links_are_left_out_where_they_cannot_be_followed() -> None:
    text = "An optimizer ([more](#the-optimizer)). See [Any step](steps.md), as [`run`](your_loop.md#run) does."
    assert without_links(text) == "An optimizer. See Any step, as `run` does."


def test_a_key_knows_its_section() -> None:
    assert section_of(Config.model_fields["schedule"]) is Schedule
    assert section_of(Config.model_fields["seed"]) is None
