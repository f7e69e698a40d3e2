"""The ledger is complete, honest about what it does not prove, and able to fail."""

from dataclasses import replace

import pytest

from theory.claims import LEDGER, PAPER, examine_all, find, supported
from theory.evidence import Claim, Evidence, Examined, Outcome, certified, examine, symbolic

IDS = [
    *(f"R{i}" for i in range(1, 8)),
    "S1",
    "S2",
    "S3",
    *(f"D{i}" for i in range(1, 8)),
    *(f"A{i}" for i in range(1, 6)),
]
IDS += ["N1", "N2", "N3", "G1", "G2", "G3", "G4", "P1", "P2"]
EXAMINED: dict[str, Examined] = {}


def examined(claim: str) -> Examined:
    """Each claim is examined once in a test run."""
    return EXAMINED.setdefault(claim, examine(LEDGER[claim]))


def test_every_claim_of_the_work_order_is_there():
    assert list(LEDGER) == IDS


@pytest.mark.parametrize("claim", IDS)
def test_claim(claim):
    result, entry = examined(claim), LEDGER[claim]
    assert not result.failed, [finding.detail for finding in result.findings if not finding.passed]
    kinds = {evidence.kind for evidence in entry.evidence}
    if entry.nature in ("empirical", "open"):
        assert entry.reason and result.verdict == entry.nature
    else:
        assert len(kinds) >= 2
        assert result.verdict in ("proved", "certified")
    assert entry.statement and entry.mathematics and entry.hypotheses and entry.relation
    assert all(
        relation == "beyond the paper" or relation.split()[0] in ("proves", "repairs", "contradicts")
        for relation in entry.relation
    )
    assert all(finding.detail for finding in result.findings)


def test_only_the_named_claims_go_unproved():
    assert {claim.id for claim in LEDGER.values() if claim.nature != "true"} == {"R6", "N3", "P2"}


def test_conditional_claims_compute_their_counterexample():
    with_one = {claim.id for claim in LEDGER.values() if claim.counterexample}
    assert {"R4", "R7", "S1", "D1", "D5", "A2", "A3", "A4", "G2", "P1"} <= with_one
    for claim in with_one:
        assert any(finding.kind == "counterexample" for finding in examined(claim).findings)


def test_the_paper_gets_six_verdicts_with_reasons():
    assert [paper.letter for paper in PAPER] == list("ABCDEF")
    for paper in PAPER:
        assert set(paper.ids) <= set(LEDGER)
        assert all(claim in paper.because for claim in paper.ids)
        assert supported(paper, [examined(claim) for claim in paper.ids])
        # A verdict without conditions needs a reason that proves it, an open one a claim that is open.
        if paper.verdict == "holds":
            assert any(f"proves {paper.letter}" in LEDGER[claim].relation for claim in paper.ids)
        if paper.verdict == "open":
            assert any(LEDGER[claim].nature == "open" for claim in paper.ids)


def test_a_failing_piece_of_evidence_fails_the_claim_and_the_verdict():
    broken = replace(LEDGER["N2"], evidence=(symbolic("N2"), Evidence("property", "", lambda: Outcome(False, "no"))))
    result = examine(broken)
    assert result.failed and result.verdict == "FAILED"
    assert not supported(PAPER[3], [result])


def test_a_crash_is_a_failure():
    result = examine(replace(LEDGER["N2"], evidence=(Evidence("property", "", lambda: 1 / 0),)))
    assert result.failed and "ZeroDivisionError" in result.findings[0].detail


@pytest.mark.parametrize("make", [symbolic, certified])
def test_no_evidence_is_not_a_pass(make):
    assert not make("nothing").run().passed


def test_refuted_claims_are_kept_with_their_reason():
    evidence = (Evidence("property", "a witness", lambda: Outcome(True, "false at 3")),)
    claim = Claim("X1", "t", "s", "m", ("h",), ("beyond the paper",), evidence, nature="refuted", reason="false at 3")
    assert examine(claim).verdict == "refuted"
    with pytest.raises(ValueError, match="reason"):
        replace(claim, reason="")


def test_unknown_ids_are_named():
    with pytest.raises(ValueError, match="'R99'"):
        find("R99")
    with pytest.raises(ValueError, match="R1, R2"):
        examine_all(["Q1"])
