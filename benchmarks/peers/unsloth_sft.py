"""Unsloth on the same text: its own Llama, or transformers' model compiled by it.

    python unsloth_sft.py --assets assets/8b --micro-batch 2
    python unsloth_sft.py --assets assets/8b --micro-batch 2 --compiled --packing

The rows hold documents one after the other, which attend to each other; `--packing` lets TRL pack them, and
Unsloth keep them apart with xformers. `--checkpointing` is Unsloth's own, with activations in host memory.
`--nf4` quantises the base on loading. The weights are read from disk (`make_assets.py --weights`).
"""

from __future__ import annotations

import tempfile

import unsloth  # isort: skip  # before transformers and TRL, whose parts it replaces
import torch
from common import packed_rows
from datasets import Dataset
from trainer_rows import Counting, StepClock, arguments_of, cap_memory, emit_row, settings, texts
from trl import SFTConfig, SFTTrainer

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--compiled", action="store_true", help="FastModel instead of FastLanguageModel")
    parser.add_argument("--packing", action="store_true", help="documents packed and kept apart")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--nf4", action="store_true")
    arguments = parser.parse_args()
    cap_memory(arguments.memory_cap)

    fast = unsloth.FastModel if arguments.compiled else unsloth.FastLanguageModel
    checkpointing = "unsloth" if arguments.checkpointing else False
    model, tokenizer = fast.from_pretrained(
        str(arguments.assets / "model"),
        max_seq_length=arguments.sequence,
        dtype=torch.bfloat16,
        load_in_4bit=arguments.nf4,
        use_gradient_checkpointing=checkpointing,
    )
    model = fast.get_peft_model(
        model,
        r=arguments.lora,
        lora_alpha=2 * arguments.lora,
        lora_dropout=0,
        bias="none",
        target_modules=TARGETS,
        use_gradient_checkpointing=checkpointing,
        random_state=0,
    )
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                max_length=arguments.sequence,
                packing=arguments.packing,
                **settings(arguments, folder),
                bf16=True,
                optim="adamw_torch_fused",
                dataset_text_field="text",
            ),
            train_dataset=rows(arguments),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.data_collator = counting = Counting(trainer.data_collator)
        trainer.train()
    flags = ("compiled", "packing", "checkpointing", "nf4")
    name = " ".join(["unsloth", *(flag for flag in flags if getattr(arguments, flag))])
    emit_row(f"{name} lora{arguments.lora}", clock, counting.tokens, arguments)


def rows(arguments) -> Dataset:
    if not arguments.packing:
        ids = packed_rows(arguments.assets, arguments.sequence, arguments.steps * arguments.micro_batch)
        return Dataset.from_dict({"input_ids": ids.tolist()})
    return Dataset.from_dict({"text": texts(arguments)})


if __name__ == "__main__":
    main()
