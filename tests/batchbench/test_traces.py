"""Traces: every format loads its sample, every quirk follows its rule, what no rule covers is refused by its place."""

from __future__ import annotations

import contextlib
import json
import random
import re
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchbench.errors import TraceError, UsageError
from batchbench.traces import FORMATS, Tally, TraceRow, open_trace, read_sorted, rows_in_window
from batchbench.traces import records as reading
from batchbench.traces.cells import MAX_TOKENS, UNITS_NS, Clock, RefusedCell
from batchbench.traces.formats import BY_NAME, plain_name
from batchbench.traces.making import fitting_sizes

SAMPLES = Path("tests/traces")
NAIVE = "times without a zone, taken as UTC"
SAME = "at the time of the row before"
IN_SECONDS = "times without a unit, taken as s by the first"

# file -> format, rows read, dropped, noted, positions of a hash id
LOADED = {
    "azure2023_code_first2000.csv": ("azure", 2000, {}, {NAIVE: 2000}, None),
    "azure2023_conv_first2000.csv": ("azure", 2000, {}, {NAIVE: 2000}, None),
    "azure2024_made.csv": ("azure", 4, {"output of 0 tokens": 1}, {}, None),
    "burstgpt1_first100.csv": ("burstgpt", 100, {"prompt of 0 tokens": 5}, {SAME: 1}, None),
    "burstgpt3_25rows.csv": ("burstgpt", 25, {"prompt of 0 tokens": 1}, {}, None),
    "mooncake_fast25_conversation_first300.jsonl": ("mooncake", 300, {}, {SAME: 265}, 512),
    "mooncake_fast25_synthetic_first300.jsonl": ("mooncake", 300, {}, {SAME: 1}, 512),
    "aiperf_production_trace_template.jsonl": (
        "mooncake", 10, {},
        {"no hash ids, so nothing is shared": 6, "one hash id beyond the prompt, left out": 1}, 512,
    ),
    "qwen_bailian_made.jsonl": (
        "qwen-bailian", 4, {}, {SAME: 1, "the turn before is not among the rows before": 1}, 16,
    ),
    "vllm_timed_made.jsonl": ("vllm-timed", 4, {}, {SAME: 1}, 16),
    "vidur_splitwise_conv_first2000.csv": ("vidur", 2000, {}, {}, None),
    "lognormal_1000_t0.csv": ("vidur", 1000, {}, {SAME: 999}, None),
    "llmservingsim_example_trace.jsonl": ("llmservingsim", 10, {}, {"token ids, not used": 10}, None),
    "llmservingsim_me2_01_mixed.jsonl": ("llmservingsim", 608, {}, {}, None),
    "sharegpt_made.json": (
        "sharegpt", 4, {"fewer than two turns": 2}, {"the first turn is not a person's": 1}, None,
    ),
    "vllm_custom_made.jsonl": ("vllm-custom", 3, {}, {}, None),
}  # fmt: skip


def load(path, *arguments, **options):
    trace = open_trace(path, *arguments, **options)
    return list(trace.rows()), trace


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def whole(tally):
    return tally.rows_read == tally.rows_used + sum(tally.dropped.values())


def test_every_sample_is_here_and_every_format_has_one():
    files = {path.name for path in SAMPLES.iterdir()} - {"README.md"}
    assert files == set(LOADED)
    assert {one[0] for one in LOADED.values()} == set(FORMATS) - {"csv", "jsonl", "parquet"}
    page = (SAMPLES / "README.md").read_text()
    for name in files:
        assert f"`{name}`" in page


@pytest.mark.parametrize("name", LOADED)
def test_every_format_loads_its_sample(name):
    format_name, read, dropped, noted, prefix_tokens = LOADED[name]
    rows, trace = load(SAMPLES / name)
    assert (trace.format, trace.prefix_tokens) == (format_name, prefix_tokens)
    assert (trace.tally.rows_read, trace.tally.dropped, trace.tally.noted) == (read, dropped, noted)
    assert trace.tally.rows_used == len(rows)
    assert whole(trace.tally)
    given, explicit = load(SAMPLES / name, format_name)
    assert given == rows
    assert explicit.tally == trace.tally
    assert list(trace.rows()) == rows, "a second reading starts again"
    assert trace.tally == explicit.tally


def first(name):
    return next(open_trace(SAMPLES / name).rows())


def test_the_first_rows_are_what_the_files_say():
    code = datetime(2023, 11, 16, 18, 17, 3, 979960, tzinfo=UTC)
    assert first("azure2023_code_first2000.csv") == TraceRow(2, round(code.timestamp() * 1e6) * 1000, 4808, 10)
    assert first("burstgpt1_first100.csv") == TraceRow(2, 5 * 10**9, 472, 18)
    assert first("burstgpt3_25rows.csv") == TraceRow(2, 19_440_110 * 10**9, 906, 446)  # the columns have moved
    assert first("mooncake_fast25_conversation_first300.jsonl") == TraceRow(1, 0, 6758, 500, tuple(range(14)))
    assert first("llmservingsim_me2_01_mixed.jsonl") == TraceRow(1, 101_537_000, 27_369, 1626)
    rows, _ = load(SAMPLES / "vidur_splitwise_conv_first2000.csv")
    assert rows[1] == TraceRow(3, 4_314_579_000, 396, 109)
    rows, _ = load(SAMPLES / "aiperf_production_trace_template.jsonl")
    assert rows[2] == TraceRow(3, 120_000_000, 1024, 256, (1, 2))  # of the file's three, one is beyond the prompt
    rows, _ = load(SAMPLES / "qwen_bailian_made.jsonl")
    assert [(row.request_id, row.after) for row in rows] == [
        ("159", None),
        ("160", None),
        ("163", "159"),
        ("171", "55"),
    ]
    assert rows[2].arrival_ns == 61_114_000_000
    assert [row.prefix_ids for row in rows[1:4:2]] == [(7, 8, 9), (7, 8, 11, 12)]
    rows, _ = load(SAMPLES / "sharegpt_made.json")
    assert rows[0] == TraceRow(
        1, None, None, None, request_id="a1_0", prompt="Which page holds position 17?",
        output="With 16 positions in a page, the second.",
    )  # fmt: skip
    assert (rows[1].line, rows[1].output) == (3, "Thanks ☕\nWhere were we?")
    rows, _ = load(SAMPLES / "vllm_custom_made.jsonl")
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(None, None), (None, 12), (None, 7)]


def test_the_page_names_every_format_column_and_reason():
    page = Path("docs/traces.md").read_text()
    for name in FORMATS:
        assert f"`{name}`" in page
    plain_names = {name for role in BY_NAME["jsonl"].required.values() for name in role}
    quoted = {plain_name(name) for name in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))}
    endings = tuple(f"_{unit}" for unit in UNITS_NS)
    assert {name for name in plain_names if not name.endswith(endings)} <= quoted
    assert f"{MAX_TOKENS:,}" in page
    assert f"more than {reading.MAX_CHARS // 2**20} Mi characters" in page


def test_the_example_on_the_page_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", Path("docs/traces.md").read_text(), re.DOTALL)
    exec(code, {})
    assert "rows: 100 read = 95 used + 5 dropped (prompt of 0 tokens)" in capsys.readouterr().out


TWINS = [
    ("azure2023_code_first2000.csv", "4808", "-4808", ":2: prompt length is -4808, must not be negative"),
    ("azure2023_conv_first2000.csv", ",44\r", ",44.5\r", ":2: output length is '44.5', must be a whole number"),
    (
        "azure2024_made.csv",
        "2024-05-10 00:00:01+",
        "2024-05-32 00:00:01+",
        ":4: time is '2024-05-32 00:00:01+00:00', which is no date of the calendar",
    ),
    (
        "burstgpt1_first100.csv",
        "Response tokens",
        "Answer tokens",
        ":1: no column response_tokens, which burstgpt needs; there are 'Timestamp', 'Model', 'Request tokens', "
        "'Answer tokens', 'Total tokens', 'Log Type'",
    ),
    ("burstgpt3_25rows.csv", "19440110.0", "yesterday", ":2: time is 'yesterday', must be a number (s)"),
    (
        "mooncake_fast25_conversation_first300.jsonl",
        "[0, 1, 2, 3,",
        "[0, 1, 2.5, 3,",
        ":1: hash ids are [0, 1, '2.5', 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], must be a list of whole numbers or texts",
    ),
    (
        "mooncake_fast25_synthetic_first300.jsonl",
        '{"timestamp": 0, "input_length": 36640',
        '{"timestamp": 0 "input_length": 36640',
        ":2: not JSON: Expecting ',' delimiter at character 17",
    ),
    (
        "aiperf_production_trace_template.jsonl",
        '"input_length": 256, "output_length": 64}',
        '"input_length": NaN, "output_length": 64}',
        ":2: prompt length is NaN, must be a whole number",
    ),
    ("qwen_bailian_made.jsonl", '"chat_id": 159', '"chat_id": 1.5', ":1: id is 1.5, must be a whole number or a text"),
    (
        "vllm_timed_made.jsonl",
        '"input_length": 48',
        '"input_length": 480',
        ":2: 3 hash ids for a prompt of 480; of 16 positions each there would be 30; "
        "prefix_tokens from 160 to 239 would fit",
    ),
    (
        "vidur_splitwise_conv_first2000.csv",
        "\n4.314579,396,109\n",
        "\n4.314579,396\n",
        ":3: 2 cells, the line of names has 3",
    ),
    ("lognormal_1000_t0.csv", "1202", "12020000000", ":2: prompt length is 12020000000, more than 10000000"),
    (
        "llmservingsim_example_trace.jsonl",
        '{"input_toks":22',
        '{"sub_requests":[],"input_toks":22',
        ":2: an agentic session (sub_requests): when its later calls come, only a run can say; a trace has one "
        "request a line",
    ),
    (
        "llmservingsim_me2_01_mixed.jsonl",
        '{"input_toks": 1390, "output_toks": 527, "arrival_time_ns": 144370000}',
        "[1390, 527]",
        ":2: [1390, 527] is no JSON object",
    ),
    (
        "sharegpt_made.json",
        '"value": "Hello?"',
        '"value" "Hello?"',
        ": record 2: not JSON: Expecting ':' delimiter at character ",
    ),
    (
        "vllm_custom_made.jsonl",
        '"prompt": "Count to three."',
        '"prompt": ["Count"]',
        ":2: prompt is ['Count'], must be a text",
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "said"), TWINS, ids=[twin[0] for twin in TWINS])
def test_a_malformed_twin_is_refused_by_file_line_and_reason(tmp_path, name, old, new, said):
    content = (SAMPLES / name).read_bytes()
    assert old.encode() in content
    path = write(tmp_path, name, content.replace(old.encode(), new.encode(), 1))
    with pytest.raises(TraceError) as refused:
        load(path, LOADED[name][0])
    assert str(refused.value).startswith(f"{path}{said}")
    assert isinstance(refused.value, UsageError)
    assert {twin[0] for twin in TWINS} == set(LOADED)


def plain(folder, *rows, names="timestamp_s,prompt_tokens,output_tokens", end="\n"):
    return write(folder, "x.csv", "\n".join([names, *rows]) + end)


def times(folder, *cells, name="timestamp"):
    rows, trace = load(plain(folder, *(f"{cell},3,4" for cell in cells), names=f"{name},prompt_tokens,output_tokens"))
    return [row.arrival_ns for row in rows], trace


DAY = 1_715_299_200 * 10**9  # 2024-05-10, midnight UTC


@pytest.mark.parametrize(
    ("cell", "ns"),
    [
        ("2024-05-10 00:00:00", DAY),
        ("2024-05-10T00:00:00Z", DAY),
        ("2024-05-10 00:00", DAY),
        ("2024-05-10 00:00:00.000001", DAY + 1_000),
        ("2024-05-10 00:00:00.1234567", DAY + 123_456_700),
        ("2024-05-10 00:00:00.123456789+00:00", DAY + 123_456_789),
        ("2024-05-10 02:00:00.5+02:00", DAY + 500_000_000),
        ("2024-05-09 19:30:00-0430", DAY),
        ("2024-05-10 01:00:00+01", DAY),
        ("2024-05-10 00:00:00 UTC", DAY),
        ("1969-12-31 23:59:59.999999999Z", -1),
        ("1715299200", DAY),
        ("1715299200.000000001", DAY + 1),
        ("1715299200123", DAY + 123_000_000),
        ("1715299200123456", DAY + 123_456_000),
        ("1715299200123456789", DAY + 123_456_789),
        ("99999999999", None),
        ("0", 0),
        ("-2.5", -2_500_000_000),
        ("1.5e3", 1_500_000_000_000),
        ("1e-9", 1),
    ],
)
def test_a_time_is_read_to_the_nanosecond(tmp_path, cell, ns):
    if ns is None:
        with pytest.raises(TraceError, match="before 1896 or after 2116"):
            times(tmp_path, cell)
    else:
        assert times(tmp_path, cell)[0] == [ns]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("noon", "time is 'noon', neither a number nor a date"),
        ("NaN", "time is 'NaN', neither"),
        ("inf", "time is 'inf', neither"),
        ("1e999999999", "neither"),
        ("1e999", "before 1896 or after 2116"),
        ("2024-02-30 00:00:00", "no date of the calendar"),
        ("2024-05-10 24:00:00", "no date of the calendar"),
        ("2024-05-10 00:00:00+99:00", "no zone on earth"),
        ("9999-05-10 00:00:00", "before 1896 or after 2116"),
        ("2024-05-10", "neither"),
        ("2024-05-10 00:00:00.1234567890", "neither"),
        ("1" * 100, "neither"),
        ("\u0661\u0662", "neither"),  # digits, but not ours
        ("\x1b[31m5", r"time is '\\x1b[31m5'"),
    ],
)
def test_a_time_that_is_none_is_refused(tmp_path, cell, said):
    with pytest.raises(TraceError, match=re.escape(said).replace(r"\\\\", r"\\")) as refused:
        times(tmp_path, cell)
    assert str(refused.value).startswith(f"{tmp_path}/x.csv:2: time is ")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(("unit", "scale"), [("s", 10**9), ("ms", 10**6), ("us", 1000), ("ns", 1)])
def test_a_column_s_name_says_the_unit(tmp_path, unit, scale):
    big = 1_715_299_200_123 if unit != "s" else 5
    assert times(tmp_path, "7", str(big), name=f"arrival_{unit}")[0] == [7 * scale, big * scale]


def test_the_unit_is_that_of_the_first_time_throughout(tmp_path):
    found, _ = times(tmp_path, "1715299200000", "5")
    assert found == [DAY, 5_000_000]
    with pytest.raises(TraceError, match=":3: time is '1715299200000000000' s, before 1896 or after 2116"):
        times(tmp_path, "1715299200", "1715299200000000000")
    with pytest.raises(TraceError, match=":3: time is '2024-05-10 00:00:00', must be a number"):
        times(tmp_path, "1715299200", "2024-05-10 00:00:00")
    with pytest.raises(TraceError, match=":3: time is '1715299200', must be a date like"):
        times(tmp_path, "2024-05-10 00:00:00", "1715299200")
    with pytest.raises(TraceError, match=r":2: time is '2024-05-10 00:00:00', must be a number \(ms\)"):
        times(tmp_path, "2024-05-10 00:00:00", name="timestamp_ms")


@pytest.mark.parametrize(("first", "unit"), [(0, "s"), (10**11, "ms"), (10**14, "us"), (10**17, "ns")])
def test_the_thresholds_of_the_units(first, unit):
    notes = []
    clock = Clock(None)
    assert clock.read(str(first), notes.append) == first * UNITS_NS[unit]
    assert notes == [f"times without a unit, taken as {unit} by the first"]
    if first:
        below = Clock(None)
        with contextlib.suppress(RefusedCell):  # just below 1e11 seconds is beyond 2116
            below.read(str(first - 1), notes.append)
        assert list(UNITS_NS).index(below.unit) == list(UNITS_NS).index(unit) - 1


def test_zones_may_be_mixed(tmp_path):
    found, trace = times(tmp_path, "2024-05-10 02:00:00+02:00", "2024-05-10 00:00:00", "2024-05-10T00:00:00.0000000Z")
    assert found == [DAY] * 3
    assert trace.tally.noted == {NAIVE: 1, SAME: 2}


@pytest.mark.parametrize(
    ("cell", "count", "noted"),
    [
        ("7", 7, None),
        (" 7 ", 7, None),
        ("+7", 7, None),
        ("007", 7, None),
        ("472.0", 472, "whole numbers written with a fraction"),
        ("4.72e2", 472, "whole numbers written with a fraction"),
        ('"1,234"', 1234, "thousands separators"),
        ('"1,234,567"', 1234567, "thousands separators"),
        ("10000000", 10_000_000, None),
    ],
)
def test_a_count_is_read(tmp_path, cell, count, noted):
    rows, trace = load(plain(tmp_path, f"0,{cell},{cell}"))
    assert (rows[0].prompt_tokens, rows[0].output_tokens) == (count, count)
    assert trace.tally.noted == ({noted: 2} if noted else {})


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("-1", "-1, must not be negative"),
        ("-1e999", "must not be negative"),
        ("1e999", "too large"),
        ("NaN", "'NaN', must be a whole number"),
        ("inf", "must be a whole number"),
        ("1.5", "must be a whole number"),
        ("1_000", "must be a whole number"),
        ('"1,23"', "must be a whole number"),
        ('"12,34,567"', "must be a whole number"),
        ("True", "must be a whole number"),
        ("0x10", "must be a whole number"),
        ("10000001", "10000001, more than 10000000"),
        ("9" * 30, "more than 10000000"),
        ("9" * 5000, "must be a whole number"),
    ],
)
def test_a_count_that_is_none_is_refused(tmp_path, cell, said):
    for row, what in ((f"0,{cell},5", "prompt"), (f"0,5,{cell}", "output")):
        with pytest.raises(TraceError, match=f":2: {what} length is .*{re.escape(said)}") as refused:
            load(plain(tmp_path, row))
        assert len(str(refused.value)) < 200 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (",3,4", "no time"),
        ("1,,4", "no prompt length"),
        ("1,3,", "no output length"),
        ("1,0,4", "prompt of 0 tokens"),
        ("1,3,0", "output of 0 tokens"),
        ("1,0,0", "prompt of 0 tokens"),
        ("1,-0,4", "prompt of 0 tokens"),
    ],
)
def test_a_row_that_cannot_be_used_is_dropped_and_counted(tmp_path, row, reason):
    rows, trace = load(plain(tmp_path, "0,1,2", row, "2,3,4"))
    assert [found.line for found in rows] == [2, 4]
    assert trace.tally == Tally(3, 2, {reason: 1}, {})
    assert trace.tally.lines() == [f"rows: 3 read = 2 used + 1 dropped ({reason})"]


def test_a_field_that_a_json_row_lacks_is_an_empty_cell(tmp_path):
    text = '{"input_length": 3, "output_length": 4}\n{"timestamp": 5, "input_length": null, "output_length": 4}\n'
    rows, trace = load(write(tmp_path, "x", text))
    assert (trace.format, rows, trace.tally.dropped) == ("mooncake", [], {"no time": 1, "no prompt length": 1})


def test_the_order_of_the_file_is_kept_and_what_is_out_of_order_counted(tmp_path):
    found, trace = times(tmp_path, 5, 3, 3, 5, 9, 9)
    assert found == [second * 10**9 for second in (5, 3, 3, 5, 9, 9)]
    assert trace.tally.noted == {IN_SECONDS: 1, "earlier than a row before": 2, SAME: 1}


def test_of_equal_ids_the_first_keeps_the_name(tmp_path):
    names = "request_id,timestamp_s,prompt_tokens,output_tokens"
    rows, trace = load(plain(tmp_path, "a,0,1,2", "b,1,1,2", "a,2,1,2", ",3,1,2", names=names))
    assert [row.request_id for row in rows] == ["a", "b", None, None]
    assert trace.tally.noted == {"duplicate ids, of which the first keeps the name": 1}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("text", ["timestamp_s,prompt_tokens,output_tokens\r\n0,1,2\r\n\r\n 1 , 3 ,4\r\n",
                                  "\n  \nTimestamp (s),Prompt-Tokens,OUTPUT tokens\n0,1,2\n1,3,4",
                                  "timestamp_s\tprompt_tokens\toutput_tokens\tnote\n0\t1\t2\ta, b\n1\t3\t4\t\n",
                                  '"timestamp_s","prompt_tokens", "output_tokens"\n"0","1", "2"\n1,3,4\n'])  # fmt: skip
def test_marks_line_breaks_blank_lines_tabs_and_quotes(tmp_path, mark, text):
    rows, trace = load(write(tmp_path, "x", mark + text.encode()))
    assert [(row.arrival_ns, row.prompt_tokens, row.output_tokens) for row in rows] == [(0, 1, 2), (10**9, 3, 4)]
    assert ("byte order mark" in trace.tally.noted) == bool(mark)
    assert trace.tally.noted.get("blank lines", 0) == (1 if "\r" in text else 2 if text[0] == "\n" else 0)
    unended = "no line break at the end of the file, so the last row may be cut short"
    assert (unended in trace.tally.noted) == (not text.endswith("\n"))


def test_utf_16_with_a_mark(tmp_path):
    for encoding in ("utf-16-le", "utf-16-be"):
        for name in ("azure2024_made.csv", "sharegpt_made.json", "vllm_custom_made.jsonl"):
            text = "\ufeff" + (SAMPLES / name).read_text()
            rows, trace = load(write(tmp_path, name, text.encode(encoding)))
            assert rows == load(SAMPLES / name)[0]
            assert trace.tally.noted["byte order mark"] == 1


@pytest.mark.parametrize(
    "name", ["azure2023_code_first2000.csv", "mooncake_fast25_synthetic_first300.jsonl", "sharegpt_made.json"]
)
def test_a_last_row_that_is_cut_short_is_dropped_and_counted(tmp_path, name):
    content = (SAMPLES / name).read_bytes()
    content = content[: content.index(b"Hello")] if name.endswith(".json") else content.rstrip()[:-8]
    rows, trace = load(write(tmp_path, name, content))
    assert trace.tally.dropped["truncated last line"] == 1
    assert whole(trace.tally)
    assert rows == load(SAMPLES / name)[0][: len(rows)]
    assert len(rows) == {"azure2023_code_first2000.csv": 1999, "sharegpt_made.json": 1}.get(name, 299)


@pytest.mark.parametrize("cut", ["1,3", "1", '1,"3', '1,3,"4'])
def test_a_csv_row_that_is_too_short_is_refused_unless_it_is_the_last(tmp_path, cut):
    rows, trace = load(plain(tmp_path, "0,1,2", cut, end=""))
    assert (len(rows), trace.tally.dropped) == (1, {"truncated last line": 1})
    with pytest.raises(TraceError, match=r"x\.csv:3: (\d cells, the line of names has 3|not CSV: )"):
        load(plain(tmp_path, "0,1,2", cut, "2,3,4"))


def test_a_row_with_too_many_cells_is_refused_even_as_the_last(tmp_path):
    with pytest.raises(TraceError, match=":3: 4 cells, the line of names has 3"):
        load(plain(tmp_path, "0,1,2", "1,234,5,6"))


def test_a_stray_quote_does_not_swallow_rows(tmp_path):
    with pytest.raises(TraceError, match=":3: not CSV"):
        load(plain(tmp_path, "0,1,2", '"1,3,4', "2,3,4", '3,3,4"'))


@pytest.mark.parametrize(
    ("last", "cut"),
    [
        ('{"timestamp": 9, "input_length": 12, "output_len', True),
        ('{"timestamp": 9, "input_length": 12, "output_length": ', True),
        ('{"timestamp": 9, "input_length": 12, "output_length": 3, "hash_ids": [1', True),
        ('{"timestamp": 9, "x": {"a": 1}', True),
        ('{"timestamp": 9, "x": nul', True),
        ('{"timestamp": 9, "x": -', True),
        ("{", True),
        ('{"timestamp": abc}', False),
        ('{"timestamp": 9,}', False),
        ("hello", False),
        ("[1, 2]", False),
        ("7", False),
        ('{"timestamp": 9} {', False),
        ('{"timestamp": ' + "9" * 5000 + "}", False),
        ("{" * 100_000, False),
        ('{"a":' * 100_000, False),
    ],
)
def test_a_json_line_is_cut_short_or_wrong(tmp_path, last, cut):
    good = '{"timestamp": 0, "input_length": 1, "output_length": 2}\n'
    path = write(tmp_path, "x.jsonl", good * 60 + last)
    if cut:
        rows, trace = load(path)
        assert (len(rows), trace.tally.dropped) == (60, {"truncated last line": 1})
        path = write(tmp_path, "x.jsonl", good * 60 + last + "\n" + good)
    with pytest.raises(TraceError, match=r"x\.jsonl:61: "):
        load(path)


@pytest.mark.parametrize(
    ("text", "used", "reason"),
    [
        ("[]", 0, None),
        ("[GOOD,GOOD]", 2, None),
        ("[GOOD, GOOD", 2, "the array is not closed"),
        ("[GOOD,", 1, "the array is not closed"),
        ("[", 0, "the array is not closed"),
        ("GOOD\nGOOD", 2, None),
        ("[GOOD GOOD]", None, "record 2: '{' where a comma or ] should be"),
        ("[GOOD,]", 1, None),
        ("[GOOD, 7]", None, "record 2: 7 is no JSON object"),
        ("[GOOD] x", None, "record 2: 'x' after the end of the array"),
        ("[,GOOD]", None, "record 1: not JSON: Expecting value"),
        ('[{"conversations": 7}]', None, "record 1: conversations is 7, must be a list of turns"),
        ('[{"conversations": [7, 8]}]', None, "record 1: a turn is 7, must be an object"),
        ('[{"conversations": [{"value": 7}, {}]}]', None, "record 1: a turn's value is 7, must be a text"),
        ("[" * 100_000, None, "record 1: not JSON: nested too deeply"),
    ],
)
def test_a_json_array_is_streamed(tmp_path, text, used, reason):
    good = '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}'
    path = write(tmp_path, "x", text.replace("GOOD", good))
    if used is None:
        with pytest.raises(TraceError, match=re.escape(f"{path}: {reason}")):
            load(path, "sharegpt")
    elif used == 0:
        with pytest.raises(TraceError, match="record 1: no column conversations, which sharegpt needs; there are none"):
            load(path, "sharegpt")
    else:
        rows, trace = load(path, "sharegpt")
        assert len(rows) == used
        assert trace.tally.noted == ({reason: 1} if reason else {})


def test_what_a_conversation_lacks(tmp_path):
    turn = {"from": "human", "value": "a"}
    lists = [[turn, turn], [turn, {"from": "gpt", "value": " "}], [{"from": "human"}, turn], [turn], None, [turn] * 5]
    rows, trace = load(write(tmp_path, "x", json.dumps([{"conversations": one} for one in lists])))
    assert [row.line for row in rows] == [1, 6]
    wanted = {"an empty output": 1, "an empty prompt": 1, "fewer than two turns": 1, "no conversation": 1}
    assert trace.tally.dropped == wanted


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_a_json_value_may_lie_across_chunks(monkeypatch, chunk):
    wanted, _ = load(SAMPLES / "sharegpt_made.json")
    monkeypatch.setattr(reading, "_CHUNK", chunk)
    assert load(SAMPLES / "sharegpt_made.json")[0] == wanted


def test_long_lines_and_values_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_CHARS", 1000)
    monkeypatch.setattr(reading, "_CHUNK", 100)
    with pytest.raises(TraceError, match=":3: the line is longer than 1000 characters"):
        load(plain(tmp_path, "0,1,2", "1" * 2000 + ",1,2"))
    long = json.dumps([{"conversations": [{"value": "a" * 3000}] * 2}])
    with pytest.raises(TraceError, match="record 1: longer than 1000 characters"):
        load(write(tmp_path, "x", long), "sharegpt")


def test_bytes_that_are_no_text(tmp_path):
    with pytest.raises(TraceError, match=":3: not UTF-8 text"):
        load(write(tmp_path, "x", b"timestamp_s,prompt_tokens,output_tokens\n0,1,2\n1,\xff,2\n2,3,4\n"))
    rows, trace = load(write(tmp_path, "x", '{"prompt": "a"}\n{"prompt": "☕'.encode()[:-1]))
    assert (len(rows), trace.tally.dropped) == (1, {"truncated last line": 1})  # cut within a character
    with pytest.raises(TraceError, match="record 1: not UTF-8 text"):
        load(write(tmp_path, "x", b'[{"conversations": "\xff"}]'), "sharegpt")


def hashed(folder, length, ids, **options):
    row = {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids}
    return load(write(folder, "x.jsonl", json.dumps(row)), options.pop("format", "mooncake"), **options)


@pytest.mark.parametrize(
    ("length", "ids", "kept", "noted"),
    [
        (1024, 2, 2, None),
        (1025, 3, 3, None),
        (1, 1, 1, None),
        (1025, 2, 2, "the last chunk has no hash id, so it is not shared"),
        (1024, 3, 2, "one hash id beyond the prompt, left out"),
        (5, 0, 0, "no hash ids, so nothing is shared"),
    ],
)
def test_hash_ids_that_fit_or_nearly(tmp_path, length, ids, kept, noted):
    rows, trace = hashed(tmp_path, length, list(range(ids)))
    assert rows[0].prefix_ids == tuple(range(kept))
    unended = "no line break at the end of the file, so the last row may be cut short"
    assert trace.tally.noted == {unended: 1} | ({noted: 1} if noted else {})


@pytest.mark.parametrize(
    ("length", "ids", "fits"),
    [
        (6758, 423, "prefix_tokens = 16 would fit"),  # Qwen-Bailian's chunks read as Mooncake's
        (20, 2, "prefix_tokens = 16 would fit"),
        (20, 3, "prefix_tokens = 8 would fit"),
        (2000, 10, "prefix_tokens from 200 to 222 would fit"),
        (9, 10, "no size fits"),
        (100_000, 1, "prefix_tokens from 100000 up would fit"),
        (655, 3, "prefix_tokens = 256 would fit"),
        (1538, 769, "prefix_tokens = 2 would fit"),
        (1537, 512, "no size fits"),
    ],
)
def test_hash_ids_that_contradict_the_length_name_the_size_that_would_fit(tmp_path, length, ids, fits):
    chunks = -(-length // 512)
    said = f"x.jsonl:1: {ids} hash ids for a prompt of {length}; of 512 positions each there would be {chunks}; {fits}"
    with pytest.raises(TraceError) as refused:
        hashed(tmp_path, length, list(range(ids)))
    assert str(refused.value) == f"{tmp_path}/{said}"


def test_prefix_tokens_overrides_the_format(tmp_path):
    rows, trace = hashed(tmp_path, 6758, list(range(423)), prefix_tokens=16)
    assert (trace.prefix_tokens, len(rows[0].prefix_ids)) == (16, 423)
    moon = SAMPLES / "mooncake_fast25_conversation_first300.jsonl"
    said = (
        ":1: 14 hash ids for a prompt of 6758; of 16 positions each there would be 423; prefix_tokens = 512 would fit"
    )
    with pytest.raises(TraceError, match=said):
        load(moon, "vllm-timed")
    assert load(moon, "vllm-timed", prefix_tokens=512)[0] == load(moon)[0]
    with pytest.raises(TraceError, match="prefix_tokens is 0, must be from 1"):
        open_trace(moon, prefix_tokens=0)
    with pytest.raises(TraceError, match="prefix_tokens = 16 would do nothing: azure has no hash ids"):
        open_trace(SAMPLES / "azure2024_made.csv", prefix_tokens=16)


def test_sizes_that_fit_are_those_with_as_many_chunks():
    for length in range(1, 60):
        for ids in range(1, length + 1):
            wanted = [size for size in range(1, length + 1) if -(-length // size) == ids]
            assert list(fitting_sizes(length, ids)) == wanted


def test_a_file_of_agentic_sessions_says_what_it_is(tmp_path):
    """In the first rows, where it hides the columns, and later."""
    session = '{"session_id": "x", "arrival_time_ns": 4, "sub_requests": [{"input_toks": 1, "output_toks": 2}]}\n'
    flat = '{"input_toks": 1, "output_toks": 2, "arrival_time_ns": 3}\n'
    for before in (0, 1, 60):
        with pytest.raises(TraceError, match=rf"x:{before + 1}: an agentic session \(sub_requests\): when its later"):
            load(write(tmp_path, "x", flat * before + session))


ROWS = [("a", DAY + 1_000_000, 3, 4), ("b", DAY, 1, 9), ("c", DAY + 2_500_000_000, 700, 1)]


def test_csv_json_lines_and_parquet_with_the_same_columns_give_the_same_rows(tmp_path):
    stamps = [datetime.fromtimestamp(ns / 1e9, UTC).isoformat(sep=" ") for _, ns, _, _ in ROWS]
    frame = pd.DataFrame({
        "request_id": [row[0] for row in ROWS], "timestamp": stamps, "prompt_tokens": [row[2] for row in ROWS],
        "completion_tokens": [row[3] for row in ROWS], "unused": [0.5, None, 7.0],
    })  # fmt: skip
    frame.to_csv(tmp_path / "x.csv", index=False)
    frame.to_json(tmp_path / "x.jsonl", orient="records", lines=True)
    frame.to_parquet(tmp_path / "text.parquet")
    frame.assign(timestamp=pd.to_datetime(frame["timestamp"], format="ISO8601")).to_parquet(tmp_path / "time.parquet")
    frame.assign(timestamp=[row[1] for row in ROWS]).to_parquet(tmp_path / "ns.parquet")
    frame.assign(prompt_tokens=frame["prompt_tokens"].astype(float)).to_parquet(tmp_path / "float.parquet")
    wanted = [TraceRow(n, ns, prompt, output, request_id=name) for n, (name, ns, prompt, output) in enumerate(ROWS, 1)]
    for path in sorted(tmp_path.iterdir()):
        rows, trace = load(path)
        assert trace.format == path.suffix[1:]
        offset = 1 if path.suffix == ".csv" else 0  # the line of names
        assert [TraceRow(row.line - offset, *fields(row)) for row in rows] == wanted, path
        assert trace.tally.noted.pop("times without a unit, taken as ns by the first", None) == one_if(
            path.stem == "ns"
        )
        assert trace.tally.noted.pop("whole numbers written with a fraction", 3) == 3
        assert trace.tally == Tally(3, 3, {}, {"earlier than a row before": 1})


def one_if(yes):
    return 1 if yes else None


def fields(row):
    return row.arrival_ns, row.prompt_tokens, row.output_tokens, row.prefix_ids, row.request_id


def test_decimal_seconds_are_the_same_in_every_container(tmp_path):
    cells = ["0.1", "0.30000000000000004", "1715299200.123456", "61.114"]
    names = "timestamp_s,prompt_tokens,output_tokens"
    write(tmp_path, "x.csv", "\n".join([names, *(f"{cell},1,2" for cell in cells)]))
    lines = (f'{{"timestamp_s": {cell}, "prompt_tokens": 1, "output_tokens": 2}}\n' for cell in cells)
    write(tmp_path, "x.jsonl", "".join(lines))
    table = {"timestamp_s": [float(cell) for cell in cells], "prompt_tokens": [1] * 4, "output_tokens": [2] * 4}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    found = [[row.arrival_ns for row in load(tmp_path / f"x.{end}")[0]] for end in ("csv", "jsonl", "parquet")]
    assert found == [[100_000_000, 300_000_000, DAY + 123_456_000, 61_114_000_000]] * 3


def parquet(folder, **columns):
    pq.write_table(pa.table(columns), folder / "x.parquet")
    return folder / "x.parquet"


def test_parquet_lists_nulls_and_types(tmp_path):
    path = parquet(
        tmp_path,
        timestamp_ms=[0, 1, None],
        input_length=[20, 40, 5],
        output_length=[1, 2, 3],
        hash_ids=[[1, 2], None, [3]],
    )
    with pytest.raises(TraceError, match=r"record 1: there are hash ids, but nothing says .* give prefix_tokens"):
        load(path)
    rows, trace = load(path, prefix_tokens=16)
    assert [(row.line, row.arrival_ns, row.prefix_ids) for row in rows] == [(1, 0, (1, 2)), (2, 10**6, ())]
    assert trace.tally.dropped == {"no time": 1}
    lengths = {"prompt_tokens": [1], "output_tokens": [1]}
    with pytest.raises(TraceError, match=r"a column of type date32\[day\] is neither a number nor a date with a time"):
        load(parquet(tmp_path, time=pa.array([19000], pa.date32()), **lengths))
    with pytest.raises(TraceError, match=r"x\.parquet: record 1: prompt length is nan, must be a whole number"):
        load(parquet(tmp_path, time=[1], prompt_tokens=[float("nan")], output_tokens=[1]))
    with pytest.raises(TraceError, match="not readable as Parquet"):
        load(parquet(tmp_path, time=pa.array([2**60], pa.timestamp("us")), **lengths))
    rows, trace = load(parquet(tmp_path, time=pa.array([5], pa.timestamp("us")), **lengths))
    assert (rows[0].arrival_ns, trace.tally.noted) == (5000, {NAIVE: 1})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n \r\n\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\x1f\x8b\x08\x00 whatever", r"is packed \(gzip\); unpack it first"),
        (b"PK\x03\x04....", r"is packed \(zip\)"),
        (b"0.0,1202,165\n", r":1: a trace of no known format: its columns are '0\.0', '1202', '165'; a plain"),
        (b"a;b;c\n1;2;3\n", "of no known format: its columns are 'a;b;c'"),
        (b"{", "of no known format: it has no columns"),
        (b'{"a": 1}\n', "of no known format: its columns are 'a'"),
        (b'{"\x1b": 1}\n', ":1: not JSON: Invalid control character"),
        (b'{"\\u001b": 1}\n', r"its columns are '\\x1b'"),
        (b"PAR1 but no more", "not readable as Parquet"),
        (b'time,ts,prompt_tokens,output_tokens\n', ":1: the columns 'time' and 'ts' could both be arrival"),
        (b'time_s,prompt_tokens,input_tokens,output_tokens\n', "the columns 'prompt_tokens' and 'input_tokens' could"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_trace(tmp_path, content, said):
    with pytest.raises(TraceError, match=said) as refused:
        load(write(tmp_path, "x", content))
    assert str(tmp_path / "x") in str(refused.value)
    assert str(refused.value).isprintable()


def test_paths_and_formats_that_are_none(tmp_path):
    folder, device = (tmp_path, "is no regular file"), ("/dev/null", "is no regular file")
    for path, said in ((tmp_path / "none", "No such file"), folder, device, ("a\0b", "null")):
        for name in (None, "azure"):
            with pytest.raises(TraceError, match=said):
                open_trace(path, name)
    with pytest.raises(TraceError, match="trace format 'mooncakes' is unknown; there are azure, burstgpt, "):
        open_trace(SAMPLES / "azure2024_made.csv", "mooncakes")


def test_a_file_of_names_alone_has_no_rows(tmp_path):
    rows, trace = load(plain(tmp_path))
    assert (rows, trace.tally) == ([], Tally())
    assert read_sorted(trace) == []


def test_read_sorted_orders_windows_and_cuts(tmp_path):
    cells = [105, 103, 109, 103, 100, 107]
    path = plain(tmp_path, *(f"{cell},{n},4" for n, cell in enumerate(cells, 1)))
    trace = open_trace(path)

    def found(**options):
        rows = read_sorted(trace, **options)
        assert whole(trace.tally)
        assert trace.tally.rows_used == len(rows)
        return [(row.arrival_ns / 1e9, row.prompt_tokens) for row in rows]

    ordered = [(0, 5), (3, 2), (3, 4), (5, 1), (7, 6), (9, 3)]
    assert found() == ordered
    assert found(max_requests=3) == ordered[:3]
    assert trace.tally.dropped == {"beyond the number of requests wanted": 3}
    assert found(max_requests=99) == ordered
    assert found(window_s=(3, 7)) == ordered[1:4]
    assert trace.tally.dropped == {"outside the window": 3}
    assert found(window_s=(3, float("inf")), max_requests=2) == ordered[1:3]
    assert trace.tally.dropped == {"outside the window": 1, "beyond the number of requests wanted": 3}
    assert found(window_s=(50, 60)) == []
    with pytest.raises(TraceError, match="window 3:3 s is empty"):
        found(window_s=(3, 3))
    with pytest.raises(TraceError, match="max_requests is 0, must be at least 1"):
        found(max_requests=0)
    texts = open_trace(SAMPLES / "sharegpt_made.json")
    assert [row.line for row in read_sorted(texts)] == [1, 3]
    with pytest.raises(TraceError, match="sharegpt has no times, so a window means nothing"):
        list(rows_in_window(texts, (0, 1)))


def test_reading_streams(tmp_path):
    """What it takes does not grow with the file, so a million rows take no more: nothing is kept."""
    peaks = []
    for number in (5_000, 50_000):
        path = tmp_path / f"{number}.csv"
        with path.open("w") as file:
            file.write("timestamp_ms,prompt_tokens,output_tokens\n")
            file.writelines(f"{n},{n % 4000 + 1},{n % 900 + 1}\n" for n in range(number))
        trace = open_trace(path)
        tracemalloc.start()
        try:
            assert len(read_sorted(trace, max_requests=10)) == 10
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert trace.tally.rows_read == number
    assert max(peaks) < 1e6


def test_a_json_array_streams(tmp_path):
    turn = {"value": "a" * 500}
    path = write(tmp_path, "x.json", json.dumps([{"conversations": [turn, turn]}] * 20_000))
    tracemalloc.start()
    try:
        assert sum(1 for _ in open_trace(path).rows()) == 20_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5e6 < path.stat().st_size


def mangled(content, rng):
    """A sample cut, with bytes changed, or with a piece twice."""
    kind = rng.randrange(4)
    content = bytearray(content[: rng.randrange(200, 4000)])
    if kind == 0:
        return bytes(content)
    if kind == 1:
        for _ in range(rng.randrange(1, 6)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    elif kind == 2:
        at, size = rng.randrange(len(content)), rng.randrange(1, 40)
        content[at:at] = content[at : at + size]
    else:
        for _ in range(3):
            at = rng.randrange(len(content))
            content[at : at + 1] = rng.choice([b'"', b",", b"{", b"}", b"[", b"]", b"\n", b"\x00", b"-", b"e9", b"\\u"])
    return bytes(content)


@pytest.mark.parametrize("name", [*LOADED, "x.parquet"])
def test_damage_gives_rows_that_add_up_or_a_trace_error(tmp_path, name):
    rng = random.Random(f"damage {name}")
    if name == "x.parquet":
        content = parquet(tmp_path, time=[1, 2, 3], prompt_tokens=[1, 2, 3], output_tokens=[1, 2, 3]).read_bytes()
    else:
        content = (SAMPLES / name).read_bytes()
    ended = set()
    for _ in range(60):
        path = write(tmp_path, "x", mangled(content, rng))
        for format_name in (None, LOADED.get(name, ("parquet",))[0]):
            try:
                trace = open_trace(path, format_name)
                used = sum(1 for _ in trace.rows())
            except TraceError as error:
                message = str(error)
                ended.add("refused")
            else:
                assert whole(trace.tally)
                assert used == trace.tally.rows_used
                message = str(path)
            assert str(path) in message
            assert message.isprintable(), message
    assert "refused" in ended


@pytest.mark.parametrize(
    "start", [b"", b"PAR1", b"[", b"{", b'[{"conversations": ', b"\xff\xfe", b"timestamp_s,prompt_tokens,"]
)
def test_garbage_is_refused(tmp_path, start):
    rng = random.Random(0)
    for length in (1, 10, 100, 1000, 10_000):
        path = write(tmp_path, "x", start + rng.randbytes(length))
        for format_name in (None, *FORMATS):
            with pytest.raises(TraceError) as refused:
                list(open_trace(path, format_name).rows())
            assert str(path) in str(refused.value)
            assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"prompt": "hi \\ud800there", "output_tokens": 4}\n'),
        (
            "a.json",
            b'[{"conversations": [{"from": "human", "value": "hi \\ud800there"}, {"from": "gpt", "value": "x"}]}]',
        ),
    ],
)
def test_half_a_surrogate_pair_is_no_text(tmp_path, name, content):
    with pytest.raises(TraceError, match="1: its text has half a surrogate pair at character 3"):
        list(open_trace(write(tmp_path, name, content)).rows())
