"""Kinds of entries of mcore/config/field_table.py: how a Megatron-Core field is handled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import environment as compat
from .rules import FLAG, Rule


@dataclass(frozen=True)
class Field:
    """One field.

    `only`: another field, and optionally its value, without which this one has no effect, unless the field `also` is
    on. `unless`: a field that, when it is on, makes this one ineffective.
    """

    rule: Rule
    where: str = ""
    only: tuple[Any, ...] = ()
    also: str = ""
    unless: str = ""
    ignored: str = ""
    refused: str = ""
    here: Callable[[], bool] = lambda: True
    """Whether this machine has what the field needs. If not, it is unavailable with FP8 off too."""


def works(rule: Rule, where: str, *only: Any, also: str = "", unless: str = "") -> Field:
    """A field that has its effect."""
    return Field(rule, where=where, only=only, also=also, unless=unless)


def ignored(why: str, rule: Rule = FLAG) -> Field:
    """A field that is accepted without effect, with a warning."""
    return Field(rule, ignored=why)


def refused(why: str, rule: Rule = FLAG, here: Callable[[], bool] = lambda: True) -> Field:
    """A field that raises when it is set: the layers here do not support it."""
    return Field(rule, refused=why, here=here)


def te_layers(what: str, rule: Rule = FLAG) -> Field:
    """A field that only Transformer Engine's layers support."""
    return Field(
        rule,
        refused=f"{what} needs Transformer Engine's layers, and this package has its own",
        here=compat.has_te,
    )


def te_function(what: str, where: str, rule: Rule = FLAG, instead: str = "") -> Field:
    """A field for a Transformer Engine function that works with any layers, if it is installed."""
    why = f"{what} needs Transformer Engine, which is not installed" + (f"; {instead}" if instead else "")
    return Field(rule, where=where, refused=why, here=compat.has_te)
