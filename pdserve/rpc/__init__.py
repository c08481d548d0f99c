"""gRPC at the edges: generated stubs in `v1`, channel settings, error mapping and message conversion."""
