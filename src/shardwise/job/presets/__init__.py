"""Commented job files to start from: one YAML file each next to this module, with their sample data."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from shardwise.errors import JobError
from shardwise.job.json_schema import schema_text

_HERE = Path(__file__).parent
_SAMPLES = _HERE.parent / "samples"
SCHEMA_FILE = ".shardwise.schema.json"


def names() -> list[str]:
    """Every preset, by name."""
    return sorted(path.stem for path in _HERE.glob("*.yaml"))


def text(name: str) -> str:
    """The job file of a preset."""
    return (_HERE / f"{name}.yaml").read_text(encoding="utf-8")


def title(name: str) -> str:
    """The preset's first line: what it trains, on what hardware."""
    return text(name).splitlines()[0].removeprefix("# ")


def suggestion(name: str) -> str:
    """The fix for a preset that does not exist."""
    close = difflib.get_close_matches(name, names(), n=1)
    return f"did you mean {close[0]}?" if close else f"one of {', '.join(names())}"


def samples(name: str) -> list[Path]:
    """The packaged data files a preset names."""
    return [path for path in sorted(_SAMPLES.iterdir()) if re.search(rf"\b{path.name}\b", text(name))]


def write(name: str, out: Path, *, qlora: bool = False) -> Iterator[Path]:
    """Write a preset's job file and the samples it names; see `write_new`."""
    nf4 = "\nmodel:\n  quantization: nf4              # the frozen base in 4 bits; needs bitsandbytes\n"
    job = text(name).replace("\nmodel:\n", nf4, 1) if qlora else text(name)
    files = {out: f"# yaml-language-server: $schema={SCHEMA_FILE}\n{job}"}
    files |= {out.parent / sample.name: sample.read_text(encoding="utf-8") for sample in samples(name)}
    return write_new(files, out)


def write_new(files: dict[Path, str], out: Path) -> Iterator[Path]:
    """Write the job file `out` and its samples, and the schema that lets editors complete it.

    JobError if a file would be overwritten; nothing is written then.
    """
    for path, content in files.items():
        if path.exists() and (path == out or path.read_text(encoding="utf-8") != content):
            fix = (
                "--out names another file"
                if path == out
                else f"--out names a file in another folder, DIR/{out.name}"
            )
            raise JobError(f"{path} exists already", where="shardwise init", fix=fix)
    files[out.parent / SCHEMA_FILE] = schema_text()
    out.parent.mkdir(parents=True, exist_ok=True)
    made = list[Path]()
    try:
        for path, content in files.items():
            made += [] if path.exists() else [path]
            path.write_text(content, encoding="utf-8")
            yield path
    except OSError as error:
        for one in made:  # they would be in the way of the next try
            one.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
