"""Chats as documents: applies the chat template and finds the assistant's characters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .text_reader import Document
from .tokenizers import ChatTemplate

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLE = "assistant"


def chat_documents(
    messages: Sequence[Mapping[str, Any]], tools: Any, template: ChatTemplate, *, loss: str
) -> list[Document]:
    """The documents of one chat, each with the characters whose tokens have a loss.

    A template with ``{% generation %}`` marks the assistant's text itself. With other templates, an answer is what the
    template appends to the prompt: the earlier messages with add_generation_prompt. Some templates change earlier
    answers once later messages follow (Qwen3 removes their reasoning). Then each answer ends a separate document, as
    in use of the model.

    Args:
        messages: each with ``role`` and ``content``.
        tools: for the template; None: none.
        loss: 'all', or 'assistant' for the assistant's part only.

    Raises ValueError if transformers is not installed, if the template rejects the chat, or if an answer's text does
    not begin with its prompt.
    """
    if loss == "all":
        text = _render(messages, tools, template)[0]
        return [_document(text, [(0, len(text))])]
    if _MARKS.search(template.template):
        text, spans = _render(messages, tools, template, return_assistant_tokens_mask=True)
        return [_document(text, spans)]
    answers = []
    for index, message in enumerate(messages):
        if message.get("role") == _ROLE:
            prompt = _render(messages[:index], tools, template, add_generation_prompt=True)[0]
            text = _render(messages[: index + 1], tools, template)[0]
            if not text.startswith(prompt):
                raise ValueError(
                    f"the chat template does not begin the text up to message {index + 1} with the text that asks for"
                    " it, so that where the assistant's part begins is not known: give a template with"
                    " {% generation %} marks, or leave data.loss out"
                )
            answers.append((text, (len(prompt), len(text))))
    whole = _render(messages, tools, template)[0]
    if all(whole.startswith(text) for text, _ in answers):
        return [_document(whole, [span for _, span in answers])]
    return [_document(text, [span]) for text, span in answers]


def _document(text: str, spans: Sequence[tuple[int, int]]) -> Document:
    return Document(text.encode(), tuple((first, last) for first, last in spans))


def _render(
    messages: Sequence[Mapping[str, Any]], tools: Any, template: ChatTemplate, **options: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The text as transformers renders it, and its marked spans."""
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
    except Exception as error:  # a template is code and may raise anything
        raise ValueError(f"the tokenizer's chat template refuses it ({error})") from error
    return text, spans[0] if spans else []
