"""Settings of all tests."""

from __future__ import annotations

import signal

# A shell starts background jobs with Ctrl-C ignored, which the commands that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
