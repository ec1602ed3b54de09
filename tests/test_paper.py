"""`deepreduce paper`: every figure and table is there, finished runs are kept, and what is missing is said."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from deepreduce.cli.main import main
from deepreduce.lab.paper import conduct, printed
from deepreduce.lab.paper.catalogue import EXPERIMENTS, experiments_of
from deepreduce.lab.paper.conduct import Conductor, Done
from deepreduce.lab.paper.experiment import FAILS, HOLDS, UNTOLD
from deepreduce.lab.paper.markdown import write_markdown
from deepreduce.lab.paper.page import paper_page
from deepreduce.lab.paper.results import write
from deepreduce.lab.paper.scales import FULL, MEDIUM, SCALES, SMALL
from deepreduce.lab.paper.store import RunStore, StoredRun
from deepreduce.lab.report.provenance import provenance
from deepreduce.lab.train.contract import Plan, RunRecord
from deepreduce.lab.train.failures import DataError

NAMES = {"figure6", "figure7", "figure8", "figure9", "figure10", "figure11", "figure15", "table1", "table2", "table3"}
EARLIER = {"commit": "c03072065827", "machine": "another machine", "versions": {}, "time": "2026-11-18T01:08:30+00:00", "data": "/old"}
PLAN = Plan("digits", "mlp", ("dense",), workers=2, batch=32, steps=10, evaluations=2, learning_rate=0.1)


def record(spec, quality=0.9, volume=0.01, seconds=1.0, note=""):
    parts = {"forward_backward": 0.4, "encode": 0.1, "decode": 0.1, "communication": 0.4, "waiting": 0.0}
    return RunRecord(
        spec=spec,
        metric="accuracy",
        quality=quality,
        best_quality=quality,
        parameters=1000,
        steps=10,
        steps_per_epoch=5,
        bytes_sent=int(40_000 * volume),
        bytes_dense=40_000,
        message_bytes=int(40_000 * volume),
        gradient_bytes=40_000,
        seconds={part: seconds * share for part, share in parts.items()} | {"total": seconds},
        replicas_identical=True,
        gradient_zeros=0.4,
        data_note=note,
        curve=[{"step": 5 * part, "loss": 1.0, "quality": part * quality / 2, "bytes_sent": part, "seconds": part} for part in (1, 2)],
    )


def test_every_figure_and_table_is_there():
    assert set(EXPERIMENTS) == NAMES
    assert [each.name for each in experiments_of(["all"])] == list(EXPERIMENTS)


def test_numbers_of_the_paper_have_their_section():
    numbers = [value for value in vars(printed).values() if isinstance(value, printed.Printed)]
    numbers += [number for pair in printed.TABLE_2.values() for number in pair]
    assert len(numbers) > 10
    assert all(number.section for number in numbers)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", sorted(NAMES))
def test_plans_are_valid_and_of_one_spec_each(name, scale):
    import deepreduce as dr

    for plan in EXPERIMENTS[name].runs(scale).values():
        (spec,) = plan.specs
        dr.parse(spec)
        assert plan.small == 0
    assert EXPERIMENTS[name].minutes[scale.name] > 0


def test_full_is_the_set_up_of_the_paper():
    (plan, *_) = EXPERIMENTS["figure6"].runs(FULL).values()
    assert (plan.workers, plan.epochs) == (8, 328)
    (plan, *_) = EXPERIMENTS["figure11"].runs(FULL).values()
    assert (plan.workers, 5 * plan.batch, plan.accumulate) == (4, 10**6, 10)
    assert {plan.memory for plan in EXPERIMENTS["table2"].runs(FULL).values()} == {"none"}


def test_experiments_share_their_runs():
    plans = [plan for name in ("figure6", "figure7", "figure8", "table1") for plan in EXPERIMENTS[name].runs(SMALL).values()]
    assert len(set(plans)) < len(plans) - 6


# The report


@pytest.fixture(scope="module")
def finished():
    """All experiments with made-up records."""
    done = []
    for experiment in EXPERIMENTS.values():
        runs = {}
        for number, (method, plan) in enumerate(experiment.runs(SMALL).items()):
            volume = 1.0 if plan.specs == ("dense",) else 0.01 + number / 1000
            run = record(plan.specs[0], 0.9 - number / 1000, volume, seconds=1 + number % 3)
            runs[method] = StoredRun(run, EARLIER if experiment.name == "figure7" else provenance())
        done.append(Done(experiment, runs, experiment.measure(SMALL)))
    return done


def shown_of(done):
    return {each.experiment.name: each.experiment.show(SMALL, each.runs, each.measurements) for each in done}


def test_the_report_has_everything(finished, tmp_path):
    shown = shown_of(finished)
    report = paper_page(SMALL, finished, shown, provenance())
    for title in ("Figure 6", "Figure 7", "Figure 8", "Figure 9", "Figure 10", "Figure 11", "Figure 15", "Table 1", "Table 2", "Table 3"):
        assert f"<h2>{title}:" in report
    for number in ("0.2063", "0.5879", "0.2175", "31,832,577", "25,557,032", "269,722"):
        assert number in report
    assert report.count("<svg") >= 10
    for result in shown.values():
        assert result.findings
        for finding in result.findings:
            assert finding.verdict in (HOLDS, FAILS, UNTOLD)
            assert finding.evidence.endswith(".")
            assert finding.claim.endswith(".")
    write_markdown(tmp_path, SMALL, finished, shown, provenance())
    text = (tmp_path / "paper.md").read_text()
    pictures = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert len(pictures) == report.count("<svg")
    assert all((tmp_path / picture).read_text().startswith("<svg") for picture in pictures)
    assert "0.2063" in text
    write(tmp_path, "small", finished, shown, provenance())
    whole = json.loads((tmp_path / "paper.json").read_text())
    assert set(whole["experiments"]) == NAMES
    rows = list(csv.DictReader((tmp_path / "paper.csv").read_text().splitlines()))
    assert {row["experiment"] for row in rows} == NAMES
    assert all(row["spec"] and row["machine"] for row in rows if row["experiment"] != "table1")


def test_stored_runs_are_published_with_the_origin_they_were_stored_with(finished, tmp_path):
    shown, today = shown_of(finished), provenance()
    write(tmp_path, "small", finished, shown, today)
    rows = list(csv.DictReader((tmp_path / "paper.csv").read_text().splitlines()))
    origins = {row["experiment"]: [row[key] for key in ("commit", "machine", "time", "data")] for row in rows}
    assert origins["figure7"] == ["c03072065827", "another machine", "2026-11-18T01:08:30+00:00", "/old"]
    assert origins["figure8"][:2] == [today["commit"], today["machine"]]
    runs = json.loads((tmp_path / "paper.json").read_text())["experiments"]["figure7"]["runs"]
    assert all(run["provenance"] == EARLIER for run in runs.values())
    write_markdown(tmp_path, SMALL, finished, shown, today)
    earlier = "Some runs were trained earlier: commit c03072065827, 2026-11-18, another machine."
    assert earlier in (tmp_path / "paper.md").read_text()
    assert earlier in paper_page(SMALL, finished, shown, today)
    others = [each for each in finished if each.experiment.name != "figure7"]
    assert "trained earlier" not in paper_page(SMALL, others, shown, today)


def test_what_was_left_out_stands_in_the_report_with_its_reason():
    done = [Done(EXPERIMENTS["figure6"], left_out="no CIFAR-10 in there")]
    assert paper_page(SMALL, done, {}, provenance()).count("no CIFAR-10 in there") == 2


def findings(name, qualities, scale=SMALL, **more):
    runs = {method: record(plan.specs[0], **qualities(method)) for method, plan in EXPERIMENTS[name].runs(scale).items()}
    measured = EXPERIMENTS[name].measure(scale)
    return {finding.claim: finding for finding in EXPERIMENTS[name].show(scale, runs, measured).findings}


def test_a_short_run_may_confirm_a_claim_about_quality_but_not_refute_it():
    claim = "The naive Bloom filter reaches a much lower accuracy."
    worse = findings("figure7", lambda method: {"quality": 0.1 if method == "BF-Naive" else 0.5})
    equal = findings("figure7", lambda method: {"quality": 0.5})
    refuted = findings("figure7", lambda method: {"quality": 0.5}, FULL)
    assert [each[claim].verdict for each in (worse, equal, refuted)] == [HOLDS, UNTOLD, FAILS]


def test_bytes_decide_at_any_scale():
    claim = "BF-P0 + QSGD sends less than SKCompress."
    volumes = {"BF-P0 + QSGD": 0.2, "SKCompress": 0.16}
    assert findings("table2", lambda method: {"volume": volumes.get(method, 1.0)})[claim].verdict == FAILS
    assert findings("table2", lambda method: {"volume": volumes.get(method, 0.1)} | {"quality": 0.5})[claim].verdict == FAILS


def test_there_is_no_accuracy_without_imagenet():
    found = findings("figure9", lambda method: {"note": "images made: quality means nothing"})
    assert [finding.verdict for claim, finding in found.items() if "balances" in claim] == [UNTOLD]
    assert all(plan.evaluations == 0 for plan in EXPERIMENTS["figure9"].runs(MEDIUM).values())  # 40 steps are no training
    found = findings("figure9", lambda method: {"quality": float("nan")}, MEDIUM)
    assert [finding.verdict for finding in found.values()] == [UNTOLD]


def test_there_are_no_hit_rates_without_movielens():
    claim, note = "All methods reach virtually the same hit rate.", "interactions made: quality means nothing"
    runs = {method: record(plan.specs[0], note=note) for method, plan in EXPERIMENTS["table2"].runs(FULL).items()}
    result = EXPERIMENTS["table2"].show(FULL, runs, EXPERIMENTS["table2"].measure(FULL))
    assert [finding.verdict for finding in result.findings if finding.claim == claim] == [UNTOLD]
    assert "Interactions made: quality means nothing." in result.notes
    assert {row[-2] for row in result.rows} == {"–"}


def test_figure_11_compares_whole_iterations():
    def timed(fast):
        return lambda method: {"seconds": (2.0 if "100mbit" in method else 0.5) if "Baseline" in method else fast}

    verdicts = [finding.verdict for finding in findings("figure11", timed(1.0)).values()]
    assert verdicts == [HOLDS, HOLDS]
    verdicts = [finding.verdict for finding in findings("figure11", timed(0.1)).values()]
    assert verdicts == [HOLDS, FAILS]


# Finished runs are kept


def test_records_come_back_by_their_settings(tmp_path):
    store = RunStore(tmp_path)
    kept = replace(record("dense"), quality=float("nan"))
    store.save(PLAN, kept, EARLIER)
    back, origin = RunStore(tmp_path).load(PLAN)
    assert origin == EARLIER | {"data": None}
    assert back.quality != back.quality
    assert replace(back, quality=0, curve=[]) == replace(kept, quality=0, curve=[])
    assert store.load(replace(PLAN, steps=11)) is None
    assert store.load(replace(PLAN, specs=("topr:0.01/raw/raw",))) is None
    assert store.load(replace(PLAN, data="elsewhere")) is None


def test_a_run_is_found_wherever_its_data_lies_now(tmp_path):
    store = RunStore(tmp_path)
    store.save(replace(PLAN, data="/old"), record("dense"), provenance())
    assert store.load(replace(PLAN, data="/new")).origin["data"] == "/old"


def test_runs_of_earlier_versions_are_found(tmp_path):
    plan = replace(EXPERIMENTS["figure7"].runs(SMALL)["BF-P2"], data="/data")
    RunStore(tmp_path).save(plan, record("dense"), provenance())
    assert [path.name for path in tmp_path.iterdir()] == ["cifar10-resnet20-93a53c8ceafa857a.json"]


@pytest.fixture
def workers(monkeypatch):
    """In place of real workers: notes what is launched, and is interrupted after `after` runs."""

    class Fake:
        after, launched = 10**6, []

        def launch(self, plan, listen):
            for spec in plan.specs:
                if self.after == 0:
                    raise KeyboardInterrupt
                self.after -= 1
                self.launched.append(spec)
                listen(record(spec).to_event())

    fake = Fake()
    monkeypatch.setattr(conduct, "launch", fake.launch)
    monkeypatch.setattr(conduct, "read_data", lambda plan: None)
    return fake


def test_an_interrupted_command_goes_on_where_it_was(workers, tmp_path, capsys):
    command = ["paper", "figure7", "--data", str(tmp_path), "--report", str(tmp_path / "out")]
    workers.after = 2
    with pytest.raises(SystemExit) as left:
        main(command)
    assert left.value.code == 130
    assert "finished runs are kept" in capsys.readouterr().err
    workers.after = 10**6
    assert main(command) == 0
    assert len(workers.launched) == len(set(workers.launched)) == 6
    assert "2 of 6 runs are there already" in capsys.readouterr().err
    assert main(command) == 0
    assert len(workers.launched) == 6
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


def test_runs_of_one_kind_start_their_workers_once(workers, tmp_path, monkeypatch):
    launches = []
    monkeypatch.setattr(conduct, "launch", lambda plan, listen: (launches.append(plan), workers.launch(plan, listen)))
    Conductor(SMALL, tmp_path, RunStore(tmp_path), lambda text: None, lambda event: None).run(experiments_of(["figure7", "figure8"]))
    assert [len(plan.specs) for plan in launches] == [6, 2]


def test_missing_data_is_told_with_what_is_expected_where(tmp_path, capsys):
    assert main(["paper", "figure6", "table2", "--data", str(tmp_path), "--report", str(tmp_path / "out")]) == 0
    errors = capsys.readouterr().err
    assert f"figure6: left out: no CIFAR-10 in {tmp_path}: expected are the files of https://" in errors
    assert f"table2: left out: no MovieLens-1M in {tmp_path}: expected is ratings.dat of https://" in errors
    assert "Left out" in (tmp_path / "out" / "report.html").read_text()


def test_made_data_is_used_only_where_the_recorded_is_missing(workers, tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr(conduct, "read_data", plans.append)
    (tmp_path / "imagenet" / "train").mkdir(parents=True)
    Conductor(SMALL, tmp_path, RunStore(tmp_path), lambda text: None, lambda event: None).run(experiments_of(["figure9"]))
    assert plans[0].data == str(tmp_path / "imagenet")
    Conductor(SMALL, tmp_path / "none", RunStore(tmp_path), lambda text: None, lambda event: None).run(experiments_of(["figure9"]))
    assert plans[-1].data is None


def test_a_reason_that_data_cannot_be_read_is_kept(monkeypatch, tmp_path):
    def refuse(plan):
        raise DataError("lacks data_batch_3.bin")

    monkeypatch.setattr(conduct, "read_data", refuse)
    (done,) = Conductor(SMALL, None, RunStore(tmp_path), lambda text: None, lambda event: None).run(experiments_of(["figure7"]))
    assert done.left_out == "lacks data_batch_3.bin"


def test_wrong_names_are_told(capsys):
    assert main(["paper", "figure5"]) == 2
    assert "figure10, figure11" in capsys.readouterr().err
    assert main(["paper", "figure6", "--scale", "tiny"]) == 2
    assert "small, medium, full" in capsys.readouterr().err


def test_the_listed_minutes_add_up_to_what_the_documentation_says():
    measured = re.search(r"`small` .* (\d+) minutes in all", (Path(__file__).parents[1] / "docs" / "paper.md").read_text())
    assert sum(experiment.minutes["small"] for experiment in EXPERIMENTS.values()) == int(measured[1])


def test_list_names_all(capsys):
    assert main(["paper", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)
