"""What structured outputs cost, and how the two libraries for them compare.

    python benchmarks/structured_outputs.py overhead [--turns 12] [--out FILE]
    python benchmarks/structured_outputs.py libraries SUITE [--out FILE]

`overhead` measures the same decode steps of the default model with and without a schema, in turns in one process.
SUITE is a folder of the JSON-Schema-Test-Suite, such as tests/draft2020-12. `libraries` needs xgrammar as well, which
YALIS does not use. Both print their result and write it as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

_BATCH, _TOKENS = 8, 64
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z.]+@[a-z]+\\.(com|org)$"},
        "role": {"enum": ["engineer", "teacher", "pilot"]},
    },
    "required": ["name", "age", "email", "role"],
    "additionalProperties": False,
}
#: Longer than the measured steps, so that all answers have the same number of tokens.
_SCHEMA = {"type": "array", "items": _PERSON, "minItems": 50}


def measure_overhead(turns: int, model: str) -> dict[str, Any]:
    """Return milliseconds of a step of 8 sequences, with a schema and without, for greedy and for random sampling."""
    from yalis import LLM, SamplingParams, StructuredOutputs

    with LLM(model, device="cpu", max_model_len=512) as llm:
        prompt = llm.encode_prompt([{"role": "user", "content": "List people as JSON."}])
        runner: Any = llm.request_loop.engine.runner  # type: ignore[union-attr]

        def run(temperature: float, schema: bool) -> dict[str, float]:
            wanted = {"structured_outputs": StructuredOutputs(json=_SCHEMA)} if schema else {"ignore_eos": True}
            sampling = [
                SamplingParams(max_tokens=_TOKENS, temperature=temperature, seed=seed, **wanted)
                for seed in range(_BATCH)
            ]
            before = runner.executor.replays, runner.grammars.masks, time.process_time()
            outputs = llm.generate([prompt] * _BATCH, sampling, progress=False)
            assert all(len(output.token_ids) == _TOKENS for output in outputs)
            return {
                "step_ms": 1e3 * statistics.median(output.metrics.time_per_token for output in outputs),
                "cpu_ms": 1e3 * (time.process_time() - before[2]) / _TOKENS,
                "replayed_steps": runner.executor.replays - before[0],
                "masks": runner.grammars.masks - before[1],
            }

        result: dict[str, Any] = {}
        for name, temperature in (("greedy", 0.0), ("random", 0.8)):
            runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for turn in range(-1, turns):  # the first is a warm-up
                for schema in (False, True) if turn % 2 else (True, False):
                    one = run(temperature, schema)
                    if turn >= 0:
                        runs[schema].append(one)
            pairs = list(zip(runs[False], runs[True], strict=True))
            result[name] = {
                "without": _medians(runs[False]),
                "with": _medians(runs[True]),
                "ratio": _ratios([b["step_ms"] / a["step_ms"] for a, b in pairs]),
                "cpu_ratio": _ratios([b["cpu_ms"] / a["cpu_ms"] for a, b in pairs]),
            }
        return {"model": llm.config.model, "batch": _BATCH, "tokens": _TOKENS, "turns": turns, **result}


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _ratios(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"quartile_1": low, "median": middle, "quartile_3": high}


def compare_libraries(suite: Path) -> dict[str, Any]:
    """Return coverage, correctness, compile times and mask times of both libraries, with the default model's tokens."""
    from yalis.checkpoint.resolve import open_checkpoint
    from yalis.checkpoint.tokenizer import load_tokenizer
    from yalis.config import DEFAULT_MODEL

    tokenizer = load_tokenizer(open_checkpoint(DEFAULT_MODEL, "auto", 0))
    assert tokenizer is not None
    groups = [group for file in sorted(suite.glob("*.json")) for group in json.loads(file.read_text())]
    return {
        "suite": suite.name,
        "schemas": len(groups),
        "llguidance": _try_schemas(groups, tokenizer.hf, *_llguidance(tokenizer.hf)),
        "xgrammar": _try_schemas(groups, tokenizer.hf, *_xgrammar(tokenizer.hf)),
    }


Compile = Callable[[str], Any]
Follow = Callable[[Any, list[int]], tuple[bool, list[float]]]


def _llguidance(hf: Any) -> tuple[Compile, Follow]:
    import llguidance
    import llguidance.hf
    import llguidance.numpy

    size, eos = len(hf), hf.eos_token_id
    tokens = llguidance.hf.from_tokenizer(hf, n_vocab=size, eos_token=eos)
    bits = llguidance.numpy.allocate_token_bitmask(1, size)

    def compile_schema(schema: str) -> Any:
        matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def follow(compiled: Any, ids: list[int]) -> tuple[bool, list[float]]:
        matcher, seconds = compiled.deep_copy(), []
        for token in ids:
            begin = time.perf_counter()
            llguidance.numpy.fill_next_token_bitmask(matcher, bits)
            seconds.append(time.perf_counter() - begin)
            if not _is_set(bits[0], token) or not (token == eos or matcher.consume_token(token)):
                return False, seconds
        return True, seconds

    return compile_schema, follow


def _xgrammar(hf: Any) -> tuple[Compile, Follow]:
    import xgrammar

    size = len(hf)
    info = xgrammar.TokenizerInfo.from_huggingface(hf, vocab_size=size, stop_token_ids=[hf.eos_token_id])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bits = xgrammar.allocate_token_bitmask(1, size)

    def compile_schema(schema: str) -> Any:
        return compiler.compile_json_schema(schema, any_whitespace=True, strict_mode=False)

    def follow(compiled: Any, ids: list[int]) -> tuple[bool, list[float]]:
        matcher, seconds = xgrammar.GrammarMatcher(compiled), []
        for token in ids:
            begin = time.perf_counter()
            matcher.fill_next_token_bitmask(bits)
            seconds.append(time.perf_counter() - begin)
            if not _is_set(bits[0], token) or not matcher.accept_token(token):
                return False, seconds
        return True, seconds

    return compile_schema, follow


def _is_set(words: Any, token: int) -> bool:
    return bool((int(words[token >> 5]) >> (token & 31)) & 1)


def _try_schemas(groups: list[Any], hf: Any, compile_schema: Compile, follow: Follow) -> dict[str, Any]:
    compile_s, mask_s, accepted_wrong, sound = [], [], 0, 0
    for group in groups:
        begin = time.perf_counter()
        try:
            compiled = compile_schema(json.dumps(group["schema"]))
        except Exception:  # each library has its own types
            continue
        compile_s.append(time.perf_counter() - begin)
        wrong = 0
        for test in group["tests"]:
            ids = hf.encode(json.dumps(test["data"], ensure_ascii=False), add_special_tokens=False)
            accepted, seconds = follow(compiled, [*ids, hf.eos_token_id])
            mask_s += seconds
            wrong += accepted and not test["valid"]
        accepted_wrong += wrong
        sound += not wrong
    return {
        "schemas_compiled": len(compile_s),
        "schemas_without_a_wrong_answer": sound,
        "invalid_values_accepted": accepted_wrong,
        "compile_ms": _spread([1e3 * s for s in compile_s]),
        "mask_us": _spread([1e6 * s for s in mask_s]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "mean": statistics.mean(ordered),
        "p99": ordered[len(ordered) * 99 // 100],
        "max": ordered[-1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "libraries"))
    parser.add_argument("suite", nargs="?", type=Path)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--model", default="smollm2-135m", help="for overhead")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "libraries" and args.suite is None:
        parser.error("libraries needs the folder of a draft of the JSON-Schema-Test-Suite")
    result = measure_overhead(args.turns, args.model) if args.what == "overhead" else compare_libraries(args.suite)
    packages = ("torch", "llguidance") if args.what == "overhead" else ("llguidance", "xgrammar", "transformers")
    result = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: metadata.version(name) for name in packages},
        **result,
    }
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
