"""Every file action of a checkpoint goes through here, so that tests can make any of them fail.

The engine's own writing is not: what it wrote is flushed (`sync`) and hashed before it counts.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class FileSystem:
    """The actions of the commit protocol. Each one is a point where a crash must do no harm."""

    def make_folder(self, path: Path) -> None:
        """Make one folder, readable by this user only. It must not exist."""
        path.mkdir(mode=0o700)

    def write(self, path: Path, content: bytes) -> None:
        """Write a new file; it is on disk when this returns."""
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """Bring a file's bytes, or a folder's entries, from the page cache to the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic within one file system."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user can still write to the file system that holds `path`."""
        return shutil.disk_usage(path).free
