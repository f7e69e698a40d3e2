# %% [markdown]
# # 2. The formula
#
# **Question: does a longer token always turn less, and how would you know for sure?**
#
# You will derive the turn, let a computer check the algebra, find the place where the formula in the paper breaks, and
# in the end prove a statement about *all* tokens in a region, with a computation. No step asks you to trust us.

# %%
import math

import numpy as np
import sympy as sp
from exercises import check
from flint import arb
from reader import DEGREES, GREY, Picture, quote

import theory
from minillava.style import canvas, in_style
from theory.certify import certify
from theory.kernel import AngleDerivative, Identity, Proof, Rejected, Sign
from theory.proofs import explain

# %% [markdown]
# ## The law
#
# Put $h$ along the x axis. The update has a part along $h$ and a part across it, so the tip of $h + \Delta$ lies at
#
# $$v = n + C\cos\varphi, \qquad u = C\sin\varphi.$$
#
# The angle of that point is θ. Its *tangent* is $u/v$, which is how the paper writes it. Now turn the fraction over.
# The *cotangent* is
#
# $$\cot\theta = \frac{v}{u} = \cot\varphi + \frac{n}{C\sin\varphi}.$$
#
# Look at it as a function of $n$. It is a straight line, and it rises. The cotangent falls as the angle grows, all the
# way from 0 to π. So θ falls as $n$ grows. That is the proof of inertia, and it fits into this paragraph.
#
# ## Let a machine check it
#
# sympy can check such an identity, if you ask carefully. With `sin` and `cos` its `simplify` is slow and sometimes
# wrong. So we write $c$ and $s$ instead, and say the only thing that we know about them: $c^2 + s^2 = 1$. What is left
# is arithmetic with polynomials, and there a computer does not make mistakes.
#
# A proof, in our package, is a list of hypotheses and a list of steps.

# %%
n, C, c, s, N = sp.symbols("n C c s N")
u, v = C * s, n + C * c
hypotheses = {"circle": c**2 + s**2 - 1, "norm after": N**2 - u**2 - v**2}
sizes = {"norm": n, "update": C, "sine": s, "norm after": N}
mine = Proof(
    "mine",
    "a longer token turns less",
    zero=hypotheses,
    positive=sizes,
    derivations={"n": {n: 1, N: (n + C * c) / N}},
    steps=(
        Identity("the cotangent is a line in n", v / u, c / s + n / (C * s)),
        AngleDerivative("the slope of the turn", "n", u, v, -u / N**2),
        Sign("u/N² is positive, so the slope is negative", u / N**2, C * s / N**2),
    ),
)
mine.check()
print("accepted")

# %% [markdown]
# A checker that accepts everything is worth nothing. **Predict.** We change one sign in the slope, $+u/N^2$ instead of
# $-u/N^2$. Which message will come?

# %%
wrong = Proof(
    "wrong",
    "one sign",
    zero=hypotheses,
    positive=sizes,
    derivations={"n": {n: 1, N: (n + C * c) / N}},
    steps=(AngleDerivative("the slope of the turn", "n", u, v, u / N**2),),
)
try:
    wrong.check()
    raise AssertionError("the kernel accepted a false step")
except Rejected as reason:
    print(f"rejected: {reason}")

# %% [markdown]
# The package's own proof of this claim says more: the slope by $C$ and by φ, where the curve is convex, and a symmetry
# that you will use in exercise 2.2. This is all of it, each step with its verdict:

# %%
print(explain("R1"))
assert "REJECTED" not in explain("R1")

# %% [markdown]
# ## Where the paper's form breaks
#
# The paper argues with the tangent: $\tan\theta = C\sin\varphi/(n + C\cos\varphi)$, a larger $n$ makes a larger
# denominator, so a smaller tangent, so a smaller angle.
#
# **Predict.** Take an update that points backward, $C = 5$ and $\cos\varphi = -3/5$. At which $n$ is the denominator
# zero? What does the tangent do there, and what does the angle do?

# %%
phi = math.acos(-0.6)
norms = np.linspace(0.2, 8, 2000)
turn = theory.step_angle(norms, 5.0, phi)
tangent = 5 * math.sin(phi) / (norms + 5 * math.cos(phi))
with in_style():
    figure, (left, right) = canvas(1, 2, 7.6, 3.2, sharex=True)
    for panel, values, label in ((left, tangent, "tan θ"), (right, turn * DEGREES, "θ [degrees]")):
        for side in (norms < 3, norms > 3) if panel is left else (norms > 0,):
            panel.plot(norms[side], values[side], color=GREY)
        panel.axvline(3, color=GREY, linewidth=0.8, linestyle=":")
        panel.set(xlabel="norm n", ylabel=label)
    left.set_ylim(-20, 20)
    at = np.array([1.0, 2.0, 4.0])
    left.plot(at, np.tan(theory.step_angle(at, 5.0, phi)), "o", color="#D55E00")
    right.plot(at, theory.step_angle(at, 5.0, phi) * DEGREES, "o", color="#D55E00")
Picture(
    figure, "The tangent has a pole at norm 3, where it jumps from minus to plus infinity; the angle falls smoothly."
)

# %% [markdown]
# **What to see.** On the left the tangent *falls* to −∞, jumps to +∞ and falls again: from $n = 2$ to $n = 4$ it has
# gone up. On the right the angle falls through 90 degrees without noticing anything. The conclusion of the paper is
# true and its argument is not, for updates that point backward. Half of all directions point backward.

# %%
degrees_at = theory.step_angle(at, 5.0, phi) * DEGREES
tangents_at = np.tan(theory.step_angle(at, 5.0, phi))
quote("104.0", degrees_at[1])
quote("76.0", degrees_at[2])
quote("-2", tangents_at[0])
quote("-4", tangents_at[1])
quote("4", tangents_at[2])
assert (np.diff(turn) < 0).all()

# %% [markdown]
# At $n$ = 1, 2, 4 the tangent is −2, −4 and 4, and taking absolute values does not help: 2, 4, 4. The angle goes from
# 104.0 degrees at $n = 2$ to 76.0 degrees at $n = 4$.
#
# The same pole waits in code. `arctan(u / v)` is wrong by 180 degrees on one side of it; `arctan2(u, v)` is right
# everywhere. And a third form, the arc cosine of a normalised dot product, is fine in principle and loses all its
# digits for the very tokens that this project is about, those that hardly turn.
#
# **Predict.** A token turns by 1e-9 radians. What does `arccos` make of it, in double precision?

# %%
tiny_norm, tiny_turn = 1e9, float(theory.step_angle(1e9, 1.0, math.pi / 2))
by_cosine = float(np.arccos(theory.adjacent_cosine(tiny_norm, 1.0, math.pi / 2)))
print(f"arctan2: {tiny_turn:.3e}    arccos: {by_cosine:.3e}")
assert abs(tiny_turn - 1e-9) < 1e-24
assert by_cosine == 0.0

# %% [markdown]
# Zero. A token that turns by a billionth does turn, and over a million steps it matters.
#
# ## Prove it for a whole region
#
# A plot checks two thousand points. A theorem covers all of them. There is something in between that a computer can do
# alone: *interval arithmetic*. Instead of numbers, compute with intervals that are guaranteed to contain the result. If
# the interval of $-\partial\theta/\partial n$ over a whole box of inputs is positive, the statement is proved for every
# point of the box. If it is too wide to tell, cut the box in two.
#
# How far a token turns depends on $n$ and $C$ only through $x = C/n$. So two coordinates are enough. Up to positive
# factors the slope is $\sin\varphi / (1 + 2x\cos\varphi + x^2)$.
#
# **Predict.** The denominator is $N^2/n^2$. It is zero only if the update cancels the token, $x = 1$ and φ = π. Written
# as above, will intervals see that it is positive?


# %%
def naive(x, phi):
    return phi.sin() / (1 + 2 * x * phi.cos() + x * x)


def squares(x, phi):
    half = (phi / 2).cos()
    return phi.sin() / ((1 - x) ** 2 + 4 * x * half * half)


box = {"x": (0.5, 2.0), "φ": (0.5, 2.6)}
first, second = certify(naive, box, max_boxes=20_000), certify(squares, box, max_boxes=20_000)
print(f"naive: {first.status} in {first.boxes} boxes; as a sum of squares: {second.status} in {second.boxes} boxes")
assert second.status == first.status == "proved"
assert second.boxes < first.boxes

# %% [markdown]
# Both prove it, and the second form needs fewer boxes, because every term in it is visibly not negative. Intervals
# forget that two occurrences of $x$ are the same $x$; an expression that repeats itself less loses less. The region
# here is modest on purpose. The ledger's certificate goes from $x$ = 1e-4 to 1e4.
#
# A search that can only say "proved" would be as worthless as a checker that accepts everything. Ask it something
# false: that θ *rises* with the norm.

# %%
refuted = certify(lambda x, phi: -squares(x, phi), box)
print(refuted.status, {name: round(value, 3) for name, value in refuted.witness.items()})
assert refuted.status == "refuted"

# %% [markdown]
# It comes back with a witness, a point where the statement is false.
#
# ## Something you did not know yet
#
# LLaVA-like models have visual norms between 29 and 72 and text norms between 0.8 and 1.4. Say both kinds of token get
# the same update, of *any* size between 0.25 and 4, at *any* angle between 60 and 120 degrees. How much slower are
# visual tokens at least? Because of the law above, the worst case has the shortest visual token and the longest text
# token. Two coordinates are left, and they can be searched.


# %%
def turn_ball(norm, update, angle):
    return arb.atan2(update * angle.sin(), norm + update * angle.cos())


def slower_than(share):
    return lambda update, angle: share * turn_ball(1.4, update, angle) - turn_ball(29, update, angle)


pushes = {"C": (0.25, 4.0), "φ": (math.radians(60), math.radians(120))}
for share in (0.15, 0.14):
    result = certify(slower_than(share), pushes)
    witness = "" if result.witness is None else f", at C = {result.witness['C']:.3g}, φ = {result.witness['φ']:.3g}"
    print(f"visual tokens turn less than {share:.2f} times as far: {result.status}, {result.boxes} boxes{witness}")
    assert result.status == ("proved" if share == 0.15 else "refuted")

# %% [markdown]
# Proved at 0.15, refuted at 0.14, and the witness sits in the corner with the largest update that points most forward.
# So the answer to "at least how much slower" lies between the two. No sampling, no "we observed": every point of the
# region is covered. And there is one condition that you should be suspicious of by now: *the same update for both*.
#
# ## Exercises
#
# **2.1** Write the turn θ as a function of $n$, $C$, φ (radians), right for every angle.

# %%
my_turn = ...
check("2.1", my_turn)

# %% [markdown]
# **2.2** For every norm $n$ there is a partner $n'$ with $\theta(n) + \theta(n') = \varphi$, the same one for all φ.
# Which? Give a function of $n$ and $C$. (What is the turn of the update, seen from the other side?)

# %%
my_partner = ...
check("2.2", my_partner)

# %% [markdown]
# **2.3** For updates that do not point backward, a token 4 times as long turns at least a quarter as far:
# $\theta_v/\theta_t \ge n_t/n_v$. Break it for updates that do. Give one example `(C, phi, n_t, n_v)`, φ in radians.

# %%
my_example = ...
check("2.3", my_example)

# %% [markdown]
# **What you have now:** a law that holds for one step, with a proof you can run. Next: thirty-two steps. [Tutorial
# 3](03_many_layers.ipynb).
