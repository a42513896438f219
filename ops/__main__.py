"""`python -m ops deploy`: what the Makefile calls."""

from gevent import monkey

# pyinfra waits by gevent, and so has everything that is imported after it to
monkey.patch_all()

from ops.cli import main  # noqa: E402

main()
