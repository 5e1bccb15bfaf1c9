"""Hardware as a person writes it: `4xRTX4080`, `2x8xH100`, `4x24GB@pcie3`, `2x4xL40S+eth100`.

    [NODESx][GPUSx]GPU[@LINK][+NETWORK][+MEMORY]

GPU      a name of the catalog, or a memory size for a card with unknown other properties: 24GB are 24 * 10^9
         bytes, 24GiB are 24 * 2^30.
LINK     between the GPUs of a node: `nvlink`, or `pcie3`, `pcie4`, `pcie5`, with fewer lanes `pcie4x8`.
         Without it: NVLink where it is part of the board, else PCIe of the card's generation, for GeForce
         cards at most `pcie4`.
NETWORK  between nodes, in Gbit/s: `ib100`, `ib200`, `ib400`, `eth10`, `eth25`, `eth100`, `eth200`, `eth400`.
         InfiniBand counts one adapter for each GPU, Ethernet one for each node; `4xib200` are 4 in each node.
         `ib400/2` is an oversubscribed fabric, which carries half of what all adapters send.
         Without it: that of the maker's own system (DGX), where there is one.
MEMORY   of each node's host, as 128GiB or 128GB. Without it, whether offloading fits there is not known.
"""

import difflib
import itertools
import re
from dataclasses import dataclass

from shardwise.errors import JobError
from shardwise.hardware import links
from shardwise.hardware.catalog import GB, Gpu, assumed, gpus
from shardwise.hardware.hardware import Hardware, Link
from shardwise.units import GIB

MOST_GPUS = 16384  # A strategy for so many takes about a second to simulate, and that grows with them
EXAMPLES = "4xRTX4080, 2x8xH100, 4x24GB, 8xL40S@pcie4, 2x4xRTX4090+eth100, 4xRTX4080+128GiB"

_SPEC = re.compile(
    r"(?:(?P<first>[0-9]{1,12})x)?(?:(?P<second>[0-9]{1,12})x)?(?P<gpu>[^@+]+)"
    r"(?:@(?P<link>[^@+]*))?(?:\+(?P<network>(?!\s*[0-9.]+\s*gi?b)[^@+]*))?(?:\+(?P<host>[^@+]*))?",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)(gb|gib)", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,3})?")
_PCIE = re.compile(r"pcie([345])(?:x(1|2|4|8|16))?")
_NETWORK = re.compile(r"(?:([0-9]{1,3})x)?([a-z]+[0-9]+)(?:/([0-9]{1,2}(?:\.[0-9]{1,2})?))?")
_IGNORED = re.compile(r"nvidia|geforce|tesla|amd|instinct|[\s_-]+")
_SIZE = re.compile(r"(?<=\w)[\s_-]+([0-9]+) ?gb\b", re.IGNORECASE)
_MEMORY_WORD = re.compile(r"[0-9]+gb")


@dataclass(frozen=True)
class _Spec:
    nodes: int
    gpus: int
    gpu: str
    link: str | None
    network: str | None
    host: str | None
    where: str
    front: str  # what stands before link and network, as it was written

    def error(self, what: str, fix: str) -> JobError:
        return JobError(what, where=self.where, fix=fix)


def parse_hardware(text: str) -> Hardware:
    """The hardware that `text` describes; of the host only its memory is known, and only where it is given.

    JobError where `text` cannot be read, names no GPU or several, or a link that the GPU does not have.
    """
    spec = _read(text)
    _refuse_unclear_memory(spec)
    gpu = _gpu(spec)
    intra, host = _node_links(gpu, spec)
    return Hardware(
        gpu=gpu,
        gpus_per_node=spec.gpus,
        nodes=spec.nodes,
        intra=intra,
        inter=_network(gpu, spec),
        host_link=host,
        host_memory_bytes=_host_memory(spec),
    )


def resized(text: str, *, nodes: int | None, gpus: int) -> str:
    """`text` for `nodes` of `gpus` GPUs each: `8xH100+ib400` for one node of 2 is `2xH100`.

    Without `nodes` it is one, or as many of those of `text` as `gpus` are; JobError where they do not divide.
    """
    spec = _read(text)
    if nodes is None and gpus > spec.gpus > 1:
        if gpus % spec.gpus:
            fix = f"a multiple of {spec.gpus}, or nodes x GPUs"
            raise spec.error(f"{gpus} GPUs do not fill nodes of {spec.gpus}", fix)
        nodes, gpus = gpus // spec.gpus, spec.gpus
    several = nodes is not None and nodes > 1
    network = f"+{spec.network}" if spec.network and several else ""
    link = f"@{spec.link}" if spec.link else ""
    host = f"+{spec.host}" if spec.host else ""
    return f"{f'{nodes}x' if several else ''}{gpus}x{spec.gpu}{link}{network}{host}"


def with_slot(text: str, hardware: Hardware) -> str | None:
    """`text` with the PCIe slot that was assumed for `hardware`: `4xRTX4080@pcie4x16`.

    None where `text` names a link, and where the GPUs are not joined by PCIe.
    """
    slot = re.match(r"pcie[0-9]x[0-9]+", hardware.intra.name)
    gpus, plus, rest = text.strip().partition("+")
    return None if "@" in text or slot is None else f"{gpus}@{slot[0]}{plus}{rest}"


def _read(text: str) -> _Spec:
    where = f"hardware {text!r}"
    found = _SPEC.fullmatch(re.sub(r"(?<=[0-9])\s*[x×*]\s*", "x", text.strip(), flags=re.IGNORECASE))
    if found is None or not re.search(r"\w", found["gpu"]) or "," in text:
        raise JobError(f"{text!r} describes no hardware", where=where, fix=f"write it as one of {EXAMPLES}")
    if re.match(r"[0-9]+x.", found["gpu"], re.IGNORECASE):
        what = "what stands before the GPU is not nodes x GPUs"
        raise JobError(what, where=where, fix="write it as 2x8xH100 or 4xRTX4080")
    counts = [int(number) for number in (found["first"], found["second"]) if number is not None]
    if 0 in counts:
        raise JobError("0 GPUs cannot train", where=where, fix="write at least 1")
    nodes, gpus = [1, 1, *counts][-2:]
    if nodes * gpus > MOST_GPUS:
        what = f"{nodes * gpus} GPUs are more than the {MOST_GPUS} that can be planned for: "
        what += "the optimizer's part on each of them is simulated"
        raise JobError(what, where=where, fix=f"write at most {MOST_GPUS} in all")
    link, network, host = (p and p.strip().casefold() for p in found.group("link", "network", "host"))
    front = re.split("[@+]", text)[0].strip()
    return _Spec(nodes, gpus, found["gpu"].strip(), link, network, host, where, front)


def _refuse_unclear_memory(spec: _Spec) -> None:
    """Refuse a host's memory in the place of a link, or without its unit, and write it correctly."""
    size = _MEMORY.fullmatch((spec.link or "").replace(" ", ""))
    link, network = (None if size else spec.link), spec.network
    if size is not None:
        what = f"{size[0]} is a size of memory, not a link between GPUs"
        memory = size[1] + ("GiB" if size[2] == "gib" else "GB")
    else:
        number = next((part for part in (spec.network, spec.host) if part and _NUMBER.fullmatch(part)), None)
        if number is None:
            return
        what = f"{number} says neither what it is of nor its unit"
        memory = f"{number}GiB"
        network = None if network == number else network
    meant = spec.front + (f"@{link}" if link else "") + (f"+{network}" if network else "") + f"+{memory}"
    ask = spec.nodes > 1 and not network
    also = f"; for a network, one of {', '.join(links.network_names())}" if ask else ""
    raise spec.error(what, f"for the memory of a node's host write {meant}{also}")


def _gpu(spec: _Spec) -> Gpu:
    memory = _MEMORY.fullmatch(spec.gpu.replace(" ", ""))
    if memory is None:
        return resolve(spec.gpu, spec.where)
    memory_bytes, unit = _bytes(memory), "GiB" if memory[2].casefold() == "gib" else "GB"
    if not GIB <= memory_bytes <= 1024 * GIB:
        raise spec.error(f"no GPU has {memory[0]}", "write 1GiB to 1024GiB")
    return assumed(memory[1] + unit, memory_bytes, float(memory[1]))


def _bytes(memory: re.Match[str]) -> int:
    return round(float(memory[1]) * (GIB if memory[2].casefold() == "gib" else GB))


def _host_memory(spec: _Spec) -> int | None:
    if spec.host is None:
        return None
    memory = _MEMORY.fullmatch(spec.host.replace(" ", ""))
    if memory is None or _bytes(memory) < GIB:
        raise spec.error(f"{spec.host!r} is no size of a host's memory", "write one node's, as +128GiB")
    return _bytes(memory)


def _node_links(gpu: Gpu, spec: _Spec) -> tuple[Link, Link]:
    """Between the GPUs of a node, and between a GPU and its host."""
    generation, lanes = links.default_slot(gpu)
    on_board = gpu.fabric is not None and not gpu.fabric.bridge
    if spec.link == "nvlink" or (spec.link is None and on_board):
        return _fabric(gpu, spec), links.host_link(gpu, generation, lanes)
    if spec.link is not None:
        generation, lanes = _slot(gpu, spec)
    between = links.pcie_link(generation, lanes, peer_to_peer=gpu.pcie.peer_to_peer)
    return between, links.host_link(gpu, generation, lanes)


def _fabric(gpu: Gpu, spec: _Spec) -> Link:
    if gpu.fabric is None or (spec.link == "nvlink" and not gpu.fabric.name.startswith("nvlink")):
        raise spec.error(f"{gpu.name} has no NVLink", "leave @nvlink out")
    if spec.gpus > gpu.fabric.gpus:
        what = f"{gpu.fabric.name} joins at most {gpu.fabric.gpus} {gpu.name} of a node, not {spec.gpus}"
        raise spec.error(what, f"write nodes of {gpu.fabric.gpus} GPUs, or @pcie{gpu.pcie.generation}")
    return links.fabric_link(gpu.fabric, spec.gpus)


def _slot(gpu: Gpu, spec: _Spec) -> tuple[int, int]:
    found = _PCIE.fullmatch(spec.link or "")
    if found is None:
        fix = "write nvlink, pcie3, pcie4 or pcie5, with fewer lanes pcie4x8"
        raise spec.error(f"no link between GPUs is called {spec.link!r}", fix)
    generation, lanes = int(found[1]), int(found[2] or gpu.pcie.lanes)
    if gpu.assumed_from is None and (generation > gpu.pcie.generation or lanes > gpu.pcie.lanes):
        most = f"pcie{gpu.pcie.generation}x{gpu.pcie.lanes}"
        raise spec.error(f"{gpu.name} is a card of {most}", f"write at most @{most}")
    return generation, lanes


def _network(gpu: Gpu, spec: _Spec) -> Link | None:
    known = ", ".join(links.network_names())
    if spec.nodes == 1:
        if spec.network is not None:
            raise spec.error("one node uses no network", f"leave +{spec.network} out")
        return None
    if spec.network is None:
        if gpu.network is None:
            what = f"the network between {spec.nodes} nodes is not known"
            raise spec.error(what, f"add + and one of {known}")
        adapters = max(1, spec.gpus // gpu.network.gpus_per_adapter)
        return links.network_link(gpu.network.name, adapters=adapters, gpus_per_node=spec.gpus)
    found = _NETWORK.fullmatch(spec.network)
    if found is None or found[2] not in links.network_names() or found[1] == "0":
        raise spec.error(f"no network is called {spec.network!r}", f"write one of {known}")
    factor = float(found[3] or 1)
    if factor < 1:
        raise spec.error(
            f"a fabric cannot be oversubscribed {found[3]} times", "write a factor from 1, as ib400/2"
        )
    adapters = int(found[1] or (spec.gpus if found[2].startswith("ib") else 1))
    return links.network_link(found[2], adapters=adapters, gpus_per_node=spec.gpus, oversubscribed=factor)


def resolve(text: str, where: str) -> Gpu:
    """The catalogued GPU called `text`, in any case, with spaces, dashes and underscores or without.

    Words of the name may be left out and change places, and the memory size may be added. Of several cards
    that fit it is the plain one (RTX 4070 of 4070 and 4070 Ti), or else the SXM part (H100). JobError where
    no card fits, or several do; `where` says what was read.
    """
    key = _normal(text)
    named = [gpu for gpu in gpus() if key == _normal(gpu.name)]
    named += [gpu for gpu in gpus() if key in map(_normal, gpu.driver_names)]
    found = named[:1] or _candidates(text)
    if not found:
        raise JobError(f"no GPU is called {text!r}", where=where, fix=_did_you_mean(key))
    if len(found) > 1:
        names = [gpu.name for gpu in found]
        what = f"{text!r} may be {_either(names[:6])}{' and others' if len(names) > 6 else ''}"
        raise JobError(what, where=where, fix=f"write more of the name, as {names[0].replace(' ', '-')}")
    return found[0]


def _candidates(text: str) -> list[Gpu]:
    """The GPUs whose words spell `text`: the plain one of them, of the size given, the SXM parts first."""
    size = _SIZE.search(text)
    key = _normal(_SIZE.sub("", text))
    spelled: dict[Gpu, frozenset[str]] = {}
    for gpu in gpus():
        words = frozenset(_normal(word) for word in gpu.name.split())
        orders = (order for n in range(len(words)) for order in itertools.permutations(words, n + 1))
        if any(any(map(_names_a_model, order)) for order in orders if "".join(order) == key):
            spelled[gpu] = frozenset(word for word in words if not _MEMORY_WORD.fullmatch(word))
    plain = [gpu for gpu, words in spelled.items() if all(words <= others for others in spelled.values())]
    found = [gpu for gpu in plain or spelled if size is None or gpu.sold_as_gb == int(size[1])]
    return [gpu for gpu in found if " SXM" in gpu.name] or found


def _names_a_model(word: str) -> bool:
    return any(letter.isdigit() for letter in word) and not _MEMORY_WORD.fullmatch(word)


def _normal(text: str) -> str:
    return re.sub(r"sxm[0-9](?![0-9]?gb)", "sxm", _IGNORED.sub("", text.casefold()))


def _did_you_mean(key: str) -> str:
    names = {_normal(gpu.name): gpu.name for gpu in gpus()}
    near = [names[found] for found in difflib.get_close_matches(key, names, n=3, cutoff=0.6)]
    asked = f"did you mean {_either(near)}? " if near else ""
    if turned := re.fullmatch(r"(.*[0-9].*)x([0-9]+)", key):
        asked = f"the number comes first: {turned[2]}x{turned[1].upper()}. "
    return f"{asked}Known are {known_names()}. Any other card is written by its memory: 4x24GB"


def known_names() -> str:
    """All models of the catalog in one line, their variants left out: `RTX 2080, 3060, ...; H100, ...`."""
    models: dict[str, dict[str, None]] = {}
    for gpu in gpus():
        first, *rest = gpu.name.split()
        if any(letter.isdigit() for letter in first):
            family, model = "", first
        else:
            family, model = first, " ".join(rest[:2] if rest[0] == "PRO" else rest[:1])
        models.setdefault(family, {})[model] = None
    return "; ".join(f"{family} {', '.join(names)}".strip() for family, names in models.items())


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
