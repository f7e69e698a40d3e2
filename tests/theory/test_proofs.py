"""The proofs hold, and no mutant of any of them does: signs, exponents, dropped hypotheses."""

from collections import Counter
from dataclasses import fields, replace

import pytest
import sympy as sp

from theory import kernel, proofs
from theory.claims import LEDGER

PROOFS = proofs.all_proofs()
IDS = [f"{proof.claim}-{index}" for index, proof in enumerate(PROOFS)]
n, x, y = sp.symbols("n x y")


def signs(expression):
    """The expression with one sign flipped: its own, or one of its terms'."""
    yield -expression
    if expression.is_Add and len(expression.args) > 1:
        for term in expression.args:
            yield expression - 2 * term


def exponents(expression):
    """The expression with one integer power raised by one, or one symbol squared."""
    for power in expression.atoms(sp.Pow):
        if power.exp.is_Integer:
            yield expression.xreplace({power: power.base ** (power.exp + 1)})
    for symbol in expression.free_symbols:
        yield expression.subs(symbol, symbol**2)


def step_mutants(proof):
    for index, step in enumerate(proof.steps):
        for field in fields(step):
            expression = getattr(step, field.name)
            if not isinstance(expression, sp.Expr):
                continue
            for mutate in (signs, exponents):
                for mutant in mutate(expression):
                    if mutant != expression:
                        steps = (*proof.steps[:index], replace(step, **{field.name: mutant}), *proof.steps[index + 1 :])
                        yield (
                            f"step {index + 1} {field.name} {mutate.__name__}: {mutant}",
                            replace(proof, steps=steps),
                            step,
                        )


def without_hypotheses(proof):
    for kind in ("zero", "positive", "nonnegative"):
        for name in getattr(proof, kind):
            rest = {key: value for key, value in getattr(proof, kind).items() if key != name}
            yield f"without '{name}'", replace(proof, **{kind: rest})


def rejected(proof):
    try:
        proof.check()
    except kernel.Rejected:
        return True
    return False


@pytest.mark.parametrize("proof", PROOFS, ids=IDS)
def test_proof_holds(proof):
    proof.check()
    assert proof.claim in LEDGER and proof.steps
    assert len(list(proof.trace())) == len(proof.steps)


NOTHING = "the mean it changes is 0 by hypothesis, whatever sign or power it carries"
ZERO = "the step says that something is 0: a factor or a consistent renaming of what it is made of leaves it 0"
# Mutants that are true as well: claim, step, how many of them, and why.
EQUIVALENT = {
    ("R2", "tan θ(4)"): (1, "v = 1, so its power does not matter"),
    ("R3", "sine rule: sin θ = (C/n) sin(φ − θ)"): (2, "n cancels, and so does C c sin φ"),
    ("D1", "the squared gap grows iff c > 0"): (1, "the text norm cancels in the difference"),
    ("D2", "one step, E N²"): (2, NOTHING),
    ("D2", "the squared gap after it"): (5, NOTHING),
    ("D3", "dN/dn = cos θ there, −cos 2φ"): (1, "C cancels: the rate does not know the size of the update"),
    ("D4", "squared norm"): (2, NOTHING),
    ("D5", "θ_v ≥ rθ_t at each of two steps adds up"): (3, "r and the text turns cancel: only the slacks are left"),
    ("D6", "one layer of X"): (3, NOTHING),
    ("D6", "one layer of M"): (2, NOTHING),
    ("D7", "new norm, squared; (z1, z2, z3…) the direction in that basis"): (
        2,
        "z2 cancels: the new norm needs z1 only",
    ),
    ("A2", "S_bal − S_imb and sin(θ* − mean)"): (1, "the cosine of the half difference cancels"),
    ("N1", "a constant vector is invisible"): (8, ZERO),
    ("N1", "a step along the gradient has no mean"): (11, ZERO),
    ("P1", "half the step inside a binade"): (1, "the step is the same wherever in the binade"),
}


@pytest.mark.parametrize("proof", PROOFS, ids=IDS)
def test_every_mutant_of_a_step_is_rejected(proof):
    survivors = Counter(step.text for _, mutant, step in step_mutants(proof) if not rejected(mutant))
    expected = {
        step.text: EQUIVALENT[proof.claim, step.text][0]
        for step in proof.steps
        if (proof.claim, step.text) in EQUIVALENT
    }
    assert survivors == expected


@pytest.mark.parametrize("proof", PROOFS, ids=IDS)
def test_every_hypothesis_is_needed(proof):
    survivors = [description for description, mutant in without_hypotheses(proof) if not rejected(mutant)]
    assert not survivors


def test_there_are_mutants_of_every_proof():
    assert all(len(list(step_mutants(proof))) >= 5 for proof in PROOFS)


def one_step(step, **hypotheses):
    return kernel.Proof("R1", "", steps=(step,), **hypotheses)


# The kernel's own rules, each with something false that resembles something true.
ONE, NONE = sp.Integer(1), sp.Integer(0)
CIRCLE = {"circle": x**2 + y**2 - 1}
FALSE = {
    "an unknown sign": one_step(kernel.Sign("", n, n)),
    "a square may be 0": one_step(kernel.Sign("", n**2, n**2)),
    "division by what may be 0": one_step(kernel.Identity("", x / n, NONE), zero={"x": x}),
    "a derivation that leaves the circle": one_step(
        kernel.Identity("", x, x), zero=CIRCLE, derivations={"t": {x: y, y: x}}
    ),
    "growth from below 0": one_step(
        kernel.Growth("", "n", n - 1, {n: NONE}, ONE), positive={"n": n}, derivations={"n": {n: ONE}}
    ),
    "growth from off the circle": one_step(
        kernel.Growth("", "t", n, {x: sp.Integer(2)}, ONE),
        zero=CIRCLE,
        nonnegative={"n": n},
        derivations={"t": {n: ONE}},
    ),
    "a negative factor": one_step(kernel.SameSign("", -x, x, -ONE)),
    "a product that is not positive": one_step(kernel.NonZero("", x, NONE, NONE)),
    "an angle at the origin": one_step(kernel.AngleDerivative("", "n", NONE, n, NONE), derivations={"n": {n: ONE}}),
}


@pytest.mark.parametrize("name", FALSE)
def test_the_kernel_rejects(name):
    assert rejected(FALSE[name])


def test_proofs_can_be_read():
    for claim in LEDGER:
        text, latex = proofs.explain(claim), proofs.tex(claim)
        assert "REJECTED" not in text
        assert text.count("✓") == sum(len(proof.steps) for proof in proofs.proofs_of(claim))
        assert latex.count(r"\item") >= text.count("✓")
    broken = replace(PROOFS[0], steps=(kernel.Identity("wrong", n, n + 1), *PROOFS[0].steps))
    reasons = [reason for _, reason in broken.trace()]
    assert reasons[0] and not any(reasons[1:])
