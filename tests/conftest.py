"""Settings of all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# How long one example takes says more about the machine than about the code; the time limit of a test is pytest's.
settings.register_profile("pdserve", deadline=None)
settings.load_profile("pdserve")

# Processes of pytest-xdist ignore it, and what they start would as well; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
