"""The OpenAI-compatible HTTP API, beside gRPC in the router's process and in front of the same core."""
