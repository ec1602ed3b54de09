"""`deepreduce inspect` and `deepreduce codecs`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect as introspection
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from .. import registry, specs
from ..errors import ConfigError
from ..inspection import MessageInfo, TensorInfo, inspect
from ..presets import PRESETS, TABLE_3
from ..weights.files import is_patch
from . import files, output, patching


def add(commands: Any) -> None:
    """Add the two commands."""
    anatomy = commands.add_parser(
        "inspect",
        help="the anatomy of a message",
        description="Show the codecs, sections and bytes of a message, or what a patch does. The checksum is checked, nothing is decoded.",
        epilog="example: deepreduce inspect message.dr --json | jq .nbytes",
    )
    anatomy.add_argument("source", type=Path, metavar="MESSAGE", help="file written by encode or diff")
    anatomy.add_argument("--json", action="store_true", help="print JSON instead of a table")
    anatomy.set_defaults(run=run_inspect)

    codecs = commands.add_parser(
        "codecs",
        help="all codecs, their parameters and presets",
        description="List everything that a spec 'sparsifier/index/value' may name; each piece is name[:first-argument][,key=value]*.",
        epilog="example: deepreduce codecs",
    )
    codecs.set_defaults(run=run_codecs)


def run_inspect(args: argparse.Namespace) -> None:
    """Print the anatomy of a message file, or what a patch does."""
    if is_patch(args.source):
        patching.inspect_patch(args.source, args.json)
        return
    info: TensorInfo | MessageInfo = inspect(files.read_blob(args.source))
    if args.json:
        print(json.dumps(as_json(info), indent=2))
        return
    console = output.console()
    console.print(_anatomy_table(info))
    console.print("\ncodecs:", output.verbatim(", ".join(_specs(info))))
    ratio = f"{info.dense_bytes / info.nbytes:.1f} times smaller than" if info.dense_bytes else "of"
    console.print(f"{info.nbytes:,} bytes ({info.header_bytes:,} header), {ratio} {info.dense_bytes:,} dense")


def as_json(info: TensorInfo | MessageInfo) -> dict[str, Any]:
    """The anatomy as plain numbers and strings."""
    if isinstance(info, MessageInfo):
        tensors = {name: as_json(tensor) for name, tensor in info.tensors.items()}
        return {"nbytes": info.nbytes, "header_bytes": info.header_bytes, "tensors": tensors}
    plain = dataclasses.asdict(info) | {"dtype": str(info.dtype), "shape": list(info.shape)}
    for name in ("numel", "nbytes", "dense_bytes", "bits_per_index", "bits_per_value"):
        plain[name] = getattr(info, name)
    return plain


def _tensors(info: TensorInfo | MessageInfo) -> Mapping[str, TensorInfo]:
    return info.tensors if isinstance(info, MessageInfo) else {"-": info}


def _specs(info: TensorInfo | MessageInfo) -> list[str]:
    return list(dict.fromkeys(tensor.spec for tensor in _tensors(info).values()))


def _anatomy_table(info: TensorInfo | MessageInfo) -> Table:
    mixed = len(_specs(info)) > 1
    table = Table(box=None, pad_edge=False)
    for title in ("tensor", "shape", "dtype", *(["codecs"] if mixed else [])):
        table.add_column(title, overflow="fold")
    for title in ("kept", "index bytes", "order bytes", "value bytes", "bits/index", "bits/value"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, tensor in _tensors(info).items():
        shape = "x".join(map(str, tensor.shape)) or "()"
        codecs = [output.verbatim(tensor.spec)] if mixed else []
        table.add_row(output.verbatim(name), shape, str(tensor.dtype), *codecs, *_numbers(tensor))
    return table


def _numbers(tensor: TensorInfo) -> list[str]:
    sizes = (tensor.nnz, tensor.index_bytes, tensor.order_bytes, tensor.value_bytes)
    return [f"{size:,}" for size in sizes] + [f"{tensor.bits_per_index:.2f}", f"{tensor.bits_per_value:.2f}"]


def run_codecs(args: argparse.Namespace) -> None:
    """Print the registry."""
    console = output.console()
    for stage in registry.STAGES:
        table = _titled(f"{stage.title}s")
        for column in ("name", "parameters", "what it does"):
            table.add_column(column, overflow="fold")
        for entry in stage.table:
            table.add_row(entry.name, specs.signature(entry), _summary(entry.codec))
        for name in registry.third_party(stage):
            table.add_row(name, *_of_another_package(stage, name))
        console.print(table, "")
    for title, named in (("presets", PRESETS), ("the paper's methods (its Table 3)", TABLE_3)):
        table = _titled(title)
        table.add_column("name", no_wrap=True)
        table.add_column("spec")
        for name, spec in named.items():
            table.add_row(Text(name), spec)
        console.print(table, "")


def _of_another_package(stage: registry.Stage, name: str) -> tuple[str, str]:
    """Its parameters and what it does, or why that cannot be said."""
    try:
        entry = stage.by_name(name)
        return (specs.signature(entry), _summary(entry.codec)) if entry else ("", "")
    except ConfigError as error:
        return "", str(error)


def _titled(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)


def _summary(codec: type[Any]) -> str:
    """The first sentence of the docstring, without the name it begins with."""
    first = (introspection.getdoc(codec) or "").split("\n")[0]
    return first.partition("`: ")[2] or first
