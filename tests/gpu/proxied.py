"""Runs ranks of one GPU over csrc/test_transport, so that NVSHMEM's puts go through its proxy thread.

`python -m tests.gpu.proxied FOLDER COMMAND ...` builds the plugin in FOLDER and runs a command with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from yalis.comm.nvrar.nvshmem import find_nvshmem

SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "test_transport"
SONAME = "nvshmem_transport_libfabric.so.3"


def build_plugin(folder: Path) -> Path:
    """Build the plugin in this folder and return its path."""
    nvshmem = find_nvshmem()
    assert nvshmem is not None
    out = folder / SONAME
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{nvshmem / 'include'}"]
    command += [str(SOURCES / "plugin.cpp"), "-o", str(out), f"-Wl,-soname,{SONAME}", "-ldl", "-lrt", "-lpthread"]
    subprocess.run(command, check=True, timeout=200)
    return out


def environment(plugin: Path, counts: Path, ranks_per_node: int = 1, **settings: int) -> dict[str, str]:
    """Return the variables of ranks that use the plugin. `settings`: see plugin.cpp, such as DELAY_US=5."""
    variables = {f"TESTNET_{name}": str(value) for name, value in settings.items()}
    apart = {"NVSHMEM_DISABLE_P2P": "1"} if ranks_per_node == 1 else {"TESTNET_RANKS_PER_NODE": str(ranks_per_node)}
    return {
        **variables,
        **apart,
        "TESTNET_COUNTS": str(counts),
        "LD_PRELOAD": str(plugin),
        "NVSHMEM_REMOTE_TRANSPORT": "libfabric",
        # The plugin copies with the CUDA driver, which a kernel that is loaded lazily blocks while another one waits.
        "CUDA_MODULE_LOADING": "EAGER",
        # More connections exhaust MPS with four ranks.
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }


def read_counts(folder: Path) -> list[dict[str, int]]:
    """Return the counters of every rank. Proves that traffic went through the transport."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    counts = folder / "counts"
    counts.mkdir(parents=True, exist_ok=True)
    for path in counts.glob("*.json"):
        path.unlink()
    variables = environment(build_plugin(folder), counts)
    done = subprocess.run(sys.argv[2:], env={**variables, **os.environ}, check=False)
    for rank, count in enumerate(read_counts(counts)):
        print(f"rank {rank}: {count}", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
