"""Unmodified scripts of Hugging Face with the files of `shardwise emit`, in 2 processes on CPUs.

The launchers are real. Each Python that they start runs in a fork, as importing torch takes so long.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forks import handed_over
from harness import VENV_BIN

from shardwise.cli import main

VOCABULARY, ROW, ROWS = 64, 32, 64

TRAINER = """
import json
import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
rows = torch.load("rows.pt")
trainer = Trainer(
    model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]
)
trainer.train()
engine = trainer.model_wrapped
if trainer.is_world_process_zero():
    json.dump({
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "stage": engine.zero_optimization_stage(),
        "batch": engine.train_batch_size(),
        "dtype": str(next(engine.parameters()).dtype),
        "clipping": engine.gradient_clipping(),
        "recomputes": model.is_gradient_checkpointing,
    }, open("result.json", "w"))
"""

ACCELERATE = """
import json
import torch
from accelerate import Accelerator, PartialState
from transformers import AutoConfig, AutoModelForCausalLM

PartialState(cpu=True)
accelerator = Accelerator()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.load("rows.pt"), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
if accelerator.is_main_process:
    json.dump({
        "losses": losses,
        "stage": model.zero_optimization_stage(),
        "batch": model.train_batch_size(),
        "dtype": str(next(model.parameters()).dtype),
        "clipping": model.gradient_clipping(),
    }, open("result.json", "w"))
"""

OWN = """
import json
import torch
import torch._dynamo
import deepspeed
from transformers import AutoConfig, AutoModelForCausalLM

torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config="engine/deepspeed.json"
)
rows, losses = torch.load("rows.pt"), []
for step in range(12):
    batch = rows[2 * step : 2 * step + 2]
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if torch.distributed.get_rank() == 0:
    json.dump({
        "losses": losses,
        "stage": engine.zero_optimization_stage(),
        "batch": engine.train_batch_size(),
        "dtype": str(next(engine.parameters()).dtype),
        "steps": engine.global_steps,
    }, open("result.json", "w"))
"""

# A thread of gloo now and then aborts a process that has done its work: none of the emitted files' business.
ENDING = """
import os
torch.distributed.barrier()
os._exit(0)
"""

# DeepSpeed compiles a transport of its own on CPUs, for a minute; gloo does as well.
WITHOUT_COMPILING = """
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model's shape, rows of four repeated texts, and a job that names both."""
    import torch
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    ).save_pretrained(tmp_path / "model")
    texts = torch.randint(0, VOCABULARY, (4, ROW), generator=torch.Generator().manual_seed(1))
    torch.save(texts.repeat(ROWS // 4, 1), tmp_path / "rows.pt")
    (tmp_path / "text.txt").write_text("words\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def emitted(strategy: str, target: str, **train: Any) -> None:
    """Plans a job for two GPUs and writes its files, as a user would."""
    job = {
        "name": "tiny",
        "model": {"source": "model", "weights": "random", "tokenizer": "train", "tokenizer_vocab": 300},
        "data": {"train": "text.txt", "sequence_length": ROW},
        "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"},
        "train": {"global_batch": 8, "micro_batch": 2, "steps": 6, **train},
        "strategy": strategy,
    }
    Path("job.yaml").write_text(json.dumps(job))
    assert main(["emit", "job.yaml", "--gpus", "2x24GB", "--to", target]) == 0


def run(script: str, launch: str, *arguments: str) -> dict[str, Any]:
    """Runs a script with an emitted launch script; what it wrote into result.json."""
    Path("train.py").write_text(WITHOUT_COMPILING + script + ENDING)
    environment = {
        **os.environ,
        **handed_over(),
        "PATH": f"{VENV_BIN}:{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", f"engine/{launch}", "train.py", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    result: dict[str, Any] = json.loads(Path("result.json").read_text())
    return result


def learns(losses: list[float]) -> bool:
    """From chance, ln 64 = 4.16, down; what is learned are four texts."""
    return abs(losses[0] - math.log(VOCABULARY)) < 0.2 and losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_a_trainer_script_runs_with_the_deepspeed_launcher(folder: Path) -> None:
    emitted("zero2", "deepspeed", checkpointing="full")
    result = run(
        TRAINER,
        "launch-trainer.sh",
        *("--use_cpu", "--output_dir", "out", "--max_steps", "6", "--logging_steps", "1"),
        *("--report_to", "none", "--save_strategy", "no"),
    )
    assert len(result["losses"]) == 6
    assert learns(result["losses"])
    assert (result["stage"], result["batch"], result["dtype"]) == (2, 8, "torch.bfloat16")
    assert result["clipping"] == 1.0
    assert result["recomputes"] is True


@pytest.mark.slow
def test_an_accelerate_script_runs_with_accelerate_launch(folder: Path) -> None:
    emitted("zero3", "accelerate")
    result = run(ACCELERATE, "launch.sh")
    assert len(result["losses"]) == ROWS / 2 / 2
    assert learns(result["losses"])
    assert (result["stage"], result["batch"], result["dtype"]) == (3, 8, "torch.bfloat16")


@pytest.mark.slow
def test_an_own_script_runs_with_torchrun(folder: Path) -> None:
    emitted("zero1", "torchrun")
    result = run(OWN, "launch.sh")
    assert learns(result["losses"])
    assert (result["stage"], result["batch"], result["dtype"]) == (1, 8, "torch.bfloat16")
    assert result["steps"] == 6, "two micro-batches a step"
