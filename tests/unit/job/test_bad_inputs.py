"""What users get wrong before anything starts: exit code, one block, key and line, nothing written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.job.paths import nearest

GOOD = """\
name: run
model:
  source: base
data:
  train: qa.jsonl
train:
  steps: 10
"""


@dataclass(frozen=True)
class Case:
    name: str
    job: str | bytes
    says: Sequence[str]
    """Each must stand in the block."""
    arguments: Sequence[str] = field(default=("train", "job.yaml"))


def train(*more: str) -> tuple[str, ...]:
    return ("train", "job.yaml", *more)


def with_(*lines: str) -> str:
    """The good job with lines appended; they begin in line 8."""
    return GOOD + "\n".join(lines) + "\n"


def model(*lines: str) -> str:
    """The good job with lines under `model`; they begin in line 4."""
    return GOOD.replace("data:\n", "".join(f"  {line}\n" for line in lines) + "data:\n")


def data(*lines: str) -> str:
    """The good job with lines under `data`; they begin in line 6."""
    return GOOD.replace("train:\n  steps", "".join(f"  {line}\n" for line in lines) + "train:\n  steps")


def strategy(*lines: str) -> str:
    """The good job with a strategy for DeepSpeed; the lines begin in line 10."""
    return with_("strategy:", "  engine: deepspeed", *(f"  {line}" for line in lines))


COMMIT = "0123456789abcdef0123456789abcdef01234567"

CASES = [
    # the file
    Case("no-job-file", GOOD, ["no job file jobs.yaml", "did you mean job.yaml?"], ("train", "jobs.yaml")),
    Case("folder", GOOD, ["base is a folder"], ("train", "base")),
    Case("empty", "", ["empty", "shardwise init"]),
    Case("only-comments", "# nothing\n", ["empty"]),
    Case("list-on-top", "- name: x\n", ["holds a list", "job.yaml:1"]),
    Case("plain-text", "hello\n", ["holds a single value"]),
    Case("latin-1", b"name: caf\xe9\n", ["not UTF-8", "job.yaml:1"]),
    Case("utf-16", "name: x\n".encode("utf-16"), ["not UTF-8"]),
    Case("binary", b"\x00\x01\x02", ["not YAML", "job.yaml"]),
    Case("half-a-character", data(r'system: "\ud800"'), ["data.system", "surrogate", "job.yaml:6"]),
    Case("huge", "# " + "x" * 1_100_000, ["too large for a job file"]),
    Case("tab", "name: x\nmodel:\n\tsource: base\n", ["job.yaml:3", "spaces, not tabs"]),
    Case("unclosed-quote", 'name: "x\n', ["not YAML", "job.yaml"]),
    Case("bad-indent", "name: x\n source: y\n", ["not YAML", "job.yaml:2"]),
    Case("two-documents", f"{GOOD}---\nname: y\n", ["one document per file"]),
    Case("python-tag", "name: !!python/object/apply:os.system [echo]\n", ["tags such as", "job.yaml:1"]),
    Case("alias-bomb", "name: &a [x, x]\nmodel: [*a, *a]\n", ["anchors and aliases", "job.yaml:1"]),
    Case("nested-deep", "name: " + "[" * 5000, ["levels of nesting", "job.yaml:1"]),
    Case("duplicate-key", with_("name: again"), ["`name` is given twice, first in job.yaml:1", "job.yaml:8"]),
    Case("empty-section", model("lora:"), ["`model.lora` has no value", "job.yaml:4"]),
    # keys
    Case("unknown-key", data("sequence_lenght: 5"), ["job.yaml:6", "did you mean data.sequence_length?"]),
    Case("other-trainers-key", data("seq_len: 5"), ["job.yaml:6", "did you mean data.sequence_length?"]),
    Case("other-trainers-section", with_("lr: 1"), ["job.yaml:8", "did you mean optimizer.learning_rate?"]),
    Case("wrong-section", with_("learning_rate: 1"), ["job.yaml:8", "did you mean optimizer.learning_rate?"]),
    Case("invented-key", with_("frobnicate: 1"), ["`frobnicate` is not a key", "a job has name, output"]),
    Case("missing-section", "name: x\nmodel: {source: base}\n", ["`data` is missing"]),
    Case("missing-source", GOOD.replace("source: base", "weights: random"), ["`model.source` is missing"]),
    # values
    Case("yes-for-bool", data("packing: yes"), ['`data.packing` is "yes"', "write `packing: true`"]),
    Case("text-for-number", with_("  global_batch: many"), ['"many"; expected an integer of at least 1']),
    Case("fraction-for-count", with_("  global_batch: 16.0"), ["write `global_batch: 16`"]),
    Case("underscores", with_("  global_batch: 1_024"), ["write `global_batch: 1024`"]),
    Case("zero", with_("  global_batch: 0"), ["job.yaml:8", "at least 1"]),
    Case("negative", with_("optimizer: {learning_rate: -1}"), ["-1; expected a number above 0"]),
    Case(
        "not-a-number",
        with_("optimizer: {beta1: .nan}"),
        ["NaN; expected a number of at least 0 and below 1"],
    ),
    Case("infinite", with_("optimizer: {learning_rate: .inf}"), ["Infinity; expected a number above 0"]),
    Case("number-for-text", GOOD.replace("name: run", "name: 2026"), ['put it in quotes: `name: "2026"`']),
    Case("name-with-slash", GOOD.replace("name: run", "name: ../up"), ["name of the letters a to z, digits"]),
    Case("wrong-choice", with_("strategy: zero4"), ['"zero4"', "job.yaml:8", "did you mean zero"]),
    Case(
        "wrong-stage",
        with_("strategy: {engine: deepspeed, stage: 4}"),
        ["`strategy.stage` is 4", "at most 3"],
    ),
    Case("strategy-typo", with_("strategy: {engine: deepspeed, stag: 1}"), ["did you mean strategy.stage?"]),
    Case("list-item", with_("tracking: [tensorbord]"), ["expected a list of tensorboard, wandb"]),
    Case("no-targets", model("lora: {targets: []}"), ["`model.lora.targets` is []"]),
    Case("one-token-rows", data("sequence_length: 1"), ["at least 2"]),
    Case("endless-rows", data("sequence_length: 1000000000000"), ["at most 16777216"]),
    Case("endless-tokenizer", model("tokenizer_vocab: 1000000000"), ["at most 1048576"]),
    Case(
        "endless-groups",
        with_("strategy: {engine: deepspeed, stage: 1, tensor_parallel: 1000000000}"),
        ["at most 1024"],
    ),
    # contradictions
    Case(
        "two-vocabularies",
        model("weights: random\n  tokenizer: train\n  config: {vocab_size: 1000}"),
        ["model.config.vocab_size has no effect"],
    ),
    Case("steps-and-epochs", with_("  epochs: 1"), ["job.yaml:7: train.steps, job.yaml:8: train.epochs"]),
    Case("warmup-too-long", with_("optimizer: {warmup_steps: 10}"), ["does not end within 10 steps"]),
    Case(
        "warmup-of-steps-and-a-half",
        with_("optimizer: {warmup_steps: 1.5}"),
        [
            "`optimizer.warmup_steps` is 1.5",
            "a number above 0 and below 1",
            "`warmup_steps: 2` for so many, or a share",
        ],
    ),
    Case("constant-final", with_("optimizer: {schedule: constant, final_fraction: 0.5}"), ["no meaning"]),
    Case(
        "kept checkpoints",
        with_("  keep: {lst: 3}"),
        [
            "job.yaml:8: train.keep",
            '`train.keep` is {"lst": 3}; expected',
            "a mapping of last, best",
        ],
    ),
    Case(
        "part of a checkpoint",
        with_("  keep: {last: 1.5}"),
        ["`last` of train.keep is 1.5"],
    ),
    Case(
        "mirror",
        with_("  keep: {mirror: 3}"),
        ["`mirror` of train.keep is 3.0", "mirror a URL or"],
    ),
    Case(
        "micro-batch", with_("  micro_batch: 3"), ["does not divide train.global_batch 16", "micro_batch: 2"]
    ),
    Case(
        "quantised-without-lora",
        model("quantization: int8", "lora: null"),
        ["job.yaml:4: model.quantization", "model.lora", "add `lora: {rank: 16}`"],
    ),
    Case(
        "unknown-quantisation", model("quantization: int4", "lora: {}"), ["expected one of none, int8, nf4"]
    ),
    Case("random-lora", model("weights: random", "lora: {rank: 8}"), ["job.yaml:5: model.lora", "random"]),
    Case("config-of-pretrained", model("config: {n_layer: 2}"), ["job.yaml:4: model.config"]),
    Case("train-tokenizer", model("tokenizer: train"), ["does not match pretrained weights"]),
    Case("vocab-without-train", model("tokenizer_vocab: 500"), ["none is trained"]),
    Case(
        "remote-code",
        GOOD.replace("source: base", "source: some/model\n  trust_remote_code: true\n  revision: main"),
        ["job.yaml:4: model.trust_remote_code, job.yaml:5: model.revision", "40-digit commit"],
    ),
    Case("revision-of-folder", model(f"revision: {COMMIT}"), ["model.source is a local folder"]),
    Case("eval-twice", data("eval: qa.jsonl", "eval_fraction: 0.1"), ["both say what is held out"]),
    Case("split-of-file", data("split: test"), ["belongs to a hub dataset"]),
    Case("chat-keys-of-text", data("format: text", "system: hi"), ["data.system is for conversations"]),
    Case("tracker-twice", with_("tracking: [wandb, wandb]"), ["names a tracker twice"]),
    Case("no-eta", with_("energy: {objective: eta}"), ["job.yaml:8", "needs energy.eta"]),
    Case("one-price", with_("energy: {objective: cost, price_per_kwh: 1}"), ["needs energy.price_per_gpu_h"]),
    Case("eta-unused", with_("energy: {eta: 0.5}"), ["job.yaml:8", "has no effect with objective: measure"]),
    Case(
        "slowdown-unused",
        with_("energy: {objective: energy, max_slowdown: 0.1}"),
        ["energy.max_slowdown has no effect", "energy.objective: max-slowdown"],
    ),
    Case("limits-unused", with_("energy: {power_limits: [300]}"), ["energy.power_limits has no effect"]),
    Case("no-limits", with_("energy: {objective: energy, power_limits: []}"), ["job.yaml:8", "is []"]),
    Case("no-budget", with_("energy: {budget_kwh: 0}"), ["expected a number above 0"]),
    # strategies
    Case("nvme-no-path", strategy("stage: 3", "offload_optimizer: nvme"), ["NVMe needs a folder"]),
    Case("nvme-unused", strategy("nvme_path: base"), ["job.yaml:10: strategy.nvme_path", "nothing is off"]),
    Case("parameters-at-2", strategy("stage: 2", "offload_parameters: cpu"), ["job.yaml:11", "by ZeRO-3"]),
    Case("fsdp-stage", with_("strategy: {engine: fsdp2, stage: 2}"), ["job.yaml:8", "fsdp2 has none"]),
    Case("single-parallel", with_("strategy: {engine: single, tensor_parallel: 2}"), ["AutoTP"]),
    Case("single-times-2", with_("strategy: single"), ["job.yaml:8", "several"], train("--processes", "2")),
    Case("uneven-batch", with_("  global_batch: 3"), ["job.yaml:8: train.gl"], train("--processes", "2")),
    # files
    Case(
        "no-data", GOOD.replace("qa.jsonl", "qb.jsonl"), ["job.yaml:5: data.train", "did you mean qa.jsonl?"]
    ),
    Case(
        "no-data-folder",
        GOOD.replace("qa.jsonl", "far/away/x.jsonl"),
        ["nearest folder that exists is {cwd} (paths in a job file count from its folder"],
    ),
    Case("absolute", GOOD.replace("qa.jsonl", "/no/x.jsonl"), ["nearest folder that exists is /\n"]),
    Case("csv", GOOD.replace("qa.jsonl", "table.csv"), ["convert it to one of json, jsonl, parquet, txt"]),
    Case("no-model-folder", GOOD.replace("source: base", "source: ./bas"), ["./bas", "did you mean base?"]),
    Case("not-a-model", GOOD.replace("source: base", "source: empty"), ["no config.json"]),
    Case("no-csv", data("eval: zh.csv"), ["job.yaml:6", "zh.csv does not exist"]),
    Case("misspelt-suffix", data("eval: zh.jsonI"), ["job.yaml:6", "zh.jsonI does not exist"]),
    Case(
        "strategy-with-a-degree",
        with_("strategy: autotp2-zero1"),
        ["job.yaml:8", 'write `strategy: {engine: "deepspeed", stage: 1, tensor_parallel: 2}`'],
    ),
    Case(
        "strategy-with-a-group",
        with_("strategy: fsdp2-hsdp8"),
        ["job.yaml:8", 'write `strategy: {engine: "fsdp2", shard_group: 8}`'],
    ),
    Case("no-template", data("chat_template: chat.jinja"), ["job.yaml:6", "chat.jinja does not exist"]),
    Case(
        "other-trainers-template",
        data("chat_template: qwen2.5"),
        ["no file qwen2.5", "fix: Qwen uses chatml: data.chat_template: chatml"],
    ),
    Case("llama-template", data("chat_template: llama3"), ["Llama-3 uses llama-3"]),
    Case("no-such-template", data("chat_template: llama30b"), ["chatml, llama-3, alpaca; unset"]),
    Case("no-such-field", data("format: {promt: q}"), ["a mapping of prompt, ", "did you mean prompt, not"]),
    Case("no-such-column", data("format: {prompt: 3}"), ["`data.format`", "a mapping of prompt"]),
    Case("columns-elsewhere", data("columns: {prompt: q}"), ["did you mean data.format?"]),
    Case("no-columns", data("format: {}"), ["`data.format` is {}"]),
    Case("chat-keys-of-texts", data("format: {text: body}\n  system: x"), ["data.format is text"]),
    Case("output-is-file", with_("output: table.csv"), ["table.csv is a file"]),
    # keys that must stay secret
    Case("hub-token", with_("hf_token: hf_" + "a" * 34), ["environment variable", "job.yaml:8: hf_token"]),
    Case("wandb-key", with_(f"output: {COMMIT}"), ["looks like an access key"]),
    Case(
        "secret-in-list", data(f"eval: [qa.jsonl, 'https://me:{COMMIT}@host/x']"), ["`data.eval` looks like"]
    ),
    # --set
    Case("set-no-value", GOOD, ["`--set train.steps` is not key=value"], train("--set", "train.steps")),
    Case("set-unknown", GOOD, ["--set trian.steps=1", "did you mean train"], train("--set", "trian.steps=1")),
    Case("set-wrong-type", GOOD, ["--set train.steps=few", "an integer"], train("--set", "train.steps=few")),
    Case("set-below-name", with_("strategy: zero2"), ["job.yaml:8"], train("--set", "strategy.stage=3")),
    Case("set-not-yaml", GOOD, ["--set name=[", "not YAML"], train("--set", "name=[")),
    Case("set-control-character", GOOD, ["--set name=", "not YAML: unacc"], train("--set", "name=\x07")),
    Case("nul", with_('output: "a\\0b"'), ["job.yaml:8", "`output` holds a NUL or half a surrogate"]),
    Case("octal", data("max_samples: 010"), ["job.yaml:6", "write `max_samples: 10`"]),
    Case("set-contradicts", GOOD, ["--set train.epochs=2"], train("--set", "train.epochs=2")),
    # the command line
    Case("unknown-verb", GOOD, ["no such command 'trian'", "did you mean train?"], ("trian", "job.yaml")),
    Case("unknown-flag", GOOD, ["--proceses", "did you mean --processes?"], train("--proceses", "2")),
    Case("no-processes", GOOD, ["--processes"], train("--processes", "0")),
    Case("no-argument", GOOD, ["missing argument 'JOB'"], ("train",)),
    Case("two-jobs", GOOD, ["unexpected extra argument"], train("job.yaml")),
    Case("memory-cap", GOOD, ["'lots' is not a size", "16GiB"], train("--memory-cap", "lots")),
    Case("run-exists", GOOD.replace("name: run", "name: old"), ["exists", "`shardwise train runs/old --res"]),
    Case("place-is-taken", GOOD.replace("name: run", "name: new"), ["fix: --set name=new-2 starts another"]),
    Case("run-as-job", GOOD, ["runs/old is a run folder", "--resume` goes on"], ("train", "runs/old")),
    Case("resume-no-run", GOOD, ["base is not a run folder"], ("train", "base", "--resume")),
    Case("nothing-to-resume", GOOD, ["no run to resume"], train("--resume")),
    Case("unknown-preset", GOOD, ["no preset 'loar'", "did you mean lora?"], ("init", "loar")),
    Case("init-overwrites", GOOD, ["job.yaml exists already"], ("init", "lora")),
    Case("quoted-number", strategy('stage: "2"'), ["job.yaml:10", "write `stage: 2`, without quotes"]),
    Case("huge-number", with_(f"  epochs: {10**18}"), ["job.yaml:8", "fix: a smaller number"]),
    Case("dangling-link", GOOD.replace("qa.", "gone."), ["job.yaml:5", "it is a link to nowhere.jsonl"]),
    Case("pipe", GOOD.replace("qa.", "pipe."), ["job.yaml:5", "pipe.jsonl is neither a file nor a folder"]),
    Case(
        "plan-refused",
        with_("strategy: fsdp2"),
        ["fsdp2: the 3 rows", "at:  --set train.global_batch=3, rule global-batch-divides", "fix: "],
        (
            "plan",
            "job.yaml",
            "--gpus",
            "2xH100",
            "--set",
            "model.source=gpt2",
            "--set",
            "train.global_batch=3",
        ),
    ),
    Case("report-of-nothing", GOOD, ["nowhere"], ("report", "nowhere")),
]


def listing(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_ends_in_one_block(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.app.train.launch", lambda spec, **_: pytest.fail("workers were started"))
    (tmp_path / "base").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "base" / name).write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "qa.jsonl").write_text('{"instruction": "a", "input": "", "output": "b"}\n')
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "gone.jsonl").symlink_to("nowhere.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "runs" / "old").mkdir(parents=True)
    for name in ("job.yaml", "plan.json"):
        (tmp_path / "runs" / "old" / name).write_text("{}\n")
    (tmp_path / "runs" / "new").mkdir()
    (tmp_path / "runs" / "new" / "notes.txt").write_text("mine\n")
    job = case.job.encode() if isinstance(case.job, str) else case.job
    (tmp_path / "job.yaml").write_bytes(job)
    before = listing(tmp_path)

    code = main(list(case.arguments))

    out, err = capfd.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.removeprefix("planning: building the model, without its weights\n").startswith("error: ")
    assert sum(line.startswith("error: ") for line in err.splitlines()) == 1
    assert "Traceback" not in err
    for text in case.says:
        assert text.replace("{cwd}", str(tmp_path)) in err
    assert COMMIT not in err or "revision" in job.decode(errors="ignore"), "a secret is repeated"
    assert "hf_aaaa" not in err, "a secret is repeated"
    assert listing(tmp_path) == before


def test_everything_wrong_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(
        "nam: x\n"  # 1: unknown, and `name` missing
        "model:\n"
        "  source: ./none\n"  # 3: no such folder
        "  weights: random\n"
        "  lora: {rank: no}\n"  # 5: wrong type, and adapters on random weights
        "data:\n"
        "  train: none.jsonl\n"  # 7: no such file
        "  packing: on\n"  # 8: wrong type
        "train: {steps: 1, epochs: 1}\n"  # 9: contradiction
    )
    assert main(["train", "job.yaml", "--set", "train.seed=x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: job.yaml has 9 problems")
    places = [line.split("at:  ")[1] for line in err.splitlines() if "at:  " in line]
    assert places == [
        "job.yaml:1: nam",
        "job.yaml:3: model.source",
        "job.yaml:4: model.weights, job.yaml:5: model.lora",
        "job.yaml:5: model.lora.rank",
        "job.yaml:7: data.train",
        "job.yaml:8: data.packing",
        "job.yaml:9: train.steps, job.yaml:9: train.epochs",
        "--set train.seed=x",
        "job.yaml: name",
    ]


def test_a_file_of_another_kind_is_not_suggested(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    assert nearest(tmp_path / "d.jsonl").startswith("the nearest folder that exists is")
    (tmp_path / "dt.jsonl").write_text("{}")
    assert nearest(tmp_path / "d.jsonl") == f"did you mean {tmp_path / 'dt.jsonl'}?"
