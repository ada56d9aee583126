"""The bench that compares the log-probabilities of sampler and trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import agreement

FOLDER = Path(__file__).parents[1] / "models" / "golden" / "qwen2_tied"


def test_the_table_has_a_line_for_each_model():
    rows = [
        agreement.Row("a", "float32", 384, 1.23e-6, 4e-5, -3.7),
        agreement.Row("a", "bfloat16", 384, 2e-3, 0.012, -3.7),
        agreement.Row("b", "float32", 380, 0.0, 0.0, -4.0),
    ]
    assert agreement.markdown(rows).splitlines()[2:] == [
        "| a | 384 | 1.2e-06, 4.0e-05 | 2.0e-03, 1.2e-02 | -3.70 |",
        "| b | 380 | 0.0e+00, 0.0e+00 | -4.00 |",
    ]


@pytest.mark.long
def test_sampler_and_trainer_agree_in_float32_and_less_in_bfloat16():
    exact, rough = (agreement.measure(FOLDER, dtype, seed=0) for dtype in agreement.DTYPES)
    assert exact.tokens == rough.tokens == 16 * 3 * 8
    assert exact.mean < 1e-5 < rough.mean < 0.1 and exact.largest < 1e-4
