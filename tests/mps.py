"""The daemon under which kernels of several processes run at once; without it they take turns of milliseconds."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class Mps:
    def __init__(self, folder: Path) -> None:
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}

    def start(self) -> None:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **self.environment}, check=True)

    def stop(self) -> None:
        control, everything = ["nvidia-cuda-mps-control"], {**os.environ, **self.environment}
        subprocess.run(control, env=everything, input="quit -t 1", text=True, timeout=60, check=False)
