"""Structured outputs in the engine: every kind, with other sampling parameters, under pressure, and what is refused."""

from __future__ import annotations

import json
import re
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.pages import ROOT
from tests.structured import save_model
from tests.tiny_chat import save_tiny_chat
from tests.tokenizer_files import characters
from yalis import LLM, OutputTag, SamplingParams, StructuredOutputs, StructuredOutputsParams, YalisError
from yalis.sampling import grammar as grammar_module
from yalis.sampling.grammar import Bits, Matcher
from yalis.structured_outputs import GrammarError, GrammarQueueFull
from yalis.types import RequestOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CALL = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
TAGS = StructuredOutputs(
    tags=[OutputTag("<|user|>\n", CALL, "<|assistant|>"), OutputTag("[go]", {"const": 3})], separator=";"
)
KINDS = {
    "json": StructuredOutputs(json=PERSON),
    "json text": StructuredOutputs(json=json.dumps(PERSON)),
    "regex": StructuredOutputs(regex="[0-9]{3}-[a-c]{2,4}"),
    "choice": StructuredOutputs(choice=["yes", 'no "quote"', "line\nbreak", "é😀", "<|user|>"]),
    "lark": StructuredOutputs(grammar='start: "(" NUMBER ("," NUMBER)~1..3 ")"\nNUMBER: /[0-9]{1,3}/'),
    "gbnf": StructuredOutputs(grammar='root ::= "<" [a-d] [a-d] ">"'),
    "tags": TAGS,
    "single tag": StructuredOutputs(tags=TAGS.tags, single_tag=True),
}
LONG = SamplingParams(
    max_tokens=150, temperature=1.0, seed=0, structured_outputs=KINDS["json"], keep_special_tokens=["<|user|>"]
)


def is_valid(kind: str, text: str) -> bool:
    if kind.startswith("json"):
        value = json.loads(text)
        return jsonschema.Draft202012Validator(PERSON).is_valid(value) and list(value) == ["name", "age", "tags"]
    patterns = {
        "regex": "[0-9]{3}-[a-c]{2,4}",
        "choice": "|".join(map(re.escape, KINDS["choice"].choice)),
        "lark": r"\([0-9]{1,3}(,[0-9]{1,3}){1,3}\)",
        "gbnf": "<[a-d]{2}>",
    }
    tag = r'(<\|user\|>\n\{\s*"x"\s*:\s*(true|false)\s*\}<\|assistant\|>|\[go\]3)'
    patterns |= {"tags": f"{tag}(;{tag})*", "single tag": tag}
    return re.fullmatch(patterns[kind], text) is not None


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), device="cpu", threads=1, kv_blocks=400) as model:
        yield model


def answer(llm: LLM, wanted: StructuredOutputs | None, **fields: Any) -> RequestOutput:
    params = {"max_tokens": 200, "temperature": 1.0, "seed": 3, "keep_special_tokens": ["<|user|>", "<|assistant|>"]}
    return llm.generate("the", SamplingParams(**{**params, "structured_outputs": wanted, **fields}), progress=False)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_match_and_end_with_eos(llm: LLM, kind: str) -> None:
    for fields in ({"n": 6}, {"temperature": 0.0}, {"temperature": 1.7, "top_p": 0.9, "seed": 9, "n": 3}):
        for completion in answer(llm, KINDS[kind], **fields).completions:
            if completion.finish_reason == "stop":
                assert is_valid(kind, completion.text), completion.text
                assert completion.token_ids[-1] == llm.get_tokenizer().eos_token_id
            else:
                assert fields == {"temperature": 0.0}  # a random model may repeat itself
                assert completion.finish_reason == "length"


def test_a_json_object(llm: LLM) -> None:
    ends = llm.get_tokenizer().convert_tokens_to_ids(["}", '"'])
    output = answer(llm, StructuredOutputs(json_object=True), n=8, logit_bias=dict.fromkeys(ends, 5.0))
    ended = [completion for completion in output.completions if completion.finish_reason == "stop"]
    assert len(ended) > 4
    assert all(isinstance(json.loads(completion.text), dict) for completion in ended)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"logit_bias": {100: 100.0, 0: 100.0, 1: 100.0, 2: 100.0}},  # of special tokens too
        {"min_tokens": 120},
        {"logprobs": 3, "prompt_logprobs": 1, "top_k": 2},
        {"min_p": 0.2, "n": 4},
    ],
    ids=str,
)
def test_with_other_sampling_parameters(llm: LLM, fields: dict[str, Any]) -> None:
    output = answer(llm, KINDS["json"], **fields)
    for completion in output.completions:
        assert completion.finish_reason == "stop"
        assert is_valid("json", completion.text)
    if "logprobs" in fields:
        for token in output.logprobs or ():
            assert len(token.top) == 3  # from the logits before the mask
        assert len(output.logprobs or ()) == len(output.token_ids)


def test_min_tokens_is_reached_where_the_grammar_allows_it(llm: LLM) -> None:
    words = StructuredOutputs(regex="[a-z]*")
    free = [len(answer(llm, words, seed=seed).token_ids) for seed in range(6)]
    assert min(free) < 20
    assert all(len(answer(llm, words, seed=seed, min_tokens=20).token_ids) > 20 for seed in range(6))


def test_a_stop_string_or_token_ends_an_answer_early(llm: LLM) -> None:
    assert answer(llm, KINDS["regex"], stop=["-"]).text.isdecimal()
    dash = llm.get_tokenizer().convert_tokens_to_ids("-")
    assert answer(llm, KINDS["regex"], stop_token_ids=[dash]).token_ids[-1] == dash


def test_requests_do_not_change_each_other(path: Path, llm: LLM) -> None:
    """Chunked prefill, prefix caching, preemption, replayed steps, next to free requests: the tokens of each alone."""
    kinds = [(KINDS["json"], 1.0), (TAGS, 1.2), (None, 1.0), (KINDS["json"], 1.0)] * 4
    params = [
        SamplingParams(max_tokens=60, temperature=1.0, seed=seed, structured_outputs=wanted, repetition_penalty=penalty)
        for seed, (wanted, penalty) in enumerate(kinds)
    ]
    prompts = [[7 + i % 5, *range(20, 45)] for i in range(len(params))]
    alone = [llm.generate([prompt], one, progress=False)[0] for prompt, one in zip(prompts, params, strict=True)]
    small = {"block_size": 4, "kv_blocks": 48, "max_batch_tokens": 13, "max_num_seqs": 8, "max_model_len": 96}
    with LLM(str(path), device="cpu", threads=1, **small) as tight:
        together = tight.generate(prompts, params, progress=False)
        engine: Any = tight._engine
        counters, runner = engine.scheduler.counters, engine.runner
        engine.scheduler.check()
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert counters.preemptions > 0
    assert counters.chunked_prefills > 0
    assert counters.prefix_hit_tokens > 0
    assert runner.grammars.rebuilt > 0
    assert runner.grammars.masks == sum(
        len(o.token_ids) for o, p in zip(together, params, strict=True) if p.structured_outputs
    )
    assert runner.executor.replays > 0


def test_steps_with_masks_are_replayed(llm: LLM) -> None:
    runner: Any = llm._engine.runner  # type: ignore[union-attr]
    replays, masks = runner.executor.replays, runner.grammars.masks
    output = answer(llm, KINDS["json"])
    assert runner.grammars.masks - masks == len(output.token_ids)
    assert (
        runner.executor.replays - replays >= len(output.token_ids) - 3
    )  # the prompt, and two steps before a recording


def test_special_tokens_are_not_text(llm: LLM) -> None:
    """Neither in a string of JSON nor where a choice has the same characters; tags contain them as tokens."""
    tokenizer = llm.get_tokenizer()
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    for wanted in (
        StructuredOutputs(json={"type": "string", "minLength": 99}),
        StructuredOutputs(json={"const": "<|user|>"}),
        StructuredOutputs(choice=["<|user|>"]),
    ):
        output = answer(llm, wanted, logit_bias={user: 100.0}, max_tokens=40)
        assert user not in output.token_ids
        assert wanted.kind == "choice" or output.text.startswith('"')
        assert wanted.choice or output.finish_reason == ("length" if "minLength" in wanted.text else "stop")
    only = StructuredOutputs(tags=TAGS.tags[:1])
    output = answer(llm, only)
    assert output.token_ids[0] == user
    assert output.text.startswith("<|user|>\n{")


def test_all_eos_tokens_of_the_model_may_end_an_answer(path: Path, tmp_path: Path) -> None:
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    with LLM(str(tmp_path), device="cpu", threads=1) as llm:
        last = {answer(llm, KINDS["gbnf"], seed=seed).token_ids[-1] for seed in range(12)}
    assert last == {1, 3}


def test_tokens_beyond_the_tokenizer_are_never_allowed(llm: LLM) -> None:
    vocab, padded = len(llm.get_tokenizer()), llm.spec.vocab_size
    assert padded > vocab
    bias = dict.fromkeys(range(vocab, padded), 100.0)
    assert max(answer(llm, StructuredOutputs(regex="(.|\n)*"), max_tokens=30, logit_bias=bias).token_ids) < vocab


REFUSED = [
    (StructuredOutputs(json={"not": {"type": "string"}}), "structured_outputs.json cannot be used: Unimplemented"),
    (StructuredOutputs(json=False), "schema is false"),
    (StructuredOutputs(json={"$ref": "#"}), "no text matches it"),
    (StructuredOutputs(json={"$ref": "http://127.0.0.1:1/schema.json"}), "does not fetch resources"),
    (StructuredOutputs(json={"type": "thing"}), "Invalid type: thing"),
    (StructuredOutputs(json={"uniqueItems": True, "x-guidance": {"lenient": True}}), "Unimplemented"),
    (StructuredOutputs(json={"items": {"multipleOf": 1_000_003}}), "cannot honour multipleOf 1000003; give one"),
    (StructuredOutputs(json={"const": "a\0b"}), "cannot honour the control character in 'a\\x00b'; remove it"),
    (StructuredOutputs(json={"multipleOf": 0.12345678}), "cannot honour multipleOf 0.12345678"),
    (StructuredOutputs(regex="(a"), "structured_outputs.regex cannot be used: at 1(8): invalid regex"),
    (StructuredOutputs(grammar="start: unknown"), 'unknown name: "unknown"'),
    (StructuredOutputs(grammar='root ::= ("a"'), "structured_outputs.grammar cannot be used: Expected ')'"),
    (StructuredOutputs(tags=[OutputTag("<", {"not": {}})]), "structured_outputs.tags cannot be used"),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_honoured_is_refused(llm: LLM, wanted: StructuredOutputs, message: str) -> None:
    for _ in range(2):  # compiled, and remembered
        with pytest.raises(YalisError, match=re.escape(message)) as caught:
            answer(llm, wanted)
        assert "\n" not in str(caught.value)


HOSTILE = {
    "nested repetition": StructuredOutputs(regex="(a{1,1000}){1,1000}"),
    "exponential automaton": StructuredOutputs(regex="(a|b)*a(a|b){30}"),
    "long": StructuredOutputs(regex=".*" * 2000),
    "nested regex": StructuredOutputs(regex="(" * 5000 + "a" + ")" * 5000),
    "nested schema": StructuredOutputs(json='{"items":' * 900 + "{}" + "}" * 900),
    "large enum": StructuredOutputs(json={"enum": [f"value {i}" for i in range(40_000)]}),
    "properties": StructuredOutputs(json={"properties": {f"p{i}": {"type": "string"} for i in range(6_000)}}),
    "intersections": StructuredOutputs(
        json={"allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{i}}}"} for i in range(5, 25)]}
    ),
    "references": StructuredOutputs(
        json={"$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 3} for i in range(30)} | {"a30": {}},
              "$ref": "#/$defs/a0"}
    ),
    "many items": StructuredOutputs(json={"type": "array", "minItems": 10**6}),
    "ambiguous": StructuredOutputs(grammar='start: a\na: a a | a a a | "x" | ""'),
    "powers": StructuredOutputs(
        grammar="\n".join(["start: a0", *(f"a{i}: a{i + 1} a{i + 1} a{i + 1}" for i in range(30)), 'a30: "x"?'])
    ),
}  # fmt: skip


TOO_COMPLEX = (
    "long",
    "large enum",
    "properties",
    "intersections",
    "nested schema",
)  #: of these, the ones that are refused for it


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_runs_in_bounded_time(llm: LLM, name: str) -> None:
    """Processor time is measured: other programs may run on the machine."""
    ends: list[str | GrammarError] = []
    seconds: list[float] = []

    def run() -> None:
        try:
            ends.append(answer(llm, HOSTILE[name], max_tokens=20).finish_reason)
        except GrammarError as error:
            ends.append(error)
        seconds.append(time.thread_time())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(300)
    [end] = ends
    assert seconds[0] < 20
    if isinstance(end, GrammarError):
        assert end.code == ("grammar_too_complex" if name in TOO_COMPLEX else "invalid_value")
        assert name not in TOO_COMPLEX or "exceeds a limit of the compilation (" in str(end)
    else:
        assert end in ("length", "stop", "cancelled")


def test_an_answer_that_no_token_can_continue_is_cancelled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a limit of the library is exceeded. The other requests of the step go on."""
    real = Matcher.next_tokens

    def fail(matcher: Matcher) -> Bits | None:
        return None if matcher.num_tokens == 4 else real(matcher)

    expected = answer(llm, None)
    monkeypatch.setattr(Matcher, "next_tokens", fail)
    free = SamplingParams(max_tokens=200, temperature=1.0, seed=3)
    stuck, other = llm.generate(["the", "the"], [LONG, free], progress=False)
    assert (stuck.finish_reason, len(stuck.token_ids)) == ("cancelled", 4)
    assert other.token_ids == expected.token_ids
    engine: Any = llm._engine
    engine.scheduler.check()


def test_a_compiled_grammar_waits_for_no_compilation(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_WAIT", 0.05)
    llm.grammars.start(KINDS["regex"])
    with llm.grammars._compiling:  # as while another thread compiles
        assert is_valid("regex", answer(llm, KINDS["regex"]).text)
        with pytest.raises(GrammarQueueFull, match=r"other schemas were compiled for 0\.05 s; try again"):
            llm.grammars.start(StructuredOutputs(regex="another"))
        step = threading.Thread(target=llm.grammars.start, args=(StructuredOutputs(regex="step"), True))
        step.start()
        step.join(0.2)
        assert step.is_alive()  # a step of the engine waits
    step.join(60)
    assert not step.is_alive()


def test_the_cache_of_grammars_is_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_CACHED", 3)
    for number in range(8):
        assert answer(llm, StructuredOutputs(choice=[f"{number}"])).text == f"{number}"
    assert len(llm.grammars._compiled) <= 300
    llm.grammars._compiled.clear()
    llm.grammars._cached_bytes = 0
    for number in range(8):
        llm.grammars.start(StructuredOutputs(choice=[f"{number}"]))
    assert len(llm.grammars._compiled) == 3
    monkeypatch.setattr(grammar_module, "MAX_CACHED_BYTES", 20)
    for number in range(3):
        assert llm.grammars.start(StructuredOutputs(regex=f"{number}" * 9))
    assert [text for _, text in llm.grammars._compiled] == ["1" * 9, "2" * 9]


def test_a_missing_library_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LLM(str(path), device="cpu", threads=1) as llm:
        assert answer(llm, None, max_tokens=3).finish_reason == "length"
        with pytest.raises(YalisError, match=r"needs llguidance, which is not installed; type `pip install 'yalis\["):
            answer(llm, KINDS["json"])


def test_a_model_without_tokenizer_or_eos_is_refused(path: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    with LLM(str(tmp_path), device="cpu", threads=1) as llm, pytest.raises(YalisError, match="needs a tokenizer"):
        llm.generate([[1, 2]], LONG)
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    tokenizer = characters()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with LLM(str(tmp_path), device="cpu", threads=1) as llm, pytest.raises(YalisError, match="needs an EOS token"):
        llm.generate([[1, 2]], LONG)


def test_the_library_is_imported_only_when_it_is_used(path: Path) -> None:
    import subprocess

    code = "import sys; from yalis import LLM, SamplingParams\n"
    code += f"llm = LLM({str(path)!r}, device='cpu', threads=1)\nllm.generate([[1, 2]], SamplingParams(max_tokens=2))\n"
    code += "assert 'llguidance' not in sys.modules; llm.close()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs has nothing; give exactly one of json,"),
        ({"json": {}, "regex": "a"}, "structured_outputs has json and regex; give exactly one of"),
        ({"json": "{"}, "json is no JSON schema"),
        ({"json": 3}, "json is 3; give a JSON schema"),
        ({"json": {"a": {1, 2}}}, "json is no JSON schema"),
        ({"jsn": {}}, r"has no argument 'jsn' \(did you mean json\?\)"),
        ({"regex": "a", "separator": "x"}, "separator is about tags"),
        ({"regex": "a", "single_tag": True}, "single_tag is about tags"),
        ({"choice": "abc"}, "choice is 'abc'; give a list"),
        ({"choice": ["a", ""]}, "an item of choice is ''; give a non-empty string"),
        ({"choice": ["\ud800"]}, "valid Unicode"),
        ({"tags": [3]}, r"an item of tags is 3; give OutputTag"),
        ({"json_object": 1}, "json_object is 1; give true or false"),
        ({"structural_tag": "x"}, "structural_tag='x' is not supported; give tags"),
        ({"regex": "a" * (1 << 20) + "b"}, "regex of structured_outputs is larger than 1048576 bytes"),
    ],
    ids=str,
)
def test_invalid_structured_outputs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(YalisError, match=message):
        StructuredOutputs(**fields)
    with pytest.raises(YalisError, match=message):
        SamplingParams(structured_outputs=fields)


def test_ignore_eos_excludes_structured_outputs() -> None:
    with pytest.raises(YalisError, match="ends with EOS, so ignore_eos must be false; remove it"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


def test_vllms_name_and_a_dict_are_accepted() -> None:
    assert StructuredOutputsParams is StructuredOutputs
    given = {"tags": [{"begin": "<", "schema": CALL, "end": ">"}], "separator": ";", "disable_fallback": False}
    params = SamplingParams(structured_outputs=given)
    assert params.structured_outputs == StructuredOutputs(tags=(OutputTag("<", CALL, ">"),), separator=";")
    assert "structured_outputs" not in SamplingParams().identity()


def test_the_benchmark_of_the_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = save_tiny_chat(tmp_path / "model", max_position=512), tmp_path / "result.json"
    script = str(ROOT / "benchmarks" / "structured_outputs.py")
    monkeypatch.setattr(sys, "argv", [script, "overhead", "--model", str(model), "--turns", "2", "--out", str(out)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(script, run_name="__main__")
    result = json.loads(out.read_text())
    assert all(result[kind]["with"]["masks"] == 8 * 64 for kind in ("greedy", "random"))
