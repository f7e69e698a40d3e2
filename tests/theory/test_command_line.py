"""`python -m theory` as a user meets it, and what importing the package costs."""

import csv
import json
import subprocess
import sys

import pytest

from theory.__main__ import main


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)


def test_import_is_light_and_independent():
    """No sympy, flint or matplotlib until needed; never torch or the model. Best of five: a machine may be busy."""
    program = (
        "import time; t = time.perf_counter(); import theory; theory.step_angle(3, 4, 1); t = time.perf_counter() - t\n"
        "import sys; heavy = ('sympy', 'flint', 'mpmath', 'matplotlib', 'torch', 'minillava')\n"
        "print(t, *[module for module in heavy if module in sys.modules])"
    )
    seconds = []
    for _ in range(5):
        time, *loaded = python("-c", program).stdout.split()
        assert not loaded
        seconds.append(float(time))
    assert min(seconds) < 0.3


def test_nothing_in_the_package_imports_torch_or_the_model():
    program = (
        "import importlib, pkgutil, sys, theory\n"
        "for module in pkgutil.iter_modules(theory.__path__): importlib.import_module('theory.' + module.name)\n"
        "print(*[m for m in sys.modules if m.split('.')[0] in ('torch', 'minillava')])"
    )
    result = python("-c", program)
    assert result.returncode == 0 and not result.stdout.strip(), result.stdout + result.stderr


def test_every_public_name_is_there():
    import theory

    assert all(callable(getattr(theory, name)) and getattr(theory, name).__doc__ for name in theory.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        theory.nonsense  # noqa: B018


def test_verify_one_claim_prints_its_proof(capsys):
    assert main(["verify", "--claim", "R2"]) == 0
    text = capsys.readouterr().out
    assert "tan θ(4)" in text and "✓ certified" in text and "Verdict: proved" in text


def test_verify_json(capsys):
    assert main(["verify", "--claim", "N2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [claim["id"] for claim in result["claims"]] == ["N2"]
    assert result["claims"][0]["verdict"] == "proved" and len(result["paper"]) == 6
    assert {finding["kind"] for finding in result["claims"][0]["findings"]} == {"symbolic", "property"}


def test_verify_table_and_exit_status_on_failure(capsys, monkeypatch):
    from dataclasses import replace

    from theory import claims
    from theory.evidence import Evidence, Outcome

    good, bad = (
        claims.LEDGER["N2"],
        replace(claims.LEDGER["G3"], evidence=(Evidence("property", "", lambda: Outcome(False, "broken on purpose")),)),
    )
    monkeypatch.setattr(claims, "LEDGER", {"N2": good, "G3": bad})
    assert main(["verify"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and "broken on purpose" in text and "2 claims, 1 failed" in text
    assert "unsupported" in text  # E rests on G3
    monkeypatch.setattr(claims, "LEDGER", {"N2": good})
    assert main(["verify"]) == 0


def test_verify_latex(capsys):
    assert main(["verify", "--claim", "R3", "--latex"]) == 0
    assert r"\frac{C s}{N}" in capsys.readouterr().out


def test_predict(capsys):
    assert main(["predict", "--norm", "31.5", "--update", "9.1", "--angle", "71"]) == 0
    text = capsys.readouterr().out
    import theory

    turn = theory.step_angle(31.5, 9.1, 71 * 3.141592653589793 / 180) * 180 / 3.141592653589793
    assert f"{turn:.6g}" in text and "R1" in text


def test_published(capsys):
    assert main(["published"]) == 0
    text = capsys.readouterr().out
    assert text.count("VL") >= 4 and "means over tokens" in text


@pytest.mark.parametrize("mode", ["isotropic", "angle", "drift"])
def test_simulate_writes_figure_and_table(mode, tmp_path, capsys):
    arguments = [
        "simulate",
        "--mode",
        mode,
        "--tokens",
        "200",
        "--layers",
        "6",
        "--seeds",
        "1",
        "2",
        "--out",
        str(tmp_path),
    ]
    assert main(arguments) == 0
    assert (tmp_path / "simulate.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (
        tmp_path / "simulate.svg"
    ).read_text()
    rows = list(csv.DictReader((tmp_path / "simulate.csv").open()))
    assert len(rows) == 7 and rows[0]["visual_turn"] == "" and rows[3]["seeds"] == "1 2"
    assert float(rows[0]["visual_norm"]) == pytest.approx(39.96)
    assert "A3" in capsys.readouterr().out


def test_simulate_transformer(tmp_path, capsys):
    arguments = ["simulate", "--fidelity", "transformer", "--layers", "2", "--out", str(tmp_path)]
    assert main(arguments) == 0
    rows = list(csv.DictReader((tmp_path / "assumptions.csv").open()))
    assert len(rows) == 8 and all(abs(float(row["turn"]) - float(row["turn_from_tokens"])) < 1e-12 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "--norm", "-1", "--update", "1", "--angle", "71"], "norm must be at least 0, got -1.0"),
        (["predict", "--norm", "1", "--update", "1", "--angle", "200"], "got 200"),
        (["predict", "--norm", "1", "--update", "nan", "--angle", "20"], "update"),
        (["verify", "--claim", "R99"], "'R99'"),
        (["simulate", "--layers", "0"], "layers"),
        (["simulate", "--mode", "drift", "--drift", "2"], "drift"),
        (["simulate", "--tokens", "0"], "tokens"),
    ],
)
def test_bad_input_is_one_line(arguments, words):
    result = python("-m", "theory", *arguments)
    assert result.returncode == 2 and words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.stderr


def test_unknown_command_has_no_traceback():
    result = python("-m", "theory", "nonsense")
    assert result.returncode != 0 and "Traceback" not in result.stderr
