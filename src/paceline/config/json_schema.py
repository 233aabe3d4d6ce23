"""The JSON schema of `config.yaml`, with which editors complete keys and mark errors."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from paceline.config.descriptions import default_of, description_of, section_of, without_links
from paceline.config.schema import Config
from paceline.config.sections import Section
from paceline.config.values import REQUIRED


def json_schema() -> dict[str, Any]:
    """The schema: all keys with types, limits, defaults and descriptions; functions are strings "module:name"."""
    schema = Config.model_json_schema(schema_generator=_Schema)
    parts = {Config.__name__: schema, **schema["$defs"]}
    for section in _sections_in(Config):
        properties = parts[section.__name__]["properties"]
        for name, field in section.model_fields.items():
            _describe(properties[field.alias or name], field)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "config.yaml of a Paceline run"}


def _describe(key: dict[str, Any], field: FieldInfo) -> None:
    """Give a key its description, without links, and its default, without nulls."""
    about, default = without_links(description_of(field)), without_links(default_of(field))
    value = key.pop("default", None)
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if inner is not None}
    if value not in (None, {}, []):
        key["default"] = value
    elif default:
        about += " Required." if default == REQUIRED else f" Default: {default}."
    key["description"] = about


def _sections_in(section: type[Section]) -> list[type[Section]]:
    """A section and all sections inside it."""
    inner = filter(None, map(section_of, section.model_fields.values()))
    return [section, *(each for found in inner for each in _sections_in(found))]


class _Schema(GenerateJsonSchema):
    """Omits the titles of keys, which only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
