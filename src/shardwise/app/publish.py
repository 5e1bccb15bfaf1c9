"""What may follow an export: a GGUF file by llama.cpp's converter, an upload to the hub."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shardwise.errors import JobError, MachineError

CONVERTER = "convert_hf_to_gguf.py"
"""llama.cpp's script; it is no package, so it is looked for in its checkout or on PATH."""

Show = Callable[[str], None]


def gguf_converter() -> Path:
    """Find llama.cpp's converter; MachineError where it is not there."""
    folder = os.environ.get("LLAMA_CPP")
    found = Path(folder) / CONVERTER if folder else shutil.which(CONVERTER)
    if found is None or not Path(found).is_file():
        what = f"there is no {CONVERTER} {f'in {folder}' if folder else 'on PATH'}"
        fix = "`git clone https://github.com/ggml-org/llama.cpp`, `pip install gguf sentencepiece`, and set "
        raise MachineError(what, where="--gguf", fix=f"{fix}LLAMA_CPP to the folder that was cloned")
    return Path(found).resolve()


def write_gguf(converter: Path, folder: Path, name: str, show: Show) -> None:
    """Convert the model in `folder`, into it. MachineError with the converter's last words if it fails."""
    show(f"converting to GGUF with {converter.name}")
    command = [sys.executable, str(converter), str(folder), "--outfile", str(folder / name)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not (folder / name).is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        what = f"llama.cpp's converter failed: {lines[-1] if lines else f'exit code {done.returncode}'}"
        fix = "see whether llama.cpp supports this architecture, or leave --gguf out"
        raise MachineError(what, where=f"--gguf: {converter}", fix=fix)


def check_push(repository: str) -> None:
    """JobError for a name that no repository can have, MachineError where there is no token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise JobError(str(error).split(". ")[0], where="--push", fix="write OWNER/NAME") from None
    if get_token() is None:
        fix = "`hf auth login`, or set HF_TOKEN to a token that may write"
        raise MachineError("there is no token for the hub", where="--push", fix=fix)


def push(folder: Path, repository: str, show: Show) -> str:
    """Upload a folder to a repository, made private if it is new; return its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    show(f"uploading to {repository}")
    api = HfApi()
    try:
        url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Export of shardwise")
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        what = f"the hub refused or was not reached: {' '.join(str(error).split())[:200]}"
        fix = f"the export is complete in {folder}; `hf upload {repository} {folder}` tries again"
        raise MachineError(what, where=f"--push {repository}", fix=fix) from None
    return str(url)
