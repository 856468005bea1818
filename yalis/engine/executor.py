"""Decides for each packed step whether to replay a recording or to run eagerly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor

from yalis.attention.base import AttentionBackend, LayerCache
from yalis.config import EngineConfig
from yalis.engine.forward import ModelForward, StepResult
from yalis.engine.oom import explain_oom, step_does_not_fit
from yalis.engine.packing import PackedStep, StepKind
from yalis.engine.recording import CpuRecorder, CudaGraphRecorder, StepRecorder
from yalis.engine.step_layouts import StepLimits
from yalis.models.decoder import Decoder
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid


class StepExecutor:
    """Runs steps, replayed or eagerly."""

    def __init__(self, config: EngineConfig, forward: ModelForward, recorder: StepRecorder) -> None:
        self._config, self._forward, self.recorder = config, forward, recorder
        self.replays = 0  # steps that were replayed
        self.padding_tokens = 0  # that were computed in them only to fill up a recorded size

    @property
    def graph_bytes(self) -> int:
        """GPU memory held by CUDA graphs."""
        return self.recorder.nbytes

    def set_kv_caches(self, caches: Sequence[LayerCache]) -> None:
        """Use these KV caches, one for each layer, from now on."""
        self._forward.kv_caches = caches

    def run(self, step: PackedStep, hidden: Tensor | None = None) -> StepResult:
        """Run a step. `hidden` [T, hidden]: the output of the previous pipeline stage."""
        recorded = self.recorder.find(step)
        if recorded is None:
            return self._run_eager(step, hidden)
        self.replays += 1
        self.padding_tokens += recorded.num_tokens - step.num_tokens
        return recorded.replay(step, hidden)

    def _run_eager(self, step: PackedStep, hidden: Tensor | None) -> StepResult:
        forward = self._forward
        with forward.launch_mode():
            batch, sampling_slots = step.to_batch(forward.device, forward.last_tokens, hidden)
            if step.kind is StepKind.SCORING:
                out, scored = forward.run_scoring(batch, *step.split_logit_rows(forward.device))
                return StepResult(out, sampling_slots, scored=scored)
            return StepResult(self.recorder.run(step, batch), sampling_slots)

    def dry_run(self, step: PackedStep) -> StepResult:
        """Run a step eagerly, from hidden states of zeros if this is not the first pipeline stage."""
        return self._run_eager(step, self._forward.make_hidden(step.num_tokens))

    def measure_graphs(self) -> int:
        """Return the bytes of GPU memory that warm_up() will need for CUDA graphs."""
        return self.recorder.measure()

    def warm_up(self, steps: Iterable[PackedStep], block_bytes: int) -> None:
        """Run these steps and capture all CUDA graphs, so that no request waits for a compiler.

        Does nothing if steps are not captured ahead. The steps may write into any KV block. `block_bytes`: size of a KV
        block, for the advice when memory runs out.
        """
        if not self.recorder.captures_ahead:
            return
        device = self._forward.device
        for step in steps:
            explain = partial(
                step_does_not_fit, config=self._config, device=device,
                tokens=step.num_tokens, sequences=step.num_sequences, block_bytes=block_bytes,
            )  # fmt: skip
            with explain_oom(device, explain):
                self.dry_run(step)
        self.recorder.capture_all(block_bytes)

    def release_graphs(self) -> None:
        """Drop all CUDA graphs, which keep communicators alive."""
        self.recorder.clear()


def make_executor(
    config: EngineConfig,
    model: Decoder,
    backend: AttentionBackend,
    grid: Grid,
    stage: Stage,
    last_tokens: Tensor,
    limits: StepLimits,
) -> StepExecutor:
    """Return an executor that records steps if the device, the attention backend and the communicators allow it.

    `last_tokens` [max_num_seqs + 1]: the token last sampled for each request slot, and a row for padding.
    """
    on_cpu = last_tokens.device.type == "cpu"
    recordable = backend.capturable and grid.capturable and not config.eager
    if on_cpu:  # a replay buffer holds native calls, and compiled blocks make others
        recordable = recordable and not config.compile
    if on_cpu or not recordable:
        forward = ModelForward(model, backend, last_tokens)
        recorder = CpuRecorder(forward, limits.max_blocks) if recordable else StepRecorder(forward)
        return StepExecutor(config, forward, recorder)
    # With tp 1 a rank has the logits of the whole vocabulary, so the graph can pick the argmax, also on the last
    # pipeline stage. PDL is used only if the replica has one rank: between ranks other streams carry data too.
    single = grid.tp_group.size == 1
    forward = ModelForward(model, backend, last_tokens, pdl=single and stage.count == 1, greedy=single and stage.last)
    return StepExecutor(config, forward, CudaGraphRecorder(forward, config, limits))
