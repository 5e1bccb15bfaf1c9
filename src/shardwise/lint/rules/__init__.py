"""All rules, by subject. A rule is a function with the decorator `finding.rule`."""

from importlib import import_module

from shardwise.lint.finding import Rule

_NAMES = "reader keys batch zero offload precision optimizer parallel sections accelerate fsdp training "
_NAMES += "arguments families mistakes launch devices loop steps ranks zeus"
SUBJECTS = [import_module(f"{__package__}.{name}") for name in _NAMES.split()]
"""The modules of rules, in the order of the page of all rules; a docstring begins with its subject."""

RULES = tuple(one for module in SUBJECTS for one in vars(module).values() if isinstance(one, Rule))
