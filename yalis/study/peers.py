"""Other engines, measured in the same run on the same tokens, so that a ratio compares like with like."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from yalis import env
from yalis.registry import Registry
from yalis.study.bandwidth import synchronize


@dataclass(frozen=True)
class Timing:
    """One greedy run of a batch: when each token of the whole batch was there, in seconds from the start."""

    first_token: float
    steps: list[float]  # seconds of each decode step after the first token
    total: float
    tokens: list[list[int]]  # [batch][output_len]
    host: float | None = None  # seconds of the host's own work for a decode step, where they are known


@dataclass(frozen=True)
class PeerSetup:
    """What a peer must match to be compared."""

    path: Path  # a folder, or a .gguf file
    random_weights: bool
    dtype: torch.dtype
    device: torch.device
    longest: int = 2048  # tokens of a sequence
    batch: int = 64  # sequences at a time
    max_batch_tokens: int = 2048  # tokens of a step


class Peer(Protocol):
    name: str
    version: str

    def run(self, prompts: list[list[int]], output_len: int) -> Timing: ...


class TransformersPeer:
    """transformers' own generate, greedy, with its default cache."""

    name = "transformers"

    def __init__(self, setup: PeerSetup) -> None:
        import transformers

        self.version = transformers.__version__
        self._device = setup.device
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars, which ask nobody whether to show
            self._model = _load(setup)
        # No end token at all: one that is only suppressed would change which tokens are chosen.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    def run(self, prompts: list[list[int]], output_len: int) -> Timing:
        import transformers

        stamps: list[float] = []

        class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                synchronize(input_ids.device)
                stamps.append(time.perf_counter())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        ids = torch.tensor(prompts, device=self._device)
        synchronize(self._device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
            )
        synchronize(self._device)
        total = time.perf_counter() - start
        steps = [after - before for before, after in pairwise(stamps)]
        return Timing(stamps[0] - start, steps, total, out[:, ids.shape[1] :].tolist())


def _load(setup: PeerSetup) -> Any:
    import transformers

    auto = transformers.AutoModelForCausalLM
    if setup.random_weights:
        config = transformers.AutoConfig.from_pretrained(str(setup.path))
        with setup.device:
            return auto.from_config(config, dtype=setup.dtype).eval()
    if setup.path.suffix == ".gguf":
        import accelerate  # noqa: F401  (without it transformers reads no GGUF file)

        model = auto.from_pretrained(str(setup.path.parent), gguf_file=setup.path.name, dtype=setup.dtype)
    else:
        model = auto.from_pretrained(str(setup.path), dtype=setup.dtype)
    return model.to(setup.device).eval()


class VllmPeer:
    """vLLM's offline engine, greedy. It gives no step of its own, so the first token is timed alone and a step is the
    mean of the others."""

    name = "vllm"

    def __init__(self, setup: PeerSetup) -> None:
        env.prepare_vllm()
        import vllm

        self.version, self._vllm = vllm.__version__, vllm
        share = 0.9
        if setup.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(setup.device)
            share = min(share, 0.95 * free / total)
        self._folder = tempfile.TemporaryDirectory()
        self._llm = vllm.LLM(
            model=str(_model_folder(setup.path, Path(self._folder.name))),
            load_format="dummy" if setup.random_weights else "auto",
            skip_tokenizer_init=True,
            dtype=str(setup.dtype).removeprefix("torch."),
            max_model_len=setup.longest + 1,
            max_num_seqs=setup.batch,
            max_num_batched_tokens=max(setup.max_batch_tokens, setup.longest + 1),
            gpu_memory_utilization=share,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def run(self, prompts: list[list[int]], output_len: int) -> Timing:
        first, tokens = self._generate(prompts, 1)
        total = first
        if output_len > 1:
            total, tokens = self._generate(prompts, output_len)
        return Timing(first, even_steps(first, total, output_len - 1), total, tokens)

    def _generate(self, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        sampling = self._vllm.SamplingParams(
            max_tokens=count, min_tokens=count, ignore_eos=True, temperature=0.0, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, [list(output.outputs[0].token_ids) for output in outputs]


def even_steps(first: float, total: float, count: int) -> list[float]:
    """So many steps between the first token and the last, where only those two are known."""
    if count and total <= first:
        raise ValueError(f"{count + 1} tokens took no longer than the first of them; give more output tokens")
    return [(total - first) / count] * count if count else []


def _model_folder(path: Path, spare: Path) -> Path:
    """A folder with a config.json; a config that stands alone is copied into `spare`."""
    if path.is_dir():
        return path
    if path.suffix != ".json":
        raise ValueError(f"vLLM takes a folder or a config, not {path.name}")
    shutil.copy(path, spare / "config.json")
    return spare


PEERS: Registry[type[Peer]] = Registry(
    "peer", {"transformers": "yalis.study.peers:TransformersPeer", "vllm": "yalis.study.peers:VllmPeer"}
)


def start(name: str, setup: PeerSetup) -> Peer | str:
    """The peer, ready; or why it cannot run here, which is a line in the table and not the end of the benchmark."""
    peer: Any = PEERS.load(name)
    try:
        ready: Peer = peer(setup)
        return ready
    except Exception as error:
        return explain(error)


def explain(error: Exception) -> str:
    """Why a peer has no numbers; it may fail in ways of its own."""
    if isinstance(error, ImportError):
        return f"not installed: pip install {error.name}" if error.name else f"not installed ({error})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
