from warmstart.store.slim import without_remote_catalogs

without_remote_catalogs()
