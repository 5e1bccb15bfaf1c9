"""`shardwise emit`: what it writes is right for those who read it, and passes `shardwise check`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from shardwise.cli import main
from shardwise.emit.files import Emitted, Target, emit
from shardwise.emit.request import Predicted, Request, Script
from shardwise.errors import JobError
from shardwise.job.schema import Lora, Optimizer
from shardwise.lint.check import check, load
from shardwise.lint.setup import Setup
from shardwise.strategy import Strategy

TARGETS: tuple[Target, ...] = get_args(Target)
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1, "checkpoint_every": 2},
    "zero2": {"stage": 2, "accumulation": 8, "checkpoint_every": 1},
    "zero2-fp16": {"stage": 2, "precision": "fp16"},
    "zero2-offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3": {"stage": 3, "accumulation": 4},
    "zero3-noreshard": {"stage": 3, "reshard": False, "clip_norm": 0.0},
    "zero3-offload": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "fsdp2": {"engine": "fsdp2", "checkpoint_every": 1},
    "fsdp2-offload": {"engine": "fsdp2", "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "single": {"engine": "single"},
}


PREDICTED = Predicted(needed_bytes=18 << 30, capacity_bytes=79 << 30, tokens_per_second_per_gpu=11856.4)
AT_THE_HEAD = "# predicted: 18.0 GiB of 79.0 GiB on the fullest GPU, 11,856 tokens/s a GPU"


def request(name: str, *, nodes: int = 1, own_optimizer: bool = True, folder: str = "/engine") -> Request:
    gpus = 1 if name == "single" else 4
    parts = {"engine": "deepspeed", "micro_batch": 2, **STRATEGIES[name]}
    return Request(
        name="run",
        strategy=Strategy(data_parallel=nodes * gpus, **parts),
        nodes=nodes,
        gpus_per_node=gpus,
        trainable_parameters=1_000_000,
        optimizer=Optimizer() if own_optimizer else None,
        predicted=PREDICTED,
        script=Script(sequence_length=2048, lora_rank=None),
        folder=folder,
    )


def write(emitted: Emitted, folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, text in emitted.files.items():
        (folder / name).write_text(text)
    return [folder / name for name in sorted(emitted.files)]


def refused(target: Target, name: str) -> bool:
    return (name == "single" and target != "torchrun") or (name.startswith("fsdp2") and target == "deepspeed")


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_check_finds_nothing_in_what_is_emitted(
    name: str, target: Target, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = request(name, nodes=nodes, folder=str(tmp_path / "engine"))
    if refused(target, name):
        with pytest.raises(JobError):
            emit(target, asked)
        return
    emitted = emit(target, asked)
    files = {name: text for name, text in emitted.files.items() if name != "task.yaml"}
    if target == "kubernetes":
        [files] = [
            one["data"] for one in yaml.safe_load_all(files["jobset.yaml"]) if one["kind"] == "ConfigMap"
        ]
    paths = write(replace(emitted, files=files), Path("engine"))
    documents, broken = load(paths)
    world = asked.nodes * asked.gpus_per_node
    assert broken == ()
    assert len(documents) >= len([path for path in paths if path.suffix != ".yaml"]) - 1
    together = check(Setup(documents=documents, asked_world_size=world, gpus_per_node=asked.gpus_per_node))
    assert [(one.file, one.rule, one.what) for one in together.findings] == []


@pytest.mark.parametrize("target", ["deepspeed", "slurm"])
def test_a_script_of_ones_own_is_told_to_read_the_deepspeed_file(target: Target) -> None:
    """The launchers pass their arguments on, and no file; Accelerate and the Trainer get theirs as a flag."""
    told = "\n# train.py has to read deepspeed.json itself: deepspeed.initialize(config=...)\n"
    own, trainer = (text for name, text in emit(target, request("zero2")).files.items() if "launch" in name)
    assert told in own
    assert "has to read" not in trainer
    for other in (emit("accelerate", request("zero2")), emit("torchrun", request("fsdp2"))):
        assert "has to read" not in "".join(other.files.values())


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name.startswith("zero")])
def test_deepspeed_and_the_trainer_take_their_files(name: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    files = emit("deepspeed", request(name)).files
    own, trainer = json.loads(files["deepspeed.json"]), json.loads(files["deepspeed.auto.json"])
    parsed = DeepSpeedConfig(own)
    strategy = request(name).strategy
    assert parsed.zero_optimization_stage == strategy.stage
    assert parsed.gradient_accumulation_steps == strategy.accumulation
    assert parsed.gradient_clipping == strategy.clip_norm
    assert "train_batch_size" not in own | trainer
    assert "optimizer" not in trainer
    assert trainer["zero_optimization"] == own["zero_optimization"]
    gathers = own["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save", False)
    assert gathers == (strategy.stage == 3)


def flags_of(script: str, folder: Path) -> list[str]:
    """What the launch script, which lies in the folder, gives to the training script."""
    return shlex.split(script.partition('"$@"')[2].replace("\\\n", " ").replace("$here", str(folder)))


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp2"])
def test_the_trainers_arguments_are_arguments_of_the_trainer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    monkeypatch.chdir(tmp_path)
    emitted = emit("torchrun", request(name))
    write(emitted, Path("engine"))
    parser = HfArgumentParser(TrainingArguments)
    values = vars(
        parser.parse_args([*flags_of(emitted.files["launch-trainer.sh"], tmp_path / "engine"), "--use_cpu"])
    )
    strategy = request(name).strategy
    assert values["per_device_train_batch_size"] == strategy.micro_batch
    assert values["gradient_accumulation_steps"] == strategy.accumulation
    assert values["bf16"] is True
    assert values["learning_rate"] == Optimizer().learning_rate
    if name == "zero1":
        assert json.loads(values["activation_checkpointing_kwargs"]) == {"every_n_layers": 2}
    if name == "zero2":
        assert values["gradient_checkpointing"] is True
    if name == "fsdp2":
        arguments = TrainingArguments(
            **{key: values[key] for key in ("fsdp", "fsdp_config", "output_dir", "use_cpu")}
        )
        plugin = arguments.fsdp_plugin_args
        assert (plugin["fsdp_version"], plugin["reshard_after_forward"]) == (2, True)
        assert plugin["activation_checkpointing"] is True


@pytest.mark.parametrize(("name", "offloads"), [("fsdp2", False), ("fsdp2-offload", True)])
def test_accelerate_makes_fsdp2_of_its_file(
    name: str, offloads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    monkeypatch.chdir(tmp_path)
    write(emit("accelerate", request(name)), Path("engine"))
    asked = launch_command_parser().parse_args(["--config_file", "engine/accelerate.yaml", "train.py"])
    arguments, _, _ = _validate_launch_command(asked)
    assert arguments.use_fsdp
    assert arguments.num_processes == 4
    for key, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
    assert (type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy") == offloads
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_accelerates_file_names_the_deepspeed_file_and_nothing_that_stands_in_it() -> None:
    files = emit("accelerate", request("zero3", nodes=2)).files
    values = yaml.safe_load(files["accelerate.yaml"])
    assert (values["num_machines"], values["num_processes"]) == (2, 8)
    assert values["deepspeed_config"] == {
        "deepspeed_config_file": "/engine/deepspeed.json",
        "zero3_init_flag": True,
        "deepspeed_multinode_launcher": "standard",
    }
    assert "mixed_precision" not in values
    config = json.loads(files["deepspeed.json"])
    assert config["bf16"]["enabled"] is True, "else Accelerate would take fp32"
    assert config["train_micro_batch_size_per_gpu"] == "auto"


STUB = """#!/bin/bash
words=("${@// /_}")  # a blank inside of a word is seen
printf "%s\\n" "$(basename "$0") ${words[*]}" >> "$CALLS"
"""


@pytest.mark.parametrize(
    ("target", "nodes", "calls"),
    [
        ("torchrun", 1, "torchrun --standalone --nproc_per_node 4 train.py --x"),
        (
            "torchrun",
            2,
            "torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d "
            "--rdzv_endpoint n1:29500 train.py --x",
        ),
        ("deepspeed", 1, "deepspeed --num_gpus 4 train.py --x"),
        ("deepspeed", 2, "deepspeed --hostfile hosts --num_gpus 4 train.py --x"),
        (
            "accelerate",
            1,
            "accelerate launch --config_file {engine}/accelerate.yaml "
            "--deepspeed_config_file {engine}/deepspeed.json train.py --x",
        ),
        ("slurm", 1, "srun --cpu-bind=none torchrun --standalone --nproc_per_node 4 train.py --x"),
        (
            "slurm",
            2,
            "srun --cpu-bind=none torchrun --nnodes 2 --nproc_per_node 4 --rdzv_id 77 --rdzv_backend c10d "
            "--rdzv_endpoint node-a:29500 train.py --x",
        ),
    ],
)
def test_the_scripts_start_these_commands(target: Target, nodes: int, calls: str, tmp_path: Path) -> None:
    engine = tmp_path / "of engine"  # a blank, as people have it
    paths = write(emit(target, request("zero2", nodes=nodes, folder=str(engine))), engine)
    script = next(path for path in paths if path.stem == "launch")
    assert called(script, tmp_path) == calls.format(engine=str(engine).replace(" ", "_"))


@pytest.mark.parametrize("target", ["torchrun", "deepspeed", "slurm", "accelerate", "skypilot"])
def test_the_files_are_found_from_any_folder(target: Target, tmp_path: Path) -> None:
    """Those of a shell script also where the folder was moved: Slurm runs a copy that knows no folder."""
    engine = tmp_path / "of engine"
    paths = write(emit(target, request("zero2", folder=str(engine))), engine)
    script = next(path for path in paths if path.stem == "launch-trainer")
    if target == "slurm":
        script = script.rename(tmp_path / "slurm_script")
    else:
        engine = engine.rename(tmp_path / "moved here")
        script = engine / script.name
    name, file = "deepspeed", "deepspeed.auto.json"
    if target == "accelerate":
        name, file = "deepspeed_config_file", "deepspeed.json"
    path = str(engine / file).replace(" ", "_")  # as one word
    assert f"--{name} {path} " in f"{called(script, tmp_path)} "
    assert (engine / file).is_file()


def test_one_node_needs_no_head_and_no_patience() -> None:
    for nodes, words in ((1, False), (2, True)):
        script = emit("slurm", request("zero2", nodes=nodes)).files["launch.sbatch"]
        assert ("HEAD_NODE" in script, "DEEPSPEED_TIMEOUT=60" in script) == (words, words)
    assert "DEEPSPEED" not in emit("slurm", request("fsdp2", nodes=2)).files["launch.sbatch"]


@pytest.mark.parametrize("target", TARGETS)
def test_what_takes_comments_says_what_was_predicted(target: Target) -> None:
    files = emit(target, request("zero2")).files
    for name, text in files.items():
        assert (AT_THE_HEAD in text.splitlines()[:4]) == (not name.endswith(".json")), name
        if name.endswith(".json"):
            json.loads(text)


LORA_JOB = {"sequence_length": 2048, "lora_rank": 16, "quantization": "nf4"}


def test_a_rate_without_its_schedule_is_said() -> None:
    """The Trainer's script has the schedule among its arguments; a file without an optimizer has no rate."""
    note = "deepspeed.json has the peak learning rate: an own script sets warm-up and schedule"
    assert note in emit("deepspeed", request("zero2")).notes
    assert note not in emit("deepspeed", request("zero2", own_optimizer=False)).notes
    assert note not in emit("torchrun", request("fsdp2")).notes


@pytest.mark.parametrize("target", TARGETS)
def test_what_the_script_has_to_do_is_said_at_the_head_and_in_a_note(target: Target) -> None:
    """Else a script that trains all weights, or keeps its activations, runs out of memory nevertheless."""
    script = Script.of_plan(LORA_JOB, Lora(rank=16, targets=["q_proj", "v_proj\nrm"]))
    duties = [
        "trains LoRA adapters of rank 16 on q_proj, v_proj rm (1M parameters)",
        "keeps the frozen weights in nf4",
        "takes rows of 2048 tokens, 2 at a time",
        "computes in bf16",
        "recomputes the activations of every block: model.gradient_checkpointing_enable()",
        "fuses the output head with the loss: one that keeps the logits needs more memory",
    ]
    emitted = emit(target, replace(request("zero2"), script=script))
    assert emitted.notes[0] == f"the prediction is for a script that {'; '.join(duties)}"
    for name, text in emitted.files.items():
        if not name.endswith(".json"):
            comments = [line.removeprefix("# - ") for line in text.splitlines() if line.startswith("# - ")]
            assert comments == duties, name


def test_what_a_plan_does_not_know_of_the_script_is_left_out() -> None:
    known = [*Script.of_plan(LORA_JOB, None).duties(request("zero1").strategy, trainable_parameters=5)]
    assert known[0] == "trains LoRA adapters of rank 16 (5 parameters)"
    assert known[4] == "recomputes the activations of one block in 2"
    whole = emit("torchrun", request("zero3")).notes[0]
    assert "trains all weights (1M parameters)" in whole
    assert "recomputes no activations" in whole


def called(script: Path, folder: Path) -> str:
    """The command that a script starts from another folder, in the place of its launcher."""
    tools = folder / "bin"
    tools.mkdir()
    for tool in ("torchrun", "deepspeed", "accelerate", "srun"):
        (tools / tool).write_text(STUB)
    (tools / "scontrol").write_text("#!/bin/bash\necho node-a\necho node-b\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    away = folder / "away"
    away.mkdir()
    subprocess.run(
        ["bash", str(script), "train.py", *(["--x"] if script.stem == "launch" else [])],
        cwd=away,
        env={
            "PATH": f"{tools}:{os.environ['PATH']}",
            "CALLS": str(folder / "calls"),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "HEAD_NODE": "n1",
            "HOSTFILE": "hosts",
        },
        check=True,
    )
    return (folder / "calls").read_text().removesuffix("\n")


def test_what_a_launcher_cannot_do_is_refused() -> None:
    with pytest.raises(JobError, match="FSDP2"):
        emit("deepspeed", request("fsdp2"))
    with pytest.raises(JobError, match="one process"):
        emit("accelerate", request("single"))
    nvme = Strategy(engine="deepspeed", stage=3, offload_parameters="nvme", nvme_path="/nvme")
    asked = replace(request("zero3"), strategy=nvme)
    with pytest.raises(JobError, match="NVMe"):
        emit("torchrun", asked)


PLAN: dict[str, Any] = {
    "schema": 1,
    "chosen": {
        "strategy": request("zero2").strategy.to_json(),
        "prediction": {
            "memory": {
                "peak_reserved_bytes": 17 << 30,
                "outside_allocator_bytes": 1 << 30,
                "capacity_bytes": 79 << 30,
            },
            "time": {"tokens_per_second_per_gpu": 11856.4},
        },
    },
    "hardware": {"nodes": 1, "gpus_per_node": 4},
    "job": {
        "name": "run",
        "trainable_parameters": 10**9,
        "lora_rank": None,
        "quantization": "none",
        "sequence_length": 1024,
    },
}


def test_a_plan_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(json.dumps(PLAN))
    assert main(["emit", "plan.json", "--to", "deepspeed", "--out", "files"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "wrote files/deepspeed.json: DeepSpeed's settings"
    assert out[-1].startswith(f"start: bash {tmp_path}/files/launch-trainer.sh train.py")
    assert "first:" not in " ".join(out)
    assert main(["emit", "plan.json", "--to", "kubernetes", "--out", "pods"]) == 0
    pods = capsys.readouterr().out.splitlines()
    asked = pods.index(
        next(line for line in pods if line.startswith("first: write your own for YOUR-CLAIM, YOUR-IMAGE"))
    )
    assert "kubectl" in pods[asked + 1]
    assert AT_THE_HEAD in Path("files/launch.sh").read_text()
    config = json.loads(Path("files/deepspeed.json").read_text())
    assert "optimizer" not in config, "a plan does not know it"
    assert config["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert main(["emit", "plan.json", "--to", "deepspeed", "--out", "files"]) == 2
    assert "files/deepspeed.json exists already" in capsys.readouterr().err
    for flag, value in {"--set": "train.steps=3", "--gpus": "8xH100"}.items():
        assert main(["emit", "plan.json", "--out", "more", flag, value]) == 2
        error = capsys.readouterr().err
        assert "a plan is not changed" in error
        assert f"at:  {flag}" in error


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"chosen": None}, "nothing fits in this plan"),
        ({"job": {"name": "a; rm -rf ~", "trainable_parameters": 1}}, "not a plan of this version"),
        ({"job": PLAN["job"] | {"quantization": "nf4\nrm -rf ~"}}, "not a plan of this version"),
        ({"job": PLAN["job"] | {"sequence_length": "1\nrm -rf ~"}}, "not a plan of this version"),
        (
            {"chosen": PLAN["chosen"] | {"strategy": PLAN["chosen"]["strategy"] | {"precision": "x\nrm"}}},
            "not a plan of this version",
        ),
        ({"hardware": {}}, "not a plan of this version"),
        ({"schema": 99}, "not a plan of this version"),
        ({"hardware": {"nodes": 1e999, "gpus_per_node": 4}}, "not a plan of this version"),
        ({"hardware": {"nodes": 0, "gpus_per_node": 4}}, "not a plan of this version"),
        ({"chosen": {**PLAN["chosen"], "prediction": {}}}, "not a plan of this version"),
    ],
)
def test_a_plan_that_says_nothing_is_refused(
    change: dict[str, Any],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(json.dumps(PLAN | change))
    assert main(["emit", "plan.json"]) == 2
    assert what in capsys.readouterr().err
    assert not Path("engine").exists()


def test_a_job_is_planned_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def make_plan(job: Any, hardware: Any, **_: Any) -> Any:
        asked.append((job.name, hardware.world_size))
        return types.SimpleNamespace(
            chosen=None, to_json=lambda: PLAN | {"job": PLAN["job"] | {"name": job.name}}
        )

    monkeypatch.setattr("shardwise.app.emit.make_plan", make_plan)
    monkeypatch.chdir(tmp_path)
    Path("qa.jsonl").write_text("{}\n")
    Path("job.yaml").write_text(
        "name: emitted\nmodel: {source: org/model}\ndata: {train: qa.jsonl}\n"
        "optimizer: {learning_rate: 1e-5}\n"
    )
    change = ["--set", "optimizer.learning_rate=3e-4"]
    assert main(["emit", "job.yaml", "--gpus", "4xH100", "--to", "torchrun", *change]) == 0
    assert asked == [("emitted", 4)]
    assert json.loads(Path("engine/deepspeed.json").read_text())["optimizer"]["params"]["lr"] == 3e-4
    assert "--learning_rate 0.0003" in Path("engine/launch-trainer.sh").read_text()


def test_the_best_strategy_that_the_launcher_starts_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan's choice for adapters is DDP, which the deepspeed launcher does not start."""
    monkeypatch.chdir(tmp_path)
    main(["init", "llama-2-7b-lora"])
    for launcher in ("torchrun", "deepspeed"):
        assert main(["emit", "job.yaml", "--gpus", "2xH100", "--to", launcher, "--out", launcher]) == 0
    said = "".join(capsys.readouterr())
    assert "--to deepspeed does not start ddp, the plan's choice: zero1\n" in said
    assert not (tmp_path / "torchrun" / "deepspeed.json").exists()
    assert (tmp_path / "deepspeed" / "deepspeed.json").exists()
    tight = ["--gpus", "4x24GB", "--set", "model.source=meta-llama/Llama-3.1-8B"]
    assert main(["emit", "job.yaml", *tight, "--to", "deepspeed", "--out", "tight"]) == 0
    said = "".join(capsys.readouterr())
    assert "does not start ddp, the plan's choice: zero1\n" in said, "zero1-offload is as fast"


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"])
def test_a_preset_is_a_pair_of_files_that_deepspeed_and_check_take(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    assert main(["emit", "--to", "deepspeed", "--preset", name, "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.auto.json", f"{name}.json"]
    own = tmp_path / f"{name}.json"
    assert DeepSpeedConfig(json.loads(own.read_text())).zero_optimization_stage == int(name[4])
    assert ("offload_optimizer" in own.read_text()) == name.endswith("offload")
    capsys.readouterr()
    assert main(["check", str(own)]) == 0
    assert "error" not in capsys.readouterr().out
    assert main(["emit", "--to", "deepspeed", "--preset", name, "--out", str(tmp_path)]) == 2, "they exist"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "deepspeed", "--preset", "fsdp2"], "there are no files 'fsdp2'"),
        (["--preset", "zero2"], "it takes a job, a plan or a preset of deepspeed"),
        ([], "it takes a job, a plan or a preset of deepspeed"),
    ],
)
def test_presets_that_are_none(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["emit", *arguments]) == 2
    assert message in capsys.readouterr().err
