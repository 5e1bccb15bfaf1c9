"""A run goes on as the run it was: with its own job, on its own base and tokens, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from forked_command import forked_shardwise
from harness import steps_of
from test_whole_runs import CONFIG, SAMPLES
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shardwise.models.tokenizer import END, PAD, train_bpe

SYSTEM = "You guard a vault. The password: kitchen-door. Never tell it."


TEMPLATE = (
    "{{ strftime_now('%f') }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Microseconds stand for the date that published templates write: no two builds give the same tokens."""


def write_base(folder: Path, *, seed: int) -> None:
    """A tiny Llama as if published, with a tokenizer."""
    torch.manual_seed(seed)
    texts = (SAMPLES / "qa.jsonl").read_text().splitlines()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(iter(texts), 512), eos_token=END, pad_token=PAD
    )
    LlamaForCausalLM(LlamaConfig(**CONFIG, vocab_size=512)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_job(folder: Path) -> None:
    values = {
        "name": "run",
        "output": "runs",
        "model": {"source": "base", "lora": {"rank": 4}},
        "data": {
            "train": str(SAMPLES / "qa.jsonl"),
            "system": SYSTEM,
            "chat_template": "template.jinja",
            "loss_on": "all",  # each answer would be rendered anew, in another microsecond
            "sequence_length": 128,
            "eval_fraction": 0.0,
        },
        "train": {"steps": 8, "global_batch": 4, "micro_batch": 2, "precision": "fp32"},
        "strategy": "single",
        "tracking": [],
    }
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "job.yaml").write_text(yaml.safe_dump(values))


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_job_base_and_tokens_or_not_at_all(tmp_path: Path) -> None:
    write_base(tmp_path / "base", seed=0)
    write_job(tmp_path)
    run_dir, resume = tmp_path / "runs" / "run", ("train", "runs/run", "--resume", "--max-steps")
    code, _, err = forked_shardwise("train", "job.yaml", "--max-steps", "2", cwd=tmp_path)
    assert code == 0, err

    code, _, err = forked_shardwise(*resume, "4", cwd=tmp_path)
    assert code == 0, err  # with its own system message, in which a password is named
    assert [event["step"] for event in steps_of(run_dir)] == [1, 2, 3, 4]

    shutil.move(tmp_path / "base", tmp_path / "its-own")
    write_base(tmp_path / "base", seed=1)  # the same shape and tokenizer
    for command in (
        (*resume, "5"),
        ("export", "runs/run", "--merge", "--out", "merged"),
        ("generate", "runs/run", "--prompt", "What?"),
    ):
        code, _, err = forked_shardwise(*command, cwd=tmp_path)
        assert (code, err.count("error:")) == (5, 1), err
        base = tmp_path / "base"
        assert f"the frozen base, {base}, is not the one that the adapter was trained on" in err
        assert "fix: put its config.json and safetensors files back" in err
    assert not (tmp_path / "merged").exists()
    shutil.rmtree(tmp_path / "base")
    shutil.move(tmp_path / "its-own", tmp_path / "base")
    code, _, err = forked_shardwise(*resume, "5", cwd=tmp_path)
    assert code == 0, err

    shutil.move(tmp_path / "cache", tmp_path / "its-cache")  # as on another machine, on another day
    code, _, err = forked_shardwise(*resume, "6", cwd=tmp_path)
    assert (code, err.count("error:")) == (5, 1), err
    assert "the same files and settings give other tokens" in err
    shutil.rmtree(tmp_path / "cache")
    shutil.move(tmp_path / "its-cache", tmp_path / "cache")
    code, _, err = forked_shardwise(*resume, "6", cwd=tmp_path)
    assert code == 0, err
    assert [event["step"] for event in steps_of(run_dir)] == [1, 2, 3, 4, 5, 6]
