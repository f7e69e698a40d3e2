# %% [markdown]
# # 3. Many layers
#
# **Question: does the gap between long and short tokens survive thirty-two layers?**
#
# One step is settled. A model takes many, and after each of them the token is a little longer or shorter than before.
# The paper says that the initial gap is "carried through the layers". That sentence has four meanings. One of them is
# exactly true.

# %%
import math

import numpy as np
from exercises import check
from reader import DEGREES, GREY, Picture, quote

import theory
from minillava.style import MODALITY_COLOURS, MODALITY_LINES, canvas, in_style
from theory.published import MEASURED, predicted_cosine
from theory.simulate import Setup, run_chain

visual, text, layers = 39.96, 1.08, 32
STYLE = {name: {"color": MODALITY_COLOURS[name], "linestyle": MODALITY_LINES[name]} for name in ("visual", "text")}

# %% [markdown]
# ## Updates without a direction
#
# Begin with the simplest model of a network: every update has size 1 and a random direction. In 4096 dimensions a
# random direction is almost exactly at a right angle to the token, so by Pythagoras each step adds 1 to the *square* of
# the norm:
#
# $$n_{l+1}^2 = n_l^2 + C^2.$$
#
# **Predict.** The visual token begins with 39.96 and the text token with 1.08. Where are they after 32 layers? What has
# happened to their difference, to their ratio, and to the difference of their squares?

# %%
runs = {
    name: run_chain(Setup(norm=norm, layers=layers, width=4096, mode="isotropic"), tokens=4000, seed=0)
    for name, norm in (("visual", visual), ("text", text))
}
norms = {name: run.norm.mean for name, run in runs.items()}
with in_style():
    figure, panels = canvas(1, 3, 9.0, 3.0)
    for name, norm in norms.items():
        panels[0].plot(norm, label=name, **STYLE[name])
    panels[1].plot(norms["visual"] / norms["text"], color=GREY)
    panels[2].plot(norms["visual"] ** 2 - norms["text"] ** 2, color=GREY)
    panels[2].set_ylim(0, 2000)
    for panel, title in zip(panels, ("norms", "ratio of norms", "difference of squares"), strict=True):
        panel.set(title=title, xlabel="layer")
    panels[0].set_yscale("log")
    panels[0].legend()
Picture(figure, "Norms approach each other, their ratio falls from 37 to 7, the difference of their squares stays.")

# %% [markdown]
# **What to see.** The visual norm hardly moves, the text norm grows fast and then slowly. The ratio falls from 37 to 7.
# The difference of the squares is a horizontal line.

# %%
quote("40.36", norms["visual"][-1])
quote("5.76", norms["text"][-1])
quote("7.0", norms["visual"][-1] / norms["text"][-1])
gap = norms["visual"] ** 2 - norms["text"] ** 2
assert np.ptp(gap) / gap[0] < 2e-3
quote("531", theory.layers_until_ratio(visual, text, update=1.0, ratio=2.0))

# %% [markdown]
# After 32 layers the norms are 40.36 and 5.76. So "the gap persists" is exactly true of the *squared* gap, which is
# what physicists call an invariant. It is false of the ratio: that shrinks to 7.0 here and would be 2 after 531 layers.
# And the plain difference never grows, whatever the updates are. All this is in the ledger as D1 and D2.
#
# ## The spiral
#
# When every update stands at a right angle to the token and turns it the same way round, the tips of the arrows draw a
# figure that the Greeks knew, the spiral of Theodorus: a fan of right triangles, each built on the longest side of the
# one before.
#
# **Predict.** Draw the spiral for the text token, 32 triangles. How many times does it go round? And for the visual
# token?


# %%
def path(norm, update, count):
    """Tips of the arrows of a token whose updates are all at a right angle, in the plane."""
    norms, turns = theory.evolve(norm, np.full(count, update), np.full(count, np.pi / 2))
    angles = np.concatenate([[0.0], np.cumsum(turns)])
    return norms * np.cos(angles), norms * np.sin(angles)


with in_style():
    figure, panels = canvas(1, 2, 7.6, 3.9)
    for panel, (name, norm) in zip(panels, (("text", text), ("visual", visual)), strict=True):
        x, y = path(norm, 1.0, layers)
        for tip in zip(x, y, strict=True):
            panel.plot([0, tip[0]], [0, tip[1]], color=MODALITY_COLOURS[name], linewidth=0.7, alpha=0.6)
        panel.plot(x, y, color=GREY, linewidth=1.2)
        panel.set(title=f"{name} token, starting at norm {norm}", aspect="equal")
Picture(figure, "The text token's arrows go round one and a half times, the visual token's fan spans 46 degrees.")

# %% [markdown]
# **What to see.** Each ray is the token after one more layer. The text token goes round and round; the visual token
# opens a fan. The grey steps have the same length in both pictures: mind the axes.

# %%
turned = {name: theory.theodorus_bounds(norm, 1.0, layers) for name, norm in (("visual", visual), ("text", text))}
quote("9.24", turned["text"].total_turn)
quote("1.5", turned["text"].total_turn / (2 * math.pi))
quote("0.797", turned["visual"].total_turn)
quote("46", turned["visual"].total_turn * DEGREES)
for bounds in turned.values():
    assert bounds.lower <= bounds.total_turn <= bounds.upper

# %% [markdown]
# In total the text token turns by 9.24 radians, 1.5 times round. The visual token turns by 0.797 radians, 46 degrees.
#
# ## How deep is the network for a visual token?
#
# Thirty-two layers, and yet a visual token has turned less than a text token does in its first two. One may say that
# for it the network is less deep. *How* much less depends on whether the updates agree with each other.
#
# - If they all turn the token the same way, turns add up. A visual token lives through $L \cdot n_t/n_v$ layers.
# - If they point anywhere, turns diffuse like a drunkard's steps, and only the square adds up: $L \cdot (n_t/n_v)^2$.
#
# **Predict.** $n_t/n_v$ is 1/37. Which two numbers come out for $L = 32$?

# %%
depth = theory.effective_depth(visual, text, layers)
quote("0.86", depth.coherent)
assert turned["visual"].total_turn < theory.theodorus_bounds(text, 1.0, 2).total_turn
quote("0.023", depth.diffusive)

# %% [markdown]
# Between 0.86 layers and 0.023 layers. These count text-sized turns *while norms stay what they are*, so take them as a
# way to see the size of the effect and not as a property of a trained model.
#
# **Predict.** Back to random updates. The cosine between a token's last state and its first one says how much of the
# input is still there. For which of the two will it be near 1?

# %%
with in_style():
    figure, (left, right) = canvas(1, 2, 7.6, 3.1)
    for name, norm in (("visual", visual), ("text", text)):
        left.plot(runs[name].cosine_to_reference.mean, label=f"{name}, simulated", **STYLE[name])
        expected = theory.isotropic_fate(norm, 1.0, np.arange(layers + 1)).cosine_to_start
        left.plot(expected, "o", color=MODALITY_COLOURS[name], markersize=3, label=f"{name}, theory")
        right.plot(np.arange(1, layers + 1), runs[name].adjacent_cosine.mean, label=name, **STYLE[name])
    left.set(xlabel="layer", ylabel="cosine to the first state", ylim=(0, 1.05))
    right.set(xlabel="layer", ylabel="cosine to the state before", ylim=(0.7, 1.01))
    left.legend()
    right.legend()
Picture(figure, "The visual token stays near its first state at cosine 0.99; the text token falls to 0.19.")

# %% [markdown]
# **What to see.** Left: dots are theory, lines are the simulation. The visual token ends where it began. Right: the
# cosine between neighbouring layers, which the paper uses as its update rate. The text token's cosine climbs toward 1
# as well, because the text token grows. A cosine near 1 in a late layer does not tell you that nothing happens.

# %%
quote("0.990", theory.isotropic_fate(visual, 1.0, layers).cosine_to_start)
quote("0.188", theory.isotropic_fate(text, 1.0, layers).cosine_to_start)
for name, norm in (("visual", visual), ("text", text)):
    expected = theory.isotropic_fate(norm, 1.0, layers).cosine_to_start
    assert abs(runs[name].cosine_to_reference.mean[-1] - expected) < 0.005

# %% [markdown]
# 0.990 for the visual token and 0.188 for the text token.
#
# ## When nothing persists
#
# So far no update pointed backward. Let all of them stand at 120 degrees to the token.
#
# **Predict.** A long token is made shorter by such a push, a very short one is made longer. Where do both end?

# %%
with in_style():
    figure, (panel,) = canvas(1, 1, 5.6, 3.0)
    for name, norm in (("visual", visual), ("text", text)):
        backward = theory.evolve(norm, np.ones(120), np.full(120, math.radians(120)))
        panel.plot(backward.norms, label=name, **STYLE[name])
        assert abs(backward.norms[90] - 1.0) < 0.05
    rest = theory.attractor(1.0, math.radians(120))
    panel.axhline(rest.norm, color=GREY, linewidth=0.8, linestyle=":", label="theory: −C/(2 cos φ)")
    panel.set(xlabel="layer", ylabel="norm", yscale="log")
    panel.legend()
Picture(figure, "Both norms end at 1: the gap is gone after about ninety layers.")

# %% [markdown]
# **What to see.** The visual token is shortened by half a unit a layer, in a straight line (curved here by the
# logarithm), until it meets the text token at norm 1. From there on both turn by the same 60 degrees in every layer. No
# gap is left, and no inertia.

# %%
quote("60", rest.turn * DEGREES)
quote("1", rest.norm)

# %% [markdown]
# So persistence depends on where updates point, and where they point is a matter of measurement. In trained models it
# is measured in tutorial 5.
#
# ## Predict a published table
#
# Somebody else measured released models and published the numbers: for the first block, the mean $C/n$, the mean cos φ,
# and separately the mean cosine between $h_1$ and $h_0$. We have a formula that turns the first two into the third. It
# has no parameter that could be fitted.
#
# **Predict.** SmolVLM2's text tokens get an update of five times their own length, slightly backward. What is their
# cosine, roughly?

# %%
print(f"{'model':15}{'tokens':8}{'C/n':>7}{'cos φ':>8}{'measured':>10}{'predicted':>11}")
for row in MEASURED:
    predicted = predicted_cosine(row)
    print(f"{row.model:15}{row.tokens:8}{row.ratio:7.2f}{row.angle_cosine:8.2f}{row.cosine:10.2f}{predicted:11.3f}")
    assert abs(predicted - row.cosine) < 0.04
quote("0.138", predicted_cosine(MEASURED[1]))
quote("0.17", MEASURED[1].cosine)

# %% [markdown]
# All four within 0.04. They differ at all because these are means over tokens, and a formula of means is not the mean
# of the formula. SmolVLM2's text tokens come out at 0.138 and were measured at 0.17.
#
# Look at the column $C/n$ once more, before you go. Qwen3-VL's visual tokens get pushes *twice their own length*. They
# are twenty times as long as text, and still turn by 51 degrees in the first block. A large norm alone does not make a
# token slow: what counts is $C/n$, and nothing forces $C$ to be the same for both. That is the sharpest objection to
# the paper, and it comes from its own formula.

# %%
qwen = MEASURED[2]
quote("51", math.degrees(math.acos(qwen.cosine)))
assert qwen.ratio > 1.9

# %% [markdown]
# ## Exercises
#
# **3.1** After how many layers of directionless updates has the ratio of the norms come down to `ratio`? A function of
# `(n_v, n_t, C, ratio)`.

# %%
my_layers = ...
check("3.1", my_layers)

# %% [markdown]
# **3.2** At which norm do tokens come to rest when every update has size $C$ and the obtuse angle φ? A function of `(C,
# phi)`.

# %%
my_norm = ...
check("3.2", my_norm)

# %% [markdown]
# **3.3** The total turn of the spiral of Theodorus, in radians: a function of `(n, C, layers)`.

# %%
my_total = ...
check("3.3", my_total)

# %% [markdown]
# **What you have now:** everything that geometry alone can say. What it cannot say is how large the pushes are and
# where they point. For that one needs a model. Next: grow one from nothing.
