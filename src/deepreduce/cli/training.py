"""`deepreduce train` and `deepreduce demo`."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..errors import ConfigError
from ..pipeline import parse
from . import files, output
from .arguments import finite, natural, positive
from .live import Live

if TYPE_CHECKING:
    from ..lab.train.contract import Plan
    from ..lab.train.outcome import Outcome

_INTERRUPTED = 130  # as shells say it: 128 + SIGINT
_TOPOLOGIES = ("allgather", "server", "sharded")
DEMO_CODECS = ("topr:0.01/rice/qsgd", "topr:0.01/rice/fitpoly", "topr:0.01/bloom:p2,fpr=0.001/qsgd")
DEMO_LINK = "100mbit"
DEMO_LENGTH = ("--epochs", "12", "--evaluations", "24")  # dense over that link: less than two minutes


def add(commands: Any) -> None:
    """Add the two commands."""
    train = commands.add_parser(
        "train",
        help="train with real workers, dense and by every codec given",
        description="Train the same model dense and by every codec, from the same weights, and show what each cost.",
        epilog="examples:\n"
        "  deepreduce train --codec topr:0.01/rice/qsgd --report out\n"
        "  deepreduce train --workers 4 --codec topr:0.01/rice/qsgd --link 100mbit --steps 100\n"
        "  deepreduce train --task text --recipe adam --seeds 3\n"
        "  torchrun --nproc-per-node 2 -m deepreduce.cli.main train --codec topr:0.01/rice/qsgd",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("--task", default="digits", metavar="TASK", help="digits (default), cifar10, imagenet, ml1m, ml20m or text")
    train.add_argument("--model", metavar="NAME", help="digits: mlp, cnn; cifar10: resnet20, densenet40, convnet; others have one")
    train.add_argument("--framework", default="torch", metavar="NAME", help="torch (default); tensorflow or jax for digits")
    train.add_argument("--workers", type=positive, default=2, metavar="N", help="processes (default 2)")
    train.add_argument("--codec", action="append", default=[], metavar="SPEC", help="spec or preset (may be repeated)")
    train.add_argument(
        "--method",
        action="append",
        default=[],
        metavar="M",
        help="gradients (default), dgc:STEPS, updates, local:EVERY (may be repeated)",
    )
    train.add_argument("--recipe", metavar="NAME", help="adam or sgd: local steps with what goes together, instead of --method and --codec")
    train.add_argument("--sweep", action="append", default=[], metavar="NAME=A,B", help="train codecs with {NAME} once per value")
    train.add_argument("--topology", default="allgather", choices=_TOPOLOGIES, help="who sends what to whom (default allgather)")
    train.add_argument(
        "--memory",
        choices=("residual", "parameters", "none"),
        help="error feedback: what was not sent is kept beside the parameters (default), or in them (updates and local steps)",
    )
    train.add_argument("--small", type=natural, metavar="N", help="tensors below N elements go dense (default 1024)")
    train.add_argument("--link", metavar="RATE", help="put every worker on its own shaped link, such as 100mbit (Linux)")
    train.add_argument("--epochs", type=positive, metavar="N", help="passes over the data (default: by task)")
    train.add_argument("--steps", type=positive, metavar="N", help="steps, instead of epochs")
    train.add_argument("--batch", type=positive, metavar="N", help="examples per worker and step (default: by task)")
    train.add_argument("--accumulate", type=positive, default=1, metavar="N", help="batches whose gradients make one step (default 1)")
    train.add_argument("--precision", default="fp32", metavar="P", help="fp32 (default), fp16 or bf16: of weights and gradients")
    train.add_argument("--compile", action="store_true", help="compile the model by torch.compile before its first step")
    train.add_argument("--learning-rate", type=float, metavar="X", help="default: by task")
    train.add_argument("--schedule", default="cosine", metavar="S", help="cosine (default), constant, or step:0.25=0.1,0.375=0.01")
    train.add_argument("--evaluations", type=natural, metavar="N", help="how often quality is measured (default: by task)")
    train.add_argument("--test-batches", type=positive, metavar="N", help="measure quality on N test batches per worker (default: all)")
    train.add_argument(
        "--negatives", type=positive, default=99, metavar="N", help="rankings: items the true one is ranked among (99 or 999)"
    )
    train.add_argument("--seed", type=natural, default=0, help="of the weights, the order of the data and the codecs (default 0)")
    train.add_argument("--seeds", type=positive, default=1, metavar="N", help="train with N seeds and show mean and spread (default 1)")
    train.add_argument("--data", type=Path, metavar="PATH", help="folder of the official files of the task; for text, a file")
    train.add_argument("--target", type=finite, metavar="Q", help="say when runs reached this quality (default: that of dense at its end)")
    train.add_argument("--no-dense", action="store_true", help="leave out the dense run")
    train.add_argument("--fp16-hook", action="store_true", help="train by PyTorch's hook for gradients in half precision too")
    _add_results(train)
    train.set_defaults(run=run_train)

    demo = commands.add_parser(
        "demo",
        help=f"digits with two workers on links of {DEMO_LINK}, dense beside three codecs",
        description=f"Train on handwritten digits with two workers, dense beside three codecs: two or three minutes. The workers are on "
        f"links of {DEMO_LINK} where the machine can make such (Linux and iproute2, no root).",
        epilog="example: deepreduce demo --report report",
    )
    _add_results(demo)
    demo.set_defaults(run=run_demo)


def _add_results(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", type=Path, metavar="FILE", help="write all results for programs")
    command.add_argument("--report", type=Path, metavar="DIR", help="write report.html for people")


def run_train(args: argparse.Namespace) -> None:
    """Train as asked."""
    _conduct(_plan(args), args.json, args.report, args.seeds, args.target)


def run_demo(args: argparse.Namespace) -> None:
    """Train the demo."""
    command = argparse.ArgumentParser()
    add(command.add_subparsers())
    codecs = [word for spec in DEMO_CODECS for word in ("--codec", spec)]
    _conduct(_plan(command.parse_args(["train", *DEMO_LENGTH, *_demo_link(), *codecs])), args.json, args.report)


def _demo_link() -> list[str]:
    """Return the option for shaped links, where they can be made here; else say why not."""
    from ..lab.train.failures import LinkError
    from ..lab.train.links import check_links

    try:
        check_links()
    except LinkError as error:
        print(f"deepreduce: the workers share this machine without a slow link between them: {error}", file=sys.stderr)
        return []
    return ["--link", DEMO_LINK]


def _plan(args: argparse.Namespace) -> Plan:
    from ..lab.train.contract import Plan  # the training part is loaded for these commands only
    from ..lab.train.launcher import joins_others, worker_module
    from ..lab.train.links import check_links, parse_rate
    from ..lab.train.method_specs import FP16_HOOK, method_text
    from ..lab.train.sweeps import expand, parse_sweep
    from ..lab.train.tasks import task_of

    if args.recipe is not None:
        _apply_recipe(args)
    task = task_of(args.task)
    model = args.model or task.models[0]
    if model not in task.models:
        raise ConfigError(f"task {task.name!r} has the models {', '.join(task.models)}, got {model!r}")
    worker_module(args.framework)
    codecs = expand(args.codec, dict(map(parse_sweep, args.sweep)))
    for spec in codecs:
        parse(spec)
    specs_by_method = [method_text(method, spec) for method in args.method or ["gradients"] for spec in codecs]
    without_codec = [*([] if args.no_dense else ["dense"]), *([FP16_HOOK] if args.fp16_hook else [])]
    specs = dict.fromkeys([*without_codec, *specs_by_method])
    if not specs:
        raise ConfigError("nothing to train: give a --codec, or leave out --no-dense")
    plan = Plan(
        task=task.name,
        model=model,
        specs=tuple(specs),
        workers=int(os.environ["WORLD_SIZE"]) if joins_others() else args.workers,
        batch=args.batch or task.batch,
        steps=args.steps or (None if args.epochs else task.steps),
        epochs=args.epochs or task.epochs,
        evaluations=task.evaluations if args.evaluations is None else args.evaluations,
        learning_rate=task.learning_rate if args.learning_rate is None else args.learning_rate,
        topology=args.topology,
        memory=args.memory or "residual",
        small=1024 if args.small is None else args.small,
        seed=args.seed,
        data=str(args.data) if args.data else None,
        negatives=args.negatives,
        framework=args.framework,
        link=args.link,
        accumulate=args.accumulate,
        precision=args.precision,
        schedule=args.schedule,
        test_batches=args.test_batches,
        compiled=args.compile,
    )
    if plan.link:
        parse_rate(plan.link)
        check_links()
    return plan


def _apply_recipe(args: argparse.Namespace) -> None:
    """Put the parts of a recipe where the options for them would put them."""
    from ..step.recipes import local_recipe

    if args.method or args.codec:
        raise ConfigError("--recipe names the method and the codec: give it, or --method and --codec")
    recipe = local_recipe(args.recipe)
    args.method, args.codec = [f"local:{recipe.every}"], [recipe.spec]
    args.memory = args.memory or recipe.memory
    args.small = recipe.small_tensor_numel if args.small is None else args.small


def _conduct(plan: Plan, json_path: Path | None, report: Path | None, seeds: int = 1, target: float | None = None) -> None:
    from ..lab.report.charts import check_matplotlib
    from ..lab.report.provenance import provenance
    from ..lab.train.launcher import joins_others
    from ..lab.train.outcome import Outcome
    from ..lab.train.tasks import read_data

    if report:
        check_matplotlib()
    if json_path and os.environ.get("RANK", "0") == "0":  # the others of torchrun write nothing
        output.check_writable(json_path)
    folder = output.make_folder(report) if report else None
    outcome = Outcome(plan, provenance(), one_machine=not joins_others(), seeds=seeds, target=target)
    if not joins_others():
        read_data(plan)  # missing data is told here in one line, not by a worker's traceback
    train = _join if joins_others() else _launch
    try:
        for number in range(seeds):
            train(replace(plan, seed=plan.seed + number), outcome)
    except KeyboardInterrupt:
        print("deepreduce: interrupted; all workers have ended", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None
    finally:
        if outcome.records:  # also those that ended before an error; only rank 0 of torchrun has any
            _finish(outcome, json_path, folder)


def _launch(plan: Plan, outcome: Outcome) -> None:
    """Start workers that train, and put their records into the outcome."""
    from ..lab.train.launcher import launch

    with Live(plan, outcome) as live:
        launch(plan, live.listen)


def _join(plan: Plan, outcome: Outcome) -> None:
    """Be one worker among those that torchrun started; rank 0 puts the records into the outcome."""
    from importlib import import_module

    from ..lab.train.launcher import worker_module

    if plan.link:
        raise ConfigError("--link starts the workers itself: run it without torchrun")
    if plan.framework != "torch":
        raise ConfigError(f"torchrun starts workers of torch; run it without torchrun for {plan.framework}")
    with Live(plan, outcome, quiet=os.environ["RANK"] != "0") as live:
        import_module(worker_module(plan.framework)).train(plan, live.listen)


def _finish(outcome: Outcome, json_path: Path | None, folder: Path | None) -> None:
    """Write the files, then show the results."""
    from ..lab.train.outcome import beside_dense

    written = _write_files(outcome, json_path, folder)
    output.console().print(_table(outcome))
    for spec, distance in beside_dense(outcome.runs()).items():
        print(f"{spec}: {distance}")
    for remark in (*outcome.remarks(), *written):
        print(remark)


def _write_files(outcome: Outcome, json_path: Path | None, folder: Path | None) -> list[str]:
    """Write the files that were asked for, and return lines that name them."""
    from ..lab.report.training_page import training_page

    written = []
    if json_path:
        _write(json_path, outcome.write_json)
        written.append(f"wrote {json_path}")
    if folder:
        _write(folder / "train.json", outcome.write_json)
        _write(folder / "report.html", lambda path: path.write_text(training_page(outcome)))
        written.append(f"the report: {(folder / 'report.html').resolve()}")
    return written


def _write(path: Path, write: Any) -> None:
    try:
        write(path)
    except OSError as error:
        raise files.FileError(f"cannot write {path}: {error.strerror}") from error


def _table(outcome: Outcome) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="bold", title=f"{outcome.plan.model} on {outcome.plan.task}")
    for number, column in enumerate(outcome.columns()):
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number > 0)
    for row in outcome.rows():
        table.add_row(*row)
    return table
