"""`python -m warmstart.cli`: how a client starts a server with its own interpreter."""

from warmstart.cli import main

main(prog_name="warmstart")
