"""What a claim is, what counts as evidence for it, and how a verdict comes out of both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Kind = Literal["symbolic", "certified", "property", "simulated", "exhaustive", "measured"]
Nature = Literal["true", "empirical", "open", "refuted"]

# The order in which kinds of evidence convince: the first that a claim has names its verdict.
VERDICT_OF: dict[str, str] = {
    "symbolic": "proved",
    "exhaustive": "proved",
    "certified": "certified",
    "property": "tested",
    "simulated": "simulated",
    "measured": "measured",
}


@dataclass(frozen=True)
class Outcome:
    """What one piece of evidence said: whether it speaks for the claim, and with what number."""

    passed: bool | np.bool_
    detail: str


@dataclass(frozen=True)
class Evidence:
    kind: Kind
    about: str
    run: Callable[[], Outcome]


@dataclass(frozen=True)
class Claim:
    """One line of the ledger.

    `relation` says what it does to the paper's claims A-F ('proves A', 'repairs C', …, or 'beyond the paper').
    `counterexample` computes what happens without the hypotheses; its outcome passes if the conclusion then fails.
    A claim of nature 'empirical', 'open' or 'refuted' gives its reason.
    """

    id: str
    title: str
    statement: str
    mathematics: str
    hypotheses: tuple[str, ...]
    relation: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    counterexample: Callable[[], Outcome] | None = None
    nature: Nature = "true"
    reason: str = ""
    settled_by: Kind | None = None  # the evidence that covers the whole statement, if it is not the strongest kind

    def __post_init__(self) -> None:
        if self.nature != "true" and not self.reason:
            raise ValueError(f"reason must be given for a claim that is {self.nature}, got '' for {self.id}")


@dataclass(frozen=True)
class Finding:
    """An evidence's outcome with the time it took."""

    kind: str
    about: str
    passed: bool
    detail: str
    seconds: float


@dataclass(frozen=True)
class Examined:
    claim: Claim
    findings: list[Finding] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return not all(finding.passed for finding in self.findings)

    @property
    def verdict(self) -> str:
        if self.failed:
            return "FAILED"
        if self.claim.nature != "true":
            return self.claim.nature
        kinds = [self.claim.settled_by or finding.kind for finding in self.findings]
        return next(verdict for kind, verdict in VERDICT_OF.items() if kind in kinds)


def _find(kind: str, about: str, run: Callable[[], Outcome]) -> Finding:
    """An exception is a failure with a message: a claim whose evidence crashes isn't supported."""
    started = time.perf_counter()
    try:
        outcome = run()
    except Exception as error:
        outcome = Outcome(False, f"{type(error).__name__}: {error}")
    return Finding(kind, about, bool(outcome.passed), outcome.detail, time.perf_counter() - started)


def examine(claim: Claim) -> Examined:
    """Runs all the evidence of a claim, and its counterexample."""
    findings = [_find(evidence.kind, evidence.about, evidence.run) for evidence in claim.evidence]
    if claim.counterexample is not None:
        findings.append(_find("counterexample", "without the hypotheses", claim.counterexample))
    return Examined(claim, findings)


def symbolic(claim: str) -> Evidence:
    """All proofs of this id, step by step, in the ring."""

    def run() -> Outcome:
        from theory.kernel import Rejected
        from theory.proofs import proofs_of

        proofs = proofs_of(claim)
        try:
            for proof in proofs:
                proof.check()
        except Rejected as reason:
            return Outcome(False, str(reason))
        steps = sum(len(proof.steps) for proof in proofs)
        return Outcome(steps > 0, f"{steps} steps in {len(proofs)} proof{'s' * (len(proofs) > 1)}")

    return Evidence("symbolic", "ring identities", run)


def certified(claim: str) -> Evidence:
    """All certificates of this id: the true ones proved, the false ones refuted with a witness."""

    def run() -> Outcome:
        from theory.certificates import statements_of

        parts, passed = [], True
        for statement in statements_of(claim):
            result = statement.run()
            passed = passed and result.status == statement.expected
            point = ", ".join(f"{name} = {value:.4g}" for name, value in (result.witness or {}).items())
            parts.append(f"{statement.name}: {result.status} ({point or f'{result.boxes} boxes'})")
        return Outcome(passed and bool(parts), "; ".join(parts))

    return Evidence("certified", "intervals over boxes", run)
