"""`python -m ops deploy`: what the Makefile calls."""

from ops.cli import main

main()
