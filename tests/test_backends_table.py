"""The table of backends in the documentation is the one that the code and the measurements give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_table_of_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOFTCAP_OPS_FA3", raising=False)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import backends_table

    _, begin, rest = backends_table.PAGE.read_text().partition(backends_table.BEGIN)
    shown, end, _ = rest.partition(backends_table.END)
    assert begin
    assert end
    assert shown == backends_table.table(), "run python benchmarks/backends_table.py --write"
    sys.modules.pop("backends_table")
