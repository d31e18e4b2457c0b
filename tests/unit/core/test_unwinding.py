"""Which ranks leave their step at once when they are interrupted, and which end it."""

import itertools

import pytest

from taskd.core.policy.unwinding import Course, course_of


@pytest.mark.parametrize(
    ("changed", "course"),
    [
        ({}, Course.LEAVE),
        ({"reach": 4}, Course.LEAVE),
        ({"reach": 5}, Course.LEAVE),
        ({"reach": 6}, Course.CATCH_UP),
        ({"reach": 6, "is_voting": True}, Course.LEAVE),
        ({"reach": 6, "is_inside": False}, Course.LEAVE),
        ({"reach": 6, "version": None}, Course.LEAVE),
        ({"reach": 6, "finish_step": True}, Course.FINISH),
        ({"finish_step": True}, Course.FINISH),
        ({"finish_step": True, "is_voting": True}, Course.FINISH),
        ({"finish_step": True, "is_inside": False}, Course.LEAVE),
        ({"finish_step": True, "version": None}, Course.LEAVE),
    ],
)
def test_who_ends_the_step(changed, course):
    rank = {"is_inside": True, "is_voting": False, "version": 5, "reach": None}
    assert course_of(**{**rank, "finish_step": False, **changed}) is course


def test_a_rank_that_is_not_in_its_function_has_no_step_to_end():
    for voting, version, reach, finish in itertools.product(
        (False, True), (None, 5), (None, 6), (False, True)
    ):
        course = course_of(
            is_inside=False, is_voting=voting, version=version, reach=reach, finish_step=finish
        )
        assert course is Course.LEAVE
