"""A plan in a process of its own, for the board: the request on stdin, progress and the answer on stdout.

One JSON object a line: `{"done": 12, "strategies": 294}`, then `{"html": ...}` or `{"error": ...}`.
"""

import json
import os
import sys

from shardwise.app.plan import plan
from shardwise.board.pages import PlanForm, plan_part
from shardwise.errors import ShardwiseError, render
from shardwise.launch import die_with
from shardwise.planner.search import reporting

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(**values: object) -> None:
        """Write a line."""
        print(json.dumps(values), file=out, flush=True)

    form = PlanForm.model_validate_json(sys.stdin.readline())
    try:
        with reporting(lambda done, strategies: say(done=done, strategies=strategies)):
            made = plan(
                model=form.model,
                gpus=form.gpus,
                changes=form.changes(),
                objective=form.objective,
                pareto=True,
            )
        say(html=plan_part(made, form.command()))
    except ShardwiseError as error:
        say(error=render(error))
    os._exit(0)  # without taking down what planning made, object by object
