"""The proof kernel: what a step may say, and how sympy checks it in a polynomial ring.

A proof has hypotheses (equations and inequalities between ring elements), derivations (what a variable's derivative
is), and steps. sin and cos are two symbols with c² + s² = 1, square roots are symbols with their squares given; no
trigonometric simplification takes part, so a check is either right or wrong and takes milliseconds.

An equality holds if the numerator of its difference lies in the ideal of the hypotheses' equations; a denominator
has to be known not to vanish. An inequality holds if it equals, in the same sense, a *certificate*: an expression
that is visibly of one sign, being built from sums, products, even powers and quantities of known sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import sympy as sp

DEL, GE = r"\partial", r"\ge"


class Rejected(Exception):
    """A step does not follow."""


@dataclass(frozen=True)
class Identity:
    """left = right."""

    text: str
    left: sp.Expr
    right: sp.Expr


@dataclass(frozen=True)
class Derivative:
    """d(of) = result, under the derivation (a mapping from symbols to their derivatives)."""

    text: str
    by: str
    of: sp.Expr
    result: sp.Expr


@dataclass(frozen=True)
class AngleDerivative:
    """d atan2(y, x) = (x dy − y dx)/(x² + y²) = result, under the derivation."""

    text: str
    by: str
    y: sp.Expr
    x: sp.Expr
    result: sp.Expr


@dataclass(frozen=True)
class Sign:
    """expression > 0 (or ≥ 0), because it equals the certificate."""

    text: str
    expression: sp.Expr
    certificate: sp.Expr
    strict: bool = True


@dataclass(frozen=True)
class SameSign:
    """left and right have the same sign, because left = factor · right with factor > 0. An equivalence."""

    text: str
    left: sp.Expr
    right: sp.Expr
    factor: sp.Expr


@dataclass(frozen=True)
class NonZero:
    """expression ≠ 0, because expression · cofactor equals a positive certificate."""

    text: str
    expression: sp.Expr
    cofactor: sp.Expr
    certificate: sp.Expr


@dataclass(frozen=True)
class Growth:
    """expression > 0 to the right of `start`: it is ≥ 0 there and its derivative is positive by the certificate."""

    text: str
    by: str
    expression: sp.Expr
    start: Mapping[sp.Symbol, sp.Expr]
    certificate: sp.Expr


Step = Identity | Derivative | AngleDerivative | Sign | SameSign | NonZero | Growth


@dataclass(frozen=True)
class Proof:
    """Hypotheses by name: `zero` are equations expr = 0, `positive` expr > 0, `nonnegative` expr ≥ 0."""

    claim: str
    title: str
    zero: Mapping[str, sp.Expr] = field(default_factory=dict)
    positive: Mapping[str, sp.Expr] = field(default_factory=dict)
    nonnegative: Mapping[str, sp.Expr] = field(default_factory=dict)
    derivations: Mapping[str, Mapping[sp.Symbol, sp.Expr]] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    conclusion: str = ""

    def trace(self) -> Iterator[tuple[Step, str]]:
        """Every step with '' if it follows from the hypotheses and the steps before, or the reason why not."""
        context = _Context(self)
        for step in self.steps:
            try:
                context.accept(step)
                yield step, ""
            except Rejected as reason:
                yield step, str(reason)

    def check(self) -> None:
        """Raises `Rejected` at the first step that does not follow."""
        for number, (step, reason) in enumerate(self.trace(), start=1):
            if reason:
                raise Rejected(f"{self.claim} step {number} ({step.text}): {reason}")


# Caches: mutating a proof step by step asks the same questions again and again.
@lru_cache(maxsize=4096)
def _fraction(expression: sp.Expr) -> tuple[sp.Expr, sp.Expr]:
    numerator, denominator = sp.fraction(sp.together(expression))
    return sp.expand(numerator), denominator


@lru_cache(maxsize=4096)
def _in_ideal(numerator: sp.Expr, equations: tuple[sp.Expr, ...]) -> bool:
    """Is the polynomial in the ideal that the equations generate?"""
    basis = _groebner(equations)
    if numerator == 0 or basis is None:
        return bool(numerator == 0)
    # The equations are in some of the symbols; the others ride along as coefficients.
    rest = numerator.free_symbols - set(basis.gens)
    if not rest:
        return basis.contains(numerator)
    grouped = sp.Poly(numerator, *sorted(rest, key=str))
    return all(basis.contains(coefficient) for coefficient in grouped.coeffs())


@lru_cache(maxsize=256)
def _groebner(equations: tuple[sp.Expr, ...]) -> sp.GroebnerBasis | None:
    if not equations:
        return None
    symbols = sorted(set().union(*(e.free_symbols for e in equations)), key=str)
    return sp.groebner(equations, *symbols, order="grevlex", domain=sp.QQ)


class _Context:
    """The hypotheses, and what the accepted steps have added to them."""

    def __init__(self, proof: Proof) -> None:
        self.equations = [sp.expand(e) for e in proof.zero.values()]
        self.positive = {sp.expand(e) for e in proof.positive.values()}
        self.nonnegative = {sp.expand(e) for e in proof.nonnegative.values()}
        self.nonzero: set[sp.Expr] = set()
        self.derivations = proof.derivations
        for rules in proof.derivations.values():
            self.check_derivation(rules)

    def vanishes(self, expression: sp.Expr) -> bool:
        """Does the expression equal 0 in the ring modulo the hypotheses' equations?"""
        numerator, denominator = _fraction(expression)
        if denominator.free_symbols and not self.never_zero(denominator):
            raise Rejected(f"the denominator {denominator} is not known to differ from 0")
        return _in_ideal(numerator, tuple(self.equations))

    def never_zero(self, expression: sp.Expr) -> bool:
        if {sp.expand(expression), sp.expand(-expression)} & (self.nonzero | self.positive):
            return True
        constant, factors = sp.factor_list(expression)
        return constant != 0 and all(self._nonzero_factor(factor) for factor, _ in factors)

    def _nonzero_factor(self, factor: sp.Expr) -> bool:
        known = {sp.expand(factor), sp.expand(-factor)} & (self.nonzero | self.positive)
        return bool(known) or any(self.sign(f, strict=True) for f in (factor, -factor))

    def sign(self, expression: sp.Expr, strict: bool) -> bool:
        """Is the expression visibly > 0 (strict) or ≥ 0?"""
        expanded = sp.expand(expression)
        if expanded in self.positive or (not strict and expanded in self.nonnegative):
            return True
        if expression.is_number:
            return bool(expression > 0 if strict else expression >= 0)
        if expression.is_Mul:
            return all(self.sign(factor, strict) for factor in expression.args)
        if expression.is_Pow:
            base, power = expression.args
            if power.is_Integer and power % 2 == 0:
                return not strict or self._nonzero_factor(base)
            return self.sign(base, strict if power > 0 else True)
        if expression.is_Add:
            terms = expression.args
            return all(self.sign(t, False) for t in terms) and (not strict or any(self.sign(t, True) for t in terms))
        return False

    def derive(self, expression: sp.Expr, rules: Mapping[sp.Symbol, sp.Expr]) -> sp.Expr:
        return sum((sp.diff(expression, symbol) * slope for symbol, slope in rules.items()), sp.Integer(0))

    def check_derivation(self, rules: Mapping[sp.Symbol, sp.Expr]) -> None:
        """A derivation must respect the equations: each stays 0 along it."""
        for equation in self.equations:
            if not self.vanishes(self.derive(equation, rules)):
                raise Rejected(f"the derivation leaves {equation} = 0")

    def _equal(self, left: sp.Expr, right: sp.Expr) -> None:
        if not self.vanishes(left - right):
            raise Rejected(f"{left} is not {right}")

    def _visible(self, certificate: sp.Expr, strict: bool) -> None:
        if not self.sign(certificate, strict):
            raise Rejected(f"{certificate} is not visibly {'positive' if strict else 'nonnegative'}")

    def accept(self, step: Step) -> None:
        if isinstance(step, Identity):
            self._equal(step.left, step.right)
        elif isinstance(step, Derivative):
            self._equal(self.derive(step.of, self.derivations[step.by]), step.result)
        elif isinstance(step, AngleDerivative):
            dy, dx = (self.derive(part, self.derivations[step.by]) for part in (step.y, step.x))
            square = step.x**2 + step.y**2
            self._visible(square, strict=True)
            self.nonzero.add(sp.expand(square))
            self._equal((step.x * dy - step.y * dx) / square, step.result)
        elif isinstance(step, Sign):
            self._visible(step.certificate, step.strict)
            self._equal(step.expression, step.certificate)
            (self.positive if step.strict else self.nonnegative).add(sp.expand(step.expression))
        elif isinstance(step, SameSign):
            self._visible(step.factor, strict=True)
            self._equal(step.left, step.factor * step.right)
        elif isinstance(step, NonZero):
            self._visible(step.certificate, strict=True)
            self._equal(step.expression * step.cofactor, step.certificate)
            self.nonzero.add(sp.expand(step.expression))
        else:
            self._visible(step.certificate, strict=True)
            self._equal(self.derive(step.expression, self.derivations[step.by]), step.certificate)
            if not all(self.vanishes(equation.subs(step.start, simultaneous=True)) for equation in self.equations):
                raise Rejected("the start violates an equation")
            self._visible(sp.expand(step.expression.subs(step.start, simultaneous=True)), strict=False)
            self.positive.add(sp.expand(step.expression))


def latex(proof: Proof) -> str:
    """The proof as a LaTeX fragment: hypotheses, then one displayed line a step."""
    lines = [rf"\paragraph{{{proof.claim}}} {proof.title}", r"\begin{itemize}"]
    lines += [rf"\item {name}: ${fact}$" for name, fact in hypotheses(proof, sp.latex, GE)]
    lines += [r"\end{itemize}", r"\begin{enumerate}"]
    lines += [rf"\item {step.text}: \[{formula(step, sp.latex, DEL, GE)}\]" for step in proof.steps]
    return "\n".join([*lines, r"\end{enumerate}", proof.conclusion])


def plain(expression: sp.Expr) -> str:
    """For a terminal: powers with ^."""
    return sp.sstr(expression).replace("**", "^")


def hypotheses(proof: Proof, show: Callable[..., str] = plain, at_least: str = "≥") -> list[tuple[str, str]]:
    """Name and relation of each hypothesis."""
    kinds = ((proof.zero, "="), (proof.positive, ">"), (proof.nonnegative, at_least))
    return [(name, f"{show(fact)} {relation} 0") for facts, relation in kinds for name, fact in facts.items()]


def formula(step: Step, show: Callable[..., str] = plain, d: str = "∂", at_least: str = "≥") -> str:
    """What a step says, in the notation of `show`."""
    t = show
    if isinstance(step, Identity):
        return f"{t(step.left)} = {t(step.right)}"
    if isinstance(step, Derivative):
        return f"{d}_{{{step.by}}} [{t(step.of)}] = {t(step.result)}"
    if isinstance(step, AngleDerivative):
        return f"{d}_{{{step.by}}} atan2({t(step.y)}, {t(step.x)}) = {t(step.result)}"
    if isinstance(step, Sign):
        return f"{t(step.expression)} = {t(step.certificate)} {'>' if step.strict else at_least} 0"
    if isinstance(step, SameSign):
        return f"{t(step.left)} = [{t(step.factor)} > 0] · [{t(step.right)}]"
    if isinstance(step, NonZero):
        return f"[{t(step.expression)}] · [{t(step.cofactor)}] = {t(step.certificate)} > 0"
    start = ", ".join(f"{t(symbol)} = {t(value)}" for symbol, value in step.start.items())
    return f"{t(step.expression)} > 0 to the right of {start}, as {d}_{{{step.by}}} of it = {t(step.certificate)} > 0"
