"""A folder's tokenizer equals transformers' own reading of it, and says what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.errors import RequestError, TokenizerError
from jaxinfer.tokenizer import Tokenizer, has_tokenizer
from tests.tokenizer import tiny

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本語? <|im_end|>"},
            {"role": "assistant", "content": "Yes 🦊"}, {"role": "user", "content": "  two\n"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_dir(folder)


@pytest.mark.parametrize("text", ["", "the quick brown fox", "日本語 🦁\n", "a<|im_end|>b", "plain added ü"])
def test_encode_and_decode_equal_transformers(folder: Path, tokenizer: Tokenizer, text: str) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_template_equals_transformers(folder: Path, tokenizer: Tokenizer, add_generation_prompt: bool) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=add_generation_prompt, return_dict=False)
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt) == expected


def test_num_tokens_is_one_past_the_largest_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.token(tokenizer.num_tokens - 1) is not None
    assert tokenizer.token(tokenizer.num_tokens) is None
    assert tokenizer.token(-1) is None


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def test_end_tokens_are_the_union(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path, chat_template=None)
    assert Tokenizer.from_dir(folder).end_token_ids == {0}  # <|endoftext|>, the tokenizer's own
    write(folder, "config.json", {"model_type": "llama", "eos_token_id": 5})
    write(folder, "generation_config.json", {"eos_token_id": [6, 7]})
    write(folder, "manifest.json", {"end_token_ids": [7, 8]})
    assert Tokenizer.from_dir(folder).end_token_ids == {0, 5, 6, 7, 8}


def test_end_tokens_hold_what_the_template_closes_a_turn_with(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_token_ids == {0, 2}  # <|im_end|> stands in no config


@pytest.mark.parametrize("template", ["{{ messages[-1]['content'] }} plain", "{{ raise_exception('never') }}", "{% if %}"])
def test_a_template_that_names_no_end_token_adds_none(template: str) -> None:
    wrapped = tiny.wrap(tiny.byte_level(), eos_token="<|endoftext|>", chat_template=template)
    assert Tokenizer(wrapped).end_token_ids == {0}


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such folder"):
        Tokenizer.from_dir(tmp_path / "absent")


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"needs tokenizer\.json and tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_config_alone_is_no_tokenizer(tmp_path: Path) -> None:
    """transformers would make one of a single token up from it."""
    write(tmp_path, "config.json", {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    (tmp_path / "vocab.json").write_text("{}")
    assert not has_tokenizer(tmp_path) and not has_tokenizer(tmp_path / "absent")
    with pytest.raises(TokenizerError, match=r"it has none of tokenizer\.json, tokenizer\.model, vocab\.json with merges\.txt, qwen"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("content", ['{"version": "1.0"}', '{"model": {"type": "nonsense"}, "version": "1.0"}', "[]", '"x"', "{}",
                                     '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}'])
def test_damaged_tokenizer(tmp_path: Path, content: str) -> None:
    (tiny.save(tmp_path) / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="no usable tokenizer in"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_half_a_character_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="half a character"):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match="half a character"):
        tokenizer.apply_chat_template([{"role": "user", "content": text}])


def test_truncated_tokenizer(tmp_path: Path) -> None:
    file = tiny.save(tmp_path) / "tokenizer.json"
    file.write_text(file.read_text()[:1000])
    with pytest.raises(TokenizerError, match="no usable tokenizer"):
        Tokenizer.from_dir(tmp_path)


def test_code_in_the_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run code"))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    write(tmp_path, "config.json", {"model_type": "mine"})
    (tmp_path / "tokenizer.json").write_text("{}")
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}})
    with pytest.raises(TokenizerError, match="no usable tokenizer"):
        Tokenizer.from_dir(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_bad_end_token_and_bad_json(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path)
    write(folder, "generation_config.json", {"eos_token_id": "</s>"})
    with pytest.raises(TokenizerError, match="must be a token id or a list"):
        Tokenizer.from_dir(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(TokenizerError, match="is not JSON"):
        Tokenizer.from_dir(folder)


def test_missing_chat_template_is_named() -> None:
    tokenizer = Tokenizer(tiny.wrap(tiny.byte_level()), name="the tokenizer in 'm'")
    assert not tokenizer.has_chat_template
    with pytest.raises(TokenizerError, match="the tokenizer in 'm' has no chat template.*plain prompt"):
        tokenizer.apply_chat_template(MESSAGES)


def test_broken_chat_template() -> None:
    with pytest.raises(TokenizerError, match="chat template with an error"):
        Tokenizer(tiny.wrap(tiny.byte_level(), chat_template="{% if %}")).apply_chat_template(MESSAGES)


@pytest.mark.parametrize("messages, message", [
    ([], "at least one"), ("hello", "at least one"), ({"role": "user", "content": "x"}, "at least one"),
    ([{"content": "x"}], r"messages\[0\].*'role'"), ([{"role": "user"}], "'content'"), (["x"], r"messages\[0\]"),
    ([{"role": "tool", "content": "x"}], "refused the messages: no tools here. Roles given: tool"),
    ([{"role": "user", "content": None}], "refused the messages"),
])
def test_bad_messages(tokenizer: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenizer.apply_chat_template(messages)


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(TokenizerError, match="no fast form"):
        Tokenizer(object())
