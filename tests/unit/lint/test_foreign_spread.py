# ruff: noqa: E501 - the files are text
"""How other tools spread a training: Colossal-AI's plugins, Accelerate's processes; and where they track it."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

PLUGINS = "GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin"
COLOSSAL = f"import argparse, colossalai\nfrom colossalai.booster.plugin import {PLUGINS}\n"
LOOP = (
    "from transformers import AutoModelForCausalLM\nfrom colossalai.nn.optimizer import HybridAdam\n"
    "booster = colossalai.booster.Booster(plugin=plugin)\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\n"
    "optimizer = HybridAdam(model.parameters(), lr=1e-4)\n"
    "loader = plugin.prepare_dataloader(rows, batch_size=4)\n"
    "schedule = CosineAnnealingWarmupLR(optimizer, total_steps=n, warmup_steps=9, eta_min=1e-5)\n"
    "for epoch in range(2):\n    for batch in loader:\n        booster.backward(model(**batch).loss, optimizer)\n"
    "        optimizer.step()\n"
)
BY_FLAG = (
    "p = argparse.ArgumentParser()\np.add_argument('--plugin', default='ddp')\na = p.parse_args()\n"
    "if a.plugin == 'ddp':\n    plugin = TorchDDPPlugin()\nelif a.plugin == 'zero2':\n"
    "    plugin = LowLevelZeroPlugin(stage=2, precision='bf16', max_norm=0.5)\n"
)
OFFLOAD = "zero1-offload"


def colossal(plugin: str, command: str = "") -> dict[str, str]:
    run = {"run.sh": f"colossalai run --nproc_per_node 2 {command}\n"} if command else {}
    return run | {"train.py": f"{COLOSSAL}{plugin}\n{LOOP}"}


CASES: dict[str, Case] = {
    f"Colossal-AI: {name}": (colossal(plugin), values, said, ("one process", *never))
    for name, plugin, values, said, never in [
        (
            "ZeRO-2",
            "plugin = LowLevelZeroPlugin(stage=2, precision='bf16', max_norm=1.0)",
            {
                "strategy": "zero2",
                "train.precision": "bf16",
                "optimizer.clip_norm": 1,
                "train.micro_batch": 4,
                "optimizer.schedule": "cosine",
                "optimizer.warmup_steps": 9,
                "optimizer.final_fraction": 0.1,
            },
            (),
            ("as Colossal-AI does",),
        ),
        (
            "its own precision",
            "plugin = LowLevelZeroPlugin(cpu_offload=True)",
            {"strategy": OFFLOAD, "train.precision": "fp16", "optimizer.clip_norm": 0},
            ("assumed, as Colossal-AI does: train.precision=fp16",),
            (),
        ),
        (
            "Gemini",
            "plugin = GeminiPlugin(precision='bf16', offload_optim_frac=1.0, offload_param_frac=1.0)",
            {"strategy": "zero3-offload", "train.precision": "bf16"},
            (),
            (),
        ),
        (
            "Gemini, a part",
            "plugin = GeminiPlugin(offload_optim_frac=0.5)",
            {"strategy": "zero3"},
            ("to do: train.py: GeminiPlugin.offload_optim_frac (line 3) `0.5`: write strategy",),
            (),
        ),
        (
            "tensor parallel",
            "plugin = HybridParallelPlugin(tp_size=4, pp_size=1, zero_stage=1, precision='bf16')",
            {"strategy": "zero1", "train.precision": "bf16"},
            ("HybridParallelPlugin.tp_size (line 3) `4`: write strategy, with its tensor_parallel",),
            ("pp_size",),
        ),
        ("by a flag", BY_FLAG, {"strategy": "ddp"}, (), ()),
        (
            "the Booster's precision",
            "plugin = colossalai.booster.Booster('cuda', mixed_precision='bf16')",
            {"train.precision": "bf16"},
            (),
            (),
        ),
    ]
}
CASES |= {
    "Colossal-AI: a command": (
        colossal(BY_FLAG, "train.py --plugin zero2"),
        {"strategy": "zero2", "train.precision": "bf16", "train.global_batch": 8},
        (),
        ("several", "no file says how many"),
    ),
    "Colossal-AI: machines of a file": (
        colossal(BY_FLAG, "--hostfile hosts train.py --plugin zero2"),
        {"strategy": "zero2"},
        ("hostfile (line 1) `hosts`: write train.global_batch",),
        ("no script of --from",),
    ),
}
TRAINER = "from transformers import Trainer, TrainingArguments, AutoModelForCausalLM\n"
SCRIPT = f"{TRAINER}m = AutoModelForCausalLM.from_pretrained('a/b')\nTrainer(m, TrainingArguments('out')).train()\n"
ACCELERATE = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 4\n"
ZERO_3 = '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
DDP = {"strategy": "ddp"}
CASES |= {
    f"several processes: {name}": (files, values, said, ("(ddp) is used, not",))
    for name, files, values, said in [
        ("Accelerate's file", {"acc.yaml": ACCELERATE, "train.py": SCRIPT}, DDP, ()),
        (
            "one process",
            {"acc.yaml": ACCELERATE.replace("4", "1"), "train.py": SCRIPT},
            {"strategy": "single"},
            (),
        ),
        (
            "the Trainer's DeepSpeed",
            {
                "acc.yaml": ACCELERATE,
                "train.py": SCRIPT.replace("'out'", "'out', deepspeed='data/ds.json'"),
                "data/ds.json": ZERO_3,
            },
            {"strategy.stage": 3},
            (),
        ),
        (
            "the Trainer's FSDP",
            {"acc.yaml": ACCELERATE, "train.py": SCRIPT.replace("'out'", "'out', fsdp='full_shard'")},
            {"strategy": "fsdp2"},
            (),
        ),
        (
            "a flag",
            {
                "acc.yaml": ACCELERATE,
                "run.sh": "accelerate launch --config_file acc.yaml --use_deepspeed --zero_stage 2 train.py\n",
                "train.py": SCRIPT,
            },
            {"strategy": "zero2"},
            (),
        ),
        (
            "torchrun",
            {"run.sh": "torchrun --nproc_per_node 4 train.py\n", "train.py": SCRIPT},
            DDP,
            ("assumed, as a training in several processes does: strategy=ddp",),
        ),
        (
            "DeepSpeed that only a run knows",
            {
                "run.sh": "torchrun --nproc_per_node 4 train.py\n",
                "train.py": SCRIPT.replace("'out'", "'out', deepspeed=found()"),
            },
            {"strategy": None},
            (),
        ),
    ]
}
AXOLOTL = "base_model: a/b\nmicro_batch_size: 1\ndatasets:\n  - path: a/c\n    type: alpaca\n"
CASES |= {
    f"tracking: {name}": ({"a.yml": AXOLOTL + text}, {"tracking": tracking}, (), ("tracking: [wandb]",))
    for name, text, tracking in [
        ("Axolotl without", "", []),
        ("no project", 'wandb_project: ""\nwandb_entity:\n', []),
        ("a project", "wandb_project: mine\n", ["wandb"]),
        ("switched off", "use_wandb: false\n", []),
        ("TensorBoard", "use_tensorboard: true\n", ["tensorboard"]),
    ]
}
CASES |= {
    f"tracking: the Trainer's {word}": (
        {"train.py": SCRIPT.replace("'out'", f"'out', report_to={word}")},
        {"tracking": tracking},
        (),
        (),
    )
    for word, tracking in [("'none'", []), ("[]", []), ("'wandb'", ["wandb"]), ("['wandb']", ["wandb"])]
}
CASES |= {
    f"no LoRA: {method}": (
        {
            "train.py": f"{TRAINER}from peft import {method}, get_peft_model\nm = AutoModelForCausalLM.from_pretrained('a/b')\n"
            f"m = get_peft_model(m, {method}(task_type='CAUSAL_LM', num_virtual_tokens=8))\nTrainer(m, TrainingArguments('out')).train()\n"
        },
        {"model.lora": None},
        (f"to do: train.py: {method}", "write model.lora"),
        ("write model.lora.targets",),
    )
    for method in ("PromptTuningConfig", "IA3Config", "AdaLoraConfig", "PrefixTuningConfig", "VeraConfig")
}
CASES |= {
    f"targets: {name}": (
        {
            "train.py": f"{TRAINER}from peft import LoraConfig, get_peft_model\nm = AutoModelForCausalLM.from_pretrained('{model}')\n"
            f"m = get_peft_model(m, LoraConfig(r=8, target_modules={given}))\nTrainer(m, TrainingArguments('out')).train()\n"
        },
        {"model.lora.targets": targets},
        said,
        ("write model.lora.targets",) * (not said),
    )
    for name, model, given, targets, said in [
        ("a pattern", "a/b", r"r'.*\.(q_proj|v_proj)'", ["q_proj", "v_proj"], ()),
        ("of a part", "a/b", r"r'.*language_model.*\.(q_proj|up_proj)$'", ["q_proj", "up_proj"], ()),
        ("of all blocks", "a/b", r"r'model\.layers\.\d+\.self_attn\.q_proj'", ["q_proj"], ()),
        (
            "of some blocks",
            "a/b",
            r"r'model\.layers\.[0-3]\.mlp\.up_proj'",
            None,
            ("write model.lora.targets: this pattern chooses some layers",),
        ),
        ("full names", "Qwen/Qwen2.5-7B", "['self_attn.q_proj']", ["self_attn.q_proj"], ()),
        (
            "of another family",
            "Qwen/Qwen2.5-7B",
            "['query_key_value', 'q_proj']",
            ["query_key_value", "q_proj"],
            ("target_modules: query_key_value: in no block of Qwen/Qwen2.5-7B; write model.lora.targets",),
        ),
        ("of an unknown family", "own/model", "['wqkv']", ["wqkv"], ()),
        ("a word", "a/b", "'all-linear'", "all-linear", ()),
    ]
}
CASES["several optimizers in a loop over steps"] = (
    {
        "train.py": "import torch\nfrom transformers import AutoModelForCausalLM\nm = AutoModelForCausalLM.from_pretrained('a/b')\n"
        "both = [torch.optim.AdamW(m.parameters(), lr=1e-4), other]\nfor step in range(900):\n    for micro in range(4):\n"
        "        m(**next(rows)).loss.backward()\n    for one in both:\n        one.step()\n"
    },
    {"train.steps": 900, "train.epochs": None},
    (),
    (),
)


@pytest.mark.parametrize("name", CASES)
def test_the_job_trains_as_the_tool_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
