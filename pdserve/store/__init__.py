"""Redis: the worker registry, the request records, and a server for local use."""
