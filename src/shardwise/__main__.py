"""`python -m shardwise` is the `shardwise` command."""

from shardwise.cli import run

if __name__ == "__main__":
    run()
