"""The `--workload` of all benchmarks: a name, or batch size x prompt length x output length.

Prompts are random token ids, so that any checkpoint can run them and the prefix cache never hits.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from yalis.errors import YalisError


@dataclass(frozen=True)
class Workload:
    """`batch` requests of `prompt_len` tokens each, which generate `output_len` tokens each."""

    batch: int
    prompt_len: int
    output_len: int

    def __post_init__(self) -> None:
        if min(self.batch, self.prompt_len, self.output_len) < 1:
            raise YalisError(
                f"workload {self} has a number below 1; give batch x prompt x output, such as 16x2480x2048"
            )

    @property
    def total_len(self) -> int:
        """Length of a finished sequence: prompt and output tokens."""
        return self.prompt_len + self.output_len

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt_len}x{self.output_len}"


NAMED = {
    "poster": Workload(16, 2480, 2048),  # the workload of arXiv 2511.09557
    "prefill-heavy": Workload(16, 2048, 128),
    "decode-heavy": Workload(16, 128, 2048),
}


def parse_workload(text: str) -> Workload:
    """Parse a name such as `poster`, or three numbers such as `16x2480x2048`."""
    if text in NAMED:
        return NAMED[text]
    if not re.fullmatch(r"\d{1,9}x\d{1,9}x\d{1,9}", text):
        raise YalisError(
            f"unknown workload {text!r}; accepted: {', '.join(NAMED)}, or batch x prompt x output such as 8x64x32"
        )
    return Workload(*map(int, text.split("x")))


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]
