"""What `check` advises where a configuration does not fit: first what keeps the training as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.app.check import check
from shardwise.errors import MachineError
from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Job
from shardwise.lint.fit import Fit, fit_of
from shardwise.lint.read import read
from shardwise.lint.setup import Setup
from shardwise.planner.plan import Nearest, Plan, Workload
from shardwise.planner.search import search
from shardwise.simulate.prediction import Energy, Memory, MemoryTerms, Prediction, Time
from shardwise.simulate.step_trace import StepTrace
from shardwise.space.candidates import candidates
from shardwise.strategy import Strategy

GIB = 1 << 30
Need = Callable[[Strategy], float]
"""GiB on a GPU."""


def planner(need: Need, host_bytes: int = 0) -> Callable[[Job, Hardware], Plan]:
    """The real search over the real space of strategies; only how much each needs is made up."""

    def predicted(strategy: Strategy, hardware: Hardware) -> Prediction:
        needed = round(need(strategy) * GIB)
        none = dict.fromkeys(MemoryTerms.__dataclass_fields__, 0)
        memory = Memory(
            peak_reserved_bytes=needed,
            peak_allocated_bytes=needed,
            outside_allocator_bytes=0,
            capacity_bytes=hardware.gpu.memory_bytes,
            terms=MemoryTerms(**{**none, "weights_bytes": needed}),
            host_bytes=host_bytes,
        )
        seconds: dict[str, Any] = dict.fromkeys(Time.__dataclass_fields__, 0.0)
        cost = (
            1 / strategy.micro_batch
            + (strategy.checkpoint_every > 0)
            + strategy.stage
            + 4 * (strategy.offload_optimizer != "none")
        )
        time = Time(**{**seconds, "step_seconds": cost, "tokens_per_step": 1 << 17, "world_size": 4})
        energy = Energy(joules_per_step=1, idle_joules=0, tokens_per_step=1 << 17, at_power_limit=False)
        return Prediction(memory=memory, time=time, energy=energy)

    def make_plan(job: Job, hardware: Hardware) -> Plan:
        strategies, refused = candidates(
            job,
            world_size=hardware.world_size,
            gpus_per_node=hardware.gpus_per_node,
        )
        trace = StepTrace(
            parameters=(), buffers=(), units=(), events=(), ops=(), rows=1, sequence_length=1,
            checkpoint_every=0, precision="bf16",
        )  # fmt: skip
        plan = search(
            strategies,
            refused=refused,
            hardware=hardware,
            workload=Workload.of(job, parameters=1, trainable_parameters=1),
            trace_for=lambda *_: trace,
            simulate=lambda _, strategy, hardware: predicted(strategy, hardware),
        )
        if plan.chosen is None:
            lora = Nearest(
                what="LoRA of rank 16 instead of all weights", how="--lora 16", option=plan.options[0]
            )
            return Plan(**{**vars(plan), "nearest": lora})
        return plan

    return make_plan


ASKED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
SCRIPT = (
    "from transformers import Trainer, TrainingArguments\n"
    "TrainingArguments(gradient_checkpointing={recompute}, bf16=True)\n"
)


def fitted(need: Need, *, recompute: bool = False, text: str = "") -> Fit:
    """On GPUs of 22 GiB; the configuration asks for ZeRO-2, 4 rows at a time, 32 a step."""
    config = read(text or json.dumps(ASKED), "ds.json")
    script = read(SCRIPT.format(recompute=recompute), "train.py")
    setup = Setup(documents=(config, script), asked_world_size=4)
    return fit_of(setup, "llama-2-7b", [], parse_hardware("4xRTX4090"), planner(need))


def rows_and_blocks(strategy: Strategy) -> float:
    return 10 + strategy.micro_batch * (2 if strategy.checkpoint_every == 1 else 8)


def states(strategy: Strategy) -> float:
    """What no checkpointing saves."""
    if strategy.offload_optimizer != "none":
        return 8
    return {0: 90, 1: 60, 2: 40, 3: 15}[strategy.stage] + 0.1 * strategy.micro_batch


@pytest.mark.parametrize(
    ("need", "recompute", "says"),
    [
        (
            rows_and_blocks,
            False,
            "activation checkpointing (gradient_checkpointing) of all blocks: fits, in 18.0",
        ),
        (
            lambda strategy: 6 + 6 * strategy.micro_batch,
            True,
            "a micro-batch of 2 and accumulation over 4: fits, in 18.0",
        ),
        (states, True, "ZeRO stage 3: fits, in 15.4"),
        (
            lambda strategy: 6 + states(strategy) * (strategy.stage < 3 or 2),
            True,
            "offload_optimizer to cpu: fits",
        ),
        (lambda _: 100, True, "LoRA of rank 16 instead of all weights: "),
    ],
    ids=["checkpointing", "micro-batch", "stage", "offload", "LoRA"],
)
def test_the_cheapest_change_that_is_enough_is_advised(need: Need, recompute: bool, says: str) -> None:
    fit = fitted(need, recompute=recompute)
    assert not fit.fits
    assert fit.nearest.startswith(says), fit.nearest


def test_what_fits_needs_no_advice() -> None:
    fit = fitted(lambda _: 10)
    assert fit.fits
    assert fit.nearest == ""


def test_advice_keeps_the_engine() -> None:
    """FSDP2 that reshards would fit as well as ZeRO-3: each is told what its own file can say."""
    fsdp = {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
    }
    fit = fitted(lambda strategy: 15 if strategy.reshard else 40, recompute=True, text=yaml.safe_dump(fsdp))
    assert fit.nearest == "fsdp_reshard_after_forward: true: fits, in 15.0 GiB (predicted)"


AXOLOTL = "base_model: x\nmicro_batch_size: 2 # size=2\nbf16: true\nfsdp_config:\n  offload_params: false\n"
ALONE = SCRIPT.format(recompute=False).replace("bf16=True", "bf16=True, per_device_train_batch_size=2")


@pytest.mark.parametrize(
    ("gpus", "script", "also", "strategy", "assumed"),
    [
        ("1xRTX4090", ALONE, "", "single", "one process"),
        ("2xRTX4090", ALONE, "", "ddp", "DDP, one process a GPU, as torchrun starts it"),
        ("1xRTX4090", "import torch\nloss.backward()\n", "", "single", "one process"),
        ("1xRTX4090", ALONE, "distributed_type: 'NO'\nnum_processes: 1\n", "single", "one process"),
        ("2xRTX4090", "import torch\nfrom accelerate import Accelerator\nAccelerator()\n",
         "distributed_type: MULTI_GPU\nnum_processes: 2\n", "ddp",
         "DDP, one process a GPU, as torchrun starts it"),
        ("2xRTX4090", ALONE.replace("bf16=True", "bf16=True, fsdp='full_shard auto_wrap'"), "",
         "fsdp2", "FSDP2, for the Trainer's `fsdp`"),
        ("2xRTX4090", AXOLOTL, "", "fsdp2", "FSDP2, for the Trainer's `fsdp`"),
        ("2xRTX4090", AXOLOTL[: AXOLOTL.index("fsdp")], "", "ddp",
         "DDP, one process a GPU, as torchrun starts it"),
    ],
)  # fmt: skip
def test_a_script_without_a_file_that_distributes_it(
    gpus: str, script: str, also: str, strategy: str, assumed: str
) -> None:
    documents = (
        read(script, "train.yml" if ": x" in script else "train.py"),
        *([read(also, "a.yaml")] if also else []),
    )
    hardware = parse_hardware(gpus)
    setup = Setup(documents=documents, asked_world_size=hardware.world_size)
    fit = fit_of(setup, "llama-2-7b", [], hardware, planner(rows_and_blocks))
    assert fit.option is not None
    assert (fit.option.strategy.engine, fit.assumed[0]) == (strategy, assumed)
    assert fit.option.strategy.precision == ("bf16" if script.count("bf16") else "fp32")
    assert fit.option.strategy.micro_batch == (2 if "size=2" in script else fit.option.strategy.micro_batch)
    assert fit.left_out == ()


@pytest.mark.parametrize(
    ("gpus", "script", "missing"),
    [
        ("2xRTX4090", "import torch\nloss.backward()\n", "how the processes share the work"),
        ("1xRTX4090", "import deepspeed\ndeepspeed.initialize(config=path)\n", "DeepSpeed configuration"),
        ("2xRTX4090", ALONE.replace("bf16=True", "deepspeed='gone.json'"), "DeepSpeed configuration"),
        ("2xRTX4090", ALONE + "AutoModel.from_pretrained('x', device_map='auto')\n", "`device_map`"),
    ],
)
def test_what_is_missing_for_a_prediction_is_named(gpus: str, script: str, missing: str) -> None:
    hardware = parse_hardware(gpus)
    setup = Setup(documents=(read(script, "train.py"),), asked_world_size=hardware.world_size)
    fit = fit_of(setup, "llama-2-7b", [], hardware, planner(rows_and_blocks))
    assert fit.option is None
    assert missing in fit.unavailable


def test_a_model_that_cannot_be_looked_at_leaves_the_findings() -> None:
    def unreachable(job: Job, hardware: Hardware) -> Plan:
        raise MachineError("x/y is not on this machine, and the hub cannot be reached")

    setup = Setup(documents=(read(ALONE, "train.py"),), asked_world_size=1)
    fit = fit_of(setup, "x/y", [], parse_hardware("1xRTX4090"), unreachable)
    assert fit.lines() == ["fit: not known: x/y is not on this machine, and the hub cannot be reached"]


def test_each_of_several_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(job: Job, hardware: Hardware, *, making: object) -> Plan:
        return planner(lambda _: 40.0 if job.name == "big" else 15.0)(job, hardware)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.app.check.make_plan", planned)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    for name in ("small", "big"):
        job = f"name: {name}\nmodel: {{source: llama-2-7b}}\ndata: {{train: rows.jsonl}}\nstrategy: zero2\n"
        Path(f"{name}.yaml").write_text(f"{job}train: {{steps: 9, global_batch: 8}}\n")
    report = check(["small.yaml", "big.yaml"], gpus="4xRTX4090")
    assert [(one.file, one.fits) for one in report.fits] == [("small.yaml", True), ("big.yaml", False)]
    assert [one.file for one in report.findings if one.rule == "does-not-fit"] == ["big.yaml"]
    assert "fit of small.yaml: fits 4 x" in report.text()
    assert "fit of big.yaml: does not fit 4 x" in report.text()
    assert report.failed
    assert report.to_json()["fit"]["file"] == "big.yaml"


@pytest.mark.parametrize(("host_bytes", "warned"), [(GIB - 1, False), (GIB, True)])
def test_memory_that_each_host_has_need_not_be_stated(
    host_bytes: int, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(job: Job, hardware: Hardware, *, making: object) -> Plan:
        return planner(lambda _: 15.0, host_bytes)(job, hardware)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.app.check.make_plan", planned)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    job = "name: a\nmodel: {source: llama-2-7b}\ndata: {train: rows.jsonl}\nstrategy: zero2-offload\n"
    Path("job.yaml").write_text(f"{job}train: {{steps: 9, global_batch: 8}}\n")
    report = check("job.yaml", gpus="4xRTX4090")
    found = [(one.severity, one.fix) for one in report.findings if one.rule == "does-not-fit"]
    assert found == [("warning", "--gpus ...+1GiB, if a host has that much (`free -g`)")] * warned


@pytest.mark.parametrize(("needed", "fix"), [(40.0, "LoRA of rank 16 instead of all weights"), (15.0, "")])
def test_a_job_of_shardwises_own(
    needed: float, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(job: Job, hardware: Hardware, *, making: object) -> Plan:
        return planner(lambda _: needed)(job, hardware)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.app.check.make_plan", planned)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    job = "name: a\nmodel: {source: llama-2-7b}\ndata: {train: rows.jsonl}\nstrategy: zero2\n"
    job += "train: {steps: 9, global_batch: 8}\n"
    Path("job.yaml").write_text(job)
    report = check("job.yaml", gpus="4xRTX4090")
    assert report.fit is not None
    assert report.fit.lines()[0].startswith("fit: does not fit 4 x" if fix else "fit: fits 4 x")
    assert [one.rule for one in report.findings if one.severity == "error"] == ["does-not-fit"] * bool(fix)
    assert fix in report.fit.nearest
    assert check("job.yaml").fit is None
    Path("job.yaml").write_text(job.replace("zero2", "zero9"))
    report = check("job.yaml", gpus="4xRTX4090")
    assert report.fit is not None
    assert report.fit.unavailable == "job.yaml is no job that can run"


FACTORY = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
finetuning_type: lora
quantization_bit: {bits}
per_device_train_batch_size: 1
bf16: true
"""
QLORA = """from transformers import BitsAndBytesConfig, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model
bits = BitsAndBytesConfig(load_in_4bit={on})
model = get_peft_model(model, LoraConfig(r=8))
Trainer(model=model, args=TrainingArguments(bf16=True, gradient_checkpointing=True)).train()
"""


@pytest.mark.parametrize(
    ("text", "base", "recomputed"),
    [
        (FACTORY.format(bits=4), "nf4", "full"),
        (FACTORY.format(bits=8), "int8", "full"),
        (FACTORY.format(bits="null"), "none", "full"),
        (FACTORY.format(bits=4) + "disable_gradient_checkpointing: true\n", "nf4", "none"),
        (QLORA.format(on=True), "nf4", "full"),
        (QLORA.format(on=False), "none", "full"),
    ],
)
def test_a_quantised_base_is_planned_as_one(text: str, base: str, recomputed: str) -> None:
    planned = list[Job]()

    def make_plan(job: Job, hardware: Hardware) -> Plan:
        planned.append(job)
        return planner(rows_and_blocks)(job, hardware)

    name = "train.py" if "import" in text else "train.yaml"
    setup = Setup(documents=(read(text, name),), asked_world_size=2)
    fit = fit_of(setup, "llama-2-7b", [], parse_hardware("2xRTX4080"), make_plan)
    job = planned[0]
    assert job.model.lora is not None
    assert (job.model.quantization, job.model.lora.rank) == (base, 8)
    assert job.train.checkpointing == recomputed
    assert "bf16" not in " ".join(fit.assumed)


def test_llama_factory_stores_4_bits_so_that_zero_3_shards_them(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    rules = dict[int, set[str]]()
    for bits in (4, 8):
        (tmp_path / "train.yaml").write_text(FACTORY.format(bits=bits) + "deepspeed: ds.json\n")
        report = check([tmp_path / "train.yaml", tmp_path / "ds.json"], gpus="2xRTX4080")
        rules[bits] = {one.rule for one in report.findings if one.severity == "warning"}
        assert report.fits[0].unavailable == "`--model Qwen/Qwen2.5-7B-Instruct` plans whether it fits"
    assert rules[8] - rules[4] == {"quantised-under-zero"}


def test_a_model_that_was_named_is_not_asked_for_again(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(FACTORY.format(bits=4))
    (tmp_path / "broken.json").write_text("{")
    files = [tmp_path / "train.yaml", tmp_path / "broken.json"]
    assert check(files, gpus="2xRTX4080", model="llama-2-7b").fits == ()


@pytest.mark.parametrize(
    ("stage", "place", "said"), [(3, "none", False), (3, "cpu", True), (2, "cpu", False)]
)
def test_what_deepspeed_alone_does_with_offloaded_gradients_is_said(
    stage: int, place: str, said: bool
) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": place}}
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    setup = Setup(documents=(read(text, "ds.json"),), asked_world_size=2)
    fit = fit_of(setup, "llama-2-7b", [], parse_hardware("2xH200+512GiB"), planner(rows_and_blocks))
    assert any("three buckets" in one for one in fit.assumed) == said
