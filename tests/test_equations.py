"""The equations of ppo.py, grpo.py and gspo.py, in the order of their numbers. Read this next to the scripts.

Each docstring does the sum, so that you can check it by hand. The tests are written with probabilities:
`objective`, at the end of this file, gives a script their logarithms, and returns J and the push of every
token. The push of a token is dJ/dlog pi: how strongly training raises its log-prob, or lowers it if the push
is negative. A push here is not divided by N. `near` compares numbers.
"""
import pytest
import torch

import grpo
import gspo
import ppo

# eps_low and eps_high, by what they do to the sums below:
CLIP = 0.2, 0.2   # clips a ratio below .8 and above 1.2
WIDE = 0.9, 9     # clips nothing here
COMPLETION = [[0.6, 0.5, 0.72]], [[0.5, 0.4, 0.8]]  # pi and pi_old of one completion: w = 1.2, 1.25, .9

# --- (1) advantages
@pytest.mark.parametrize("script", [grpo, gspo])
def test_1_z_scores_of_two_groups(script):
    """The rewards [1, 0, 0, 0] have the mean .25. The squared differences from it add up to .5625 + 3 x .0625
    = .75; divided by n - 1 = 3 that is .25, so the std is .5. Then .75/.5 = 1.5 and -.25/.5 = -.5; with 1e-4
    added to the .5, they are 1.4997 and -.4999. The next group, [5, 7, 7, 5], has the mean 6 and the std
    root(4/3) = 1.1547, so its advantages are 1/1.1548 = .86595 and -.86595."""
    adv = script.group_advantages(tensor([1, 0, 0, 0, 5, 7, 7, 5]), 4)
    near(adv, [1.4997, -0.4999, -0.4999, -0.4999, -0.86595, 0.86595, 0.86595, -0.86595], 1e-5)

@pytest.mark.parametrize("script", [grpo, gspo])
def test_1_equal_rewards_give_exactly_zero(script):
    """In float32, the mean of twelve rewards of .7 is off by 1e-7. That noise is no advantage. Rewards that
    differ only a little do have one: the std of .5 and .5002 is .0002/root(2) = 1.4142e-4, and the advantages
    are -.0001 and .0001 divided by 2.4142e-4, which is -.41421 and .41421."""
    assert script.group_advantages(torch.full((12,), 0.7), 12).tolist() == [0] * 12
    near(script.group_advantages(tensor([0.5, 0.5002]), 2), [-0.41421, 0.41421], 1e-5)

@pytest.mark.parametrize("gamma, lam, A", [
    (1, 0, [0.1, 0.1, 0.7]),
    (1, 1, [0.9, 0.8, 0.7]),
    (1, 0.95, [0.82675, 0.765, 0.7]),
    (0.5, 1, [0.15, 0.3, 0.7])])
def test_1_ppo_gae(gamma, lam, A):
    """With r = [0, 0, 1], V = [.1, .2, .3] and gamma 1, delta = r + V_next - V = [.1, .1, .7], where V_next
    after the last token is 0. With lambda 0, A is delta. With lambda 1, A is 1 - V. With lambda .95,
    A_1 = .1 + .95 x .7 = .765 and A_0 = .1 + .95 x .765 = .82675. With gamma .5 and lambda 1,
    delta = [0, -.05, .7], A_1 = -.05 + .5 x .7 = .3 and A_0 = 0 + .5 x .3 = .15. The returns are A + V."""
    r = tensor([[0, 0, 1, 9], [1, 9, 9, 9], [0, 0, 9, 1]])
    mask = tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 1]])
    # The second completion has one token, and A = 1 - .3. The third is the first with a foreign text inside.
    V = tensor([[0.1, 0.2, 0.3, 9], [0.3, 9, 9, 9], [0.1, 0.2, 9, 0.3]])
    adv, returns = ppo.gae(r, V, mask, gamma, lam)
    near([adv, (returns - V) * mask], [[[*A, 0], [0.7, 0, 0, 0], [*A[:2], 0, A[2]]]] * 2)

def test_1_whitened_advantages():
    """The trained tokens have A = 1, 3 and 5. Their mean is 3, and the mean squared difference from it is
    (4 + 0 + 4)/3. So the std is 1.632993, and the whitened A are -2/1.632993, 0 and 2/1.632993."""
    A, mask = tensor([[1, 3, 99], [9, 99, 5]]), tensor([[1, 1, 0], [0, 0, 1]])
    near(ppo.whiten(A, mask), [[-1.224745, 0, 0], [0, 0, 1.224745]])

def test_1_explained_variance():
    """R = [1, 2, 3] has the variance 1. R - V = [.5, .5, 1.5] has the mean 5/6, and its squared differences
    add up to 6/9, so its variance is 1/3: V explains 2/3. A constant V explains 0. If all R are equal up to
    rounding, or if there is only one, there is nothing to explain."""
    R, mask = tensor([[1, 2, 9], [3, 9, 9]]), tensor([[1, 1, 0], [1, 0, 0]])
    for V, share in (([[0.5, 1.5, 9], [1.5, 0, 0]], 2 / 3), ([[7, 7, 1], [7, 1, 1]], 0)):
        near(ppo.explained_variance(R, tensor(V), mask).values(), [share])
    assert ppo.explained_variance(R, R, tensor([[1, 0, 0], [0, 0, 0]])) == {}
    for equal in (0.7 + 1e-7 * torch.rand(3, 4), torch.ones(1, 1)):
        assert ppo.explained_variance(equal, torch.rand(equal.shape), torch.ones(equal.shape)) == {}

# --- (2) ratio
@pytest.mark.parametrize("script, J, push", [
    (ppo, 1.116667, [0.4, 0.416667, 0.3]),
    (grpo, 1.116667, [0.4, 0.416667, 0.3]),
    (gspo, 1.105209, [0.368403] * 3)])
def test_2_ratio_of_a_token_or_of_a_completion(script, J, push):
    """The ratios are w = .6/.5, .5/.4, .72/.8 = 1.2, 1.25, .9. With A = 1, J is their mean, 3.35/3, and
    the push of a token is w/3. In GSPO, J is s = (1.2 x 1.25 x .9)^(1/3) = 1.35^(1/3) = 1.105209, and the
    push of every token is s/3."""
    near(objective(script, WIDE, *COMPLETION, [[1]]), (J, [push]))

def test_2_gspo_token_has_an_advantage_for_every_token():
    """--token_level is the paper's GSPO-token, in which every token may have an advantage A_t of its own. The
    ratio s_t of a token has the value of s, but only log pi_t has a gradient in it. So the push is s A_t/3,
    and J is s (1 + 0 - 1)/3 = 0. Where all A_t are equal, the pushes are those of GSPO. Of two equal tokens
    each has the ratio s = w, and the pushes are w A_t/2."""
    found = objective(gspo, WIDE, *COMPLETION, [[1, 0, -1]], token_level=True)
    near(found, (0, [[0.368403, 0, -0.368403]]))
    found = objective(gspo, WIDE, *COMPLETION, [[2, 2, 2]], token_level=True)
    near(found, objective(gspo, WIDE, *COMPLETION, [[2]]))
    found = objective(gspo, WIDE, [[0.5, 0.5]], [[0.4, 0.4]], [[2, 1]], token_level=True)
    near(found, (1.25 * 1.5, [[1.25, 0.625]]))

# --- (3) clip
@pytest.mark.parametrize("script", [ppo, grpo, gspo])
@pytest.mark.parametrize("A, push", [(1, [0.5, 0.9, 1, 1.1, 0]), (-1, [0, -0.9, -1, -1.1, -1.5])])
def test_3_clip_table(script, A, push):
    """Five completions of one token have the ratios w = .5, .9, 1, 1.1, 1.5, and s = w. The push is w A,
    or 0 if the token is clipped: a good token at 1.5, a bad one at .5. A good token at .5 and a bad one
    at 1.5 have gone the wrong way. There the min takes w A, which brings them back."""
    pi = [[0.2], [0.36], [0.4], [0.44], [0.6]]
    near(objective(script, CLIP, pi, [[0.4]] * 5, [[A]] * 5)[1][:, 0], push)

# --- (4) KL
def test_4_ppo_puts_the_penalty_into_the_reward():
    """With beta .1 and pi_old/pi_ref = 2, 1, 1/2 the rewards of the tokens are -.1 ln 2 = -.069315, 0 and
    .069315. The last token also gets the reward of the completion, 1. The second completion has two tokens
    and the reward 5: pi_old/pi_ref = 1, 2 gives 0 and 5 - .069315, and the padding after them gets 0."""
    old, ref = tensor([[0.4, 0.5, 0.2], [0.5, 0.6, 1]]), tensor([[0.2, 0.5, 0.4], [0.5, 0.3, 1]])
    mask, reward = tensor([[1, 1, 1], [1, 1, 0]]), tensor([1, 5])
    rewards = ppo.token_rewards(reward, old.log(), ref.log(), mask, 0.1)
    near(rewards, [[-0.069315, 0, 1.069315], [0, 4.930685, 0]])

@pytest.mark.parametrize("beta, kl, A, J, push", [
    (1, "k3", 0, -0.5, [[1], [-0.5], [0]]),
    (1, "wk3", 0, -0.5, [[0.693147], [-0.693147], [0]]),
    (0.04, "k3", 0.02, 0.06 - 0.04 * 0.5, [[0.06], [0], [0.02]])])
def test_4_grpo_k3(beta, kl, A, J, push):
    """With x = pi_ref/pi = 2, 1/2, 1, k3 = x - ln x - 1 is 1 - .6931, .6931 - .5 and 0. The sum is .5, so
    with A = 0 and beta = 1, J is -.5. At pi = pi_old the push is A + beta (x - 1), equation 21 of the
    GRPO paper: for x = 1/2, A = .02 and beta = .04 it is .02 + .04 (1/2 - 1) = 0. With w k3 the push is
    A + beta ln x."""
    rows = [[0.4]] * 3, [[0.4]] * 3, [[A]] * 3, [[0.8], [0.2], [0.4]]
    near(objective(grpo, CLIP, *rows, beta, kl), (J, push))

@pytest.mark.parametrize("script", [grpo, gspo])
@pytest.mark.parametrize("kl, J, push", [
    ("k3", -0.306853, [0.5, 0.5]), ("wk3", -0.383566, [0.693147, 0.173287])])
def test_4_wk3_is_weighted_by_the_ratio_of_the_token(script, kl, J, push):
    """The ratios are w = 2 and 1/2, so in GSPO s is 1. With x = 2 for both, k3 is 1 - ln 2 = .306853, and the
    mean of w k3 is (2 + .5)/2 x .306853 = .383566. With A = 0 and beta = 1, J is minus the mean, and the push
    is (x - 1)/2 for k3 and w ln x/2 for w k3."""
    rows = [[0.4, 0.1]], [[0.2, 0.2]], [[0]], [[0.8, 0.2]]
    near(objective(script, CLIP, *rows, 1, kl), (J, [push]))

# A vocabulary of four tokens: their probabilities under pi, pi_ref and pi_old, from logits z.
Z = [[0.3, -0.5, 1.1, 0], [0, 0.4, 0.2, -0.7], [0.1, -0.2, 0.9, 0.3]]
PI, REF, OLD = torch.tensor(Z, dtype=torch.float64).softmax(1)[:, :, None]
# The gradients of both KL divergences with respect to the z of pi.
KL_PI_REF = [[-0.056028], [-0.147284], [0.177711], [0.025601]]  # of KL(pi||ref): pi (ln(pi/ref) - KL)
KL_REF_PI = [[-0.011075], [-0.252611], [0.213875], [0.049811]]  # of KL(ref||pi): pi - ref

@pytest.mark.parametrize("kl, old, mean, gradient", [
    ("k3", PI, 0.199658, KL_REF_PI),
    ("wk3", PI, 0.199658, KL_PI_REF),
    ("wk3", OLD, 0.199658, KL_PI_REF),
    ("k3", OLD, 0.244449, [[0.015933], [-0.343106], [0.238485], [0.088689]])])
def test_4_grpo_k3_has_the_gradient_of_kl_ref_pi(kl, old, mean, gradient):
    """For tokens sampled from pi, the mean of k3 is KL(pi||ref), but its expected gradient is that of
    KL(ref||pi). With w k3, both are those of KL(pi||ref), even if the tokens are sampled from pi_old. With k3
    and tokens from pi_old, neither is."""
    rows = [objective(grpo, CLIP, PI[[i]], old[[i]], [[0]], REF[[i]], 1, kl) for i in range(4)]
    # A row is a token i, with chance old_i. Through the softmax, dlog pi_i/dz_j = [i = j] - pi_j.
    c = -old * torch.cat([push for _, push in rows])  # (4, 1)
    found = -sum(chance * J for chance, (J, _) in zip(old[:, 0], rows))
    near([found, c - PI * c.sum()], [mean, gradient])

# --- (5) value loss
@pytest.mark.parametrize("V, R, loss, slope", [
    (1.1, 1.5, 0.08, -0.4), (0.9, 1.5, 0.18, -0.6),  # V is inside the range
    (1.5, 1, 0.125, 0.5), (0.5, 1, 0.125, -0.5),     # V has left it, away from R
    (1.5, 2, 0.32, 0), (0.5, 0, 0.32, 0)])           # V has left it, towards R
def test_5_ppo_value_loss(V, R, loss, slope):
    """V was 1, so clip(V) is within .8 ... 1.2. The loss is half the larger of (V - R)^2 and
    (clip(V) - R)^2, and slope is its derivative by V. Inside the range, the loss is .4^2/2 = .08 and
    .6^2/2 = .18. A V that has left it away from R is brought back: .5^2/2 = .125. A V that has left it
    towards R is held, and its slope is 0: (1.2 - 2)^2/2 = (.8 - 0)^2/2 = .32."""
    values, mask = tensor([[V, V], [V, V]]).requires_grad_(), tensor([[1, 1], [1, 0]])
    old = mask  # the old V is 1 at every token
    found, _ = ppo.value_loss(values, old, R * mask, mask, 0.2)
    slopes = torch.autograd.grad(found, values)[0]  # the loss is a mean over the tokens of a completion
    near([found.item(), slopes], [2 * loss, [[slope / 2, slope / 2], [slope, 0]]])

# --- the mean over the tokens of a completion, and the sum over completions
@pytest.mark.parametrize("script", [ppo, grpo, gspo])
def test_the_mean_over_tokens_weighs_every_completion_alike(script):
    """With A = [1, -1, 1, -1] and w = 1, J is 1 - 1 + 1 - 1 = 0. So the loss is 0, but the pushes A/length
    are not. The mean over all 16 tokens would be (2 - 8 + 4 - 2)/16 = -.25; with the constant 4 x 8 in
    place of 16 it would be -.125."""
    A, lengths = tensor([[1], [-1], [1], [-1]]), tensor([[2], [8], [4], [2]])
    mask = (torch.arange(8) < lengths).double()
    pi = 0.5 ** mask  # on padding the log-probs are 0
    near(objective(script, CLIP, pi, pi, A, mask=mask), (0, A / lengths * mask))

# --- the functions that the tests share
def tensor(numbers):
    return torch.as_tensor(numbers, dtype=torch.float64)

def near(found, expected, within=1e-6):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor(one), tensor(other), rtol=0, atol=within)

def objective(script, eps, pi, old, A, ref=None, beta=0, kl="k3", mask=None, token_level=False):
    """Return J, summed over completions, and the push of every token. pi, old, ref, mask and the pushes have
    the shape (completions, tokens), and A may be (completions, 1). clip_frac, which is logged, must be the
    fraction of tokens that have an advantage, but no push from it."""
    logp, old, A = tensor(pi).log().requires_grad_(), tensor(old).log(), tensor(A)
    mask = torch.ones_like(old) if mask is None else mask
    refs = [] if script is ppo else [None if ref is None else tensor(ref).log()]
    more = {ppo: [], grpo: [beta, kl], gspo: [beta, kl, token_level]}[script]
    loss, stats = script.policy_loss(logp, old, *refs, A, mask, *eps, *more)
    push = torch.autograd.grad(-loss, logp)[0]
    assert beta or stats["clip_frac"] == (((push == 0) & (A * mask != 0)).sum(), mask.sum())
    return -loss.item(), push
