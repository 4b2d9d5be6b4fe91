from __future__ import annotations

import pytest

from flopmeter.text import amount, percent, plural, rate, sentence, signed, utilisation


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "unknown"),
        (0.0, "0.0 %"),
        (1e-9, "0.0 %"),
        (0.0000421, "0.0042 %"),
        (0.0004, "0.040 %"),
        (0.0024, "0.24 %"),
        (0.00994, "0.99 %"),
        (0.00996, "1.0 %"),
        (0.01, "1.0 %"),
        (0.583, "58.3 %"),
        (2.5736, "257.4 %"),
    ],
)
def test_a_small_utilisation_keeps_two_digits(share: float | None, text: str) -> None:
    assert utilisation(share) == text


def test_a_share_of_the_time_has_one_decimal_however_small() -> None:
    assert [percent(0.0024), percent(0.583), percent(0.95, 0), percent(12.345)] == [
        "0.2 %",
        "58.3 %",
        "95 %",
        "1,234.5 %",
    ]
    assert [signed(0.515, 1), signed(-0.0001)] == ["+51.5 %", "+0 %"]


def test_rates_are_in_the_unit_of_data_sheets_and_counts_in_any() -> None:
    assert [rate(989.4e12), rate(1978.9e12, 6), rate(25000e12), rate(166.2e9)] == [
        "989.4 TFLOP/s",
        "1978.9 TFLOP/s",
        "25,000 TFLOP/s",
        "166.2 GFLOP/s",
    ]
    assert [amount(1.9789e15, "FLOP"), amount(999, "FLOP"), amount(12.0, "FLOP", 4)] == [
        "1.98 PFLOP",
        "999 FLOP",
        "12 FLOP",
    ]


def test_one_is_singular() -> None:
    assert [plural(0, "step"), plural(1, "step"), plural(2000, "step")] == ["0 steps", "1 step", "2,000 steps"]


@pytest.mark.parametrize(
    ("remark", "written"),
    [
        ("raise the batch size", "Raise the batch size."),
        ("torch.compile(model)", "torch.compile(model)."),
        ("log_step takes tensors", "log_step takes tensors."),
        ("", ""),
    ],
)
def test_a_remark_becomes_a_sentence_and_code_stays_as_it_is(remark: str, written: str) -> None:
    assert sentence(remark) == written
