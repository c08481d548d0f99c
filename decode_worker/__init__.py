"""The decode worker: takes sequences over from prefill workers and generates the rest of their tokens."""
