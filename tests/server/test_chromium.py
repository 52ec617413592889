"""Tests of pages skip, or fail, on a machine without a browser."""

from __future__ import annotations

import pytest

from tests.server.chromium import REQUIRED, launched


@pytest.mark.parametrize("required", [False, True])
def test_a_missing_browser(required: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TEST_CHROMIUM", "/no/such/browser")
    monkeypatch.setenv(REQUIRED, "1" if required else "")
    outcome = pytest.fail.Exception if required else pytest.skip.Exception
    with pytest.raises(outcome, match="no Chromium: apt-get install chromium"), launched():
        pass
