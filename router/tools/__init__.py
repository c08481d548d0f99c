"""Calls of functions: what a client offers, how the model is told, and how its calls are found in its output."""
