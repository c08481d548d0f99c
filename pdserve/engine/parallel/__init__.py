"""Tensor parallelism: one worker whose model and KV pool lie on several ranks, each a process of its own.

Rank 0 drives: it is the worker (scheduler, services, transfer), and its engine tells the followers what to compute.
"""
