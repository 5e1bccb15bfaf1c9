"""LLaMA-Factory on the same text: rows of documents one after the other, which attend to each other.

    python llamafactory_sft.py --assets assets/8b --micro-batch 2

Tuned by hand: Liger's kernels, torch's attention, no checkpointing, fused AdamW. The weights are read from
disk (`make_assets.py --weights`).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from llamafactory.train.tuner import run_exp
from trainer_rows import StepClock, arguments_of, cap_memory, emit_row, settings


class RowClock(StepClock):
    """Also reads the length of the rows, which are all equal: their first token is left to the tokenizer."""

    length = 0

    def on_train_begin(self, args, state, control, train_dataloader=None, **_):
        self.length = len(train_dataloader.dataset[0]["input_ids"])
        super().on_train_begin(args, state, control)


def job(arguments, folder: str) -> dict[str, Any]:
    datasets = {
        "text": {"file_name": str((arguments.assets / "text.jsonl").resolve()), "columns": {"prompt": "text"}}
    }
    (Path(folder) / "dataset_info.json").write_text(json.dumps(datasets), encoding="utf-8")
    return {
        "stage": "pt",
        "do_train": True,
        "model_name_or_path": str(arguments.assets / "model"),
        "finetuning_type": "lora",
        "lora_rank": arguments.lora,
        "lora_alpha": 2 * arguments.lora,
        "lora_target": "all",
        "dataset_dir": folder,
        "dataset": "text",
        "template": "empty",
        "cutoff_len": arguments.sequence,
        "packing": True,
        "preprocessing_num_workers": 1,
        "overwrite_cache": True,
        **settings(arguments, f"{folder}/output"),
        "bf16": True,
        "flash_attn": "sdpa",
        "enable_liger_kernel": True,
        "disable_gradient_checkpointing": True,
        "optim": "adamw_torch_fused",
    }


def main() -> None:
    arguments = arguments_of(__doc__).parse_args()
    cap_memory(arguments.memory_cap)
    clock = RowClock()
    with tempfile.TemporaryDirectory() as folder:
        run_exp(job(arguments, folder), callbacks=[clock])
    tokens = [arguments.micro_batch * clock.length] * arguments.steps
    emit_row(f"llama-factory tuned lora{arguments.lora}", clock, tokens, arguments)


if __name__ == "__main__":
    main()
