"""All symbolic proofs, by claim id; the steps are in `proofs_*.py`, what checks them in `kernel.py`."""

from __future__ import annotations

from functools import cache

from theory import proofs_attention, proofs_depth, proofs_normalization, proofs_rotation
from theory.kernel import Proof, formula, hypotheses, latex

FAMILIES = (proofs_rotation, proofs_depth, proofs_attention, proofs_normalization)


def proofs_of(claim: str) -> list[Proof]:
    """The proofs of one claim, in reading order; empty where there is none."""
    return [proof for proof in all_proofs() if proof.claim == claim]


@cache
def all_proofs() -> tuple[Proof, ...]:
    return tuple(build() for family in FAMILIES for build in family.PROOFS)


def explain(claim: str) -> str:
    """The proofs of one claim for a terminal, every step with what the kernel says about it."""
    lines = []
    for proof in proofs_of(claim):
        lines += [f"Proof: {proof.title}"]
        lines += [f"  given  {fact}   ({name})" for name, fact in hypotheses(proof)]
        for number, (step, reason) in enumerate(proof.trace(), start=1):
            verdict = f"✗ REJECTED: {reason}" if reason else "✓"
            lines += [f"  {number:2}. {step.text}", f"        {formula(step)}   {verdict}"]
        lines += [f"  {proof.conclusion}"] * bool(proof.conclusion)
    return "\n".join(lines)


def tex(claim: str) -> str:
    """The proofs of one claim as LaTeX."""
    return "\n\n".join(latex(proof) for proof in proofs_of(claim))
