"""Reports: the verdict first, nothing cut in silence, nothing from elsewhere, and text that stays text."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import tomllib
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from pypdf import PdfReader

from batchbench.eviction_cost import _extra_ms, recompute_rate
from batchbench.report.content import report
from batchbench.report.document import (
    LISTED_LINES,
    Chapter,
    Code,
    Link,
    Paragraph,
    Picture,
    Report,
    Section,
    Table,
    Victims,
    table,
    words,
)
from batchbench.report.html import html
from batchbench.report.ledger import LISTED, ledger
from batchbench.report.link import link
from batchbench.report.markdown import markdown, plain
from batchbench.report.measured import measured
from batchbench.report.pdf import pdf
from batchbench.report.reproduce import path_keys, reproduce, scenario_toml
from batchbench.report.toml_text import toml_text
from batchbench.report.verdict import verdict
from batchbench.results import Result, load_result
from batchbench.scenario import Scenario, load_scenario
from batchbench.schema import TABLES
from batchbench.units import show_digits, show_small_seconds
from tests.batchbench.scripted import it, request, result_of
from tests.batchbench.test_cli import assert_refused, everything_under, here, invoke, scenario  # noqa: F401
from tests.batchbench.test_tables import rewrite

DAY34 = Path("results/day34").resolve()
RESULTS = sorted(path.parent for path in Path("results").glob("*/run.json"))
HOSTILE = '<script>alert("x")</script>|`*_[a](http://example.org)&amp;\'"'


@pytest.fixture(scope="module")
def day34():
    return load_result("results/day34")


@pytest.fixture(scope="module")
def page(day34):
    return html(report([day34]))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A result whose every name from a file tries to be something else."""
    folder = tmp_path_factory.mktemp("hostile") / "r"
    shutil.copytree("results/day34", folder)
    run = json.loads((folder / "run.json").read_text())
    run["scenario"]["name"] = HOSTILE
    run["command"] = ["sweep", f"{HOSTILE}\x1b[2J\n.toml", "--trust", "a; rm -rf ."]
    run["machine"]["processor"] = "</style><img src=x onerror=alert(1)>\x07\u202e"
    run["engine"]["model"] = {"</title>": ["\x00"]}
    run["versions"]["</dd><script>"] = "1"
    (folder / "run.json").write_text(json.dumps(run))
    for name in TABLES:
        rewrite(folder, name, lambda rows: [with_hostile_names(row) for row in rows])
    return load_result(folder)


def with_hostile_names(row):
    named = {"request_id": f"{row['request_id']}</td>\x1b[31m{HOSTILE}"} if "request_id" in row else {}
    return row | {"choices": f"{HOSTILE}\x1b]0;\u202e"} | named


class Page(HTMLParser):
    """Every element with its attributes, and the text of each kind of element."""

    VOID = ("meta", "input", "link", "br", "img")

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self.open, self.unclosed = [], {}, [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def parts(section, kind):
    return [part for part in section.parts if isinstance(part, kind)]


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


# The content


def test_the_verdict_comes_first_and_says_what_was_compared(day34):
    first, counters, bill = verdict(day34)
    assert (first.tone, first.text) == ("good", "Identical texts at all 6 points.")
    assert first.detail == (
        "Every one of the 144 tokens of 6 requests is the same at each point, token id by token id; SHA-256 over the "
        f"token ids: {day34.rows('pools')[0]['text_digest']}."
    )
    assert (counters.tone, counters.text) == ("good", "Counters are exact.")
    assert bill.text == "Up to 39.9% of the positions went into requests that resumed."
    assert bill.detail == "At 12 blocks: 107 of 268 positions, after 7 evictions of 5 requests."


def with_pools(result, **changed):
    """The same result with other values in `pools`, in every row or, of a list, in each."""

    class Changed(Result):
        def rows(self, table):
            rows = super().rows(table)
            if table != "pools":
                return rows
            each = {name: value if isinstance(value, list) else [value] * len(rows) for name, value in changed.items()}
            return [{**row, **{name: values[n] for name, values in each.items()}} for n, row in enumerate(rows)]

    return Changed(result.run, result.files)


@pytest.mark.parametrize(
    ("changed", "tone", "text"),
    [
        ({"text_digest": None}, "caution", "No text was computed."),
        ({"text_digest": ["a", "a", "a", "a", "a", "b"]}, "bad", "The texts differ: 2 different ones at 6 points."),
        ({"numerics": "fast"}, "caution", "Numerics is fast."),
        ({"counters": "may differ between runs"}, "caution", "Counters may differ between runs."),
        ({"preemptions": 0, "recompute_fraction": 0.0}, "plain", "Nobody was evicted at any point."),
        ({"recompute_fraction": 0.0}, "plain", "Evictions recomputed nothing."),
    ],
)
def test_the_verdict_says_what_was_not_shown(day34, changed, tone, text):
    assert (tone, text) in [(said.tone, said.text) for said in verdict(with_pools(day34, **changed))]


def test_a_verdict_of_texts_that_run_in_circles(day34):
    found = verdict(Result({**day34.run, "text_repetition": 0.9}, day34.files))
    assert "The texts run in circles, so their identity proves little." in [said.text for said in found]


def test_one_point_was_compared_with_nothing(tmp_path):
    result = result_of(
        tmp_path / "o", {"scenario": {"name": "x"}, "engine": {}}, [request("a")], [it(1, finished=("a",))]
    )
    assert verdict(result)[0].text == "The texts were compared with nothing."


def test_the_sweep_table_is_the_one_that_is_printed(day34):
    (chapter,) = report([day34]).chapters
    sweep, callers = parts(chapter.sections[0], Table)
    printed = invoke("sweep", "scenarios/day34.toml", "--dry-run")  # the program is there
    assert printed.exit_code == 0
    assert sweep.headings == (
        "pool", "occupancy", "evictions per request", "recompute share", "victim latency", "paired latency", "text",
    )  # fmt: skip
    assert texts(sweep)[4] == ["12 blocks", "0.375", "1.17", "39.9%", "1.90x", "1.90x", "identical"]
    assert [row[3].sort for row in sweep.rows] == [0.0, 21.7, 26.3, 32.1, 39.9, 37.5]
    assert sweep.numbers == {0, 1, 2, 3, 4, 5}
    slow = {row[9].text: row[9].sort for row in callers.rows}
    assert all(sort == pytest.approx(float(text.split()[0]) * {"us": 1e-6, "ms": 1e-3}[text.split()[1]])
               for text, sort in slow.items())  # fmt: skip


def test_the_chapter_has_every_section_and_every_figure(day34):
    (chapter,) = report([day34]).chapters
    assert [section.key for section in chapter.sections] == [
        "sweep", "figures", "staircase", "evictions", "link", "measured", "environment", "reproduce",
    ]  # fmt: skip
    keys = [part.key for section in chapter.sections for part in parts(section, Picture)]
    assert {f"{key}.png" for key in keys} == {path.name for path in Path("plots/day34").glob("*.png")}


def test_every_eviction_is_listed_with_what_became_of_it(day34):
    sums, each = parts(ledger(day34), Table)
    assert texts(sums)[4] == ["12", "7", "5", "3", "0", "107", "100", "0", "0"]
    assert len(each.rows) == 25
    assert each.note == "All 25 of them, in the order in which they happened."
    assert texts(each)[0] == ["32", "r5", "16", "5", "20", "16", "5", "24", "20", "0", "0", "dropped"]
    swapped = parts(ledger(load_result("results/swap")), Table)[1]
    assert {row[-1] for row in texts(swapped)} == {
        "dropped", "dropped, thrash", "swapped", "swapped, thrash", "dropped, swap pool full",
        "dropped, thrash, swap pool full",
    }  # fmt: skip
    assert texts(swapped)[0][:3] == ["48", "reclaim recompute", "r10"]


def test_a_large_ledger_says_how_many_it_leaves_out(day34, monkeypatch):
    monkeypatch.setattr("batchbench.report.ledger.LISTED", 5)
    _, each = parts(ledger(day34), Table)
    assert each.caption == "The largest evictions"
    assert each.note.startswith("25 evictions; listed are the 5 that dropped or copied the most positions.")
    cached = sorted(day34.tables["evictions"]["cached_tokens"], reverse=True)[:5]
    assert sorted((row[4].sort for row in each.rows), reverse=True) == cached
    assert LISTED == 250


# Recompute or swap


def test_the_cost_of_a_position_is_that_of_the_iterations_that_resumed(day34):
    rate = recompute_rate(day34)
    extra = {(p, i): ms for p in range(6) for i, ms in _extra_ms(day34, p).items()}
    rebuilt = {(row["point"], row["iteration"]): row["rebuilt_tokens"] for row in day34.rows("iterations")}
    positions = sum(rebuilt[key] for key in extra)
    assert (rate.positions, rate.iterations) == (positions, len(extra)) == (348, 13)
    assert rate.s_per_position == pytest.approx(sum(extra.values()) / 1e3 / positions)


def test_a_modelled_position_costs_what_the_model_says():
    rate = recompute_rate(load_result("results/closed_loop"))
    assert rate.s_per_position == pytest.approx(1e-4)


def test_recompute_against_swap_is_of_the_runs_own_evictions(day34):
    (about,) = parts(link(day34), Link)
    assert [point.evictions for point in about.points] == [2, 3, 5, 7, 8]
    assert [point.rebuilt_tokens for point in about.points] == [44, 56, 72, 100, 88]
    assert about.points[0].victims == (Victims(1, 20, 20), Victims(1, 24, 24))
    assert (about.kv_bytes_per_token, about.measured) == (768, True)
    row = about.table.rows[0]
    assert row[2].sort == 44
    assert row[3].sort == pytest.approx(44 * about.s_per_position)
    assert row[4].sort == pytest.approx(2 * 44 * 768 / 1e9)
    assert "measured: step_s of the 13 iterations" in link(day34).parts[1].text


def test_swap_moves_whole_blocks_and_a_swapped_victim_would_have_been_rebuilt_whole():
    (about,) = parts(link(load_result("results/swap")), Link)
    assert all(one.copied % 16 == 0 and 0 <= one.copied - one.rebuilt < 16 for p in about.points for one in p.victims)
    by_name = {point.name: point for point in about.points}
    recomputed, swapped = (by_name[f"32 blocks, reclaim {how}"] for how in ("recompute", "swap, swap_blocks 64"))
    assert recomputed.victims == swapped.victims


def test_an_untimed_run_assumes_a_cost_and_says_so(here):  # noqa: F811
    scenario(here)
    assert invoke("sweep", "x.toml", "--engine", "schedule", "--out", "o", "--no-plots").exit_code == 0
    result = load_result("o")
    assert recompute_rate(result) is None
    assert "not known how many bytes" in link(result).parts[0].text
    section = link(Result({**result.run, "engine": {**result.run["engine"], "kv_bytes_per_token": 768}}, result.files))
    assert "0.1 ms is assumed" in section.parts[1].text
    (about,) = parts(section, Link)
    assert (about.measured, about.s_per_position) == (False, 1e-4)
    assert verdict(result)[0].text == "No text was computed."
    assert "--engine schedule" in parts(reproduce(result), Code)[0].text


@pytest.mark.parametrize(("size", "said"), [(None, "not known how many bytes"), ("768", "not known how many bytes")])
def test_without_the_bytes_of_a_position_no_copy_is_reckoned(day34, size, said):
    engine = {**day34.run["engine"], "kv_bytes_per_token": size}
    (paragraph,) = link(Result({**day34.run, "engine": engine}, day34.files)).parts
    assert said in paragraph.text


def test_small_times_have_three_digits():
    assert [show_small_seconds(s) for s in (0.0, 4.22e-7, 2.1e-4, 0.0021, 1.5, 12345.6)] == [
        "0 ns", "422 ns", "210 us", "2.1 ms", "1.5 s", "12346 s",
    ]  # fmt: skip


# What is not measured, and how to run it again


def test_what_is_null_is_listed_with_its_reason(day34):
    (missing,) = parts(measured(day34), Table)
    reasons = dict(texts(missing))
    assert reasons["n is 1"] == "statistics.low, statistics.high, statistics.level"
    assert "pools.preempted_latency_iterations (1 of 6 rows)" in ", ".join(reasons.values())
    named = {name.split(" (")[0] for names in reasons.values() for name in re.split(r", (?=\w+\.)", names)}
    nulls = {f"{t}.{c}" for t, cs in TABLES.items() for c in [x.name for x in cs] if day34.files[t][c].null_count}
    assert named == nulls


@pytest.mark.parametrize("folder", RESULTS, ids=lambda path: path.name)
def test_the_scenario_of_a_report_is_the_scenario(folder, tmp_path):
    run = json.loads((folder / "run.json").read_text())
    text = scenario_toml(run["scenario"])
    (tmp_path / "x.toml").write_text(text)
    again, declared = load_scenario(tmp_path / "x.toml"), load_scenario(f"scenarios/{folder.name}.toml")
    assert again.model_dump(mode="json") == declared.model_dump(mode="json")
    assert tomllib.loads(text)["name"] == run["scenario"]["name"]


def test_the_command_of_a_report_makes_the_same_result_again(here):  # noqa: F811
    scenario(here, ('name = "day34"', 'name = "day34"\n[run]\nwarmup = 1\n'))
    (here / "in").mkdir()
    (here / "x.toml").rename(here / "in/x.toml")
    done = invoke("sweep", "in/x.toml", "--repetitions", "2", "--audit", "--out", "o", "--no-plots")
    assert done.exit_code == 0, done.output
    result = load_result("o")
    command, toml = parts(reproduce(result), Code)
    assert command.text == "batchbench sweep x.toml --engine own --repetitions 2 --audit --out out/again"
    (here / "x.toml").write_text(toml.text)
    again = invoke(*command.text.split()[1:], "--no-plots")
    assert again.exit_code == 0, again.output
    found = load_result("out/again")
    for key in ("command", "scenario", "workload_hash"):
        assert found.run[key] == result.run[key]
    assert found.rows("evictions") == result.rows("evictions")


def test_a_result_without_its_command_says_so_and_derives_one(day34):
    kept = reproduce(day34)
    assert "The command that made this result" in parts(kept, Paragraph)[1].text
    assert parts(kept, Code)[0].text == "batchbench sweep day34.toml --engine own --out out/again"
    section = reproduce(Result({key: value for key, value in day34.run.items() if key != "command"}, day34.files))
    assert "did not keep its command" in parts(section, Paragraph)[1].text
    assert parts(section, Code)[0].text == "batchbench sweep day34.toml --out out/again"


def test_a_result_that_knows_little_of_itself_has_a_report(tmp_path):
    run = {"scenario": {"name": "x"}, "engine": {}, "git": 3, "machine": [], "versions": None, "command": [1]}
    result = result_of(tmp_path / "o", run, [request("a", output=2)], [it(1), it(1, finished=("a",))])
    content = report([result])
    assert "only its name" in [p.text for p in parts(content.chapters[0].sections[-1], Paragraph)][-1]
    assert html(content) and pdf(content) and markdown(content, "f")


def test_results_of_one_workload_are_set_side_by_side_and_others_are_not(day34):
    (table,) = report([day34, day34]).opening
    assert table.headings[0] == "result"
    assert [row[0].text for row in table.rows] == ["1. day34 (results/day34)"] * 6 + ["2. day34 (results/day34)"] * 6
    (refused,) = report([day34, load_result("results/swap")]).opening
    assert "different workloads" in refused.text


# HTML


def test_the_page_is_whole_and_takes_nothing_from_elsewhere(page):
    found = Page(page)
    assert found.open == []
    for tag, attributes in found.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "image")
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("src", "style", "action", "srcset"), (tag, name)
            if name in ("href", "xlink:href"):
                assert value.startswith("#"), value
            assert "//" not in (value or ""), (tag, name, value)
    assert "@import" not in page and "url(http" not in page


def test_every_link_leads_to_an_id_and_no_id_is_there_twice(page):
    found = Page(page)
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in found.elements:
        for name in ("href", "aria-labelledby", "clip-path", "fill"):
            for target in re.findall(r"#([A-Za-z][\w.-]+)", attributes.get(name) or ""):
                assert target in ids or re.fullmatch("[0-9a-fA-F]{3,6}", target), target
        for target in (attributes.get("aria-labelledby") or "").split():
            assert target in ids


def test_the_policy_allows_the_pages_own_style_and_script_and_nothing_else(page):
    (policy,) = [m["content"] for m in Page(page).all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)

    def digest(text):
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest(style)}'; script-src 'sha256-{digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def test_the_verdict_is_before_every_table_and_figure(page):
    assert page.index("Identical texts at all 6 points.") < min(page.index("<table"), page.index("<figure"))


def test_tables_have_captions_and_headings_with_scopes_and_figures_their_words(page):
    found = Page(page)
    assert len(found.all("caption")) == len(found.all("table")) > 6
    assert all(attributes.get("scope") in ("col", "row") for attributes in found.all("th"))
    pictures = found.all("svg")
    assert all(a["role"] == "img" and a["aria-labelledby"] for a in pictures)
    assert len(pictures) == 8
    assert "Latency of the evicted; victims / the never evicted" in page
    assert page.count("<summary>Values as a table</summary>") == 7


def test_every_value_of_a_figure_is_under_its_mark(page):
    said = Page(page).texts["title"]
    assert "pool of 8 blocks; r5, latency [iterations]; arrived in iteration 0; 100" in said
    assert any(text.startswith("Evictions; evictions per request; pool [blocks] 12; 1.167") for text in said)


def test_two_results_in_one_page_do_not_share_ids(day34):
    ids = re.findall(r' id="([^"]+)"', html(report([day34, day34])))
    assert len(ids) == len(set(ids))


def test_what_comes_from_a_result_stays_text(hostile):
    page = html(report([hostile]))
    found = Page(page)
    assert len(found.all("script")) == 2  # the page's own, and the numbers of its slider
    assert not found.all("img")
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202e]", page)
    assert any(HOSTILE in text for text in found.texts["h1"])
    assert "\\x1b[31m" in page
    command = next(text for text in found.texts["code"] if text.startswith("batchbench sweep"))
    assert "'a; rm -rf .'" in command and "\n" not in command


def test_hostile_names_stay_text_in_markdown_and_pdf(hostile):
    content = report([hostile])
    text, _ = markdown(content, "f")
    assert "<script>" not in re.sub(r"^(```+)\w+\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    table = next(line for line in text.splitlines() if line.startswith("| 32 ") and "r5" in line)
    assert len(re.findall(r"(?<!\\)\|", table)) == 14
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202e]", text)
    words = "".join(page.extract_text() for page in PdfReader(io.BytesIO(pdf(content))).pages)
    assert '<script>alert("x")</script>' in words.replace("\n", "")


# Markdown and PDF


def test_markdown_means_what_it_says():
    assert plain("a|b <i> *x* [y](z) `c` &lt; http://h") == (
        "a\\|b &lt;i\\> \\*x\\* \\[y\\]\\(z\\) \\`c\\` &amp;lt; http\\://h"
    )


def test_markdown_has_the_tables_and_its_figures_beside_it(here):  # noqa: F811
    done = invoke("report", str(DAY34), "-o", "a b.md")
    assert done.exit_code == 0, done.output
    text = (here / "a b.md").read_text()
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(shown) == 8
    for target in shown:
        assert (here / target.replace("%20", " ")).read_bytes().startswith(b"\x89PNG")
    assert "| 12 blocks | 0\\.375 | 1\\.17 | 39\\.9% |" in text
    assert text.index("Identical texts") < text.index("| pool |")


def test_a_fence_is_longer_than_any_in_the_scenario(day34):
    run = {**day34.run, "scenario": {**day34.run["scenario"], "name": "a````b"}}
    text, _ = markdown(report([Result(run, day34.files)]), "f")
    assert "\n`````toml\n" in text and text.rstrip().count("`````") == 2 + 2 * text.count("`````sh")


def test_the_pdf_has_text_that_can_be_taken_out_and_carries_its_fonts(day34):
    reader = PdfReader(io.BytesIO(pdf(report([day34]))))
    text = "\n".join(page.extract_text() for page in reader.pages)
    assert text.index("Identical texts at all 6 points.") < text.index("What each point cost")
    for expected in (
        "39.9%",
        "batchbench sweep day34.toml --engine own --out out/again",
        "watermark_blocks = 0",
        "Values that are null",
    ):
        assert expected in text
    fonts = [font.get_object() for page in reader.pages for font in page["/Resources"]["/Font"].values()]
    assert fonts
    for font in fonts:
        (inner,) = font["/DescendantFonts"]
        assert "/FontFile2" in inner.get_object()["/FontDescriptor"]
    assert reader.metadata.title == "day34: what a smaller KV pool costs"
    assert next(iter(reader.outline)).title == "The sweep"
    assert sum(len(page.images) for page in reader.pages) == 8


def test_characters_that_the_font_lacks_are_escaped(day34):
    content = Report("漢字: 48 blocks", "", (Paragraph("字"), Code("é", "漢", "sh")), ())
    text = PdfReader(io.BytesIO(pdf(content))).pages[0].extract_text()
    assert "\\u6f22\\u5b57: 48 blocks" in text and "é" in text and text.count("\\u6f22") == 3


def test_a_name_that_the_figures_font_lacks_is_whole_in_the_page(day34):
    run = {**day34.run, "scenario": {**day34.run["scenario"], "name": "漢字"}}
    page = html(report([Result(run, day34.files)]))
    assert "漢字: slots over time" in page


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "-o", "x.html"), "nowhere is not a result folder"),
        (("r", "-o", "x.docx"), "ends in .docx, must end in .html, .pdf, .md"),
        (("r", "-o", "x"), "ends in nothing"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(here, arguments, message):  # noqa: F811
    assert_refused(invoke("report", *arguments), here, message)


def test_a_folder_in_the_way_is_refused(here):  # noqa: F811
    (here / "x.html").mkdir()
    done = invoke("report", "r", "-o", "x.html")
    assert done.exit_code == 2 and "is a folder" in done.stderr
    assert everything_under(here) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["closed_loop", "swap", "watermark"])
def test_pages_of_other_clocks_and_of_many_choices_hold_together(name, tmp_path):
    done = invoke("report", f"results/{name}", "-o", str(tmp_path / "r.html"))
    assert done.exit_code == 0, done.output
    found = Page((tmp_path / "r.html").read_text())
    assert found.open == []
    assert len(found.all("svg")) >= 7


def test_an_earlier_report_stays_whole_if_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    assert invoke("report", "results/day34", "-o", str(tmp_path / "r.md")).exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write, written = Path.write_bytes, []

    def full(self, data):
        written.append(self)
        if len(written) == 3:
            write(self, data[:100])
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    done = invoke("report", "results/swap", "-o", str(tmp_path / "r.md"))
    assert done.exit_code == 1 and done.stderr.endswith("No space left on device\n")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_two_results_of_one_scenario_are_told_apart_by_their_folders(tmp_path):
    shutil.copytree("results/day34", tmp_path / "after")
    done = invoke("report", "results/day34", str(tmp_path / "after"), "-o", str(tmp_path / "r.md"))
    assert done.exit_code == 0, done.output
    text = (tmp_path / "r.md").read_text().replace("\\", "")
    assert "1. day34 (results/day34)" in text and f"2. day34 ({tmp_path}/after)" in text


def test_a_null_of_an_older_result_is_its_version(tmp_path):
    assert invoke("report", "tests/results/v1", "-o", str(tmp_path / "r.md")).exit_code == 0
    text = (tmp_path / "r.md").read_text()
    (line,) = [line for line in text.splitlines() if "of schema version 1" in line]
    assert "pools.duration" in line.replace("\\", "") and "requests.arrival" in line.replace("\\", "")


def test_dollars_are_text(tmp_path):
    """Two of them in a title were taken for mathematics where it was wrapped."""
    folder = tmp_path / "r"
    shutil.copytree("results/day34", folder)
    for name in TABLES:
        rewrite(folder, name, lambda rows: [row | {"choices": "cost $5 \\x $"} for row in rows])
    assert invoke("report", str(folder), "-o", str(tmp_path / "r.html")).exit_code == 0


# How to run it again: the listing


def test_short_values_of_arrays_share_lines_and_the_document_is_the_same():
    document = {
        "name": "x",
        "pools": [48, 32],
        "none": None,
        "t": {"pairs": [[n, 7] for n in range(40)], "long": ["a" * 150, "b", 'array 0."'], "empty": [], "n": 1.5},
        "groups": [{"share": 0.5, "lengths": [1, 2]}, {"share": 0.5, "lengths": list(range(60))}],
        "deep": [[list(range(50)), [1]], []],
        "mixed": [True, 1e300, -3, "é\n\t\"'\\"],
    }
    text = toml_text(document)
    assert tomllib.loads(text) == {key: value for key, value in document.items() if value is not None}
    assert "pools = [48, 32]\n" in text
    assert "\npairs = [\n    [0, 7], [1, 7], " in text
    assert max(len(line) for line in text.split("\n") if "aaa" not in line) <= 120
    assert len(text.split("\n")) < 60


@pytest.mark.parametrize("odd", ["\u202e", "\u2066", "\u200b", "\ufeff", "\x7f", "\x1b", "\x85", "\xa0", "\U000e0001"])
def test_a_character_that_is_not_seen_is_an_escape_in_the_listing(day34, odd):
    document = {"workload": {"prompts": f"a{odd}b.txt", f"k{odd}": [f"{odd}", 1]}}
    text = scenario_toml(document)
    assert tomllib.loads(text) == document
    assert all(c.isprintable() or c == "\n" for c in text)
    run = {**day34.run, "scenario": {**day34.run["scenario"], **document}}
    content = report([Result(run, day34.files)])
    (listing,) = [part for part in parts(content.chapters[0].sections[-1], Code) if part.language == "toml"]
    assert listing.text.count("\\") >= 3
    only = Report("x", "", (listing,), ())
    for written in (html(only), markdown(only, "f")[0], PdfReader(io.BytesIO(pdf(only))).pages[0].extract_text()):
        assert odd not in written


def long_result(day34, requests):
    stored = day34.run["scenario"]
    workload = {**stored["workload"], "arrivals": [f"arrival number {n} {'x' * 90}" for n in range(requests)]}
    return Result({**day34.run, "scenario": {**stored, "workload": workload}}, day34.files)


def test_a_long_listing_is_whole_in_html_and_cut_elsewhere_which_is_said(day34):
    section = reproduce(long_result(day34, 300))
    listing = parts(section, Code)[-1]
    assert listing.lines_cut == len(listing.lines) - LISTED_LINES > 100
    said = parts(section, Paragraph)[-1].text
    assert f"the HTML report (batchbench report RESULT -o report.html) has all its {len(listing.lines)} lines" in said
    only = Report("x", "", (listing,), ())
    page = html(only)
    assert '<details class="code">' in page and "arrival number 299" in page
    last = f"# ... and {listing.lines_cut} more lines"
    pages = PdfReader(io.BytesIO(pdf(only))).pages
    for text in (markdown(only, "f")[0], "\n".join(sheet.extract_text() for sheet in pages)):
        assert "arrival number 99 " in text and last in text and "arrival number 299" not in text
    assert len(pages) <= 4


def test_a_listing_that_is_not_long_is_whole_everywhere(day34):
    section = reproduce(day34)
    listing = parts(section, Code)[-1]
    assert listing.lines_cut == 0 and listing.start == listing.text.rstrip()
    assert "long" not in " ".join(part.text for part in parts(section, Paragraph))


def test_six_hundred_integers_are_few_lines():
    document = {"workload": {"lengths": [[n, 100 + n] for n in range(600)], "arrival_iterations": list(range(600))}}
    assert len(toml_text(document).split("\n")) < 120


def test_every_file_that_a_scenario_names_is_named(day34):
    """Wherever it is: the keys are those of the fields that hold a path."""
    assert path_keys(Scenario) == {"model", "calibration", "lengths_file", "prompts", "path", "file"}
    changed = {
        "engine": {"model": "m.gguf", "calibration": "c.json"},
        "workload": {
            "prompt_tokens": {"dist": "empirical", "file": "sub/hist.csv"},
            "output_tokens": {
                "dist": "mixture",
                "parts": [{"weight": 1, "of": {"dist": "empirical", "file": "b.csv"}}],
            },
            "prompts": "p.txt",
            "lengths_file": "sub/hist.csv",
            "trace": {"path": "t.csv", "format": None},
        },
    }
    said = reproduce(Result({**day34.run, "scenario": {**day34.run["scenario"], **changed}}, day34.files))
    (line,) = [part.text for part in parts(said, Paragraph) if part.text.startswith("It also reads")]
    assert line.endswith(": m.gguf, c.json, sub/hist.csv, b.csv, p.txt, t.csv.")
    assert not [part for part in parts(reproduce(day34), Paragraph) if part.text.startswith("It also reads")]


# Where both take as long


def test_positions_found_in_the_prefix_cache_move_the_crossing():
    result = load_result("results/agents")
    section = link(result)
    (about,) = parts(section, Link)
    assert [(point.evictions, point.spared) for point in about.points] == [(2, 0), (13, 0), (4, 4), (11, 11)]
    said = parts(section, Paragraph)[-1].text
    assert "whatever their length" not in said
    assert "But 15 of the 30 evictions had fewer positions computed again than their victims had cached" in said
    rows = [row for point in about.points for row in point.victims]
    again, copied = sum(v.count * v.rebuilt for v in rows), sum(v.count * v.copied for v in rows)
    equal = 2 * about.kv_bytes_per_token / about.s_per_position * copied / again
    assert said.endswith(f"over all evictions they are equal at {equal / 1e9:.3g} GB/s.")
    assert again * about.s_per_position == pytest.approx(2 * copied * about.kv_bytes_per_token / equal)


def test_without_a_recovery_the_crossing_holds_at_every_length(day34):
    said = parts(link(day34), Paragraph)[-1].text
    assert (
        said.startswith("For victims that fill their blocks the two are equal at ") and "whatever their length" in said
    )


# Small things of the page


def test_headings_leave_out_no_level(day34):
    for results in ([day34], [day34, day34]):
        page = html(report(results))
        levels = [int(level) for level in re.findall(r"<h([1-6])", page)]
        assert levels[0] == 1 and max(b - a for a, b in pairwise(levels)) == 1


@pytest.mark.parametrize(
    ("value", "sign", "said"),
    [(1870.4, "+", "+1,870"), (-1870.4, "+", "-1,870"), (999.4, "", "999"), (999.7, "", "1,000"),
     (0.01234, "+", "+0.0123"), (12.3, "", "12.3"), (1234567, "", "1,234,567"), (0, "", "0")],
)  # fmt: skip
def test_large_numbers_have_no_exponent(value, sign, said):
    assert show_digits(value, sign) == said


@pytest.mark.parametrize("before", [0, 40, 60, 80, 90, 95, 97, 99, 101])
def test_a_tables_heading_has_three_rows_under_it(before):
    rows = [words(f"row{n}", "x") for n in range(8)]
    section = Section("s", "Title", (table("Caption", ["first heading", "second"], rows, [], "A note."),))
    filler = tuple(Paragraph("word") for _ in range(before // 2))
    content = Report("x", "", filler, (Chapter("c", (), (section,)),))
    pages = [sheet.extract_text() for sheet in PdfReader(io.BytesIO(pdf(content))).pages]
    (first,) = [text for text in pages if "Caption" in text]
    assert all(text in first for text in ("Title", "A note.", "first heading", "row0", "row1", "row2"))


@pytest.mark.parametrize("lines", range(60, 76))
def test_no_page_of_text_has_one_line(lines):
    content = Report("x", "", (Code("c", "\n".join(f"line{n}" for n in range(lines)), "toml"),), ())
    pages = [sheet.extract_text().count("line") for sheet in PdfReader(io.BytesIO(pdf(content))).pages]
    assert sum(pages) == lines and min(pages) >= 3


def test_a_report_that_cannot_be_written_leaves_no_folder(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    done = invoke("report", "results/day34", "-o", str(tmp_path / "new/deep/r.md"))
    assert done.exit_code == 1 and done.stderr.endswith("No space left on device\n")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "r-figures").mkdir()  # somebody's own
    assert invoke("report", "results/day34", "-o", str(tmp_path / "r.md")).exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["r-figures"]
