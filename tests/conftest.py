"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# How long one example takes says more about the machine than about the code; the time limit of a test is pytest's.
settings.register_profile("pdserve", deadline=None)
settings.load_profile("pdserve")
