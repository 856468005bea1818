"""Checks of a host that need its GPUs: access between them, and their clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from yalis.study.cluster.finding import Finding
from yalis.study.cluster.rank_checks import found, impossible, run_command, warning

_NO_GPU = "torch sees no GPU, so this cannot be found out"
#: Fields of nvidia-smi, in the order of `read_clocks`.
_FIELDS = "index,clocks.max.sm,clocks.sm,clocks_throttle_reasons.hw_slowdown,power.limit"


def check_gpus() -> Iterator[Finding]:
    """Yield the findings about the GPUs that this rank sees."""
    if not torch.cuda.is_available():
        yield impossible("peer access", _NO_GPU)
        yield impossible("clocks", _NO_GPU)
        return
    count = torch.cuda.device_count()
    yield check_peer_access(
        [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    )
    yield read_clocks(run_command(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader"]))


def check_peer_access(matrix: Sequence[Sequence[bool]]) -> Finding:
    """`matrix[i][j]`: whether GPU i can access the memory of GPU j."""
    if len(matrix) == 1:
        return impossible("peer access", "this rank sees one GPU; let the ranks of a host see all of its GPUs")
    without = [f"{i} to {j}" for i, row in enumerate(matrix) for j, access in enumerate(row) if not access]
    if without:
        return warning(
            "peer access", f"none from GPU {', '.join(without)}; all-reduces on this host then fail in nvrar"
        )
    return found("peer access", f"between all {len(matrix)} GPUs")


def read_clocks(text: str) -> Finding:
    """Check the output of nvidia-smi for GPUs that are slowed down."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 4]
    if not rows:
        return impossible("clocks", "nvidia-smi does not run here")
    slow = [row[0] for row in rows if row[3] == "Active"]
    limits = ", ".join(sorted({f"up to {row[1]}, {row[4]}" for row in rows}))
    if slow:
        return warning("clocks", f"GPU {', '.join(slow)} is slowed down by heat or power ({limits}); report the node")
    return found("clocks", limits)
