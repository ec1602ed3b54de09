"""Figure 11: where the time of one iteration goes, NCF at the paper's size, by bandwidth and precision."""

from __future__ import annotations

from collections.abc import Mapping

from ..report.charts import Bar, stacked_bars
from ..report.quantity import in_bytes, in_seconds
from ..train.contract import Plan, RunRecord
from .experiment import Experiment, Finding, Measurements, Result, Runs, decided, sentence
from .scales import Scale, planned

LINKS = ("100mbit", "1gbit", "10gbit")
PRECISIONS = {"fp32": "32 bit", "bf16": "16 bit"}
METHODS = {
    "Baseline": "dense",
    "Top-r": "topr:0.1/raw/raw",
    "DeepReduce": "topr:0.1/bloom:p0,fpr=0.01/qsgd",
}
PARTS = ("forward/backward", "encode/decode", "communication", "waiting")


def name(link: str, precision: str, method: str) -> str:
    """Return the name of a run.

    >>> name("1gbit", "bf16", "Top-r")
    'Top-r, 1gbit, 16 bit'
    """
    return f"{method}, {link}, {PRECISIONS[precision]}"


def runs(scale: Scale) -> Mapping[str, Plan]:
    """Return every method on every link in both precisions."""
    return {
        name(link, precision, method): planned("ml20m", "neumf", spec, scale.iteration, link=link, precision=precision)
        for link in LINKS
        for precision in PRECISIONS
        for method, spec in METHODS.items()
    }


def show(scale: Scale, found: Runs, measured: Measurements) -> Result:
    """Draw the components of an iteration, a chart per link, and judge section 6.4."""
    columns = ("run", "iteration", *PARTS, "bytes sent", "relative volume")
    rows = [_row(method, run) for method, run in found.items()]
    charts = [(f"One iteration on {link}", _chart(found, link)) for link in LINKS]
    first = next(iter(found.values()))
    settings = scale.iteration
    notes = (
        f"{first.parameters:,} parameters, {settings['workers']} workers on links shaped in both directions, {5 * settings['batch']:,} "
        f"examples per worker times {settings.get('accumulate', 1)}; the paper has 1,000,000 times 10. The workers share the cores of this "
        f"machine, so computing is slower than on machines of their own. {sentence(first.data_note)}"
    )
    return Result(columns, rows, [_gain(found), _loss(found)], charts, notes)


def _parts(run: RunRecord) -> dict[str, float]:
    seconds = run.seconds
    values = (seconds["forward_backward"], seconds["encode"] + seconds["decode"], seconds["communication"], seconds["waiting"])
    return {part: value / run.steps for part, value in zip(PARTS, values, strict=True)}


def _row(method: str, run: RunRecord) -> list[str]:
    parts = [in_seconds(value) for value in _parts(run).values()]
    return [
        method,
        in_seconds(run.seconds["total"] / run.steps),
        *parts,
        in_bytes(run.bytes_sent / run.steps),
        f"{run.relative_volume:.4f}",
    ]


def _chart(found: Runs, link: str) -> str:
    bars = []
    for precision, title in PRECISIONS.items():
        for method in METHODS:
            run = found[name(link, precision, method)]
            bars.append(Bar(f"{method}, {title}", _parts(run), in_seconds(run.seconds["total"] / run.steps)))
    return stacked_bars(f"Figure 11, {link}", bars, PARTS)


def _speedups(found: Runs, link: str) -> dict[str, float]:
    total = {
        key: found[name(link, *key)].seconds["total"] for key in ((precision, method) for precision in PRECISIONS for method in METHODS)
    }
    return {PRECISIONS[each]: total[each, "Baseline"] / total[each, "DeepReduce"] for each in PRECISIONS}


def _sentence(found: Runs) -> str:
    speedups = {link: _speedups(found, link) for link in LINKS}
    return "; ".join(f"{link} {', '.join(f'{title} {ratio:.2f}x' for title, ratio in each.items())}" for link, each in speedups.items())


def _gain(found: Runs) -> Finding:
    gains = min(_speedups(found, "100mbit").values()) > 1
    return Finding(
        "At 100 Mbit/s, DeepReduce makes an iteration faster.", "6.4", decided(gains), f"Speed-up over the baseline: {_sentence(found)}."
    )


def _loss(found: Runs) -> Finding:
    slow, fast = _speedups(found, "100mbit"), _speedups(found, "10gbit")
    true = max(fast.values()) < 1 and all(fast[each] < slow[each] for each in fast)
    claim = "Compression pays only where communication is dear: not at 10 Gbit/s."
    return Finding(claim, "6.4", decided(true), f"Speed-up over the baseline: {_sentence(found)}.")


EXPERIMENT = Experiment(
    "figure11",
    "Time of one iteration by bandwidth and precision, NCF with 31,832,577 parameters",
    "6.4",
    {"small": 21, "medium": 40, "full": 600},
    show,
    runs,
    needs=("links",),
)
