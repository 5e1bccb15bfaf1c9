"""Accumulation in a loop of one's own: how large the gradients are, and when the schedule advances."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.lint.document import Document
from shardwise.lint.finding import Hit, loop_rule, training_rule
from shardwise.lint.rules.branches import spelled_out
from shardwise.lint.rules.loop import around, made_by, stepped
from shardwise.lint.rules.program import calls, code_of, is_optimizer, tree_of, values_of, walk, within
from shardwise.lint.rules.schedules import ends_early, followed, never_ends, prepares
from shardwise.lint.schema import names, pattern
from shardwise.lint.script_values import Values
from shardwise.lint.setup import Setup

_OTHERS = re.compile(r"Accelerator\(|deepspeed\.initialize|[Ll]ightning|Fabric\(")  # these divide themselves
_NORMALISED = re.compile("|".join(names("normalises_a_loss")))  # by hand, in whatever way
_GATHERED = re.compile(r"\.(append|extend)\(|\b(cat|stack)\(")  # rows or losses of several turns
_STEPS = re.compile(r"\.backward\(|\.step\(|zero_grad|\byield\b|DataLoader\(")  # what a loop may do elsewhere
_GENERATORS = re.compile(r"(?m)^ *([\w.]+) = (?:filter\(.*, )?[\w.]+\.parameters\(\)\)?$")
_LISTED = "clip_grad_norm_(model.parameters(), ...), or list(...) where {} is made"
_FIXED = re.compile(r"(?i)\bema_|_ema\b|teacher|\bref_")  # weights that no optimizer changes
_LOGS = re.compile(r"\+= .*\b(detach|item)\(\)")  # of a sum that is shown, and has no gradients
_OF_MICRO = re.compile(r"(?i)\A.*(micro|accum)|\bnext\(|batch\(")
_ADAPTS, _KEEPS = map(pattern, ("has_moments", "keeps_moments"))
_ACCUMULATES = pattern("accumulates")  # an Accelerator
_STATE = re.compile(r"(?i)(opt\w*|sched\w*|scaler)\.state_dict\(\)$")
_MAKES = r"(?m)^[^=\n]*\b{}\b[^=\n]* = [\w.]*(DataLoader|initialize|prepare\w*|setup\w*|skip_first_batches)\("


class _Run(NamedTuple):
    """A call that a loop runs, and the conditions above it."""

    call: ast.Call
    tests: tuple[ast.expr, ...]


class _Loop(NamedTuple):
    """An innermost loop that trains: `backward`, the optimizer's step, and what the latter waits for."""

    runs: list[_Run]
    text: str  # of the loop, without what it logs of the loss later
    backward: ast.Call
    every: ast.expr | None  # `8` of `if i % 8 == 0: optimizer.step()`, and of `for micro in range(8)`
    micro: set[ast.AST]  # what stands in the latter: a loop without the step


def _runs(body: Sequence[ast.stmt], known: Values) -> Iterator[_Run]:
    """The calls of statements, in their order; not those of handlers, which run in place of others."""
    tests: tuple[ast.expr, ...] = ()
    for one in body:
        blocks = [getattr(one, name, []) for name in ("body", "orelse", "finalbody")]
        inner = [part for block in blocks for part in block]
        below = {node for part in (*inner, *getattr(one, "handlers", [])) for node in ast.walk(part)}
        for call in (node for node in ast.walk(one) if isinstance(node, ast.Call) and node not in below):
            yield _Run(call, tests)
        own = (spelled_out(one.test, known),) if isinstance(one, ast.If) else ()
        other = tuple(ast.UnaryOp(ast.Not(), test) for test in own)
        for at, part in enumerate(inner):
            taken = own if at < len(blocks[0]) else other
            for run in _runs([part], known):
                yield run._replace(tests=(*tests, *taken, *run.tests))
        left = isinstance(one, ast.If) and isinstance(one.body[-1], ast.Continue | ast.Return)
        tests += other if left else ()


def _loops(document: Document) -> Iterator[_Loop]:
    """The innermost loops with a backward pass and an optimizer's step."""
    program, made, known = tree_of(document), made_by(document), values_of(document)
    found = list[tuple[set[ast.Call], _Loop]]()
    for loop in (one for one in ast.walk(program) if isinstance(one, ast.For | ast.While)):
        runs = [*_runs(loop.body, known)]
        steps = [run for run in runs if _of_optimizer(stepped(run.call), made)]
        backward = next((one.call for one in runs if ast.unparse(one.call.func).endswith(".backward")), None)
        if steps and backward:
            before = {run.call: run.tests for run in runs}[backward]
            waits = (test for test in steps[0].tests if test not in before)
            every = next((mod for test in waits for mod in _moduli(test)), None)
            inner = _micro(loop, backward, [run.call for run in steps])
            if inner and not every:
                every = _count(inner, known)
            before_it, _, later = ast.unparse(loop).partition(".backward(")
            before_it = ast.unparse(inner).partition(".backward(")[0] if inner else before_it
            rows = [*before_it.splitlines(), *re.findall(r".*(?:grad|scale|backward\().*", later)]
            text = "\n".join(row for row in rows if not _LOGS.search(row))
            micro = {*ast.walk(inner)} if inner else set[ast.AST]()
            found.append(({run.call for run in runs}, _Loop(runs, text, backward, every, micro)))
    for inside, one in found:
        if not any(other < inside for other, _ in found):
            yield one


def _micro(loop: ast.For | ast.While, backward: ast.AST, steps: Sequence[ast.AST]) -> ast.For | None:
    """The loop of the micro-batches of one step: in `loop`, with `backward`, and without the step."""
    held = {one: {*ast.walk(one)} for one in walk(loop, ast.For) if one is not loop}
    return next((one for one in held if backward in held[one] and not held[one] & {*steps}), None)


def _count(micro: ast.For, known: Values) -> ast.expr | None:
    """`8` of `range(8)`; None for 1, and where the loop goes over something else than micro-batches."""
    match micro.iter:
        case ast.Call(func=ast.Name(id="range"), args=[count] | [ast.Constant(value=0), count]):
            return count if _OF_MICRO.search(ast.unparse(micro)) and known.value(count) != 1 else None
    return None


def not_followed(document: Document) -> Iterator[tuple[int, list[str]]]:
    """The innermost loops of which parts are not known: the line, and what does not show them."""
    program, made, known = tree_of(document), made_by(document), values_of(document)
    functions = walk(program, ast.FunctionDef)
    kept = {one.name: text for one in functions if _STEPS.search(text := ast.unparse(one))}
    for loop in (one for one in ast.walk(program) if isinstance(one, ast.For | ast.While)):
        runs = [run.call for run in _runs(loop.body, known)]
        within_it = any(isinstance(one, ast.For | ast.While) for part in loop.body for one in ast.walk(part))
        said = [ast.unparse(one.func).rpartition(".")[2] for one in runs]
        if within_it or not any(one == "backward" or ".backward(" in kept.get(one, "") for one in said):
            continue
        rows = known.meant(loop.iter) if isinstance(loop, ast.For) else ast.Constant(None)
        loaders = [ast.unparse(one) for one in ast.walk(rows) if isinstance(one, ast.Name | ast.Attribute)]
        steps = [one for one in map(stepped, runs) if "optim" in one.lower()]
        steps = [one for one in steps if not is_optimizer(made.get(one, ""))]
        loads = [one for one in loaders if "load" in one.lower() and "DataLoader(" not in ast.unparse(rows)]
        text, signs = document.text, {one: _MAKES.format(re.escape(one)) for one in (*steps, *loads)}
        unknown = (one for one, sign in signs.items() if not re.search(sign, text))
        open_ = [f"{one}()" for one in (*said, *loaders) if one in kept]
        over = ast.unparse(loop.iter) if isinstance(loop, ast.For) else "range("
        if _OF_MICRO.match(ast.unparse(loop)) and "range(" not in over and "step" not in said:
            open_.append(f"the number of micro-batches in {over}")
        open_ += [f"{made[one]}()" if one in made else one for one in unknown]
        if open_:
            yield loop.lineno, [*dict.fromkeys(open_)]


def _of_optimizer(name: str, made: dict[str, str]) -> bool:
    return bool(name) and (is_optimizer(made.get(name, "")) or "optim" in name.lower())


def _moduli(test: ast.AST) -> Iterator[ast.expr]:
    mods = (one for one in ast.walk(test) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod))
    return (one.right for one in mods)


@loop_rule("warning", "autograd adds to .grad; torch/nn/utils/clip_grad.py")
def loss_not_divided(document: Document, setup: Setup) -> Iterator[Hit]:
    """The gradients of accumulated micro-batches add up: the loss is to be divided by their number."""
    text = code_of(document)  # an Accelerator divides by a number that it gets
    if not _ACCUMULATES.search(text) and not (setup.of("deepspeed") or setup.of("accelerate")):
        text = text.replace("Accelerator(", "(")
    for loop in _loops(document) if not _OTHERS.search(text) else ():
        if loop.every is not None and not _NORMALISED.search(loop.text):
            count = ast.unparse(loop.every).removeprefix("self.")
            what = f"the gradients of {count} micro-batches add up: {count} times as large, "
            what += "and cut by clipping"
            yield Hit((), what, f"loss = loss / {count} before backward", line=loop.backward.lineno)


@loop_rule("error", "torch/optim/optimizer.py: zero_grad sets .grad to None")
def gradients_are_cleared(document: Document, _: Setup) -> Iterator[Hit]:
    """`zero_grad` comes before the step that is to use the gradients, or backward leaves batches out."""
    made = made_by(document)
    for loop in _loops(document) if not _OTHERS.search(document.text) else ():
        if lost := _left_out(loop):
            what = f"backward runs only where `{ast.unparse(lost)}`: the other micro-batches are thrown away"
            fix, line = "backward of each micro-batch, before that condition", loop.backward.lineno
            yield Hit((), what, fix, line=line, source="autograd: backward alone adds to .grad")
            continue
        for at, run in enumerate(loop.runs):
            name, since = stepped(run.call), loop.runs[:at]
            clears = [one for one in loop.runs if _clears(one.call, name)]
            if not _of_optimizer(name, made) or not clears:
                continue
            computed = [one for one in since if ast.unparse(one.call.func).endswith(".backward")]
            last = next((one for one in reversed(since) if one in clears or one in computed), run)
            always = {*computed[-1].tests} if computed else {*run.tests}
            often = [one for one in clears if {*one.tests} <= always]
            often = [one for one in often if one.call in loop.micro] if loop.micro else often
            if computed and last in clears and {*last.tests} <= {*run.tests}:
                what = f"`{ast.unparse(last.call)}` is between backward and `{ast.unparse(run.call)}`"
                what += ": the step has no gradients"
                yield Hit((), what, "zero_grad after the step", line=last.call.lineno)
            elif often and loop.every is not None and (loop.micro or {*run.tests} - always):
                count = ast.unparse(loop.every).removeprefix("self.")
                what = f"it clears the gradients at every micro-batch: the step uses the last of {count}"
                place = "before the loop of micro-batches" if loop.micro else "after the step, in its branch"
                yield Hit((), what, f"zero_grad {place}", line=often[0].call.lineno)


@loop_rule("error", "torch/nn/utils/clip_grad.py changes .grad, which the step has read")
def clips_after_the_step(document: Document, _: Setup) -> Iterator[Hit]:
    """Gradients are clipped after the step that used them: nothing is clipped."""
    made = made_by(document)
    for loop in _loops(document):
        kinds = [(ast.unparse(run.call.func).rpartition(".")[2], run.call) for run in loop.runs]
        clips = [at for at, (last, _) in enumerate(kinds) if last.startswith("clip_grad_")]
        steps = [at for at, (_, call) in enumerate(kinds) if _of_optimizer(stepped(call), made)]
        passes = [at for at, (last, _) in enumerate(kinds) if last == "backward"]
        if len(passes) == len(steps) == 1 and clips and passes[0] < steps[0] < clips[0]:
            fix = f"clip between backward and `{ast.unparse(kinds[steps[0]][1])}`"
            yield Hit((), fix=fix, line=kinds[clips[0]][1].lineno)


def _left_out(loop: _Loop) -> ast.expr | None:
    """The condition of an accumulation's step that its backward waits for, and the forward pass does not."""
    passes = [run for run in loop.runs if ast.unparse(run.call.func).endswith(".backward")]
    tests = [{ast.unparse(test): test for test in run.tests} for run in passes]
    shared = [test for said, test in tests[0].items() if all(said in one for one in tests)]
    apart = next((test for test in shared if any(_moduli(test))), None)
    counts = [re.escape(ast.unparse(one)) for one in _moduli(apart)] if apart else []
    # By the number of micro-batches, which says that they belong to one step
    divided = any(re.search(rf"loss\w* (/=|= .*/) {one}(?![\w.])", loop.text) for one in counts)
    loss = re.search(r"\w*loss\w*", ast.unparse(passes[0].call))
    if apart is None or not divided or not loss or _GATHERED.search(loop.text):
        return None
    made = re.findall(rf"(?m)^ *(?:\w+, )*{loss[0]}(?:, \w+)* = .*\(.*|^ *{loss[0]} \+= .*", loop.text)
    early = [run for run in loop.runs if ast.unparse(apart) not in {*map(ast.unparse, run.tests)}]
    before = any(ast.unparse(run.call) in row for run in early for row in made)
    return apart if before and not any(" + " in row or "+=" in row for row in made) else None


def _clears(call: ast.Call, optimizer: str) -> bool:
    owner, _, last = ast.unparse(call.func).rpartition(".")
    return last == "zero_grad" and (owner == optimizer or "model" in owner)


@loop_rule("error", "torch/optim/lr_scheduler.py: step")
def schedule_counts_otherwise(document: Document, setup: Setup) -> Iterator[Hit]:
    """The schedule counts the optimizer's steps, and advances at each micro-batch, or the other way round."""
    assigned = walk(tree_of(document), ast.Assign)
    given = {ast.unparse(one.targets[0]): one.value for one in assigned if not prepares(one.value)}
    for loop in _loops(document) if not _OTHERS.search(document.text) else ():
        for run in loop.runs:
            name = stepped(run.call)
            often = not any([*_moduli(test)] for test in run.tests)
            often = run.call in loop.micro if loop.micro else often
            made = given.get(name) if "sched" in name.lower() else None
            open_ = often and any(isinstance(test, ast.Name | ast.Attribute) for test in run.tests)
            if not isinstance(made, ast.Call) or loop.every is None or open_:
                continue
            count = ast.unparse(loop.every).removeprefix("self.")
            texts = " ".join(followed(made, given))
            of_steps = re.search(rf"//? *\(?([\w.]*{re.escape(count)}|[\w.]*accum)", texts)
            if often and of_steps:
                what = f"the schedule counts steps, and advances at micro-batches: it ends after 1/{count}"
                yield Hit((), what, f"`{name}.step()` next to the optimizer's", line=run.call.lineno)
            elif often and "len(" not in texts and not re.search(r"(?i)micro|iter|batch", texts):
                what = f"the schedule advances at each micro-batch, {count} times a step of the optimizer"
                yield Hit((), what, f"`{name}.step()` next to it", severity="warning", line=run.call.lineno)
            of_batches = re.search(r"\blen\([\w.]*load", texts) and not re.search("/|accum|_steps", texts)
            if not often and of_batches:
                what = f"the schedule counts micro-batches, and advances at steps: 1/{count} of it is used"
                yield Hit((), what, f"its number of steps / {count}", severity="warning", line=made.lineno)

    yield from ends_early(document, given) if setup.world_size != 1 else ()
    yield from never_ends(document, given)
    for call in calls(document, "step"):
        place, name = around(tree_of(document), call), stepped(call)
        made = given.get(name) if "sched" in name.lower() else None
        inner = [*walk(place, ast.For)]
        inner = [one for one in inner if ".backward(" in ast.unparse(one)]
        loads = {one.id for loop in inner for one in ast.walk(loop.iter) if isinstance(one, ast.Name)}
        texts = " ".join(followed(made, given)) if isinstance(made, ast.Call) else ""
        if place not in inner[-1:] and any(re.search(rf"(?<!/ )\blen\({one}\)", texts) for one in loads):
            what = "the schedule counts batches, and advances once an epoch: most of it is never reached"
            fix = f"`{name}.step()` after each step of the optimizer, or a schedule of epochs"
            yield Hit((), what, fix, line=call.lineno)


@loop_rule("warning", "torch/nn/modules/module.py: eval turns dropout off until train()")
def eval_mode_stays(document: Document, _: Setup) -> Iterator[Hit]:
    """A loop that trains also calls `eval()`, and nothing in it calls `train()`: dropout stays off."""
    known = values_of(document)
    loops = [one for one in ast.walk(tree_of(document)) if isinstance(one, ast.For | ast.While)]
    ran = {loop: [run.call for run in _runs(loop.body, known)] for loop in loops}
    called = {loop: {ast.unparse(one.func).rpartition(".")[2]: one for one in ran[loop]} for loop in loops}
    for loop, last in called.items():
        plain = "eval" in last and not last["eval"].args
        model = ast.unparse(last["eval"].func).removesuffix(".eval") if plain else "ema_model"
        if {"backward", "step"} <= last.keys() and "train" not in last and not _FIXED.search(model):
            around_it = any("train" in called[one] and loop in ast.walk(one) for one in loops)
            how_long = "the rest of the epoch" if around_it else "the next epochs"
            what = f"eval mode stays on for {how_long}: nothing in this loop calls `train()`"
            place = "after the evaluation" if around_it else "at the beginning of each epoch"
            at = last["eval"] if around_it else loop
            yield Hit((), what, f"{model}.train() {place}", line=at.lineno)
            return


@loop_rule("warning", "https://docs.pytorch.org/docs/stable/notes/faq.html: history across the loop")
def sum_keeps_the_graph(document: Document, _: Setup) -> Iterator[Hit]:
    """A sum of losses keeps the graph of each step: memory grows with every step."""
    for loop in _loops(document):
        given = ast.unparse(loop.backward.args[0] if loop.backward.args else loop.backward.func)
        scaled = re.sub(r"^\w*scaler\.scale\((.*)\)\.|\.backward$", r"\1", given)
        loss = re.escape(scaled.removesuffix("backward"))
        place = around(tree_of(document), loop.backward)
        for one in walk(place, ast.AugAssign):
            total, text = ast.unparse(one.target), ast.unparse(place)
            frees = rf"(?m)^ *({loss} = .*(item|float|detach|data)|{total} = )|no_grad|{total}\.backward"
            if re.match(rf"\S+ \+= {loss}( [*/] .*)?$", ast.unparse(one)) and not re.search(frees, text):
                what = f"`{total}` keeps the graph of every step: the memory grows until the loop ends"
                yield Hit((), what, f"{total} += loss.item()", line=one.lineno)


@loop_rule("warning", "torch/optim/adamw.py: the moments are the optimizer's state")
def saved_state_is_not_loaded(document: Document, _: Setup) -> Iterator[Hit]:
    """A training that goes on without the optimizer's state begins with other steps than it would take."""
    others = re.sub(r"torch\.save\(.*", "", text := ast.unparse(tree_of(document)))
    resumes = re.search(r"\.load_state_dict\(", others) and ".backward(" in others
    for call in calls(document, "save") if resumes else ():
        held = values_of(document).meant(call.args[0]) if call.args else call
        pairs = zip(held.keys, held.values, strict=True) if isinstance(held, ast.Dict) else ()
        saved = {ast.unparse(key): ast.unparse(value) for key, value in pairs if key}
        name = re.escape(ast.unparse(call.args[0])) if call.args else "="
        saved |= dict(re.findall(rf"(?m)^ *{name}\[('\w+')\] = (.*)$", others))
        read = {key for key in saved if re.search(rf"\[{key}\](?! = )|get\({key}", others)}
        lost = [key for key, value in saved.items() if _STATE.search(value) and key not in read]
        goes_on = re.search("(?i)epoch|step|iter", said := " ".join(read))
        if read and lost and goes_on:
            what = f"{' and '.join(lost)} is saved, and never loaded where the training goes on"
            fix = saved[lost[0]].replace("state_dict()", "load_state_dict(...)")
            yield Hit((), what, fix, line=call.lineno)
        elif goes_on and re.search("(?i)model", said) and _ADAPTS.search(others) and not _KEEPS.search(text):
            what = "the optimizer's moments are not saved: where the training goes on, they begin at 0"
            fix = "optimizer.state_dict() in what is saved, and load_state_dict where it is read"
            yield Hit((), what, fix, line=call.lineno)


@training_rule("error", "torch/nn/modules/module.py: parameters is a generator")
def parameters_are_used_up(document: Document, _: Setup) -> Iterator[Hit]:
    """`parameters()` can be read once: what reads it after the optimizer gets none."""
    program = tree_of(document)
    made = {*_GENERATORS.findall(ast.unparse(program))}
    sets = [(ast.unparse(one.targets[0]), one.lineno) for one in walk(program, ast.Assign)]
    reads = [one for one in within(program) if one.args and ast.unparse(one.args[0]) in made]
    read = {ast.unparse(one.args[0]): one.lineno for one in reads if is_optimizer(ast.unparse(one.func))}
    for call in (one for one in reads if ast.unparse(one.func).endswith("clip_grad_norm_")):
        name, before = (said := ast.unparse(call.args[0])), read.get(said, call.lineno)
        loop, bound = around(program, call), [line for to, line in sets if to == said]
        if isinstance(loop, ast.For | ast.While) and said not in read and max(bound) < loop.lineno:
            what = f"`{name}` is a generator, which the first step reads: later steps clip nothing"
            yield Hit((), what, _LISTED.format(name), line=call.lineno)
        if call.lineno > before and not any(before < n < call.lineno for to, n in sets if to == name):
            what = f"`{name}` is a generator, which the optimizer of line {document.at(read[name])} read: "
            yield Hit((), f"{what}nothing is clipped", _LISTED.format(name), line=call.lineno)
