"""The small real model generates the same tokens as transformers from the same GGUF file in fp32."""

from __future__ import annotations

import pytest
import torch

from yalis import LLM, SamplingParams
from yalis.checkpoint.resolve import open_checkpoint

STEPS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def quicksort(items):\n    ",
    "Water boils at 100 degrees Celsius because",
    "1, 1, 2, 3, 5, 8,",
    "Der schnellste Weg von Berlin nach Paris ist",
    "Q: What is the largest planet?\nA:",
    '{"name": "Ada", "age": 36, "languages": [',
    "The three laws of motion are as follows. First,",
    "Dear Sir or Madam,\n\nI am writing to complain about",
]
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m", device="cpu", dtype="float32") as model:
        yield model


@pytest.fixture(scope="module")
def hf():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = open_checkpoint("smollm2-135m").source
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        **where
    )


def generate_reference(hf, ids: list[int]) -> list[int]:
    model, _ = hf
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=STEPS,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(ids) :].tolist()


def test_greedy_tokens_equal_transformers(llm, hf):
    _, tokenizer = hf
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=STEPS, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer(prompt).input_ids
        assert output.prompt_token_ids == ids
        assert output.token_ids == generate_reference(hf, ids), prompt
        assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_chat_equals_transformers(llm, hf):
    _, tokenizer = hf
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    output = llm.chat(CHAT, SamplingParams(max_tokens=STEPS, ignore_eos=True))[0]
    assert output.prompt_token_ids == ids
    assert output.token_ids == generate_reference(hf, ids)


def test_streamed_text_equals_generated_text(llm):
    sampling = SamplingParams(max_tokens=24)
    whole = llm.generate(PROMPTS[:3], sampling)
    texts = ["", "", ""]
    ends = {}
    for chunk in llm.stream(PROMPTS[:3], sampling):
        texts[chunk.prompt_index] += chunk.text
        if chunk.finish_reason is not None:
            ends[chunk.prompt_index] = chunk.completion
    assert texts == [output.text for output in whole]
    assert [ends[index].token_ids for index in range(3)] == [output.token_ids for output in whole]
    assert llm.num_unfinished == 0


def test_capital_of_france(llm):
    assert llm.generate("The capital of France is", SamplingParams(max_tokens=4))[0].text.startswith(" Paris")
