"""The peer engines: `generate` of transformers and the offline engine of vLLM."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from yalis import env
from yalis.errors import YalisError
from yalis.study.bandwidth import synchronize
from yalis.study.peers.peer import PeerSetup, Timing


class TransformersPeer:
    """`generate` of transformers with its default cache. Every step is timed."""

    name = "transformers"

    def __init__(self, setup: PeerSetup) -> None:
        import transformers

        if setup.routing != "model":
            raise YalisError("transformers has no uniform routing; leave out --routing uniform, or this peer")
        self.version = transformers.__version__
        self._device = setup.device
        with contextlib.redirect_stderr(io.StringIO()):  # hides progress bars, which cannot be turned off
            self._model = _load(setup)
        # No end-of-sequence token: suppressing it instead would change which tokens are chosen.
        sampled = {"temperature": setup.temperature, "top_k": setup.top_k, "top_p": setup.top_p}
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=setup.temperature > 0, pad_token_id=0, **(sampled if setup.temperature > 0 else {})
        )

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
        config = transformers.AutoConfig.from_pretrained(str(setup.path), trust_remote_code=False)
        with setup.device:
            return auto.from_config(config, dtype=setup.dtype, trust_remote_code=False).eval()
    options = {"dtype": setup.dtype, "trust_remote_code": False}
    if setup.path.suffix == ".gguf":
        import accelerate  # noqa: F401  (transformers needs it to read GGUF files)

        model = auto.from_pretrained(str(setup.path.parent), gguf_file=setup.path.name, **options)
    else:
        model = auto.from_pretrained(str(setup.path), **options)
    return model.to(setup.device).eval()


# After a run its processes busy-wait for a second, on cores that the next engine needs.
_COOLDOWN_S = {"cpu": 1.5, "cuda": 0.0}


class VllmPeer:
    """The offline engine of vLLM.

    It does not report single steps, so a run with one output token gives the time to first token, and the step time is
    the mean over the other tokens of a full run.
    """

    name = "vllm"

    def __init__(self, setup: PeerSetup) -> None:
        env.prepare_vllm(torch.get_num_threads(), uniform_routing=setup.routing == "uniform")
        import vllm

        self.version, self._vllm = vllm.__version__, vllm
        memory: dict[str, float]
        if setup.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(setup.device)
            memory = {"gpu_memory_utilization": min(0.9, 0.95 * free / total / setup.num_peers)}
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            memory = {"kv_cache_memory_bytes": min(free // 4, 16 << 30)}
        self._folder = tempfile.TemporaryDirectory()
        self._llm = vllm.LLM(
            model=str(_model_folder(setup, Path(self._folder.name))),
            load_format="dummy" if setup.random_weights else "auto",
            skip_tokenizer_init=True,
            trust_remote_code=False,
            dtype=str(setup.dtype).removeprefix("torch."),
            max_model_len=setup.max_model_len + 1,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=max(setup.max_batch_tokens, setup.max_model_len + 1),
            enable_prefix_caching=False,
            disable_log_stats=True,
            **memory,
        )
        self._cooldown = _COOLDOWN_S[setup.device.type]
        self._sampling = {"temperature": setup.temperature, "top_k": setup.top_k, "top_p": setup.top_p}

    def run(self, prompts: list[list[int]], output_len: int) -> Timing:
        first, tokens = self._generate(prompts, 1)
        total = first
        if output_len > 1:
            total, tokens = self._generate(prompts, output_len)
        time.sleep(self._cooldown)
        return Timing(first, even_steps(first, total, output_len - 1), total, tokens)

    def _generate(self, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        sampling = self._vllm.SamplingParams(
            max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False, **self._sampling
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, [list(output.outputs[0].token_ids) for output in outputs]


def even_steps(first: float, total: float, count: int) -> list[float]:
    """Return `count` equal step times between the first token and the last."""
    if count and total <= first:
        raise ValueError(f"{count + 1} tokens took no longer than the first of them; give more output tokens")
    return [(total - first) / count] * count if count else []


def _model_folder(setup: PeerSetup, scratch: Path) -> Path:
    """Return a folder with a config.json, as vLLM needs it. A single file is copied or converted to `scratch`."""
    if setup.path.is_dir():
        return setup.path
    if setup.path.suffix == ".json":
        shutil.copy(setup.path, scratch / "config.json")
    else:
        with contextlib.redirect_stderr(io.StringIO()):
            model = _load(replace(setup, device=torch.device("cpu")))
            model.hf_quantizer = None  # the weights have been dequantized, but the attribute stays set
            vars(model.config).pop("quantization_config", None)
            model.save_pretrained(scratch)
    return scratch
