"""Strangers at the KV port cannot fill the log."""

from __future__ import annotations

import importlib
import logging

import pytest

from quire.features.disaggregation import log_limit
from quire.features.disaggregation.log_limit import LogLimit


def test_five_lines_of_a_message_in_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(log_limit.time, "monotonic", lambda: now)
    log = logging.getLogger("quire.tests.limited")
    log.addFilter(LogLimit())
    for number in range(100):
        log.warning("refused %d", number)
    log.warning("something else")
    assert caplog.messages == [*(f"refused {n}" for n in range(5)), "something else"]
    caplog.clear()
    now = 61.0
    log.warning("refused %d", 7)
    log.warning("something else")
    assert caplog.messages == ["refused 7 (95 lines like this were left out)", "something else"]


@pytest.mark.parametrize("name", ["listener", "exports", "loop"])
def test_warnings_caused_by_strangers_are_rate_limited(name: str) -> None:
    log = importlib.import_module(f"quire.features.disaggregation.{name}")._log
    assert any(isinstance(each, LogLimit) for each in log.filters)
