"""The requests of the soak test: threads that generate, stream, submit, poll and cancel on one LLM."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from random import Random

from yalis import LLM, SamplingParams

_VOCABULARY = 300
_GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


class Load:
    """Threads that run requests until stop(). `counts` has the number of requests by kind, `errors` the problems."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._stopping = threading.Event()
        rng = Random(seed)
        self._known = [[rng.randrange(4, _VOCABULARY) for _ in range(rng.randrange(1, 60))] for _ in range(16)]
        self._expected = [output.outputs[0].token_ids for output in llm.generate(self._known, _GREEDY, progress=False)]
        kinds = (self._generate, self._generate, self._stream, self._submit)
        self._threads = [
            threading.Thread(target=self._run, args=(kind, Random(seed + 1 + index)), name=f"soak-{index}")
            for index, kind in enumerate(kinds)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> None:
        """Wait for this time, or until a thread has found an error."""
        self._stopping.wait(seconds)

    def stop(self) -> None:
        """Stop the threads after their current requests, and wait for them."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, once: Callable[[Random], None], rng: Random) -> None:
        try:
            while not self._stopping.is_set():
                once(rng)
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            self._stopping.set()

    def _prompt(self, rng: Random) -> list[int]:
        return [rng.randrange(4, _VOCABULARY) for _ in range(rng.choice((1, 5, 20, 60, 150)))]

    def _params(self, rng: Random) -> SamplingParams:
        return SamplingParams(
            max_tokens=rng.choice((1, 4, 16, 40)),
            temperature=rng.choice((0.0, 0.8)),
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            logprobs=rng.choice((None, None, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
            stop=rng.choice(((), ("e", "th"))),
            n=rng.choice((1, 1, 2)),
            seed=rng.randrange(1000),
        )

    def _generate(self, rng: Random) -> None:
        """Run known prompts next to random ones and compare their tokens."""
        chosen = [rng.randrange(len(self._known)) for _ in range(3)]
        prompts = [*(self._known[index] for index in chosen), self._prompt(rng), self._prompt(rng)]
        params = [*[_GREEDY] * 3, self._params(rng), self._params(rng)]
        outputs = self.llm.generate(prompts, params, progress=False)
        for index, output in zip(chosen, outputs, strict=False):
            if output.outputs[0].token_ids != self._expected[index]:
                self.errors.append(f"prompt {index} returned other tokens than the first time")
                self._stopping.set()
        self.counts["generated"] += len(outputs)

    def _stream(self, rng: Random) -> None:
        """Stream three requests. Half of the calls leave the loop early, which cancels the requests."""
        leave_after = rng.choice((1, 5, 10**9, 10**9))
        for number, _ in enumerate(self.llm.stream([self._prompt(rng) for _ in range(3)], self._params(rng))):
            if number == leave_after:
                break
        self.counts["streamed"] += 3

    def _submit(self, rng: Random) -> None:
        """Submit eight requests, cancel some of them at once or after a step, and poll until all have ended."""
        ids = {self.llm.submit(self._prompt(rng), self._params(rng)) for _ in range(8)}
        self.counts["submitted"] += len(ids)
        for id in sorted(ids)[: rng.randrange(8)]:
            if rng.random() < 0.5:
                ids -= {done for done, _ in self.llm.poll()}
            self.llm.cancel(id)
            self.counts["cancelled"] += 1
        while ids:
            ids -= {done for done, _ in self.llm.poll()}
