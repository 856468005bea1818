"""Unit tests run on the CPU, where Triton's kernels run in its interpreter, chosen before triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
