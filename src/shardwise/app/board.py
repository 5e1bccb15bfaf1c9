"""The local page in a browser: plans, runs, benches and findings."""

from collections.abc import Callable
from pathlib import Path

from shardwise.app.check import check_texts
from shardwise.app.listen import listen
from shardwise.errors import MachineError


def board(
    folder: str | Path = ".",
    *,
    host: str = "127.0.0.1",
    port: int = 8100,
    token: str | None = None,
    show: Callable[[str], None] = print,
) -> None:
    """Serve the page until a signal ends it. It reads `folder` and plans; it starts and changes nothing.

    Args:
        folder: holds runs and benches, itself or in its subfolders. Nothing outside of it is read.
        host: the address; others than this machine's need a token.
        port: 0 takes a free one.
        token: the password that a browser asks for; None: none.
        show: called with the address.

    Raises what `listen` raises, JobError without such a folder, MachineError where a library is missing.
    """
    fix = "set SHARDWISE_TOKEN, or add --token; a browser asks for it as the password"
    with listen(host, port, token=token, use="read your runs", fix=fix) as listener:
        try:
            from shardwise import web
            from shardwise.board.folder import Folder
            from shardwise.board.server import serve
        except ImportError as error:
            what, fix = f"{error.name} is not installed", "pip install 'shardwise[board]'"
            raise MachineError(what, where="board", fix=fix) from None
        found, password = Folder(Path(folder)), ", and the password is the token" if token else ""
        show(f"{found.root} on http://{web.place(listener)}/ (Ctrl-C ends it{password})")
        serve(found, listener, check=check_texts, token=token or None)
