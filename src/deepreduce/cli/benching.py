"""`deepreduce bench`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..pipeline import parse
from . import files, output
from .arguments import positive

if TYPE_CHECKING:
    from ..lab.bench.measure import BenchInput, Row


def add(commands: Any) -> None:
    """Add the command."""
    bench = commands.add_parser(
        "bench",
        help="measure codecs on gradients",
        description="Bytes by section, bits per index and per value, error and time of every codec on every gradient, beside what else is "
        "installed. Without arguments: the methods of the paper's Figure 10 on the recorded gradients of this package.",
        epilog="example: deepreduce bench --gradient mine.npz --codec topr:0.01/rice/qsgd --codec topr:0.01/auto/fp16 --report out",
    )
    bench.add_argument("--gradient", action="append", type=Path, metavar="FILE", help=".npy or .npz file (may be repeated)")
    bench.add_argument("--codec", action="append", metavar="SPEC", help="spec or preset (may be repeated)")
    bench.add_argument("--repeat", type=positive, default=5, metavar="N", help="timed runs, of which the best counts (default 5)")
    bench.add_argument("--no-peers", action="store_true", help="leave out torch.topk, pcodec, zlib and PyTorch's own hooks")
    bench.add_argument("--report", type=Path, required=True, metavar="DIR", help="where bench.csv, bench.json and report.html go")
    bench.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> None:
    """Measure, print the table, write the files."""
    from ..lab.bench.store import write_csv, write_json  # bench and report are loaded for this command only
    from ..lab.report.benchmark_page import benchmark_page
    from ..lab.report.charts import check_matplotlib
    from ..lab.report.provenance import provenance

    check_matplotlib()
    methods = _methods(args.codec)
    gradients = _gradients(args.gradient)
    folder = output.make_folder(args.report)
    rows = _measure_all(gradients, methods, args.repeat, peers=not args.no_peers)
    origin = provenance()
    _print(rows)
    write_csv(folder / "bench.csv", rows, origin)
    write_json(folder / "bench.json", rows, origin)
    (folder / "report.html").write_text(benchmark_page(rows, origin))
    print(f"wrote {folder / 'bench.csv'}, {folder / 'bench.json'} and {folder / 'report.html'}")


def _methods(specs: list[str] | None) -> dict[str, str]:
    from ..lab.bench.specs import DEFAULT

    chosen = {spec: spec for spec in specs} if specs else DEFAULT
    for spec in chosen.values():
        parse(spec)
    return chosen


def _gradients(paths: list[Path] | None) -> dict[str, BenchInput]:
    if paths:
        return {str(path): files.read_tensors(path) for path in paths}
    from ..lab.data import NAMES, load

    convolution = {"resnet20 l.8.c2.weight (the paper's Figure 10)": load("resnet20")["l.8.c2.weight"]}
    return convolution | {name: load(name) for name in NAMES}


def _measure_all(gradients: dict[str, BenchInput], methods: dict[str, str], repeat: int, peers: bool) -> list[Row]:
    from ..lab.bench.measure import measure
    from ..lab.bench.peers import measure_peers

    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(gradients) * (len(methods) + peers))
        for name, gradient in gradients.items():
            for method, spec in methods.items():
                progress.update(task, description=f"{name} {method}")
                rows.append(measure(name, gradient, spec, method, repeat))
                progress.advance(task)
            if peers:
                rows += measure_peers(name, gradient, repeat)
                progress.advance(task)
    return rows


def _print(rows: list[Row]) -> None:
    from ..lab.report.quantity import in_seconds

    console = output.console()
    for name in dict.fromkeys(row.gradient for row in rows):
        mine = [row for row in rows if row.gradient == name]
        table = Table(title=f"{name}: {mine[0].numel:,} elements", title_justify="left", box=None, pad_edge=False, title_style="bold")
        table.add_column("method", overflow="fold")
        for column in ("bytes", "of dense", "bits/index", "bits/value", "error", "codec error", "encode", "decode"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in mine:
            numbers = (f"{row.nbytes:,}", f"{row.relative_volume:.2%}", f"{row.bits_per_index:.2f}", f"{row.bits_per_value:.2f}")
            errors = ("–" if np.isnan(error) else f"{error:.4f}" for error in (row.relative_error, row.codec_error))
            table.add_row(row.method, *numbers, *errors, in_seconds(row.encode_seconds), in_seconds(row.decode_seconds))
        console.print(table, "")
