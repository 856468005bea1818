"""Check prompts and turn them into token ids."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Union

from yalis.checkpoint.tokenizer import Tokenizer
from yalis.errors import YalisError
from yalis.types import Prompt, SamplingParams

Sampling = Union[SamplingParams, Sequence[SamplingParams], None]

EMPTY_PROMPT = "the prompt is empty; give at least one character or token id"


def pair_with_sampling(prompts: Any, sampling: Sampling) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt with its sampling parameters; one SamplingParams applies to all prompts."""
    prompts = list(prompts) if _is_list_of_prompts(prompts) else [prompts]
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = [sampling or SamplingParams()] * len(prompts)
    if not isinstance(sampling, (list, tuple)) or not all(isinstance(params, SamplingParams) for params in sampling):
        raise YalisError(f"sampling is {sampling!r}; give SamplingParams(...), or a list with one for each prompt")
    if len(sampling) != len(prompts):
        raise YalisError(f"{len(prompts)} prompts came with {len(sampling)} SamplingParams; give one, or one for each")
    return list(zip(prompts, sampling, strict=True))


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, model: str) -> tuple[str | None, list[int]]:
    """Return the prompt's text, None unless it is a string, and its token ids, which are not checked yet."""
    if not isinstance(prompt, (str, list, tuple)):
        given = type(prompt).__name__
        raise YalisError(f"a prompt is of type {given}; give a string, a list of token ids, or a list of messages")
    if not prompt:
        raise YalisError(EMPTY_PROMPT)
    if not isinstance(prompt, str) and not isinstance(prompt[0], dict):
        return None, list(prompt)  # type: ignore[arg-type]
    if tokenizer is None:
        raise YalisError(
            f"{model} has no tokenizer for text and chat prompts; give token ids, or the folder of a tokenizer with "
            "--tokenizer"
        )
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    return None, tokenizer.encode_chat(list(prompt))  # type: ignore[arg-type]


def check_token_ids(tokens: Sequence[Any], vocab_size: int) -> list[int]:
    """Return the ids as plain integers; raise YalisError for one that is not in the vocabulary."""
    # Most prompts are lists of int already, and these three checks are much faster than a loop over a long prompt.
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab_size:
        return list(tokens)
    for token in tokens:
        if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token < vocab_size:
            raise YalisError(
                f"token id {token!r} is not in this model's vocabulary; give ids from 0 to {vocab_size - 1}"
            )
    return [operator.index(token) for token in tokens]


def _is_list_of_prompts(prompts: Any) -> bool:
    """Return False for a single prompt, which may itself be a list of token ids or messages."""
    if not isinstance(prompts, (list, tuple)):
        return False
    return not (prompts and (isinstance(prompts[0], dict) or hasattr(prompts[0], "__index__")))
