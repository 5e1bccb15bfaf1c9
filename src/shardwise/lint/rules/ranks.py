"""Processes of a training loop: the rows, the GPU and the parts of each."""

import ast
import re
from collections.abc import Iterator

from shardwise.lint.document import Document, line_at
from shardwise.lint.finding import Hit, Severity
from shardwise.lint.rules.accelerate import FSDP
from shardwise.lint.rules.loop import around, made_by
from shardwise.lint.rules.training import (
    calls,
    distributed,
    is_optimizer,
    training_rule,
    tree_of,
    within,
    zero_stage,
)
from shardwise.lint.setup import Setup

_WRAPS = re.compile(r"\b(DistributedDataParallel|FullyShardedDataParallel|fully_shard)\(")
_DIVIDED = re.compile(
    r"[Ss]ampler|split_dataset_by_node|\.shard\(|num_replicas|\.prepare\w*\(|setup_dataloaders|Iterable"
    r"|streaming=|[Ww]eb[Dd]ataset|[Ll]ightning|\w*Trainer\(|worker_init_fn"
)
_RANK = re.compile(r"\b(\w+_)?rank\b(?!\s*==)|RANK")
_BY_RANK = re.compile(r"(?i)rank|process_index|accelerator\.device|current_device|lightning|fabric|Trainer\(")
_OWN = 'int(os.environ["LOCAL_RANK"])'
_FIXED: tuple[object, ...] = ("cuda:0", {"": 0}, {"": "cuda:0"})
_ON_GPU_0 = re.compile(
    r"^[^#\n]*?((?:\.(?:to|cuda|set_device)\(|\bdevice(?: *= *|\())(?:device=)?[\"']?(?:cuda:)?0[\"']?)"
    r"(?=\)| if|\s*$)",
    re.MULTILINE,
)
_ROWS = re.compile(r"(?i)(range|data|loader|rows|split|shard|islice|seed)(?!.*parallel)")


def _rows_by_rank(document: Document) -> bool:
    """Whether a rank chooses rows: in arithmetic, a range, an index, or what makes a dataset or loader."""
    for node in ast.walk(tree_of(document)):
        match node:
            case ast.BinOp(op=op) if not isinstance(op, ast.Mod):
                text = ast.unparse(node)
            case ast.Subscript(value=holder, slice=key) if not ast.unparse(holder).endswith("environ"):
                text = ast.unparse(key)
            case ast.Call(func=function) if _ROWS.search(ast.unparse(function)):
                text = " ".join(map(ast.unparse, [*node.args, *node.keywords]))
            case _:
                continue
        if _RANK.search(text):
            return True
    return False


@training_rule("warning", "torch/utils/data: a DataLoader knows nothing of other processes")
def no_sampler(document: Document, setup: Setup) -> Iterator[Hit]:
    """Without a DistributedSampler all processes train on the same rows."""
    own = {"deepspeed.initialize", "deepspeed.initialize(training_data)"} & document.uses
    loads, program = re.search(r"\bDataLoader\(", document.text), ast.unparse(tree_of(document))
    engine = own == {"deepspeed.initialize"} and distributed(setup)
    map_style = re.search(r"shuffle=True|load_dataset\(|TensorDataset\(|\(\w*\.?Dataset\):", program)
    wraps = not own and _WRAPS.search(program) and map_style and setup.world_size != 1
    if loads and (engine or wraps) and not (_DIVIDED.search(document.text) or _rows_by_rank(document)):
        what = "nothing here divides the rows: every process trains on all of them"
        fix = "DataLoader(..., sampler=DistributedSampler(rows))"
        fix += ", or training_data= in deepspeed.initialize" if own else ", without shuffle=True"
        yield Hit((), what, fix, line=line_at(document.text, loads.start()))


@training_rule("warning", "torch/utils/data/distributed.py: DistributedSampler.__iter__: seed + epoch")
def sampler_without_set_epoch(document: Document, _: Setup) -> Iterator[Hit]:
    """A DistributedSampler shuffles by its epoch: without `set_epoch` every epoch has the same order."""
    made = [
        call
        for call in calls(document, "DistributedSampler")
        if all(one.arg != "shuffle" or ast.unparse(one.value) == "True" for one in call.keywords)
        and not re.search("(?i)val|test|eval|dev", ast.unparse(call))
    ]
    loops = (one for one in ast.walk(tree_of(document)) if isinstance(one, ast.For))
    epochs = any("epoch" in ast.unparse(one.target).lower() for one in loops)
    if made and epochs and not re.search(r"set_epoch|\.prepare\(|[Ll]ightning|Trainer\(", document.text):
        fix = "sampler.set_epoch(epoch) at the beginning of each epoch"
        yield Hit((), fix=fix, line=made[0].lineno)


@training_rule("error", "torch.cuda.set_device; transformers/trainer.py: is_model_parallel; read in 5.23")
def one_gpu_for_all(document: Document, setup: Setup) -> Iterator[Hit]:
    """All processes use the same GPU, and the others stay idle: each must take that of its own rank."""
    program = ast.unparse(tree_of(document))
    several = (setup.world_size or 0) > 1 or _WRAPS.search(program) is not None
    if setup.world_size == 1 or not several or "CUDA_VISIBLE_DEVICES" in program:
        return
    if document.get("device_map") in _FIXED:
        what = "every process loads the model on GPU 0, and trains on the GPU of its rank"
        yield Hit(("device_map",), what, f'{{"": {_OWN}}}; or remove it: transformers chooses the GPU')
    place = None if _BY_RANK.search(program) else _ON_GPU_0.search(document.text)
    if place:
        said = place[1] + ")" * ("(" in place[1])
        what = f"`{said}` is GPU 0 in every process, and no line chooses the GPU by rank"
        fix = f"that GPU by rank, {_OWN}, and torch.cuda.set_device of it"
        yield Hit((), what, fix, line=line_at(document.text, place.start(1)))


@training_rule("error", "accelerate/accelerator.py: prepare", versions="accelerate<2")
def not_prepared(document: Document, setup: Setup) -> Iterator[Hit]:
    """`accelerator.prepare` divides rows, averages gradients, shards: not for what it is not given."""
    program, made = tree_of(document), made_by(document)
    ways = ("prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader")
    given = [one for call in calls(document, *ways) for one in call.args]
    backward = [*calls(document, "backward")]
    named = all(isinstance(one, ast.Name | ast.Attribute) for one in given)
    if not backward or not given or not named or "Accelerator" not in document.uses:
        return
    prepared = {ast.unparse(one) for one in given}
    places = [one for one in ast.walk(program) if isinstance(one, ast.Name | ast.Attribute | ast.arg)]
    bound = [one.arg if isinstance(one, ast.arg) else ast.unparse(one) for one in places if _binds(one)]
    shards = zero_stage(setup) is not None or any(one.section(FSDP) for one in setup.of("accelerate"))
    for name, (line, what, severity) in _parts(document, made, around(program, backward[0]), shards).items():
        if name not in prepared and bound.count(name) == 1:
            fix = f"..., {name} = accelerator.prepare(..., {name})"
            yield Hit((), f"`{name}` is not prepared: {what}", fix, severity=severity, line=line)


_PREPARE = (
    "give it to accelerator.prepare, and use what that returns: ..., {0} = accelerator.prepare(..., {0})"
)


def _binds(node: ast.AST) -> bool:
    return isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store)


def _parts(
    document: Document, made: dict[str, str], loop: ast.AST, shards: bool
) -> dict[str, tuple[int, str, Severity]]:
    """The model, optimizer and loader of a loop: a line, and what happens if they are not prepared."""
    parts = dict[str, tuple[int, str, Severity]]()
    for call in within(tree_of(document)):
        owner, _, last = ast.unparse(call.func).rpartition(".")
        if last == "step" and is_optimizer(made.get(owner, "")):
            what = "it steps also between accumulated micro-batches, and does not undo fp16's loss scale"
            what = "it does not have the sharded parameters: nothing is trained" if shards else what
            parts.setdefault(owner, (call.lineno, what, "error" if shards else "warning"))
        elif is_optimizer(last) and call.args:
            model = re.match(r"([\w.]+)\.parameters\(\)", ast.unparse(call.args[0]))
            what = "the processes' gradients are not averaged, and each trains a model of its own"
            parts |= {model[1]: (call.lineno, what, "error")} if model else {}
    if isinstance(loop, ast.For) and "Sampler" not in document.text:
        for one in ast.walk(loop.iter):
            if made.get(name := ast.unparse(one), "").endswith("DataLoader"):
                what = "every process trains on all rows, and the batches stay on the CPU"
                parts[name] = (loop.lineno, what, "warning")
    return parts
