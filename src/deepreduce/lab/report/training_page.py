"""The report of `deepreduce train`: the table, quality against epochs and bytes, volume, and the time of a step as in Figure 11."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import TYPE_CHECKING

from .charts import Bar, Line, line_chart, stacked_bars
from .page import figures, page, section, table
from .quantity import in_bytes, in_seconds, in_times, quality_format

if TYPE_CHECKING:
    from ..train.contract import Plan, RunRecord
    from ..train.outcome import Outcome

_PARTS = ("forward/backward", "encode/decode", "communication", "waiting")


def training_page(outcome: Outcome) -> str:
    """The whole page."""
    plan, records = outcome.plan, outcome.runs()
    metric = records[0].metric
    machines = "one machine, links not shaped" if outcome.one_machine else "machines of their own"
    where = f"links of {plan.link}" if plan.link else machines
    lead = (
        f"{plan.model} on {plan.task}: {records[0].parameters:,} parameters, {plan.workers} workers on {where}, "
        f"{records[0].steps:,} steps of {_examples(plan)} examples per worker in {plan.precision}, "
        f"topology {plan.topology}, {_seeds(outcome)}. All runs start from "
        f"the same weights and see the same data; {records[0].gradient_zeros:.0%} of a gradient's elements are zero before anything is "
        "left out."
    )
    rate = outcome.computed_rate
    on_link = f"on a link of {rate}, computed from what was sent" if rate else f"on links of {plan.link}" if plan.link else "as measured"
    better = " (lower is better)" if records[0].lower_is_better else ""
    race = (f"{metric}{better} against seconds {on_link}", quality_by_seconds(records, rate))
    charts = [
        (f"{metric} against epochs", quality_by_epochs(records)),
        (f"{metric} against bytes sent by a worker, logarithmic", quality_by_bytes(records)),
        ("Relative data volume: bytes of the messages over bytes of the gradients", volume_chart(records)),
        ("Time of one step", time_chart(records)),
        ("Training loss against steps", loss_chart(records)),
    ]
    notes = (
        "Seconds are those of the training steps, without evaluation. Encoding and exchange run beside the backward pass, so the parts may "
        "add up to more than the whole. Communication counts from when the last worker is there; before that it is waiting. "
        f"{' '.join(outcome.remarks())}"
    )
    return page(
        f"deepreduce train: {plan.task}",
        lead,
        [
            section("Time to quality", figures([race])),
            section("Results", table(outcome.columns(), outcome.rows()), lead=notes),
            section("Pictures", figures(charts)),
        ],
        outcome.origin,
    )


def quality_by_epochs(records: Sequence[RunRecord], labels: Sequence[str] | None = None) -> str:
    """Return quality at every evaluation; curves are labelled by their specs, or as given."""
    lines = [
        Line(label, [(point["step"] / record.steps_per_epoch, point["quality"]) for point in record.curve])
        for label, record in zip(labels or [record.spec for record in records], records, strict=True)
    ]
    return line_chart("Quality against epochs", lines, "epochs", records[0].metric, _plain, _quality(records))


def quality_by_bytes(records: Sequence[RunRecord]) -> str:
    """Quality at every evaluation, by what was sent until then."""
    lines = [Line(record.spec, [(point["bytes_sent"], point["quality"]) for point in record.curve]) for record in records]
    return line_chart("Quality against bytes", lines, "bytes sent", records[0].metric, in_bytes, _quality(records), log_x=True)


def quality_by_seconds(records: Sequence[RunRecord], rate: str | None) -> str:
    """Return quality at every evaluation by the seconds until then, as measured or computed for a link of a rate."""
    from ..train.race import seconds_at  # train writes its reports with this module

    lines = [Line(record.spec, [(seconds_at(record, point, rate), point["quality"]) for point in record.curve]) for record in records]
    return line_chart("Quality against seconds", lines, "seconds", records[0].metric, in_seconds, _quality(records), log_x=True)


def _quality(records: Sequence[RunRecord]) -> Callable[[float], str]:
    return quality_format(records[0].lower_is_better)


def loss_chart(records: Sequence[RunRecord]) -> str:
    """The training loss of rank 0."""
    lines = [Line(record.spec, [(float(step), loss) for step, loss in record.losses]) for record in records]
    return line_chart("Training loss", lines, "steps", "loss", _plain, _plain)


def volume_chart(records: Sequence[RunRecord]) -> str:
    """Return one bar per run."""
    bars = [
        Bar(record.spec, {"message": record.relative_volume}, in_times(1 / record.relative_volume) if record.relative_volume else "")
        for record in records
    ]
    return stacked_bars("Relative data volume", bars, ("message",))


def time_chart(records: Sequence[RunRecord]) -> str:
    """Figure 11: what a step spends its time with."""
    return stacked_bars("Time of one step", [_time_bar(record) for record in records], _PARTS)


def _time_bar(record: RunRecord) -> Bar:
    seconds, steps = record.seconds, record.steps
    values = (seconds["forward_backward"], seconds["encode"] + seconds["decode"], seconds["communication"], seconds["waiting"])
    parts = {name: value / steps for name, value in zip(_PARTS, values, strict=True) if not isnan(value)}
    return Bar(record.spec, parts, in_seconds(seconds["total"] / steps))


def _seeds(outcome: Outcome) -> str:
    seeds = sorted({record.seed for record in outcome.records})
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"means over the seeds {', '.join(map(str, seeds))}, ± standard deviation"


def _examples(plan: Plan) -> str:
    return f"{plan.accumulate} x {plan.batch:,}" if plan.accumulate > 1 else f"{plan.batch:,}"


def _plain(number: float) -> str:
    return f"{number:g}"
