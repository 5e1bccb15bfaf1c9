"""Scripts and commands of each kind that users write: files in, values of the job and sentences out.

A row of CASES: the files, the values of the job by key, and what the sentences must say. The order of the
files is that of `shardwise init --from`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.job.source import job_values
from shardwise.lint.foreign import translation

Files = dict[str, str]

ARGPARSE = """\
import argparse, torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gpt2")
parser.add_argument("-b", "--bs", type=int, default=1)
parser.add_argument("--learning-rate", "--lr", type=float, default=1e-3)
parser.add_argument("--wd", dest="decay", type=float, default=0.0)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--note", default="")
args = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(args.model)
loader = DataLoader(rows, batch_size=args.bs)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.decay)
for epoch in range(args.epochs):
    for batch in loader:
        optimizer.step()
"""
OF_COMMAND = {
    "model.source": "a/b",
    "train.micro_batch": 4,
    "train.global_batch": 32,
    "optimizer.learning_rate": 5e-5,
    "train.epochs": 3,
}
FLAGS = "--model a/b --bs 4 --lr 5e-5 --epochs 3"
RUN = "torchrun --nproc_per_node 8 train.py"
SHELLS = {
    "plain": f"{RUN} {FLAGS}\n",
    "variables": f"M=a/b\nBS=4\nexport LR='5e-5' N=3\n{RUN} --model $M --bs ${{BS}} --lr \"$LR\" --epochs=$N\n",
    "defaults": f"BS=${{BS:-4}}\n{RUN} --model ${{MODEL:-a/b}} --bs $BS --lr ${{1:-5e-5}} --epochs ${{N-3}}\n",
    "sums": f"A=2\nB=$((A * 2))\n{RUN} --model a/b --bs $B --lr 5e-5 --epochs $(( (A+B)/2 ))\n",
    "array": f'ARGS=(\n  --model a/b  # the model\n  --bs 4\n)\nARGS+=(--lr 5e-5 --epochs 3)\n{RUN} "${{ARGS[@]}}"\n',
    "text": f'OPTS="--model a/b --bs 4"\nOPTS="$OPTS --lr 5e-5"\nOPTS+=" --epochs 3"\n{RUN} $OPTS\n',
    "lines": f"{RUN} \\\n  --model a/b \\\n  --bs 4 --lr 5e-5 \\\n  --epochs 3\n",
    "eval": f'CMD="{RUN} {FLAGS}"\necho "$CMD"\neval $CMD\n',
    "eval of parts": f'CMD="{RUN}"\nCMD="$CMD {FLAGS}"\nbash -c "$CMD"\n',
    "array of the command": f'CMD=({RUN} {FLAGS})\n"${{CMD[@]}}"\n',
    "launcher in a variable": f'LAUNCH="torchrun --nproc_per_node 8"\n$LAUNCH train.py {FLAGS}\n',
    "function": f"go() {{\n  {RUN} {FLAGS}\n}}\ngo\n",
    "slurm": "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:a100:4\n"
    f"srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE train.py {FLAGS}\n",
    "slurm tasks": "#SBATCH -N 2\n#SBATCH --ntasks-per-node=4\n" + f"srun python train.py {FLAGS}\n",
    "visible": f"CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 deepspeed train.py {FLAGS}\n",
    "include": f"deepspeed --include localhost:0,1,2,3,4,5,6,7 train.py {FLAGS}\n",
    "case": 'BS=4\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n    --bs) BS="$2"; shift 2;;\n  esac\ndone\n'
    f"{RUN} --model a/b --bs $BS --lr 5e-5 --epochs 3\n",
    "empty": f'if [ -z "$BS" ]; then\n  BS=4\nfi\n{RUN} --model a/b --bs $BS --lr 5e-5 --epochs 3\n',
    "single quotes": f"ARGS='--model a/b --bs 4'\n{RUN} $ARGS --lr 5e-5 --epochs 3\n",
}
CASES: dict[str, tuple[Files, dict[str, Any], tuple[str, ...]]] = {
    f"shell: {name}": ({"run.sh": text, "train.py": ARGPARSE}, OF_COMMAND, ())
    for name, text in SHELLS.items()
}


def value_of(values: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values.get(part, {}) if isinstance(values, dict) else {}
    return None if values == {} else values


@pytest.mark.parametrize("name", CASES)
def test_the_job_is_what_the_files_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, expected, sentences = CASES[name]
    monkeypatch.chdir(tmp_path)
    for file, text in files.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text)
    text, said = translation([Path(file) for file in files if not file.startswith("data/")])
    values = job_values(text)
    assert {key: value_of(values, key) for key in expected} == expected, "\n".join(said)
    for sentence in sentences:
        assert sentence in "\n".join(said)
