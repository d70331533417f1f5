"""SGLang without Penstock, as the tests here run it: what they compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.sglang


def test_sglang_answers_on_a_machine_without_a_gpu_and_reuses_what_it_has_computed(
    run: Run,
) -> None:
    prompts = {"lengths": [100, 200], "shared": 64}

    first, second = run([prompts, prompts])[0]

    assert [row["cached"] for row in first["rows"]] == [0, 0]
    assert [row["cached"] for row in second["rows"]] == [160, 256]
    assert [row["tokens"] for row in second["rows"]] == [row["tokens"] for row in first["rows"]]
