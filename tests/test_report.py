"""Reports in a real browser: they need no network, fit a phone and a desktop, and show what they should."""

import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import numpy as np
import pytest

from deepreduce.cli.main import main
from deepreduce.lab.bench.measure import measure
from deepreduce.lab.report import charts
from deepreduce.lab.report.benchmark_page import benchmark_page
from deepreduce.lab.report.charts import Line, line_chart
from deepreduce.lab.report.provenance import provenance
from deepreduce.lab.report.quantity import in_bytes, in_seconds
from deepreduce.lab.report.training_page import training_page
from deepreduce.lab.train.contract import Plan, RunRecord
from deepreduce.lab.train.outcome import Outcome

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SPECS = ("dense", "topr:0.01/bloom:p2,fpr=0.001/fitpoly:degree=5", "topr:0.01/rice/qsgd")


def point(share, step):
    return {"step": 21 * step, "loss": 1.0, "quality": 1 - 0.5 / step, "bytes_sent": share * 9e7 * step, "seconds": step}


def record(spec, share):
    steps = range(1, 11)
    return RunRecord(
        spec=spec,
        metric="accuracy",
        quality=0.97,
        best_quality=0.98,
        parameters=1_126_410,
        steps=210,
        steps_per_epoch=21,
        bytes_sent=int(share * 946_184_400),
        bytes_dense=946_184_400,
        message_bytes=int(share * 946_184_400),
        gradient_bytes=946_184_400,
        seconds={"total": 12.5, "forward_backward": 6.1, "encode": 2, "decode": 1, "communication": 3, "waiting": 0.4},
        replicas_identical=True,
        gradient_zeros=0.1,
        losses=[(step, 2.0 / step) for step in steps],
        curve=[point(share, step) for step in steps],
    )


@pytest.fixture(scope="module")
def training():
    plan = Plan("digits", "mlp", SPECS, workers=4, batch=32, steps=210, evaluations=10, learning_rate=0.1, link="100mbit")
    outcome = Outcome(plan, provenance())
    outcome.records += [record(spec, share) for spec, share in zip(SPECS, (1.0, 0.01, 0.005), strict=True)]
    return training_page(outcome)


def test_runs_that_the_host_slowed_down_are_named():
    outcome = Outcome(Plan("digits", "mlp", SPECS, workers=2, batch=32, steps=210, evaluations=10, learning_rate=0.1), provenance())
    outcome.records += [record(spec, 1.0) for spec in SPECS]
    assert not outcome.disturbance()
    outcome.records[1].stolen_share = 0.071
    assert f"{SPECS[1]} 7.1%" in training_page(outcome)
    assert SPECS[2] not in outcome.disturbance()


@pytest.fixture(scope="module")
def benchmark():
    gradient = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    specs = ("topr:0.01/raw/raw", "topr:0.01/bitmap/fp16", "dense")
    return benchmark_page([measure("a <gradient>", gradient, spec, repeat=1) for spec in specs], provenance())


@pytest.fixture(params=["training", "benchmark"])
def report(request):
    return request.getfixturevalue(request.param)


def test_nothing_is_loaded_from_elsewhere(report):
    links = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\')\s>]+)', report)
    assert [link for link in links if not link.startswith(("data:", "#"))] == []
    assert "<script" not in report


def test_every_run_has_its_row_and_its_curve(training):
    for spec in SPECS:
        assert training.count(f">{spec}</td>") == 1
        assert training.count(f">{spec}</text>") == 6
    assert training.count("<svg") == 6


@pytest.mark.filterwarnings("error")
def test_without_a_small_message_there_is_no_volume_chart():
    gradient = np.array([np.inf, 1, 2, 3], np.float32)
    found = benchmark_page([measure("g", gradient, spec, repeat=1) for spec in ("dense", "randomr:1/raw/raw")], provenance())
    assert found.count("<svg") == 1
    assert ">inf</td>" in found


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999 B"), (999.7, "1 kB"), (1000, "1 kB"), (999_499, "999 kB"), (999_999, "1 MB"), (1.91e12, "1.91 TB"), (1.91e15, "1910 TB")],
)
def test_bytes_have_three_digits(count, text):
    assert in_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(999.9, "1000 s"), (12_345.6, "12346 s"), (999.4, "999 s"), (0.9996, "1 s"), (0.0004999, "500 µs"), (1e-6, "1 µs"), (3e-9, "3 ns")],
)
def test_seconds_have_three_digits(seconds, text):
    assert in_seconds(seconds) == text


def test_names_are_escaped(benchmark):
    assert "a &lt;gradient&gt;" in benchmark
    assert "<gradient>" not in benchmark


def test_curves_differ_without_colour():
    chart = line_chart("t", [Line(name, [(0, 0), (1, 1)]) for name in "abc"], "x", "y", str, str)
    dashes = re.findall(r"stroke-dasharray: ([^;]*)", chart)
    markers = re.findall(r'<use href="#(m[^"]*)"', chart)
    assert len(set(dashes)) == 2  # beside the solid one
    assert len(set(markers)) >= 3


def test_ids_are_not_shared_by_charts_that_differ(report):
    defined = re.findall(r'<(\w+)[^>]* id="([^"]+)"[^>]*>(.*?)</\1>', report, re.DOTALL)
    bodies = {}
    for _, name, body in defined:
        assert bodies.setdefault(name, body) == body


def test_without_matplotlib_a_report_is_refused_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    assert main(["bench", "--codec", "dense", "--report", str(tmp_path / "out")]) == 2
    assert "pip install 'deepreduce[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_curve_without_points_or_height_is_drawn():
    assert "no data" in line_chart("t", [Line("a", [])], "x", "y", str, str)
    flat = line_chart("t", [Line("a", [(1, 0.5), (2, 0.5)])], "x", "y", str, str)
    assert "nan" not in flat


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [390, 1280])
def test_fits_the_screen(report, width, tmp_path):
    """Nothing is wider than the screen, every chart and table cell has a size, and no text of a chart is cut off."""
    page = tmp_path / "frame.html"
    page.write_text(
        f'<iframe id="report" style="border:0;width:{width}px;height:900px" srcdoc="{escape(report)}"></iframe>'
        """<script>
        document.getElementById("report").onload = (event) => {
          const inner = event.target.contentDocument;
          const sizes = [...inner.querySelectorAll("svg, td, h2")].map((each) => each.getBoundingClientRect());
          const cut = [...inner.querySelectorAll("svg text")].filter((text) => {
            const box = text.getBoundingClientRect(), frame = text.ownerSVGElement.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
          });
          document.title = "measured";
          document.body.dataset.wide = inner.documentElement.scrollWidth;
          document.body.dataset.hidden = sizes.filter((box) => !box.width || !box.height).length;
          document.body.dataset.cut = cut.map((text) => text.textContent).join("|");
        };
        </script>"""
    )
    measured = browse(page, tmp_path)
    assert "<title>measured</title>" in measured or 'data-wide="' in measured
    assert int(re.search(r'data-wide="(\d+)"', measured)[1]) <= width
    assert re.search(r'data-hidden="(\d+)"', measured)[1] == "0"
    assert re.search(r'data-cut="([^"]*)"', measured)[1] == ""


def browse(page: Path, scratch: Path) -> str:
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync")
    flags = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in quiet)]
    command = [CHROMIUM, *flags, f"--user-data-dir={scratch / 'profile'}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
