"""`deepreduce diff`, `patch`, `verify` and `fold`: exact differences of checkpoints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ..errors import WrongBaseError
from ..message import DEFAULT_MAX_NUMEL
from ..weights import files
from ..weights.api import Mode
from ..weights.records import Header, TensorRecord
from ..weights.sources import Progress as Advance
from . import output
from .arguments import natural, positive

_CHECKPOINT = "a safetensors file, a folder of them, its index, or an npz file"


def add(commands: Any) -> None:
    """The four commands."""
    diff = commands.add_parser(
        "diff",
        help="what changed between two checkpoints",
        description="Write a patch that turns checkpoint OLD into NEW, bit for bit. A checkpoint is " + _CHECKPOINT + ".",
        epilog="example: deepreduce diff step-100/ step-200/ 100-200.patch",
    )
    diff.add_argument("old", type=Path, metavar="OLD", help="checkpoint that the receiver has")
    diff.add_argument("new", type=Path, metavar="NEW", help="checkpoint that it shall have")
    diff.add_argument("target", type=Path, metavar="PATCH", help="file to write")
    diff.add_argument("--portable", action="store_true", help="a larger patch that can be read without the old weights")
    diff.add_argument("--index", default="rice", metavar="CODEC", help="index codec of a portable patch (default %(default)s)")
    diff.add_argument("--after", type=Path, metavar="PATCH", help="the patch before this one: versions are counted")
    diff.set_defaults(run=run_diff)

    patch = commands.add_parser(
        "patch",
        help="apply patches to a checkpoint",
        description="Write the checkpoint that patches make of OLD, in the layout of OLD. Base and result are checked.",
        epilog="example: deepreduce patch step-100/ 100-200.patch step-200/",
    )
    patch.add_argument("old", type=Path, metavar="OLD", help="checkpoint that the first patch was made from")
    patch.add_argument("patches", type=Path, nargs="+", metavar="PATCH", help="patches, in their order")
    patch.add_argument("new", type=Path, metavar="NEW", help="checkpoint to write")
    patch.set_defaults(run=run_patch)

    verify = commands.add_parser(
        "verify",
        help="whether a checkpoint belongs to a patch",
        description="Tell whether a checkpoint is the base or the result of a patch. Exit code 1 where it is neither.",
        epilog="example: deepreduce verify step-200/ 100-200.patch --expect result",
    )
    verify.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=_CHECKPOINT)
    verify.add_argument("patch", type=Path, metavar="PATCH", help="file written by diff")
    verify.add_argument("--expect", choices=["base", "result"], help="fail where it is the other one")
    verify.set_defaults(run=run_verify)

    fold = commands.add_parser(
        "fold",
        help="several patches as one",
        description="Write one patch that does what several do one after the other. Conditional ones need the base of the first.",
        epilog="example: deepreduce fold 1-2.patch 2-3.patch 1-3.patch --base step-1/",
    )
    fold.add_argument("patches", type=Path, nargs="+", metavar="PATCH", help="patches, in their order; two at least")
    fold.add_argument("target", type=Path, metavar="FOLDED", help="file to write")
    fold.add_argument("--base", type=Path, metavar="CHECKPOINT", help="checkpoint that the first patch was made from")
    fold.set_defaults(run=run_fold)
    for command in (patch, fold):
        command.add_argument(
            "--max-numel",
            type=natural,
            default=DEFAULT_MAX_NUMEL,
            metavar="N",
            help="refuse patches whose added and replaced tensors have more elements than the base and N (default %(default)s)",
        )
    for command in (diff, fold):
        command.add_argument("--threads", type=positive, metavar="N", help="threads that encode (default: all cores, at most 8)")


@contextmanager
def _bar(title: str, total_bytes: int | None) -> Iterator[Advance]:
    """A progress bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)


def run_diff(args: argparse.Namespace) -> None:
    """Compare two checkpoints, and say what changed."""
    mode: Mode = "portable" if args.portable else "conditional"
    with _bar("comparing", files.dense_bytes(args.new)) as advance:
        header = files.diff_files(
            args.old, args.new, args.target, mode=mode, index=args.index, after=args.after, threads=args.threads, progress=advance
        )
    print(f"{args.target}: {_told(header, args.target.stat().st_size)}")


def run_patch(args: argparse.Namespace) -> None:
    """Apply patches."""
    with _bar("checking and writing", 2 * files.dense_bytes(args.old)) as advance:
        files.patch_files(args.old, args.patches, args.new, max_numel=args.max_numel, progress=advance)
    print(f"{args.new}: {len(args.patches)} patch(es) applied, base and result verified")


def run_verify(args: argparse.Namespace) -> None:
    """Tell what a checkpoint is to a patch."""
    with _bar("checking", files.dense_bytes(args.checkpoint)) as advance:
        state = files.verify_files(args.checkpoint, args.patch, progress=advance)
    if args.expect not in (None, state):
        raise WrongBaseError("already applied" if state == "result" else "not applied", f"{args.checkpoint} is the {state} of {args.patch}")
    print(f"{args.checkpoint} is the {state} of {args.patch}")


def run_fold(args: argparse.Namespace) -> None:
    """Fold patches."""
    with _bar("folding", 2 * files.dense_bytes(args.base) if args.base else None) as advance:
        header = files.fold_files(args.patches, args.target, args.base, threads=args.threads, max_numel=args.max_numel, progress=advance)
    print(f"{args.target}: {_told(header, args.target.stat().st_size)}")


def _told(header: Header, size_bytes: int) -> str:
    changed = sum(record.changed for record in header.tensors)
    numel = sum(record.numel for record in header.tensors)
    dense = sum(record.nbytes for record in header.tensors)
    share = f"{changed / numel:.2%} of {numel:,} weights changed" if numel else "no weights"
    bits = f", {8 * size_bytes / changed:.2f} bits each" if changed else ""
    return f"{size_bytes:,} bytes, {dense / size_bytes:.1f} times smaller than {dense:,} dense; {share}{bits}"


# inspect


def inspect_patch(path: Path, as_json: bool) -> None:
    """Print what a patch does, tensor by tensor."""
    with files.open_patches([path]) as (patch,):
        rows = [_row(record, bits) for record, bits in _with_bits(patch)]
        header = patch.header
    if as_json:
        print(json.dumps(_plain(header, path.stat().st_size, rows), indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("tensor", "shape", "dtype", "what"):
        table.add_column(title, overflow="fold")
    for title in ("changed", "share", "bits/changed", "base", "result"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "()"
        share, bits = f"{row['share']:.2%}", "-" if row["bits_per_changed"] is None else f"{row['bits_per_changed']:.2f}"
        table.add_row(
            output.verbatim(row["name"]), shape, row["dtype"], row["action"], f"{row['changed']:,}", share, bits, row["base"], row["result"]
        )
    console = output.console()
    console.print(table)
    console.print(f"\n{header.mode} patch, version {header.version}: {_told(header, path.stat().st_size)}")
    console.print(f"base {header.base.hex()}, result {header.result.hex()}")
    console.print("small tensors are coded in groups: their bits are those of the group, shared out by changes")


def _with_bits(patch: Any) -> Iterator[tuple[TensorRecord, float]]:
    """Each record with the bits that it takes; those of a group are shared out by changes."""
    tensors = patch.header.tensors
    bits = [8.0 * sum(record.sizes) for record in tensors]
    for group, size_bytes in zip(patch.groups, patch.header.group_sizes, strict=True):
        counts = [tensors[piece.tensor].counts[piece.number] for piece in group]
        for piece, count in zip(group, counts, strict=True):
            bits[piece.tensor] += 8.0 * size_bytes * count / max(sum(counts), 1)
    return zip(tensors, bits, strict=True)


def _row(record: TensorRecord, bits: float) -> dict[str, Any]:
    return {
        "name": record.name,
        "shape": list(record.shape),
        "dtype": record.kind.name,
        "action": record.action.name.lower(),
        "changed": record.changed,
        "share": record.changed / max(record.numel, 1),
        "bits_per_changed": bits / record.changed if record.changed else None,
        "base": record.base_check.hex(),
        "result": record.result_check.hex(),
    }


def _plain(header: Header, size_bytes: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    digests = {"base": header.base.hex(), "result": header.result.hex()}
    return {"kind": "patch", "mode": header.mode, "version": header.version, "nbytes": size_bytes, **digests, "tensors": rows}
