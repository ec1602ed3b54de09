"""Time to quality, and runs of several seeds."""

from dataclasses import replace
from math import inf, isnan, nan

import pytest

from deepreduce.lab.report.provenance import provenance
from deepreduce.lab.report.training_page import time_chart
from deepreduce.lab.train.contract import Plan, RunRecord
from deepreduce.lab.train.outcome import Outcome, beside_dense
from deepreduce.lab.train.race import arrival
from deepreduce.lab.train.seeds import averaged, spread

SECONDS = {"total": 4.0, "forward_backward": 2.0, "encode": 0.5, "decode": 0.5, "communication": 1.0, "waiting": 0.0}


def record(spec, qualities, byte_count, seed=0, lower=True):
    curve = [
        {"step": 10 * number, "loss": 1.0, "quality": quality, "bytes_sent": byte_count * number / 4, "seconds": float(number)}
        for number, quality in enumerate(qualities, 1)
    ]
    return RunRecord(
        spec=spec,
        metric="validation loss" if lower else "accuracy",
        quality=qualities[-1],
        best_quality=min(qualities),
        parameters=100,
        steps=40,
        steps_per_epoch=20,
        bytes_sent=byte_count,
        bytes_dense=10**9,
        message_bytes=byte_count,
        gradient_bytes=10**9,
        seconds=SECONDS,
        replicas_identical=True,
        gradient_zeros=0.0,
        lower_is_better=lower,
        seed=seed,
        losses=[(10, 1.0)],
        curve=curve,
    )


def outcome(records, target=None, **options):
    plan = Plan("text", "gpt", ("dense",), workers=2, batch=8, steps=40, evaluations=4, learning_rate=0.1, **options)
    found = Outcome(plan, provenance(), target=target)
    found.records += records
    return found


DENSE = record("dense", [4.0, 3.0, 2.5, 2.25], 10**9)
QUICK = record("quick", [3.0, 2.5, 2.2, 2.1], 10**7)
SLOW = record("slow", [4.0, 3.5, 3.0, 2.5], 10**6)


def test_a_run_arrives_where_it_is_first_as_good():
    assert arrival(QUICK, DENSE.quality).step == 30
    assert arrival(QUICK, DENSE.quality).seconds == 3.0
    assert arrival(SLOW, DENSE.quality) is None
    assert arrival(replace(SLOW, lower_is_better=False), 3.2).step == 10


def test_seconds_on_a_link_are_those_of_computing_and_of_the_bytes():
    assert arrival(DENSE, DENSE.quality, "100mbit").seconds == pytest.approx(0.75 * 4 + 80)
    assert arrival(QUICK, DENSE.quality, "100mbit").seconds == pytest.approx(0.75 * 3 + 0.6)


def test_the_table_leads_with_quality_and_the_time_to_it():
    found = outcome([DENSE, QUICK, SLOW])
    assert found.columns()[:3] == ["codec", "validation loss", "as good as dense (at 100mbit, computed)"]
    assert [row[1:3] for row in found.rows()] == [["2.250", "83 s, 1 GB"], ["2.100", "2.85 s, 7.5 MB"], ["2.500", "not reached"]]
    assert [run["as_good_as_dense"] and run["as_good_as_dense"]["step"] for run in found.as_json()["runs"]] == [40, 30, None]


def test_a_shaped_link_is_measured():
    found = outcome([DENSE, QUICK], link="100mbit")
    assert found.columns()[2] == "as good as dense"
    assert found.rows()[1][2] == "3 s, 7.5 MB"


def test_runs_are_timed_by_a_target_with_and_without_a_dense_run():
    for records in ([QUICK, SLOW], [QUICK, SLOW, DENSE]):
        found = outcome(records, target=2.5, link="100mbit")
        assert found.columns()[2] == "as good as 2.5"
        assert [row[2] for row in found.rows()][:2] == ["2 s, 5 MB", "4 s, 1 MB"]
        assert [run["as_good_as_target"]["step"] for run in found.as_json()["runs"]][:2] == [20, 40]
    assert outcome([QUICK], target=1.0).rows()[0][2] == "not reached"


def test_losses_and_accuracies_are_told_as_such():
    assert beside_dense([DENSE, QUICK, SLOW]) == {"quick": "0.150 below dense", "slow": "0.250 above dense"}
    accurate = [replace(run, lower_is_better=False, quality=quality) for run, quality in ((DENSE, 0.9), (QUICK, 0.91), (SLOW, 0.9))]
    assert beside_dense(accurate) == {"quick": "1.0 points above dense", "slow": "equal to dense"}


@pytest.mark.parametrize("quality", [nan, inf])
def test_a_run_without_a_quality_is_not_equal_to_dense(quality):
    bad = replace(QUICK, quality=quality)
    assert beside_dense([DENSE, replace(QUICK, quality=nan)]) == {"quick": "no quality to compare with dense"}
    assert beside_dense([replace(DENSE, quality=quality), bad]) == {"quick": "no quality to compare with dense"}
    assert beside_dense([DENSE, replace(QUICK, quality=inf)]) == {"quick": "inf above dense"}


def test_nothing_is_as_good_as_dense_where_dense_has_no_quality():
    found = outcome([replace(run, quality=nan, curve=[]) for run in (DENSE, QUICK)])
    assert found.columns()[:3] == ["codec", "validation loss", "relative volume"]
    assert [len(row) for row in found.rows()] == [len(found.columns())] * 2


@pytest.mark.parametrize("bad", [nan, inf])
def test_seeds_with_a_quality_that_is_not_finite_have_no_spread(bad):
    assert isnan(spread([1.0, bad]))
    found = outcome([DENSE, replace(DENSE, seed=1, quality=bad)])
    assert found.rows()[0][1].endswith(" ± –")


def test_seconds_on_a_link_are_not_known_without_those_of_communication():
    unknown = dict.fromkeys(("forward_backward", "communication", "waiting"), nan)
    untold = replace(DENSE, seconds=SECONDS | unknown)
    assert isnan(arrival(untold, DENSE.quality, "100mbit").seconds)
    assert arrival(untold, DENSE.quality).seconds == 4.0
    found = outcome([untold, QUICK])
    assert dict(zip(found.columns(), found.rows()[0], strict=True))["communication"] == "–"
    assert "nan" not in time_chart(found.runs())


def test_results_say_that_runs_are_missing():
    assert not outcome([DENSE]).missing()
    found = outcome([DENSE])
    found.seeds = 3
    assert "1 of 3 runs" in found.remarks()[0]


def test_seeds_are_averaged_with_their_spread():
    runs = [record("quick", [3.0, last], 10**7, seed) for seed, last in enumerate((2.0, 2.2))]
    mean = averaged(runs)
    assert mean.quality == pytest.approx(2.1)
    assert mean.curve[1]["quality"] == pytest.approx(2.1)
    found = outcome([replace(DENSE, seed=0), runs[0], replace(DENSE, seed=1), runs[1]])
    assert [row[1] for row in found.rows()] == ["2.250 ± 0.000", "2.100 ± 0.141"]
    assert len(found.as_json()["runs"]) == 4


def test_replicas_that_differ_for_one_seed_differ():
    assert not averaged([QUICK, replace(QUICK, seed=1, replicas_identical=False)]).replicas_identical
