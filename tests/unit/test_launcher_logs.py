"""The merged log and the status line."""

from __future__ import annotations

import io
import json

from services.launcher.logs import format_event, format_json, format_text, parse_event
from services.launcher.screen import Screen, bytes_text

LINE = json.dumps(
    {
        "event": "listening",
        "level": "info",
        "timestamp": "2026-11-29T12:34:56.789Z",
        "service": "worker",
        "address": "127.0.0.1:50053",
        "seconds": 0.123456,
    }
)


def test_an_event_becomes_one_line_behind_the_childs_name() -> None:
    event = parse_event(LINE)
    assert event is not None
    line = format_event("worker-2", event, color=False)
    assert line == "12:34:56 worker-2   listening address=127.0.0.1:50053 seconds=0.1235"


def test_an_errors_level_and_traceback_are_shown() -> None:
    event = parse_event('{"event": "failed", "level": "error", "exception": "Traceback ..."}')
    assert event is not None
    assert format_event("worker", event, color=False).endswith("ERROR failed\nTraceback ...")


def test_other_output_passes_as_it_is() -> None:
    for line in ("Segmentation fault", "{not json", '["a"]', '{"no": "event"}'):
        assert parse_event(line) is None
        assert format_text("worker", line).endswith(line)


def test_the_json_log_names_the_child_on_every_line() -> None:
    assert json.loads(format_json("worker", LINE))["child"] == "worker"
    assert json.loads(format_json("worker", "boom")) == {
        "child": "worker",
        "event": "output",
        "text": "boom",
    }


def test_without_a_terminal_the_status_is_printed_once_per_milestone() -> None:
    out = io.StringIO()
    screen = Screen(out, is_terminal=False)
    for percent in (1, 2, 30):
        screen.status(f"{percent} %", milestone=str(percent // 25))
    assert out.getvalue() == "1 %\n30 %\n"


def test_on_a_terminal_a_line_goes_above_the_status() -> None:
    out = io.StringIO()
    screen = Screen(out, is_terminal=True)
    screen.status("50 %", milestone="")
    screen.line("hello")
    assert out.getvalue().endswith("\r\033[2Khello\n50 %")


def test_sizes_are_written_for_people() -> None:
    assert [bytes_text(n) for n in (5, 2_000, 270_000_000, 3_210_000_000)] == [
        "5 B",
        "2 kB",
        "270 MB",
        "3.2 GB",
    ]
