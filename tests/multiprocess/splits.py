"""The splits and models of the split tests: every family, with sizes that no degree divides evenly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from tests.families import CASES, VOCAB, Case
from yalis import SamplingParams, StructuredOutputs

STEPS = 12
WAVE = 200
LENGTHS = (21, 1, 30, 37, 6, 26)

#: Splits by number of ranks.
SPLITS: dict[int, list[dict[str, Any]]] = {
    2: [{"tp": 2}, {"tp": "1x2"}, {"pp": 2}, {"dp": 2}],
    3: [{"tp": 3}, {"pp": 3}],
    4: [{"tp": 4}, {"tp": "2x2"}, {"tp": "1x4"}, {"pp": 4}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}],
    5: [{"tp": 5}],
    8: [{"tp": 8}, {"tp": "2x4"}, {"tp": "4x2"}, {"tp": "2x2", "pp": 2}, {"tp": 2, "pp": 2, "dp": 2}],
}


def widen(case: Case) -> Case:
    """Return the case with 5 layers, enough heads for 8 ranks, and an MLP width that no number of ranks divides."""
    if case.config in ("Phi3Config", "OlmoeConfig"):  # require heads * head_dim == hidden size
        sizes = {"hidden_size": 128, "num_attention_heads": 8}
        kv_heads = {4: 8, 2: 4, 1: 1}
    else:
        sizes = {"hidden_size": 72, "num_attention_heads": 9, "head_dim": case.options.get("head_dim", 16)}
        kv_heads = {4: 9, 3: 3, 2: 3, 1: 1}
    options = {name: value for name, value in case.options.items() if name != "hidden_size"}
    sizes["num_key_value_heads"] = kv_heads[case.options.get("num_key_value_heads", 2)]
    return replace(case, std=0.15, options={**options, "num_hidden_layers": 5, "intermediate_size": 83, **sizes})


WIDE = [widen(case) for case in CASES]

#: Both are longer than STEPS tokens of the tokenizer of the models, which has single characters. Without llguidance, as
#: on machines for GPU tests, these prompts are sampled like the others.
NUMBERS: dict[str, Any] = {"ignore_eos": True}
WORDS: dict[str, Any] = {"ignore_eos": True}
if find_spec("llguidance") is not None:
    array = {"type": "array", "items": {"type": "integer"}, "minItems": STEPS}
    NUMBERS = {"structured_outputs": StructuredOutputs(json=array)}
    WORDS = {"structured_outputs": StructuredOutputs(regex=f"([a-z]{{2,5}} ){{{STEPS}}}"), "min_tokens": STEPS}

SLICES, WHOLE = {"expert_parallel": False}, {"expert_parallel": True}
#: Models with experts by number of ranks. The pairwise cover has the dense ones.
EXPERT_TRIALS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("olmoe", {"tp": 2, **SLICES}),
        ("mixtral-window", {"tp": 2, **WHOLE}),
        ("glm4-moe-norms-tied", {"tp": 2, **SLICES}),
    ],
    3: [
        ("qwen2-moe", {"tp": 3, **SLICES}),
        ("qwen3-moe-sparse-tied", {"tp": 3, **WHOLE}),
        ("gpt-oss", {"tp": 3, **SLICES}),
    ],
    4: [
        ("olmoe-bias-tied", {"tp": "2x2", **SLICES}),
        ("qwen2-moe", {"tp": "1x4"}),
        ("glm4-moe", {"tp": "1x2", "pp": 2}),
        ("olmoe", {"tp": 4, **WHOLE}),
        ("gpt-oss-tied", {"tp": "2x2", **WHOLE}),
        ("qwen2-moe-dense-tied", {"tp": 2, "pp": 2, **WHOLE}),
        ("mixtral-window", {"tp": 2, "dp": 2, **WHOLE}),
    ],
    8: [("qwen3-moe-sparse-tied", {"tp": "4x2", **SLICES})],
}

#: Every prompt is sampled with GREEDY, and prompt i with RANDOM[i], all in one batch.
GREEDY = SamplingParams(max_tokens=STEPS, ignore_eos=True, logprobs=VOCAB)
RANDOM = [
    SamplingParams(max_tokens=STEPS, ignore_eos=True, temperature=0.8, seed=1, logit_bias={9: 3.0, 240: 4.0}),
    SamplingParams(max_tokens=STEPS, temperature=1.5, top_k=7, seed=2, **NUMBERS),
    SamplingParams(max_tokens=STEPS, ignore_eos=True, temperature=1.2, top_p=0.8, seed=3),
    SamplingParams(max_tokens=STEPS, ignore_eos=True, temperature=1.3, min_p=0.05, seed=4),
    SamplingParams(
        max_tokens=STEPS, ignore_eos=True, temperature=1.1, top_k=30, top_p=0.7, seed=5, presence_penalty=0.5
    ),
    SamplingParams(max_tokens=STEPS, temperature=0.9, top_p=0.95, seed=6, repetition_penalty=1.2, **WORDS),
]
assert len(RANDOM) == len(LENGTHS)

#: The first prompts also get a token, and the others are only scored.
SCORED = [SamplingParams(max_tokens=int(index < 2), prompt_logprobs=index % 3) for index in range(len(LENGTHS))]

#: A KV cache too small for the batch, and a token budget below the prompt lengths: forces preemption and chunking.
MEMORY_PRESSURE = {
    "device": "cpu", "dtype": "float32", "block_size": 4, "kv_blocks": 30, "max_batch_tokens": 13, "max_model_len": 50,
    "max_num_seqs": 7,
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One engine in a launch: a model and how it is split."""

    case: str
    model: str  # folder
    split: dict[str, Any]
    fields: dict[str, Any]
    forced: str | None = None  # file of prompts with outputs, for teacher forcing
    waves: int = 0  # generate WAVE tokens this many times instead

    @property
    def name(self) -> str:
        return f"{self.case} " + " ".join(f"{degree} {value}" for degree, value in self.split.items())
