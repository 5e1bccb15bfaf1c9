"""Scripts of the repository that are no package, as modules."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(path: str) -> ModuleType:
    """The script at `path` from the repository's root; it may import the scripts in its folder by name."""
    file = ROOT / path
    known = sys.modules.get(file.stem)
    if known is not None and known.__file__ != str(file):
        del sys.modules[file.stem]  # a script of the same name in another folder
    sys.path.insert(0, str(file.parent))
    try:
        return importlib.import_module(file.stem)
    finally:
        sys.path.remove(str(file.parent))
