"""Training loops of one's own."""

import ast
import re
from collections.abc import Iterator

from shardwise.lint.document import Document
from shardwise.lint.finding import DEEPSPEED, Hit, Severity, loop_rule, training_rule
from shardwise.lint.rules.accelerate import FSDP
from shardwise.lint.rules.branches import branches, members_of, spelled_out
from shardwise.lint.rules.families import has_no_spare_rows
from shardwise.lint.rules.program import (
    calls,
    code_of,
    is_optimizer,
    known_values,
    modules_of,
    tree_of,
    values_of,
    walk,
    within,
)
from shardwise.lint.rules.training import has_engine, zero_stage
from shardwise.lint.rules.zero import stage_of
from shardwise.lint.saved import elsewhere, state_of
from shardwise.lint.schema import closest, names, pattern
from shardwise.lint.script_text import UNDEFINED
from shardwise.lint.setup import Setup

_INITIALIZE = "deepspeed.initialize"  # below, patterns of what ast.unparse writes: a statement a line
_GETS = r" = deepspeed\.initialize\((?:.*\b"
_ENGINE = re.compile(rf"(?<![\w.])([\w.]+), (\*?[\w.]+).*{_GETS}optimizer=([\w.]+))?")
_SCHEDULE = re.compile(rf"(?<![\w.])([\w.]+), .*?(\w+){_GETS}lr_scheduler=(?!None)([\w.]+))?")
_MADE = re.compile(r"^ *\(?([\w.]+(?:, .*?)?)\)? = ([\w.]+)\(", re.MULTILINE)
_SAME = re.compile(r"^ *([\w.]+) = ([\w.]+)$", re.MULTILINE)  # `self.optimizer = optimizer`
_GIVEN = re.compile(r"(deepspeed\.initialize)\((?:.*\bmodel=|[^,()=]+, )([\w.]+)")
_HELD = re.compile(r"([\w.]+?)(?:\.module)?\.(?:parameters|state_dict|save_pretrained)\(")
_WAITS = {name: re.compile(r"(trainer|accelerator|engine|initialize)\b") for name in names("wait_in_shards")}
_WAITS |= {name: re.compile(r"(engine|initialize)\b") for name in names("wait_in_engines")}
_WAITS |= {name: re.compile(r"\b(dist|distributed|comm|accelerator)\b") for name in names("wait_for_all")}
_WAITS |= dict.fromkeys(names("wait_in_checkpoints"), re.compile(r"\bdist\w*\.checkpoint|\bdcp\b"))
_STEPS = re.compile(r"^ *(?!\S*sched)[\w.]+\.step\(", re.MULTILINE)
_ZEROES = re.compile(r"zero_grad|foreach_zero|\.grad\s*=\s*None|grad\.zero_|deepspeed\.init|[Ll]ightning")
_ALONE = {"group", "state_dict", "no_dist", "process_group"}  # arguments of what may be for one process
_OF_FSDP = ("get_state_dict", "save_state")  # an Accelerator gathers in these
_COUNTS = ("gradient_accumulation_steps", "num_steps")  # of an Accelerator and its plugin
_UNWRAPS = re.compile(r"[\w.]*\bunwrap_model\([^()]*\)")
_GATHERS = re.compile(r"GatheredParameters|zero_stage|\bif [^\n]*(deepspeed(?!\.comm)|zero_?3)")
_LOADS = re.compile(r"(?:AutoModel\w*|For\w+)\.from_pretrained\((?:.*\n)*.*(?:Trainer\(|\.backward\()")
_OF_TORCH = re.compile(r"^((torch\.)?distributed|dist)\.(?=[a-z])")
SHARDED = pattern("sharded")
_ACCUMULATE = "`with accelerator.accumulate(model):` around the forward pass, backward and step"
_NEW = pattern("new")
_MAKES_ROWS = re.compile(r"resize_token_embeddings|resize\w*embed|add_new_tokens|len\([\w.]*tok\w*er\)")


@loop_rule("error", "run with 0.19.8 at stages 0, 2 and 3", versions=DEEPSPEED)
def engine_steps_itself(document: Document, setup: Setup) -> Iterator[Hit]:
    """DeepSpeed's engine steps its own optimizer and schedule, at the end of an accumulation."""
    program, steps = code_of(document), reversed([*calls(document, "step")])
    stepped = {ast.unparse(one.func).removesuffix(".step"): one for one in steps}  # the first of a name stays
    in_file = any(one.section("scheduler") for one in setup.of("deepspeed"))
    for engine, schedule, given in _SCHEDULE.findall(program):
        for name in {given, schedule if given or in_file else ""} & stepped.keys():
            if re.search(rf"^( *){engine}\.step\(\)\n(?:\1.*\n)*?\1{name}\.step\(\)", program, re.MULTILINE):
                what = f"`{engine}.step()` also steps the schedule that DeepSpeed has: it runs twice as fast"
                yield Hit((), what, f"remove `{name}.step()`", line=stepped[name].lineno)
    flow, made = values_of(document).flow, made_by(document)
    counts = [one.number("gradient_accumulation_steps") or 1 for one in setup.of("deepspeed")]
    for name, call in stepped.items() if max(counts, default=1) > 1 else ():
        tests = [ast.unparse(spelled_out(test, values_of(document))) for test, _ in flow.taken(call)]
        if made.get(name) == _INITIALIZE and (by := [one for one in tests if "%" in one]):
            what = f"the engine counts micro-batches in `step`: called only where {by[0]}, "
            what += "it accumulates twice"
            yield Hit((), what, f"{name}.step() after each backward", line=call.lineno)
    engines = [*calls(document, "initialize"), *calls(document, "backward")]
    for engine, returned, given in _ENGINE.findall(program):
        own = (one for one in engines if ast.unparse(one.func) in (_INITIALIZE, f"{engine}.backward"))
        if any(flow.apart(one, stepped.get(given or returned, one)) for one in own):
            continue  # another training, which has no engine
        if given in stepped and given != returned:
            what = f"`{given}` was given to DeepSpeed: under ZeRO it has no gradients: nothing is trained"
            yield Hit((), what, f"{engine}.step() steps DeepSpeed's own of it", line=stepped[given].lineno)
        elif returned in stepped:
            what = f"`{returned}.step()` bypasses the engine: it steps at every micro-batch, "
            what += "or stops at ZeRO-2"
            yield Hit((), what, f"{engine}.step()", severity="warning", line=stepped[returned].lineno)


@loop_rule("error", "engine.py: _configure_zero_optimizer; run with 0.19.8", versions=DEEPSPEED)
def no_optimizer(document: Document, setup: Setup) -> Iterator[Hit]:
    """DeepSpeed trains only with an optimizer of the file or of the script."""
    trains = "deepspeed.initialize" in document.uses and ".backward(" in document.text
    passed = {"deepspeed.initialize(optimizer)", "deepspeed.initialize(**)"} & document.uses
    for config in setup.of("deepspeed") if trains and not passed else ():
        stage = stage_of(config)
        when = f"`zero stage {stage} requires an optimizer`" if stage in (1, 2) else "the first backward"
        what = f"neither {config.name} nor deepspeed.initialize gives an optimizer: DeepSpeed stops at {when}"
        fix = f'"optimizer": {{"type": "AdamW", "params": {{"lr": 2e-5}}}} in {config.name}, or in the call'
        if not config.section("optimizer"):
            yield Hit(("initialize",), what, fix)


@loop_rule("error", "torch/optim/optimizer.py: zero_grad; autograd adds to .grad")
def no_zero_grad(document: Document, setup: Setup) -> Iterator[Hit]:
    """Backward adds to the gradients: without `zero_grad` a step also has those of all steps before."""
    program, made = tree_of(document), made_by(document)
    engine = has_engine(document, setup) or zero_stage(setup) is not None
    texts = " ".join(one.text for one in setup.of("training"))
    for call in calls(document, "step") if not engine and not _ZEROES.search(texts) else ():
        place, name = around(program, call), stepped(call)
        given = name.endswith("optimizer") and re.search(r"def \w+\([^)]*\boptimizer\b", document.text)
        kinds = [made.get(name, "Adam" if given else "")]
        if isinstance(place, ast.For) and (members := members_of(place, name, values_of(document))):
            kinds, place = [made.get(one, "") for one in members], around(program, call, place)
        often = isinstance(place, ast.For | ast.While) or f"{name} = " not in ast.unparse(place)
        if any(map(is_optimizer, kinds)) and often and ".backward(" in ast.unparse(place):
            yield Hit((), fix=f"{name}.zero_grad() after the step", line=call.lineno)
            return


@loop_rule("warning", "torch/optim/lr_scheduler.py: `lr_scheduler.step()` before `optimizer.step()`")
def schedule_before_optimizer(document: Document, _: Setup) -> Iterator[Hit]:
    """The schedule is stepped before the optimizer: the first learning rate is never used."""
    made = made_by(document)
    for node in ast.walk(tree_of(document)):
        block = node.body if isinstance(node, ast.For | ast.While | ast.With) else []
        steps = [(one, call) for one in block for call in within(one) if stepped(call)]
        own = [at for at, (_, call) in enumerate(steps) if is_optimizer(made.get(stepped(call), ""))]
        for one, call in steps[: own[0]] if own else ():
            alone = isinstance(one, ast.Expr) and one.value is call and not call.args
            if alone and "sched" in stepped(call).lower():
                fix = f"`{ast.unparse(call)}` after line {document.at(steps[own[0]][1].lineno)}"
                yield Hit((), fix=fix, line=call.lineno)
                return


def stepped(call: ast.Call) -> str:
    """What `optimizer.step()` or `scaler.step(optimizer)` steps; empty of other calls."""
    owner, _, last = ast.unparse(call.func).rpartition(".")
    scaled = "scaler" in owner.lower() and call.args
    return "" if last != "step" else ast.unparse(call.args[0]) if scaled else owner


@training_rule("error", "the language: NameError")
def undefined_name(document: Document, _: Setup) -> Iterator[Hit]:
    """A name is used that the script neither defines nor imports; an error where it is a misspelt one."""
    missing = dict.fromkeys(document.get(UNDEFINED) or [])
    known = names("wait_for_all") + names("of_distributed")
    for call in within(tree_of(document)) if "comm as dist" not in document.text else ():  # DeepSpeed's
        last = _OF_TORCH.sub("", said := ast.unparse(call.func))
        if last != said and last not in known and (near := closest(last, known, least=0.85)):
            what = f"torch.distributed has no `{last}`: AttributeError"
            yield Hit((), what, f"did you mean `{near}`?", line=call.lineno)
    nodes = [*walk(tree_of(document), ast.Name)] if missing else []
    bound = {one.id for one in nodes if isinstance(one.ctx, ast.Store)}
    for node in (one for one in nodes if one.id in missing and _certain(document, one)):
        if near := closest(node.id, bound, least=0.85):
            del missing[node.id]
            what = f"no line defines `{node.id}`: NameError"
            yield Hit((UNDEFINED,), what, f"did you mean `{near}`?", line=node.lineno)
    if missing:
        said = ", ".join(f"`{name}`" for name in missing)
        what = f"no line defines {said}: NameError where it is used"
        fix = "define it" + "; in several processes with a DistributedSampler" * ("loader" in said)
        yield Hit((UNDEFINED,), what, fix, severity="warning")


def _certain(document: Document, node: ast.AST) -> bool:
    """Whether a statement runs, and no condition or handler of an error is around it."""
    flow = values_of(document).flow
    scopes = [one for one in flow.scopes(node) if not isinstance(one, ast.Module)]
    called = (document.text.count(f"{getattr(one, 'name', '=')}(") > 1 for one in scopes)
    return flow.certain(node) and all(called) and "except" not in document.text


@loop_rule("error", "transformers/modeling_utils.py: resize_token_embeddings; torch: index out of range")
def new_tokens_without_rows(document: Document, setup: Setup) -> Iterator[Hit]:
    """The model's embedding has no row for a new token until it is resized: an index error."""
    program, texts = code_of(document), " ".join(one.text for one in setup.of("training"))
    made, full = made_by(document), has_no_spare_rows(document, setup)
    trains = full and _LOADS.search(program) and not _MAKES_ROWS.search(texts)
    for call in calls(document, "add_tokens", "add_special_tokens") if trains else ():
        own = call.args and "Tokenizer" in made.get(ast.unparse(call.func).rpartition(".")[0], "")
        given = ast.walk(values_of(document).meant(call.args[0])) if own else ()
        words = [str(one.value) for one in given if isinstance(one, ast.Constant)]
        again = "pad_token" in words and re.search(r"\.pad_token(_id)? = ", program)  # another one pads
        if (new := [*filter(_NEW.fullmatch, words)]) and not again:
            what = f"the model has no row for {new[0]!r}, and no line calls `resize_token_embeddings`: "
            what += "where it comes first, the run stops with `index out of range` or a device-side assert"
            yield Hit((), what, "model.resize_token_embeddings(len(tokenizer))", line=call.lineno)


def made_by(document: Document) -> dict[str, str]:
    """The call that made a name's value; of a model that DeepSpeed got, deepspeed.initialize."""
    program, made = code_of(document), dict[str, str]()
    for names_, call in _MADE.findall(program):
        first, *others = names_.split(", ")
        kept = call.endswith(".prepare") and is_optimizer(made.get(first, ""))  # it stays what it was
        made |= dict.fromkeys([one for one in others if "model" in one] if kept else [first], call)
    made |= {model: call for call, model in _GIVEN.findall(program)}
    return {to: made[name] for to, name in _SAME.findall(program) if name in made} | made


@loop_rule("error", "deepspeed/runtime/engine.py: save_checkpoint; transformers/trainer.py: save_model")
def one_process_calls_for_all(document: Document, setup: Setup) -> Iterator[Hit]:
    """One process calls what waits for all others: the run hangs."""
    made, stage, texts = made_by(document), zero_stage(setup), " ".join(d.text for d in setup.documents)
    full = "FULL_STATE_DICT" in texts or (setup.training("fsdp") and "SHARDED_STATE_DICT" not in texts)
    found, others_call, known = dict[int, tuple[str, str]](), set[str](), values_of(document)
    modules = modules_of(document)
    parts = {name for row in SHARDED.findall(code_of(document)) for name in row}
    wraps = [*calls(document, "fully_shard", "FullyShardedDataParallel")]
    for where, body, others in branches(document):
        others_call |= {ast.unparse(call.func).rpartition(".")[2] for call in within(*others)}
        for call in within(*body):
            owner, _, last = (said := ast.unparse(call.func)).rpartition(".")
            sharded = stage == 3 or full or (last == "save_state" and stage is not None)
            sharded |= last in _OF_FSDP and any(one.section(FSDP) for one in setup.of("accelerate"))
            by = f"{made.get(owner, '')} {modules.get(owner or last, '')}.{owner}".lower()
            waits = last in _WAITS and _WAITS[last].search(by)
            held = said in parts or (owner in parts and last in names("wait_in_fsdp"))
            held = held and any(one.lineno < call.lineno and not known.flow.apart(one, call) for one in wraps)
            gathers = last in names("wait_in_shards")
            certain = not gathers or (sharded and f"def {last}(" not in texts)
            lower = gathers and any(elsewhere(*one, known) for one in known.flow.taken(call))  # than 3
            given = {one.arg for one in call.keywords}
            if (held or (waits and certain)) and not lower and not given & _ALONE:
                found[call.lineno] = said, where
    # where the others call it too, they meet
    alone = {line: one for line, one in found.items() if one[0].rpartition(".")[2] not in others_call}
    for where in dict.fromkeys(place for _, place in alone.values()):
        mine = {(document.at(line), said): line for line, (said, place) in alone.items() if place == where}
        ((_, said), line), *rest = mine.items()
        more = "".join(f", `{one}` (line {at})" for (at, one), _ in rest)
        what = f"`{said}`{more} wait{'s' * (not rest)} for all processes, and {where} lets one call it: "
        what += "the run hangs"
        fix, source = "call it in all processes, outside the condition", ""
        if said.endswith(".state_dict"):  # of fully_shard it does not wait
            what += ", or with fully_shard one process's shard is saved"
            fix = "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), in all"
            source = "torch/distributed/fsdp: state_dict gathers"
        yield Hit((), what, fix, line=line, source=source)


@loop_rule("error", "deepspeed/runtime/zero; run with 0.19.8 at stages 1 to 3", versions=DEEPSPEED)
def weights_are_elsewhere(document: Document, setup: Setup) -> Iterator[Hit]:
    """ZeRO keeps gradients, and at stage 3 weights, in its own buffers: the model's are empty."""
    made, stage, known = made_by(document), zero_stage(setup), known_values(document, setup)
    trainers = [call for call in within(tree_of(document)) if ast.unparse(call.func).endswith("Trainer")]
    given_to = [(one.value, call) for call in trainers for one in call.keywords if one.arg == "model"]
    given_to += [(one, call) for call in trainers for one in call.args[:1]]
    trained = {ast.unparse(model): call.lineno for model, call in given_to}
    for name in walk(tree_of(document), ast.Name):
        if not isinstance(name.ctx, ast.Load) and trained.get(name.id, name.lineno) < name.lineno:
            del trained[name.id]  # another model since
    savers = ("save", "save_pretrained", "save_file", "_save")
    for call in calls(document, "clip_grad_norm_", *savers) if stage else ():
        text = _UNWRAPS.sub("unwrap_model", ast.unparse(call))
        state = " ".join(state_of(one, known) for one in (*call.args, *(one.value for one in call.keywords)))
        gathered = re.search("state_dict=|accelerator.clip", text)
        held = _HELD.findall(state if gathered else f"{text} {state}")
        sources = " ".join(made.get(name, "") for name in held)
        accelerated = "unwrap_model" in (*held, *re.split(r"\W", sources)) or ".prepare" in sources
        saved = [] if "clip_" in text else held
        by_trainer = any(re.search(r"[Tt]rainer\.model$", name) for name in saved)
        by_trainer |= any(trained.get(name, call.lineno) < call.lineno for name in saved)
        given = _INITIALIZE in sources or accelerated
        if given and "clip_grad_norm_(" in text:
            what, fix = "under ZeRO the parameters have no gradients after backward", "remove it"
            if file := next((one for one in setup.of("deepspeed") if one.get("gradient_clipping")), None):
                what = f"this call does nothing: {what}; {file.name} clips at {file.get('gradient_clipping')}"
                yield Hit((), what, fix, severity="warning", line=call.lineno)
            else:
                fix = '"gradient_clipping": 1.0 in the DeepSpeed file'
                yield Hit((), f"nothing is clipped: {what}", fix, line=call.lineno)
        elif not known.flow.runs(call) or any(elsewhere(*one, known) for one in known.flow.taken(call)):
            continue
        elif stage == 3 and (given or by_trainer) and not _GATHERS.search(document.text):
            what = "ZeRO-3 shards the weights: the model's tensors are empty, and so are the saved ones"
            fix = "trainer.save_model" if by_trainer else "engine.save_16bit_model"
            fix += " in all processes, with stage3_gather_16bit_weights_on_model_save"
            fix = "state_dict=accelerator.get_state_dict(model), in all processes" if accelerated else fix
            yield Hit((), what, fix, line=call.lineno)


def _accumulated(document: Document) -> str:
    """What the script gives an Accelerator as the number of micro-batches; empty for none and for 1."""
    known, made = values_of(document), calls(document, "Accelerator", "GradientAccumulationPlugin")
    given = [one for call in made for one in call.keywords if one.arg in _COUNTS]
    counts = {ast.unparse(known.meant(one.value)) for one in given} - {"1", "None"}
    return counts.pop() if len(counts) == 1 else ""


def around(program: ast.Module, call: ast.expr | ast.stmt, beyond: ast.AST | None = None) -> ast.AST:
    """The innermost loop or function with a call or a statement, other than `beyond`."""
    kinds = ast.For | ast.While | ast.FunctionDef
    blocks = (one for one in ast.walk(program) if isinstance(one, kinds) and one is not beyond)
    found = (one for one in blocks if one.lineno <= call.lineno <= (one.end_lineno or 0))
    return max(found, key=lambda one: one.lineno, default=program)


def _divisors(node: ast.expr) -> Iterator[ast.expr]:
    """What a sum, product or quotient is divided by, also before `.mean()`."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            added = isinstance(getattr(left, "op", None), ast.Add)
            mean = added and isinstance(right, ast.Constant)  # of losses
            yield from ([right] * (not mean) if isinstance(op, ast.Div) else _divisors(right))
            yield from _divisors(left)
        case ast.Call(func=ast.Attribute(value=inner)):
            yield from _divisors(inner)


def _division(document: Document, call: ast.Call, counts: set[str]) -> int | None:
    """The line that divides the loss of a backward call by the number of accumulated micro-batches."""
    loss = call.args[0] if call.args else getattr(call.func, "value", call.func)
    divisors, known = [*_divisors(loss)], values_of(document)
    for one in ast.walk(around(tree_of(document), call)):
        if isinstance(one, ast.Assign) and one.lineno <= call.lineno:
            divisors += _divisors(one.value) if ast.unparse(one.targets[0]) == ast.unparse(loss) else ()
        elif isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Div) and one.lineno <= call.lineno:
            divisors += [one.value] * (ast.unparse(one.target) == ast.unparse(loss))
    said = ((one.lineno, ast.unparse(one), ast.unparse(known.meant(one))) for one in divisors)
    return next((line for line, *texts in said if {*texts} & counts or "accum" in texts[0]), None)


@loop_rule("error", "accelerate/utils/deepspeed.py: DeepSpeedOptimizerWrapper", versions="accelerate<2")
def backward_outside_accelerator(document: Document, setup: Setup) -> Iterator[Hit]:
    """accelerator.backward scales and divides the loss; under DeepSpeed it also takes the step."""
    made, found = made_by(document), [*calls(document, "backward")]
    accelerated = any(name.endswith("Accelerator") for name in document.uses)
    own = ".prepare" in " ".join(made.values()) and accelerated
    steps = has_engine(document, setup)
    count = _accumulated(document)
    scales = not {"bf16", "no"} & {one.get("mixed_precision") for one in setup.documents}
    for call in found if own and not any(call.args for call in found) else ():
        owner = ast.unparse(call.func).removesuffix(".backward")
        if made.get(owner, "").endswith("Accelerator") or "accelerator" in owner.lower():
            what = f"`{owner}.backward` gets no loss: TypeError `missing 1 required positional argument`"
            yield from [] if call.keywords else [Hit((), what, f"{owner}.backward(loss)", line=call.lineno)]
            continue
        divided = _division(document, call, {count})
        lost = ["with fp16 the loss is not scaled"] * scales
        lost += [f"it is not divided by the {count} accumulated micro-batches"] * bool(count and not divided)
        what = ", and ".join(lost)
        what = "DeepSpeed takes its step in accelerator.backward: nothing is trained" if steps else what
        if not what:
            continue
        fix = f"accelerator.backward({owner})"
        if count and divided:
            at = document.at(divided)
            fix += f", which divides by {count} itself: also remove the division in line {at}"
        yield Hit((), what, fix, severity=None if steps else "warning", line=call.lineno)


@loop_rule("error", "accelerate/accelerator.py: backward; deepspeed/runtime/engine.py: backward")
def loss_divided_twice(document: Document, setup: Setup) -> Iterator[Hit]:
    """The backward of an Accelerator or engine divides the loss by the accumulated micro-batches itself."""
    made = made_by(document)
    files = [one.number("gradient_accumulation_steps") or 1 for one in setup.of("deepspeed")]
    in_file, own = {f"{count:g}" for count in files if count > 1}, _accumulated(document)
    for call in calls(document, "backward") if in_file or own else ():
        owner = ast.unparse(call.func).removesuffix(".backward")
        by = f"{made.get(owner)} {owner}".lower()
        counts = in_file | {own} - {""} if "accelerator" in by else in_file if _INITIALIZE in by else set()
        scales = all(one.arg != "scale_wrt_gas" for one in call.keywords)
        if call.args and counts and scales and (line := _division(document, call, counts)):
            at = document.at(line)
            what = f"`{owner}.backward` divides the loss by {min(counts)}, and line {at} does too: the "
            yield Hit((), f"{what}gradients are too small", f"remove the division in line {at}", line=line)


@loop_rule("error", "accelerate/accelerator.py: accumulate; optimizer.py: step", versions="accelerate<2")
def accumulate_is_missing(document: Document, setup: Setup) -> Iterator[Hit]:
    """Without `accumulate` an Accelerator's optimizer steps at every micro-batch."""
    count, program, known = _accumulated(document), tree_of(document), values_of(document)
    if re.search(r"\.accumulate\(|no_sync|sync_gradients", document.text):
        return
    for test in walk(program, ast.If):
        body = "\n".join(map(ast.unparse, test.body))
        waits = "%" in ast.unparse(spelled_out(test.test, known))
        around_all = not waits and any(isinstance(one, ast.For | ast.While) for one in ast.walk(test))
        if not around_all and (_STEPS.search(body) or ("continue" in body and waits)):
            steps = has_engine(document, setup)
            if waits and steps and re.search(r"(?i)accel\w*\.backward\(", document.text):
                what = f"`if {ast.unparse(test.test)}` does not accumulate: under DeepSpeed "
                what += "accelerator.backward takes the step, at every micro-batch"
                yield Hit((), what, _ACCUMULATE, line=test.lineno)
            return  # accumulates by hand
    loops = [around(program, call) for call in calls(document, "backward")]
    for call in calls(document, "step") if count else ():
        loop = around(program, call)
        if loop in loops and isinstance(loop, ast.For | ast.While) and _STEPS.search(ast.unparse(call)):
            many = f"{count} times as often as asked" if count.isdigit() else f"also if `{count}` is above 1"
            what = f"nothing calls `accumulate`: the optimizer steps at every micro-batch, {many}"
            severity: Severity | None = None if count.isdigit() else "warning"
            yield Hit((), what, _ACCUMULATE, severity=severity, line=call.lineno)
            return
