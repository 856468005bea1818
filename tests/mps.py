"""The CUDA MPS daemon, which lets kernels of several processes run at once. Without it they are time-sliced."""

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
        command, environment = ["nvidia-cuda-mps-control"], {**os.environ, **self.environment}
        subprocess.run(command, env=environment, input="quit -t 1", text=True, timeout=60, check=False)
