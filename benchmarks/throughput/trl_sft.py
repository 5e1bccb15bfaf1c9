"""TRL's SFTTrainer on the same text: at its defaults, and tuned by hand.

    python trl_sft.py --assets assets/8b
    python trl_sft.py --assets assets/8b --tuned --packing wrapped --micro-batch 2

Both pack rows of the given length in bf16. Defaults: everything else as in TRL, with activation
checkpointing. Tuned: Liger's kernels, no checkpointing, torch's fused AdamW. `--packing bfd` keeps documents
apart; `wrapped` lets them attend to each other, which is faster without a flash attention package.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
from common import Clock, documents, emit, peak_memory, row
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class StepClock(TrainerCallback):
    """Marks step ends, and the start of the first."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_train_begin(self, *_, **__):
        self.clock.mark()

    def on_step_end(self, *_, **__):
        self.clock.mark()


class Counting:
    """TRL's collator, which also records the tokens of each batch."""

    def __init__(self, collator) -> None:
        self.collator = collator
        self.tokens: list[int] = []

    def __call__(self, samples):
        batch = self.collator(samples)
        self.tokens.append(batch["input_ids"].numel())
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--packing", choices=("bfd", "bfd_split", "wrapped"), default="bfd")
    parser.add_argument("--lora", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=6)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)

    config = AutoConfig.from_pretrained(arguments.assets / "model")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    texts = documents(arguments.assets)
    texts *= -(-arguments.steps * arguments.micro_batch * arguments.sequence * 8 // sum(map(len, texts)))
    tuned = {"use_liger_kernel": True, "gradient_checkpointing": False, "optim": "adamw_torch_fused"}
    lora = LoraConfig(
        r=arguments.lora, lora_alpha=2 * arguments.lora, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                max_length=arguments.sequence,
                packing=True,
                packing_strategy=arguments.packing,
                per_device_train_batch_size=arguments.micro_batch,
                learning_rate=1e-4,
                max_steps=arguments.steps,
                logging_steps=2,
                report_to="none",
                save_strategy="no",
                **(tuned if arguments.tuned else {}),
            ),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=AutoTokenizer.from_pretrained(arguments.assets / "model"),
            peft_config=lora,
            callbacks=[clock],
        )
        trainer.data_collator = counting = Counting(trainer.data_collator)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    emit(
        row(
            f"trl {'tuned' if arguments.tuned else 'defaults'} {arguments.packing} lora{arguments.lora}",
            clock.clock.seconds(),
            counting.tokens,
            warmup=arguments.warmup,
            gpus=1,
            micro_batch=arguments.micro_batch,
            sequence_length=arguments.sequence,
            **peak_memory(),
            logged_steps=[entry["step"] for entry in logs],
            loss=[entry["loss"] for entry in logs],
            grad_norm=[entry["grad_norm"] for entry in logs],
        )
    )


if __name__ == "__main__":
    main()
