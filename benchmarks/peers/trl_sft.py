"""TRL's SFTTrainer on the same text: at its defaults, and tuned by hand.

    python trl_sft.py --assets assets/8b
    python trl_sft.py --assets assets/8b --tuned --packing wrapped --micro-batch 2

Both pack rows of the given length in bf16. Defaults: everything else as in TRL, with activation
checkpointing. Tuned: Liger's kernels, no checkpointing, torch's fused AdamW. `--packing bfd` keeps documents
apart; `wrapped` lets them attend to each other, which is faster without a flash attention package.
"""

from __future__ import annotations

import tempfile
import warnings

import torch
from datasets import Dataset
from peft import LoraConfig
from trainer_rows import Counting, StepClock, arguments_of, cap_memory, emit_row, settings, texts
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--packing", choices=("bfd", "bfd_split", "wrapped"), default="bfd")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    cap_memory(arguments.memory_cap)

    config = AutoConfig.from_pretrained(arguments.assets / "model")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    tuned = {"use_liger_kernel": True, "gradient_checkpointing": False, "optim": "adamw_torch_fused"}
    lora = LoraConfig(
        r=arguments.lora, lora_alpha=2 * arguments.lora, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                max_length=arguments.sequence,
                packing=True,
                packing_strategy=arguments.packing,
                **settings(arguments, folder),
                **(tuned if arguments.tuned else {}),
            ),
            train_dataset=Dataset.from_dict({"text": texts(arguments)}),
            processing_class=AutoTokenizer.from_pretrained(arguments.assets / "model"),
            peft_config=lora,
            callbacks=[clock],
        )
        trainer.data_collator = counting = Counting(trainer.data_collator)
        trainer.train()
    setting = "tuned" if arguments.tuned else "defaults"
    emit_row(f"trl {setting} {arguments.packing} lora{arguments.lora}", clock, counting.tokens, arguments)


if __name__ == "__main__":
    main()
