"""`python -m theory`: verify the ledger, predict a turn, lay predictions beside published numbers, simulate."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

# The matrices here are small; a second BLAS thread only waits for the first.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")


def verify(claim: str | None = None, json: bool = False, latex: bool = False) -> int:
    """Examine the ledger: claim, evidence by kind with its time, verdict.

    Args:
        claim: One id, such as R2: print its proof step by step and every finding in full.
        json: Print the result as JSON.
        latex: With a claim: print its proofs as LaTeX and stop.
    """
    from theory.claims import LEDGER, examine_all, find

    if latex:
        from theory.proofs import tex

        print(tex(find(claim or "").id))
        return 0
    ids = [find(claim).id] if claim else list(LEDGER)
    if json:
        examined = examine_all(ids)
        _print_json(examined)
    elif claim:
        examined = examine_all(ids)
        _print_claim(examined[0])
    else:
        examined = _print_table(ids)
    return int(any(one.failed for one in examined))


def _print_json(examined) -> None:
    from theory.claims import PAPER

    claims = [
        {
            "id": one.claim.id,
            "title": one.claim.title,
            "statement": one.claim.statement,
            "mathematics": one.claim.mathematics,
            "hypotheses": one.claim.hypotheses,
            "relation": one.claim.relation,
            "verdict": one.verdict,
            "reason": one.claim.reason,
            "findings": [dataclasses.asdict(finding) for finding in one.findings],
        }
        for one in examined
    ]
    print(
        json.dumps(
            {"claims": claims, "paper": [dataclasses.asdict(paper) for paper in PAPER]}, ensure_ascii=False, indent=1
        )
    )


def _print_claim(one) -> None:
    from theory.proofs import explain

    claim = one.claim
    print(f"{claim.id}  {claim.title}  ({', '.join(claim.relation)})\n{claim.statement}\n  {claim.mathematics}")
    print(f"Hypotheses: {'; '.join(claim.hypotheses)}\n")
    print(explain(claim.id) or "No symbolic proof.")
    print()
    for finding in one.findings:
        mark = "✓" if finding.passed else "✗"
        print(f"{mark} {finding.kind} ({finding.about}), {finding.seconds:.2f} s: {finding.detail}")
    print(f"Verdict: {one.verdict}" + (f" ({claim.reason})" if claim.reason else ""))


def _print_table(ids: list[str]):
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from theory.claims import PAPER, examine_all, supported

    console = Console()
    examined = [
        one
        for claim in track(ids, "examining", console=Console(stderr=True), transient=True)
        for one in examine_all([claim])
    ]
    table = Table(title="The ledger", title_justify="left")
    for column in ("id", "claim", "evidence (seconds)", "verdict"):
        table.add_column(column)
    for one in examined:
        evidence = ", ".join(f"{'' if f.passed else '✗ '}{f.kind} {f.seconds:.2f}" for f in one.findings)
        table.add_row(one.claim.id, one.claim.title, evidence, one.verdict)
    console.print(table)
    for one in examined:
        for finding in one.findings:
            if not finding.passed:
                console.print(f"{one.claim.id} {finding.kind}: {finding.detail}", style="red", markup=False)
        if one.claim.reason:
            console.print(f"{one.claim.id} is {one.verdict}: {one.claim.reason}.", markup=False)
    paper = Table("", "the paper says", "verdict", "because", title="The paper's claims", title_justify="left")
    for line in PAPER:
        verdict = line.verdict if supported(line, examined) else "unsupported: a reason failed"
        paper.add_row(line.letter, line.says, verdict, line.because)
    console.print(paper)
    seconds = sum(finding.seconds for one in examined for finding in one.findings)
    failed = sum(one.failed for one in examined)
    console.print(f"{len(examined)} claims, {failed} failed, {seconds:.1f} s of evidence.")
    return examined


def predict(norm: float, update: float, angle: float, target: float = 1.08) -> int:
    """The turn of one token at one residual branch, and what aligning its norm would make of it.

    Args:
        norm: ‖h‖ before the branch.
        update: ‖Δ‖, in the same unit.
        angle: ∠(h, Δ) in degrees.
        target: The norm that alignment would give the token (LLaVA's text tokens have 1.08).
    """
    import numpy as np

    import theory

    phi = np.radians(angle)
    if not 0 <= angle <= 180:
        raise ValueError(f"angle must be between 0 and 180 degrees, got {angle}")
    theory.step_angle(target, update, phi)  # refuses a bad target before anything is printed
    print(f"{'':28}{'as it is':>12}{'aligned':>12}")
    rows = {
        "norm before": lambda n: n,
        "norm after": lambda n: theory.norm_after(n, update, phi),
        "turn, degrees": lambda n: np.degrees(theory.step_angle(n, update, phi)),
        "adjacent cosine": lambda n: theory.adjacent_cosine(n, update, phi),
        "1 − adjacent cosine": lambda n: theory.adjacent_cosine_deficit(n, update, phi),
    }
    for name, value in rows.items():
        print(f"{name:28}{value(norm):12.6g}{value(target):12.6g}")
    faster = theory.step_angle(target, update, phi) / theory.step_angle(norm, update, phi)
    print(f"Aligned to {target:g} the token turns {faster:.3g} times as far at this branch (R1).")
    print("This keeps update and angle: a branch ignores the token's scale (S1), but not what training makes of it.")
    return 0


def published() -> int:
    """Our prediction beside every published adjacent cosine (R5)."""
    from theory.published import CAVEAT, MEASURED, predicted_cosine

    print(f"{'model':16}{'tokens':8}{'C/n':>7}{'cos φ':>8}{'measured':>10}{'predicted':>11}{'difference':>12}")
    for row in MEASURED:
        cosine = predicted_cosine(row)
        print(
            f"{row.model:16}{row.tokens:8}{row.ratio:7.2f}{row.angle_cosine:8.2f}{row.cosine:10.2f}{cosine:11.3f}"
            f"{cosine - row.cosine:+12.3f}"
        )
    print(CAVEAT)
    return 0


def simulate(
    norm_visual: float = 39.96,
    norm_text: float = 1.08,
    norm_std: float = 0.0,
    layers: int = 32,
    width: int = 4096,
    update: float = 1.0,
    mode: Literal["isotropic", "angle", "drift"] = "isotropic",
    angle: float = 90.0,
    drift: float = 0.5,
    target_cosine: float = 0.0,
    head_width: int = 128,
    distractors: int = 576,
    tokens: int = 20_000,
    seeds: tuple[int, ...] = (0,),
    jobs: int = 1,
    fidelity: Literal["chain", "vectors", "transformer"] = "chain",
    out: Path = Path("runs/theory"),
) -> int:
    """Norms, turns and cosines against depth for visual and text tokens, from assumptions alone. Writes PNG, SVG, CSV.

    Args:
        norm_visual: Mean norm of the visual tokens; the defaults are LLaVA-1.5's.
        norm_text: Mean norm of the text tokens.
        norm_std: Standard deviation of the visual norms (lognormal).
        layers: Residual steps.
        width: Width D of the residual stream.
        update: Size C of every update.
        mode: isotropic, angle (a fixed angle to the state) or drift (toward a target).
        angle: φ in degrees, for the mode angle.
        drift: m: how much of an update points at the target, for the mode drift and for the attention panel.
        target_cosine: cos a between the start and the target, likewise.
        head_width: Width d in which query and key meet.
        distractors: N irrelevant keys.
        tokens: Tokens per modality and seed.
        seeds: One run each, merged; written into the CSV.
        jobs: Processes over seeds.
        fidelity: chain (exact in distribution, fast), vectors, or transformer (a random network, nothing assumed).
        out: Folder for the files.
    """
    from theory import report

    if fidelity == "transformer":
        report.transformer_report(norm_visual, norm_text, layers, seeds[0], out)
        return 0
    from theory.simulate import Setup

    if not 0 <= angle <= 180:
        raise ValueError(f"angle must be between 0 and 180 degrees, got {angle}")
    common: dict[str, Any] = dict(
        layers=layers, width=width, update=update, mode=mode, angle=angle * 3.141592653589793 / 180,
        drift=drift, target_cosine=target_cosine,
    )  # fmt: skip
    setups = {
        "visual": Setup(norm=norm_visual, norm_std=norm_std, **common),
        "text": Setup(norm=norm_text, **common),
    }
    report.depth_report(setups, fidelity, tokens, seeds, jobs, head_width, distractors, out)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; bad input is one line on stderr and exit status 2."""
    import tyro

    commands: dict[str, Any] = {"verify": verify, "predict": predict, "published": published, "simulate": simulate}
    try:
        return tyro.extras.subcommand_cli_from_dict(commands, args=arguments, prog="python -m theory")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
