"""The report page: its contents, what is refused, and that a browser shows it without a network."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.system.browser import browser
from yalis.cli.main import main
from yalis.study import results
from yalis.study.report.build import find_results, write_report
from yalis.study.results import Result, StoredResult, drawing
from yalis.study.results.card import short_number
from yalis.study.results.kinds.profile import CATEGORIES, summarize_ranks

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu"
COMMITTED_NAMES = ["allreduce-lab-4x2-1ms", "latency-smollm2-135m-fp32", "pipeline-smollm2-135m-pp2"]
CPU = [{"type": "cpu", "name": "CPU, AVX512", "threads": 1}]
ENGINE = {"model": "folder/tiny", "ranks_per_gpu": 1}


def make_profile(ranks: int, devices: list[dict[str, Any]] = CPU, note: str = "") -> Result:
    rows = []
    for phase, scale in (("prefill", 40.0), ("decode", 4.0)):
        for rank in range(ranks):
            times = {f"{part}_ms": scale * (place + rank + 1) for place, part in enumerate(CATEGORIES)}
            pairs = 3 + 2 * rank if ranks > 1 else None
            shared = {"steps": 3, "ms": sum(times.values()), "accounted": 1.0, "expert_pairs": pairs}
            rows.append({"phase": phase, "rank": rank, **shared, **times})
    facts = {
        "workload": {"batch": 2, "prompt_len": 8, "output_len": 4}, "engine": ENGINE, "dtype": "float32",
        "split": f"tp{ranks}", "over_ranks": summarize_ranks(rows), "names": {}, "profiling_overhead": 0.05,
    }  # fmt: skip
    topology = results.make_topology([0] * ranks)
    return results.new("profile", facts, rows, f"yalis profile --tp {ranks}", devices, [note] if note else [], topology)


def make_scaling() -> Result:
    rows = []
    for ranks, scheme, split, allreduce in (
        (1, "one rank", "tp1", ""), (2, "tp", "tp2", "torch"), (4, "tp", "tp4", "torch"), (4, "grid", "tp2x2", "torch"),
        (2, "tp", "tp2", "hierarchical"), (4, "tp", "tp4", "hierarchical"),
    ):  # fmt: skip
        seconds = 2.0 / ranks + 0.3 * ranks
        row = results.empty_row("scaling")
        row.update(ranks=ranks, scheme=scheme, split=split, allreduce=allreduce, status="ok", machine=1, hosts=1)
        row.update(seconds=seconds, seconds_low=0.9 * seconds, seconds_high=1.1 * seconds, tokens_per_s=50.0)
        row.update(first_token_ms=9.0, token_ms=3.0, speedup=2.3 / seconds, efficiency=2.3 / seconds / ranks)
        row.update(same_tokens=1.0, oversubscribed="4 ranks on 2 cores" if ranks == 4 else "", file="")
        rows.append(row)
    rows.append({**rows[-1], "status": "it <failed> & left", "seconds": None, "speedup": None, "efficiency": None})
    facts = {"engine": ENGINE, "dtype": "float32", "machines": [{}], "baselines": {"1": "tp1"}}
    return results.new("scaling", facts, rows, "yalis bench scaling --out 'my folder'", CPU)


def make_kernels() -> Result:
    rows = []
    for kernel in ("down", "gate and up"):
        for count in (1, 16):
            row = results.empty_row("kernels")
            row.update(kernel=kernel, shape="64x64", rows=count, status="ok", us=3.0, share_of_floor=0.5 + count / 40)
            rows.append(row)
    return results.new("kernels", {"dtype": "bfloat16"}, rows, "yalis bench kernels", CPU)


def make_throughput(requests: int, rate: float | None = None) -> Result:
    row = results.empty_row("throughput")
    row.update(engine="yalis", version="1", status="ok", requests=requests, prompt_tokens=64 * requests, rate=rate)
    row.update(output_tokens=9 * requests, seconds=2.0, seconds_low=1.9, seconds_high=2.1, first_token_ms=9.0)
    row.update(tokens_per_s=50.0, tokens_per_s_low=49.0, tokens_per_s_high=51.0)
    facts = {"engine": {**ENGINE, "tp": [requests, 1]}, "dtype": "float32", "answers": ["a"]}
    return results.new("throughput", facts, [row], "yalis bench throughput", CPU)


def make_study_of_two() -> Result:
    """Return a study of two machines with three all-reduces each. Rows of the second machine come first."""
    one, rows = make_scaling(), []
    machines = [results.machine_of(replace(one, devices=[{"type": "cuda", "name": name}])) for name in ("A100", "H200")]
    good = [row for row in one.rows if row["status"] == "ok"]
    for machine, scale in ((2, 0.1), (1, 1.0)):
        rows += [{**row, "machine": machine} for row in good if not row["allreduce"]]
        for backend, slower in (("nvrar", 1), ("hierarchical", 2), ("torch", 30)):
            for row in good:
                if row["allreduce"] == "torch":
                    seconds = {name: scale * slower * row[name] for name in ("seconds", "seconds_low", "seconds_high")}
                    rows.append({**row, "machine": machine, "allreduce": backend, "oversubscribed": "", **seconds})
    facts = {**one.parameters, "machines": machines}
    return replace(one, rows=rows, parameters=facts, devices=[{"type": "cuda", "name": "A100"}])


def test_each_machine_of_a_study_has_its_own_panels() -> None:
    figure = results.KINDS["scaling"].plot(make_study_of_two())
    figure.draw_without_rendering()
    axes = [axis for axis in figure.axes if axis.get_visible()]
    titles = [axis._left_title for axis in axes if axis.get_title(loc="left")]
    names = ["nvrar", "hierarchical", "torch"]
    expected = [f"machine {machine}\nall-reduce: {name}" for machine in (1, 2) for name in names]
    assert [title.get_text() for title in titles] == expected
    boxes = [title.get_window_extent() for title in titles]
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])
    for axis in axes:  # every panel of a row shows all of its lines
        highest = max(max(line.get_ydata()) for line in axis.get_lines())
        assert axis.get_ylim()[0] == 0
        assert highest <= axis.get_ylim()[1]


def test_machines_of_a_study_are_renumbered_for_the_page(tmp_path: Path) -> None:
    study = make_study_of_two()
    first = replace(make_kernels(), devices=[{"type": "cuda", "name": "H200"}])
    page, _ = write_report(
        [StoredResult(tmp_path / "a", first), StoredResult(tmp_path / "b", study)], tmp_path / "r.html", "A study"
    )
    text = page.read_text()
    assert "<li>Machine 1: H200 ·" in text
    assert "<li>Machine 2: A100 ·" in text
    (shown,) = re.findall(r"<article id='b'>(.*?)</article>", text, re.DOTALL)
    assert "<span class='badge'>machines 2, 1</span>" in shown
    # The study's second machine is the first of the page, so its rows come first.
    rows = re.findall(r"<tr><td>(\d)</td>.*?>([\d.]+) s<small>", shown)
    assert [machine for machine, _ in rows] == ["1"] * (len(rows) // 2) + ["2"] * (len(rows) // 2)
    assert float(rows[1][1]) < 1 < float(rows[-1][1])


def test_tables_show_spreads_and_speeds(tmp_path: Path) -> None:
    latency = results.read(COMMITTED / "latency-smollm2-135m-fp32.json")
    rows = [{**row, "seconds": 2.0, "seconds_low": 1.5, "seconds_high": 2.5} for row in latency.rows]
    shared = {**latency.parameters["engine"], "tp": [2, 2], "allreduce": "nvrar", "ranks_per_gpu": 8}
    facts = {**latency.parameters, "engine": shared, "graph_bytes": 96 << 20}
    once = [{**row, "seconds_low": 2.0, "seconds_high": 2.0} for row in rows]
    topology = results.make_topology([0] * 4)
    kernels = make_kernels()
    for number, row in enumerate(kernels.rows):
        row.update(us_low=2.0, us_high=1234.56, gb_per_s=4210.0 / 10**number, gflop_per_s=0.5)
    kernels.rows[-1].update(us_low=3.0, us_high=3.0)
    given = [replace(latency, rows=rows), replace(latency, rows=once, parameters=facts, topology=topology), kernels]
    page, _ = write_report([StoredResult(tmp_path / "a", one) for one in given], tmp_path / "r.html", "A study")
    plain, split, small = re.findall(r"<article .*?</article>", page.read_text(), re.DOTALL)
    assert "<th>total<small>p10..p90</small></th>" in plain
    assert "<td>2.000 s<small>1.500..2.500</small></td>" in plain
    assert "<th>of floor</th>" in plain
    assert "float32, tp 2x2, nvrar, 1x64x64 to 8x64x64, with transformers" in split
    assert "<li>CUDA graphs use 96.0 MiB" in split.partition("</table>")[2]
    assert "<li>4 ranks share a GPU" in split
    assert "<th>total</th>" in split
    assert "<td>2.000 s</td>" in split  # a single repeat has no range
    assert "<th>of floor</th>" not in split
    assert "<td>3.00 us<small>2.00..1,235</small></td>" in small
    assert "<td>3.00 us</td>" in small
    for speed in ("4.21 TB/s", "421.0 GB/s", "42.10 GB/s", "500.0 MFLOP/s"):
        assert f"<td>{speed}</td>" in small


def test_plot_files_name_machine_and_notes(tmp_path: Path, monkeypatch: Any) -> None:
    labels: dict[str, tuple[str, Any]] = {}
    values: dict[str, list[str]] = {}
    save = drawing.save

    def record(figure: Any, file: Path, title: str, notes: list[str]) -> list[Path]:
        written = save(figure, file, title, notes)
        labels[file.name] = figure.get_supxlabel(), figure.axes[0].get_xlabel()
        values[file.name] = [text.get_text() for text in figure.axes[0].texts]
        return written

    monkeypatch.setattr(drawing, "save", record)
    latency = results.read(COMMITTED / "latency-smollm2-135m-fp32.json")
    facts = {**latency.parameters, "graph_bytes": 96 << 20}
    gpu = [{"type": "cuda", "name": "H200"}]
    latency = replace(latency, parameters=facts, devices=gpu)
    found = [
        StoredResult(tmp_path / "latency.json", latency),
        StoredResult(tmp_path / "tp1.json", make_profile(1, gpu)),
    ]
    found.append(StoredResult(tmp_path / "sums.json", results.read(COMMITTED / "allreduce-lab-4x2-1ms.json")))
    write_report(found, tmp_path / "report.html", "A study")
    below, axis = labels["latency"]
    assert "H200" in below
    assert "CUDA graphs" not in below
    assert "batch x prompt x output" in axis
    shares = [row for row in latency.rows if row["share_of_floor"] is not None]
    assert values["latency"] == [f"{row['share_of_floor']:.0%}, {short_number(row['decode_ms'])} ms" for row in shares]
    assert "H200" in labels["tp1"][0]
    assert "CPU, AVX512" in labels["sums"][0]


def test_plots_are_named_after_results_and_removed_with_them(tmp_path: Path) -> None:
    page, plots = tmp_path / "report.html", tmp_path / "report-plots"
    found = [
        StoredResult(tmp_path / name, make_kernels()) for name in ("a/k.json", "b/k.json", "c/k-2.json", "old one.json")
    ]
    bare = make_kernels()
    for row in bare.rows:
        row["share_of_floor"] = None
    found.append(StoredResult(tmp_path / "bare.json", bare))
    write_report(found, page, "A study")
    names = ["k", "k-2", "k-3", "old-one"]  # numbering skips a name that another result has
    assert sorted(path.name for path in plots.iterdir()) == sorted(
        f"{name}.{x}" for name in names for x in ("png", "svg")
    )
    for name in ("mine.png", "bare.png"):  # not written by the report
        (plots / name).touch()
    write_report(found[2:3], page, "A study")
    assert {path.name for path in plots.iterdir()} == {"k-2.png", "k-2.svg", "mine.png", "bare.png"}


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("mpirun", "mpirun -n 4 yalis"),
        ("srun", "srun -N 2 -n 4 yalis"),
        ("torchrun", "torchrun --nnodes 2 --nproc-per-node 2 --no-python yalis"),
        ("", "yalis"),
    ],
)
def test_a_command_includes_its_launcher(launcher: str, words: str, tmp_path: Path) -> None:
    result = replace(make_kernels(), topology=results.make_topology([0, 0, 1, 1], launcher))
    page, _ = write_report([StoredResult(tmp_path / "a.json", result)], tmp_path / "r.html", "A study")
    assert f"<code>{words} bench kernels</code>" in page.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one result of each kind that is plotted, and a profile of another machine."""
    folder = tmp_path / "results"
    made = {"scaling": make_scaling(), "tp1": make_profile(1), "tp2": make_profile(2), "our kernels": make_kernels()}
    made["tp1-h200"] = make_profile(1, [{"type": "cuda", "name": "H200", "memory_gib": 140}])
    for name, result in made.items():
        results.write(result, folder).rename(folder / f"{name}.json")
    for name in COMMITTED_NAMES:
        (folder / f"{name}.json").write_bytes((COMMITTED / f"{name}.json").read_bytes())
    return folder


def test_every_plot_has_its_table_and_its_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(folder), "-o", str(page), "--title", "Ours & theirs"]) == 0
    assert capsys.readouterr().err.startswith(f"yalis: wrote {page} of 8 results, and 14 plots into ")
    text = page.read_text()
    assert "<h1>Ours &amp; theirs</h1>" in text
    articles = re.findall(r"<article id='([\w.-]+)'>(.*?)</article>", text, re.DOTALL)
    # The two profiles of one machine share a plot; the third is of another machine.
    drawn = ["scaling", "profile", "tp1-h200", *COMMITTED_NAMES[:2], "our-kernels", COMMITTED_NAMES[2]]
    assert [name for name, _ in articles] == drawn
    for name, article in articles:
        assert article.count("<svg") == 1
        assert "<table>" in article
        assert "<pre><code>yalis " in article  # also for the lab, which starts its own ranks
        for suffix in (".png", ".svg"):
            assert (tmp_path / "report-plots" / (name + suffix)).stat().st_size > 3000
    shown = dict(articles)
    assert "yalis bench scaling --out &#x27;my folder&#x27;" in shown["scaling"]
    assert "show overhead, not speed-up" in shown["scaling"]
    assert "it &lt;failed&gt; &amp; left" in shown["scaling"]
    assert "--tp 1" in shown["profile"]
    assert "--tp 2" in shown["profile"]
    assert "<td class='text'>max / mean</td>" in shown["profile"]
    assert "expert load" in shown["profile"]
    assert "H200" not in shown["profile"]
    assert "never divided by each other" in text
    assert re.findall(r"(?:src|href)=['\"](?!#|data:)", text) == []
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_results_are_found_once_and_a_study_replaces_its_settings(tmp_path: Path) -> None:
    study = tmp_path / "study"
    own = results.write(make_profile(1), study / "tp1")
    scaling = make_scaling()
    scaling.rows[0]["file"] = str(own.relative_to(study))
    old, *_, new = [results.write(scaling, study) for _ in range(11)]  # scaling-....json, -2 to -11
    kept = study / "a study.json"  # first by name, and older than the others
    kept.write_text(json.dumps({**asdict(scaling), "created": "2001-01-01T00:00:00+00:00"}))
    other_model = {**scaling.parameters, "engine": {**ENGINE, "model": "another"}}
    second = results.write(replace(scaling, parameters=other_model), study)
    unnamed = results.write(make_profile(1), study / "tp2")
    other = results.write(make_profile(2), tmp_path / "more" / "inside")
    assert {given.path for given in find_results([tmp_path, study, new], fail)} == {new, second, unnamed, other}
    assert [given.path for given in find_results([old], fail)] == [old]


def fail(reason: str) -> None:
    raise AssertionError(reason)


def test_profiles_are_labelled_by_their_differences(tmp_path: Path) -> None:
    engines = [
        {"eager": False, "threads": None, "ranks_per_gpu": 4},  # not part of the label: a note states it
        {"eager": True, "threads": None},
        {"eager": False, "threads": 2},
        {"eager": False, "threads": 2},
    ]
    found = []
    for number, engine in enumerate(engines):
        profile = make_profile(1)
        facts = {**profile.parameters, "engine": {**ENGINE, **engine}}
        found.append(StoredResult(tmp_path / f"{number}.json", replace(profile, parameters=facts)))
    page, _ = write_report(found, tmp_path / "report.html", "A study")
    labels = ["tp1, threads auto", "tp1, eager, threads auto", "tp1, threads 2, 2", "tp1, threads 2, 3"]
    for label in labels:
        assert page.read_text().count(f"<td class='text'>{label}</td>") == 2  # prefill and decode
        assert label in (tmp_path / "report-plots" / "profile.svg").read_text()


def test_titles_of_throughput_results_name_the_workload(tmp_path: Path) -> None:
    made = [make_throughput(1), make_throughput(16), make_throughput(16, rate=2.5)]
    found = [StoredResult(tmp_path / f"{number}.json", result) for number, result in enumerate(made)]
    text = write_report(found, tmp_path / "report.html", "A study")[0].read_text()
    for title in (
        "tiny, float32, 1 request all at once, 64 + 9 tokens",
        "tiny, float32, tp 16, auto, 16 requests all at once, 1024 + 144 tokens",
        "tiny, float32, tp 16, auto, 16 requests arriving at 2.5 per second, 1024 + 144 tokens",
    ):
        assert text.count(f"<h3>{title}</h3>") == 1
    assert text.count("<summary>1 row</summary>") == 3
    assert "<p class='about'>3 results, " in text


def test_other_files_in_a_folder_are_skipped_with_a_message(tmp_path: Path, capsys: Any) -> None:
    folder = results.write(make_kernels(), tmp_path / "results").parent
    (folder / "package.json").write_text('{"name": "foreign"}')
    assert main(["report", str(folder), "-o", str(tmp_path / "report.html")]) == 0
    err = capsys.readouterr().err
    assert f"yalis: left out: {folder / 'package.json'} is not a yalis result; " in err
    assert " of 1 result, " in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "is not a yalis result"),
        (json.dumps({**asdict(make_profile(1)), "schema_version": 0}), "has schema version 0"),
        (json.dumps({**asdict(make_profile(1)), "rows": []}), "nothing was measured"),
        (None, "No such file or directory; give a file that a yalis benchmark wrote"),
    ],
)
def test_a_bad_file_is_a_one_line_error(content: str | None, message: str, tmp_path: Path, capsys: Any) -> None:
    if content is not None:
        (tmp_path / "bad.json").write_text(content)
    assert main(["report", str(tmp_path / "bad.json"), "-o", str(tmp_path / "report.html")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "bad.json" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_page_needs_results_and_an_html_name(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "there is no result in" in capsys.readouterr().err
    kept = str(results.write(make_profile(1), tmp_path))
    assert main(["report", kept, "-o", str(tmp_path / "report.pdf")]) == 2
    assert "ends in .html" in capsys.readouterr().err


def test_a_browser_shows_it_without_a_network(folder: Path, tmp_path: Path) -> None:
    page, plots = write_report(find_results([folder], fail), tmp_path / "report.html", "A study")
    with browser(tmp_path / "browser") as tab:
        for dark in (False, True):
            tab.open(page, dark)
            boxes = tab.evaluate(
                "[...document.querySelectorAll('figure svg')].map(x => {"
                "const box = x.getBoundingClientRect(), text = x.querySelector('text');"
                "return [box.width, box.height, x.querySelectorAll('path').length, getComputedStyle(text).fill]})"
            )
            assert len(boxes) == len(plots) // 2
            for width, height, paths, _ in boxes:
                assert width > 600
                assert height > 100
                assert paths > 10
            # Text is dark on light and light on dark.
            assert {fill for *_, fill in boxes} == {"rgb(228, 230, 234)" if dark else "rgb(31, 36, 49)"}
            # Nothing is wider than the window; wide tables scroll on their own.
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        tab.open(page, width=420)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert set(tab.requests) == {page.resolve().as_uri()}
        assert tab.errors == []
