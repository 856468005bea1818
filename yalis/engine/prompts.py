"""Check prompts and turn them into token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Union

from yalis.checkpoint.tokenizer import Tokenizer
from yalis.config import EngineConfig
from yalis.errors import YalisError
from yalis.messages import check_messages
from yalis.spec import ModelSpec
from yalis.types import Message, Prompt, SamplingParams

Sampling = Union[SamplingParams, Sequence[SamplingParams], None]

EMPTY_PROMPT = "the prompt is empty; give at least one character or token id"
_DICT_KEYS = ("prompt", "prompt_token_ids")


def choose_sampling(sampling: Any, sampling_params: Any) -> Any:
    """Return the one of two keywords that was given: `sampling`, or vLLM's name `sampling_params`."""
    if sampling is not None and sampling_params is not None:
        raise YalisError("sampling and sampling_params are the same argument; give one of them")
    return sampling if sampling_params is None else sampling_params


def pair_with_sampling(
    prompts: Any, sampling: Sampling, default: SamplingParams
) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt with its sampling parameters, `default` if `sampling` is None.

    One SamplingParams applies to all prompts.
    """
    if isinstance(prompts, Iterator):  # such as a generator
        prompts = list(prompts)
    prompts = list(prompts) if _is_list_of_prompts(prompts) else [prompts]
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = [sampling or default] * len(prompts)
    if not isinstance(sampling, (list, tuple)) or not all(isinstance(params, SamplingParams) for params in sampling):
        raise YalisError(f"sampling is {sampling!r}; give SamplingParams(...), or a list with one for each prompt")
    if len(sampling) != len(prompts):
        raise YalisError(f"{len(prompts)} prompts came with {len(sampling)} SamplingParams; give one, or one for each")
    return list(zip(prompts, sampling, strict=True))


def list_conversations(messages: Any) -> list[list[Message]]:
    """Return the conversations given to chat(): a string is one user message, a list of messages one conversation."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, (list, tuple)):
        raise YalisError(
            f"the conversation is of type {type(messages).__name__}; give a string, or a list of "
            '{"role": ..., "content": ...}'
        )
    if not messages:
        raise YalisError('the conversation is empty; give at least one {"role": "user", "content": ...}')
    if not isinstance(messages[0], (list, tuple)):
        return [check_messages(messages)]
    if len(messages) == 1:
        return [check_messages(messages[0])]
    return [_check_conversation(index, conversation) for index, conversation in enumerate(messages)]


def _check_conversation(index: int, messages: Any) -> list[Message]:
    try:
        return check_messages(messages)
    except YalisError as error:
        raise YalisError(f"prompt {index}: {error}") from error


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, model: str, template_kwargs: dict[str, Any] | None = None
) -> tuple[str | None, list[int]]:
    """Return the prompt's text, None unless it is a string, and its token ids, which are not checked yet.

    `template_kwargs`: variables of the chat template, for chat messages.
    """
    text: str | None = None
    if isinstance(prompt, dict):
        prompt, text = _unwrap(prompt)
    if _is_array(prompt):
        prompt = _array_to_list(prompt)
    if not isinstance(prompt, (str, list, tuple)):
        given = type(prompt).__name__
        raise YalisError(f"a prompt is of type {given}; give a string, a list of token ids, or a list of messages")
    if not prompt:
        raise YalisError(EMPTY_PROMPT)
    if not isinstance(prompt, str) and isinstance(prompt[0], str):
        raise YalisError("a prompt is a list of strings; give submit() one string, or the whole list to generate()")
    if not isinstance(prompt, str) and not isinstance(prompt[0], dict):
        return text, list(prompt)
    if tokenizer is None:
        raise YalisError(
            f"{model} has no tokenizer for text and chat prompts; give token ids, or the folder of a tokenizer with "
            "tokenizer="
        )
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    return None, tokenizer.encode_chat(check_messages(prompt), template_kwargs)


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


def check_request(
    tokens: Sequence[Any],
    sampling: SamplingParams,
    has_text: bool,
    spec: ModelSpec,
    config: EngineConfig,
    max_model_len: int,
) -> list[int]:
    """Return the prompt's ids as plain integers; raise YalisError if this model cannot run the request.

    `has_text`: whether the model has a tokenizer.
    """
    if not tokens:
        raise YalisError(EMPTY_PROMPT)
    ids = check_token_ids(tokens, spec.vocab_size)
    check_token_ids((*sampling.stop_token_ids, *(sampling.logit_bias or ())), spec.vocab_size)
    generates = sampling.max_tokens > 0
    if len(tokens) + generates > max_model_len:
        if max_model_len >= spec.max_position:
            how = ": the model supports no longer context"
        else:
            how = f", or raise {'max_model_len=' if config.max_model_len else 'kv_memory= or kv_blocks='}"
        including = " including one generated token" if generates else ""
        raise YalisError(
            f"the prompt has {len(tokens)} tokens, but the context holds {max_model_len}{including}; shorten it{how}"
        )
    if sampling.stop and not has_text:
        raise YalisError(
            "stop strings need a tokenizer; give stop_token_ids, or the folder of a tokenizer with tokenizer="
        )
    return ids


def _is_list_of_prompts(prompts: Any) -> bool:
    """Return False for a single prompt, which may itself be a list of token ids or messages."""
    if not isinstance(prompts, (list, tuple)):
        return False
    if not prompts or _is_array(prompts[0]):
        return True
    if isinstance(prompts[0], dict):
        return any(key in prompts[0] for key in _DICT_KEYS)
    return not hasattr(prompts[0], "__index__")


def _unwrap(prompt: dict[str, Any]) -> tuple[Any, str | None]:
    """Return the prompt inside one of vLLM's dicts, and the text that came with token ids."""
    for key in prompt:
        if key not in _DICT_KEYS:
            raise YalisError(f"a prompt has the key {key!r}; accepted: prompt, prompt_token_ids")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if ids is None and text is None:
        raise YalisError('a prompt is an empty dict; give {"prompt": "..."} or {"prompt_token_ids": [...]}')
    if text is not None and not isinstance(text, str):
        raise YalisError(f'"prompt" of a dict is of type {type(text).__name__}; give a string, or "prompt_token_ids"')
    if isinstance(ids, (str, dict)):
        raise YalisError(f'"prompt_token_ids" of a dict is of type {type(ids).__name__}; give a list of token ids')
    return (text, None) if ids is None else (ids, text)


def _is_array(value: Any) -> bool:
    """Return whether the value is a numpy or torch array with at least one dimension."""
    return getattr(value, "ndim", 0) > 0 and hasattr(value, "tolist")


def _array_to_list(ids: Any) -> list[int]:
    if ids.ndim != 1:
        raise YalisError(
            f"an array of token ids has the shape {tuple(ids.shape)}; give 1-D arrays, one for each prompt: list(ids)"
        )
    values: list[int] = ids.tolist()
    return values
