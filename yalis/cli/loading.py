"""Load the model of a command, with a progress line on a terminal."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from yalis.config import EngineConfig
from yalis.progress_line import ProgressLine

if TYPE_CHECKING:
    from yalis.engine.llm import LLM


def load_llm(config: EngineConfig, line: ProgressLine) -> LLM:
    """Return the loaded model. The line shows "loading the model"; the caller clears it."""
    line.show("loading the model")
    from yalis.engine.llm import LLM  # imports torch, which takes seconds

    return LLM(**asdict(config))
