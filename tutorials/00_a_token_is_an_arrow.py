# %% [markdown]
# # 0. A token is an arrow
#
# **Question: what does a layer do to a token when it adds something to it?**
#
# Inside a transformer, a token is a list of numbers. Read the list as an arrow. The arrow has a length, its *norm*, and
# a direction. The direction is what the next layer reads, because the next layer begins by dividing the length away. So
# a token can only say something new by *turning*.
#
# This project is about one fact and its consequences: long arrows are hard to turn.
#
# You need linear algebra and some Python. Each tutorial asks one question and answers it with code that you run. Before
# every measurement there is a line that begins with **Predict.** Write your guess down first. Being wrong is the
# fastest way to learn, and nobody is watching.

# %%
import numpy as np
from exercises import check
from reader import DEGREES, Explorer, Picture, draw_step, quote

import theory
from minillava.style import MODALITY_COLOURS, MODALITY_LINES, canvas, in_style

# %% [markdown]
# ## Two arrows of very different length
#
# LLaVA-1.5 is a language model that can see. It feeds image patches and words into the same layers. The patches arrive
# as *visual tokens*, the words as *text tokens*, and they arrive with these mean norms (the paper *The Unseen Bias*,
# arXiv 2512.08374, measured them):

# %%
visual, text = 39.96, 1.08
quote("37", visual / text)

# %% [markdown]
# A visual token is 37 times as long as a text token. Both of them now meet a layer, and the layer adds an update Δ:
#
# $$h_{\text{after}} = h + \Delta$$
#
# Three numbers describe this step completely: the norm $n$ of $h$, the size $C$ of Δ, and the angle φ between the two.
# Everything happens in the plane that $h$ and Δ span, so a drawing on paper is no simplification, even if the real
# arrows live in 4096 dimensions.
#
# **Predict.** Give both tokens the same update, of size 1, at a right angle. By how many degrees does the text token
# turn? And the visual token?

# %%
with in_style():
    figure, (left, right) = canvas(1, 2, 7.6, 3.0)
    draw_step(left, "text", text, 1.0, np.pi / 2)
    draw_step(right, "visual", visual, 1.0, np.pi / 2)
Picture(figure, "A text token of norm 1.08 turns by 42.8 degrees, a visual token of norm 39.96 by 1.4 degrees.")

# %% [markdown]
# **What to see.** The thin arrow is the token before, grey is the update, the thick arrow is the token after. On the
# left they form a wide open triangle. On the right the update is so small against the token that thin and thick
# coincide.

# %%
turn_text, turn_visual = (float(theory.step_angle(n, 1.0, np.pi / 2)) * DEGREES for n in (text, visual))
quote("42.8", turn_text)
quote("1.4", turn_visual)
quote("30", turn_text / turn_visual)

# %% [markdown]
# The text token turns by 42.8 degrees and the visual token by 1.4 degrees: one turns 30 times as far as the other,
# under the same push. The paper calls this *inertia*. No physics is involved. It is a long triangle next to a wide one.
#
# ## Do it with real vectors
#
# `theory.step_angle` knows only $n$, $C$ and φ. Is that really enough in many dimensions? Take a random token with 4096
# numbers, add a random update to it, measure the angle between before and after, and compare.
#
# **Predict.** How large will the largest difference be, over a hundred tokens?

# %%
rng = np.random.default_rng(0)
h, delta = rng.standard_normal((2, 100, 4096)) * rng.uniform(0.01, 10.0, (2, 100, 1))
n, C, phi = np.linalg.norm(h, axis=-1), np.linalg.norm(delta, axis=-1), theory.angle_between(h, delta)
differences = np.abs(theory.angle_between(h, h + delta) - theory.step_angle(n, C, phi))
print(f"largest difference: {differences.max():.1e} radians")
assert differences.max() < 1e-14

# %% [markdown]
# Nothing but rounding. The formula is not a model of what happens, it *is* what happens. This will matter: whenever a
# prediction fails in later tutorials, the formula is not to blame. One of the numbers that were fed into it is.
#
# ## The three dials
#
# **Predict.** Of the three numbers, the norm $n$ is the one this project is about. Draw θ against $n$ in your head, for
# an update of size 1: once with φ = 60°, where the update points partly forward, and once with φ = 120°, where it
# points partly backward. Where do the two curves start, at $n$ near 0?

# %%
norms = np.logspace(-2, 2, 400)
with in_style():
    figure, (panel,) = canvas(1, 1, 5.6, 3.4)
    for degrees, line in ((60, ":"), (90, "-"), (120, "--")):
        turn = theory.step_angle(norms, 1.0, np.radians(degrees)) * DEGREES
        panel.plot(norms, turn, color="#555555", linestyle=line, label=f"φ = {degrees}°")
        assert (np.diff(turn) < 0).all()
        assert abs(turn[0] - degrees) < 1
    for name, n in (("text", text), ("visual", visual)):
        panel.axvline(
            n, color=MODALITY_COLOURS[name], linestyle=MODALITY_LINES[name], label=f"{name} tokens of LLaVA-1.5"
        )
    panel.set(
        xscale="log", xlabel="norm n of the token, in units of the update", ylabel="turn θ [degrees]", ylim=(0, 125)
    )
    panel.legend()
Picture(figure, "The turn falls with the norm for every angle; it starts at the angle itself and ends at zero.")

# %% [markdown]
# **What to see.** All curves fall, from left to right, without exception. At the far left a token without any length
# simply becomes the update, so it turns by φ. At the far right a long token ignores the update. The two vertical lines
# stand where LLaVA's tokens enter: text on the slope, visual tokens in the flat tail.
#
# That every curve falls is a theorem (R1 in our ledger, `python -m theory verify --claim R1`). You will prove it in
# tutorial 2. What is *not* a theorem is that both tokens receive the same $C$ and the same φ. Keep that doubt warm.
#
# ## Play
#
# The explorer below has all the dials, and as many layers as you like. It is the file
# [docs/explorer.html](../docs/explorer.html): one page without a network or a framework, which also works from the
# keyboard. Try the preset *LLaVA-1.5*, then *Qwen3-VL* with its measured updates, and find out which of the three
# numbers makes Qwen's visual tokens so much quicker than you would think.

# %%
Explorer()

# %% [markdown]
# ## Exercises
#
# `check` accepts every right answer and says what is wrong with a wrong one. `solution("0.1")` (import it from
# `exercises`) prints one, if you must.
#
# **0.1** Write the norm after the step as a function of $n$, $C$ and φ (in radians).

# %%
norm_after = ...
check("0.1", norm_after)

# %% [markdown]
# **0.2** How large must an update at a right angle be to turn a visual token of norm 39.96 by 45 degrees?

# %%
update = ...
check("0.2", update)

# %% [markdown]
# **0.3** The update is shorter than the token. Which angle φ turns the token the *farthest*? Write it as a function of
# $n$ and $C$. (It is not 90 degrees. Draw the circle of all places where the tip of $h + \Delta$ can be.)

# %%
best_angle = ...
check("0.3", best_angle)

# %% [markdown]
# **What you have now:** a token is an arrow, a layer turns it, and a long arrow turns less. Next: why the layer's push
# does not grow with the arrow, which is the whole trouble. That is [tutorial 1](01_pre_norm_in_forty_lines.ipynb).
