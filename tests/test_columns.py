from __future__ import annotations

import math
from array import array

import pytest

from flopmeter.columns import at, finite, sound, stretches


def test_stretches_lie_between_the_places_that_are_left_out() -> None:
    assert stretches(range(2, 10), [4, 5, 8]) == [range(2, 4), range(6, 8), range(9, 10)]


def test_places_outside_and_at_the_ends_make_no_empty_stretch() -> None:
    assert stretches(range(2, 6), [0, 2, 5, 5, 9]) == [range(3, 5)]
    assert stretches(range(2, 4), [2, 3]) == []
    assert stretches(range(5, 5), []) == []


def test_values_at_stretches_are_put_end_to_end() -> None:
    column = array("d", [0.0, 1.0, 2.0, 3.0, 4.0])
    assert list(at(column, [range(1, 2), range(3, 5)])) == [1.0, 3.0, 4.0]
    assert list(at(column, [])) == []


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, -1.0, 10.0])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_below_0_or_not_below_the_limit_is_not_sound_wherever_it_stands(odd: float, place: int) -> None:
    values = array("d", [0.0, 9.0])
    values.insert(place, odd)
    assert list(sound(values, 10.0)) == [0.0, 9.0]


def test_sound_values_are_not_copied_though_their_sum_is_beyond_the_limit() -> None:
    values = array("d", [9.0, 9.0, 0.0])
    assert sound(values, 10.0) is values


def test_both_infinities_at_once_are_left_out() -> None:
    assert list(finite([1.0, math.inf, -math.inf, math.nan, 2.0])) == [1.0, 2.0]


def test_finite_values_whose_sum_overflows_are_kept() -> None:
    assert list(finite([1e308, 1e308])) == [1e308, 1e308]
    assert list(sound([1e308, 1e308], math.inf)) == [1e308, 1e308]
