"""Requests and results of the public API. Imports no torch, so that the command line starts quickly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Protocol, Union

from yalis.errors import YalisError
from yalis.keywords import SAMPLING_KEYWORDS, check_init_keywords
from yalis.structured_outputs import OutputTag as OutputTag
from yalis.structured_outputs import StructuredOutputs as StructuredOutputs
from yalis.structured_outputs import as_structured_outputs

FinishReason = Literal["stop", "length", "cancelled"]
Message = dict[str, Any]
#: Text, token ids (a list, or a 1-D integer array of numpy or torch), chat messages, or vLLM's dicts: {"prompt": text}
#: and {"prompt_token_ids": ids}.
Prompt = Union[str, list[int], list[Message], dict[str, Any], "TokenArray"]


class TokenArray(Protocol):
    """A 1-D integer array of token ids, such as those of numpy and torch."""

    @property
    def ndim(self) -> int: ...

    def tolist(self) -> Any: ...


#: Most likely tokens that can be returned with each prompt token. A long prompt returns this many for every position.
MAX_PROMPT_LOGPROBS = 20

#: What max_tokens=None becomes: more tokens than any context holds.
UNLIMITED_TOKENS = 2**31 - 1


@check_init_keywords("SamplingParams", SAMPLING_KEYWORDS)
@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled. The default is greedy: temperature 0 selects the most likely token.

    max_tokens: most tokens to generate; None: until the context is full; 0 with prompt_logprobs: only score the prompt
    min_tokens: fewest tokens to generate before an end-of-sequence or stop token may end the output
    temperature: divides the logits before random sampling; 0 is greedy decoding
    top_k: sample from the k most likely tokens; 0 or -1 means all
    top_p: sample from the most likely tokens whose probabilities add up to this, above 0 and at most 1
    min_p: drop tokens less likely than this fraction of the most likely token, 0 to 1
    repetition_penalty: above 1 makes tokens of the prompt and the output less likely, below 1 more likely
    presence_penalty: subtracted from the logits of tokens that are in the output, -2 to 2
    frequency_penalty: subtracted from the logit of a token for each time it is in the output, -2 to 2
    stop: a string, or a list of strings, that ends the output; it is not part of the text
    stop_token_ids: token ids that end the output
    ignore_eos: continue after the model's end-of-sequence tokens
    seed: of the random numbers; None draws one
    n: completions of each prompt, 1 to 1024
    logprobs: return the log-probability of each output token and of this many most likely tokens; None: neither
    prompt_logprobs: the same for each prompt token, 0 to 20
    logit_bias: numbers from -100 to 100 to add to the logits, by token id
    structured_outputs: what the text must be, such as StructuredOutputs(json=schema); None: any text
    keep_special_tokens: special tokens that stay in the text, such as [TOOL_CALLS]; all others are left out

    The order is logit_bias, penalties, structured_outputs, temperature, top_k, top_p, min_p, sampling. The noise is a
    function of (seed, position, token id), so a request with a seed gets the same tokens whatever else is in the batch.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    structured_outputs: StructuredOutputs | None = None
    keep_special_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _as_logit_bias(self.logit_bias))
        object.__setattr__(self, "structured_outputs", as_structured_outputs(self.structured_outputs))
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_PROMPT_LOGPROBS)
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", UNLIMITED_TOKENS)
        self._check_max_tokens()
        _check_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise YalisError(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens}); give at most that many"
            )
        _check_number("temperature", self.temperature, 0.0, math.inf)
        if self.top_k == -1:  # vLLM's value for every token
            object.__setattr__(self, "top_k", 0)
        _check_int("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_below=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("n", self.n, 1, 1024)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        for text in self.stop:
            if not isinstance(text, str) or not text or any("\ud800" <= letter <= "\udfff" for letter in text):
                raise YalisError(f"stop contains {text!r}; give non-empty strings of valid Unicode")
        object.__setattr__(self, "keep_special_tokens", _as_tuple("keep_special_tokens", self.keep_special_tokens))
        for text in self.keep_special_tokens:
            if not isinstance(text, str):
                raise YalisError(f"keep_special_tokens contains {text!r}; give the texts of special tokens")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0)
        if not isinstance(self.ignore_eos, bool):
            raise YalisError(f"ignore_eos is {self.ignore_eos!r}; give true or false")
        if self.ignore_eos and self.structured_outputs is not None:
            raise YalisError("an answer with structured_outputs ends with EOS, so ignore_eos must be false; remove it")

    def _check_max_tokens(self) -> None:
        if self.max_tokens != 0 or isinstance(self.max_tokens, bool):
            _check_int("max_tokens", self.max_tokens, 1)
        elif self.prompt_logprobs is None:
            raise YalisError(
                "max_tokens is 0; give a whole number of at least 1, or prompt_logprobs to score the prompt alone"
            )
        elif self.n != 1:
            raise YalisError(f"n is {self.n} and max_tokens is 0, which generates nothing; leave n out")

    def identity(self) -> dict[str, Any]:
        """Return the fields that identify the work of a request, for digests.

        Fields that were added after the first digests are left out unless set, so that existing results stay valid.
        """
        values = asdict(self)
        return {name: value for name, value in values.items() if value not in (None, ()) or name not in _ADDED_LATER}

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether sampling needs the earlier tokens of the request: for penalties, or to follow a grammar."""
        return self.has_penalties or self.structured_outputs is not None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def recorded_pick_from(self) -> int | None:
        """The number of output tokens from which on recorded steps sample this request's tokens; None: never."""
        first = 0
        for one in fields(self):
            number = RECORDED_PICK_RULES[one.name](getattr(self, one.name))
            if number is None:
                return None
            first = max(first, number)
        return first


#: Fields that files with digests may not have; see SamplingParams.identity().
_ADDED_LATER = frozenset({"logit_bias", "prompt_logprobs", "structured_outputs", "keep_special_tokens"})


def _always(value: object) -> int | None:
    return 0


def _only_at(neutral: object) -> Callable[[Any], int | None]:
    return lambda value: 0 if value == neutral else None


def _once_reached(value: int) -> int | None:
    return value


#: Which sampling fields a recorded step honours. CUDA graphs of a rank with the whole vocabulary sample on the device:
#: one graph picks the argmax of the logits, and another samples at random (kernels/sampling.py). Tokens of CPU
#: recordings always go through the sampler. Every field of SamplingParams has a rule here that returns the number of
#: output tokens from which on the graphs sample the right token, or None if they never do. All other tokens go through
#: the sampler.
RECORDED_PICK_RULES: dict[str, Callable[[Any], int | None]] = {
    # Applied on the host, before or after the step.
    "max_tokens": _always,
    "stop": _always,
    "stop_token_ids": _always,
    "ignore_eos": _always,
    "n": _always,
    "keep_special_tokens": _always,
    # Computed by the steps of the prompt, which run eagerly.
    "prompt_logprobs": _always,
    # Parameters of random sampling, on the device for each row.
    "temperature": _always,
    "top_k": _always,
    "top_p": _always,
    "min_p": _always,
    "seed": _always,
    # Honoured by the sampler alone, unless neutral.
    "repetition_penalty": _only_at(1.0),
    "presence_penalty": _only_at(0.0),
    "frequency_penalty": _only_at(0.0),
    "logit_bias": _only_at(None),
    "logprobs": _only_at(None),
    "structured_outputs": _only_at(None),
    # Before min_tokens the sampler masks EOS and stop tokens.
    "min_tokens": _once_reached,
}


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if values is not None and not isinstance(values, (list, tuple, set, frozenset)):
        raise YalisError(f"{name} is {values!r}; give a list")
    return tuple(values or ())


def _as_logit_bias(value: Any) -> dict[int, float] | None:
    """Return a copy with integer keys, which are strings in JSON; None if it is empty."""
    if value is not None and not isinstance(value, Mapping):
        raise YalisError(f"logit_bias is {value!r}; give a dictionary from token ids to numbers, such as {{42: -100}}")
    biases: dict[int, float] = {}
    for key, bias in (value or {}).items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        _check_int("a token id of logit_bias", token, 0)
        _check_number(f"the logit_bias of token {token}", bias, -100.0, 100.0)
        biases[token] = float(bias)
    return biases or None


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise YalisError(f"{name} is {value!r}; give a whole number {limit}")


def _check_number(name: str, value: object, low: float, high: float, open_below: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not ok or value == math.inf or (open_below and value == low) or (isinstance(value, int) and value > 2**63):
        limit = f"{'above' if open_below else 'of at least'} {low:g}"
        limit += f" and at most {high:g}" if math.isfinite(high) else ""
        expected = "finite number" if isinstance(value, float) and not math.isfinite(value) else "number"
        shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:37]}..."
        raise YalisError(f"{name} is {shown}; give a {expected} {limit}")


#: vLLM's name.
StructuredOutputsParams = StructuredOutputs

#: The names of the fields of SamplingParams.
SAMPLING_FIELDS = frozenset(one.name for one in fields(SamplingParams))


@dataclass(frozen=True)
class Logprob:
    """One entry of TokenLogprobs, with the attributes of vLLM's class of this name."""

    logprob: float
    rank: int | None = None  # 1 is the most likely token; None if it is not one of the most likely tokens requested
    decoded_token: str | None = None  # None without a tokenizer


@dataclass(frozen=True)
class TokenLogprobs(Mapping[int, Logprob]):
    """The log-probability (natural logarithm) of a token, and of the most likely tokens at its position.

    Also the mapping that vLLM returns: from token ids, first that of the token itself, to Logprob.
    """

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)  # most likely first

    def set_decoder(self, decode: Callable[[int], str]) -> None:
        """Decode the tokens with this function when they are read. Copies and pickles do not have it."""
        object.__setattr__(self, "_decode", decode)

    def __getitem__(self, token_id: int) -> Logprob:
        logprob = self.logprob if token_id == self.token_id else self.top[token_id]
        rank = list(self.top).index(token_id) + 1 if token_id in self.top else None
        decode: Callable[[int], str] | None = getattr(self, "_decode", None)
        return Logprob(logprob, rank, None if decode is None else decode(token_id))

    def __iter__(self) -> Iterator[int]:
        return iter({self.token_id: None, **self.top})

    def __len__(self) -> int:
        return len({self.token_id, *self.top})

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenLogprobs, (self.token_id, self.logprob, self.top)


@dataclass(frozen=True)
class Metrics:
    """Timings in seconds, from the submission of the request, and token counts."""

    time_to_first_token: float
    time_per_token: float  # mean over the tokens after the first; 0 if there is only one
    total: float
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    output_tokens: int


@dataclass(frozen=True)
class Completion:
    """One of a request's n completions."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None
    metrics: Metrics
    index: int = 0  # which of the n completions
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None: another reason

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of all output tokens together; None if `logprobs` were not requested."""
        return None if self.logprobs is None else sum(token.logprob for token in self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """The result of a request. `text`, `token_ids` and so on are those of its first completion."""

    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: list[int]
    completions: list[Completion]
    #: one entry for each prompt token, None for the first; None if they were not requested, or if it was cancelled
    #: before the first token
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    request_id: int = 0  # as submit() returned it

    @property
    def finished(self) -> bool:
        """True, as in vLLM: results are returned when their request has finished."""
        return True

    @property
    def outputs(self) -> list[Completion]:
        """The same as `completions`, under vLLM's name."""
        return self.completions

    @property
    def num_cached_tokens(self) -> int:
        """The same as `metrics.cached_tokens`, under vLLM's name."""
        return self.metrics.cached_tokens

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.completions[0].logprobs

    @property
    def metrics(self) -> Metrics:
        return self.completions[0].metrics


@dataclass(frozen=True)
class StreamChunk:
    """New output of one completion, since its previous chunk."""

    prompt_index: int  # which of the prompts given to stream()
    completion_index: int  # which of its n completions
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None  # set on the last chunk
    completion: Completion | None = None  # the complete result, on the last chunk


@dataclass(frozen=True)
class RequestEvent:
    """New output of one completion of a submitted request, since the completion's previous event."""

    request_id: int
    completion_index: int  # which of the request's n completions
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None  # set on the last event of the completion
    completion: Completion | None = None  # the whole completion, on its last event
    output: RequestOutput | None = None  # the whole result, on the last event of the request
    logprobs: list[TokenLogprobs] | None = None  # of `token_ids`; None if they were not requested


@dataclass(frozen=True)
class RankTopology:
    """Where the ranks of an LLM run; the tuples have one entry for each rank."""

    hosts: tuple[str, ...]  # host names
    nodes: tuple[int, ...]  # host indices, numbered from 0 in order of each host's first rank
    launcher: str  # "torchrun", "srun" or "mpirun"; empty if rank 0 started the others
