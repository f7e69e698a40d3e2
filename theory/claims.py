"""The ledger: every claim with its evidence, and a verdict on each of the paper's six claims.

`LEDGER` maps ids (R1 … P2) to claims; nothing is computed until `examine` runs a claim's evidence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from theory import ledger_attention, ledger_depth, ledger_normalization, ledger_rotation
from theory.evidence import Claim, Examined, examine

LEDGER: dict[str, Claim] = {
    claim.id: claim
    for family in (ledger_rotation, ledger_depth, ledger_attention, ledger_normalization)
    for claim in family.CLAIMS
}


@dataclass(frozen=True)
class PaperClaim:
    """One of the paper's claims, what became of it, and why, by id."""

    letter: str
    says: str
    verdict: Literal["holds", "holds if", "fails", "open"]
    because: str
    ids: tuple[str, ...]


PAPER = (
    PaperClaim(
        "A",
        "rotation: the larger the norm, the smaller the turn",
        "holds if",
        "for one residual branch it follows from A1 and A2 (R1, R4, R5, D5), though not in the tangent form (R2); "
        "without them the order can reverse, but not within the range of norms that models span (R7); C depends on the "
        "direction, not on the scale (S1); what counts is the centred part (S3) and the harmonic mean of norms (R6)",
        ("R1", "R2", "R4", "R5", "R6", "R7", "S1", "S3", "D5"),
    ),
    PaperClaim(
        "B",
        "persistence: the initial norm gap is carried through the layers",
        "holds if",
        "the squared gap persists exactly if updates have no direction on average (D2); the gap itself never grows, "
        "the ratio shrinks toward 1 (D1, D2), which bounds total turns at acute angles (D5), and under one fixed "
        "obtuse angle nothing persists (D3)",
        ("D1", "D2", "D3", "D5"),
    ),
    PaperClaim(
        "C",
        "attention: imbalance lowers the similarity of the relevant pair",
        "holds if",
        "symmetric directions alone give the opposite (A1) and less noise too (A4); with a drift toward the target it "
        "holds below the best turn (A2) and beyond the critical norm (A3); the loss of attention depends on C/n (A5)",
        ("A1", "A2", "A3", "A4", "A5"),
    ),
    PaperClaim(
        "D",
        "fix: one LayerNorm with g = T/√D gives visual tokens the norm of text",
        "holds",
        "for every token, up to the factor ρ that ε leaves (N2)",
        ("N2",),
    ),
    PaperClaim(
        "E",
        "trap and compensation: the small gain starves what lies upstream, GWC repairs it",
        "holds if",
        "the norm itself does pass gradients times g/s (N1), but only the skip path carries g back (N3); compensation "
        "is no gradient of a loss, yet descends (G1); Adam ignores it (G2) unless clipping is active, when it slows "
        "the rest (G3); uneven or tiny gains limit it (G4). So: with SGD-like steps, or where clipping is active",
        ("N1", "N3", "G1", "G2", "G3", "G4"),
    ),
    PaperClaim(
        "F",
        "initialisation matters: a gain that starts at 1 hardly moves",
        "open",
        "the table fits a width of 3072 in bf16, and absolute movement explains it better than lost updates (P1, P2)",
        ("P1", "P2"),
    ),
)


def examine_all(ids: Iterable[str] | None = None) -> list[Examined]:
    """Runs the evidence of the named claims, or of all. Raises ValueError for an id that isn't in the ledger."""
    return [examine(find(claim)) for claim in (LEDGER if ids is None else ids)]


def find(claim: str) -> Claim:
    if claim not in LEDGER:
        raise ValueError(f"claim must be one of {', '.join(LEDGER)}, got {claim!r}")
    return LEDGER[claim]


def supported(paper: PaperClaim, examined: Iterable[Examined]) -> bool:
    """Does no reason for this verdict fail?"""
    return not any(one.failed for one in examined if one.claim.id in paper.ids)
