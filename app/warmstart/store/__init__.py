from warmstart.store.allocation import bound_allocation
from warmstart.store.slim import without_remote_catalogs

bound_allocation()
without_remote_catalogs()
