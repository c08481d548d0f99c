"""The router: public API, placement, retries. Starts without torch."""
