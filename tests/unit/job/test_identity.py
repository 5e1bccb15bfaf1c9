"""Every key of a job is known to make a run that run, or not to."""

from __future__ import annotations

from shardwise.job import json_schema
from shardwise.job.identity import BY_CONTENT, COMPARED, DECISIVE, FREE, IN_DATA_KEY, identity_of, within
from shardwise.job.schema import Job

JOB = Job.model_validate({"name": "x", "model": {"source": "m"}, "data": {"train": "t"}})


def test_every_key_is_in_exactly_one_set() -> None:
    sections = {key[:-1] for key in json_schema.every_key()}
    leaves = [".".join(key) for key in json_schema.every_key() if key not in sections]
    sets = (tuple(COMPARED), IN_DATA_KEY, BY_CONTENT, FREE)
    places = {key: sum(within(key, keys) for keys in sets) for key in leaves}
    assert {key: number for key, number in places.items() if number != 1} == {}
    known = {".".join(key) for key in json_schema.every_key()}
    assert {key for keys in sets for key in keys} <= known


def test_a_section_stands_for_its_keys() -> None:
    assert within("model.lora.rank", DECISIVE)
    assert within("data.loss_on", DECISIVE)
    assert not within("data.loss_only", DECISIVE)
    assert not within("data", DECISIVE)


def test_the_identity_holds_the_values_under_the_fields_of_a_manifest() -> None:
    found = identity_of(JOB)
    assert list(found) == list(COMPARED.values())
    assert found["model"]["source"] == "m"
    assert (found["sequence_length"], found["steps"], found["seed"]) == (1024, None, 42)
