"""Chats: the text of a template, and which characters and ids of it the assistant wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_fp8.train.data import corpus
from megatron_fp8.train.data.documents import DocumentRules, chat_documents
from megatron_fp8.train.data.tokenizers import ChatTemplate, JsonTokenizer

TURN = "{{ '<|' + m.role + '|>' + m.content }}<|end|>\n"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = f"{{{{ bos_token }}}}{{% for m in messages %}}{TURN}{{% endfor %}}{ASK}"
MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}" + ASK
)
# As Qwen3's: the last answer alone has a place for thoughts.
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}" + ASK
)
CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three\n\n"},
    {"role": "assistant", "content": "\n\nfour  é "},
]


def answers(template: str, chat=CHAT, loss="assistant") -> list[list[str]]:
    found = chat_documents(chat, None, ChatTemplate(template, {"bos_token": "<s>"}), loss=loss)
    return [[text.decode()[first:last] for first, last in spans] for text, spans in found]


def test_answers_are_what_follows_the_text_that_asks_for_them():
    assert answers(PLAIN) == [["two<|end|>\n", "\n\nfour  é <|end|>\n"]]
    (whole,) = answers(PLAIN, loss="all")
    assert whole[0].startswith("<s><|user|>one<|end|>\n<|assistant|>two") and whole[0].endswith("é <|end|>\n")


def test_marks_of_a_template_count():
    assert answers(MARKED) == [["two<|end|>", "\n\nfour  é <|end|>"]]


def test_answers_that_later_messages_change_are_documents_of_their_own():
    expected = [["<think></think>two<|end|>\n"], ["<think></think>\n\nfour  é <|end|>\n"]]
    assert answers(THINKS) == expected
    found = chat_documents(CHAT, None, ChatTemplate(THINKS, {}), loss="assistant")
    assert found[1].text.decode().startswith("<|user|>one<|end|>\n<|assistant|>two<|end|>\n<|user|>three")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages | length }}", "does not begin the text up to message 2 with the text that asks for it"),
        ("{{ raise_exception('no roles here') }}", "refuses it \\(no roles here\\)"),
        ("{{ ''.__class__.__mro__ }}", "refuses it"),  # a template is somebody's code
    ],
)
def test_templates_that_do_not_say_where_an_answer_begins_are_refused(template, words):
    with pytest.raises(ValueError, match=words):
        answers(template)


def test_a_chat_without_answers_has_no_loss():
    assert answers(PLAIN, CHAT[:1]) == [[]]


@pytest.fixture(params=["trimmed offsets", "prepended space"])
def tokenizer(request, tmp_path) -> JsonTokenizer:
    """Byte-level as GPT-2's, whose offsets leave white space out; or as Llama 2's, where one character is several ids."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["<s>", "<|end|>", "<|user|>", "<|assistant|>"]
    if request.param == "trimmed offsets":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.post_processor = processors.ByteLevel(trim_offsets=True)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(models.BPE(byte_fallback=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet, special = [], special + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["one two three four  \n\n two"] * 4, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    beside = {"eos_token": "<|end|>", "bos_token": "<s>", "add_bos_token": True, "chat_template": PLAIN}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    return JsonTokenizer(tmp_path / "tokenizer.json")


def ids_of(prefix: str) -> list[np.ndarray]:
    data = IndexedDataset(prefix)
    return [document.copy() for document in data]  # the file is mapped for as long as the data set lives


def prepared(folder: Path, tokenizer: JsonTokenizer, loss: str) -> tuple[str, list[np.ndarray]]:
    (folder / "chat.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    prefix = corpus.prepare([folder / "chat.jsonl"], tokenizer, folder / "cache", DocumentRules(loss=loss))
    return prefix, ids_of(prefix)


def test_the_ids_that_have_a_loss_say_the_answers_and_no_more(tokenizer, tmp_path):
    prefix, data = prepared(tmp_path, tokenizer, "assistant")
    corpus.check_mask(prefix)
    (ids,), (mask,) = data, ids_of(corpus.mask_of(prefix))
    begins = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
    ends = np.flatnonzero(np.diff(mask.astype(int), append=0) == -1)
    said = [
        tokenizer._tokenizer.decode(ids[first : last + 1].tolist(), skip_special_tokens=False)
        for first, last in zip(begins, ends, strict=True)
    ]
    # Its template ends with a line after the turn, so the end of document follows, and is learned as that is.
    # Llama 2's puts spaces after special tokens.
    assert [text.replace(" ", "") for text in said] == ["two<|end|>\n", "\n\nfouré<|end|>\n<|end|>"]
    assert ids[0] == tokenizer.start[0] != ids[1], "the template wrote the start itself"
    _, whole = prepared(tmp_path, tokenizer, "all")
    assert whole[0].tolist() == ids.tolist(), "which loss there is changes no id"


def test_a_template_is_found_where_hugging_face_writes_it(tokenizer, tmp_path):
    assert tokenizer.chat == ChatTemplate(PLAIN, {"eos_token": "<|end|>", "bos_token": "<s>"})
    several = [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert JsonTokenizer(tmp_path / "tokenizer.json").chat == ChatTemplate("y", {})
    (tmp_path / "chat_template.jinja").write_text("z")
    assert JsonTokenizer(tmp_path / "tokenizer.json").chat == ChatTemplate("z", {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja' cannot be read"):
        JsonTokenizer(tmp_path / "tokenizer.json")


def test_another_template_is_prepared_anew(tokenizer, tmp_path):
    before, _ = prepared(tmp_path, tokenizer, "all")
    tokenizer.chat = ChatTemplate(MARKED, {})
    assert prepared(tmp_path, tokenizer, "all")[0] != before
