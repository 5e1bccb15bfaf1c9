"""Processes of a training loop: the rows, the GPU and the parts of each."""

import ast
import re
from collections.abc import Iterator, Sequence

from shardwise.lint.document import Document, line_at
from shardwise.lint.finding import Hit, Severity, loop_rule, training_rule
from shardwise.lint.rules.branches import branches, on_one, spelled_out
from shardwise.lint.rules.loop import around, made_by, stepped
from shardwise.lint.rules.program import calls, code_of, is_optimizer, tree_of, values_of, walk, within
from shardwise.lint.rules.training import distributed
from shardwise.lint.schema import names, pattern, table
from shardwise.lint.setup import Setup

_DRAWS = re.compile(r"(torch|random)\.(randint|randperm|choices?|sample|permutation)$")
_WRAPS = re.compile(r"\b(DistributedDataParallel|FullyShardedDataParallel|fully_shard)\(")
_JOINS = re.compile(rf"{_WRAPS.pattern}|\bAccelerator\(|deepspeed\.initialize\(")
_SEEDS = re.compile(r"\w*seed\w*\(")
_MAP_STYLE, _DIVIDED = (re.compile("|".join(names(one))) for one in ("rows_by_number", "divides_rows"))
_ROWS_BY_RANK = pattern("rows_by_rank")  # an index, arithmetic, or an argument of what makes rows
_BY_RANK = re.compile(r"(?i)rank|process_index|accelerator\.device|current_device|lightning|fabric|Trainer\(")
_CHOOSES = pattern("chooses")
_ON_CUDA = re.compile(r"\.cuda\(\)|\.to\(['\"]cuda['\"]|\bdevice\(['\"]cuda['\"]")
_MAKES_ACCELERATOR = re.compile(r"\bAccelerator\(")
_GLOBAL = re.compile(r"environ(\.get\(|\[)'(RANK|SLURM_PROCID)'|\bget_rank\(\)|getenv\('RANK'")
_REDUCES = re.compile(r"\ball_?reduce|reduce_scatter|[Aa]ccelerator")
_EARLY, _DDP = pattern("early"), pattern("wraps_in_ddp")
_PARTS = re.compile(r"auto_wrap|\bwrap\(|GRAD_OP|NO_SHARD|HYBRID|after_forward *= *False")
_PRETRAINED = r"(?m)^ *{} = ([\w.]+\.)?(AutoModel\w*|[A-Z]\w+For[A-Z]\w+|\w+LMHeadModel)(\.from_\w+)?\("
_SAVES_ITSELF = re.compile(r"FullySharded\w+\(|fully_shard\(|deepspeed\.|Accelerator\(|[Ll]ightning|Fabric\(")
_OF_ONE = pattern("of_one")
_LEAVES = re.compile(r"if ([^\n]*):\n\s*(?:return|continue)\b")  # a condition for what follows
_NODES = ("nnodes", "num_nodes", "num_machines")
_OWN = 'int(os.environ["LOCAL_RANK"])'
_FIXED: tuple[object, ...] = ("cuda:0", {"": 0}, {"": "cuda:0"})
_ON_GPU_0 = pattern("on_gpu_0")
_TRAINED = re.compile(r"([\w.]+) = [\w.]+\(([\w.]+)\.parameters\(\)")
_HELD_OUT = re.compile("(?i)val|test|dev")
_FIXED_ORDER = re.compile("(?i)val|test|dev|shuffle=(?!True)")
_PREPARES = ("prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader")
_UNPREPARED: dict[str, str] = table("unprepared")


def _of_a_library(document: Document) -> bool:
    """Whether the script calls a Trainer that is not all its own."""
    made = [*walk(tree_of(document), ast.ClassDef)]
    bases = {one.name: [ast.unparse(base) for base in one.bases] for one in made}
    called = {name for name in document.uses if name.endswith("Trainer")}
    for _ in made:
        called = {base for name in called for base in bases.get(name, [name]) if base.endswith("Trainer")}
    return bool(called)


@loop_rule("warning", "torch/utils/data: a DataLoader knows nothing of other processes")
def no_sampler(document: Document, setup: Setup) -> Iterator[Hit]:
    """Without a DistributedSampler all train on the same rows; an Accelerator divides a sampler's again."""
    own = {"deepspeed.initialize", "deepspeed.initialize(training_data)"} & document.uses
    loads, program = re.search(r"\bDataLoader\(", document.text), code_of(document)
    engine = own == {"deepspeed.initialize"} and distributed(setup)
    map_style = _MAP_STYLE.search(program)
    alone = own or not _WRAPS.search(program) or setup.world_size == 1
    wraps = not alone and map_style
    used = re.sub(r"^\s*((from|import)\b|[\w.]*rank = ).*$", "", program, flags=re.MULTILINE)
    divided = _DIVIDED.search(used) or _of_a_library(document)
    for name in (
        re.findall(r"^ *([\w.]+) = [\w.]*DistributedSampler\(", program, re.MULTILINE) if loads else ()
    ):
        if not re.search(rf"(return |[=(,\[:] ?){re.escape(name)}\b(?! =|\.set_epoch)", program):
            what = f"`{name}` is made, and no DataLoader gets it: every process trains on all rows"
            at = document.text.index(f"{name} = ")
            yield Hit((), what, f"DataLoader(..., sampler={name})", line=line_at(document.text, at))
    known, nodes = values_of(document), [one.number(name) for one in setup.documents for name in _NODES]
    several = max(filter(None, nodes), default=1 if setup.launched else 2) > 1
    for call in calls(document, "DistributedSampler") if several else ():
        given = [one.value for one in call.keywords if one.arg == "rank"]
        said = " ".join(ast.unparse(one) for node in given for one in (node, known.meant(node)))
        if "local" in said.lower() and not _GLOBAL.search(said):
            what = "local ranks are the same on each node: with several nodes, some processes train on the "
            what += "same rows, and other rows are never seen"
            yield Hit((), what, "rank=torch.distributed.get_rank()", line=call.lineno)
    prepares = calls(document, "prepare", "prepare_data_loader") if "Accelerator" in document.uses else ()
    prepared = {ast.unparse(one) for call in prepares for one in call.args}
    made = [*walk(tree_of(document), ast.Assign)]
    for load in (one.value for one in made if ast.unparse(one.targets[0]) in prepared):
        words = load.keywords if isinstance(load, ast.Call) else []
        sampler = " ".join(ast.unparse(known.meant(one.value)) for one in words if one.arg == "sampler")
        if re.match(r"[\w.]*DistributedSampler\(", sampler):
            what = "the sampler gives each process its part, and `prepare` divides that again: "
            what += "most rows are never seen"
            yield Hit((), what, "shuffle=True instead of the sampler", line=load.lineno)
    undivided = not (divided or _ROWS_BY_RANK.search(used))
    if undivided and not alone and (seed := _same_draws(document)):
        what = f"`{ast.unparse(seed)}` is the same in every process: all draw the same batches"
        yield Hit((), what, "add the rank to the seed of what draws batches", line=seed.lineno)
    if loads and (engine or wraps) and undivided:
        what = "nothing here divides the rows: every process trains on all of them"
        fix = "DataLoader(..., sampler=DistributedSampler(rows))"
        fix += ", or training_data= in deepspeed.initialize" if own else ", without shuffle=True"
        yield Hit((), what, fix, line=line_at(document.text, loads.start()))


def _same_draws(document: Document) -> ast.Call | None:
    """The seed, a number, of what draws the batches of a loop by chance."""
    known, program = values_of(document), tree_of(document)
    seeds = [one for one in calls(document, "manual_seed", "seed", "set_seed", "default_rng") if one.args]
    fixed = [one for one in seeds if isinstance(known.meant(one.args[0]), ast.Constant)]
    loops = [one for one in ast.walk(program) if isinstance(one, ast.For | ast.While)]
    draws = [call for loop in loops if ".backward(" in ast.unparse(loop) for call in within(*loop.body)]
    by = [known.meant(one.value) for call in draws for one in call.keywords if one.arg == "generator"]
    own = [one for one in fixed if one in by]
    plain = not by and len(fixed) == len(seeds) and any(_DRAWS.search(ast.unparse(one.func)) for one in draws)
    return next(iter(own or fixed * plain), None)


@loop_rule("warning", "torch/utils/data/distributed.py: DistributedSampler.__iter__: seed + epoch")
def sampler_without_set_epoch(document: Document, setup: Setup) -> Iterator[Hit]:
    """A DistributedSampler shuffles by its epoch: without `set_epoch` every epoch has the same order."""
    made = [one for one in calls(document, "DistributedSampler") if not _FIXED_ORDER.search(ast.unparse(one))]
    epochs = re.search(r"for [^\n]*epoch[^\n]* in ", document.text)
    sets = re.search(r"set_epoch|\.prepare\(|[Ll]ightning", document.text) or _of_a_library(document)
    if made and epochs and not sets and ".set_epoch(" not in setup.scripts:
        yield Hit((), fix="sampler.set_epoch(epoch) at the beginning of each epoch", line=made[0].lineno)


@loop_rule("error", "torch.cuda.set_device; transformers/trainer.py: is_model_parallel; read in 5.23")
def one_gpu_for_all(document: Document, setup: Setup) -> Iterator[Hit]:
    """All processes use the same GPU, and the others stay idle: each must take that of its own rank."""
    program, known = code_of(document), values_of(document)
    counts = (one.number(name) for one in setup.documents for name in _NODES)
    nodes = max(filter(None, counts), default=1 if setup.launched or "LOCAL_RANK" not in program else 0)
    for call in calls(document, "set_device", "device", "to", "cuda") if nodes != 1 else ():
        said = " ".join(ast.unparse(known.meant(one)) for one in ast.walk(call) if one is not call)
        if _GLOBAL.search(said) and "%" not in said and "local" not in said.lower():
            what = "the rank counts over all nodes: from the second node on, no GPU has that number"
            severity: Severity = "error" if nodes else "warning"  # where the command's nodes are not known
            yield Hit((), what, f"{_OWN} in its place", severity=severity, line=call.lineno)
            return
    several = distributed(setup) or _WRAPS.search(program) is not None
    if setup.world_size == 1 or not several or "CUDA_VISIBLE_DEVICES" in program:
        return
    if document.get("device_map") in _FIXED or "device_map={'': torch.device('cuda:0')}" in program:
        what = "every process loads the model on GPU 0, and trains on the GPU of its rank"
        yield Hit(("device_map",), what, f'{{"": {_OWN}}}; or remove it: transformers chooses the GPU')
        return
    text = document.text * (document.syntax == "python")  # `python -c` of a shell's script trains nothing
    placed, sets = _ON_CUDA.search(text), _MAKES_ACCELERATOR.search(text)
    if placed and "init_process_group(" in program and not _CHOOSES.search(program):
        what = "`cuda` is GPU 0 in every process, and no line chooses the GPU by rank"
        yield Hit((), what, f"torch.cuda.set_device({_OWN})", line=line_at(document.text, placed.start()))
        return
    if placed and sets and placed.start() < sets.start():
        what = "every process first puts it on GPU 0: Accelerator() chooses the GPU of a process, "
        what += "and is below"
        fix = "make the Accelerator first; prepare() moves the model"
        yield Hit((), what, fix, severity="warning", line=line_at(document.text, placed.start()))
        return
    place = None if _BY_RANK.search(program) else _ON_GPU_0.search(text)
    if place:
        said = place[1] + ")" * ("(" in place[1])
        what = f"`{said}` is GPU 0 in every process, and no line chooses the GPU by rank"
        fix = f"that GPU by rank, {_OWN}, and torch.cuda.set_device of it"
        yield Hit((), what, fix, line=line_at(document.text, place.start(1)))


@loop_rule("warning", "torch/serialization.py: save opens the file for writing, in whatever process")
def every_process_saves(document: Document, setup: Setup) -> Iterator[Hit]:
    """Every process writes the same file at the same time, which can break it: one process is to save."""
    program, known = tree_of(document), values_of(document)
    text = ast.unparse(program)
    alone = "DistributedDataParallel(" in text and "init_process_group(" in text
    if not alone or _SAVES_ITSELF.search(text) or _of_a_library(document) or setup.world_size == 1:
        return
    for call in calls(document, "save", "save_pretrained"):
        taken = [test for test, _ in known.flow.taken(call)]
        tests = [ast.unparse(spelled_out(test, known)) + ast.unparse(test) for test in taken]
        above = ast.unparse(around(program, call)) if around(program, call) is not program else ""
        said = " ".join([*tests, *map(ast.unparse, call.args), *_LEAVES.findall(above)])
        saves = re.search(r"^torch\.save$|(model|net|module)\.save_pretrained$", ast.unparse(call.func))
        if saves and not any(on_one(test, known) for test in taken) and not _OF_ONE.search(said):
            fix = "`if rank == 0:` around it, with the rank of torch.distributed.get_rank()"
            yield Hit((), fix=fix, line=call.lineno)
            return


@loop_rule("error", "accelerate/accelerator.py: prepare", versions="accelerate<2")
def not_prepared(document: Document, _: Setup) -> Iterator[Hit]:
    """`accelerator.prepare` divides rows, averages gradients, shards: not for what it is not given."""
    text, given = code_of(document), list[ast.expr]()
    for call in calls(document, *_PREPARES) if "Accelerator" in document.uses else ():
        given += call.args
    if not all(isinstance(one, ast.Name | ast.Attribute) for one in given) or ".backward(" not in text:
        return
    # `self.model = accelerator.prepare(model)` prepares both; an attribute may hold a method's local name
    prepared = {_last(ast.unparse(one)) for one in given}
    for targets in re.findall(r"^ *(.+) = [^=\n]*\.prepare\w*\(", text, re.MULTILINE):
        prepared |= {_last(one.strip("() ")) for one in targets.split(",")}
    if not prepared:
        return
    made = made_by(document)
    named = [(one, "model", place) for place, one in _TRAINED.findall(text)]
    named += [(one, "optimizer", one) for one in made if is_optimizer(made[one]) and f"{one}.step" in text]
    iterated = (one.iter for one in walk(tree_of(document), ast.For))
    parts = [part for loop in iterated for part in ast.walk(loop)]
    loops = " ".join(ast.unparse(one) for part in parts for one in (part, values_of(document).meant(part)))
    loaders = [one for one in made if made[one].endswith("DataLoader") and not _HELD_OUT.search(one)]
    own = _ROWS_BY_RANK.search(text) and re.search(r"\.(to|cuda)\(", loops + text)  # rows divided by hand
    if "Sampler" not in text and not own:
        named += [(one, "DataLoader", one) for one in loaders if re.search(rf"\b{one}\b", loops)]
    for name, kind, place in named:
        bound = rf"^ *(?:[^=(\n]*, )?\(?{name}(?:, [^=\n]*)? = |def .*\b{name}\b"
        line = re.search(rf"^[ \t]*{place} *=", document.text, re.MULTILINE)
        places = {document.at(line_at(text, one.start())) for one in re.finditer(bound, text, re.MULTILINE)}
        if line and _last(name) not in prepared and len(places) == 1:
            what = f"`{name}` is not prepared: {_UNPREPARED[kind]}"
            fix = f"{name} = accelerator.prepare({name})"
            severity: Severity = "error" if kind == "model" else "warning"
            yield Hit((), what, fix, severity=severity, line=line_at(document.text, line.end()))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


@loop_rule("error", "torch/distributed/fsdp: fully_shard; peft: get_peft_model adds parameters")
def optimizer_made_early(document: Document, _: Setup) -> Iterator[Hit]:
    """FSDP replaces a model's parameters, PEFT freezes and adds some: an earlier optimizer trains nothing."""
    text = code_of(document)
    for _, name, made, by, model, between, wraps in _EARLY.findall(text):
        again = re.search(rf"^ *(.*, )?({model}|{name})(, .*)? = ", between, re.MULTILINE)
        again = (
            again or ("eft" in wraps and re.search(rf"(?m)^ *{name} = ", text.rpartition(wraps)[2])) or None
        )
        if is_optimizer(by) and not again:
            lines = (one.lineno for one in calls(document, by.rpartition(".")[2]) if ast.unparse(one) == made)
            does = "gets adapters" if "eft" in wraps else "is sharded, which replaces its parameters,"
            what = f"{model} {does} below: this optimizer trains nothing"
            yield Hit((), what, "make it after that", line=next(lines))


@loop_rule("error", "torch/nn/parallel/distributed.py: forward prepares the reducer")
def goes_past_ddp(document: Document, setup: Setup) -> Iterator[Hit]:
    """DistributedDataParallel averages the gradients of its own forward only."""
    program, text = tree_of(document), code_of(document)
    loops = [one for one in ast.walk(program) if isinstance(one, ast.For | ast.While)]
    trains = [call for one in loops if ".backward(" in ast.unparse(one) for call in within(one)]
    for _, wrapper, model in _DDP.findall(text) if setup.world_size != 1 else ():
        used = re.search(rf"(?<![\w.]){re.escape(wrapper)}(?!\w|\.(?!forward)| = )", text)
        for call in [one for one in trains if ast.unparse(one.func) == model and not used][:1]:
            what = f"`{model}` is called, and not `{wrapper}`: no gradients are averaged between processes"
            yield Hit((), what, f"{wrapper}(...)", line=call.lineno)
    wrapped = [name for name, by in made_by(document).items() if by.endswith("DistributedDataParallel")]
    blocks = {one: " ".join(map(ast.unparse, one.items)) for one in walk(program, ast.With)}
    without = [one for one, text in blocks.items() if re.search("no_grad|inference_mode", text)]
    plain = {part for one in without for part in ast.walk(one)}
    called = {ast.unparse(one.func): one for one in reversed(trains) if one not in plain}
    for name in wrapped if setup.world_size != 1 else ():
        past = called.get(f"{name}.module")
        if past and not {name, f"{name}.forward"} & called.keys():
            what = f"`{name}.module` is called, and not `{name}`: no gradients are averaged between processes"
            yield Hit((), what, f"{name}(...)", line=past.lineno)
    passes = {call for call in trains if ast.unparse(call.func).endswith("backward")}
    closed = [one for one in ast.walk(program) if isinstance(one, ast.With) and _never_averages(one)]
    inside = {part for one in closed for part in ast.walk(one)}
    if closed and passes <= inside and setup.world_size != 1 and not _REDUCES.search(text):
        what = "every forward and backward pass is in `no_sync`: no gradients are averaged between processes"
        yield Hit((), what, "the last micro-batch of a step outside of it", line=closed[0].lineno)


def _never_averages(node: ast.With) -> bool:
    """Whether it is `with model.no_sync():`, and both passes are in it: DDP decides in the forward pass."""
    owners = [re.fullmatch(r"([\w.]+)\.no_sync\(\)", ast.unparse(one.context_expr)) for one in node.items]
    said = {ast.unparse(call.func) for call in within(*node.body)}
    return any(one and one[1] in said for one in owners) and any(one.endswith(".backward") for one in said)


@loop_rule("warning", "torch/distributed/fsdp: a call wraps one group, which is gathered at once")
def model_is_one_unit(document: Document, setup: Setup) -> Iterator[Hit]:
    """FSDP wraps the model, and not its blocks: the forward pass gathers all weights at once."""
    program = tree_of(document)
    wraps = [*calls(document, "fully_shard", "FullyShardedDataParallel")]
    own = len(wraps) == 1 and not _PARTS.search(re.sub(r"(?m)^\s*#.*", "", setup.scripts))
    loops = (one for one in ast.walk(program) if isinstance(one, ast.For | ast.While | ast.ListComp))
    if setup.world_size == 1 or not own or any(wraps[0] in [*within(one)] for one in loops):
        return
    model = ast.unparse(wraps[0].args[0]) if wraps[0].args else ""
    if model and re.search(_PRETRAINED.format(re.escape(model)), ast.unparse(program)):
        fix = "fully_shard of each block, before it"
        fix = "auto_wrap_policy= with the class of its blocks" if "Fully" in ast.unparse(wraps[0]) else fix
        yield Hit((), fix=fix, line=wraps[0].lineno)


def _trained(
    nodes: Sequence[ast.AST], own: dict[str, list[ast.Call]], made: dict[str, str]
) -> tuple[ast.Call | None, ast.Call | None]:
    """The backward call and the optimizer's step of statements, and of the script's functions they call."""
    found = [*within(*nodes)]
    found += [call for one in found for call in own.get(_last(ast.unparse(one.func)), ())]
    passes = (one for one in found if _last(ast.unparse(one.func)) == "backward")
    steps = (one for one in found if is_optimizer(made.get(stepped(one), "")))
    return next(passes, None), next(steps, None)


@loop_rule("error", "torch/nn/parallel/distributed.py: backward averages with all processes")
def one_process_trains_alone(document: Document, setup: Setup) -> Iterator[Hit]:
    """One process takes a step without the others, or leaves out a backward that they wait in."""
    program = tree_of(document)
    if setup.world_size == 1 or not _JOINS.search(text := ast.unparse(program)):
        return
    made, functions = made_by(document), walk(program, ast.FunctionDef)
    own = {one.name: [*within(*one.body)] for one in functions}
    for where, body, others in branches(document):
        (mine, step), (its, theirs) = _trained(body, own, made), _trained(others, own, made)
        left = body[-1] if body else ast.Pass()
        if isinstance(left, ast.Break):  # which leaves the turns that follow, too
            loop = around(program, left)
            together = any(isinstance(one, ast.Break) for part in others for one in ast.walk(part))
            its = None if together or isinstance(loop, ast.FunctionDef) else _trained([loop], own, made)[0]
        if isinstance(left, ast.Break | ast.Continue | ast.Return) and its and not mine:
            what = f"{where} lets one process leave out `{ast.unparse(its.func)}`, in which the "
            what += "others wait for it: the run hangs"
            yield Hit((), what, "the same decision in all processes: all_reduce it", line=left.lineno)
        elif step and not theirs and "broadcast" not in text:
            what = f"{where} lets one process take the step: the weights of the others stay as they are, "
            what += "and the models drift apart"
            fix = f"`{ast.unparse(step.func)}()` in all processes: the gradients are averaged"
            yield Hit((), what, fix, line=step.lineno)


@training_rule("warning", "torch.utils.data.random_split; datasets: train_test_split: numpy's own state")
def split_of_each_process(document: Document, setup: Setup) -> Iterator[Hit]:
    """Without a seed each process splits the rows by chance: what one holds out, others train on."""
    several = (setup.world_size or 0) > 1
    several |= setup.world_size is None and _WRAPS.search(code_of(document)) is not None
    known = values_of(document)
    for call in calls(document, "random_split", "train_test_split") if several else ():
        given = {one.arg: ast.unparse(one.value) for one in call.keywords}
        fixed = {"generator", "seed", "random_state", None} & given.keys() or given.get("shuffle") == "False"
        alone = any(on_one(test, known) is held for test, held in known.flow.taken(call))
        if not (fixed or alone or _SEEDS.search(setup.scripts)):
            name = "generator=torch.Generator().manual_seed(0)" if "random_" in ast.unparse(call.func) else ""
            yield Hit((), fix=name or "a fixed seed=0 (random_state=0 of sklearn)", line=call.lineno)
