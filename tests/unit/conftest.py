"""Unit tests run on the CPU, where Triton's kernels run in its interpreter, chosen before triton is imported.

A shell starts background jobs with Ctrl-C ignored, which processes inherit; tests of Ctrl-C need it heard.
"""

import os
import signal

os.environ["TRITON_INTERPRET"] = "1"
os.environ["YALIS_PEERS"] = ""  # peers in this process, whatever environment lies beside the repository
signal.signal(signal.SIGINT, signal.default_int_handler)
