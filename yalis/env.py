"""The only reader of os.environ."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where fetched models and built files are kept: $YALIS_CACHE, else $XDG_CACHE_HOME/yalis, else ~/.cache/yalis."""
    if own := os.environ.get("YALIS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "yalis"


def log_level() -> str:
    return os.environ.get("YALIS_LOG", "warning")


def rank() -> int:
    """This process's rank under torchrun, srun or mpirun; 0 without a launcher."""
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def triton_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, which works on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
