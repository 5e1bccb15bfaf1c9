"""Adapters on a quantised base train under every engine what float64 trains on the values it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_worker import run_in_processes
from harness import Run, run_all, steps_of
from peft import PeftModel
from test_whole_runs import CONFIG, evaluations, job, losses
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.job.schema import Job
from shardwise.training.afterwards import export_run

pytestmark = pytest.mark.slow
pytest.importorskip("bitsandbytes")

VALUES = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
"""Of the tiny Llama's linear layers."""
SHARDING = ("zero3", "fsdp2")


@pytest.mark.parametrize("processes", [1, 2])
def test_losses_norms_and_weights_are_those_of_float64(tmp_path, processes: int) -> None:
    results = run_in_processes("quantization", processes=processes, folder=tmp_path, timeout=590)
    assert len(results) == 3 * (8 if processes == 1 else 7)
    for name, found in results.items():
        exact = "/fp32/" in name
        assert found["loss_error"] < (1e-5 if exact else 1e-2), name
        assert found["norm_error"] < (1e-5 if exact else 5e-2), name
        assert found["weight_error"] < (1e-3 if exact else 6e-2), name
        assert found["right"], name
        assert found["resumed"], name
        stored = VALUES if name.endswith("int8") else VALUES // 2
        shards = processes if name.startswith(SHARDING) else 1
        assert found["stored_bytes"] == stored // shards, name


def test_fsdp2_gathers_codes_bit_for_bit(tmp_path: Path) -> None:
    """Some codes are NaN as bf16 or fp16 numbers, which a copy on CUDA does not keep (decision 0074)."""
    results = run_in_processes("gathered_codes", processes=2, folder=tmp_path, timeout=300)
    assert {tuple(found) for found in results.values()} == {(True, True)}
    assert len(results) == 4


def base_of(folder: Path, *, processes: int) -> Path:
    """A small Llama with sharp logits, as if published, and the tokenizer that the packaged samples give."""
    values = job(folder, "source", "zero0" if processes > 1 else "single", steps=1)
    (source,) = run_all([Run(values)], processes=processes, folder=folder / "source")
    base, (step,) = folder / "base", (source / "checkpoints").iterdir()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG, vocab_size=512, initializer_range=0.1)).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((step / "model" / name).read_bytes())
    return base


def adapters_on(base: Path, folder: Path, name: str, strategy: str, quantization: str, **train: Any) -> Any:
    settings = {"steps": 20, "eval_every": 10, "precision": "bf16", **train}
    values = job(folder, name, strategy, **settings)
    lora = {"rank": 8, "alpha": 16.0, "targets": "all-linear"}
    values["model"] = {"source": str(base), "lora": lora, "quantization": quantization}
    return Job.model_validate(values).model_dump(mode="json")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_whole_runs_are_close_to_bf16_and_can_be_resumed_and_exported(tmp_path: Path) -> None:
    base = base_of(tmp_path, processes=2)
    kinds = {"bf16": "none", "int8": "int8", "nf4": "nf4"}
    runs = [Run(adapters_on(base, tmp_path, name, "zero2", kind)) for name, kind in kinds.items()]
    part = adapters_on(base, tmp_path, "part", "zero2", "nf4")
    runs += [Run(part, max_steps=7), Run(part, resume=True)]
    folders = run_all(runs, processes=2, folder=tmp_path)
    found = dict(zip(kinds, folders, strict=False))
    start, end = (evaluations(found["bf16"])[i] for i in (0, -1))
    learnt = start - end
    assert learnt > 0.3
    for name, share in (("int8", 0.005), ("nf4", 0.02)):
        mine = evaluations(found[name])
        print(f"{name}: evaluation {mine[0]:.4f} to {mine[-1]:.4f}, bf16 {start:.4f} to {end:.4f}")
        assert max(abs(a - b) for a, b in zip(losses(found[name]), losses(found["bf16"]), strict=True)) < (
            share * start
        ), name
        assert mine[0] - mine[-1] > 0.9 * learnt, name
    whole, resumed = steps_of(found["nf4"]), steps_of(folders[-1])
    assert [(e["loss"], e["grad_norm"]) for e in resumed] == [(e["loss"], e["grad_norm"]) for e in whole]

    for name in ("int8", "nf4"):
        assert export_run(found[name], tmp_path / f"{name}-adapter")["kind"] == "adapter"
        merged = export_run(found[name], tmp_path / f"{name}-merged", merge=True)
        assert (merged["kind"], merged["dtype"]) == ("merged", "bfloat16")
        tokens = torch.arange(60).view(3, 20) * 8
        with torch.no_grad():
            plain = LlamaForCausalLM.from_pretrained(base).eval()
            untrained = plain(tokens).logits
            on_it = PeftModel.from_pretrained(plain, tmp_path / f"{name}-adapter").eval()(tokens).logits
            whole_model = LlamaForCausalLM.from_pretrained(tmp_path / f"{name}-merged").eval()(tokens).logits
        # the adapter moves the base as it was published, by about what it moves the quantised one
        assert (on_it - whole_model).norm() < (on_it - untrained).norm(), name
