"""The job's JSON Schema: for editors (`docs/job.schema.json`) and for naming what a key accepts."""

import json
from functools import cache
from typing import Any

from shardwise.job.schema import Job
from shardwise.job.source import Key

Schema = dict[str, Any]


@cache
def job_schema() -> Schema:
    """JSON Schema (draft 2020-12) of a job file."""
    schema = Job.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "made by shardwise.job.json_schema; do not edit",
        **schema,
        "title": "shardwise job",
    }


def schema_text() -> str:
    """The schema as the committed file holds it."""
    return json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"


def at(key: Key) -> list[Schema]:
    """The alternatives the schema allows at a key; empty when there is no such key."""
    alternatives = _alternatives(job_schema())
    for part in key:
        below = [properties[part] for properties in map(_properties, alternatives) if part in properties]
        alternatives = [choice for schema in below for choice in _alternatives(schema)]
    return alternatives


def names_below(key: Key) -> list[str]:
    """Names of the keys a section has."""
    return [name for schema in at(key) for name in _properties(schema)]


def is_free(key: Key) -> bool:
    """Whether a key holds a mapping whose own keys the schema does not name (`model.config`)."""
    return any(schema.get("type") == "object" and not _properties(schema) for schema in at(key))


def every_key(above: Key = ()) -> list[Key]:
    """Every key a job file may hold, sections included."""
    found: list[Key] = []
    for name in names_below(above):
        key = (*above, name)
        found += [key, *every_key(key)]
    return found


def expected(key: Key) -> str:
    """What a key accepts, in words: `an integer of at least 1`."""
    words = [text for schema in at(key) if (text := _in_words(schema))]
    return " or ".join(dict.fromkeys(words))


def _alternatives(schema: Schema) -> list[Schema]:
    if "$ref" in schema:
        return _alternatives(job_schema()["$defs"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return [choice for branch in schema["anyOf"] for choice in _alternatives(branch)]
    return [schema]


def _properties(schema: Schema) -> dict[str, Schema]:
    return dict(schema.get("properties", {}))


_PLAIN = {"string": "text", "boolean": "true or false", "integer": "an integer", "number": "a number"}
_BOUNDS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most"}
_BOUNDS |= {"exclusiveMaximum": "below"}


def choices(schema: Schema) -> list[Any]:
    """The words a schema allows, in a list too."""
    const = [schema["const"]] if "const" in schema else []
    return [*schema.get("enum", []), *schema.get("items", {}).get("enum", []), *const]


def _in_words(schema: Schema) -> str:
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    kind = schema.get("type")
    if kind == "object":
        names = schema.get("propertyNames", {}).get("enum", [])
        kind = "a section with " if _properties(schema) else "a mapping of " if names else "a mapping"
        return kind + ", ".join([*_properties(schema), *names])
    if kind == "array":
        kind = "a non-empty list of " if schema.get("minItems") else "a list of "
        return kind + _in_words(schema["items"]).removeprefix("one of ")
    if kind == "string" and "pattern" in schema:
        return "a name of the letters a to z, digits, `.`, `_` and `-` that starts with a letter or digit"
    bounds = [f"{word} {schema[name]:.12g}" for name, word in _BOUNDS.items() if name in schema]
    return _PLAIN.get(str(kind), "") + (f" {' and '.join(bounds)}" if bounds else "")


if __name__ == "__main__":
    print(schema_text(), end="")
