"""The public LLM: results, stop conditions, events, streams, cancellation, and the messages for invalid input."""

from __future__ import annotations

import signal

import numpy
import pytest
import torch
import transformers

from tests.families import CASES, VOCAB, make_prompts, make_reference
from yalis import LLM, SamplingParams, YalisError
from yalis.engine import oom
from yalis.engine.interrupts import Stopped
from yalis.errors import YalisFailure

STEPS = 12


@pytest.fixture(scope="module")
def ref(tmp_path_factory):
    prompts = make_prompts(3, (5, 19, 8), shared=4)
    return make_reference(CASES[0], tmp_path_factory.mktemp("llm"), 3, prompts, STEPS)


@pytest.fixture(scope="module")
def llm(ref):
    with LLM(str(ref.path), device="cpu", kv_blocks=64, block_size=4, max_model_len=64) as model:
        yield model


def plain(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": STEPS, "ignore_eos": True, **fields})


def test_a_stop_token_is_the_last_token(llm, ref):
    stop = ref.tokens[0][3]
    output = llm.generate(ref.prompts[0], plain(stop_token_ids=(stop,)))[0]
    assert output.token_ids == ref.tokens[0][: ref.tokens[0].index(stop) + 1]
    assert output.finish_reason == "stop"


def test_no_stop_token_before_min_tokens(llm, ref):
    stop = ref.tokens[0][3]
    output = llm.generate(ref.prompts[0], plain(stop_token_ids=(stop,), min_tokens=6))[0]
    assert stop not in output.token_ids[:6]
    assert len(output.token_ids) >= 6


def test_eos_ends_a_completion_unless_ignored(tmp_path):
    """The third token of the reference is configured as the end-of-sequence token."""
    ref = make_reference(CASES[0], tmp_path, 3, make_prompts(3, (5,), shared=0), STEPS)
    config = (ref.path / "config.json").read_text()
    eos = ref.tokens[0][2]
    (ref.path / "config.json").write_text(config.replace('"eos_token_id": 2', f'"eos_token_id": {eos}'))
    (ref.path / "generation_config.json").unlink()
    with LLM(str(ref.path), device="cpu", kv_blocks=64) as llm:
        ended = llm.generate(ref.prompts, SamplingParams(max_tokens=STEPS))[0]
        assert ended.token_ids == ref.tokens[0][: ref.tokens[0].index(eos) + 1]
        assert ended.finish_reason == "stop"
        assert llm.generate(ref.prompts, plain())[0].token_ids == ref.tokens[0]


def test_a_full_context_finishes_with_length(ref):
    with LLM(str(ref.path), device="cpu", kv_blocks=64, max_model_len=10) as llm:
        output = llm.generate(ref.prompts[0], plain(max_tokens=100))[0]
        assert output.token_ids == ref.tokens[0][:5]
        assert output.finish_reason == "length"


def test_n_completions_differ_and_are_reproducible(llm, ref):
    sampling = plain(n=3, temperature=1.0, seed=7)
    first, second = (llm.generate(ref.prompts[1], sampling)[0] for _ in range(2))
    answers = [tuple(completion.token_ids) for completion in first.completions]
    assert len(set(answers)) == 3
    assert answers == [tuple(completion.token_ids) for completion in second.completions]
    alone = llm.generate(ref.prompts[1], plain(temperature=1.0, seed=7))[0]
    assert tuple(alone.token_ids) == answers[0]
    # The three share the KV blocks of their prompt.
    assert [completion.metrics.cached_tokens > 0 for completion in first.completions][1:] == [True, True]


def test_unseeded_requests_differ(llm, ref):
    answers = {tuple(llm.generate(ref.prompts[0], plain(temperature=1.5))[0].token_ids) for _ in range(4)}
    assert len(answers) > 1


def test_logprobs_match_the_reference(llm, ref):
    output = llm.generate(ref.prompts[0], plain(logprobs=3))[0]
    wanted = torch.log_softmax(ref.logits[0], -1)
    for step, (token, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert found.token_id == token
        assert found.logprob == pytest.approx(wanted[step, token].item(), abs=1e-4)
        assert list(found.top) == wanted[step].topk(3).indices.tolist()


def test_penalties_reduce_repetition(llm, ref):
    output = llm.generate(ref.prompts[0], plain(max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0))[0]
    calm = llm.generate(ref.prompts[0], plain(max_tokens=40))[0]
    assert len(set(output.token_ids)) > len(set(calm.token_ids))


@pytest.mark.parametrize("eager", [True, False])
def test_logit_bias_gives_the_tokens_of_transformers(ref, eager):
    biases = [dict.fromkeys(ref.tokens[0][:3], -100.0), {7: 3.0, VOCAB - 1: 4.5}, None]
    model = transformers.AutoModelForCausalLM.from_pretrained(ref.path)
    expected = []
    for prompt, bias in zip(ref.prompts, biases, strict=True):
        sequence_bias = bias and {(token,): value for token, value in bias.items()}
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False,
            sequence_bias=sequence_bias,
        )  # fmt: skip
        expected.append(ids[0, len(prompt) :].tolist())
    with LLM(str(ref.path), device="cpu", kv_blocks=64, max_model_len=64, eager=eager) as llm:
        outputs = llm.generate(ref.prompts, [plain(logit_bias=bias) for bias in biases])
        assert (llm._engine.runner.executor.replays > 0) != eager
    assert [output.token_ids for output in outputs] == expected
    assert [tokens == plain for tokens, plain in zip(expected, ref.tokens, strict=True)] == [False, False, True]


def test_logit_bias_outside_the_vocabulary_is_refused(llm):
    with pytest.raises(YalisError, match=f"token id {VOCAB} is not in this model's vocabulary"):
        llm.generate([[1, 2]], plain(logit_bias={VOCAB: 1.0}))


def test_cancel_returns_the_tokens_so_far(llm, ref):
    keep, drop = llm.submit(ref.prompts[0], plain()), llm.submit(ref.prompts[1], plain())
    done = {}
    for step in range(100):
        done.update(llm.poll())
        if step == 4:
            llm.cancel(drop)
        if llm.num_unfinished == 0:
            break
    assert done[keep].token_ids == ref.tokens[0]
    assert done[drop].finish_reason == "cancelled"
    assert done[drop].token_ids == ref.tokens[1][: len(done[drop].token_ids)]
    assert 0 < len(done[drop].token_ids) < STEPS
    llm._engine.scheduler.check()


def test_leaving_a_stream_cancels(llm, ref):
    for chunk in llm.stream(ref.prompts, plain()):
        if chunk.token_ids:
            break
    llm.poll()
    assert llm.num_unfinished == 0
    llm._engine.scheduler.check()
    assert llm.generate(ref.prompts[0], plain())[0].token_ids == ref.tokens[0]


def test_generate_and_stream_leave_other_results_alone(llm, ref):
    mine = llm.submit(ref.prompts[1], plain(max_tokens=3))
    assert llm.generate(ref.prompts[0], plain())[0].token_ids == ref.tokens[0]
    other = llm.submit(ref.prompts[2], plain(max_tokens=3))
    assert [chunk.token_ids for chunk in llm.stream(ref.prompts[0], plain(max_tokens=6))][-1]
    done = dict(llm.poll())
    assert done[mine].token_ids == ref.tokens[1][:3]
    assert done[other].token_ids == ref.tokens[2][:3]


def test_events_are_the_deltas_of_submitted_requests(llm, ref):
    ids = [llm.submit(prompt, plain(n=2)) for prompt in ref.prompts]
    tokens: dict[tuple[int, int], list[int]] = {}
    outputs = {}
    for event in llm.events():
        assert event.request_id not in outputs, "an event came after the request's last one"
        key = event.request_id, event.completion_index
        tokens.setdefault(key, []).extend(event.token_ids)
        assert (event.finish_reason is None) == (event.completion is None)
        if event.completion is not None:
            assert (event.finish_reason, event.completion.token_ids) == ("length", tokens[key])
        if event.output is not None:
            outputs[event.request_id] = event.output
    assert tokens == {(id, index): ref.tokens[i] for i, id in enumerate(ids) for index in range(2)}
    assert {id: len(output.completions) for id, output in outputs.items()} == dict.fromkeys(ids, 2)
    assert llm.poll() == []  # a result is delivered once
    assert list(llm.events()) == []


def test_events_can_be_left_and_continued(llm, ref):
    first = llm.submit(ref.prompts[0], plain())
    seen: dict[int, list[int]] = {first: []}
    for event in llm.events():
        seen[first] += event.token_ids
        if len(seen[first]) == 3:
            break
    second = llm.submit(ref.prompts[1], plain())
    seen[second] = []
    for event in llm.events():
        seen[event.request_id] += event.token_ids
        if len(seen[second]) == 4:
            llm.cancel(second)
    assert event.request_id == first
    assert seen[first] == ref.tokens[0]
    assert seen[second] == ref.tokens[1][: len(seen[second])]
    assert 4 <= len(seen[second]) < STEPS


def test_poll_takes_results_and_drops_their_events(llm, ref):
    short, long = llm.submit(ref.prompts[0], plain(max_tokens=2)), llm.submit(ref.prompts[1], plain())
    done = {}
    while short not in done:
        done.update(llm.poll())
    events = list(llm.events())
    assert {event.request_id for event in events} == {long}
    assert [token for event in events for token in event.token_ids] == ref.tokens[1]
    assert events[-1].output.token_ids == ref.tokens[1]


def test_events_leave_out_the_requests_of_generate_and_stream(llm, ref):
    mine = llm.submit(ref.prompts[2], plain(max_tokens=3))
    stream = llm.stream(ref.prompts[0], plain())
    next(stream)
    assert llm.generate(ref.prompts[1], plain())[0].token_ids == ref.tokens[1]
    events = list(llm.events())
    assert {event.request_id for event in events} == {mine}
    assert [token for event in events for token in event.token_ids] == ref.tokens[2][:3]
    stream.close()
    assert llm.num_unfinished == 0


def test_output_that_is_only_polled_is_not_kept(llm, ref):
    for _ in range(3):
        llm.submit(ref.prompts[0], plain())
        while llm.num_unfinished:
            llm.poll()
    assert not llm._submitted._changed
    assert not llm._submitted.finished


def test_nested_streams_and_generate_calls(llm, ref):
    """Whichever call runs the steps, each call gets its own tokens and its own end."""
    seen: list[int] = []
    for chunk in llm.stream(ref.prompts[0], plain()):
        seen += chunk.token_ids
        if len(seen) == 2:
            assert llm.generate(ref.prompts[1], plain())[0].token_ids == ref.tokens[1]
    assert seen == ref.tokens[0]
    first, second = llm.stream(ref.prompts[0], plain()), llm.stream(ref.prompts[1], plain())
    seen = list(next(first).token_ids)
    assert [token for chunk in second for token in chunk.token_ids] == ref.tokens[1]
    assert seen + [token for chunk in first for token in chunk.token_ids] == ref.tokens[0]
    polled: list = []
    llm.submit(ref.prompts[2], plain(max_tokens=2))
    outputs = llm.generate(ref.prompts, plain(), progress=lambda _: polled.extend(llm.poll()))
    assert [output.token_ids for output in outputs] == ref.tokens
    assert [output.token_ids for _, output in polled] == [ref.tokens[2][:2]]


def test_ctrl_c_between_steps(llm, ref, monkeypatch):
    """Ctrl-C during a step takes effect after it: the tokens are kept, and the engine still works."""
    runner = llm._engine.runner
    launch = runner.launch

    def interrupted(plan):
        signal.raise_signal(signal.SIGINT)
        return launch(plan)

    monkeypatch.setattr(runner, "launch", interrupted)
    with pytest.raises(Stopped) as stopped:
        llm.generate(ref.prompts, plain())
    monkeypatch.setattr(runner, "launch", launch)
    assert llm.num_unfinished == 0
    assert [output.finish_reason for output in stopped.value.done] == ["cancelled"] * len(ref.prompts)
    assert any(output.token_ids for output in stopped.value.done)
    for output, tokens in zip(stopped.value.done, ref.tokens, strict=True):
        assert output.token_ids == tokens[: len(output.token_ids)]
    assert [output.token_ids for output in llm.generate(ref.prompts, plain())] == ref.tokens
    llm._engine.scheduler.check()


def test_a_failed_step_breaks_the_engine(ref, monkeypatch):
    def fail(plan):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 MiB. GPU 0 has a total capacity of")

    with LLM(str(ref.path), device="cpu", kv_blocks=64) as llm:
        monkeypatch.setattr(oom, "free_bytes", lambda device: 1 << 20)
        runner = llm._engine.runner
        run, runner._launch = runner._launch, fail
        tokens = sum(map(len, ref.prompts))
        with pytest.raises(YalisFailure) as raised:
            llm.generate(ref.prompts, plain())
        blocks = 64 - -(-(1 << 19) // runner._block_bytes)
        assert str(raised.value) == (
            f"cpu ran out of memory in a step of {tokens} tokens: at least 1.5 MiB needed, 1.0 MiB free; "
            f"give max_batch_tokens={2 * tokens // 3} or less, or kv_blocks={blocks} or less"
        )
        runner._launch = run
        with pytest.raises(YalisError, match="create a new LLM"):
            llm.generate(ref.prompts, plain())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_raise_a_message(ref, temperature):
    with LLM(str(ref.path), device="cpu", kv_blocks=64) as llm:
        llm._engine.runner.model.norm.weight.fill_(float("nan"))
        with pytest.raises(YalisError, match="logits are NaN: its weights are damaged"):
            llm.generate(ref.prompts, plain(temperature=temperature, logprobs=1))


def test_sampling_of_a_wrong_type_is_refused(llm, ref):
    for sampling in ({"max_tokens": 3}, [{"max_tokens": 3}], 5):
        with pytest.raises(YalisError, match="give SamplingParams"):
            llm.generate(ref.prompts[0], sampling)


def test_numpy_token_ids(llm, ref):
    assert llm.generate(list(numpy.array(ref.prompts[0])), plain())[0].token_ids == ref.tokens[0]
    assert llm.generate([list(numpy.array(ref.prompts[0]))], plain())[0].token_ids == ref.tokens[0]


def test_more_requests_than_fit_at_once(llm, ref):
    outputs = llm.generate(ref.prompts * 40, plain())
    assert [output.token_ids for output in outputs] == ref.tokens * 40


def test_metrics(llm, ref):
    metrics = llm.generate(ref.prompts[1], plain())[0].metrics
    assert metrics.prompt_tokens == 19
    assert metrics.output_tokens == STEPS
    assert 0 < metrics.time_to_first_token < metrics.total
    assert metrics.total == pytest.approx(metrics.time_to_first_token + (STEPS - 1) * metrics.time_per_token)


def test_progress_counts_up(llm, ref):
    seen = []
    llm.generate(ref.prompts, plain(), progress=seen.append)
    assert seen[-1].finished == seen[-1].total == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ("text", "no tokenizer"),
        ([1, VOCAB], f"give ids from 0 to {VOCAB - 1}"),
        ([1, -1], "not in this model's vocabulary"),
        ([1.5], "not in this model's vocabulary"),
        ([1, "a"], "not in this model's vocabulary"),
        (list(range(64)), "64 tokens, but the context holds 64"),
        ([{"role": "user", "content": "hi"}], "no tokenizer"),
        (3, "give a string"),
    ],
)
def test_invalid_prompts_are_refused(llm, prompt, message):
    with pytest.raises(YalisError, match=message):
        llm.generate([prompt] if prompt != 3 else prompt, plain())
    assert llm.num_unfinished == 0


@pytest.mark.parametrize(
    ("fields", "max_len", "message"),
    [
        ({}, 256, "shorten it: the model supports no longer context$"),
        ({"max_model_len": 32}, 32, "shorten it, or raise max_model_len=$"),
        ({"kv_blocks": 4, "block_size": 4}, 16, "shorten it, or raise kv_memory= or kv_blocks=$"),
    ],
)
def test_a_long_prompt_message_names_what_limits_the_context(ref, fields, max_len, message):
    with LLM(str(ref.path), device="cpu", **fields) as llm:
        assert llm.max_model_len == max_len
        with pytest.raises(YalisError, match=message):
            llm.generate([[1] * max_len], plain())


def test_one_invalid_prompt_cancels_the_others(llm, ref):
    with pytest.raises(YalisError, match="not in this"):
        llm.generate([ref.prompts[0], [VOCAB]], plain())
    llm.poll()
    assert llm.num_unfinished == 0


def test_an_empty_chat_is_refused(llm):
    with pytest.raises(YalisError, match="conversation is empty"):
        llm.chat([])


def test_stop_string_needs_a_tokenizer(llm):
    with pytest.raises(YalisError, match="stop strings need a tokenizer"):
        llm.generate([[1, 2]], plain(stop=("x",)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "cuda"}, "device='cpu'"),
        ({"device": "tpu"}, "give auto, cpu, cuda or cuda:N"),
        ({"dtype": "int3"}, "float32"),
        ({"attention": "magic"}, "sdpa"),
        ({"attention": "flash"}, "usable: auto, sdpa"),
        ({"kv_blocks": 2, "block_size": 4, "max_model_len": 64}, "KV"),
        ({"max_batch_tokens": 0}, "at least 1"),
        ({"blok_size": 4}, "no argument 'blok_size'"),
        (
            {"kv_memory": 1e-9},
            r"one block .* needs \d+\.\d KiB and 1 B are set aside for it; give a larger kv_memory=",
        ),
        ({"kv_memory": float("inf")}, "GiB above 0"),
        ({"kv_memory": "1"}, "GiB above 0"),
        ({"memory_fraction": "x"}, "at most 1"),
        ({"device": None}, "device is None"),
        ({"load_seed": "a"}, "load_seed"),
        ({"prefix_reuse": "no"}, "True, False"),
        ({"threads": 10**6}, "1 to 1024"),
        (
            {"kv_blocks": 10**11},
            r"does not fit the memory of cpu: .* GiB needed, .* free; give kv_blocks=\d+ or less",
        ),
        ({"max_model_len": 100_000}, "256"),
    ],
)
def test_invalid_settings_are_refused(ref, fields, message):
    if fields.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(YalisError, match=message) as error:
        LLM(str(ref.path), **{"device": "cpu", **fields})
    assert "\n" not in str(error.value)


def test_a_small_kv_cache_shortens_the_default_context(ref):
    with LLM(str(ref.path), device="cpu", kv_blocks=4, block_size=4) as llm:
        assert llm.max_model_len == 16
        assert llm.generate(ref.prompts[0], plain())[0].token_ids == ref.tokens[0][:11]


def test_profile_records_the_steps_of_its_block(llm, ref):
    request = llm.submit(ref.prompts[0], plain())
    with llm.profile() as profile:
        while profile.decode_tokens < 3:
            llm.poll()
        with pytest.raises(YalisError, match="being profiled already"), llm.profile():
            pass
    prompt_tokens = profile.prompt_tokens
    (rank,) = profile.ranks
    assert [step.info.phase for step in rank.steps] == ["prefill", *["decode"] * 3]
    assert all(step.total_ns > step.idle_ns > 0 for step in rank.steps)
    with pytest.raises(ZeroDivisionError), llm.profile():  # the error of the block is raised, and profiling has ended
        _ = 1 / 0
    while llm.num_unfinished:
        done = dict(llm.poll())
    assert done[request].token_ids == ref.tokens[0]
    assert prompt_tokens == len(ref.prompts[0]) - done[request].metrics.cached_tokens


def test_topology_and_rank_reports_of_one_rank(llm, ref):
    assert llm.topology.nodes == (0,)
    assert (len(llm.topology.hosts), llm.topology.launcher) == (1, "")
    (report,) = llm.rank_reports()
    assert report.rank == 0
    assert min(report.weight_bytes, report.kv_bytes, report.bytes_read) > 0
    request = llm.submit(ref.prompts[0], plain())
    with pytest.raises(YalisError, match="requests are unfinished"):
        llm.rank_reports()
    llm.cancel(request)
    assert [id for id, _ in llm.poll()] == [request]


def test_a_closed_llm_raises(ref):
    llm = LLM(str(ref.path), device="cpu", kv_blocks=8)
    llm.close()
    with pytest.raises(YalisError, match="closed"):
        llm.generate([[1]])
