"""The vocabulary of mcore/config/table.py: what becomes of a Megatron-Core field here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import installed as compat
from .rules import FLAG, Rule


@dataclass(frozen=True)
class Field:
    """One field. `only`: another field, and optionally its value, without which this one has no effect, unless the field
    `also` is on. `unless`: a field that, when it is on, leaves this one without effect."""

    rule: Rule
    where: str = ""
    only: tuple[Any, ...] = ()
    also: str = ""
    unless: str = ""
    ignored: str = ""
    refused: str = ""
    here: Callable[[], bool] = lambda: True
    """Whether this machine has what the field needs. If not, it cannot be had with FP8 off either."""


def works(rule: Rule, where: str, *only: Any, also: str = "", unless: str = "") -> Field:
    """It has its effect."""
    return Field(rule, where=where, only=only, also=also, unless=unless)


def ignored(why: str, rule: Rule = FLAG) -> Field:
    """It is accepted, changes nothing, and that is said."""
    return Field(rule, ignored=why)


def refused(why: str, rule: Rule = FLAG, here: Callable[[], bool] = lambda: True) -> Field:
    """Setting it is an error: it cannot be had with the layers here."""
    return Field(rule, refused=why, here=here)


def te_layers(what: str, rule: Rule = FLAG) -> Field:
    """Only Transformer Engine's layers have it, and those here are others."""
    return Field(
        rule,
        refused=f"{what} is of Transformer Engine's layers, and those here are others",
        here=compat.has_te,
    )


def te_function(what: str, where: str, rule: Rule = FLAG, instead: str = "") -> Field:
    """A function of Transformer Engine's that serves any layers, where it is installed."""
    why = f"{what} needs Transformer Engine, which is not installed" + (f"; {instead}" if instead else "")
    return Field(rule, where=where, refused=why, here=compat.has_te)
