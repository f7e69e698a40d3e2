"""Exercises that check themselves.

    check("0.1", my_answer)     says whether it is right, and if not, what is wrong
    solution("0.1")             prints one right answer

An answer is judged by what it does, never by how it is written. A judge returns '' for a right answer and otherwise a
sentence about the wrong one.
"""

from __future__ import annotations

import inspect
from typing import Any

from exercises import bugs, geometry, kernels, towers
from exercises.judging import Exercise

EXERCISES: dict[str, Exercise] = {
    **geometry.EXERCISES,
    **towers.EXERCISES,
    **kernels.EXERCISES,
    **bugs.EXERCISES,
}


def find(name: str) -> Exercise:
    if name not in EXERCISES:
        raise KeyError(f"there is no exercise {name!r}; there are {', '.join(EXERCISES)}")
    return EXERCISES[name]


def judge(name: str, answer: Any) -> str:
    """'' if the answer is right, else what is wrong with it. An answer that crashes is wrong, and says how."""
    exercise = find(name)
    if answer is ...:
        return "no answer yet: replace the three dots"
    if exercise.wants_function and not callable(answer):
        return f"a function is wanted, this is {answer!r}"
    if not exercise.wants_function and callable(answer):
        return "a value is wanted, this is a function: call it"
    try:
        complaint = exercise.judge(answer)
        return "no answer yet: replace the three dots" if "Ellipsis" in complaint else complaint
    except Exception as error:  # whatever a reader's function may do
        if "ellipsis" in str(error):
            return "no answer yet: replace the three dots"
        return f"it raises {type(error).__name__}: {error}"


def check(name: str, answer: Any) -> None:
    """Prints the verdict."""
    complaint = judge(name, answer)
    print(f"Exercise {name}: {'right.' if not complaint else complaint + '.'}")


def solution(name: str) -> None:
    """Prints one right answer."""
    print(inspect.getsource(find(name).solution))
