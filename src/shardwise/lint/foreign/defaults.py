"""What the tools do where no file says it (foreign.toml: defaults)."""

from collections.abc import Sequence

from shardwise.lint.document import Document
from shardwise.lint.foreign.table import TABLE
from shardwise.lint.schema import names
from shardwise.lint.setup import of_script

_FACTORY = {"finetuning_type", "template", "cutoff_len", "dataset_dir"}


def defaults(given: set[str], documents: Sequence[Document], said: list[str]) -> list[str]:
    """The changes; `given`: keys of the job and of the files that something says."""
    scripts = [one for one in documents if one.syntax == "python" and one.kind == "training"]
    tools = dict.fromkeys(tool for one in documents for tool in _tools(one, alone=not scripts))
    made = dict[str, str]()
    for tool in tools:
        own = list[str]()
        for row in TABLE["defaults"]:
            if tool in row["of"] and not given & {*row["unless"]} and given.issuperset(row.get("where", ())):
                own += [change for change in row["job"] if change.partition("=")[0] not in made]
        if own:
            said.append(f"assumed, as {TABLE['tools'][tool]} does: {', '.join(own)}")
        made |= {change.partition("=")[0]: change for change in own}
    return [*made.values()]


def _tools(document: Document, *, alone: bool) -> list[str]:
    """Whose defaults hold for what a document does not say; `alone`: without a script."""
    if document.kind == "deepspeed":
        return ["deepspeed"] if document.has("optimizer", "type") else []
    if document.syntax != "python":
        known = {*TABLE["marks"]} & document.values.keys()
        if not known or not alone:
            return []
        if "base_model" in known:
            return ["axolotl"]
        return ["factory", "trainer"] if _FACTORY & document.values.keys() else ["trainer"]
    calls = {name.rpartition(".")[2] for name in document.uses}
    adapters = ["peft"] if document.has("LoraConfig") else []
    unsloth = ["unsloth"] if document.has("FastModel()") else []
    if of_script(document) == "trainer":
        trl = bool(calls & {"SFTTrainer", *names("trl_arguments")} & {"SFTTrainer", "SFTConfig"})
        other = bool(calls & {*names("trl_arguments")})
        return [*unsloth, *adapters, *(["trl"] if trl else [] if other else ["trainer"])]
    torch = ["torch"] if any(document.has(f"{name}()") for name in TABLE["adam"]) else []
    if "deepspeed.initialize" in document.uses:
        return [*adapters, *torch, "engine"]
    loop = ["loop"] if torch or document.has("DataLoader()") else []
    return [*unsloth, *adapters, *torch, *loop]
