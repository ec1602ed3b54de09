"""Sweeps: one spec with names in braces, and values for them, make many specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import ConfigError


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Return the name and the values of ``NAME=VALUE,VALUE,...``.

    >>> parse_sweep("fpr=0.1,0.01")
    ('fpr', ['0.1', '0.01'])
    """
    name, _, listed = text.partition("=")
    values = [value for value in listed.split(",") if value]
    if not name.isidentifier() or not values:
        raise ConfigError(f"a sweep is NAME=VALUE,VALUE,... such as fpr=0.1,0.01; got {text!r}")
    return name, values


def expand(specs: Sequence[str], sweeps: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the specs with every ``{name}`` replaced by each of its values in turn.

    >>> expand(["topr:0.01/bloom:p2,fpr={fpr}/raw", "dense"], {"fpr": ["0.1", "0.01"]})
    ['topr:0.01/bloom:p2,fpr=0.1/raw', 'topr:0.01/bloom:p2,fpr=0.01/raw', 'dense']
    """
    unused = [name for name in sweeps if not any(f"{{{name}}}" in spec for spec in specs)]
    if unused:
        raise ConfigError(f"no codec has {{{unused[0]}}}: write --codec 'topr:0.01/bloom:p2,fpr={{{unused[0]}}}/raw'")
    found = list(specs)
    for name, values in sweeps.items():
        word = f"{{{name}}}"
        found = [spec.replace(word, value) for spec in found for value in (values if word in spec else [""])]
    return list(dict.fromkeys(found))
