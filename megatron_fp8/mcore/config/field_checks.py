"""Checks a config against the table of fields: errors and warnings.

Fields at Megatron-Core's defaults are not checked. With FP8 off Megatron-Core's own behaviour applies, and only
fields that cannot work on this machine give a warning. `megatron-fp8 train` always uses this package's layers, so it
checks a BF16 model too.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig as MegatronLatentConfig
from megatron.core.transformer.transformer_config import TransformerConfig as MegatronConfig

from .field import Field
from .field_table import FIELDS
from .mla_field_rules import LATENT_FIELDS, LATENT_RELATIONS
from .relations import RELATIONS, SILENT
from .rules import check, check_relation, shown


def default_of(field: Any) -> Any:
    """Returns a dataclass field's default; calls its factory if it has one."""
    has_factory = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if has_factory else field.default


DEFAULTS: dict[str, Any] = {
    field.name: default_of(field)
    for field in (*dataclasses.fields(MegatronLatentConfig), *dataclasses.fields(MegatronConfig))
}
"""Defaults of both of Megatron-Core's configs; where they differ, of the one without latent attention."""
KNOWN: dict[str, Field] = FIELDS | LATENT_FIELDS

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")  # their default, 0, is invalid


def check_fields(config: Any, before: str = "") -> None:
    """Raises ValueError for a field that is out of range, in conflict with another, unknown, or unavailable here.

    Args:
        config: any object with Megatron-Core's fields as attributes.
        before: prefix of names in messages, such as 'model.'.
    """
    for name in _NEEDED:
        check(f"{before}{name}", getattr(config, name), FIELDS[name].rule, "give it")
    for name, value in _set_fields(config):
        field = KNOWN.get(name)
        if field is None:
            raise ValueError(
                f"{before}{name}={shown(value)} is a field of a newer Megatron-Core that this version does not know:"
                f" leave it {shown(DEFAULTS[name])}."
            )
        check(f"{before}{name}", value, field.rule, f"change it, or leave it {shown(DEFAULTS[name])}")
        if _is_refused(field):
            raise ValueError(
                f"{before}{name}={shown(value)} is not available in this version: {field.refused}. Leave it"
                f" {shown(DEFAULTS[name])}."
            )
    for relation in (*RELATIONS, *LATENT_RELATIONS):
        check_relation(config, relation, before)


def announce_fields(
    config: Any, fields: Mapping[str, Field] = KNOWN, defaults: Mapping[str, Any] = DEFAULTS
) -> None:
    """Warns of every field that is set without effect, by itself or because of another field.

    Args:
        config: any object with the fields as attributes.
        fields: the table.
        defaults: defaults of the fields to check.
    """
    for name, value in _set_fields(config, defaults):
        field = fields.get(name)
        if field is None:
            continue
        why = f": {field.ignored}" if field.ignored else _why_ineffective(config, field, fields)
        if why and not _requests_actual(config, name, value):
            _warn(f"{name}={shown(value)} has no effect{why}")


def announce_unavailable(config: Any) -> None:
    """With FP8 off: warns of every field that is set and needs something that this machine does not have."""
    for name, value in _set_fields(config):
        field = KNOWN.get(name)
        if field is not None and field.refused and not field.here():
            _warn(f"{name}={shown(value)} cannot work here: {field.refused}")
    for relation in SILENT:
        if not relation.holds(config):
            _warn(relation.words)


def _set_fields(config: Any, defaults: Mapping[str, Any] = DEFAULTS) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of the fields that are not at their default."""
    for name, default in defaults.items():
        value = getattr(config, name, default)
        if value is not default and not (type(value) is type(default) and value == default):
            yield name, value


def _is_refused(field: Field) -> bool:
    """Whether a field is refused. One that works with some dependency is refused only if this machine lacks it."""
    return bool(field.refused) and not (field.where and field.here())


def _why_ineffective(config: Any, field: Field, fields: Mapping[str, Field]) -> str:
    """Returns ' with FIELD' or ' without FIELD' for the field that makes this one ineffective; '' if none does."""
    if field.unless and _is_on(config, field.unless):
        return f" with {field.unless}"
    if not field.only:
        return ""
    needed = [field.only, *([(field.also,)] if field.also else [])]
    found = next((each for each in needed if _is_on(config, *each)), None)
    if found is not None:
        return _why_ineffective(config, fields[found[0]], fields)
    return " without " + " or ".join(f"{each[0]}={each[1]!r}" if each[1:] else each[0] for each in needed)


def _is_on(config: Any, name: str, value: Any = None) -> bool:
    found = getattr(config, name)
    return found == value if value is not None else found not in (DEFAULTS.get(name), None, False)


def _requests_actual(config: Any, name: str, value: Any) -> bool:
    """Whether a field without effect requests the actual behaviour anyway."""
    if name == "kv_channels":  # Megatron-Core fills it in, and copies of a config have that
        return value == config.hidden_size // config.num_attention_heads
    return name in ("transformer_impl", "attention_backend") and getattr(value, "name", value) == "local"


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)
