"""Run by every rank of a pipeline whose stages all take the same time: each layer sleeps."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from yalis.config import EngineConfig
from yalis.engine.worker import lead_or_serve
from yalis.models.decoder import Block
from yalis.study.pipeline import PipelinePlan, measure

PROMPTS, LAYER_SECONDS = 8, 0.8  # time of one layer for all prompts


def main(model: str, out: Path) -> None:
    forward = Block.forward

    def slow(block: Block, x: Any, *rest: Any) -> Any:
        time.sleep(LAYER_SECONDS * x.shape[0] / (PROMPTS * 64))
        return forward(block, x, *rest)

    Block.forward = slow  # type: ignore[method-assign]
    config = EngineConfig(model, device="cpu", pp=4, block_size=16, kv_blocks=64)
    with lead_or_serve(config) as first:
        if first:
            result = measure(config, PipelinePlan((1, 2, 4, 8), PROMPTS, 64, warmup=1, repeats=1), "pipeline")
            out.write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
