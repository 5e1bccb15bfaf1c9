"""The end of a run: evaluation without rows, and weights that nothing keeps."""

import ast
import re
from collections.abc import Iterator

from shardwise.lint.document import Document
from shardwise.lint.finding import Hit, training_rule
from shardwise.lint.rules.loop import made_by
from shardwise.lint.rules.training import calls, given_to_trainers, tree_of, values_of
from shardwise.lint.schema import names, pattern
from shardwise.lint.setup import Setup

_KEEPS, _TRIES = pattern("keeps_weights"), pattern("only_tries")
_TEXT = re.compile(r"'[^'\n]*'")
_SHORT = 100  # steps of a trial, which keeps nothing


def _trainers(document: Document) -> list[ast.Call]:
    made = calls(document, *names("trainers"))
    return [one for one in made if ast.unparse(one.func) in document.uses]


@training_rule("error", "transformers/trainer.py: get_eval_dataloader: evaluation requires an eval_dataset")
def evaluates_without_rows(document: Document, _: Setup) -> Iterator[Hit]:
    """`evaluate()` of a Trainer that has no `eval_dataset` stops with a ValueError."""
    flow, made, program = values_of(document).flow, _trainers(document), tree_of(document)
    rows = (one.arg in ("eval_dataset", None) for call in made for one in call.keywords)
    given = any(rows) or any(len(one.args) > 4 for one in made) or ".eval_dataset = " in document.text
    tried = {part for one in ast.walk(program) if isinstance(one, ast.Try) for part in ast.walk(one)}
    kinds = {ast.unparse(one.func) for one in made}
    owners = {name for name, by in made_by(document).items() if by in kinds} or {"trainer"}  # of a parameter
    for call in calls(document, "evaluate") if len(made) == 1 and not given else ():
        owner = ast.unparse(call.func).rpartition(".")[0]
        plain = not (call.args or call.keywords) and call not in tried
        if owner in owners and plain and flow.runs(call) and flow.certain(call):
            trained = any(one.lineno < call.lineno for one in calls(document, "train"))
            what = f"the Trainer has no `eval_dataset`: ValueError{' after the training' * trained}"
            yield Hit((), what, "eval_dataset=ROWS of the Trainer, or remove it", line=call.lineno)


@training_rule("warning", "transformers/trainer_callback.py: DefaultFlowCallback: save_strategy")
def nothing_is_saved(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer writes no checkpoint, and no line keeps the weights: what was trained is lost."""
    made = _trainers(document)
    groups = given_to_trainers(document, setup, every=True) if len(made) == 1 else []
    code = "\n".join(ast.unparse(tree_of(one)) for one in setup.of("training"))
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
