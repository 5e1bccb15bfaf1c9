"""Copies of checkpoints: complete or not there, verified when they are used, and no reason to end a run."""

from __future__ import annotations

import os
import random
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from shardwise.errors import CheckpointError, JobError
from shardwise.job.schema import Job
from shardwise.record.manifest import Origin, verify
from shardwise.training.checkpoint import CheckpointStore, Keep
from shardwise.training.mirror import Mirror, Mirroring, take, take_missing

ORIGIN = Origin(world_size=1, strategy={"name": "single"}, identity={"seed": 1}, versions={"torch": "2.13"})


def writer(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "engine").mkdir(exist_ok=True)
        for name in ("engine/shard-0.bin", "rng-0.json"):
            (folder / name).write_bytes(random.Random(f"{step}{name}").randbytes(20_000))

    return write


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["folder", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    place = {
        "folder": str(tmp_path / "far"),
        "file": f"file://{tmp_path}/far",
        "memory": f"memory://{uuid.uuid4()}",
    }
    yield f"{place[request.param]}/run"
    fsspec.filesystem("memory").store.clear()


def run(folder: Path, *steps: int, keep: Keep | int = 9) -> CheckpointStore:
    """A run folder with these checkpoints."""
    folder.mkdir(exist_ok=True)
    for name in ("job.yaml", "plan.json", "environment.json", "events.jsonl"):
        (folder / name).write_text(f"{name} of the run")
    store = CheckpointStore(folder / "checkpoints", keep=keep)
    for step in steps:
        store.save(step, writer(step), origin=ORIGIN)
    return store


def follow(url: str, folder: Path, store: CheckpointStore) -> dict[str, object]:
    mirroring = Mirroring(url, folder, store)
    mirroring.saved()
    return mirroring.state(last=True)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damage(url: str, name: str, content: bytes) -> None:
    with fsspec.open(f"{url}/{name}", "wb") as file:
        file.write(content)


def test_a_run_that_is_lost_comes_back_with_all_its_bytes(tmp_path: Path, url: str) -> None:
    here = tmp_path / "run"
    assert follow(url, here, run(here, 5, 10)) == {"step": 10, "failed": None}
    before = files(here)
    shutil.rmtree(here)
    assert take(url, here) == 10
    assert files(here) == {name: content for name, content in before.items() if "step-000005" not in name}
    assert take(url, here, 5) == 5
    assert files(here) == before


def test_a_flipped_bit_is_found_and_the_older_copy_taken(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "run"
    follow(url, here, run(here, 5, 10))
    content = bytearray((here / "checkpoints/step-000010/engine/shard-0.bin").read_bytes())
    content[77] ^= 4
    damage(url, "checkpoints/step-000010/engine/shard-0.bin", bytes(content))
    shutil.rmtree(here)
    assert take(url, here) == 5
    assert "passed over the copy of step 10: damaged: engine/shard-0.bin" in capsys.readouterr().err
    assert steps_in(here / "checkpoints") == ["step-000005"]
    damage(url, "checkpoints/step-000005/manifest.json", b"{}")
    shutil.rmtree(here)
    with pytest.raises(CheckpointError, match="no copy of a checkpoint is sound"):
        take(url, here)


def test_what_is_missing_is_made_up_for_and_what_is_there_is_left(tmp_path: Path, url: str) -> None:
    here, mirror = tmp_path / "run", Mirror(url)
    store = run(here, 5, 10)
    follow(url, here, store)
    fs, path = fsspec.core.url_to_fs(url)
    fs.rm(f"{path}/checkpoints/step-000005/manifest.json")
    damage(url, "checkpoints/step-000005/rng-0.json", b"half")
    assert mirror.steps() == [10]
    assert follow(url, here, store) == {"step": 10, "failed": None}
    assert mirror.steps() == [10, 5]
    shutil.rmtree(here)
    assert take(url, here, 5) == 5


def test_rules_hold_there_and_steps_set_aside_are_not_the_newest(tmp_path: Path, url: str) -> None:
    here, mirror = tmp_path / "run", Mirror(url)
    store = run(here, keep=Keep(last=1, best=1, every=4))
    store.ranking = lambda: [2]
    for step in range(1, 8):
        store.save(step, writer(step), origin=ORIGIN)
        follow(url, here, store)
    assert mirror.steps() == [7, 4, 2]
    store.set_aside(4)
    store.keep = Keep(last=2)
    shutil.rmtree(here / "checkpoints/step-000002")
    follow(url, here, store)
    assert mirror.steps() == [4, 2]


def test_a_place_that_cannot_be_written_is_said_once_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, far = tmp_path / "run", tmp_path / "far"
    far.write_text("a file where the folder should be")
    store = run(here, 5)
    mirroring = Mirroring(f"{far}/run", here, store)
    for _ in range(2):
        mirroring.saved()
        state = mirroring.state(last=True)
        assert state["step"] is None
        assert "step 5: " in str(state["failed"])
    assert capsys.readouterr().err.count("warning: ") == 1
    far.unlink()
    mirroring.saved()
    assert mirroring.state(last=True) == {"step": 5, "failed": None}


def test_a_full_disk_costs_no_copy_that_is_there(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "run"
    store = run(here, 5, keep=1)
    follow(url, here, store)
    store.save(10, writer(10), origin=ORIGIN)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr("shutil.copyfileobj", full)
        state = follow(url, here, store)
    assert "No space left on device" in str(state["failed"])
    assert Mirror(url).steps() == [5]
    assert follow(url, here, store) == {"step": 10, "failed": None}
    assert Mirror(url).steps() == [10]


def test_bytes_that_change_on_their_way_are_no_copy(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "run"
    store = run(here, 5)
    with monkeypatch.context() as patched:
        patched.setattr(
            "shutil.copyfileobj", lambda source, target, _: target.write(source.read()[:-1] + b"?")
        )
        state = follow(url, here, store)
    assert "was read back with other bytes" in str(state["failed"])
    assert Mirror(url).steps() == []


def test_secrets_of_a_url_are_shown_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = tmp_path / "run"
    store = run(here, 5)
    mirroring = Mirroring(f"{tmp_path}/far?sig=abc123&token=def456/run", here, store)
    (tmp_path / "far?sig=abc123&token=def456").write_text("")
    mirroring.saved()
    shown = f"{mirroring.state(last=True)} {capsys.readouterr().err}"
    assert "[hidden]" in shown
    assert "abc123" not in shown
    assert "def456" not in shown


def job(mirror: Path) -> Job:
    keep = {"last": 1, "mirror": str(mirror)}
    sections = {"model": {"source": "x"}, "data": {"train": "x"}, "train": {"keep": keep}}
    return Job.model_validate({"name": "run", **sections})


def test_what_is_not_here_is_taken_from_the_jobs_mirror(tmp_path: Path) -> None:
    here, far = tmp_path / "run", tmp_path / "far"
    follow(f"{far}/run", here, run(here, 5, 10))
    shutil.rmtree(here / "checkpoints")
    assert take_missing(job(far), here, None, begins=False) is None
    assert steps_in(here / "checkpoints") == ["step-000010"]
    assert take_missing(job(far), here, "step-000005", begins=False) == "step-000005"
    assert steps_in(here / "checkpoints") == ["step-000005", "step-000010"]
    (here / "checkpoints/step-000010/rng-0.json").write_bytes(bytes(20_000))
    assert take_missing(job(tmp_path / "none"), here, f"{far}/run", begins=False) == "10"
    assert verify(here / "checkpoints/step-000010") == []
    with pytest.raises(JobError, match="the mirror has a run of this name already"):
        take_missing(job(far), tmp_path / "new" / "run", None, begins=True)
    assert take_missing(job(tmp_path / "none"), tmp_path / "new", None, begins=True) is None


def test_a_protocol_that_is_not_there_is_an_error_of_the_job() -> None:
    with pytest.raises(JobError, match="Protocol not known"):
        Mirror("carrier-pigeon://roof/run")
