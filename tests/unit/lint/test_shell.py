"""A variable of a shell script has a value where that is certain; else it stays `$NAME`."""

from __future__ import annotations

import contextlib
import time

import pytest

from shardwise.lint.document import UnreadableError
from shardwise.lint.shell_text import read_shell

CERTAIN = {
    "plain": ("LR=1e-5", 1e-5),
    "the last": ("LR=3e-4\nLR=1e-5", 1e-5),
    "comment": ("LR=2e-5 # tried LR=1e-4, it's bad", 2e-5),
    "of another command": ("LR=1e-5\nLR=3e-4 python prep.py", 1e-5),
    "words of another command": ('LR=1e-5\necho "a" LR=3e-4\necho "x LR=3 y"\npython c.py LR=3', 1e-5),
    "heredoc": ("LR=1e-5\ncat <<EOF > x\nLR=3e-4\nit's\nEOF", 1e-5),
    "heredoc with tabs": ("LR=1e-5\ncat <<-'EOF'\n\tLR=3e-4\n\tEOF\n", 1e-5),
    "text in quotes": ("LR=1e-5\n: \"\nLR=3e-4\n\"\nA='LR=3e-4 '", 1e-5),
    "after a branch": ("if true; then LR=3; fi; LR=2e-5", 2e-5),
    "same in a branch": ('LR=1e-5\nif [ "$A" = x ]; then LR=1e-5; fi', 1e-5),
    "export": ("export  OTHER LR=3e-4", 3e-4),
    "export reads first": ("A=1\nexport A=2 LR=$A", 1),
    "in turn": ("A=1\nA=2 LR=$A", 2),
    "declare": ("declare -x LR='3e-4'", 3e-4),
    "default": ("LR=${OTHER:-1e-5}", 1e-5),
    "default of an empty one": ('A=""\nLR=${A:-1e-5}', 1e-5),
    "no default": ("A=2e-5\nLR=${A:-1e-5}", 2e-5),
    "argument": ("LR=${1:-1e-5}", 1e-5),
    "colon": (': "${LR:=1e-5}"', 1e-5),
    "sum": ("B=4\nLR=$((B * 2 + (1 - 3) / 2))", 7),
    "towards zero": ("LR=$((-5/2 + 10))", 8),
    "many divisions": (f"LR=$(({'1/' * 90}1))", 1),
    "nested defaults": (f"LR={'${a:-' * 40}2{'}' * 40}", 2),
    "array": ('A=(1e-5 --x 2)\nA+=(3)\nLR="${A[@]}"', "1e-5 --x 2 3"),
    "array as text": ('A=("x y")\nLR="${A[@]}"\nLR="$LR"', "x y"),
    "more": ("B=4\nB+=2\nLR=$B", 42),
    "longer names": ("LR=1e-5\nLR_v2=3\nA=$LR_v2", 1e-5),
    "after a pipe that ends": ("echo a | cat\nLR=1e-5", 1e-5),
    "set of options": ("set -euo pipefail\nLR=${1:-1e-5}", 1e-5),
    "environment": ('LR=1e-5\nsource ~/venv/bin/activate x\neval "$(conda shell.bash hook)"', 1e-5),
}
UNKNOWN = {
    "if": 'if [ "$1" = a ]; then LR=3; else LR=4; fi',
    "a test that is not read": 'A=x\nif ! [ "$A" = x ]; then LR=3; fi',
    "if on lines": "if [ 1 = 1 ]\nthen\n  :\nelse\n  LR=3\nfi",
    "case": "case $1 in\n  big) LR=3 ;;\nesac",
    "for": "for x in 1; do LR=3; done",
    "name of a loop": "for LR in 1 2; do",
    "while": "while true; do\nLR=3\ndone",
    "function": "f() { LR=$1; }\nLR=2\nf 3",
    "function, word": "function f\n{\n  local LR=3\n}",
    "loop, later": "for x in 1 2; do\n  LR=3\ndone\nLR=2",
    "subshell": "( LR=3",
    "braces": "{ LR=3; } > log",
    "and": "[ $A = 1 ] && LR=3",
    "or, next line": "[ $A = 1 ] ||\n\n  LR=3",
    "background": "LR=3 &",
    "pipe": "LR=3 | cat",
    "read": "read -r LR",
    "printf": "printf -v LR %s 3",
    "eval": "eval LR=3",
    "eval of a variable": "eval $A",
    "unset": "unset LR",
    "source": "source config.sh",
    "dot": ". ./config.sh",
    "source in a function": "f() { source a.sh; }\nLR=2\nf",
    "exit": "exit 0\nLR=3",
    "mapfile": "mapfile -t LR < x",
    "prints": "LR=$(echo 3)",
    "backticks": "LR=`echo 3`",
    "index": "LR[0]=3",
    "let": "let LR*=2",
    "double brackets": "((LR++))",
    "in a sum": "A=$((LR=3))",
    "assigned default": "A=${LR:=3}",
    "indirect": "A=B\nLR=${!A}",
    "arguments that change": "set -- 3\nLR=${1:-2}",
    "shift": "shift\nLR=${1:-2}",
    "launcher's": "LR=${SLURM_JOB_ID:-2}",
    "of an empty one": "LR=3 $A",
    "redirect": "LR=3 > log",
    "comparison": "LR=$((1<2))",
    "octal": "LR=$((010))",
    "large": f"LR=$(({'9' * 5000} + 1))",
    "deep": f"LR=$(({'1+' * 5000}1))",
    "division by zero": "LR=$((1/0))",
    "power": "LR=$((2**3))",
    "no digit": "A=\N{SUPERSCRIPT TWO}\nLR=$((A+1))",
    "map": "declare -A LR=([a]=3)",
    "braces in an array": "A=({1,2} 3)\nLR=${#A[@]}",
    "of an array": "A=(1 2)\nLR=${A[1]}",
    "number of items": "A=(1 2)\nLR=${#A[@]}",
    "integer": "declare -i LR=1+1",
    "never closed": 'A="x\nLR=3',
    "doubling": "LR=12345678\n" + "LR=$LR$LR\n" * 40,
}


IN_FUNCTION = {
    "assigned later": "LR=1\ngo() {\n  torchrun train.py --lr $LR\n}\nLR=2\ngo",
    "default, assigned later": "go() {\n  torchrun train.py --lr ${LR:-1}\n}\nLR=2\ngo",
    "its argument": "go() {\n  torchrun train.py --lr ${1:-1}\n}\ngo 2",
    "a loop's next round": "LR=1\nfor x in 1 2; do\n  torchrun train.py --lr $LR\n  LR=2\ndone",
    "expanded once": "CMD='torchrun train.py --lr $LR'\nLR=1\n$CMD",
    "expanded where it is assigned": 'CMD="torchrun train.py --lr $LR"\nLR=1\neval $CMD',
}


@pytest.mark.parametrize("name", IN_FUNCTION)
def test_what_holds_when_a_command_runs_later_is_unknown(name: str) -> None:
    assert "$" in str(read_shell(IN_FUNCTION[name], "run.sh").get("lr"))


def test_a_command_in_a_function_has_what_is_certain() -> None:
    text = "LR=1\ngo() {\n  torchrun train.py --lr ${LR:-2} | tee log\n}\ngo\n"
    assert read_shell(text, "run.sh").get("lr") == 1


def value(before: str, command: str = 'torchrun train.py --lr "$LR"') -> object:
    return read_shell(f"{before}\n{command}\n", "run.sh").get("lr")


@pytest.mark.parametrize("name", CERTAIN)
def test_a_certain_variable_has_its_value(name: str) -> None:
    text, expected = CERTAIN[name]
    assert value(text) == expected


@pytest.mark.parametrize("name", UNKNOWN)
def test_every_other_variable_is_unknown(name: str) -> None:
    assert "$" in str(value("LR=1e-5\n" + UNKNOWN[name]))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("010", 10),
        ("1:30", "1:30"),
        ("no", "no"),
        ("1e-5", 1e-5),
        ("2024-01-01", "2024-01-01"),
        ("'a$NAME'", "a$NAME"),
        ("True", True),
        ("9" * 101, "9" * 101),
        ("\N{SUPERSCRIPT TWO}", "\N{SUPERSCRIPT TWO}"),
        ("'a: &a [*a,*a]'", "a: &a [*a,*a]"),
        ("1 --lr 2", 2),
        ("1 --lr=2", 2),
    ],
)
def test_a_flag_has_the_value_that_argparse_gives_it(word: str, expected: object) -> None:
    assert value("", f"torchrun train.py --lr {word}") == expected


LONG = {
    "srun": "srun " * 60_000 + "x",
    "srun with more": "srun a python b " * 20_000 + "\npython x",
    "quote": 'A="\n' + "$x y\n" * 40_000,
    "spaces": f"torchrun train.py --lr 3{' ' * 200_000}x # y",
    "brackets": "A=$(" * 50_000,
    "defaults": "echo " + "${a:-" * 50_000,
    "nested": f"LR={'${a:-' * 400}2{'}' * 400}\nA=$(({'(' * 90}1{')' * 90}))\ntorchrun x.py --lr $LR $A",
    "blocks": "if a\n" * 50_000,
    "heredocs": "".join(f"cat <<E{i}\n" for i in range(10_000)),
    "commands": "A=$B\n$A x\n" * 20_000,
    "arrays": "A=(a b c d e f g h)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + "x $A\n" * 10_000,
    "assignments": "export A=1\n" * 20_000,
}


@pytest.mark.parametrize("name", LONG)
def test_no_text_takes_long(name: str) -> None:
    began = time.process_time()
    with contextlib.suppress(UnreadableError):  # no command in most of them
        read_shell(LONG[name], "run.sh", plain=True)
    assert time.process_time() - began < 15


@pytest.mark.parametrize("between", [" ", " \\\n", " \\\n  NCCL_DEBUG=INFO \\\n"])
def test_a_launcher_may_stand_below_its_variables(between: str) -> None:
    text = f"cd code\nCUDA_VISIBLE_DEVICES=0{between}deepspeed train.py \\\n  --lr 1e-5\n"
    document = read_shell(text, "run.sh")
    found = {key: document.values[key] for key in ("launcher", "script", "lr", "CUDA_VISIBLE_DEVICES")}
    assert found == {"launcher": "deepspeed", "script": "train.py", "lr": 1e-5, "CUDA_VISIBLE_DEVICES": 0}
    assert document.marks["launcher",].line == 2 + between.count("\n")
    assert document.marks["lr",].line == 3 + between.count("\n")
