"""Launch commands."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shardwise.lint.document import Document, line_at
from shardwise.lint.edit import Rename
from shardwise.lint.finding import Hit, Severity, training_rule
from shardwise.lint.rules import devices
from shardwise.lint.rules.devices import SHOWS, gpus_of, header, of_launcher
from shardwise.lint.rules.program import all_code, calls, tree_of, values_of, walk, within
from shardwise.lint.schema import as_number, closest, names, pattern, table
from shardwise.lint.setup import Setup
from shardwise.lint.shell_text import LOST_FLAGS, OPEN, UNKNOWN_FLAG

_RUNNER = "deepspeed/launcher/runner.py"
_MEETING = ("rdzv_endpoint", "rdzv_backend", "master_addr", "node_rank")
_OPEN_PARSER = re.compile("|".join(names("open_parsers")))
_OWN = {"deepspeed.add_config_arguments"}
_STARTS = re.compile(r"srun|mpirun|mpiexec|pdsh|ssh|clush|parallel|\bray\b")
_READS_FLAGS = re.compile(r"(?i)argv|pars|fire|click|hydra|typer|tyro|flags|cli\b|draccus")
_BY_OTHERS = re.compile(r"(?i)--launcher[ =]+(?!pdsh\b)\S")  # mpirun or srun start it, with variables only
_COUNTS = ("nodes", "ntasks-per-node")
_MOST_GPUS = 64  # of a node
_MODULE = pattern("started_module")
_BEFORE = "before the script's name: it is the launcher's"
_SBATCH = re.compile(r"(?m)^#SBATCH[ \t]+\S+")
_SRUN_EACH = re.compile(r"(?m)^[^#\n]*\bsrun\b(?!.* (?:-w|--nodelist|(?:-N|-n|--nodes|--ntasks)[ =]?1\b))")
_SRUN_DEEPSPEED = re.compile(
    r"(?m)^[^#\n]*\bsrun\b(?!.* (?:-w|--nodelist|(?:-n|--ntasks)[ =]?1\b))(.*?)\bdeepspeed\s"
)
_IN_EACH = re.compile(r"\b(?:ba)?sh[ \t]+-l?c\b|\.sh\b")  # a shell of its own on each node
_ONE_RANK = re.compile(r"0 |.*\$\{?SLURM_(?:NODEID|PROCID|LOCALID)\b")
_OF_RANKS, _SETS_RANKS, _OF_NODES = map(pattern, ("reads_ranks", "sets_ranks", "of_nodes"))
_SOURCES = pattern("unread_by_shell")
_DEBUGS: dict[str, list[str]] = table("left_from_debugging")
_SRUN = re.compile(r"^[ \t]*(?:\w+=\S+[ \t]+|exec[ \t]+)*srun\b(?!.*--ntasks|.* -n)", re.MULTILINE)


@training_rule("error", "bash: a command ends at its line, unless the last character is a backslash")
def lost_flags(document: Document, _: Setup) -> Iterator[Hit]:
    """A line break ends the command: the flags below it are a command of their own."""
    if document.has(LOST_FLAGS):
        what = f"the command ends in {document.get(LOST_FLAGS)} and what follows do not reach it, and the "
        what += "shell says `command not found`"
        yield Hit((LOST_FLAGS,), what, "a backslash as the last character of each line but the last")


@training_rule("error", f"{_RUNNER}: parse_args; torch/distributed/run.py; accelerate/commands/launch.py")
def unknown_launcher_flag(document: Document, _: Setup) -> Iterator[Hit]:
    """A flag before the script is the launcher's, which stops at flags that it does not have."""
    if document.has(UNKNOWN_FLAG):
        name = document.get("launcher") + " launch" * (document.get("launcher") == "accelerate")
        fix = "after the script's name if it is the script's, else remove it"
        yield Hit((UNKNOWN_FLAG,), f"`{name}` has no flag `{document.get(UNKNOWN_FLAG)}`: it stops", fix)


@training_rule("error", f"{_RUNNER}: Num nodes is >1 but no extra nodes available via hostfile; --node_rank")
def nodes_without_hostfile(document: Document, _: Setup) -> Iterator[Hit]:
    """The deepspeed launcher knows other machines from a hostfile only, and starts them all by itself."""
    if document.get("launcher") != "deepspeed":
        return
    by_srun = _SRUN_DEEPSPEED.search(text := document.text.replace("\\\n", " "))
    own = re.search(r"\s(?:--nodes[ =]|-N[ =]?)(\d+)", by_srun[1]) if by_srun else None
    nodes = own[1] if own else header(document).get("nodes", "1") if by_srun else "1"
    joined = document.has(OPEN) or re.search("(?i)hostfile|node_rank|launcher[ =]", text)
    if nodes.isdecimal() and int(nodes) > 1 and not joined:
        what = f"srun starts deepspeed on {nodes} nodes, and without a hostfile each trains on its own"
        fix = "srun torchrun --nnodes ... with one task per node; or --hostfile, and deepspeed without srun"
        yield Hit((), what, fix, line=document.line(("launcher",)))
    if (document.number("num_nodes") or 1) > 1 and not (document.has("hostfile") or document.has("H")):
        what = "--num_nodes without --hostfile: deepspeed stops, unless there is a /job/hostfile"
        yield Hit(("num_nodes",), what, "--hostfile FILE with a line `HOST slots=GPUS` for each node")
    if document.has("node_rank") and not document.has("no_ssh"):
        what = "--node_rank is ignored without --no_ssh: each command starts all nodes over ssh"
        yield Hit(("node_rank",), what, "--no_ssh and --hostfile, and the command on each node; or remove it")


@training_rule("error", "runpy: _get_module_details; run with torchrun 2.13 and Python 3.11")
def module_flag_and_file(document: Document, _: Setup) -> Iterator[Hit]:
    """The launcher imports the script as a module."""
    for found in _MODULE.finditer(document.text if document.syntax == "shell" else ""):
        what = f"`{found[1]}` requires a module's name, and {found[2]} is a file: ModuleNotFoundError"
        name = re.sub(r"\.py$", "", found[2]).strip("./").replace("/", ".")
        fix, line = f"remove {found[1]}; or {found[1]} {name}", line_at(document.text, found.start(1))
        yield Hit((), what, fix, line=line)


@training_rule("warning", f"{_RUNNER}: visible_devices, main; apply_num_nodes_and_gpus")
def visible_devices(document: Document, _: Setup) -> Iterator[Hit]:
    """The launcher ignores the variable if a flag chooses GPUs."""
    given = str(document.get(SHOWS) if document.has(SHOWS) else document.environment.get(SHOWS, ""))
    flags = [name for name in ("include", "exclude", "num_gpus") if of_launcher(document, name)]
    if document.get("launcher") != "deepspeed" or document.has("hostfile") or not given or not flags:
        return
    flag, shown = flags[0], given.strip(",") if re.fullmatch(r"\d+(,\d+)*,?", given) else ""
    count = document.number("num_gpus") if flag == "num_gpus" else None
    used = _first(len(shown.split(",")) if count is None else min(int(count), _MOST_GPUS))
    if flag == "num_gpus" and f"{shown},".startswith(f"{used},"):
        return  # the GPUs that it takes anyway
    if flag == "include" and document.get(flag) == f"localhost:{shown}":
        return
    what = f"{SHOWS}={given}: the deepspeed launcher ignores it if --{flag} is given"
    what += f", and runs on GPU{'s' * (count > 1)} {used}" if count else ""
    fix = f"--include localhost:{shown or '0,1'} in place of the variable and --{flag}"
    yield Hit((SHOWS if document.has(SHOWS) else flag,), what, fix)


def _first(count: int) -> str:
    return ",".join(map(str, range(count)))


@training_rule("error", "torch.cuda.set_device: invalid device ordinal; accelerate/commands/launch.py")
def more_processes_than_devices(document: Document, setup: Setup) -> Iterator[Hit]:
    """The node has more processes than GPUs that they see: `invalid device ordinal`."""
    found, seen = devices.processes_of_node(document, setup), devices.devices_of(document, setup)
    if not found or not seen or found[0] == seen[0]:
        return
    (each, name, holder), (count, shows) = found, seen
    flag = f"--{name} " if name.islower() else f"{name}="  # a variable
    if each < count:
        plain = name.islower() and shows.startswith(SHOWS)
        plain = plain and not re.search(r"vllm|sglang", " ".join(one.text for one in setup.documents))
        what = f"{shows} {count} GPUs to {each:g} process{'es' * (each > 1)}: the others stay idle"
        key, line = ((name,), None) if holder is document else ((), document.line(("config_file",)))
        fix = f"{flag}{count}, or fewer GPUs in {SHOWS}"
        yield from [Hit(key, what, fix, severity="warning", line=line)] if plain and each > 1 else []
        return
    if document.get("launcher") == "torchrun" and not shows.startswith(SHOWS):
        return  # `slurm_and_launcher` says it
    key, all_ = (name,) if holder is document else (), holder.number(name) or each
    where = "" if key else f"{Path(holder.name).name} has {name} {all_:g}: "
    what = f"{where}{shows} {count} GPUs to {each:g} processes: the others stop with `invalid device ordinal`"
    fix = f"{flag}{count * all_ / each:g}" + f", or the same in {Path(holder.name).name}" * bool(where)
    place = name if document.has(name) else "launcher" if key else "config_file"
    yield Hit(key, what, fix, line=document.line((place,)))


@training_rule("error", "argparse: `unrecognized arguments`, `the following arguments are required`")
def flags_of_the_script(document: Document, setup: Setup) -> Iterator[Hit]:
    """The script's parser stops at flags that it does not have, and without those that it requires."""
    file = Path(str(document.get("script"))).name
    script = next((one for one in setup.of("training") if Path(one.name).name == file), None)
    known = _flags(script) if script and document.syntax == "shell" else {}
    missing = {one for one in known if known[one]}
    before = set(table("only_launchers").get(document.get("launcher"), "").split()) & document.flags
    text = script.text.replace("-", "_") if script and document.syntax == "shell" and not known else ""
    for name in sorted(one for one in before if text and one not in text):
        what = f"`--{name}` after {file} is not the launcher's, and {file} does not have it"
        yield Hit((name,), what, _BEFORE, severity="warning" if _READS_FLAGS.search(text) else None)
    for name in sorted(document.flags) if known else ():
        written = _written(document, name)
        meant = {flag for flag in known if flag.startswith(tuple(written))}  # argparse takes a beginning
        missing -= meant
        if written and not meant:
            begun = [flag for flag in known if "_" in flag and written[0].startswith(flag)]
            near = max(begun, key=len, default=None) or closest(written[0], known)  # `lora_r` of `lora_rank`
            what = f"{file} has no flag `--{written[0]}`: it stops with `unrecognized arguments`"
            other = _BEFORE if name in before else "remove it, or add it to the parser"
            fix = f"did you mean `--{near}`?" if near and name not in before else other
            sure = name not in before and near and near == closest(written[0], known, least=0.85)
            changes = (Rename((written[0],), str(near), document.line((name,))),) if sure else ()
            yield Hit((name,), what, fix, changes)
    absent = [f"--{name}" for name in sorted(missing)] if not document.has(OPEN) else []
    absent += _places_without_a_word(document, script) if known and script else []
    if absent:
        what = f"{file} requires {', '.join(f'`{one}`' for one in absent)}, which the command does not give: "
        fix = f"{' '.join(f'{one} VALUE' if one[0] == '-' else one.upper() for one in absent)} after {file}"
        yield Hit((), what + "it stops", fix, line=document.line(("script",)))
    passes = document.get("launcher") == "deepspeed" and not document.has("no_local_rank")
    passes = passes and not _BY_OTHERS.search(document.text)
    if known and passes and not {"local_rank", "local-rank"} & known.keys():
        what = f"the deepspeed launcher passes `--local_rank`, which {file} does not take: it stops"
        fix = 'parser.add_argument("--local_rank", type=int), or --no_local_rank before the script'
        yield Hit((), what, fix, line=document.line(("script",)))


def _places_without_a_word(document: Document, script: Document) -> list[str]:
    """The positional arguments of a parser for which the command has no words, after those of its flags."""
    places, switches = list[str](), set[str]()
    for call in calls(script, "add_argument"):
        given = {one.arg: ast.unparse(one.value) for one in call.keywords}
        own = [str(getattr(one, "value", "-")) for one in call.args]
        switches |= {one.strip("-").replace("-", "_") for one in own} if "action" in given else set()
        places += own if own and own[0][:1] != "-" and given.get("nargs") not in ("'?'", "'*'") else []
    rows = "\n".join(document.text.split("\n")[document.line(("launcher",)) - 1 :]).replace("\\\n", " ")
    rest = rows.partition("\n")[0].partition(str(document.get("script")))[2]
    if "$" in rest or re.search("[`(|;&>]", rest) or "parse_args()" not in script.text:
        return []
    words = [one for one in rest.split() if one[0] != "-"]
    taken = {one for one in document.flags - switches if document.get(one) is not True}
    taken -= {one for one in taken if re.search(rf"-{one.replace('_', '[-_]')}=", rest)}
    return places[max(0, len(words) - len(taken)) :]


def _written(document: Document, name: str) -> list[str]:
    """A flag as the command has it; both spellings where its line does not show it, none of a short one."""
    row = document.text.split("\n")[document.line((name,)) - 1]
    found = re.search(rf"(?<![\w-])(--?)({name.replace('_', '[-_]')})(?![\w-])", row)
    if len(name) == 1 or (found and found[1] == "-"):
        return []
    return [found[2]] if found else [name, name.replace("_", "-")]


def _flags(script: Document) -> dict[str, bool]:
    """The flags of a script's parser, and whether each is required; empty if the text does not show all."""
    added, parsers = [*calls(script, "add_argument")], [*calls(script, "ArgumentParser", "HfArgumentParser")]
    classes = {one.name: one for one in walk(tree_of(script), ast.ClassDef)}
    known = {one.name for one in walk(tree_of(script), ast.FunctionDef)} | _OWN
    holders = {ast.unparse(call.func).removesuffix(".add_argument") for call in added}
    more = ("deepspeed", "deepspeed_config") if "add_config_arguments(" in script.text else ()
    flags = dict.fromkeys(("help", *more), False)
    for call in within(tree_of(script)):
        given = {*map(ast.unparse, (*call.args, *(one.value for one in call.keywords)))}
        if holders & given and ast.unparse(call.func) not in known:
            return {}  # another module adds flags
    for call in added:
        own = [one.value if isinstance(one, ast.Constant) else None for one in call.args]
        long = [str(one)[2:] for one in own if str(one).startswith("--")]
        flags |= dict.fromkeys(long, "required=True" in ast.unparse(call) and len(own) == 1)
        flags |= {f"no-{name}": False for name in long}  # of BooleanOptionalAction
        if None in own:
            return {}
    if len(parsers) != 1 or _OPEN_PARSER.search(script.text) or "parse_args" not in script.text:
        return {}
    given_ = parsers[0].args[0] if len(parsers[0].args) == 1 else parsers[0]
    waiting = [*getattr(given_, "elts", [given_])] if "Hf" in ast.unparse(parsers[0].func) else []
    for one in waiting:
        name = ast.unparse(one).rpartition(".")[2]
        if isinstance(one, ast.Name) and name in classes:
            flags |= _fields(made := classes.pop(name))
            waiting += made.bases
        elif name in ("TrainingArguments", "Seq2SeqTrainingArguments"):
            removed = (one.partition("=")[0] for one in names("removed_from_TrainingArguments"))
            flags |= dict.fromkeys([*names("trainer_arguments"), *removed], False) | flags
        else:
            return {}
    return {name.replace("_", "-"): False for name in flags if waiting} | flags


def _fields(made: ast.ClassDef) -> dict[str, bool]:
    """The flags that HfArgumentParser makes of a dataclass."""
    flags = dict[str, bool]()
    for row in made.body:
        if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name):
            given = row.value.keywords if isinstance(row.value, ast.Call) else []
            default = row.value and (not given or any("default" in str(k.arg) for k in given))
            flags |= {row.target.id: not default, f"no_{row.target.id}": False}
    return flags


@training_rule("error", "https://slurm.schedmd.com/sbatch.html; torch/distributed/run.py")
def slurm_and_launcher(document: Document, setup: Setup) -> Iterator[Hit]:
    """The nodes, tasks and GPUs that the job asks for are not those of the launch command."""
    asked = header(document)
    first = re.search(r"(?m)^(?!#|\s*$)", document.text)
    late = _SBATCH.search(document.text, first.start()) if asked and first else None
    if late and "<<" not in document.text:  # which writes another file
        what = f"sbatch reads no `#SBATCH` below the first command: `{late[0]}` has no effect"
        line = line_at(document.text, late.start())
        yield Hit((), what, "above the first command", severity="warning", line=line)
    yield from _same_rank(document, asked)
    yield from _ranks_of_nobody(document, setup, asked)
    if document.get("launcher") != "torchrun" or not asked:
        return
    nodes, tasks = (int(n) if (n := asked.get(name, "")).isdecimal() else None for name in _COUNTS)
    (gpus, _kind), each = gpus_of(asked), document.number("nproc_per_node")
    srun, launched = _SRUN.search(document.text), document.number("nnodes")
    if launched and nodes and launched != nodes:
        what = f"the job has {nodes} nodes, and torchrun waits for {launched:g}"
        yield Hit(("nnodes",), what, f"--nnodes {nodes}, or #SBATCH --nodes={launched:g}")
    elif (nodes or 1) > 1 and srun and not document.has("nnodes"):
        what = f"without --nnodes each of the {nodes} nodes trains on its own"
        yield Hit(("launcher",), what, f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint HEAD:29500")
    elif (nodes or 1) > 1 and launched == nodes and not _STARTS.search(document.text):
        what = f"the job's script runs on the first of {nodes} nodes only: torchrun waits for the others"
        yield Hit(("nnodes",), what, "srun torchrun, with one task per node")
    if gpus and each and gpus != each:
        effect = "the last stop with `invalid device ordinal`" if each > gpus else "the other GPUs stay idle"
        severity: Severity = "error" if each > gpus else "warning"
        what = f"torchrun starts {each:g} processes on a node with {gpus} GPUs: {effect}"
        yield Hit(("nproc_per_node",), what, f"--nproc_per_node {gpus}", severity=severity)
    if srun and (tasks or 1) > 1 and document.has("nproc_per_node"):
        what = f"srun starts torchrun {tasks} times on each node, and each starts all processes of the node"
        yield Hit(("nproc_per_node",), what, "#SBATCH --ntasks-per-node=1")


def _ranks_of_nobody(document: Document, setup: Setup, asked: dict[str, str]) -> Iterator[Hit]:
    """Variables that torchrun sets, which a script reads where srun starts it."""
    several = {asked.get("ntasks", "1"), asked.get("ntasks-per-node", "1"), asked.get("nodes", "1")} - {"1"}
    by_srun = re.search(r"(?m)^[^#\n]*\bsrun\b", document.text) and not _SOURCES.search(document.text)
    if document.get("launcher") not in ("python", "python3") or not (several and by_srun):
        return
    program = all_code(setup)
    texts = program + "\n".join(one.text for one in setup.of("training", "shell"))
    absent = [one for one in dict.fromkeys(_OF_RANKS.findall(program)) if not re.search(rf"\b{one}=", texts)]
    if absent and not _SETS_RANKS.search(program):
        what = f"srun sets no `{'`, `'.join(absent)}`, which the script reads: KeyError"
        fix = "srun torchrun, with one task per node; or export them from SLURM_PROCID, SLURM_LOCALID, "
        fix += "SLURM_NTASKS and the first node in each task"
        yield Hit((), what, fix, line=document.line(("launcher",)))


@training_rule("warning", "each node runs its own command; the processes average what they compute")
def nodes_train_otherwise(document: Document, setup: Setup) -> Iterator[Hit]:
    """The commands of two nodes of one training differ in more than the node."""
    rank, shells = _node_of(document), setup.of("training", "shell")
    first = next((one for one in shells if _node_of(one) == 0), None)
    if not rank or first is None:
        return
    for name in sorted(first.flags & document.flags):
        values = [Path(str(one.get(name))).name for one in (first, document)]  # folders may differ
        if values[0] != values[1] and not _OF_NODES.search(name) and "$" not in "".join(values):
            what = f"node 0 has {values[0]} in {Path(first.name).name}, and this node has {values[1]}"
            yield Hit((name,), what, "the same on each node")


def _node_of(document: Document) -> float | None:
    """The number of the node that a command is for; None if only the shell knows."""
    own = [document.get(one) for one in ("node_rank", "machine_rank", "NODE_RANK")]
    own += [document.environment.get("NODE_RANK")]
    return next((as_number(one) for one in own if one is not None), None)


@training_rule("warning", "https://docs.pytorch.org/docs/stable/notes/cuda.html: CUDA_LAUNCH_BLOCKING")
def left_from_debugging(document: Document, _: Setup) -> Iterator[Hit]:
    """A switch for debugging is on: the GPU waits, at every operation."""
    known = values_of(document)
    nodes = [one for one in ast.walk(tree_of(document)) if isinstance(one, ast.Assign | ast.Call)]
    texts = {ast.unparse(one): one.lineno for one in nodes if known.runs(one) and known.flow.certain(one)}
    for name, (on, effect) in _DEBUGS.items():
        sign = rf"([\w.]+\[')?([\w.]+\.)?{name}(\(|'\] = ')({on})['\)]"
        lines = [line for text, line in texts.items() if re.match(sign, text)]
        row = rf"(?m)^(?![ \t]*#)(.*\bexport\b)?.*?\b{name}=['\"]?(?:{on})\b['\"]?(?=(.*))"
        for found in re.finditer(row, document.text if document.syntax == "shell" else ""):
            given = found[1] or re.match(r"[ \t]+[^\s#;&|]", found[2])  # else only the shell has it
            lines += [line_at(document.text, found.start())] if given else []
        for line in lines[:1]:
            yield Hit((), f"`{name}` is on: {effect}", "remove it, after the search", line=line)


def _same_rank(document: Document, asked: dict[str, str]) -> Iterator[Hit]:
    """A rank of the node that is the same on all nodes, since the batch script's shell fills it in."""
    name = next((one for one in ("node_rank", "machine_rank") if of_launcher(document, one)), "")
    rank, text = str(document.get(name)), document.text.replace("\\\n", " ")
    several = asked.get("nodes", "1") != "1" and document.get("rdzv_backend") in (None, "static")
    each = _SRUN_EACH.search(text) and not _IN_EACH.search(text)
    if name and several and each and _ONE_RANK.match(f"{rank} "):
        early = "" if rank == "0" else "the shell fills it in before srun starts: it "
        what = f"`--{name} {rank}`: {early}is 0 on every node, and the nodes wait for each other"
        yield Hit((name,), what, f"srun bash -c 'COMMAND --{name} $SLURM_NODEID', in single quotes")
    total = document.number("num_processes") if document.get("launcher") == "accelerate" else None
    machines, (gpus, _kind) = document.number("num_machines") or 1, gpus_of(asked)
    if total and gpus and machines > 1 and total == gpus:
        what = f"{total:g} processes over {machines:g} machines: "
        what += f"{total / machines:g} of the {gpus} GPUs of each"
        fix = f"--num_processes {gpus * machines:g}: it counts all machines' GPUs"
        yield Hit(("num_processes",), what, fix)


@training_rule("error", "torch/distributed/elastic/rendezvous: the endpoint's host holds the store")
def nodes_meet_at_localhost(document: Document, _: Setup) -> Iterator[Hit]:
    """Each node takes `localhost` for itself: the nodes of a launch never meet."""
    nodes = document.number("nnodes") or document.number("num_machines") or 1
    for name in ("rdzv_endpoint", "master_addr", "main_process_ip") if document.syntax == "shell" else ():
        host = str(document.get(name)).partition(":")[0]
        if nodes > 1 and host in ("localhost", "127.0.0.1") and f":-{host}" not in document.text:
            what = f"`{host}` is another machine on each of the {nodes:g} nodes: they wait for each other"
            yield Hit((name,), what, "the name of the first node")
    met = document.has(OPEN) or "PET_" in document.text  # torchrun's own variables
    met |= any(of_launcher(document, one) for one in _MEETING)
    placed = {"node_rank", "rdzv_backend", "rdzv_endpoint"} & document.values.keys() - document.flags
    open_ = str(document.get("nnodes"))[:1] == "$" and of_launcher(document, "master_addr")
    unread = document.has(OPEN) or "PET_" in document.text
    if document.get("launcher") == "torchrun" and open_ and not placed and not unread:
        what = "without --node_rank each node is the first: with several of them, they wait for each other"
        yield Hit(("nnodes",), what, "--node_rank $RANK_OF_THE_NODE", severity="warning")
    if document.get("launcher") == "torchrun" and nodes > 1 and not met:
        what = f"without an address and --node_rank each of {nodes:g} nodes waits as if it were the first"
        fix = "--rdzv_backend c10d --rdzv_endpoint FIRST_NODE:29500"
        yield Hit(("nnodes",), what, fix, severity="warning")
