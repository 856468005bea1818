"""YALIS: LLM inference on many GPUs and nodes, and measurements of how it scales.

    from yalis import LLM, SamplingParams
    llm = LLM("smollm2-135m")
    print(llm.generate(["The capital of France is"], SamplingParams(max_tokens=32))[0].text)

Names are imported on first use, so `import yalis` loads neither torch nor a device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from yalis import env
from yalis.version import __version__

if TYPE_CHECKING:
    from yalis.engine.llm import LLM as LLM
    from yalis.engine.progress import Progress as Progress
    from yalis.errors import YalisError as YalisError
    from yalis.errors import YalisFailure as YalisFailure
    from yalis.types import Completion as Completion
    from yalis.types import OutputTag as OutputTag
    from yalis.types import RequestEvent as RequestEvent
    from yalis.types import RequestOutput as RequestOutput
    from yalis.types import SamplingParams as SamplingParams
    from yalis.types import StreamChunk as StreamChunk
    from yalis.types import StructuredOutputs as StructuredOutputs
    from yalis.types import StructuredOutputsParams as StructuredOutputsParams

_HOME = {
    "LLM": "yalis.engine.llm",
    "SamplingParams": "yalis.types",
    "StructuredOutputs": "yalis.types",
    "StructuredOutputsParams": "yalis.types",
    "OutputTag": "yalis.types",
    "RequestEvent": "yalis.types",
    "RequestOutput": "yalis.types",
    "Completion": "yalis.types",
    "StreamChunk": "yalis.types",
    "Progress": "yalis.engine.progress",
    "YalisError": "yalis.errors",
    "YalisFailure": "yalis.errors",
}
__all__ = [*_HOME, "__version__"]

_SINGLE_REQUESTS = "use LLM, whose submit() and events() control single requests"
_SERVER = f"start a server with `yalis serve`, or {_SINGLE_REQUESTS}"
#: Names of vLLM that do not exist here, and what to do instead.
_VLLM_NAMES = {
    "AsyncEngineArgs": _SERVER,
    "AsyncLLMEngine": _SERVER,
    "CompletionOutput": "import Completion",
    "EngineArgs": "give LLM the arguments",
    "LLMEngine": _SINGLE_REQUESTS,
    "TextPrompt": 'give {"prompt": text}',
    "TokensPrompt": 'give {"prompt_token_ids": ids}',
    "inputs": 'give {"prompt": text} or {"prompt_token_ids": ids}',
    "sampling_params": "type `from yalis import SamplingParams`",
}


def __getattr__(name: str) -> Any:
    if name in _VLLM_NAMES:
        # `from yalis import ...` would replace the message of an AttributeError.
        raise ImportError(f"yalis has no {name}; {_VLLM_NAMES[name]}")
    if name not in _HOME:
        raise AttributeError(f"module 'yalis' has no attribute {name!r}")
    env.limit_openmp_spinning()  # must run before torch is imported
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"yalis.{name} needs {error.name}, which is not installed; type `pip install {error.name}`", name=error.name
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
