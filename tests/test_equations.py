"""The equations of ppo.py, grpo.py and gspo.py in the order of their numbers: read it first.

Each docstring does the sum, so that you can check it by hand. You see probabilities, the scripts
get their logs. A slope is dJ/dlog pi: how hard a token is pushed up.
"""
import pytest
import torch

import grpo
import gspo
import ppo

CLIP = "--eps_low .2 --eps_high .2"          # the ratio counts within .8 ... 1.2
UPPER, LOWER = "--eps_low .9 --eps_high .2", "--eps_low .2 --eps_high 9"  # one end of it alone
WIDE = "--eps_low .9 --eps_high 9"           # nothing here is clipped
K3, WK3 = "--beta 1 --kl k3", "--beta 1 --kl wk3"
ROW = [[0.6, 0.5, 0.72]], [[0.5, 0.4, 0.8]]  # pi and old of one row: w = 1.2, 1.25, .9

def tensor(numbers):
    return torch.as_tensor(numbers, dtype=torch.float64)

def near(found, expected, within=1e-6):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor(one), tensor(other), rtol=0, atol=within)

def objective(script, flags, pi, old, A, ref=None, mask=None):
    """J summed over the rows, and its slopes. All are (rows, tokens); A may be (rows, 1)."""
    logp, old, A = tensor(pi).log().requires_grad_(), tensor(old).log(), tensor(A)
    mask = torch.ones_like(old) if mask is None else mask
    refs = [] if script is ppo else [None if ref is None else tensor(ref).log()]
    no_kl = " --beta 0" if script is grpo and ref is None else ""
    args = script.parse_args((flags + no_kl).split())
    loss, _ = script.policy_loss(logp, old, *refs, A, mask, args)
    return -loss.item(), torch.autograd.grad(-loss, logp)[0]

# --- (1) advantages
@pytest.mark.parametrize("script", [grpo, gspo])
def test_1_z_scores_of_two_groups(script):
    """[1, 0, 0, 0]: mean .25; squares .5625 + 3 x .0625 = .75, over n - 1 = 3: .25, its root .5.
    .75/.5 = 1.5 and -.25/.5 = -.5; with 1e-4 added to the .5, 1.4997 and -.4999. The group
    beside it, [5, 7, 7, 5], has mean 6 and deviation root(4/3) = 1.1547: 1/1.1548 = .86595."""
    adv = script.group_advantages(tensor([1, 0, 0, 0, 5, 7, 7, 5]), 4)
    near(adv, [1.4997, -0.4999, -0.4999, -0.4999, -0.86595, 0.86595, 0.86595, -0.86595], 1e-5)

@pytest.mark.parametrize("script", [grpo, gspo])
def test_1_equal_rewards_give_exactly_zero(script):
    """In float32 twelve rewards of .7 miss their own mean by 1e-7: that noise is no advantage."""
    assert script.group_advantages(torch.full((12,), 0.7), 12).tolist() == [0] * 12

@pytest.mark.parametrize("gamma, lam, A", [(1, 0, [0.1, 0.1, 0.7]), (1, 1, [0.9, 0.8, 0.7]),
    (1, 0.95, [0.82675, 0.765, 0.7]), (0.5, 1, [0.15, 0.3, 0.7])])
def test_1_ppo_gae(gamma, lam, A):
    """r = [0, 0, 1], V = [.1, .2, .3]: delta = r + gamma V_next - V = [.1, .1, .7]; V ends at 0.
    lambda 0: delta. lambda 1: 1 - V. .95: A_1 = .1 + .95 x .7 = .765, A_0 = .1 + .95 x .765.
    gamma .5: delta = [0, -.05, .7], A_1 = -.05 + .5 x .7 = .3, A_0 = .5 x .3. Returns: A + V."""
    r, mask = tensor([[0, 0, 1], [1, 9, 9]]), tensor([[1, 1, 1], [1, 0, 0]])
    V = tensor([[0.1, 0.2, 0.3], [0.3, 9, 9]])  # the second row has one token: A = 1 - .3
    adv, returns = ppo.gae(r, V, mask, gamma, lam)
    near([adv, (returns - V) * mask], [[A, [0.7, 0, 0]]] * 2)

# --- (2) ratio
@pytest.mark.parametrize("script, J, slope", [(gspo, 1.105209, [0.368403] * 3),
    (ppo, 1.116667, [0.4, 0.416667, 0.3]), (grpo, 1.116667, [0.4, 0.416667, 0.3])])
def test_2_ratio_of_a_token_or_of_a_sequence(script, J, slope):
    """w = .6/.5, .5/.4, .72/.8 = 1.2, 1.25, .9: at A = 1 J is their mean, 3.35/3; slopes w/3.
    GSPO: J is s = (1.2 x 1.25 x .9)^(1/3) = 1.35^(1/3) = 1.105209; every token's slope is s/3."""
    near(objective(script, WIDE, *ROW, [[1]]), (J, [slope]))

def test_2_gspo_token_has_an_advantage_for_every_token():
    """s_t = s, but only log pi_t moves it: slope s A_t/3; J = s (1 + 0 - 1)/3. Equal A: GSPO."""
    token = WIDE + " --token_level"
    near(objective(gspo, token, *ROW, [[1, 0, -1]]), (0, [[0.368403, 0, -0.368403]]))
    near(objective(gspo, token, *ROW, [[2, 2, 2]]), objective(gspo, WIDE, *ROW, [[2]]))

# --- (3) clip
@pytest.mark.parametrize("script", [ppo, grpo, gspo])
@pytest.mark.parametrize("A, slope", [(1, [0.5, 0.9, 1, 1.1, 0]), (-1, [0, -0.9, -1, -1.1, -1.5])])
def test_3_clip_table(script, A, slope):
    """w = .5, .9, 1, 1.1, 1.5 in rows of one token (so s = w): the slope is w A, or 0 if held.
    Held are good tokens far above 1 and bad ones far below. A good one at .5 and a bad one at
    1.5 went the wrong way: min takes w A, and they come back."""
    pi = [[0.2], [0.36], [0.4], [0.44], [0.6]]
    near(objective(script, CLIP, pi, [[0.4]] * 5, [[A]] * 5)[1][:, 0], slope)

@pytest.mark.parametrize("script", [ppo, grpo, gspo])
@pytest.mark.parametrize("eps, old, A, pi, J", [
    (UPPER, 0.01, 1, [0.005, 0.008, 0.01, 0.012, 0.1, 0.5], [0.5, 0.8, 1, 1.2, 1.2, 1.2]),
    (UPPER, 0.9, 1, [0.8, 0.9, 0.95, 1], [0.889, 1, 1.056, 1.111]),
    (LOWER, 0.9, -1, [0.9, 0.8, 0.72, 0.5, 0.1], [-1, -0.889, -0.8, -0.8, -0.8])])
def test_3_what_a_token_can_gain(script, eps, old, A, pi, J):
    """A good token gains up to 1.2 old: .012 if rare, but only 1/.9 = 1.111 if likely. A bad one
    gains down to .8 x .9 = .72. At .5 w = .556 and J = min(-.556, -.8) = -.8; with A taken out
    of the min, A min(.556, .8) = -.556: wrong where A is below 0."""
    near([objective(script, eps, [[p]], [[old]], [[A]])[0] for p in pi], J, within=5e-4)

@pytest.mark.parametrize("A, J, slope", [(1, 1.1, 0), (-1, -1.105209, -0.368403)])
def test_3_gspo_clips_a_whole_sequence(A, J, slope):
    """s = 1.105209 is above 1.1: at A = 1 no token is pushed, nor is the one whose w is .9."""
    near(objective(gspo, "--eps_low .3 --eps_high .1", *ROW, [[A]]), (J, [[slope] * 3]))

# --- (4) KL penalty. gspo.py has none by default: no test here gives it a reference
def test_4_ppo_puts_the_penalty_into_the_reward():
    """beta .1, old/ref = 2, 1, 1/2: -.1 ln 2 = -.069315, 0, .069315; the last token has the
    score 1 on top. The second row has score 5 and two tokens: nothing comes after them."""
    old, ref = tensor([[0.4, 0.5, 0.2], [0.5, 0.6, 1]]), tensor([[0.2, 0.5, 0.4], [0.5, 0.3, 1]])
    mask, score = tensor([[1, 1, 1], [1, 1, 0]]), tensor([1, 5])
    rewards = ppo.token_rewards(score, old.log(), ref.log(), mask, 0.1)
    near(rewards, [[-0.069315, 0, 1.069315], [0, 4.930685, 0]])

@pytest.mark.parametrize("flags, A, J, slope", [
    (K3, 0, -0.5, [[1], [-0.5], [0]]), (WK3, 0, -0.5, [[0.693147], [-0.693147], [0]]),
    ("--beta .04 --kl k3", 0.02, 0.06 - 0.04 * 0.5, [[0.06], [0], [0.02]])])
def test_4_grpo_k3(flags, A, J, slope):
    """x = ref/pi = 2, 1/2, 1: k3 = x - ln x - 1 = 1 - .6931, .6931 - .5, 0, in sum .5. At pi = old
    the slope is A + beta (x - 1), the paper's eq. 21: .02 + .04 (1/2 - 1) = 0. w k3: beta ln x."""
    rows = [[0.4]] * 3, [[0.4]] * 3, [[A]] * 3, [[0.8], [0.2], [0.4]]
    near(objective(grpo, flags, *rows), (J, slope))

def test_4_grpo_penalty_against_advantage():
    """A .01, beta .02, old .5, pi just below .6 = 1.2 x .5, where the clip begins; ref .5, .1, 0:
    dJ/dpi = A/old - beta (1 - ref/pi)/pi = .02 - .0333 (1 - ref/.6) = .0144, -.0078, -.0133."""
    rows = [[0.6 - 1e-6]] * 3, [[0.5]] * 3, [[0.01]] * 3, [[0.5], [0.1], [1e-50]]
    slope = objective(grpo, CLIP + " --beta .02", *rows)[1]
    near(slope / 0.6, [[0.014444], [-0.007778], [-0.013333]])  # d log pi is d pi/pi

PI, REF, OLD = (tensor(logits).softmax(0)[:, None] for logits in (  # a vocabulary of four
    [0.3, -0.5, 1.1, 0], [0, 0.4, 0.2, -0.7], [0.1, -0.2, 0.9, 0.3]))
REVERSE = [[-0.056028], [-0.147284], [0.177711], [0.025601]]  # KL(pi||ref): pi (ln(pi/ref) - KL)
FORWARD = [[-0.011075], [-0.252611], [0.213875], [0.049811]]  # KL(ref||pi): pi - ref, by logits

def test_4_ppo_penalty_is_the_reverse_kl():
    """Tokens drawn from pi: the mean of ln(pi/ref) is KL(pi||ref) = .199658, and so is its slope.
    By logits: pi is softmax(z), so a slope c by log pi is c - pi sum(c) by z."""
    rewards = ppo.token_rewards(tensor([0] * 4), PI.log(), REF.log(), torch.ones_like(PI), 1)
    c = -PI * objective(ppo, CLIP, PI, PI, rewards)[1]
    near([-(PI * rewards).sum(), c - PI * c.sum()], [0.199658, REVERSE])

@pytest.mark.parametrize("kl, old, mean, slope", [
    (K3, PI, 0.199658, FORWARD), (WK3, PI, 0.199658, REVERSE), (WK3, OLD, 0.199658, REVERSE),
    (K3, OLD, 0.244449, [[0.015933], [-0.343106], [0.238485], [0.088689]])])
def test_4_grpo_k3_has_the_slope_of_the_forward_kl(kl, old, mean, slope):
    """Tokens drawn from pi: the mean of k3 is KL(pi||ref), but its slope is that of KL(ref||pi).
    w k3 has both of KL(pi||ref), also for tokens of an old policy, for which k3 has neither."""
    rows = [objective(grpo, kl, PI[[i]], old[[i]], [[0]], REF[[i]]) for i in range(4)]
    c = -old * torch.cat([push for _, push in rows])
    found = -sum(chance * J for chance, (J, _) in zip(old[:, 0], rows))
    near([found, c - PI * c.sum()], [mean, slope])

# --- (5) value loss
@pytest.mark.parametrize("V, R, loss, slope", [(1.1, 1.5, 0.08, -0.4), (0.9, 1.5, 0.18, -0.6),
    (1.5, 1, 0.125, 0.5), (0.5, 1, 0.125, -0.5), (1.5, 2, 0.32, 0), (0.5, 0, 0.32, 0)])
def test_5_ppo_value_loss(V, R, loss, slope):
    """V was 1, clip(V) is in .8 ... 1.2: half the larger of (V - R)^2 and (clip(V) - R)^2. Within:
    .4^2/2 = .08, .6^2/2 = .18. Outside, and past R: brought back, .5^2/2 = .125. Outside, short
    of R: held, without slope, (1.2 - 2)^2/2 = (.8 - 0)^2/2 = .32."""
    values, mask = tensor([[V, V], [V, V]]).requires_grad_(), tensor([[1, 1], [1, 0]])
    found, _ = ppo.value_loss(values, mask, R * mask, mask, ppo.parse_args(["--eps_value", ".2"]))
    slopes = torch.autograd.grad(found, values)[0]  # a row counts by the mean of its tokens
    near([found.item(), slopes], [2 * loss, [[slope / 2, slope / 2], [slope, 0]]])

# --- the mean over tokens and the sum over rows
@pytest.mark.parametrize("script", [ppo, grpo, gspo])
def test_row_means_weigh_every_completion_alike(script):
    """A = [1, -1, 1, -1], w = 1: J = 1 - 1 + 1 - 1 = 0, a loss of 0; yet the slopes A/length teach.
    The mean of all 16 tokens would be (2 - 8 + 4 - 2)/16 = -.25; over a constant 4 x 8, -.125."""
    A, lengths = tensor([[1], [-1], [1], [-1]]), tensor([[2], [8], [4], [2]])
    mask = (torch.arange(8) < lengths).double()
    pi = 0.5 ** mask  # on padding the log-probs are 0
    near(objective(script, CLIP, pi, pi, A, mask=mask), (0, A / lengths * mask))

@pytest.mark.parametrize("script", [ppo, grpo, gspo])
def test_the_loss_is_a_sum_over_rows(script):
    """A = 1, 2, 3 at w = 1: J = 6, not the mean 2. So rows may go through the model in parts,
    1 and 2 + 3; update() divides each part by the rows of the whole optimiser step."""
    near(objective(script, CLIP, [[0.5]] * 3, [[0.5]] * 3, [[1], [2], [3]]), (6, [[1], [2], [3]]))
