"""Moves the memories to vectors of another width or model: dump, drop, recreate, reload.

    dump      every row but its vector, to a file that is read back and compared
    recreate  an empty table of the new width, as the next version of the same table
    reload    the rows of the dump, newest first, without vectors
    index     full-text and scalar indices anew
    verify    each row against the dump

Nothing is changed before the dump is proven and the marker stands; from then on
a migration that was cut off goes on where it was, whatever cut it off. With the
same width nothing is dropped: in place of recreate and reload, `reset` takes
the vectors out of the rows. Vectors come back by the worker.
"""

from warmstart.migrate.migration import Books, Migrator, Result
from warmstart.migrate.plan import Plan

__all__ = ["Books", "Migrator", "Plan", "Result"]
