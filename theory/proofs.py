"""All symbolic proofs, by claim id; the steps are in `proofs_*.py`, what checks them in `kernel.py`."""

from __future__ import annotations

from theory import proofs_attention, proofs_depth, proofs_normalization, proofs_rotation
from theory.kernel import Proof, Rejected, latex

FAMILIES = (proofs_rotation, proofs_depth, proofs_attention, proofs_normalization)


def proofs_of(claim: str) -> list[Proof]:
    """The proofs of one claim, in reading order; empty where there is none."""
    return [proof for proof in all_proofs() if proof.claim == claim]


def all_proofs() -> list[Proof]:
    return [build() for family in FAMILIES for build in family.PROOFS]


def explain(claim: str) -> str:
    """The proofs of one claim as LaTeX, each followed by what the kernel says about it."""
    parts = []
    for proof in proofs_of(claim):
        try:
            proof.check()
            verdict = f"% checked: all {len(proof.steps)} steps follow"
        except Rejected as reason:
            verdict = f"% REJECTED: {reason}"
        parts.append(f"{latex(proof)}\n{verdict}")
    return "\n\n".join(parts)
