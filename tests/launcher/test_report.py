"""The report on a run: from one written by hand, read as a browser would and, where there is one, in one."""

import itertools
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import launcher.report.page
from conf.saved import read, to_yaml
from launcher.__main__ import main
from launcher.report.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Curve, axes_of, drawn
from launcher.report.goodput import account
from launcher.report.page import HERE
from launcher.report.reading import load
from tests.launcher.written import FATES, HOSTILE, LINES, SECONDS, line, write_run

VOID = {"meta", "br", "img", "input", "link", "hr"}
ADDRESSES = ("src", "href", "action", "data", "poster", "srcset", "xlink:href", "formaction")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)


class Page(HTMLParser):
    """What a page is made of; fails on tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)
            self.inside.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, (tag, self.stack)
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        for tag in set(self.stack):
            self.inside[tag][-1] += data

    def data(self) -> list[dict[str, Any]]:
        """The runs that the page has the records of."""
        scripts = [s for s in self.inside["script"] if s.startswith('{"runs"')]
        assert len(scripts) == 1
        return json.loads(scripts[0], parse_constant=lambda name: pytest.fail(name))["runs"]


def records_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, from the columns of a page."""
    columns = run["columns"]
    count = len(columns["step"])
    return [{name: v[i] for name, v in columns.items() if v[i] is not None} for i in range(count)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "<b>by & hand")


@pytest.fixture(scope="module")
def text(run: Path) -> str:
    assert main(["report", f"run.dir='{run}'", "calibrate=false"]) == 0
    return (run / "report.html").read_text(encoding="utf-8")


def test_a_parser_that_wants_tags_in_order_takes_it(text: str) -> None:
    with pytest.raises(AssertionError):
        Page("<p><b></p></b>")
    page = Page(text)
    assert sum(tag == "svg" for tag, _ in page.tags) == 7 + 2  # metrics, and maps of the layers
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_it_reaches_for_nothing(text: str) -> None:
    for tag, attributes in Page(text).tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")
        assert not [name for name in attributes if name in ADDRESSES]
    for code in [*re.findall(r"<style>(.*?)</style>", text, re.DOTALL), (HERE / "page.js").read_text()]:
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttpRequest|import\(", code)


def test_every_colour_has_a_value_in_both_schemes(text: str) -> None:
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    dark = r'@media \(prefers-color-scheme: dark\) \{\s*:root:not\(\[data-theme="light"\]\) \{(.*?)\}'
    blocks = [
        re.search(pattern, style[1], re.DOTALL)
        for pattern in (r"^\s*:root \{(.*?)\}", dark, r':root\[data-theme="dark"\] \{(.*?)\}')
    ]
    values = [dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", block[1])) for block in blocks if block]
    light, system, chosen = values
    used = set(re.findall(r"var\(--([a-z0-9]+)\)", style[1]))
    assert used <= set(light) and set(light) == set(system) and system == chosen

    def brightness(colour: str) -> int:
        return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5))

    for scheme, darker in ((light, "ink"), (system, "ground")):
        lighter = "ground" if darker == "ink" else "ink"
        assert brightness(scheme[lighter]) - brightness(scheme[darker]) > 450
    assert 'id="theme"' in text


def test_the_data_of_the_curves_are_the_records(text: str) -> None:
    (shown,) = Page(text).data()
    assert records_of(shown) == LINES  # the line that was being written is none
    assert shown["fates"] == FATES and shown["name"] == "<b>by & hand"
    assert shown["columns"]["lr"][0] == 1e-3 / 3  # every digit
    assert shown["columns"]["loss/train"][3] == "NaN"


def test_of_a_huge_run_what_matters_is_kept_and_the_rest_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher.report.page, "MOST_ATTEMPTS", 100)
    lines = [line(step, step, 0, 2 * step, verdict=int(step == 777)) for step in range(1, 1001)]
    lines[498]["loss/eval"] = 1.5
    run = write_run(tmp_path / "huge", lines)
    assert main(["report", f"run.dir={run}", "calibrate=false", f"output={tmp_path / 'x.html'}"]) == 0
    text = (tmp_path / "x.html").read_text()
    (shown,) = Page(text).data()
    kept = records_of(shown)
    assert len(kept) < 110 and all(each in lines for each in kept)
    assert {1, 499, 777, 1000} <= {each["step"] for each in kept}
    assert f"Of 1,000 attempts {len(kept)} stand in this page" in text


def test_the_seconds_of_each_kind_add_up_to_the_wall_time(run: Path) -> None:
    found = account(load(run))
    assert found.whole and found.seconds == pytest.approx(SECONDS)
    assert found.total == pytest.approx(1053.0 - 1000.0) and found.share == pytest.approx(8 / 53)


def test_without_a_time_of_day_only_what_was_measured_counts(tmp_path: Path) -> None:
    old = [
        {k: v for k, v in each.items() if k not in ("time/wall", "time/startup_seconds")} for each in LINES
    ]
    record = load(write_run(tmp_path / "old", old))
    found = account(record)
    assert not found.whole and found.seconds["training"] == 8.0 and found.seconds["other"] == 0.0
    assert [int(fate) for fate in record.fates] == FATES  # the rewind is told by its event


def test_a_clock_that_was_set_back_makes_no_time_below_zero(tmp_path: Path) -> None:
    found = account(load(write_run(tmp_path / "run", [line(1, 1, 0, 50), line(2, 2, 0, 20)])))
    assert min(found.seconds.values()) == 0.0 and found.seconds["training"] == 4.0


def test_hostile_text_is_text(text: str) -> None:
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "<script>alert" not in text.replace("\\u003c", "<")
    shown = [content for content in page.inside["pre"] if HOSTILE in content]
    assert len(shown) == 3  # the sample, the worst text, the source
    assert not [a for _, attributes in page.tags for a in attributes if a.startswith("on")]
    assert page.inside["h1"] == ["<b>by & hand"]


def test_what_happened_is_told(text: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Page(text)
    body = page.inside["main"][0]
    for said in (
        "Finished at step 4. 1 attempt was not applied; it went back from step 4 to 1 (jump: loss +3.97",
        "it was started again 1 time, and made 1 update again; 1 attempt looked unusual.",
        "samples 16 to 39 are left out",
        "learning rate 0.001 → 0.0005",
        "back to step 1 (memory)",
        "began at step 3",
        "1 save was completed",
        "15.1%",
        "Gradient norm by layer",
        "model.d_model",
    ):
        assert said in body, said
    kinds = [attributes.get("class") for tag, attributes in page.tags if tag in ("line", "circle", "path")]
    for kind in ("mark rewind", "mark restart", "mark warn", "undone c0"):
        assert kind in kinds, kind
    assert main(["report", f"run.dir='{run}'", "calibrate=false", "format=json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["tokens"], facts["held_out_loss"]) == (4, 32, 4.25)
    assert facts["seconds"] == pytest.approx(SECONDS) and facts["plan"] == {}


def test_points_stand_where_their_values_are() -> None:
    """By hand: over ten steps, from 0 to 1, a tenth of the width and of the height each."""
    chart = Chart("t", "m", [Curve(list(range(11)), [i / 10 for i in range(11)])], whole=True)
    axes = axes_of(chart)
    assert axes is not None and (axes.x0, axes.x1) == (0.0, 10.0)
    figure = drawn(chart, "k")
    path = re.search(r'class="line c0" d="([^"]+)"', figure)
    assert path is not None
    points = [tuple(map(float, p.split())) for p in re.split("[ML]", path[1])[1:]]
    inner = WIDTH - LEFT - RIGHT
    assert [x for x, _ in points] == pytest.approx([LEFT + i * inner / 10 for i in range(11)], abs=0.06)
    rise = [a[1] - b[1] for a, b in itertools.pairwise(points)]
    expected = (HEIGHT - TOP - BOTTOM) * 0.1 / (axes.y1 - axes.y0)
    assert rise == pytest.approx([expected] * 10, abs=0.11)


def test_a_single_spike_among_many_is_drawn_and_gaps_stay_gaps() -> None:
    y = [1.0 + 0.001 * (i % 7) for i in range(20_000)]
    y[12_345] = 3.0
    for index in range(5_000, 6_000):
        y[index] = math.nan
    figure = drawn(Chart("t", "m", [Curve(list(range(20_000)), y)], whole=True), "k")
    path = re.search(r'class="line c0" d="([^"]+)"', figure)
    assert path is not None and path[1].count("M") == 2
    points = [tuple(map(float, p.split())) for p in re.split("[ML]", path[1])[1:]]
    top = min(points, key=lambda p: p[1])
    assert top[0] == pytest.approx(LEFT + 12_345 / 19_999 * (WIDTH - LEFT - RIGHT), abs=1.0)
    assert len(points) < 3_000


def test_a_metric_without_any_number_is_said() -> None:
    assert "no value is a number" in drawn(Chart("t", "m", [Curve([1, 2], [math.nan, math.inf])]), "k")


def test_the_plan_is_the_planners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(
        tmp_path / "gpu",
        parallel={"tp": 2},
        train={"sequence_length": 512, "global_batch": 16, "micro_batch": 2, "precision": "bf16"},
    )
    facts = {"device": "NVIDIA H100 80GB HBM3", "processes": 8}
    (run / "versions.json").write_text(json.dumps(facts))
    assert main(["report", f"run.dir={run}", "format=json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    saved = read(run / "config.yaml")
    del saved["parallel"]["recompute_every"]
    (tmp_path / "planned.yaml").write_text(to_yaml(saved))
    given = [f"config={tmp_path}/planned.yaml", "hardware=h100", "gpus=8", "format=json"]
    assert main(["plan", *given]) == 0
    (best,) = json.loads(capsys.readouterr().out)["best"]
    assert plan["tokens/s"] == [best["tokens_per_second"], 106.0]  # of attempts 1, 5, 7, 8
    assert plan["model FLOPs utilisation"] == [best["mfu"], None]
    assert plan["peak bytes of a process"] == [max(s["total"] for s in best["stages"]), 1 << 20]
    (run / "versions.json").write_text(json.dumps(facts | {"device": "Quantum 9000"}))
    assert main(["report", f"run.dir={run}", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == {}
    assert "the planner has no figures for Quantum 9000" in (run / "report.html").read_text()


@pytest.mark.parametrize("missing", ["events.jsonl", "status.json", "versions.json", "samples.jsonl"])
def test_what_an_old_run_lacks_is_no_obstacle(tmp_path: Path, missing: str) -> None:
    run = write_run(tmp_path / "run")
    (run / missing).unlink()
    (run / "layers.jsonl").unlink()
    assert main(["report", f"run.dir={run}", "calibrate=false"]) == 0
    Page((run / "report.html").read_text())


def test_wrong_input_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"run.dir={tmp_path}"]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert "run.dir must be given" in capsys.readouterr().err
    run = write_run(tmp_path / "run")
    assert main(["report", f"run.dir={run}", "calibrate=false", f"output={tmp_path}/no/x.html"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["report", f"run.dir={run}"]) == 2
    assert "metrics.jsonl, line 1: attempt is None" in capsys.readouterr().err


def test_several_runs_over_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", optim={"lr": 0.01})
    other = [{**each, "loss/train": 9.0} for each in LINES]
    b = write_run(tmp_path / "b", other)
    (tmp_path / "more").mkdir()
    same = write_run(tmp_path / "more" / "b", other)
    target = tmp_path / "page.html"
    assert main(["compare", f"runs=[{a},{b},{same}]", f"html={target}"]) == 0
    page = Page(target.read_text())
    assert [run["name"] for run in page.data()] == ["a", "b", "b (2)"]
    assert records_of(page.data()[0]) == LINES and records_of(page.data()[1]) == other
    assert page.inside["th"][:2] == ["run", "lr"] and "0.01" in page.inside["td"]
    kinds = {attributes.get("class") for tag, attributes in page.tags if tag == "path"}
    assert {"line c0", "line c1", "line c2"} <= kinds
    capsys.readouterr()
    assert main(["compare", f"runs=[{a},{b}]", f"html={tmp_path}/no/x.html"]) == 2
    assert "html=" in capsys.readouterr().err


def browse(page: Path, *more: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--window-size=1100,900"]
    command += ["--virtual-time-budget=3000", *more, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
@pytest.mark.parametrize(("scheme", "ground"), [(1, (0xF6, 0xF7, 0xF9)), (0, (0x12, 0x16, 0x1C))])
def test_it_looks_right_in_both_schemes(tmp_path: Path, text: str, scheme: int, ground: tuple) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    page.write_text(text, encoding="utf-8")
    browse(page, f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={scheme}")
    image = Image.open(picture).convert("RGB")
    colours = {colour for _, colour in image.getcolors(1 << 20) or []}
    assert image.getpixel((2, 2)) == ground and image.size == (1100, 900)
    curve, rewind = (((0x25, 0x63, 0xAB), (0xC5, 0x22, 0x1F)), ((0x6C, 0xB0, 0xFF), (0xFF, 0x7B, 0x72)))[
        1 - scheme
    ]
    assert {curve, rewind} <= colours


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_the_pointer_shows_the_value(tmp_path: Path, text: str) -> None:
    """Over the last step of the training loss: attempt 8's, not that of attempt 4, which was not applied."""
    page = tmp_path / "page.html"
    over = (
        '<script>const svg = document.querySelector("svg[data-metric]"), box = svg.getBoundingClientRect();'
        "svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width * 0.97,"
        "clientY: box.top + 60}));document.getElementById('theme').click();</script></body>"
    )
    page.write_text(text.replace("</body>", over), encoding="utf-8")
    dom = browse(page, "--dump-dom")
    assert re.search(r'<div id="tip"[^>]*>step 4: 4\.2</div>', dom)
    assert re.search(r'<html[^>]*data-theme="light"', dom) and "scheme: light" in dom


SPOILT: dict[str, tuple[str, str, str | None]] = {
    "a status that is a list": ("status.json", "[1]", None),
    "versions of another kind": ("versions.json", '{"git": "abc", "packages": ["torch"]}', None),
    "layers without norms": ("layers.jsonl", '{"step": 1, "layers": ["a"], "weight_norm": null}\n', None),
    "a sample that is no object": ("samples.jsonl", "[1]\n", None),
    "a step in quotes": ("metrics.jsonl", '{"step": "21"}\n', "line 1: step is '21', no whole number"),
    "a number that is none": (
        "metrics.jsonl",
        '{"step": 1, "loss/train": NaN}\n',
        "line 1 is no object of strict",
    ),
    "a section that is a number": ("config.yaml", "train: 3\n", "train is no section of settings"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_files_cost_what_they_hold_or_are_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a page can do without is left out; else one line with file and place, and code 2."""
    run = write_run(tmp_path / "run")
    file, content, message = SPOILT[name]
    (run / file).write_text(content)
    code = main(["report", f"run.dir={run}", "calibrate=false"])
    assert code == (0 if message is None else 2), capsys.readouterr().err
    if message is not None:
        told = capsys.readouterr().err
        assert message in told and file in told
