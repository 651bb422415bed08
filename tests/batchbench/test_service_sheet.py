"""The second table of a sweep, where figures are missing."""

from __future__ import annotations

from batchbench import Admission
from batchbench.service_sheet import service_sheet
from tests.batchbench.scripted import it, request, tables_of


def sheet_of(requests, script, objectives=False):
    rows = tables_of(requests, script)
    return service_sheet(rows["pools"], rows["service"], objectives=objectives)


def test_outputs_of_one_token_have_no_gaps_and_no_time_per_token():
    script = [it(1, began=("a",), paused=(), admissions=(Admission("a"),), finished=("a",))]
    sheet = sheet_of([request("a")], script)
    assert sheet.headings == ("pool", "ttft p50", "ttft p99", "e2e p50", "e2e p99", "queue p50", "queue p99")
    assert sheet.rows == (("8 blocks", *["1.00 s"] * 4, *["0 us"] * 2),)


def test_what_an_engine_does_not_tell_has_no_column():
    sheet = sheet_of([request("a", 2)], [it(1), it(1, finished=("a",))])
    assert (sheet.headings, sheet.rows) == (("pool", "e2e p50", "e2e p99"), (("8 blocks", "2.00 s", "2.00 s"),))


def test_a_figure_that_another_point_has_is_said_to_be_missing():
    told = tables_of([request("a")], [it(1, began=("a",), paused=(), finished=("a",))])
    silent = tables_of([request("a")], [it(1, finished=("a",))])
    pools = [told["pools"][0], silent["pools"][0] | {"point": 1}]
    service = told["service"] + [row | {"point": 1} for row in silent["service"]]
    sheet = service_sheet(pools, service, objectives=True)
    assert sheet.rows == (
        ("8 blocks", *["1.00 s"] * 4, "not known"),
        ("8 blocks", "not reported", "not reported", "1.00 s", "1.00 s", "not known"),
    )
