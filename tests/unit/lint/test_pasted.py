"""Configurations as people paste them: what is wrong is found, at its line, and mended where that is sure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shardwise.lint.check import Checked, check, fix_files, load
from shardwise.lint.setup import Setup

EXAMPLES = Path(__file__).parent / "examples"

PASTED: tuple[tuple[str, list[str], int | None, list[tuple[str, str, int, str]]], ...] = (
    (
        "a stage-2 file with offload_param",
        ["stage2-offload-param.json"],
        None,
        [("error", "offload-param-needs-stage-3", 9, "zero_optimization.offload_param")],
    ),
    (
        "an AutoTP section of invented keys",
        ["autotp.json"],
        4,
        [
            ("error", "refused-key", 13, "tensor_parallel.enabled"),
            ("error", "refused-key", 14, "tensor_parallel.tp_size"),
            ("error", "refused-key", 15, "tensor_parallel.tp_group_size"),
            ("error", "refused-key", 16, "tensor_parallel.verbose"),
            ("warning", "comments-in-json", 1, ""),
        ],
    ),
    (
        "32 rows of 1 x 32 on 4 GPUs",
        ["batch.json"],
        4,
        [("error", "batch-arithmetic", 2, "train_batch_size")],
    ),
    (
        "ZeRO-1 for a bf16 model without bf16",
        ["bf16_loop.py", "zero1-without-bf16.json"],
        None,
        [("error", "no-mixed-precision", 1, "")],
    ),
    (
        "8 bits, a device map and the deepspeed launcher",
        ["int8_lora.py", "launch.sh"],
        None,
        [
            ("error", "device-map-and-processes", 7, "device_map"),
            ("error", "argument-was-removed", 6, "load_in_8bit"),
            ("error", "offload-param-needs-stage-3", 9, "zero_optimization.offload_param"),
        ],
    ),
    (
        "Zeus in every process of a Trainer",
        ["zeus_trainer.py"],
        4,
        [
            ("error", "zeus-monitor-of-all-gpus", 6, ""),
            ("error", "zeus-cost-of-one-process", 7, ""),
            ("warning", "zeus-leaves-limits-changed", 7, ""),
        ],
    ),
    (
        "a bucket of a million elements under ZeRO-3",
        ["zero3-bucket.json"],
        None,
        [("warning", "small-reduce-bucket", 16, "zero_optimization.reduce_bucket_size")],
    ),
    (
        "a misspelt overlap_com",
        ["overlap_com.json"],
        None,
        [("error", "refused-key", 7, "zero_optimization.overlap_com")],
    ),
    (
        "comments for the Trainer",
        ["comments.json", "trainer.py"],
        None,
        [("error", "comments-in-json", 8, "")],
    ),
    (
        "zero_optimisation",
        ["zero_optimisation.json"],
        None,
        [("error", "ignored-key", 5, "zero_optimisation")],
    ),
    (
        "auto for DeepSpeed itself",
        ["auto.json", "bare_loop.py"],
        None,
        [
            ("error", "auto-without-trainer", 2, "train_micro_batch_size_per_gpu"),
            ("error", "auto-without-trainer", 5, "bf16.enabled"),
            ("warning", "auto-without-trainer", 10, "zero_optimization.reduce_bucket_size"),
        ],
    ),
)


def checked(names: list[str], gpus: int | None = None, folder: Path = EXAMPLES) -> Checked:
    documents, broken = load([folder / name for name in names])
    return check(Setup(documents=documents, asked_world_size=gpus), broken)


@pytest.mark.parametrize(
    ("names", "gpus", "expected"), [case[1:] for case in PASTED], ids=[c[0] for c in PASTED]
)
def test_what_is_wrong_is_found(
    names: list[str], gpus: int | None, expected: list[tuple[str, str, int, str]]
) -> None:
    result = checked(names, gpus)
    found = {(one.severity, one.rule, one.line, one.key) for one in result.findings}
    merged = {(one.severity, one.rule, key) for one in result.findings for key in one.keys}
    assert {one for one in expected if (*one[:2], one[3]) not in merged} <= found
    assert result.failed == any(severity == "error" for severity, *_ in expected)


def test_the_misspelt_section_says_what_it_costs() -> None:
    one = checked(["zero_optimisation.json"]).findings[0]
    assert "training runs at stage 0" in one.what
    assert one.fix == "did you mean `zero_optimization`?"


def test_the_same_file_is_right_for_the_trainer() -> None:
    documents, _ = load([EXAMPLES / "auto.json"])
    assert {one.severity for one in check(Setup(documents=documents)).findings} == {"note"}
    found = check(Setup(documents=documents, asked_reader="trainer")).findings
    assert [one.rule for one in found] == ["throughput-timer"]  # nothing that depends on the reader


def test_what_a_launch_names_is_read_as_well() -> None:
    result = checked(["launch.sh"])
    names = ["launch.sh", "stage2-offload-param.json", "int8_lora.py"]
    assert [Path(d.name).name for d in result.setup.documents] == names
    assert result.setup.world_size == 4
    assert result.setup.reader == "trainer"


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("stage2-offload-param.json", {"offload-param-needs-stage-3"}),  # which of two was meant
        ("overlap_com.json", set()),
        ("zero_optimisation.json", set()),
        ("zero3-bucket.json", set()),
        ("batch.json", {"batch-arithmetic"}),  # which number was meant is not known
    ],
)
def test_mending_leaves_the_rest_as_it_was(name: str, left: set[str], tmp_path: Path) -> None:
    file = tmp_path / name
    shutil.copy(EXAMPLES / name, file)
    before = file.read_text()
    documents, _ = load([file])
    setup, fixed = fix_files(Setup(documents=documents, asked_world_size=4), [file])
    rest = check(setup).findings
    assert {one.rule for one in rest if one.severity == "error"} == left
    lines = file.read_text().splitlines()
    changed = [line for line in lines if line not in before.splitlines()]
    assert len(changed) <= len(fixed)
    assert [*tmp_path.iterdir()] == [file], "nothing is left beside it"


def test_mending_gives_the_section_its_name_back(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    shutil.copy(EXAMPLES / "zero_optimisation.json", file)
    fix_files(Setup(documents=load([file])[0]), [file])
    assert file.read_text() == (EXAMPLES / "zero_optimisation.json").read_text().replace("isation", "ization")
    assert json.loads(file.read_text())["zero_optimization"]["stage"] == 3


def test_a_file_that_is_only_named_by_another_is_not_touched(tmp_path: Path) -> None:
    for name in ("launch.sh", "stage2-offload-param.json"):
        shutil.copy(EXAMPLES / name, tmp_path)
    script, config = tmp_path / "launch.sh", tmp_path / "stage2-offload-param.json"
    setup = Setup(documents=load([script])[0])
    assert len(setup.documents) == 2
    assert fix_files(setup, [script])[1] == ()
    assert config.read_text() == (EXAMPLES / config.name).read_text()


def test_lines_that_end_as_on_windows_stay_so(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    text = (EXAMPLES / "overlap_com.json").read_text().replace("\n", "\r\n")
    file.write_bytes(text.encode())
    fix_files(Setup(documents=load([file])[0]), [file])
    assert file.read_bytes().decode() == text.replace("overlap_com", "overlap_comm")
