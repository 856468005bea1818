"""Random answers to the schemas of the JSON-Schema-Test-Suite are valid; schemas that are not supported are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from tests.json_suite import SuiteCase, load_suite
from tests.structured import save_model
from yalis import LLM, SamplingParams, StructuredOutputs, YalisError

ANSWERS = 2  # for each schema
#: Of tokens that end strings, arrays and objects: random text would rarely get to the end of a JSON value.
ENDINGS = {'"': 3.0, "}": 3.0, "]": 3.0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = save_model(tmp_path_factory.mktemp("model"))
    with LLM(str(path), device="cpu", threads=1, max_num_seqs=32, kv_blocks=2000) as model:
        yield model


def find_supported(llm: LLM, cases: list[SuiteCase]) -> list[SuiteCase]:
    """Return the cases whose schema is accepted. The others must be refused with a sentence."""
    supported, refused = [], {}
    for case in cases:
        try:
            llm.grammars.start(StructuredOutputs(json=case.schema))
            supported.append(case)
        except YalisError as error:
            refused[case.name] = str(error)
    for name, message in refused.items():
        assert message.startswith(("structured_outputs.json cannot", "structured_outputs cannot honour")), name
        assert "\n" not in message, name
    return supported


def make_validator(case: SuiteCase) -> Validator:
    return validator_for(case.schema, Draft202012Validator)(case.schema)


def is_judged_right(case: SuiteCase) -> bool:
    """Return whether the jsonschema package agrees with the suite, which also has schemas of other drafts."""
    try:
        return all(make_validator(case).is_valid(value) == valid for value, valid in case.tests)
    except Exception:  # of its parsers of patterns and references
        return False


def check(llm: LLM, cases: list[SuiteCase]) -> None:
    bias = {llm.get_tokenizer().convert_tokens_to_ids(token): value for token, value in ENDINGS.items()}
    sampling = [
        SamplingParams(
            max_tokens=150, temperature=1.0, seed=seed, n=ANSWERS, logit_bias=bias,
            structured_outputs=StructuredOutputs(json=case.schema),
        )
        for seed, case in enumerate(cases)
    ]  # fmt: skip
    outputs = llm.generate(["the"] * len(cases), sampling, progress=False)
    ended, wrong = 0, []
    for case, output in zip(cases, outputs, strict=True):
        for completion in output.completions:
            assert completion.finish_reason in ("stop", "length"), case.name
            if completion.finish_reason == "stop":
                ended += 1
                if not make_validator(case).is_valid(json.loads(completion.text)):
                    wrong.append((case.name, case.schema, completion.text))
    assert not wrong
    assert ended > 0.8 * len(cases) * ANSWERS


def test_answers_are_valid(llm: LLM) -> None:
    supported = find_supported(llm, load_suite())
    assert len(supported) > 500
    judged = [case for case in supported if is_judged_right(case)]
    assert len(judged) > 500
    check(llm, judged)


def test_no_invalid_value_of_the_suite_is_accepted(llm: LLM) -> None:
    """As its text is usually written."""
    tokenizer, wrong = llm.get_tokenizer(), []
    for case in filter(is_judged_right, find_supported(llm, load_suite())):
        start = llm.grammars.start(StructuredOutputs(json=case.schema))
        for value, valid in case.tests:
            for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2)):
                matcher = start.copy()
                accepted = matcher.consume(tokenizer.encode(text, add_special_tokens=False)) and matcher.complete
                if accepted and not valid:
                    wrong.append((case.name, text))
    assert not wrong
