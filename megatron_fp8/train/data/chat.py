"""Chats as documents: the tokenizer's chat template, and which characters the assistant wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .texts import Document
from .tokenizers import ChatTemplate

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLE = "assistant"


def chat_documents(
    messages: Sequence[Mapping[str, Any]], tools: Any, template: ChatTemplate, *, loss: str
) -> list[Document]:
    """The documents of one chat, and in each the characters whose tokens have a loss.

    A template with ``{% generation %}`` says itself what the assistant wrote. With another one an answer is what
    the template adds to the text that asks for it: the messages before, and add_generation_prompt. Where a
    template writes earlier answers otherwise once later messages follow (Qwen3 leaves their thoughts out), each answer
    is the end of a document of its own: what the model is asked for when it is used.

    Args:
        messages: each with ``role`` and ``content``.
        tools: for the template; None: none.
        loss: 'all', or 'assistant' for the assistant's part alone.

    Raises ValueError: transformers is not installed, the template refuses the chat, or does not begin an answer's text
    with the text that asks for it.
    """
    if loss == "all":
        text = _render(messages, tools, template)[0]
        return [_document(text, [(0, len(text))])]
    if _MARKS.search(template.template):
        text, spans = _render(messages, tools, template, return_assistant_tokens_mask=True)
        return [_document(text, spans)]
    answers = []
    for place, message in enumerate(messages):
        if message.get("role") == _ROLE:
            asked = _render(messages[:place], tools, template, add_generation_prompt=True)[0]
            text = _render(messages[: place + 1], tools, template)[0]
            if not text.startswith(asked):
                raise ValueError(
                    f"the chat template does not begin the text up to message {place + 1} with the text that asks for"
                    " it, so that where the assistant's part begins is not known: give a template with"
                    " {% generation %} marks, or leave data.loss out"
                )
            answers.append((text, (len(asked), len(text))))
    whole = _render(messages, tools, template)[0]
    if all(whole.startswith(text) for text, _ in answers):
        return [_document(whole, [span for _, span in answers])]
    return [_document(text, [span]) for text, span in answers]


def _document(text: str, spans: Sequence[tuple[int, int]]) -> Document:
    return Document(text.encode(), tuple((first, last) for first, last in spans))


def _render(
    messages: Sequence[Mapping[str, Any]], tools: Any, template: ChatTemplate, **options: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and what its marks say; as transformers renders it."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise ValueError(
            "chats need the package transformers: run pip install transformers, or give texts"
        ) from error
    try:
        (text,), spans = render_jinja_template(
            [list(messages)], tools, chat_template=template.template, **options, **template.special
        )
    except Exception as error:  # a template is code: it may raise anything
        raise ValueError(f"the tokenizer's chat template refuses it ({error})") from error
    return text, spans[0] if spans else []
