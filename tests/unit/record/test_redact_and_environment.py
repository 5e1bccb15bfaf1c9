"""Secrets never reach the record; what only looks like one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise.record.environment import environment
from shardwise.record.write import redact, redact_tree

LONG = "aZ09" * 12

SECRETS = [
    "hf_" + LONG[:34],
    "sk-" + LONG,
    "sk-proj-" + LONG,
    "sk-ant-api03-" + LONG,
    "ghp_" + LONG[:36],
    "github_pat_" + LONG,
    "glpat-" + LONG[:20],
    "AKIA" + "ABCD1234EFGH5678",
    "AIza" + LONG[:35],
    "xoxb-123456789012-" + LONG[:24],
    "nvapi-" + LONG,
    "pypi-" + LONG,
    f"eyJhbGciOiJIUzI1.{LONG}.{LONG}",
]

NAMED = [
    ("WANDB_API_KEY=", "0123456789abcdef0123456789abcdef01234567"),
    ("HF_TOKEN: ", "abcdefgh12345"),
    ('{"aws_secret_access_key": "', "wJalrXUtnFEMI/K7MDENG/bPx"),
    ("password=", "hunter2hunter2"),
    ("Authorization: Bearer ", "abc.def-ghi_jkl=="),
    ("https://user:", "s3cretpass"),
]

HARMLESS = [
    "d6f3c1b0a9e8d7c6b5a4f3e2d1c0b9a8f7e6d5c4",  # a commit
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "meta-llama/Llama-3.1-8B-Instruct",
    "target_tokens=123456",
    "tokens_per_second: 123456.7",
    "pad_token: <|endoftext|>",
    "eos_token='<|im_end|>'",
    "max_new_tokens 1000000",
    "tokenizer: gpt2-medium",
    "task-specific-adapter-for-summaries-v2-long",
    "risk-adjusted-returns-of-a-long-portfolio",
    "disk-usage-of-all-folders-in-bytes-today",
    "https://huggingface.co/datasets/tatsu-lab/alpaca",
    "http://localhost:6006/path@v1",
    "runs/ghp_short",
    "hf_home",
    "checkpoints/step-000100/manifest.json",
    "the bearer of bad news arrived",
    "secret: no",
    "key=value",
    "learning_rate=2e-5",
    "name: password-reset-dialogues",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("around", ["{}", "--set x={} --go", '{{"a": "{}"}}', "error: '{}' refused\n"])
def test_every_token_shape_is_hidden(secret: str, around: str) -> None:
    text = redact(around.format(secret))
    assert text == around.format("[hidden]")


@pytest.mark.parametrize(("name", "value"), NAMED)
def test_a_value_is_hidden_by_its_name(name: str, value: str) -> None:
    assert redact(f"{name}{value}@host").startswith(f"{name}[hidden]")
    assert value not in redact(f"{name}{value}@host")


def test_a_private_key_is_hidden_whole() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----"
    assert redact(f"a {key} b") == "a [hidden] b"


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_nested_values_are_searched_and_their_kinds_kept() -> None:
    value = {"a": [1, None, {"b": SECRETS[0]}], "c": 2.5, "d": True}
    assert redact_tree(value) == {"a": [1, None, {"b": "[hidden]"}], "c": 2.5, "d": True}


def test_the_environment_names_versions_machine_and_command_without_secrets() -> None:
    values = environment(
        gpus=[{"name": "H200", "memory_bytes": 1 << 37}], driver="570.1", command=["shardwise", SECRETS[0]]
    )
    assert values["command"] == ["shardwise", "[hidden]"]
    import torch

    # a wheel's name may leave out what it was built for
    assert torch.__version__.startswith(values["versions"]["torch"])
    assert values["python"] == sys.version.split()[0]
    assert values["gpus"] == [{"name": "H200", "memory_bytes": 1 << 37}]
    assert values["host_memory_bytes"] > 1 << 28
    assert json.loads(json.dumps(values)) == values


def test_the_record_is_written_without_importing_torch() -> None:
    code = (
        "import sys, shardwise.record.write, shardwise.record.environment as e, shardwise.record.trackers;"
        "import shardwise.launch.local, shardwise.report.terminal; e.environment();"
        "print([m for m in ('torch', 'transformers', 'numpy', 'tensorboard') if m in sys.modules])"
    )
    path = {**os.environ, "PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=path)
    assert done.stdout == "[]\n"
