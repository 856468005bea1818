"""Workloads by name, or as batch x prompt x output: the same words for every benchmark that takes one.

Prompts are random token ids, so any checkpoint can run them and no cache helps.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from yalis.errors import YalisError


@dataclass(frozen=True)
class Workload:
    """So many requests of so many prompt tokens, each answered with so many tokens."""

    batch: int
    prompt_len: int
    output_len: int

    def __post_init__(self) -> None:
        if min(self.batch, self.prompt_len, self.output_len) < 1:
            raise YalisError(f"workload {self} has a part below 1; give batch x prompt x output, such as 16x2480x2048")

    @property
    def longest(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_len + self.output_len

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt_len}x{self.output_len}"


NAMED = {
    "poster": Workload(16, 2480, 2048),  # the published comparison of engines
    "prefill-heavy": Workload(16, 2048, 128),
    "decode-heavy": Workload(16, 128, 2048),
}


def read_workload(text: str) -> Workload:
    """A name, or 16x2480x2048."""
    if text in NAMED:
        return NAMED[text]
    if not re.fullmatch(r"\d{1,9}x\d{1,9}x\d{1,9}", text):
        raise YalisError(
            f"workload {text!r} is not known; accepted: {', '.join(NAMED)}, or batch x prompt x output such as 8x64x32"
        )
    return Workload(*map(int, text.split("x")))


def draw_prompt(noise: random.Random, length: int, vocab_size: int) -> list[int]:
    return [noise.randrange(vocab_size) for _ in range(length)]
