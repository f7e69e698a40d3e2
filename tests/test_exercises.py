"""The checks of the exercises accept right answers, however they are written, and say what is wrong with wrong ones."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))

from exercises import EXERCISES, check, judge, solution

from minillava.tokenizer import ASSISTANT, END, IGNORE

MISTAKES = [(name, why) for name, exercise in EXERCISES.items() for why in exercise.mistakes]


def answer(name):
    exercise = EXERCISES[name]
    return exercise.solution if exercise.wants_function else exercise.solution()


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_is_accepted(name):
    assert judge(name, answer(name)) == ""


@pytest.mark.parametrize(("name", "why"), MISTAKES)
def test_a_known_mistake_is_named(name, why):
    assert judge(name, EXERCISES[name].mistakes[why]) == why


@pytest.mark.parametrize("name", EXERCISES)
def test_every_exercise_knows_a_mistake(name):
    assert EXERCISES[name].mistakes


@pytest.mark.parametrize("name", EXERCISES)
def test_what_is_no_answer_is_told_apart(name):
    wanted = "function" if EXERCISES[name].wants_function else "value"
    assert "no answer yet" in judge(name, ...)
    assert f"a {wanted} is wanted" in judge(name, 3.0 if wanted == "function" else lambda *_: 3.0)


@pytest.mark.parametrize("name", [name for name, exercise in EXERCISES.items() if exercise.wants_function])
def test_an_answer_that_crashes_or_gives_nothing_is_wrong(name):
    def crash(*_):
        raise ZeroDivisionError("by zero")

    assert "ZeroDivisionError: by zero" in judge(name, crash)
    assert judge(name, lambda *_: float("nan")) != ""
    assert judge(name, lambda *_: None) != ""
    assert judge(name, lambda: 1.0) != ""


def labels_by_search(ids):
    """5.1, turn by turn instead of token by token; a tuple where a list was asked for will do."""
    labels, start = [IGNORE] * len(ids), 0
    while ASSISTANT in ids[start:]:
        first = ids.index(ASSISTANT, start) + 1
        start = ids.index(END, first) + 1
        labels[first:start] = ids[first:start]
    return tuple(labels)


def paired_interval(a, b):
    """7.1, as scipy has it."""
    found = scipy.stats.ttest_rel(a, b)
    interval = found.confidence_interval(0.95)
    return [float(np.mean(a) - np.mean(b)), interval.low, interval.high]


ANOTHER_WAY = {
    "0.1": lambda n, C, phi: abs(n + C * complex(math.cos(phi), math.sin(phi))),
    "0.2": 40,
    "0.3": lambda n, C: math.pi / 2 + math.asin(C / n),
    "1.1": lambda x, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps),
    "1.2": lambda h, attention, mlp: mlp(h) + h + attention(h),
    "1.3": lambda width, eps, loss: math.sqrt(width * eps / ((1 - loss) ** -2 - 1)),
    "2.1": lambda n, C, phi: math.acos((n + C * math.cos(phi)) / math.sqrt(n**2 + 2 * n * C * math.cos(phi) + C**2)),
    "2.2": lambda n, C: C * (C / n),
    "2.3": (1.0, 3.0, 1.5, 6.0),
    "3.1": lambda n_v, n_t, C, r: ((n_v / C) ** 2 - (r * n_t / C) ** 2) / (r**2 - 1),
    "3.2": lambda C, phi: C / (2 * math.sin(phi - math.pi / 2)),
    "3.3": lambda n, C, layers: sum(math.atan(1 / math.sqrt((n / C) ** 2 + k)) for k in range(layers)),
    "4.1": lambda patches, P: torch.nn.functional.fold(patches.mT, math.isqrt(patches.shape[1]) * P, P, stride=P),
    "4.2": 2.8329,
    "5.1": labels_by_search,
    "5.2": 5 * 16 + 2 * 16,
    "6.1": lambda table: float(np.mean([row.norm() for row in table if row.any()])) / math.sqrt(table.shape[1]),
    "6.2": 50.3,
    "7.1": paired_interval,
    "8.1": lambda score, others, beta: torch.tensor([beta * score] + [0.0] * others, dtype=float).softmax(0)[0].item(),
    "8.2": 2 * 40,
    "10.1": lambda v, t: "gap" if v >= 1.5 * t else "no gap" if 1.5 * v > t else "reversed",
}


@pytest.mark.parametrize("name", ANOTHER_WAY)
def test_another_way_to_be_right_is_accepted(name):
    assert judge(name, ANOTHER_WAY[name]) == ""


@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("name", [name for name, e in EXERCISES.items() if e.wants_function and name != "1.2"])
def test_an_answer_that_is_off_by_a_tenth_is_wrong(name, factor):
    right = answer(name)
    assert judge(name, lambda *arguments: factor * np.asarray(right(*arguments))) != ""


def test_check_prints_its_verdict_and_solution_its_source(capsys):
    check("0.2", 39.96)
    check("0.2", 45)
    solution("0.2")
    right, wrong, *source = capsys.readouterr().out.splitlines()
    assert right == "Exercise 0.2: right."
    assert wrong == "Exercise 0.2: 45 is the angle, not the update."
    assert "return 39.96" in "".join(source)


def test_an_unknown_exercise_is_named():
    with pytest.raises(KeyError, match=r"there is no exercise .7\.7."):
        judge("7.7", 1)
