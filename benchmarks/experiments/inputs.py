"""What the experiments train: models with weights on disk, a text of full rows, the job around them.

    python inputs.py SHAPE FOLDER

Nothing is downloaded. Weights are random and saved once, so that every program starts from the same ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise import Job
from shardwise.models.catalog import lookup

LONGEST = 8192
"""Every sequence length that divides it makes full rows: the text has a multiple of so many tokens."""
ROWS = 24
"""Rows of the longest length; the text is read again from the start where a run needs more."""
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, and how a step of it is cut."""

    name: str
    shape: str  # of the package's catalog; `small` is SMALL
    lora: int = 0  # rank; 0 trains all weights
    precision: str = "bf16"
    sequence_length: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: str = "none"
    learning_rate: float = 1e-4

    def job(self, folder: Path) -> Job:
        """The job with its files in `folder`. Every program trains on the same rows in the same order."""
        lora = {"lora": {"rank": self.lora, "alpha": 2.0 * self.lora}} if self.lora else {}
        return Job.model_validate(
            {
                "name": self.name,
                "output": str(folder / "runs"),
                "model": {"source": str(folder / "models" / self.shape), **lora},
                "data": {
                    "train": str(folder / "text.txt"),
                    "format": "text",
                    "sequence_length": self.sequence_length,
                    "eval_fraction": 0.0,
                },
                "optimizer": {
                    "learning_rate": self.learning_rate,
                    "schedule": "constant",
                    "warmup_steps": 0,
                },
                "train": {
                    "steps": 1,  # a bench runs as many as it is asked for
                    "global_batch": self.micro_batch * self.accumulation,
                    "micro_batch": self.micro_batch,
                    "precision": self.precision,
                    "checkpointing": self.checkpointing,
                    "eval_every": 0,
                    "save_every": 0,
                    "worst_case_first": False,
                },
                "strategy": "single",
                "tracking": [],
            }
        )


def prepare(shape: str, folder: Path) -> None:
    """Write the model and the text where they are absent, in a process of its own: it uses the GPU."""
    if not (folder / "models" / shape / "config.json").exists():
        print(f"writing random weights of {shape}", file=sys.stderr, flush=True)
        command, quiet = [sys.executable, __file__, shape, str(folder)], {**os.environ, "TQDM_DISABLE": "1"}
        subprocess.run(command, env=quiet, check=True)


def config_of(shape: str) -> dict[str, Any]:
    """The content of its config.json."""
    known = lookup(shape)
    return {"model_type": "llama", **SMALL} if known is None else known.hf_config()


def write(shape: str, folder: Path) -> None:
    """Config, tokenizer and random bf16 weights of the shape; the text."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config_of(shape))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made = folder / "models" / shape
    write_text(folder, vocabulary=min(8192, config.vocab_size)).save_pretrained(made)
    model.save_pretrained(made)


def write_text(folder: Path, *, vocabulary: int) -> Any:
    """`text.txt`: the packaged text as one document of full rows; returns the tokenizer that counted them.

    Where each row is one document, attention over packed rows and plain causal attention are the same.
    """
    from transformers import PreTrainedTokenizerFast

    from shardwise.models.tokenizer import END, PAD, train_bpe

    packaged = resources.files("shardwise.job") / "samples" / "training.txt"
    text = packaged.read_text(encoding="utf-8")
    bpe = train_bpe(iter([text]), vocabulary)
    text *= -(-ROWS * LONGEST * 8 // len(text))  # a token has fewer than 8 characters on average
    encoding = bpe.encode(text)
    for tokens in range(ROWS * LONGEST, 0, -LONGEST):
        cut = text[: encoding.offsets[tokens - 1][0]]
        if len(bpe.encode(cut).ids) == tokens - 1:  # the end-of-text token is added; false within a word
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "text.txt").write_text(cut, encoding="utf-8", newline="")
            return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)
    raise SystemExit("the packaged text cannot be cut into full rows")


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
