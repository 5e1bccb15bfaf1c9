"""Files of safetensors (https://huggingface.co/docs/safetensors), written while other threads run.

Its own writer holds Python's lock: training would stand still while a thread saves gigabytes.
"""

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path

import torch

_DTYPES = {
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Torch's names and the format's, in the order in which it sorts tensors."""


def header_of(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """What a file of these tensors, one after the other, begins with."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype = _DTYPES[_name(tensor)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, header: bytes, chunks: Iterable[torch.Tensor]) -> None:
    """Write a new file of a header and the bytes of all chunks."""
    with path.open("xb") as file:
        file.write(header)
        file.writelines(c.cpu().contiguous().view(-1).view(torch.uint8).numpy().data for c in chunks)


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the file that `safetensors.torch.save_file` writes, to the byte."""
    order = list(_DTYPES)
    names = sorted(tensors, key=lambda name: (order.index(_name(tensors[name])), name))
    ordered = {name: tensors[name].detach() for name in names}
    write_file(Path(filename), header_of(ordered, metadata or {}), ordered.values())


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
