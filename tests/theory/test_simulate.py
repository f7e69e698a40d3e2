"""Monte Carlo: two numbers are as good as a vector, seeds reproduce, intervals cover, nothing is assumed in (c)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory import depth
from theory.ledger_depth import ks_distance
from theory.rotation import adjacent_cosine, norm_after, step_angle
from theory.simulate import Setup, merge, run_chain, run_seeds, run_vectors
from theory.simulate_transformer import measure_transformer

setups = st.builds(
    Setup,
    norm=st.floats(0.2, 5),
    layers=st.integers(1, 5),
    width=st.integers(4, 20),
    update=st.floats(0.2, 3),
    mode=st.sampled_from(["isotropic", "angle", "drift"]),
    norm_std=st.sampled_from([0.0, 1.0]),
    angle=st.floats(0.2, 2.9),
    drift=st.floats(0, 0.95),
    target_cosine=st.floats(-0.9, 0.9),
)


@settings(max_examples=25)
@given(setups, st.integers(0, 2**31))
def test_chain_and_vectors_have_one_law(setup, seed):
    """D7: two-sample Kolmogorov-Smirnov on norms and cosines, at a level of 1e-4 per comparison."""
    a, b = run_chain(setup, 2000, seed), run_vectors(setup, 2000, seed + 1)
    for x, y in ((a.final_norm, b.final_norm), (a.final_cosine, b.final_cosine)):
        if max(np.ptp(x), np.ptp(y)) > 1e-9:  # a fixed angle makes the norm a number
            distance, critical = ks_distance(x, y)
            assert distance < critical
        else:
            assert abs(x[0] - y[0]) < 1e-9


def test_ks_notices_a_difference():
    a = run_chain(Setup(norm=1.5, layers=4, width=12), 4000, 0)
    b = run_vectors(Setup(norm=1.5, layers=4, width=24), 4000, 1)
    distance, critical = ks_distance(a.final_cosine, b.final_cosine)
    assert distance > critical


@given(
    st.floats(0.1, 100),
    st.floats(0.1, 3),
    st.floats(0.1, 3.0),
    st.integers(1, 6),
    st.sampled_from([run_chain, run_vectors]),
)
def test_a_fixed_angle_follows_the_step_formula(norm, update, angle, layers, run):
    """R1, R5: norms, turns and cosines of every layer are those of `evolve`."""
    result = run(Setup(norm=norm, layers=layers, width=8, update=update, mode="angle", angle=angle), 50, 1)
    path = depth.evolve(norm, np.full(layers, update), np.full(layers, angle))
    loss = 1e-13 * np.prod(np.maximum(1, path.norms[:-1] / path.norms[1:])) ** 2
    np.testing.assert_allclose(result.norm.mean, path.norms, rtol=1e-12 + loss)
    np.testing.assert_allclose(result.adjacent_cosine.mean, np.cos(path.turns), atol=1e-12 + loss)
    np.testing.assert_allclose(result.turn.mean, path.turns, atol=1e-6 if run is run_vectors else 1e-12 + loss)


def test_one_isotropic_step_is_exact_per_token():
    """The chain's own radial coordinate explains its norm, turn and cosine (R1)."""
    run = run_chain(Setup(norm=2.0, layers=1, width=6), 3000, 2)
    phi = np.arccos(np.clip((run.final_norm**2 - 4 - 1) / 4, -1, 1))
    np.testing.assert_allclose(norm_after(2.0, 1.0, phi), run.final_norm, rtol=1e-12)
    assert abs(step_angle(2.0, 1.0, phi).mean() - run.turn.mean[0]) < 1e-7
    np.testing.assert_allclose(adjacent_cosine(2.0, 1.0, phi), run.final_cosine, atol=1e-7)


def test_intervals_cover_the_truth():
    """E n² is n_0² + LC² exactly (D2); of 200 runs about 95 % must cover the mean norm that a long run finds."""
    setup = Setup(norm=1.0, layers=3, width=10)
    truth = run_chain(setup, 400_000, 10**6).norm.mean[-1]
    covered = 0
    for seed in range(200):
        curve = run_chain(setup, 200, seed).norm
        covered += abs(curve.mean[-1] - truth) <= curve.half_width[-1]
    assert 178 <= covered <= 199  # binomial(200, .95) at 1e-4


def test_seeds():
    setup = Setup(norm=1.0, layers=3, width=10)
    a, b, c = (run_chain(setup, 500, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a.final_norm, b.final_norm)
    assert (a.final_norm != c.final_norm).any() and a.seeds == (1,)
    both = merge([a, c])
    assert both.seeds == (1, 2) and len(both.final_norm) == 1000
    assert both.norm.mean[-1] == pytest.approx((a.norm.mean[-1] + c.norm.mean[-1]) / 2)
    assert both.norm.half_width[-1] == pytest.approx(a.norm.half_width[-1] / np.sqrt(2), rel=0.1)
    np.testing.assert_array_equal(run_seeds("chain", setup, 500, (1, 2)).final_norm, both.final_norm)


def test_processes_change_nothing():
    setup = Setup(norm=1.0, layers=2, width=10)
    alone, together = (run_seeds("chain", setup, 100, (1, 2), jobs) for jobs in (1, 2))
    np.testing.assert_array_equal(alone.final_cosine, together.final_cosine)


def test_progress_counts_tokens():
    seen = []
    run_chain(Setup(norm=1.0, layers=1, width=10), 20_000, 0, seen.append)
    assert sum(seen) == 20_000 and len(seen) > 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_counts_tokens_over_seeds(jobs):
    seen = []
    run_seeds("chain", Setup(norm=1.0, layers=1, width=10), 300, (1, 2), jobs, seen.append)
    assert sum(seen) == 600 and len(seen) == 2


def test_lognormal_norms():
    run = run_chain(Setup(norm=39.96, norm_std=45.58, layers=1, width=64), 200_000, 0)
    assert run.norm.mean[0] == pytest.approx(39.96, abs=5 * 45.58 / np.sqrt(200_000))


def test_transformer_audit():
    """(c): each token's own n, C, φ explain its turn to rounding; the paper's assumptions do not hold exactly."""
    rows = measure_transformer(39.96, 1.08, layers=3, width=32, tokens=16)
    assert len(rows) == 12
    assert max(abs(row.turn - row.turn_from_tokens) for row in rows) < 1e-13
    assert min(row.update_std for row in rows) > 0 and max(row.resultant for row in rows) > 0.3
    visual, text = (np.mean([row.turn for row in rows if row.modality == m]) for m in ("visual", "text"))
    assert visual < text
    assert rows == measure_transformer(39.96, 1.08, layers=3, width=32, tokens=16)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Setup(norm=0, layers=1, width=8), ("norm", "0.0")),
        (lambda: Setup(norm=1, layers=0, width=8), ("layers", "0")),
        (lambda: Setup(norm=1, layers=1, width=3), ("width", "3")),
        (lambda: Setup(norm=1, layers=1, width=8, mode="sideways"), ("mode", "sideways")),
        (lambda: Setup(norm=1, layers=1, width=8, drift=1.5), ("drift", "1.5")),
        (lambda: Setup(norm=1, layers=1, width=8, angle=4), ("angle", "4.0")),
        (lambda: run_chain(Setup(norm=1, layers=1, width=8), 0, 0), ("tokens", "0")),
        (lambda: run_chain(Setup(norm=1, layers=1, width=8), 1, -1), ("seed", "-1")),
        (lambda: run_seeds("guess", Setup(norm=1, layers=1, width=8), 1, (0,)), ("fidelity", "guess")),
        (lambda: merge([]), ("runs", "none")),
        (lambda: measure_transformer(-1, 1), ("norm_v", "-1.0")),
        (lambda: measure_transformer(1, 1, tokens=1), ("tokens", "1")),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words)
