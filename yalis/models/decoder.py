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
from yalis.kernels import ops
from yalis.layers.attention import SelfAttention
from yalis.layers.mlp import MLPS
from yalis.layers.rotary import Rotary
from yalis.parallel.embedding import LMHead, VocabEmbedding
from yalis.parallel.norm import RMSNorm
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid
from yalis.parallel.weights import ParallelLayer, TensorSource
from yalis.spec import ModelSpec

EMBEDDING = "model.embed_tokens"


class Block(nn.Module):
    """A transformer layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Gemma 2 also norms the outputs of attention and MLP, and Granite multiplies them by a constant.

    The addition is fused with the norm that follows it. A block therefore returns the output of its MLP and the
    residual that it has yet to be added to, and the next block starts from both.
    """

    def __init__(self, spec: ModelSpec, grid: Grid, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(grid, f"{prefix}.{name}", spec.hidden_size, spec.norm_eps, spec.norm_offset, dtype, device)

        self.attention_norm = norm("input_layernorm")
        self.attention = SelfAttention(spec, grid, layer, f"{prefix}.self_attn", dtype, device)
        self.mlp = MLPS[spec.mlp_of(layer)](spec, grid, f"{prefix}.mlp", dtype, device)
        self.attention_out_norm: RMSNorm | None = None
        self.mlp_out_norm: RMSNorm | None = None
        if spec.sandwich_norms:
            self.mlp_norm = norm("pre_feedforward_layernorm")
            self.attention_out_norm = norm("post_attention_layernorm")
            self.mlp_out_norm = norm("post_feedforward_layernorm")
        else:
            self.mlp_norm = norm("post_attention_layernorm")
        self.residual_multiplier = spec.residual_multiplier

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: tuple[Tensor, Tensor],
        cache: LayerCache,
        step: StepAttention,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual) of the next block, [T, hidden] each; their sum is the layer's output.

        `residual` is None in the first block, which has only x. `rows` [R] int64: compute the output of these tokens
        alone. The other tokens only write their keys and values.
        """
        normed, residual = self.attention_norm.add_norm(x, residual)
        x = self.attention(normed, rope, cache, step, rows)
        if self.attention_out_norm is not None:
            x = self.attention_out_norm(x)
        if self.residual_multiplier != 1.0:
            x = x * self.residual_multiplier
        if rows is not None:
            residual = ops.gather_rows(residual, rows)
        normed, residual = self.mlp_norm.add_norm(x, residual)
        del x  # so that the MLP can reuse its memory
        x = self.mlp(normed, step.batch.kv_slots, rows)
        if self.mlp_out_norm is not None:
            x = self.mlp_out_norm(x)
        if self.residual_multiplier != 1.0:
            x = x * self.residual_multiplier
        return x, residual


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
        self.rotary = Rotary(spec.rope, max_len, dtype, device)
        self.embedding = VocabEmbedding(grid, EMBEDDING, vocab, hidden, dtype, device) if stage.first else None
        layers = stage.layers(spec.num_layers)
        self.layers = nn.ModuleList(Block(spec, grid, layer, dtype, device) for layer in layers)
        self.norm: RMSNorm | None = None
        self.head: LMHead | None = None
        if stage.last:
            self.norm = RMSNorm(grid, "model.norm", hidden, spec.norm_eps, spec.norm_offset, dtype, device)
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
        rope = self.rotary.rows(batch.rope_rows)
        step = self.prepare_attention(backend, batch)
        # After the last layer's attention, only the tokens that get logits are computed. In a decode step all do.
        skip_rows = self.head is not None and batch.logit_rows.shape[0] < x.shape[0]
        residual = None
        for layer, (block, cache) in enumerate(zip(self.layers, caches, strict=True), start=1):
            rows = batch.logit_rows if skip_rows and layer == len(self.layers) else None
            x, residual = block(x, residual, rope, cache, step, rows)
        if self.norm is None:
            return x if residual is None else ops.add(residual, x)
        return self.norm.add_norm(x, residual)[0]

    @torch.inference_mode()
    def compute_logits(self, x: Tensor) -> Tensor:
        """[R, hidden] of the last pipeline stage to logits [R, vocabulary shard]."""
        assert self.head is not None, "only the last stage has a head"
        logits: Tensor = self.head(x)
        if self.spec.logits_scaling != 1.0:
            logits = logits / self.spec.logits_scaling
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
