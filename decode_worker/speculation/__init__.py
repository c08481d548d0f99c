"""Drafts: tokens that probably come next, computed together with the token before them and kept where they are right.

A draft token is kept exactly where it is the token that was drawn in its place. Randomness is a function of seed and
position (`pdserve/engine/noise.py`), so what is drawn does not depend on whether anything was drafted: outputs are
those of plain decoding, greedy or sampled, and only their time differs.
"""
