"""How answers are judged: by the values they give, with the mistakes that readers make most often known by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Function = Callable[..., Any]


@dataclass(frozen=True)
class Exercise:
    """`solution` is a right answer where a function is wanted; where a value is wanted, calling it gives one.

    `mistakes` are wrong answers of the same kind, by what the judge has to say about each of them.
    """

    judge: Callable[[Any], str]
    solution: Function
    wants_function: bool = True
    mistakes: Mapping[str, Any] = field(default_factory=dict)


def close(a: Any, b: Any, tolerance: float) -> bool:
    """Equal to a relative tolerance, of the same shape, no NaN."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-3))


def by_values(
    truth: Function, cases: Sequence[tuple], mistakes: Mapping[str, Function] | None = None, tolerance: float = 1e-9
) -> Exercise:
    """An exercise whose answer is a function that has to agree with `truth` on all cases."""
    mistakes = dict(mistakes or {})

    def judge(answer: Function) -> str:
        for case in cases:
            got, wanted = answer(*case), truth(*case)
            if close(got, wanted, tolerance):
                continue
            for name, wrong in mistakes.items():
                if all(close(answer(*c), wrong(*c), tolerance) for c in cases):
                    return name
            shown = ", ".join(f"{x:.6g}" if isinstance(x, float) else repr(x) for x in case)
            return f"for ({shown}) it gives {got!r}, and {wanted!r} is right"
        return ""

    return Exercise(judge, truth, mistakes=mistakes)


def by_number(solution: Callable[[], float], mistakes: Mapping[str, float], tolerance: float = 0.01) -> Exercise:
    """An exercise whose answer is a number, right to one part in a hundred unless told otherwise."""

    def judge(answer: float) -> str:
        wanted = float(solution())
        if close(answer, wanted, tolerance):
            return ""
        for name, wrong in mistakes.items():
            if close(answer, wrong, tolerance):
                return name
        return f"{float(answer):.6g} is too {'large' if answer > wanted else 'small'}"

    return Exercise(judge, solution, wants_function=False, mistakes=mistakes)
