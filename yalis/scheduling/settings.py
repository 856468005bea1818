"""The scheduler settings that follow from an EngineConfig, for the engine and for the planner's virtual clock."""

from __future__ import annotations

from yalis.config import EngineConfig
from yalis.scheduling.scheduler import SchedulerConfig
from yalis.spec import ModelSpec


def scheduler_settings(
    config: EngineConfig, spec: ModelSpec, on_gpu: bool, max_model_len: int, block_size: int
) -> SchedulerConfig:
    """Return the settings of the scheduler of one replica.

    On a GPU the host schedules the next step while this one runs; on a CPU there is nothing to overlap. In a pipeline
    each stage has a step in flight, and a sequence is scheduled again once its token has come back from the last
    stage.
    """
    pipelined = config.pp > 1
    if pipelined:
        max_in_flight = config.micro_batches or config.pp
    else:
        max_in_flight = 2 if on_gpu else 1
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        max_in_flight=max_in_flight,
        feed_on_device=on_gpu and not pipelined,
        recompute_at=spec.rope.switch_at,
        prefix_reuse=config.prefix_reuse,
        pipelined=pipelined,
    )
