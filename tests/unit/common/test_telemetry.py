"""Log lines carry the service, the module and the request."""

import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest
import structlog

from services.common.telemetry import bind_request, bound_field, configure_logging, get_logger


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what ``configure_logging`` does to the process."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def test_a_line_is_an_event_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("tester", log_format="json")
    log = get_logger("a.module")
    with bind_request(request_id="r-1"):
        assert bound_field("request_id") == "r-1"
        log.info("it_happened", num_tokens=3)
    log.debug("too_fine")
    log.warning("later")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["event"], first["num_tokens"], first["level"]) == ("it_happened", 3, "info")
    assert (first["service"], first["module"]) == ("tester", "a.module")
    assert first["request_id"] == "r-1"
    assert "request_id" not in second
    assert bound_field("request_id") is None


def test_lines_of_the_standard_library_look_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("tester", log_format="json")
    logging.getLogger("some.library").warning("%d things", 2)
    line = json.loads(capsys.readouterr().out)
    assert (line["event"], line["level"], line["service"]) == ("2 things", "warning", "tester")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_values(
    log_format: Literal["console", "json"], capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("tester", log_format=log_format)
    prompt = "".join(["a ", "secret"])
    try:
        raise ValueError(f"a prompt of {len(prompt)} characters")
    except ValueError:
        get_logger("a.module").exception("it_failed")
    out = capsys.readouterr().out
    assert "a prompt of 8 characters" in out
    assert prompt not in out
