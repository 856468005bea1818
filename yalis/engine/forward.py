"""The computation of a step on one rank, the same whether it runs eagerly or is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from yalis import env
from yalis.attention.base import AttentionBackend, ForwardBatch, LayerCache
from yalis.engine.step_layouts import StepInputs
from yalis.kernels import ops
from yalis.kernels.pdl import enable_pdl, pdl_enabled
from yalis.models.decoder import Decoder
from yalis.parallel.plan import Grid
from yalis.sampling.sampled_tokens import NO_TOKEN


@dataclass(frozen=True)
class StepResult:
    """The output of a step. The next step may overwrite its tensors."""

    out: Tensor  # logits [R, vocabulary share], or hidden states [T, hidden] on all but the last pipeline stage
    sampling_slots: Tensor  # [R], the rows of last_tokens that the sampled tokens belong to
    tokens: Tensor | None = None  # [R], the token of each row if a recorded step sampled it; last_tokens has it then
    #: [N, hidden], the input of the LM head in the rows that score prompt tokens; their logits are computed in chunks
    scored: Tensor | None = None


class ModelForward:
    """Runs the model of this rank on batches."""

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        last_tokens: Tensor,
        pdl: bool = False,
        picks: bool = False,
        grid: Grid | None = None,
    ) -> None:
        """`last_tokens` [max_num_seqs + 1]: the token last sampled for each request slot, and a row for padding.

        `pdl`: use programmatic dependent launch. `picks`: recorded steps pick the argmax of each row, over the ranks
        of `grid` that share the vocabulary.
        """
        self.model, self.backend, self.last_tokens = model, backend, last_tokens
        self.kv_caches: Sequence[LayerCache] = ()  # set once they are allocated
        self._pdl, self.picks, self._grid = pdl, picks, grid or Grid()

    @property
    def samples(self) -> bool:
        """Whether recorded steps can sample at random, which needs the logits of the whole vocabulary."""
        whole = self._grid.tp_group.size == 1
        return self.picks and whole and (env.experimental() or self.device.type == "cpu")

    @property
    def device(self) -> torch.device:
        return self.last_tokens.device

    def run(self, batch: ForwardBatch) -> Tensor:
        """Return the logits of a batch, or its hidden states on all but the last pipeline stage."""
        out: Tensor = self.model(batch, self.kv_caches, self.backend)
        return out

    def run_scoring(self, batch: ForwardBatch, sampling: Tensor, scored: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the sampling rows, and the input of the LM head in the scored rows [N, hidden].

        `sampling`, `scored`: indices into the batch's logit rows. On all but the last pipeline stage, returns hidden
        states and None.
        """
        with torch.inference_mode():
            x = self.model.run_layers(batch, self.kv_caches, self.backend)
            if self.model.head is None:
                return x, None
            return self.model.compute_logits(x.index_select(0, sampling)), x.index_select(0, scored)

    def run_recorded(self, inputs: StepInputs, may_use_last_tokens: bool) -> tuple[Tensor, Tensor | None]:
        """Run what a CUDA graph holds: the model and, where possible, the choice of tokens before and after it.

        Returns the output of the model and the picked tokens [R].
        """
        batch, sampling_slots = inputs
        with self.launch_mode():
            if may_use_last_tokens:  # then every token has a logit row, so R == T
                token_ids = ops.use_last_tokens(batch.token_ids, self.last_tokens, sampling_slots)
                batch = replace(batch, token_ids=token_ids)
            out = self.run(batch)
            if not self.picks:
                return out, None
            return out, self._pick_greedy(out, sampling_slots)

    def _pick_greedy(self, logits: Tensor, sampling_slots: Tensor) -> Tensor:
        """Return the argmax of each row [R] over the whole vocabulary, and store it in last_tokens."""
        from yalis.kernels import token_feedback

        group, pdl = self._grid.tp_group, pdl_enabled()
        if group.size == 1:
            return token_feedback.pick_greedy(logits, self.last_tokens, sampling_slots, NO_TOKEN, pdl)
        first = self._grid.vocabulary(self.model.spec.vocab_size).start
        best = token_feedback.find_best(logits, group.rank, group.size, first, pdl)
        best = group.all_reduce(best)
        return token_feedback.pick_best(best, self.last_tokens, sampling_slots, NO_TOKEN, pdl)

    def sample_recorded(self, out: Tensor, best_ids: Tensor, random: Tensor, sampling_slots: Tensor) -> tuple[Tensor]:
        """Sample from the output of run_recorded(), some rows at random, and return the tokens [R].

        `best_ids`: the tokens that it picked. `random` [6, R]: the columns of kernels/sampling.py.
        """
        from yalis.kernels import sampling

        with self.launch_mode():
            tokens = sampling.sample(out, best_ids, random, NO_TOKEN, self.last_tokens, sampling_slots, pdl_enabled())
        return (tokens,)

    def launch_mode(self) -> AbstractContextManager[None]:
        """Return a context in which kernels are launched with PDL if this model uses it."""
        return enable_pdl(self.device) if self._pdl else nullcontext()

    @torch.inference_mode()
    def make_hidden(self, tokens: int) -> Tensor | None:
        """Return a buffer [tokens, hidden] for the output of the previous pipeline stage; None on the first stage."""
        if self.model.embedding is not None:
            return None
        return torch.zeros(tokens, self.model.hidden, dtype=self.model.dtype, device=self.device)
