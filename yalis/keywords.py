"""Checks the keyword arguments of the public API, and accepts vLLM's names for arguments with the same meaning."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from yalis.errors import YalisError

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class VllmKeywords:
    """Arguments of a vLLM function that the corresponding YALIS function does not have."""

    renamed: Mapping[str, str] = field(default_factory=dict)  # to the YALIS argument with the same meaning
    ignored: Mapping[str, Collection[Any]] = field(default_factory=dict)  # values without effect; others are refused
    unused: frozenset[str] = frozenset()  # no value has an effect
    advice: Mapping[str, str] = field(default_factory=dict)  # what to do instead

    @property
    def names(self) -> list[str]:
        return [*self.renamed, *self.ignored, *self.unused]


LLM_KEYWORDS = VllmKeywords(
    renamed={
        "tensor_parallel_size": "tp",
        "pipeline_parallel_size": "pp",
        "data_parallel_size": "dp",
        "gpu_memory_utilization": "memory_fraction",
        "max_num_batched_tokens": "max_batch_tokens",
        "enforce_eager": "eager",
        "enable_expert_parallel": "expert_parallel",
        "enable_prefix_caching": "prefix_reuse",
        "num_gpu_blocks_override": "kv_blocks",
    },
    ignored={
        "compilation_config": (None, 0),
        "cpu_offload_gb": (0,),
        "disable_custom_all_reduce": (False,),
        "distributed_executor_backend": (None, "mp", "uni"),
        "download_dir": (None,),
        "enable_chunked_prefill": (None, True),
        "enable_lora": (False,),
        "guided_decoding_backend": (None, "auto"),
        "hf_overrides": (None, {}),
        "kv_cache_dtype": ("auto",),
        "limit_mm_per_prompt": (None, {}),
        "load_format": ("auto", "safetensors"),
        "max_logprobs": range(21),
        "quantization": (None,),
        "revision": (None, "main"),
        "runner": ("auto", "generate"),
        "seed": (None, 0),
        "skip_tokenizer_init": (False,),
        "speculative_config": (None,),
        "task": ("auto", "generate"),
        "tokenizer_mode": ("auto",),
        "tokenizer_revision": (None, "main"),
        "trust_remote_code": (False,),
    },
    unused=frozenset({"disable_log_stats", "max_seq_len_to_capture", "swap_space"}),
    advice={
        "attention_backend": "see attention=",
        "compilation_config": "give compile=True for torch.compile",
        "distributed_executor_backend": "YALIS starts its ranks itself, or under torchrun, srun or mpirun",
        "enable_lora": "LoRA adapters are not supported",
        "load_format": "give load='random' for random weights",
        "max_logprobs": "remove it: logprobs has no limit, and prompt_logprobs is at most 20",
        "quantization": "quantized inference is not supported yet",
        "seed": "give SamplingParams(seed=...)",
        "trust_remote_code": "code in a model's folder is never run",
    },
)

SAMPLING_KEYWORDS = VllmKeywords(
    ignored={
        "allowed_token_ids": (None,),
        "bad_words": (None, [], ()),
        "best_of": (None, 1),
        "detokenize": (True,),
        "extra_args": (None, {}),
        "flat_logprobs": (False,),
        "guided_decoding": (None,),
        "include_stop_str_in_output": (False,),
        "length_penalty": (1.0,),
        "logits_processors": (None, []),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "truncate_prompt_tokens": (None,),
        "use_beam_search": (False,),
    }
)

GENERATE_KEYWORDS = VllmKeywords(
    ignored={"lora_request": (None,), "priority": (None, 0), "tokenization_kwargs": (None, {})},
    advice={"prompt_token_ids": 'give prompts, such as {"prompt_token_ids": ids}'},
)

CHAT_KEYWORDS = VllmKeywords(
    ignored={
        **GENERATE_KEYWORDS.ignored,
        "add_generation_prompt": (True,),
        "chat_template": (None,),
        "chat_template_content_format": ("auto", "string"),
        "continue_final_message": (False,),
        "mm_processor_kwargs": (None, {}),
        "tools": (None, []),
    },
    advice=dict.fromkeys(
        ("add_generation_prompt", "chat_template", "continue_final_message", "tools"),
        "give generate() the text of llm.tokenizer.hf.apply_chat_template(...)",
    ),
)

#: For stream() and submit(), which vLLM does not have.
NO_KEYWORDS = VllmKeywords()


def check_keywords(
    owner: str, vllm: VllmKeywords, sampling_fields: Collection[str] = ()
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Return a decorator that translates vLLM's arguments, and raises a YalisError that names all unknown arguments.

    `owner` is the name of the function in the message. Those of `sampling_fields` belong in SamplingParams.
    """

    def decorate(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        accepted = frozenset(inspect.signature(function).parameters) - {"self"}

        @functools.wraps(function)
        def call(*args: _Params.args, **given: _Params.kwargs) -> _Result:
            if not accepted.issuperset(given):
                given = translate(owner, given, accepted, vllm, sampling_fields)  # type: ignore[assignment]
            return function(*args, **given)

        return call

    return decorate


def check_init_keywords(owner: str, vllm: VllmKeywords) -> Callable[[_Class], _Class]:
    """Return a class decorator that applies check_keywords() to the constructor."""

    def decorate(kind: _Class) -> _Class:
        kind.__init__ = check_keywords(owner, vllm)(kind.__init__)  # type: ignore[misc]
        return kind

    return decorate


def translate(
    owner: str,
    given: Mapping[str, Any],
    accepted: Collection[str],
    vllm: VllmKeywords,
    sampling_fields: Collection[str] = (),
) -> dict[str, Any]:
    """Return the arguments with vLLM's names replaced, and without those that change nothing."""
    kept: dict[str, Any] = {}
    unsupported: list[str] = []  # values of vLLM's arguments
    unknown: dict[str, str] = {}  # what to do instead, by name
    for name, value in given.items():
        ours = vllm.renamed.get(name, name)
        if name in vllm.unused or (ours != name and value is None):  # None: vLLM's default
            continue
        if ours in accepted:
            if ours in kept or (ours != name and ours in given):
                raise YalisError(f"{ours} and {name} are the same argument; give one of them")
            kept[ours] = value
        elif name not in vllm.ignored:
            unknown[name] = _explain(name, value, accepted, vllm, sampling_fields)
        elif value not in vllm.ignored[name]:
            unsupported.append(f"{name}={_shorten(value)} is not supported; {vllm.advice.get(name, 'remove it')}")
    if not unknown and not unsupported:
        return kept
    sentences = unsupported
    if unknown:
        shown = join_words((f"{name!r}{explanation}" for name, explanation in unknown.items()), "and")
        rest = "" if all(unknown.values()) else f"; accepted: {', '.join(sorted(accepted))}"
        sentences = [*unsupported, f"{owner} has no argument {shown}{rest}"]
    raise YalisError(". ".join(sentences))


def _explain(
    name: str, value: Any, accepted: Iterable[str], vllm: VllmKeywords, sampling_fields: Collection[str]
) -> str:
    """Return what to do instead of giving this argument, in parentheses; empty if nothing is known about it."""
    if name in vllm.advice:
        return f" ({vllm.advice[name]})"
    if name in sampling_fields:
        return f" (give SamplingParams({name}={_shorten(value)}))"
    return suggest(name, accepted, others=vllm.names)


def _shorten(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def suggest(word: str, accepted: Iterable[str], prefix: str = "", others: Iterable[str] = ()) -> str:
    """Return " (did you mean ...?)" with words that start with `word`, else the most similar one; empty if none is.

    `prefix` is printed before each word. `others` are accepted too, but only searched for similar words.
    """
    words = sorted(accepted)
    near = [one for one in words if one.startswith(word)][:3] or get_close_matches(word, [*words, *others], n=1)
    return f" (did you mean {join_words((prefix + one for one in near), 'or')}?)" if near else ""


def join_words(words: Iterable[str], conjunction: str) -> str:
    """Return "a", "a or b" or "a, b or c"."""
    *first, last = [*words] or [""]
    return f"{', '.join(first)} {conjunction} {last}" if first else last
