"""The one decoder: every family is this model with other flags.

Shapes: T tokens of a step, packed · R rows that get logits · hidden is this rank's part where c > 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor, nn

from yalis.attention.base import AttentionBackend, ForwardBatch, LayerCache
from yalis.attention.step import StepAttention
from yalis.kernels import ops
from yalis.layers.attention import SelfAttention
from yalis.layers.mlp import GatedMLP
from yalis.layers.rotary import Rotary
from yalis.parallel.embedding import LMHead, VocabEmbedding
from yalis.parallel.norm import RMSNorm
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid
from yalis.parallel.weights import ParallelLayer, TensorSource
from yalis.spec import ModelSpec

EMBEDDING = "model.embed_tokens"

_numbers = count()


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); Gemma 2 norms each branch's output as well.

    What a branch gives is added by the norm that follows, so x and `branch`, the last one's, go from block to block.
    """

    def __init__(self, spec: ModelSpec, grid: Grid, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(grid, f"{prefix}.{name}", spec.hidden_size, spec.norm_eps, spec.norm_offset, dtype, device)

        self.attention_norm = norm("input_layernorm")
        self.attention = SelfAttention(spec, grid, layer, f"{prefix}.self_attn", dtype, device)
        self.mlp = GatedMLP(spec, grid, f"{prefix}.mlp", dtype, device)
        self.attention_out_norm: RMSNorm | None = None
        self.mlp_out_norm: RMSNorm | None = None
        if spec.sandwich_norms:
            self.mlp_norm = norm("pre_feedforward_layernorm")
            self.attention_out_norm = norm("post_attention_layernorm")
            self.mlp_out_norm = norm("post_feedforward_layernorm")
        else:
            self.mlp_norm = norm("post_attention_layernorm")

    def forward(
        self,
        x: Tensor,
        branch: Tensor | None,
        rope: tuple[Tensor, Tensor],
        cache: LayerCache,
        step: StepAttention,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """From hidden states x and what the block before has to add to them (the first: nothing), to the same of this.

        `rows` [R] int64: the tokens anyone asks for, if not all. Others leave keys and values, and no more.
        """
        normed, x = self.attention_norm.of_sum(x, branch)
        branch = self.attention(normed, rope, cache, step, rows)
        if self.attention_out_norm is not None:
            branch = self.attention_out_norm(branch)
        normed, x = self.mlp_norm.of_sum(x if rows is None else ops.take(x, rows), branch)
        del branch  # its memory is the MLP's
        branch = self.mlp(normed)
        if self.mlp_out_norm is not None:
            branch = self.mlp_out_norm(branch)
        return x, branch


class Decoder(nn.Module):
    """The layers of one pipeline stage, with the embedding on the first and the head on the last."""

    def __init__(
        self, spec: ModelSpec, grid: Grid, stage: Stage, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec, self.dtype, self.hidden = spec, dtype, len(grid.hidden(spec.hidden_size))
        self.number = next(_numbers)  # among the models of this process
        # Rounded to the compute dtype, as the reference multiplies.
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
        """Every layer reads its own slices; `source` never learns which."""
        for module in self.modules():
            if isinstance(module, ParallelLayer):
                module.load(source)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], backend: AttentionBackend) -> Tensor:
        """Logits [R, vocabulary share] of the rows the batch asks for; before the last stage hidden states [T, hidden].

        The first stage starts from token ids, the others from the hidden states that the batch carries.
        """
        if self.embedding is not None:
            x: Tensor = self.embedding(batch.token_ids)
            if self.embed_scale is not None:
                x = x * self.embed_scale
        else:
            assert batch.hidden is not None, "a later stage starts from hidden states"
            x = batch.hidden
        rope = self.rotary.rows(batch.rope_rows)
        step = StepAttention(backend, batch, self.number)
        # Behind the last layer's attention only tokens that get logits go on. In a decode step those are all.
        some = self.head is not None and batch.logit_rows.shape[0] < x.shape[0]
        branch = None
        for at, (block, cache) in enumerate(zip(self.layers, caches, strict=True), start=1):
            rows = batch.logit_rows if some and at == len(self.layers) else None
            x, branch = block(x, branch, rope, cache, step, rows)
        if self.norm is None or self.head is None:
            return x if branch is None else ops.add(x, branch)
        logits: Tensor = self.head(self.norm.of_sum(x, branch)[0])
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
