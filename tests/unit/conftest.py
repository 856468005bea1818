"""Unit tests run on the CPU, with Triton kernels in the interpreter; it must be chosen before triton is imported.

Shells start background jobs with SIGINT ignored, which child processes inherit; tests of Ctrl-C need it handled.
Examples of hypothesis have no time limit: other programs may run on the machine.
"""

import os
import signal

from hypothesis import HealthCheck, settings

os.environ["TRITON_INTERPRET"] = "1"
os.environ["YALIS_PEERS"] = ""  # peer engines run in this process, even if `make peers` has made an environment
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("yalis", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("yalis")
