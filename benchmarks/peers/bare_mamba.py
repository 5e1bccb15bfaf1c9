"""Bare training loops of a Mamba model as a baseline: transformers' and mamba_ssm's own.

    python bare_mamba.py --assets assets/1b_mamba --side transformers
    python bare_mamba.py --assets assets/1b_mamba --side mamba_ssm --micro-batch 4 --sequence 2048

`transformers` uses mamba_ssm's kernels if they are installed. Otherwise it loops over the tokens, or with
`--parallel` uses the scan of the package mambapy. `mamba_ssm` is its authors' model, with CUDA kernels and
the norm fused with the residual. Documents attend to earlier ones in a row; weights and AdamW are in bf16, as
in bare.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import Clock, emit, packed_rows, peak_memory, row
from torch.nn import functional


def transformers_model(config: dict[str, Any], *, parallel: bool) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.for_model(**{**config, "use_mambapy": parallel})
    return AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)


def authors_model(config: dict[str, Any]) -> torch.nn.Module:
    """The same shape: transformers' defaults are the authors' where the config is silent."""
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
    from transformers import AutoConfig

    shape = AutoConfig.for_model(**config)
    same = MambaConfig(
        d_model=shape.hidden_size,
        n_layer=shape.num_hidden_layers,
        vocab_size=shape.vocab_size,
        ssm_cfg={"layer": "Mamba1", "d_state": shape.state_size, "d_conv": shape.conv_kernel},
        rms_norm=True,
        residual_in_fp32=shape.residual_in_fp32,
        fused_add_norm=True,
        pad_vocab_size_multiple=1,
        tie_embeddings=shape.tie_word_embeddings,
    )
    return MambaLMHeadModel(same, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--side", choices=("transformers", "mamba_ssm"), required=True)
    parser.add_argument("--parallel", action="store_true", help="with transformers: use mambapy's scan")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.parallel and find_spec("mamba_ssm"):
        sys.exit("transformers would use mamba_ssm's kernels, which are installed here")

    torch.manual_seed(0)
    config = json.loads((arguments.assets / "model" / "config.json").read_text(encoding="utf-8"))
    with torch.device("cuda"):
        if arguments.side == "mamba_ssm":
            model = authors_model(config)
        else:
            model = transformers_model(config, parallel=arguments.parallel)
    model.train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=arguments.learning_rate, fused=True)
    rows = packed_rows(arguments.assets, arguments.sequence, arguments.steps * arguments.micro_batch)
    batches = rows.view(arguments.steps, arguments.micro_batch, arguments.sequence).pin_memory()

    clock, losses, norms = Clock(), [], []
    clock.mark()
    for batch in batches:
        ids = batch.to("cuda", non_blocking=True)
        logits = model(ids).logits[:, :-1].float()
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        del logits
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        clock.mark()
    seconds = clock.seconds()
    emit(
        row(
            f"bare {arguments.side}{' mambapy' if arguments.parallel else ''}",
            seconds,
            [arguments.micro_batch * arguments.sequence] * arguments.steps,
            warmup=arguments.warmup,
            gpus=1,
            parameters=sum(p.numel() for p in parameters),
            micro_batch=arguments.micro_batch,
            sequence_length=arguments.sequence,
            **peak_memory(),
            loss=torch.stack(losses).tolist(),
            grad_norm=[float(norm) for norm in norms],
        )
    )


if __name__ == "__main__":
    main()
