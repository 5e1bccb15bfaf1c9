"""`shardwise check` as a user meets it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import shardwise
from shardwise.app.check import check_texts
from shardwise.cli import main
from shardwise.errors import JobError
from shardwise.hardware.hardware import Hardware
from shardwise.job.schema import Job, StrategySpec
from shardwise.lint.check import block
from shardwise.lint.finding import Finding
from shardwise.lint.rules import RULES
from shardwise.planner.plan import Plan, Workload
from shardwise.planner.search import search
from shardwise.simulate.prediction import Energy, Memory, MemoryTerms, Prediction, Time
from shardwise.simulate.step_trace import StepTrace
from shardwise.space.rules import EVERY_RULE
from shardwise.strategy import Strategy

EXAMPLES = Path(__file__).parents[1] / "lint" / "examples"
CLEAN = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 50_000_000},
    "timers": {"throughput": {"enabled": False}},
}


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = Path("ds.json")
    file.write_text(json.dumps(CLEAN, indent=2))
    return file


def test_an_error_ends_with_2_and_is_one_block(capsys: pytest.CaptureFixture[str]) -> None:
    file = EXAMPLES / "zero_optimisation.json"
    assert main(["check", str(file)]) == 2
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{file}: DeepSpeed configuration"
    assert out[1] == ""
    assert out[2].startswith("error: `zero_optimisation`: DeepSpeed has no such key and silently ignores it")
    assert out[2].endswith("[ignored-key]")
    assert out[3] == f"  at:  {file}:5: zero_optimisation"
    assert out[4] == "  fix: did you mean `zero_optimization`?"
    assert out[5].startswith("  see: deepspeed/runtime/config.py")
    assert out[6] == ""
    assert out[7].startswith("not shown: throughput-timer, ")
    assert out[-1] == "1 error, 1 note"


def test_errors_alone_are_shown_on_request_and_the_rest_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", str(EXAMPLES / "zero_optimisation.json"), "--errors-only"]) == 2
    out = capsys.readouterr().out
    assert "error: " in out
    assert "note: " not in out
    assert out.endswith("1 error, 1 note\n")


def test_errors_come_first_over_all_files(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong, broken = str(EXAMPLES / "zero_optimisation.json"), clean.with_name("broken.json")
    noted = str(EXAMPLES / "zero3-bucket.json")
    broken.write_text("{")
    assert main(["check", str(clean), noted, wrong, str(broken)]) == 2
    out = capsys.readouterr().out
    expected = (f"{broken}\n", "ds.json: Deep", f"{noted}: ", f"{wrong}: ", "[unreadable]", "[ignored-key]")
    places = [out.index(text) for text in (*expected, "\nwarning: ", "\nnote: ")]
    assert places == sorted(places)


def test_warnings_and_notes_end_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(EXAMPLES / "zero3-bucket.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 warning, 2 notes"


@pytest.mark.parametrize(("name", "code"), [("overlap_com.json", 2), ("zero3-bucket.json", 0)])
@pytest.mark.parametrize("flags", ["", "--json"])
def test_a_reader_that_stops_early_changes_no_exit_code(name: str, code: int, flags: str) -> None:
    check = f"{sys.executable} -m shardwise check {EXAMPLES / name} {flags}"
    script = f"set -o pipefail; {{ sleep 0.5; {check}; }} | true"  # nobody reads when it writes
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("steers", ["\x1b[31m", "\x9b31m"])
def test_control_characters_of_a_file_are_shown_as_codes(
    clean: Path, steers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.json").write_text(json.dumps(CLEAN | {f"zero_{steers}": 1}))
    Path("run.sh").write_text(f"torchrun --{steers} train.py --learning_rate 1e-5 --x{steers} 3 $A{steers}\n")
    main(["check", "a.json", "run.sh"])
    main(["init", "--from", "run.sh", "--out", "made.yaml"])
    said = "".join(capsys.readouterr())
    assert steers.encode("unicode_escape").decode() in said
    assert steers[0] not in said + Path("made.yaml").read_text()


def test_nothing_to_say(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(clean)]) == 0
    assert capsys.readouterr().out.splitlines() == ["ds.json: DeepSpeed configuration", "", "nothing found"]


def test_strict_ends_with_2_at_warnings_and_not_at_notes(
    clean: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("def main():\n    from peft import prepare_model_for_int8_training\n")
    assert main(["check", "train.py"]) == 0
    assert main(["check", "train.py", "--strict"]) == 2
    assert main(["check", str(clean), "--strict"]) == 0


def test_nesting_without_end_is_named(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("deep.json").write_text("[" * 5000)
    assert main(["check", "deep.json"]) == 2
    said = capsys.readouterr().out
    assert "nested too deeply" in said
    assert "YAML" not in said


def test_what_was_not_judged_is_in_the_last_line(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("from parts import make\nmake().backward()\n")
    Path("parts.py").write_text("def make():\n    return 1\n")
    assert main(["check", "train.py"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "not judged: what train.py imports of parts.py: name these files, too"
    main(["check", "train.py", "--json"])
    assert len(json.loads(capsys.readouterr().out)["not_judged"]) == 1


def test_gpus_decide_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "batch.json")
    assert main(["check", file]) == 0
    assert main(["check", file, "--gpus", "1xH100"]) == 0
    capsys.readouterr()
    assert main(["check", file, "--gpus", "4xH100"]) == 2
    assert "32 is not 1 x 32 x 4 processes = 128" in capsys.readouterr().out


def test_the_reader_decides_over_auto(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "auto.json")
    assert [main(["check", file, "--reader", who]) for who in ("trainer", "deepspeed")] == [0, 2]


def test_a_published_precision_makes_it_an_error(
    clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {key: value for key, value in CLEAN.items() if key != "bf16"}
    clean.write_text(json.dumps(values))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    assert main(["check", str(clean)]) == 0
    capsys.readouterr()
    assert main(["check", str(clean), "--model", "model"]) == 2
    assert "model is published in bf16" in capsys.readouterr().out


def test_json_is_one_object_with_units_and_places(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "overlap_com.json")
    assert main(["check", file, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == [{"file": file, "kind": "deepspeed"}]
    assert (told["errors"], told["warnings"], told["fit"]) == (1, 0, None)
    first = told["findings"][0]
    assert (first["severity"], first["rule"], first["line"]) == ("error", "refused-key", 7)
    assert first["key"] == "zero_optimization.overlap_com"
    assert first["fixable"] is True


def test_fix_says_what_it_leaves_and_writes_nothing_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = {"stage": 2, "overlap_comm": True, "offload_optimizer": {"pin_memory": True}}
    values = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(values))
    before = file.read_text(), file.stat().st_ino
    assert main(["check", "--fix", "--reader", "deepspeed", str(file)]) == 2
    assert "--fix changed nothing; left for you to fix: 1 error" in capsys.readouterr().out
    assert (file.read_text(), file.stat().st_ino) == before


def test_fix_mends_the_file_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    shutil.copy(EXAMPLES / "overlap_com.json", file)
    assert main(["check", "--fix", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"fixed: {file}: `zero_optimization.overlap_com` -> `zero_optimization.overlap_comm`  [" in said
    assert "was: `overlap_com`: `zero_optimization` has no such key" in said
    assert said.endswith("--fix made 1 change\n")
    assert file.read_text() == (EXAMPLES / "overlap_com.json").read_text().replace(
        "overlap_com", "overlap_comm"
    )


def test_fix_touches_nothing_that_it_does_not_mend(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = clean.stat()
    assert main(["check", "--fix", str(clean)]) == 0
    after = clean.stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    clean.write_text(clean.read_text().replace('"stage": 2', '"stage": 2 3'))
    broken = clean.read_text()
    assert main(["check", "--fix", str(clean)]) == 2
    assert clean.read_text() == broken
    assert "no comma before this" in capsys.readouterr().out


def test_a_job_file_is_checked_as_train_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qa.jsonl").write_text("{}\n")
    job = Path("job.yaml")
    job.write_text(
        "name: run\nmodel: {source: org/model, lora: {rank: 8}}\ndata: {train: qa.jsonl}\n"
        "train: {global_batch: 10}\nstrategy: {engine: deepspeed, stage: 2, tensor_parallel: 2}\n"
    )
    assert main(["check", str(job), "--gpus", "4xH100", "--json"]) == 2
    rules = {one["rule"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert "tensor-parallel-and-lora" in rules
    job.write_text("name: run\nmodel: {source: org/model}\ndata: {train: qa.jsonl}\ntrain: {setps: 5}\n")
    assert main(["check", str(job)]) == 2
    out = capsys.readouterr().out
    assert "job.yaml:4: train.setps" in out
    job.write_text("name: run\nmodel: {source: org/model}\ndata: {train: qa.jsonl}\n")
    assert main(["check", str(job)]) == 0


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "gone.json"]) == 2
    assert "error: there is no file gone.json  [unreadable]" in capsys.readouterr().out
    assert main(["check", "gone.json", "--json"]) == 2
    (one,) = json.loads(capsys.readouterr().out)["findings"]
    assert (one["file"], one["rule"]) == ("gone.json", "unreadable")


PLANNED: list[Job] = []


def toy_plan(job: Job, hardware: Hardware, **_: object) -> Plan:
    """A plan whose one strategy needs 30 GiB."""
    PLANNED.append(job)
    terms = MemoryTerms(
        weights_bytes=30 << 30,
        gradients_bytes=0,
        optimizer_bytes=0,
        activations_bytes=0,
        loss_bytes=0,
        engine_buffers_bytes=0,
        fragmentation_bytes=0,
    )
    memory = Memory(
        peak_reserved_bytes=30 << 30,
        peak_allocated_bytes=30 << 30,
        outside_allocator_bytes=0,
        capacity_bytes=hardware.gpu.memory_bytes,
        terms=terms,
        host_bytes=0,
    )
    time = Time(
        step_seconds=2,
        compute_seconds=2,
        communication_seconds=0,
        exposed_communication_seconds=0,
        copy_seconds=0,
        optimizer_seconds=0,
        launch_seconds=0,
        tokens_per_step=32 * 4096,
        world_size=4,
        full_clock_seconds=2,
        clocked_seconds=2,
        link="nvlink4",
        link_to_peers="nvlink4",
    )
    prediction = Prediction(
        memory=memory,
        time=time,
        energy=Energy(joules_per_step=1, idle_joules=0, tokens_per_step=32 * 4096, at_power_limit=False),
    )
    strategy = Strategy(engine="deepspeed", stage=2, data_parallel=4, micro_batch=2, accumulation=4)
    trace = StepTrace(
        parameters=(),
        buffers=(),
        units=(),
        events=(),
        ops=(),
        rows=1,
        sequence_length=4096,
        checkpoint_every=0,
        precision="bf16",
    )
    return search(
        [strategy],
        hardware=hardware,
        workload=Workload.of(job, parameters=1, trainable_parameters=1),
        trace_for=lambda *_: trace,
        simulate=lambda *_: prediction,
    )


def test_whether_it_fits_is_asked_of_the_planner(
    clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwise.app.check.make_plan", toy_plan)
    script = Path("train.py")
    script.write_text(
        "from transformers import Trainer, TrainingArguments\n"
        "TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True,\n"
        "    gradient_checkpointing=True)\n"
    )
    command = ["check", str(clean), str(script), "--model", "llama-2-7b", "--sequence", "4096", "--gpus"]
    assert main([*command, "4xRTX4090"]) == 2
    out = capsys.readouterr().out
    assert "error: it does not fit 4 x RTX 4090: zero2 with micro-batch 2" in out
    job, other = PLANNED[-2:]
    assert (other.strategy, other.train.micro_batch, other.train.global_batch) == ("auto", None, 32)
    assert isinstance(job.strategy, StrategySpec)
    assert (job.strategy.engine, job.strategy.stage) == ("deepspeed", 2)
    assert (job.train.micro_batch, job.train.global_batch, job.train.checkpointing) == (2, 32, "full")
    assert (job.data.sequence_length, job.train.precision) == (4096, "bf16")
    assert job.strategy.bucket == 50_000_000
    assert "not simulated" not in out
    assert main([*command, "4xH100", "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)["fit"]
    assert fit["option"]["prediction"]["time"]["tokens_per_second_per_gpu"] == 16384
    assert any("--full" in what for what in fit["assumed"])


def test_gpus_that_share_a_layer_have_the_same_rows(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.app.check.make_plan", toy_plan)
    clean.write_text(json.dumps({**CLEAN, "tensor_parallel": {"autotp_size": 2}}))
    main(["check", str(clean), "--model", "llama-2-7b", "--gpus", "4xH100"])
    job = PLANNED[-1]
    assert isinstance(job.strategy, StrategySpec)
    assert job.strategy.tensor_parallel == 2
    assert (job.train.micro_batch, job.train.global_batch) == (2, 16)


def test_nothing_of_it_loads_torch() -> None:
    script = (
        "import pkgutil, importlib, sys, shardwise.lint, shardwise.lint.rules\n"
        "for package in (shardwise.lint, shardwise.lint.rules):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "sys.exit(str({'torch', 'transformers', 'deepspeed', 'accelerate'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_files_that_nobody_would_write_are_findings_or_errors_and_no_bugs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nul.py").write_bytes(b"\0\1")
    Path("endless.json").write_text('{"zero_optimization": {"stage": 1e400}}')
    Path("loop.json").symlink_to("loop.json")
    Path("deep.json").write_text('{"a":' * 3000 + "1" + "}" * 3000)
    Path("long.json").write_text('{"train_batch_size": 1' + "0" * 399 + "}")
    Path("long.yaml").write_text("distributed_type: FSDP\nnum_processes: 1" + "0" * 399)
    Path("text.json").write_text('{"zero_optimization": {"stage": "1' + "0" * 5000 + '"}}')
    Path("power.json").write_text('{"zero_optimization": {"stage": "²"}}')
    Path("half.json").write_text('{"train_batch_size": 8, "sequence_parallel_size": 0.5}')
    for name in sorted(path.name for path in Path().iterdir()):
        assert main(["check", name, "--gpus", "4xH100"]) in (2, 4), name
        said = capsys.readouterr()
        assert "this is a bug" not in said.out + said.err, name


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ("[]", 2),
        ("null", 2),
        ("{", 2),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, 2),
        ('{"model_type": "llama", "hidden_size": "big", "num_key_value_heads": [2]}', 0),
        ('{"model_type": "llama", "hidden_size": -5, "num_attention_heads": 0.5}', 0),
        ('{"model_type": {}, "text_config": 3}', 0),
    ],
)
def test_a_broken_model_is_an_error_or_says_nothing(
    config: str, code: int, clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage_3 = {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 50_000_000}
    clean.write_text(
        json.dumps({**CLEAN, "zero_optimization": stage_3, "tensor_parallel": {"autotp_size": 2}})
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config)
    assert main(["check", str(clean), "--model", "model"]) == code
    said = capsys.readouterr()
    assert "this is a bug" not in said.err
    assert ("model/config.json" in said.err) == (code == 2)


@pytest.mark.parametrize("by_folder", [False, True])
def test_a_job_of_mamba_is_told_all_that_speaks_against_tensor_parallelism(
    by_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = "state-spaces/mamba-130m-hf"
    if by_folder:
        source = "own"
        Path(source).mkdir()
        Path(source, "config.json").write_text('{"model_type": "mamba", "num_hidden_layers": 24}')
        Path(source, "tokenizer.json").write_text("{}")
    Path("qa.jsonl").write_text("{}\n")
    Path("job.yaml").write_text(
        f"name: run\nmodel: {{source: {source}, lora: {{rank: 8}}}}\ndata: {{train: qa.jsonl}}\n"
        "strategy: {engine: deepspeed, stage: 2, tensor_parallel: 2}\n"
    )
    assert main(["check", "job.yaml", "--gpus", "4xH100", "--json"]) == 2
    rules = [one["rule"] for one in json.loads(capsys.readouterr().out)["findings"]]
    assert rules == ["tensor-parallel-and-lora", "tensor-parallel-needs-heads"]


@pytest.mark.parametrize(
    ("model", "lacks"),
    [
        ("{source: tiny-llama, weights: random}", "tiny-llama has no tokenizer of its own"),
        ("{source: own, weights: random}", "own has no tokenizer files"),
        ("{source: own, tokenizer: other}", "other has no tokenizer files"),
        ("{source: tiny-llama, tokenizer: nobody, weights: random}", "there is no tokenizer 'nobody'"),
        ("{source: modell}", "there is no folder and no known shape 'modell'"),  # as `train` and `plan` say
        ("{source: tiny-llama, tokenizer: train, weights: random}", None),
        ("{source: own, tokenizer: full, weights: random}", None),
        ("{source: a/b}", None),  # only the hub knows
    ],
)
def test_a_job_without_a_tokenizer_is_refused_before_processes_start(
    model: str, lacks: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("own", "other", "full"):
        Path(name).mkdir()
        Path(name, "config.json").write_text('{"model_type": "llama"}')
    Path("full", "tokenizer.json").write_text("{}")
    Path("rows.jsonl").write_text('{"text": "x"}\n')
    Path("job.yaml").write_text(f"name: run\nmodel: {model}\ndata: {{train: rows.jsonl}}\n")
    found = [one for one in shardwise.check("job.yaml").findings if one.rule == "job-tokenizer"]
    assert [(one.what, one.line) for one in found] == ([] if lacks is None else [(lacks, 2)])
    for start in (shardwise.train, shardwise.bench) if lacks else ():
        with pytest.raises(JobError) as refused:
            start("job.yaml")
        assert str(refused.value).startswith(f"{lacks}\n  at:  job.yaml:2: model.")
        fix = "`shardwise init --models`" if "modell" in model else "fix: set model.tokenizer to a hub id"
        assert fix in str(refused.value)
    assert not Path("bench").exists()
    shardwise.load_job("job.yaml")  # a plan needs none


def test_no_finding_cites_a_file_of_this_repository(tmp_path: Path) -> None:
    sources = [one.source for one in (*RULES, *EVERY_RULE)]
    assert [
        one for one in sources if one.startswith(("benchmarks", "docs", "tests")) or "benchmarks/" in one
    ] == []
    finding = Finding(
        rule="x", severity="error", file="f", what="w", fix="", source="shardwise.engines.ddp.runtime"
    )
    assert "see:" not in block(finding)
    assert "see: deepspeed/a.py" in block(replace(finding, source="deepspeed/a.py"))


def test_a_script_and_the_configuration_within_it_are_shown_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import deepspeed\ndeepspeed.initialize(\n    config={'zero_optimisation': {'stage': 3}})\n"
    Path("train.py").write_text(text)
    assert main(["check", "train.py", "--fix"]) == 2
    said = capsys.readouterr().out
    assert said.startswith(
        "train.py: training script or its arguments, with a DeepSpeed configuration, read by Deep"
    )
    assert "at:  train.py:3: zero_optimisation" in said
    assert Path("train.py").read_text() == text  # scripts are never edited
    assert {one.file for one in check_texts({"train.py": text}).findings} == {"train.py"}
