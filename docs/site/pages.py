"""Writes the pages that are made from the repository: tutorials, documents, the ledger with proofs, API, reports."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import sympy as sp

from theory.claims import LEDGER, PAPER
from theory.evidence import Claim
from theory.kernel import DEL, GE, Proof, formula, hypotheses
from theory.proofs import proofs_of

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
PACKAGES = ("minillava", "theory")


def write(target: Path) -> None:
    """Fills the folder anew. Raises `Rejected` if a proof of the ledger doesn't hold: no page shows such a one."""
    shutil.rmtree(target, ignore_errors=True)
    for folder in ("tutorials", "docs"):
        (target / folder).mkdir(parents=True)
    documents = sorted((ROOT / "docs").glob("*.md"))
    notebooks = sorted((ROOT / "tutorials").glob("*.ipynb"))
    for path in (*notebooks, ROOT / "docs" / "explorer.html"):
        shutil.copy(path, target / path.relative_to(ROOT))
    kept = {path.relative_to(ROOT) for path in (*documents, *notebooks)} | {Path("docs/explorer.html")}
    for path in documents:
        (target / path.relative_to(ROOT)).write_text(without_outside_links(path, kept), encoding="utf-8")
    report = write_report(target)
    (target / "ledger.md").write_text(ledger(), encoding="utf-8")
    (target / "api.md").write_text(api(), encoding="utf-8")
    lists = {
        "tutorials": [f"tutorials/{path.stem}" for path in notebooks],
        "documents": ["ledger", *(f"docs/{path.stem}" for path in documents), *report],
    }
    for name, entries in lists.items():
        text = f"# {name.capitalize()}\n\n```{{toctree}}\n:maxdepth: 1\n\n" + "\n".join(entries) + "\n```\n"
        (target / f"{name}.md").write_text(text, encoding="utf-8")


def without_outside_links(path: Path, kept: set[Path]) -> str:
    """The page's text; links to files of the repository that are not on the site become plain text."""

    def replace(match: re.Match) -> str:
        linked = (path.parent / match[2]).resolve()
        return match[0] if linked.is_relative_to(ROOT) and linked.relative_to(ROOT) in kept else match[1]

    return LINK.sub(replace, path.read_text(encoding="utf-8"))


def write_report(target: Path) -> list[str]:
    """Every committed report with its figures, each a page of its own, named in the list; nothing if there is none."""
    found = sorted((ROOT / "results").glob("*/report.md"))
    for report in found:
        shutil.copytree(report.parent, target / "reports" / report.parent.name, ignore=shutil.ignore_patterns("*.html"))
    return [f"The report: {report.parent.name} <reports/{report.parent.name}/report>" for report in found]


# The ledger ----------------------------------------------------------------------------------------------------------


def ledger() -> str:
    parts = [
        "# The ledger",
        "Every claim with its conditions, what it does to the paper's claims A to F, and its proof if it has one. The "
        "proofs on this page were checked, step by step, while the page was made. `python -m theory verify` runs all "
        "the other evidence too: certificates, properties, simulations, counterexamples.",
        "## The paper's claims",
        *(f"**{p.letter}.** {escape(p.says)}. *{p.verdict.capitalize()}*: {escape(p.because)}." for p in PAPER),
        *(section(claim) for claim in LEDGER.values()),
    ]
    return "\n\n".join(parts) + "\n"


def section(claim: Claim) -> str:
    kinds = ", ".join(dict.fromkeys(evidence.kind for evidence in claim.evidence))
    lines = [
        f"## {claim.id}: {escape(claim.title)}",
        escape(claim.statement),
        f"```text\n{claim.mathematics}\n```",
        f"*If* {escape('; '.join(claim.hypotheses))}." if claim.hypotheses else "*Without conditions.*",
        f"*To the paper:* {escape(', '.join(claim.relation))}. *Evidence:* {kinds}"
        + (", and a counterexample without the conditions." if claim.counterexample else "."),
    ]
    if claim.reason:
        lines.append(f"*{claim.nature.capitalize()}:* {escape(claim.reason)}.")
    return "\n\n".join([*lines, *(proof_text(proof) for proof in proofs_of(claim.id))])


def proof_text(proof: Proof) -> str:
    proof.check()
    lines = [f"**Proof**: {escape(proof.title)}."]
    given = [f"- {escape(name)}: ${tex(fact)}$" for name, fact in hypotheses(proof, sp.latex, GE)]
    lines += ["Given", "\n".join(given)] if given else []
    for number, step in enumerate(proof.steps, start=1):
        lines += [f"{number}\\. {escape(step.text)}:", f"$$\n{tex(formula(step, sp.latex, DEL, GE))}\n$$"]
    return "\n\n".join([*lines, escape(proof.conclusion)] if proof.conclusion else lines)


def tex(text: str) -> str:
    """LaTeX proper for what the kernel writes for the eye."""
    return (
        text.replace("·", r"\cdot ")
        .replace("atan2", r"\operatorname{atan2}")
        .replace("to the right of", r"\text{ to the right of }")
    )


def escape(text: str) -> str:
    return re.sub(r"([\\*_`|\[\]<>$])", r"\\\1", text)


# The API -------------------------------------------------------------------------------------------------------------


def modules(package: str) -> list[str]:
    found = sorted(path.stem for path in (ROOT / package).glob("*.py") if not path.stem.startswith("_"))
    return [package, *(f"{package}.{name}" for name in found)]


def api() -> str:
    parts = ["# API reference"]
    for package in PACKAGES:
        parts.append(f"## The package {package}")
        for name in modules(package):
            body = f".. automodule:: {name}\n" + ("   :no-members:\n" if name == package else "")
            parts.append(f"### {name}\n\n```{{eval-rst}}\n{body}```")
    return "\n\n".join(parts) + "\n"
