"""The decoder of all model families; a ModelSpec selects what differs between them.

Shapes: T tokens of all sequences of a step, concatenated · R rows that get logits · hidden: this rank's shard of the
hidden size, which is split over the grid's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from yalis.attention.base import AttentionBackend, ForwardBatch, LayerCache
from yalis.attention.step import StepAttention
from yalis.comm.allreduce_op import AllReduceOp
from yalis.kernels import ops
from yalis.layers.attention import SelfAttention
from yalis.layers.mlp import MLPS
from yalis.layers.rotary import RopeRows, Rotary
from yalis.parallel.embedding import LMHead, VocabEmbedding
from yalis.parallel.norm import NORMS, Norm, norm_reduces
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid
from yalis.parallel.weights import ParallelLayer, TensorSource
from yalis.spec import ModelSpec

EMBEDDING = "model.embed_tokens"


class Block(nn.Module):
    """A transformer layer: x + attention(norm(x)), then x + mlp(norm(x)).

    The spec says which inputs and outputs of attention and MLP have norms, and whether both have the same input.
    Granite multiplies the outputs by a constant.

    The addition is fused with the norm that follows it. A block therefore returns the output of its MLP and the
    residual that it has yet to be added to, and the next block starts from both. With tensor parallelism this output
    may be the summand of this rank (`norm_reduces`): then the norm sums over the ranks too.
    """

    def __init__(self, spec: ModelSpec, grid: Grid, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}"

        def norm(name: str | None) -> Norm | None:
            return None if name is None else NORMS[spec.norm](grid, f"{prefix}.{name}", spec, dtype, device)

        self.attention_norm, self.attention_out_norm = (
            norm(spec.block_norms.attention),
            norm(spec.block_norms.attention_out),
        )
        self.mlp_norm, self.mlp_out_norm = norm(spec.block_norms.mlp), norm(spec.block_norms.mlp_out)
        self.attention = SelfAttention(spec, grid, layer, f"{prefix}.self_attn", dtype, device)
        self.mlp = MLPS[spec.mlp_of(layer)](spec, grid, f"{prefix}.mlp", dtype, device)
        self.parallel, self.residual_multiplier = spec.parallel_block, spec.residual_multiplier
        self.partial = norm_reduces(spec, grid)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: RopeRows,
        cache: LayerCache,
        step: StepAttention,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual) of the next block, [T, hidden] each; their sum is the layer's output (with `partial`,
        the sum of every rank's x and the residual).

        `residual` is None in the first block, which has only x. `rows` [R] int64: compute the output of these tokens
        alone. The other tokens only write their keys and values.
        """
        normed, residual = _add_norm(self.attention_norm, x, residual, self.partial)
        x = self.attention(normed, rope, cache, step, rows)
        if self.attention_out_norm is not None:
            x = self.attention_out_norm(x)
        if self.residual_multiplier != 1.0:
            x = x * self.residual_multiplier
        if rows is not None:
            residual = ops.gather_rows(residual, rows)
        if self.parallel:
            residual = ops.add(residual, x)
            if rows is not None:
                normed = ops.gather_rows(normed, rows)
        else:
            normed, residual = _add_norm(self.mlp_norm, x, residual, self.partial)
        del x  # so that the MLP can reuse its memory
        x = self.mlp(normed, step.batch.kv_slots, rows)
        if self.mlp_out_norm is not None:
            x = self.mlp_out_norm(x)
        if self.residual_multiplier != 1.0:
            x = x * self.residual_multiplier
        return x, residual


def _add_norm(norm: Norm | None, x: Tensor, residual: Tensor | None, partial: bool) -> tuple[Tensor, Tensor]:
    """Return (the norm of x + residual, x + residual), or x + residual twice where there is no norm."""
    if norm is not None:
        return norm.add_norm(x, residual, partial)
    x = x if residual is None else ops.add(residual, x)
    return x, x


class Decoder(nn.Module):
    """The layers of one pipeline stage, with the embedding on the first and the head on the last."""

    def __init__(
        self, spec: ModelSpec, grid: Grid, stage: Stage, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec, self.dtype, self.hidden = spec, dtype, len(grid.hidden(spec.hidden_size))
        #: Prepares the attention of a step; models/compile.py replaces it for compiled blocks.
        self.prepare_attention: Callable[[AttentionBackend, ForwardBatch], StepAttention] = StepAttention
        # Rounded to the compute dtype, as in transformers' Gemma 2. Granite's 12 is exact in every dtype.
        scale = spec.embed_scale
        self.embed_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        vocab, hidden = spec.vocab_size, spec.hidden_size
        #: One for each of `spec.ropes`, and the index in it for each layer of this stage.
        self.rotary = nn.ModuleList([Rotary(rope, max_len, dtype, device) for rope in spec.ropes])
        self.embedding = VocabEmbedding(grid, EMBEDDING, vocab, hidden, dtype, device) if stage.first else None
        layers = stage.layers(spec.num_layers)
        self.rope_index = [spec.ropes.index(spec.layer_ropes[layer]) for layer in layers]
        self.layers = nn.ModuleList(Block(spec, grid, layer, dtype, device) for layer in layers)
        self.partial, self.all_reduce = norm_reduces(spec, grid), AllReduceOp(grid.row_group)
        self.norm: Norm | None = None
        self.head: LMHead | None = None
        if stage.last:
            self.norm = NORMS[spec.norm](grid, "model.norm", spec, dtype, device)
            tied = self.embedding if spec.tie_embeddings else None
            name = EMBEDDING if spec.tie_embeddings else "lm_head"
            self.head = LMHead(grid, name, vocab, hidden, dtype, device, tied)

    def load(self, source: TensorSource) -> None:
        """Load the weights. Every layer reads its own slices of the checkpoint."""
        for module in self.modules():
            if isinstance(module, ParallelLayer):
                module.load(source)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], backend: AttentionBackend) -> Tensor:
        """Return logits [R, vocabulary shard], or on all but the last pipeline stage hidden states [T, hidden]."""
        x = self.run_layers(batch, caches, backend)
        return x if self.head is None else self.compute_logits(x)

    @torch.inference_mode()
    def run_layers(self, batch: ForwardBatch, caches: Sequence[LayerCache], backend: AttentionBackend) -> Tensor:
        """Return the input of the head [R, hidden], or on all but the last pipeline stage hidden states [T, hidden].

        The first stage starts from the batch's token ids, the others from its hidden states.
        """
        if self.embedding is not None:
            x: Tensor = self.embedding(batch.token_ids)
            if self.embed_scale is not None:
                x = x * self.embed_scale
        else:
            assert batch.hidden is not None, "all stages but the first start from hidden states"
            x = batch.hidden
        ropes: list[RopeRows] = [rotary(batch.rope_rows) for rotary in self.rotary]
        step = self.prepare_attention(backend, batch)
        # After the last layer's attention, only the tokens that get logits are computed. In a decode step all do.
        skip_rows = self.head is not None and batch.logit_rows.shape[0] < x.shape[0]
        residual = None
        for layer, (block, cache) in enumerate(zip(self.layers, caches, strict=True), start=1):
            rows = batch.logit_rows if skip_rows and layer == len(self.layers) else None
            x, residual = block(x, residual, ropes[self.rope_index[layer - 1]], cache, step, rows)
        if self.norm is not None:
            return self.norm.add_norm(x, residual, self.partial)[0]
        if residual is None:
            return x
        return ops.add(residual, self.all_reduce(x) if self.partial else x)

    @torch.inference_mode()
    def compute_logits(self, x: Tensor) -> Tensor:
        """[R, hidden] of the last pipeline stage to logits [R, vocabulary shard]."""
        assert self.head is not None, "only the last stage has a head"
        logits: Tensor = self.head(x)
        if self.spec.logits_scaling != 1.0:
            logits = logits / self.spec.logits_scaling
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
