"""`shardwise board [FOLDER]`: runs, plans and findings on a local page."""

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import Host, Port, Token, say

FOLDER = typer.Argument(metavar="FOLDER", help="Holds runs and benches, or folders of them.")


def board(
    folder: Annotated[Path, FOLDER] = Path(), host: Host = "127.0.0.1", port: Port = 8100, token: Token = None
) -> None:
    """Show runs, benches, plans and findings in a browser.

    The page only reads: it plans, and starts or changes nothing. Ctrl-C ends it.
    """
    from shardwise.app.board import board as show

    show(folder, host=host, port=port, token=token, show=say)
