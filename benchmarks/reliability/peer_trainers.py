"""The same tiny training with each trainer: saved every SAVE_EVERY steps, resumed as its documents say.

Each function trains to step `STEPS` in the current process: `folder / "save"` holds its checkpoints, and
`note(step, loss)` is called after each step. `resume` is true where a run was killed before. Only
defaults are used, and what the documents recommend for resuming. The optimizer is torch's AdamW, the
rows are shuffled, two epochs long, and drawn with a seed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
STEPS, SAVE_EVERY, ROWS, BATCH, WIDTH = 12, 2, 32, 4, 768
Note = Callable[[int, float], None]


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """32 rows of 16 random tokens."""

    def __init__(self) -> None:
        drawn = torch.randint(0, 1000, (ROWS, 16), generator=torch.Generator().manual_seed(1))
        self.rows = drawn

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[at], "labels": self.rows[at]}


class Model(torch.nn.Module):
    """An embedding, one layer and a head: its checkpoint with AdamW has 26 MB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(1000, WIDTH)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 1000)
        self.last = 0.0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        logits = self.head(torch.relu(self.layer(self.embed(input_ids))))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        self.last = float(loss.detach())
        return {"loss": loss}


def weights(model: torch.nn.Module) -> str:
    """The SHA-256 of all values."""
    found = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        found.update(value.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def hugging_face(folder: Path, note: Note, *, resume: bool) -> str:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model = Model()

    class Noting(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            note(state.global_step, model.last)

    settings = TrainingArguments(
        output_dir=str(folder / "save"),
        max_steps=STEPS,
        save_steps=SAVE_EVERY,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=Rows(), callbacks=[Noting()])
    trainer.train(resume_from_checkpoint=resume or None)
    return weights(model)


def lightning(folder: Path, note: Note, *, resume: bool) -> str:
    import lightning as light
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Module(light.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Noting(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            note(trainer.global_step, module.model.last)

    light.seed_everything(0, verbose=False)
    saving = ModelCheckpoint(
        dirpath=folder / "save", every_n_train_steps=SAVE_EVERY, save_top_k=-1, save_last=True
    )
    trainer = light.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        callbacks=[Noting(), saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Module()
    rows = StatefulDataLoader(Rows(), batch_size=BATCH, shuffle=True)
    trainer.fit(module, rows, ckpt_path="last" if resume else None)
    return weights(module.model)


def composer(folder: Path, note: Note, *, resume: bool) -> str:  # noqa: ARG001, it sees by itself
    from composer import Callback, Trainer
    from composer.models import ComposerModel

    class Wrapped(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, batch: Any) -> Any:
            return self.model(**batch)

        def loss(self, outputs: Any, _: Any) -> torch.Tensor:
            return outputs["loss"]

    class Noting(Callback):  # type: ignore[misc]
        def batch_end(self, state: Any, _: Any) -> None:
            note(int(state.timestamp.batch), wrapped.model.last)

    wrapped = Wrapped()
    trainer = Trainer(
        model=wrapped,
        train_dataloader=torch.utils.data.DataLoader(Rows(), batch_size=BATCH, shuffle=True),
        optimizers=torch.optim.AdamW(wrapped.parameters(), lr=1e-3),
        max_duration=f"{STEPS}ba",
        save_folder=str(folder / "save"),
        save_interval=f"{SAVE_EVERY}ba",
        run_name="run",
        autoresume=True,
        seed=0,
        device="cpu",
        callbacks=[Noting()],
        progress_bar=False,
    )
    trainer.fit()
    return weights(wrapped.model)


def deepspeed(folder: Path, note: Note, *, resume: bool) -> str:
    """Its own loop: save_checkpoint and load_checkpoint, which reads the tag in `latest`; ZeRO-2."""
    import deepspeed as library

    model = Model()
    engine, *_ = library.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    save = str(folder / "save")
    done = 0
    if resume:
        path, state = engine.load_checkpoint(save)
        done = state["step"] if path is not None else 0
    rows = Rows()
    order = [torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)) for epoch in range(2)]
    for step in range(done + 1, STEPS + 1):
        at = torch.cat(order)[(step - 1) * BATCH : step * BATCH]
        engine.backward(engine(rows.rows[at], rows.rows[at])["loss"])
        engine.step()
        note(step, model.last)
        if step % SAVE_EVERY == 0:
            engine.save_checkpoint(save, client_state={"step": step})
    return weights(model)


def shardwise(folder: Path, note: Note, *, resume: bool) -> str:
    """A tiny Llama with ZeRO-2, through what each rank runs."""
    tests = HERE.parents[1] / "tests"
    sys.path[:0] = [str(tests / "distributed"), str(tests / "shared")]
    from test_out_of_memory import job

    from shardwise.launch.spec import LaunchSpec
    from shardwise.record.write import EventWriter
    from shardwise.training.run import run

    settings = {"steps": STEPS, "save_every": SAVE_EVERY, "eval_every": 0}
    values = job(folder, "save", "zero2", **settings)
    write = EventWriter.write

    def noted(self: EventWriter, event: Any) -> None:
        write(self, event)
        if event.kind == "step":
            note(event.step, event.loss)

    EventWriter.write = noted  # type: ignore[method-assign]
    place = str(folder / "runs" / "save")
    run(LaunchSpec(job=values, run_dir=place, processes=1, resume=resume))
    from shardwise.training.checkpoint import newest_valid

    newest = newest_valid(Path(place) / "checkpoints")
    assert newest is not None
    assert newest.step == STEPS
    entries = json.loads((newest.path / "manifest.json").read_text())["files"]
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


TRAINERS = {
    "shardwise": shardwise,
    "Hugging Face Trainer": hugging_face,
    "Lightning": lightning,
    "Composer": composer,
    "DeepSpeed": deepspeed,
}
IMPORTS = {
    "shardwise": ("deepspeed", "transformers", "datasets", "shardwise.training.run"),
    "Hugging Face Trainer": ("transformers", "transformers.trainer", "accelerate"),
    "Lightning": ("lightning", "lightning.pytorch", "torchdata.stateful_dataloader"),
    "Composer": ("composer",),
    "DeepSpeed": ("deepspeed",),
}
PACKAGES = {
    "shardwise": ("shardwise", "deepspeed"),
    "Hugging Face Trainer": ("transformers", "accelerate"),
    "Lightning": ("lightning", "torchdata"),
    "Composer": ("mosaicml",),
    "DeepSpeed": ("deepspeed",),
}
# Where each keeps its checkpoints, below the folder of a trial.
PLACES = dict.fromkeys(TRAINERS, "save") | {"shardwise": "runs/save/checkpoints"}
