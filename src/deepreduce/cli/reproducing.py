"""`deepreduce paper`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from . import output

if TYPE_CHECKING:
    from ..lab.paper.conduct import Done
    from ..lab.paper.experiment import Result
    from ..lab.train.contract import Event

_INTERRUPTED = 130


def add(commands: Any) -> None:
    """Add the command."""
    paper = commands.add_parser(
        "paper",
        help="redo the paper's figures and tables",
        description="Redo figures and tables of the DeepReduce paper, put its printed numbers beside ours, and judge every claim. Finished "
        "runs are kept in the folder of the report: an interrupted command goes on where it was.",
        epilog="examples:\n"
        "  deepreduce paper list\n"
        "  deepreduce paper figure10 table3 --report out\n"
        "  deepreduce paper all --scale small --data datasets --report out",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    paper.add_argument("names", nargs="+", metavar="NAME", help="figure6 ... figure11, figure15, table1 ... table3, all; or list")
    paper.add_argument("--scale", default="small", metavar="S", help="small (default: minutes), medium (hours) or full (the paper's own)")
    paper.add_argument("--data", type=Path, metavar="DIR", help="folder with cifar-10-batches-bin, ml-1m, ml-20m, imagenet (any of them)")
    paper.add_argument("--report", type=Path, default=Path("paper-report"), metavar="DIR", help="where all goes (default paper-report)")
    paper.set_defaults(run=run_paper)


def run_paper(args: argparse.Namespace) -> None:
    """List the experiments, or run some and write what came of it."""
    from ..lab.paper.catalogue import experiments_of
    from ..lab.paper.conduct import Conductor
    from ..lab.paper.markdown import write_markdown
    from ..lab.paper.page import paper_page
    from ..lab.paper.results import write
    from ..lab.paper.scales import scale_of
    from ..lab.paper.store import RunStore
    from ..lab.report.charts import check_matplotlib
    from ..lab.report.provenance import provenance

    scale = scale_of(args.scale)
    if "list" in args.names:
        _list(scale.name)
        return
    experiments = experiments_of(args.names)
    check_matplotlib()
    folder = output.make_folder(args.report)
    status = Status()
    try:
        done = Conductor(scale, args.data, RunStore(folder / "runs"), status.say, status.listen).run(experiments)
    except KeyboardInterrupt:
        print("deepreduce: interrupted; finished runs are kept, and the same command goes on from there", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None
    finally:
        status.close()
    shown = {each.experiment.name: each.experiment.show(scale, each.runs, each.measurements) for each in done if not each.left_out}
    origin = provenance()
    write(folder, scale.name, done, shown, origin)
    write_markdown(folder, scale, done, shown, origin)
    (folder / "report.html").write_text(paper_page(scale, done, shown, origin))
    _print(done, shown)
    print(f"wrote report.html, paper.md, paper.json and paper.csv in {folder}")


class Status:
    """A line per run; in a terminal, one more that says what trains at the moment."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._line = self._console.status("") if self._console.is_terminal else None
        self._steps = 0

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def listen(self, event: Event) -> None:
        """Take one event of the workers."""
        if event["event"] == "ready":
            self._steps = event["steps"]
        if self._line is not None and event["event"] == "step":
            self._line.update(f"{event['spec']}: step {event['step']:,} of {self._steps:,}, loss {event['loss']:.3f}")
            self._line.start()

    def close(self) -> None:
        """Remove the moving line."""
        if self._line is not None:
            self._line.stop()


def _list(scale: str) -> None:
    from ..lab.paper.catalogue import EXPERIMENTS

    table = Table(box=None, pad_edge=False)
    for column in ("name", "section", "what", f"minutes at {scale}"):
        table.add_column(column, justify="right" if "minutes" in column else "left")
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.section, experiment.title, f"{experiment.minutes[scale]:,g}")
    output.console().print(table)


def _print(done: list[Done], shown: dict[str, Result]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("experiment", "claim", "verdict"):
        table.add_column(column, overflow="fold")
    for each in done:
        for finding in [] if each.left_out else shown[each.experiment.name].findings:
            table.add_row(each.experiment.name, finding.claim, finding.verdict)
        if each.left_out:
            table.add_row(each.experiment.name, "left out", each.left_out)
    output.console().print(table)
