"""Tokenizers from a folder and from a GGUF file, chat templates, and EOS token ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gguf_files import TINY, write_gguf
from tests.tokenizer_files import TEMPLATE, VARIED, byte_fallback, byte_level, save
from yalis.checkpoint import fetch
from yalis.checkpoint.base import Checkpoint
from yalis.checkpoint.resolve import open_checkpoint
from yalis.checkpoint.tokenizer import Tokenizer, eos_token_ids, load_tokenizer
from yalis.errors import YalisError

ROOT = Path(__file__).parents[2]
HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    TINY.build(seed=1).save_pretrained(path)
    return save(byte_level(), path)


def _open(path: Path) -> tuple[Checkpoint, Tokenizer]:
    checkpoint = open_checkpoint(str(path))
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    return checkpoint, tokenizer


def test_a_folder(folder: Path) -> None:
    from transformers import AutoTokenizer

    _, tokenizer = _open(folder)
    reference = AutoTokenizer.from_pretrained(str(folder))
    for text in VARIED:
        ids = tokenizer.encode(text)
        assert ids == reference(text)["input_ids"]
        assert ids[0] == reference.bos_token_id
        assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "<|start|><|end|>"
    assert tokenizer.decode([0, 1]) == ""


def test_chat(folder: Path) -> None:
    _, tokenizer = _open(folder)
    ids = tokenizer.encode_chat(HELLO)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>hello there<|end|><|assistant|>"
    with pytest.raises(YalisError, match=r"chat template of .* does not accept these messages \(no tools here\)"):
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])


def test_the_text_of_a_single_token(folder: Path) -> None:
    _, level = _open(folder)
    fallback = Tokenizer(byte_fallback(), (), "tiny")
    for tokenizer in (level, fallback):
        ids = tokenizer.hf.encode("hello  hallo", add_special_tokens=False)
        assert "".join(map(tokenizer.token_text, ids)).strip() == "hello  hallo"
    assert fallback.token_text(fallback.hf.convert_tokens_to_ids("\u2581h")) == " h"
    assert [fallback.token_text(fallback.hf.convert_tokens_to_ids(one)) for one in ("<0xE2>", "</s>")] == [
        "\ufffd",
        "</s>",
    ]
    assert fallback.token_text(10_000) == ""  # a padded vocabulary has ids without a token


def test_invalid_unicode_raises_one_sentence(folder: Path) -> None:
    _, tokenizer = _open(folder)
    for half, escaped in (("\ud800", r"\\ud800"), ("a\udcff", r"\\udcff")):  # the second: byte ff of an argument
        with pytest.raises(YalisError, match=f"the text contains {escaped}, half a character or a byte"):
            tokenizer.encode(half)
        with pytest.raises(YalisError, match=f"the text contains {escaped}"):
            tokenizer.encode_chat([{"role": "user", "content": half}])
        with pytest.raises(YalisError, match=rf"has the role 'usera?{escaped}', which the chat template of"):
            tokenizer.encode_chat([{"role": f"user{half}", "content": "x"}])


def test_no_template_and_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    plain = save(byte_level(), tmp_path / "plain", template=None)
    checkpoint = open_checkpoint(str(folder))
    tokenizer = load_tokenizer(checkpoint, override=str(plain))
    assert tokenizer is not None
    with pytest.raises(YalisError, match="has no chat template"):
        tokenizer.encode_chat(HELLO)

    TINY.build(seed=1).save_pretrained(tmp_path / "bare")
    bare = open_checkpoint(str(tmp_path / "bare"))
    assert load_tokenizer(bare) is None
    with pytest.raises(YalisError, match="has no tokenizer"):
        load_tokenizer(bare, override=str(tmp_path / "bare"))
    with pytest.raises(YalisError, match="there is no 'nowhere'"):
        load_tokenizer(bare, override="nowhere")
    (tmp_path / "bare" / "tokenizer.json").write_text("{broken")
    with pytest.raises(YalisError, match=r"cannot read the tokenizer in .*tokenizer=") as error:
        load_tokenizer(bare)
    assert "\n" not in str(error.value)


def test_random_weights_use_the_tokenizer_of_the_folder(folder: Path) -> None:
    for model in (folder, folder / "config.json"):
        assert load_tokenizer(open_checkpoint(str(model), load="random")) is not None


def test_eos_token_ids(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    TINY.build(seed=1).save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    save(byte_level(), path)
    checkpoint, tokenizer = _open(path)
    assert eos_token_ids(checkpoint) == (2,)  # config.json
    assert tokenizer.eos_ids == (2, 1)  # and that of the tokenizer
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    checkpoint, tokenizer = _open(path)
    assert eos_token_ids(checkpoint) == (7, 1)
    assert tokenizer.eos_ids == (7, 1)
    checkpoint.config.pop("eos_token_id")
    (path / "generation_config.json").unlink()
    assert eos_token_ids(checkpoint) == ()


def _gguf(path: Path, **extra: object) -> Path:
    """Write a tiny Llama with the byte-level tokenizer in its file."""
    hf = byte_level()
    model = json.loads(hf.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(merge) for merge in model["merges"]]
    ids = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.chat_template": TEMPLATE}
    return write_gguf(path, TINY.build(seed=1), tokens=tokens, merges=merges, extra={**ids, **extra})


def test_the_tokenizer_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("YALIS_CACHE", str(tmp_path / "cache"))
    path = _gguf(tmp_path / "tiny.gguf")
    reference = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="tiny.gguf")
    _, built = _open(path)
    entries = list((tmp_path / "cache" / "tokenizers").iterdir())
    assert len(entries) == 1
    _, cached = _open(path)
    for tokenizer in (built, cached):
        for text in [*VARIED, "<|user|>hello<|end|>"]:
            assert tokenizer.encode(text) == reference(text)["input_ids"]
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
        assert tokenizer.eos_ids == (1,)
        chat = tokenizer.encode_chat(HELLO)
        assert tokenizer.decode(chat, skip_special_tokens=False) == "<|user|>hello there<|end|><|assistant|>"

    # another file gets another cache entry, and a damaged entry is rebuilt
    _open(_gguf(tmp_path / "other.gguf", **{"general.name": "other"}))
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 2
    (entries[0] / "tokenizer.json").write_text("{")
    assert _open(path)[1].encode("hello") == cached.encode("hello")
    assert json.loads((entries[0] / "tokenizer.json").read_text())


def test_a_gguf_file_with_add_bos_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path / "cache"))
    path = _gguf(tmp_path / "bos.gguf", **{"tokenizer.ggml.add_bos_token": True})
    for _ in range(2):  # built, then from the cache
        tokenizer = _open(path)[1]
        assert tokenizer.encode("hello world")[0] == 0
        assert tokenizer.encode("hello world").count(0) == 1
        assert 0 not in tokenizer.encode_chat(HELLO)


def test_a_gguf_file_without_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "bare.gguf", TINY.build(seed=1))
    assert load_tokenizer(open_checkpoint(str(path))) is None


def test_raw_byte_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save(byte_fallback(), tmp_path)))
    assert tokenizer is not None
    ids = tokenizer.encode("hello é")
    assert [tokenizer.is_byte(token) for token in ids][-2:] == [True, True]
    assert not any(tokenizer.is_byte(token) for token in ids[:-2])
    assert not tokenizer.is_byte(10**6)


def test_smollm2_tokens_equal_transformers() -> None:
    from transformers import AutoTokenizer

    try:
        path = fetch.fetch_model("smollm2-135m")
    except YalisError as error:
        pytest.skip(f"needs the model: {error}")
    _, tokenizer = _open(path)
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in VARIED:
        assert tokenizer.encode(text) == reference(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    expected = reference.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    assert tokenizer.encode_chat(HELLO) == reference.encode(expected, add_special_tokens=False)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.vocab_size == 49152


CODE = """
open({ran!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Tokens(PreTrainedTokenizerFast): pass
class Config(LlamaConfig): model_type = "own"
class Model(LlamaForCausalLM): pass
"""


@pytest.mark.parametrize("part", ["tokenizer", "config"])
def test_the_code_of_a_model_folder_is_never_executed(tmp_path: Path, part: str) -> None:
    """transformers asks on standard input whether to execute it, unless trust_remote_code is set."""
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(CODE.format(ran=str(ran)))
    tokenizer = {"tokenizer_class": "Tokens", "auto_map": {"AutoTokenizer": ["own.Tokens", None]}}
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer if part == "tokenizer" else {}))
    (tmp_path / "config.json").write_text(json.dumps(config if part == "config" else {"model_type": "llama"}))
    program = f"""
import sys, torch
from pathlib import Path
from yalis.checkpoint.tokenizer import load_tokenizer
from yalis.study.peers.engines import _load
from yalis.study.peers.peer import PeerSetup
model = Path(sys.argv[1])
for start in (
    lambda: load_tokenizer(str(model)),
    lambda: _load(PeerSetup(model, False, torch.float32, torch.device("cpu"))),
    lambda: _load(PeerSetup(model, True, torch.float32, torch.device("cpu"))),
)[: 1 if {part == "tokenizer"} else 3]:
    try:
        start()
    except Exception as error:
        print(error)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    home = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input="y\n" * 9, cwd=tmp_path, env=home, capture_output=True, text=True, timeout=120)
    assert not ran.exists()
    assert done.returncode == 0, done.stderr
    if part == "tokenizer":
        assert "needs the Python code of its folder, which is never executed; name another" in done.stdout
