"""Traces and the flight recorder: what a process remembers, or tells a collector, of single requests and steps."""
