"""The page and the example run as they are."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="no llama-cpp-python: `make test-long` compiles it")

from tests.connectors.llama_cpp.tiny_models import write_model
from tests.test_docs import follow_page

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "start" / "llama-cpp.md"
EXAMPLE = ROOT / "examples" / "gguf.py"


def test_the_page_runs_as_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = PAGE.read_text().replace("/var/cache/penstock", str(tmp_path / "disk"))
    (tmp_path / "page.md").write_text(here)
    write_model(tmp_path / "my-model.gguf")

    follow_page(tmp_path / "page.md", tmp_path, monkeypatch, skipped=set())

    assert "prompts: 1, 1 with a hit" in capsys.readouterr().out


def test_the_example_finds_the_document_of_its_first_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "tiny.gguf")
    monkeypatch.setattr(sys, "argv", ["gguf.py", str(model), str(tmp_path / "states")])

    runpy.run_path(str(EXAMPLE), run_name="__main__")

    hits = re.findall(r"prompts: 1, (\d) with a hit", capsys.readouterr().out)
    assert hits == ["0", "1"]
    assert len(EXAMPLE.read_text().splitlines()) <= 85
