"""NormAlign: the norm that comes out (claims N1 and N2), and the gradient that goes back."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minillava.norm_align import NormAlign, text_norm

U = 2.0**-24  # unit roundoff of fp32
FLOOR = 1e-3  # compensation never divides by less

widths = st.integers(2, 200)
seeds = st.integers(0, 1000)
signs = st.sampled_from([-1.0, 1.0])
magnitudes = st.floats(-4, 2).map(lambda e: 10.0**e)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(norm: NormAlign, x: torch.Tensor, dy: torch.Tensor):
    """Gradients to input, gain and bias."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(norm(x), (x, norm.weight, norm.bias), dy)


# ---- forward


@given(widths, seeds, magnitudes, st.floats(-100, 100), magnitudes, signs, st.floats(-8, -2), st.booleans())
def test_output_norm_is_gain_times_root_width_times_rho(D, seed, scale, shift, gain, sign, log_eps, compensate):
    """N2: ‖y‖ = |g|·√D·ρ with ρ = (1 + ε/σ²)^(-1/2), σ² from the fp32 input in fp64.

    Tolerance: the mean, x − mean, its square, the sum (pairwise, log₂ 200 < 8 roundings, halved by the root), rsqrt and
    the two products: under 16 roundings of size U.
    """
    x = scale * (draw(3, D, seed=seed) + shift)
    eps = 10.0**log_eps
    norm = NormAlign(D, sign * gain, compensate, eps)
    variance = x.double().var(-1, correction=0)
    expected = gain * math.sqrt(D) * (1 + eps / variance) ** -0.5
    y = norm(x).detach().double()
    # two-pass variance with its correction: of the mean's own rounding only the square is left, (U·|mean|/σ)²
    conditioning = 1 + (x.double().mean(-1).abs() / variance.sqrt()).max().item() ** 2 * U
    torch.testing.assert_close(y.norm(dim=-1), expected, rtol=16 * U * conditioning, atol=0)


@given(widths, seeds, magnitudes, st.booleans())
def test_alignment_to_text_starts_at_the_norm_of_text(D, seed, scale, compensate):
    """N1: with g = T/√D a token of any size comes out with norm T·ρ, and ρ is 1 − ε/2σ² at least."""
    table = scale * draw(50, D, seed=seed)
    table[::7] = 0  # rows of unused tokens
    T = table[table.any(-1)].double().norm(dim=-1).mean().item()
    norm = NormAlign.to_text(table, compensate)
    assert norm.weight[0].item() == pytest.approx(T / math.sqrt(D), rel=16 * U)
    assert norm.compensate is compensate and not norm.bias.any()
    x = 30 * draw(4, D, seed=seed + 1)
    rho_loss = 1e-5 / (2 * x.var(-1, correction=0).min().item())
    y = norm(x).detach().norm(dim=-1).double()
    assert ((y / T - 1).abs() <= rho_loss + 16 * U).all()


def test_text_norm_ignores_zero_rows_and_refuses_what_has_no_norm():
    table = torch.zeros(5, 4)
    table[1], table[3] = torch.tensor([3.0, 4, 0, 0]), torch.tensor([0.0, 0, 0, 7])
    assert text_norm(table) == pytest.approx(6)
    assert text_norm(table.to(torch.bfloat16)) == pytest.approx(6)
    assert text_norm(nn.Parameter(table)) == pytest.approx(6)
    with pytest.raises(ValueError, match=r"embedding matrix \(5, 4\) has no non-zero row"):
        text_norm(torch.zeros(5, 4))
    for broken in (math.nan, math.inf):
        table[2, 1] = broken
        with pytest.raises(ValueError, match="not finite in row 2"):
            NormAlign.to_text(table)


@pytest.mark.parametrize("compensate", [False, True])
def test_constant_and_nan_rows_stay_alone(compensate):
    norm = NormAlign(6, 0.02, compensate)
    nn.init.normal_(norm.bias)
    x = draw(4, 6)
    x[1], x[3] = 0, 5.0  # no spread, so nothing is left but the bias
    y = norm(x)
    assert torch.equal(y[1], norm.bias) and torch.equal(y[3], norm.bias)
    dx, dg, db = gradients(norm, x, draw(4, 6, seed=1))
    assert all(grad.isfinite().all() for grad in (dx, dg, db))
    broken = x.clone()
    broken[2, 0] = math.nan
    assert norm(broken)[2].isnan().all()
    assert torch.equal(norm(broken)[[0, 1, 3]], y[[0, 1, 3]])
    assert torch.equal(gradients(norm, broken, draw(4, 6, seed=1))[0][[0, 1, 3]], dx[[0, 1, 3]])


# ---- backward


@given(widths, seeds, st.floats(-6, 1).map(lambda e: 10.0**e), st.booleans())
def test_compensation_divides_the_input_gradient_by_the_mean_gain_and_touches_nothing_else(D, seed, gain, uneven):
    plain, compensated = NormAlign(D), NormAlign(D, compensate=True)
    g = gain * (draw(D, seed=seed) if uneven else torch.ones(D))
    for norm in (plain, compensated):
        norm.weight.data.copy_(g)
        norm.bias.data.copy_(draw(D, seed=seed + 1))
    x, dy = 5 * draw(2, 3, D, seed=seed + 2), draw(2, 3, D, seed=seed + 3)
    assert torch.equal(plain(x), compensated(x))
    (dx, dg, db), (dx_c, dg_c, db_c) = gradients(plain, x, dy), gradients(compensated, x, dy)
    assert torch.equal(dg, dg_c) and torch.equal(db, db_c)
    factor = 1 / max(g.double().abs().mean().item(), FLOOR)
    # the same dx, times or over an fp32 mean of D gains: under 16 roundings; gains down to 1e-6 leave no subnormals
    torch.testing.assert_close(dx_c.double(), dx.double() * factor, rtol=16 * U, atol=1e-30)


def test_a_gain_of_zero_gives_finite_gradients():
    norm = NormAlign(8, 0.0, compensate=True)
    dx, dg, _ = gradients(norm, draw(3, 8), draw(3, 8, seed=1))
    assert not dx.any() and dg.any()


@pytest.mark.parametrize("compensate", [False, True])
def test_used_twice_in_one_graph_each_use_is_compensated(compensate):
    """Against autograd through torch's own LayerNorm, where x/μ + stop(x − x/μ) has the value x and the slope 1/μ."""
    norm = NormAlign(6, 0.3, compensate).double()
    x = draw(3, 6).double().requires_grad_()

    def reference(x):
        if compensate:
            mu = norm.weight.detach().abs().mean()
            x = x / mu + (x - x / mu).detach()
        return F.layer_norm(x, (6,), norm.weight, norm.bias, norm.eps)

    def twice(f):
        return (f(f(x) + x) * torch.linspace(-1, 1, 6).double()).sum() + f(2 * x).square().sum()

    inputs = (x, norm.weight, norm.bias)
    for ours, theirs in zip(
        torch.autograd.grad(twice(norm), inputs), torch.autograd.grad(twice(reference), inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)  # fp64, sums of some tens of terms


def test_uncompensated_gradient_is_the_derivative():
    norm = NormAlign(5, 0.4).double()
    x = draw(2, 5).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: norm(x), (x, norm.weight, norm.bias))


def test_only_what_asks_for_a_gradient_gets_one():
    norm, x = NormAlign(6, 0.1, compensate=True), draw(3, 6)
    norm(x).square().sum().backward()  # frozen input, as when features are cached
    assert norm.weight.grad.any() and norm.bias.grad.any()
    frozen = NormAlign(6, 0.1, compensate=True).requires_grad_(False)
    assert not frozen(x).requires_grad
    x.requires_grad_()
    (frozen(x) * draw(3, 6, seed=1)).sum().backward()
    assert x.grad.any() and frozen.weight.grad is None


# ---- precision and compilation


@pytest.mark.parametrize("compensate", [False, True])
def test_under_bf16_autocast_values_are_bf16_and_parameters_stay_fp32(compensate):
    torch.manual_seed(0)
    linear, norm = nn.Linear(8, 16), NormAlign(16, 0.05, compensate)
    x = draw(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        projected = linear(x)
        y = norm(projected)
    assert projected.dtype == y.dtype == torch.bfloat16
    exact = copy.deepcopy(norm).double()(projected.detach().double())
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=0)  # statistics in fp32, so one bf16 rounding
    y.float().square().sum().backward()
    assert norm.weight.grad.dtype == linear.weight.grad.dtype == torch.float32
    assert linear.weight.grad.isfinite().all() and norm.weight.grad.any()


@pytest.mark.parametrize("compensate", [False, True])
def test_it_compiles_without_a_graph_break(compensate):
    """`aot_eager` traces, takes shapes and derives the backward as the default backend does, and needs no compiler."""
    norm = NormAlign(6, 0.1, compensate)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x, dy = draw(2, 3, 6), draw(2, 3, 6, seed=1)
    assert torch.equal(compiled(x), norm(x))
    for ours, eager in zip(gradients(compiled, x, dy), gradients(norm, x, dy), strict=True):
        assert torch.equal(ours, eager)


# ---- refusals and appearance


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(2, 5), ValueError, r"weight must have shape \(5,\), the last dimension of x; got \(6,\)"),
        (torch.zeros(2, 6, dtype=torch.long), TypeError, "got torch.int64"),
        (torch.tensor(1.0), ValueError, "at least one feature in the last dimension"),
    ],
)
def test_bad_input_is_refused(x, error, message):
    with pytest.raises(error, match=message):
        NormAlign(6)(x)


def test_gain_may_be_an_integer_and_is_shown():
    norm = NormAlign(6, gain=1, compensate=True)
    assert norm.weight.dtype == torch.float32
    assert "6, mean |gain|=1, compensate=True" in repr(norm)
