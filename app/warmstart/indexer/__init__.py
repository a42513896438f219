"""What a repository's code says about itself, kept as memories: walk, symbols, assemble, state, upload.

Runs on a client's machine: nothing of the server is imported here.
"""
