"""Losses of ZeRO-3 on two GPUs, where autograd keeps views of weights that ZeRO-3 releases.

    python benchmarks/zero3_views/measure.py TREE >OUT      (a machine with two GPUs)

Five steps over the same rows: twice as usual, once recorded as CUDA graphs. All three should be alike. One
JSON line for each: `steps` are pairs of loss and gradient norm, TREE is a name. `results/two_h200.jsonl` has
what decision 0109 gives, and in the same call commit 7021e2cd, given the same numbers of layers. It was made
by this script before its last changes of form. `results/profile.json`: how long rank 0's kernels ran in a
profiled step of three rows of the ledger.
"""

import gc
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import multiprocessing

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests" / "shared")]
from recorded_steps import end, engine_of, micro_batches, model_of, train  # noqa: E402

CASES = (
    ("llama-3.2-1b", {"reshard": False}),
    ("falcon-7b", {}),
    ("olmoe-1b-7b", {}),
)


def measure(rank: int, tree: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29511", rank=rank, world_size=2)
    for name, options in CASES:
        for recorded in (False, False, True):
            engine, built = engine_of(
                model_of(name),
                checkpointed=False,
                accumulation=1,
                record=recorded,
                rank=rank,
                ranks=2,
                engine="deepspeed",
                stage=3,
                **options,
            )
            batch = micro_batches(built.config.vocab_size)[1]
            steps = [train(engine, [batch], rate=2e-5)[0] for _ in range(5)]
            end(engine)
            if rank == 0:
                found = {
                    "tree": tree,
                    "model": name,
                    "layers": built.config.num_hidden_layers,
                    **options,
                    "recorded": recorded,
                    "steps": [[round(number, 4) for number in step] for step in steps],
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "deepspeed": deepspeed.__version__,
                    "date": datetime.now(UTC).date().isoformat(),
                }
                print(json.dumps(found), flush=True)
            del engine, built
            gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.start_processes(measure, sys.argv[1:2], nprocs=2, start_method="spawn")
