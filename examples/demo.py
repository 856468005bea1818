"""Run by `make demo`: one completion, a batch, and a streamed chat answer."""

from __future__ import annotations

import time

from yalis import LLM, SamplingParams


def main() -> None:
    start = time.perf_counter()
    with LLM("smollm2-135m") as llm:
        print(f"smollm2-135m is ready after {time.perf_counter() - start:.1f} s\n")

        prompt = "The capital of France is"
        print(f"One completion\n  {prompt!r} -> {llm.generate(prompt, SamplingParams(max_tokens=16))[0].text!r}\n")

        prompts = ["1, 2, 3, 4,", "Water boils at", "def fibonacci(n):\n", "The opposite of hot is"]
        print("A batch")
        for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=16)), strict=True):
            print(f"  {prompt!r} -> {output.text!r}")

        question = "Why is the sky blue? Answer in two sentences."
        print(f"\nA streamed chat answer\n  user: {question}\n  assistant: ", end="")
        for chunk in llm.stream([{"role": "user", "content": question}], SamplingParams(max_tokens=96)):
            print(chunk.text, end="", flush=True)
        assert chunk.completion is not None
        metrics = chunk.completion.metrics
        print(
            f"\n\n{metrics.output_tokens} tokens, first token after {metrics.time_to_first_token:.2f} s, "
            f"{metrics.output_tokens / metrics.total:.1f} tokens per second"
        )


if __name__ == "__main__":
    main()
