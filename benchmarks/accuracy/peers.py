"""Estimates of other tools for the rows of rows.toml, to compare with the measurements.

    python benchmarks/accuracy/peers.py --out benchmarks/accuracy/results/peers.json

Each tool is asked as its documentation says, with what a user knows of the row. If the tool cannot express
what the row does, its number is null, with the reason in `…_why_not`, and does not count. Numbers are bytes
on one GPU.

**DeepSpeed**, `estimate_zero2_model_states_mem_needs` and `estimate_zero3_…`: the functions themselves,
with the counts that their `…_all_live` variants take from a model. They cover stages 2 and 3, and only
parameters, gradients and optimizer states: no activations, no buckets, no `reshard`.

**accelerate**, `estimate-memory`: its own code on the row's config; only the look-up on the hub is
replaced. It builds AutoModel, so a separate output layer is not in the number. The number is the column
"Training using Adam" of `float16`, which its code gives for bf16 too; `accelerate_float32_bytes` is the same
column of `float32`. It depends on the model alone: the tool has no option for batch, GPUs, strategy or
offloading.

**EleutherAI's cookbook**, `calc/calc_transformer_mem.py` at the commit COOKBOOK: a script that cannot be
installed, so `cookbook_bytes` repeats its formula. It gets the row's arguments, and the sizes of the model
one by one. With a Hugging Face config instead, it ignores that Llama has three matrices in an MLP and fewer
heads for keys, and fails on GPT-Neo. `--checkpoint-activations` is set if the row checkpoints any block.
FSDP2 is given as stage 3, without resharding as stage 2. Everything else is the script's default; its
buffers are DeepSpeed's defaults. It has no option for offloading: no number for those rows.

**Adapters**: all three count every parameter as trained (for DeepSpeed, see its issue #5304), so rows with
LoRA have no number.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from rows import Row, load_rows

if TYPE_CHECKING:
    from shardwise.models.build import BuiltModel

HERE = Path(__file__).parent
COOKBOOK = "827ee3b293a63f14403f1467d08c91fda213f4e6"
TOOLS = ("deepspeed", "accelerate", "accelerate_float32", "cookbook")
LORA = "counts all parameters as trained; has no word for adapters"

# Matrices in an MLP: up and down, or gate, up and down (phi3 stores the first two as one).
MLP_MATRICES = {
    "gpt2": 2,
    "gpt_neo": 2,
    "gpt_neox": 2,
    "gemma": 3,
    "gemma2": 3,
    "gemma3_text": 3,
    "llama": 3,
    "mistral": 3,
    "phi": 2,
    "phi3": 3,
    "qwen2": 3,
    "qwen3": 3,
}

Estimate = tuple[int | None, str | None]
"""Bytes, or the reason why there are none."""


@dataclass(frozen=True, kw_only=True)
class CookbookArguments:
    """Options of `calc_transformer_mem.py` that depend on the row; names are the script's."""

    hidden_size: int
    num_attention_heads: int
    num_layers: int
    vocab_size: int
    ffn_expansion_factor: float
    num_mlp_linears: int
    kv_size_ratio: float
    sequence_length: int
    batch_size_per_gpu: int
    num_gpus: int
    zero_stage: int
    checkpoint_activations: bool


def cookbook_bytes(a: CookbookArguments) -> float:
    """Training bytes on a GPU by the cookbook's script, by default in mixed precision with AdamW.

    A value takes 2 bytes, a gradient 4, optimizer states 12. ZeRO's stages divide these three in turn, the
    last first. Its buffers, on more than one GPU, are a bucket of 5e8 values, and 1e9 gathered ones at stage
    3. Activations follow Korthikanti et al. 2022 (arXiv:2205.05198), table 2: 34 bytes for each of the
    sequence x batch x hidden values of a block, and without checkpointing 5 for each attention score. (With
    full checkpointing that table has 2 bytes; the script keeps the 34.)
    """
    h, blocks = a.hidden_size, a.num_layers
    matrices = 2 * h * h * (1 + a.kv_size_ratio) + a.num_mlp_linears * a.ffn_expansion_factor * h * h
    parameters = blocks * (matrices + 8 * h) + h * (2 * a.vocab_size + a.sequence_length + 2)
    shared = {least: a.num_gpus if a.zero_stage >= least else 1 for least in (1, 2, 3)}
    states = parameters * (2 / shared[3] + 4 / shared[2] + 12 / shared[1])
    buffers = 0.0
    if a.num_gpus > 1:
        buffers = 2 * (5e8 * (a.zero_stage >= 1) + 1e9 * (a.zero_stage == 3))
    scores = 0 if a.checkpoint_activations else 5 * a.num_attention_heads * a.sequence_length
    activations = blocks * a.batch_size_per_gpu * a.sequence_length * (34 * h + scores)
    return states + buffers + activations


def cookbook_arguments(row: Row) -> CookbookArguments:
    """The row in the script's terms."""
    config = _built(row.model, row.layers).config
    heads, hidden = config.num_attention_heads, config.hidden_size
    # GPT-2 and GPT-Neo say null where the MLP is four times as wide as the model
    inner = getattr(config, "n_inner" if config.model_type == "gpt2" else "intermediate_size") or 4 * hidden
    strategy = row.resolved()
    stages = {"fsdp2": 3 if strategy.reshard else 2, "ddp-zero1": 1}
    return CookbookArguments(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        ffn_expansion_factor=inner / hidden,
        num_mlp_linears=MLP_MATRICES[config.model_type],
        kv_size_ratio=getattr(config, "num_key_value_heads", heads) / heads,
        sequence_length=row.sequence_length,
        batch_size_per_gpu=row.micro_batch,
        num_gpus=row.gpus,
        zero_stage=stages.get(strategy.engine, strategy.stage),
        checkpoint_activations=strategy.checkpoint_every > 0,
    )


def cookbook(row: Row) -> Estimate:
    if row.lora:
        return None, LORA
    strategy = row.resolved()
    if strategy.offloads:
        return None, "has no word for offloading"
    return round(cookbook_bytes(cookbook_arguments(row))), None


def deepspeed(row: Row) -> Estimate:
    strategy = row.resolved()
    if strategy.engine != "deepspeed":
        return None, f"estimates ZeRO only, and the row is {strategy.name}"
    if strategy.stage < 2:
        return None, f"has no estimator for ZeRO stage {strategy.stage}"
    if row.lora:
        return None, LORA
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    built = _built(row.model, row.layers)
    node = {"num_gpus_per_node": row.gpus, "num_nodes": 1, "cpu_offload": strategy.offload_optimizer == "cpu"}
    if strategy.stage == 2:
        return stage_1_and_2.estimate_zero2_model_states_mem_needs(built.total, **node)[1], None
    # Only its count of the largest layer: its total finds tied weights by their addresses, and a model on
    # the meta device has none.
    _, largest = stage3.model_to_params(built.model)
    parameters = strategy.offload_parameters == "cpu"
    estimate = stage3.estimate_zero3_model_states_mem_needs(
        built.total, largest, cpu_offload_params=parameters, **node
    )
    return estimate[1], None


def accelerate(row: Row, dtype: str) -> Estimate:
    if row.lora:
        return None, LORA
    return _accelerate(row.model, row.layers)[dtype], None


@cache
def _accelerate(model: str, layers: int) -> dict[str, int]:
    """Column "Training using Adam" of `accelerate estimate-memory`, in bytes, by its `--dtypes`."""
    from accelerate.commands import estimate

    row = Row(model=model, layers=layers)
    content = {**copy.deepcopy(row.shape.hf_config()), **row.config}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content), encoding="utf-8")
        arguments = estimate.estimate_command_parser().parse_args([folder, "--dtypes", "float32", "float16"])
        on_hub = SimpleNamespace(library_name="transformers", config=content)
        # stdout is for the result; the tool announces what it loads
        quiet = contextlib.redirect_stdout(sys.stderr)
        with quiet, mock.patch.object(estimate, "verify_on_hub", return_value=on_hub):
            table = estimate.gather_data(arguments)
    return {dtype: int(max(training.values())) for dtype, _, _, training in table}


@cache
def _built(model: str, layers: int) -> BuiltModel:
    """The causal language model of a row, without adapters, on the meta device."""
    import torch

    from shardwise.models.build import build_model

    job = Row(model=model, layers=layers).job(source=model, text="text.txt", output="runs")
    return build_model(job.model, dtype=torch.bfloat16, seed=0)


def peer(row: Row) -> dict[str, Any]:
    """Estimates of every tool for a row, in bytes on one GPU."""
    estimates = {
        "deepspeed": deepspeed(row),
        "accelerate": accelerate(row, "float16"),
        "accelerate_float32": accelerate(row, "float32"),
        "cookbook": cookbook(row),
    }
    entry: dict[str, Any] = {}
    for tool, (number, why_not) in estimates.items():
        entry[f"{tool}_bytes"] = number
        entry |= {f"{tool}_why_not": why_not} if why_not else {}
    return entry


def errors(peers: Mapping[str, Mapping[str, Any]], measured: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of each tool against the measured peak of reserved memory, over the rows it has a number for.

    An error is (predicted - measured) / measured. Per tool: `rows`, `mean_absolute`, `median` (with its
    sign), `worst` (the largest one, with its sign), `worst_row`. Rows that ended in an error, such as out
    of memory, have no peak and do not count.
    """
    peaks = {row["id"]: row["peak_reserved_bytes"] for row in measured if row["error"] is None}
    found = {}
    for tool in TOOLS:
        said = {row: peers[row][f"{tool}_bytes"] for row in peaks if row in peers}
        by_row = {row: said[row] / peaks[row] - 1 for row in said if said[row] is not None}
        if not by_row:
            continue
        worst_row = max(by_row, key=lambda row: abs(by_row[row]))
        found[tool] = {
            "rows": len(by_row),
            "mean_absolute": statistics.mean(map(abs, by_row.values())),
            "median": statistics.median(by_row.values()),
            "worst": by_row[worst_row],
            "worst_row": worst_row,
        }
    return found


def known_rows() -> list[Row]:
    """Rows whose model family other tools know."""
    return [row for row in load_rows(HERE / "rows.toml") if row.set not in ("families", "attention")]


def main() -> None:
    parser = argparse.ArgumentParser(description="What other estimators say of the rows' memory")
    parser.add_argument("--out", type=Path, required=True, help="JSON, one entry per row id")
    parser.add_argument("--measured", type=Path, default=HERE / "results" / "measured.jsonl")
    arguments = parser.parse_args()
    versions = {name: version(name) for name in ("accelerate", "deepspeed", "torch", "transformers")}
    versions["cookbook"] = COOKBOOK
    rows = known_rows()
    peers = {row.id: {**peer(row), "versions": versions} for row in rows}
    lines = [f"{json.dumps(row)}: {json.dumps(entry)}" for row, entry in peers.items()]
    arguments.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    measured = [json.loads(line) for line in arguments.measured.read_text(encoding="utf-8").splitlines()]
    print(f"{len(peers)} rows, {len(measured)} measured\n")
    print(f"{'':18}  rows  mean |error|   median    worst")
    for tool, e in errors(peers, measured).items():
        numbers = f"{e['mean_absolute']:12.1%}  {e['median']:+7.1%}  {e['worst']:+7.1%}"
        print(f"{tool:18}  {e['rows']:4}  {numbers}  {e['worst_row']}")


if __name__ == "__main__":
    main()
