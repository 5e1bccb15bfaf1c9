"""The end of a run: evaluation without rows, and weights that nothing keeps."""

import ast
import re
from collections.abc import Iterator

from shardwise.lint.document import Document
from shardwise.lint.finding import Hit, training_rule
from shardwise.lint.rules.loop import made_by
from shardwise.lint.rules.program import all_code, calls, tree_of, values_of, walk, words_of
from shardwise.lint.rules.training import given_to_trainers
from shardwise.lint.schema import names, pattern
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.setup import Setup

_KEEPS, _TRIES = pattern("keeps_weights"), pattern("only_tries")
_TEXT = re.compile(r"'[^'\n]*'")
_COMPUTES_NONE = ("Trainer", "Seq2SeqTrainer")  # TRL's have metrics of their own
_OWN = ("loss", "runtime", "per_second", "epoch")  # ends of what the Trainer measures itself
_COMPUTES = re.compile(r"\.compute_metrics = |def (_?evaluate|evaluation_loop|on_evaluate|_maybe_log\w+)\(")
_ROWS_AT = 5  # arguments up to `eval_dataset`
_SHORT = 100  # steps of a trial, which keeps nothing


def _trainers(document: Document) -> list[ast.Call]:
    return [one for one in calls(document, *names("trainers")) if ast.unparse(one.func) in document.uses]


@training_rule("error", "transformers/trainer.py: get_eval_dataloader: evaluation requires an eval_dataset")
def evaluates_without_rows(document: Document, _: Setup) -> Iterator[Hit]:
    """`evaluate()` of a Trainer that has no `eval_dataset` stops with a ValueError."""
    flow, made, program = values_of(document).flow, _trainers(document), tree_of(document)
    rows = (one.arg in ("eval_dataset", None) for call in made for one in call.keywords)
    given = any(rows) or any(len(one.args) > 4 for one in made) or ".eval_dataset = " in document.text
    tried = {part for one in walk(program, ast.Try) for part in ast.walk(one)}
    kinds = {ast.unparse(one.func) for one in made}
    owners = {name for name, by in made_by(document).items() if by in kinds} or {"trainer"}  # of a parameter
    for call in calls(document, "evaluate") if len(made) == 1 and not given else ():
        owner = ast.unparse(call.func).rpartition(".")[0]
        plain = not (call.args or call.keywords) and call not in tried
        if owner in owners and plain and flow.runs(call) and flow.certain(call):
            trained = any(one.lineno < call.lineno for one in calls(document, "train"))
            what = f"the Trainer has no `eval_dataset`: ValueError{' after the training' * trained}"
            yield Hit((), what, "eval_dataset=ROWS of the Trainer, or remove it", line=call.lineno)


@training_rule("error", "transformers/trainer.py 5.23: _determine_best_metric: KeyError")
def best_metric_is_not_computed(document: Document, setup: Setup) -> Iterator[Hit]:
    """`metric_for_best_model` is none of the Trainer's own, and it has no `compute_metrics`."""
    mine = (document,) if document.syntax == "python" else setup.of("training", "python")
    made = [one for script in mine for one in _trainers(script)]
    plain = len(made) == 1 and ast.unparse(made[0].func).rpartition(".")[2] in _COMPUTES_NONE
    if not plain or len(made[0].args) > _ROWS_AT or _COMPUTES.search(setup.scripts):
        return
    words = words_of(made[0])
    if None in words or ("compute_metrics" in words and not _is_off(words["compute_metrics"], setup)):
        return
    for given, line in given_to_trainers(document, setup, every=True):
        metric, when = given.get("metric_for_best_model"), given.get("eval_strategy")
        asked = [str(one).rpartition(".")[2].lower() for one in (when, given.get("evaluation_strategy"))]
        known = isinstance(metric, str) and metric != UNKNOWN and not metric.endswith(_OWN)
        if known and {"steps", "epoch"} & {*asked} and "**" not in given:
            what = f"nothing computes `{metric}`: KeyError after the first evaluation"
            fix = "compute_metrics=... of the Trainer, or metric_for_best_model: eval_loss"
            at = document.line(("metric_for_best_model",)) if line is None else line
            yield Hit(("metric_for_best_model",), what, fix, line=at)


def _is_off(given: ast.expr, setup: Setup) -> bool:
    """Whether `compute_metrics` is None, also as of `f if training_args.predict_with_generate else None`."""
    match given:
        case ast.IfExp(test=ast.Attribute(attr="predict_with_generate"), orelse=ast.Constant(value=None)):
            others = any(one.syntax != "python" for one in setup.of("training"))
            return others and setup.training("predict_with_generate") in (None, False)
        case ast.Constant(value=None):
            return True
    return False


@training_rule("warning", "transformers/trainer_callback.py: DefaultFlowCallback: save_strategy")
def nothing_is_saved(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer writes no checkpoint, and no line keeps the weights: what was trained is lost."""
    groups = given_to_trainers(document, setup, every=True) if len(_trainers(document)) == 1 else []
    code = all_code(setup)
    tries = _TRIES.search(_TEXT.sub("''", f"{document.name}\n{code}"))
    for given, line in groups if len(groups) == 1 and not tries and not _KEEPS.search(code) else ():
        known = "**" not in given and given.get("push_to_hub") in (None, False)
        steps = given.get("max_steps")
        trial = isinstance(steps, int) and 0 < steps <= _SHORT
        trains = any(ast.unparse(one.func).endswith(".train") for one in calls(document, "train"))
        off = str(given["save_strategy"]).rpartition(".")[2].lower() == "no"
        if off and known and trains and not trial:
            what = "`save_strategy` is no, and no line keeps the weights: what was trained is lost"
            yield Hit(("save_strategy",), what, "trainer.save_model(FOLDER) after train()", line=line)
