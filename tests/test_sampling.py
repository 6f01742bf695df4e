"""Sampling: what is drawn, from which distribution, how it is laid out, and that nothing else is touched."""
import collections
import itertools
import math
import statistics

import pytest
import torch
import transformers
from conftest import make_batch, refused, save_tiny, settings, spy, tiny_model, tiny_tokenizer
from test_logprobs import Live
from torch.utils._python_dispatch import TorchDispatchMode

import common
import grpo

PROMPTS = [[5, 6, 7], [9], [1, 0, 8, 3, 3, 2], [4, 1], [60, 61, 62, 63], [10], [20, 21], [0]]  # 1 is eos

def completions_of(rollout, prompts):
    """The completions as lists. The rollout must be prompts, then completions, padded on the right up to the
    longest, its attention and mask ones and then zeros, its texts the decoded completions."""
    ends = rollout["attention"].sum(1).tolist()
    completions = [ids[len(p):end] for ids, p, end in zip(rollout["ids"].tolist(), prompts, ends)]
    for name, expected in make_batch(prompts, completions).items():
        assert torch.equal(rollout[name], expected), name
    special = (1, 2)
    assert rollout["texts"] == ["".join(f"t{i}" for i in c if i not in special) for c in completions]
    return completions

# --- layout

@pytest.mark.parametrize("pad", [None, "t1", "t0"])
def test_completions_end_with_their_first_stop_token(pad, monkeypatch):
    """Also where padding = eos: the first stop token has mask 1, what follows has none. One in the prompt is
    prompt; a second kind stops too. A row without one is not finished, one with it in the last place is."""
    prompts = [[7], [5, 1, 1], [1, 0], [8, 9, 9], [4]]
    written = [[3, 4, 1, 1, 6], [3, 4, 5, 6, 7], [1, 1, 1, 1, 1], [3, 3, 2, 1, 5], [3, 3, 3, 3, 1]]
    def run(sampler, *_):
        for tokens in torch.tensor(written).T:
            sampler.append(torch.nn.functional.one_hot(tokens, 64).float())
        return sampler.completions()
    monkeypatch.setattr(common.Sampler, "run", run)
    model = tiny_model()
    model.generation_config.eos_token_id = 2
    rollout = common.generate(model, tiny_tokenizer(pad=pad), prompts, 1, 5, 0.0)
    assert completions_of(rollout, prompts) == [[3, 4, 1], [3, 4, 5, 6, 7], [1], [3, 3, 2], [3, 3, 3, 3, 1]]
    assert rollout["finished"].tolist() == [True, False, True, True, True]

@pytest.mark.parametrize("slowly", [False, True])
@pytest.mark.parametrize("prompts, G, T", [
    (PROMPTS, 1, 9), (PROMPTS[:3], 4, 7), ([[5, 6], [7, 8]], 3, 1), (PROMPTS[:3], 64, 40)])
def test_rows_of_a_prompt_lie_side_by_side(prompts, G, T, slowly):
    """P prompts, G completions each: row i answers prompt i // G; every row has between 1 and T tokens."""
    torch.manual_seed(0)
    model, stops = tiny_model(), list(range(1, 64, 6))
    model.sampled_by_transformers = slowly
    model.generation_config.eos_token_id = stops
    rollout = common.generate(model, tiny_tokenizer(), prompts, G, T)
    completions = completions_of(rollout, [prompt for prompt in prompts for _ in range(G)])
    assert all(len(c) == T or c[-1] in stops for c in completions) and max(map(len, completions)) <= T
    assert not any(token in stops for c in completions for token in c[:-1])
    assert rollout["finished"].tolist() == [c[-1] in stops for c in completions]

def test_the_last_rows_of_a_large_rollout_go_on_to_max_new_tokens(monkeypatch):
    """Of 100 rows all but one are done at once. To stop when few go on would cut the longest completions."""
    monkeypatch.setattr(common, "draw", lambda logits, _: torch.tensor([1] * (len(logits) - 1) + [5]))
    rollout = common.generate(tiny_model(), tiny_tokenizer(), [[7, 8]] * 100, max_new_tokens=23)
    assert rollout["mask"].sum(1).tolist() == [1] * 99 + [23]
    assert rollout["finished"].tolist() == [True] * 99 + [False]

def test_tokens_that_stop():
    """Those of generation_config, one or several, and the tokenizer's; neither need have any."""
    model = tiny_model()
    for listed, expected in [(7, [1, 7]), ([9, 7], [1, 7, 9]), (None, [1])]:
        model.generation_config.eos_token_id = listed
        assert common.stop_ids(model, tiny_tokenizer()) == expected
    assert common.stop_ids(model, tiny_tokenizer(eos=None)) == []

# --- which tokens

WINDOW = {"sliding_window": 4}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
FAMILIES = [("qwen2", {}), ("qwen3", {}), ("llama", {}), ("gpt2", {}), ("phi3", {"pad_token_id": 0}),
            ("qwen2", MIXED), ("mistral", WINDOW),  # one layer sees the last four positions only, or both do
            ("gemma3_text", MIXED | {"query_pre_attn_scalar": 2, "head_dim": 8}),  # attention's scale is not
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True})]                   # 1 / sqrt(head width)

@pytest.mark.parametrize("family, config", FAMILIES)
@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(family, config, monkeypatch):
    """Of each row alone, by transformers' generate; here with ragged prompts, rows that stop early and are
    dropped, in training mode with gradient checkpointing, one new position at a time."""
    model, T = tiny_model(family, dtype=torch.float64, seed=3, **config).eval(), 14

    def alone(stops):
        options = {"do_sample": False, "max_new_tokens": T, "eos_token_id": stops, "pad_token_id": 0}
        rows = [(len(p), torch.tensor([p])) for p in PROMPTS]
        return [model.generate(ids, attention_mask=ids * 0 + 1, **options)[0, n:].tolist() for n, ids in rows]
    free = alone([99])
    stops = [1] + [free[i][t] for i, t in [(0, 0), (1, 2), (2, 1), (3, 5), (4, 9)]]
    expected = alone(stops)
    assert len(set(map(len, expected))) > 2
    common.check_model(model, settings(grpo, max_prompt_tokens=16))  # has nothing to say
    model.generation_config.eos_token_id = [i for i in stops if i != 1]  # the tokenizer names 1
    model.activation_checkpointing_enable()
    calls = spy(monkeypatch, common.Sampler, "read")
    rollout = common.generate(model, tiny_tokenizer(), PROMPTS, 1, T, 0.0)
    assert completions_of(rollout, PROMPTS) == expected and model.training
    assert rollout["finished"].tolist() == [c[-1] in stops for c in expected]
    shapes = [tuple(call.ids.shape) for call in calls]
    assert shapes[0] == (8, 6) and {S for _, S in shapes[1:]} == {1} and shapes[-1][0] < 8

@pytest.mark.parametrize("family, config, word", [
    ("electra", {"is_decoder": True, "embedding_size": 16}, "after the head"),
    ("gpt2", {"attn_pdrop": 0.5}, "training mode"),
    ("bart", {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "dropout": 0.0}, "by token")])
def test_a_family_that_would_be_trained_wrongly_is_refused(capsys, family, config, word):
    with refused(capsys, "--model", word):
        common.check_model(tiny_model(family, **config), settings(grpo, max_prompt_tokens=16))

@torch.no_grad()
def test_memory_holds_one_cache():
    """Not another while prompts are repeated for their groups, of one here."""
    model = tiny_model(num_hidden_layers=8)
    with Live(*model.parameters()) as live:
        sampler = common.Sampler(model, PROMPTS, 1, 1000, 1.0, [1])
        sampler.read_prompts()
    assert live.peak < 1.5 * sum(x.nbytes for layer in sampler.cache.layers for x in layer)

def test_sampling_stops_when_all_rows_have():
    """No forward passes for rows that are all done."""
    model, calls = tiny_model(), []
    model.generation_config.eos_token_id = list(range(64))
    model.base_model.register_forward_hook(lambda *_: calls.append(1))
    rollout = common.generate(model, tiny_tokenizer(), PROMPTS, 2, 100)
    assert len(calls) <= 4 and rollout["mask"].tolist() == [[1]] * 16

def chances(model, prompt, possible, temperature):
    """The probability of each completion, from whole logits: the body in its own dtype, the head in
    float64."""
    head = model.get_output_embeddings().weight.double()
    result = []
    for c in possible:
        states = model.base_model(torch.tensor([prompt + list(c)])).last_hidden_state[0]  # (L, H)
        p = (states[len(prompt) - 1:-1].double() @ head.T / temperature).softmax(-1)
        result.append(p[torch.arange(len(c)), list(c)].prod().item())
    return result

def chi_square(model, prompts, T, temperature, draws=8000, vocab=6, stop=1):
    """Per prompt: sum (seen - expected)^2 / expected in standard deviations from its mean, for every possible
    completion of at most T tokens."""
    torch.manual_seed(0)
    rollout = common.generate(model, tiny_tokenizer(), prompts, draws, T, temperature)
    completions = completions_of(rollout, [prompt for prompt in prompts for _ in range(draws)])
    possible = [c for n in range(1, T + 1) for c in itertools.product(range(vocab), repeat=n)
                if stop not in c[:-1] and (n == T or c[-1] == stop)]
    results = []
    for i, prompt in enumerate(prompts):
        expected = [chance * draws for chance in chances(model.eval(), prompt, possible, temperature)]
        assert sum(expected) == pytest.approx(draws, rel=1e-4)
        seen = collections.Counter(map(tuple, completions[i * draws:(i + 1) * draws]))
        cells = [(seen[c], e) for c, e in zip(possible, expected) if e >= 5]
        rest = draws - sum(n for n, _ in cells), draws - sum(e for _, e in cells)  # the rare ones together
        cells += [rest] * (rest[1] > 1)
        df = len(cells) - 1
        results.append((sum((n - e) ** 2 / e for n, e in cells) - df) / math.sqrt(2 * df))
    return results

@pytest.mark.parametrize("temperature", [0.6, 1.5])
@torch.no_grad()
def test_samples_come_from_the_softmax_of_whole_logits(family, temperature):
    """Over all completions of two tokens: a top_k of 3 or a temperature 10 % off would stand out, and so
    would a temperature above 1 that samples and log-probs ignore alike."""
    model = tiny_model(family, vocab_size=6, seed=1, tie_word_embeddings=False)
    model.get_output_embeddings().weight.div_(model(torch.tensor([[3, 4, 2]])).logits[0, -1].std())
    assert max(chi_square(model, [[3, 4, 2], [5]], 2, temperature)) < 5

@torch.no_grad()
def test_slow_samples_come_from_the_same_softmax():
    """Of a model that keeps a state, sampled by transformers' generate: without the model's own settings, and
    without the top_k of 50 that transformers has where nobody asked."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "tie_word_embeddings": False}
    config = transformers.MambaConfig(vocab_size=60, eos_token_id=1, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.lm_head.weight)
    model.lm_head.weight.div_(model(torch.tensor([[3, 4, 2]])).logits[0, -1].std())
    model.generation_config.update(do_sample=True, top_k=3, top_p=0.8, repetition_penalty=2.0)
    common.check_model(model, settings(grpo, max_prompt_tokens=8, max_new_tokens=4))
    assert model.sampled_by_transformers and model.generation_config.top_k == 3
    assert max(chi_square(model, [list(range(3, 23)), [5]], 1, temperature=0.6, vocab=60)) < 5

@pytest.mark.parametrize("slowly", [False, True])
@torch.no_grad()
def test_samples_in_bfloat16_come_from_unrounded_logits(slowly):
    """Logits from 199 to 201, which bfloat16 would round to whole numbers: the log-probs that are trained are
    not rounded, and what is drawn must not be."""
    model = tiny_model(vocab_size=48, dtype=torch.bfloat16, tie_word_embeddings=False).eval()
    prompt = [3, 4, 2]
    h = model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1].double()
    wanted = torch.linspace(199, 201, 48).double()
    model.lm_head.weight.copy_(wanted[:, None] * h / h.square().sum())
    logits = h @ model.lm_head.weight.double().T
    rounded, model.sampled_by_transformers = logits.bfloat16().double(), slowly
    assert (rounded.softmax(0) - logits.softmax(0)).abs().sum() > 0.1  # else nothing is tested
    assert max(chi_square(model, [prompt], 1, 1.0, draws=20000, vocab=48)) < 5

@pytest.mark.parametrize("setting", [
    {"do_sample": True, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "temperature": 0.7},  # Qwen's
    {"do_sample": True, "min_p": 0.5}, {"max_new_tokens": 1, "repetition_penalty": 3.0}])
@torch.no_grad()
def test_generation_config_is_ignored(tmp_path, setting):
    """Whatever a model directory sets, samples come from the plain softmax, and the limit is the caller's."""
    source = save_tiny(tmp_path, generation=setting, vocab_size=48)
    model, _ = common.load_policy(settings(grpo, model=source))
    assert all(getattr(model.generation_config, name) == value for name, value in setting.items())
    assert max(chi_square(model, [[3, 4, 4, 5, 6, 7, 8, 9]], 1, 1.0, vocab=48)) < 5
    assert common.generate(model, tiny_tokenizer(), [[3]] * 4, 4, 6)["mask"].shape[1] > 1

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_a_rollout_leaves_the_model_as_it_was(family, dtype, training, monkeypatch):
    """Every weight keeps its bits and its dtype, the mode is restored, nothing is kept for a gradient."""
    model = tiny_model(family, dtype=dtype).train(training)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    calls = spy(monkeypatch, common.Sampler, "read")
    common.generate(model, tiny_tokenizer(), PROMPTS, 2, 6)
    assert all(module.training is training for module in model.modules())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(call.result.requires_grad for call in calls)

# --- a CUDA graph, acted out on a CPU

class Graph:
    """Stands in for torch.cuda.CUDAGraph: a replay runs the recorded operations on the very same tensors."""
    def __init__(self):
        self.ops, self.replays = [], 0

    def replay(self):
        self.replays += 1
        for op, args, kwargs, out in self.ops:
            new = op(*args, **kwargs)
            new_tensors = not isinstance(new, int) and all(x.alias_info is None for x in op._schema.returns)
            if new_tensors:  # neither a view nor in place
                for old, value in zip(out, new) if isinstance(out, tuple) else [(out, new)]:
                    old.copy_(value)

class Recording(TorchDispatchMode):
    """Stands in for torch.cuda.graph: notes down operations, none of which has happened afterwards. To look
    at a value while recording is an error."""
    def __init__(self, graph):
        super().__init__()
        self.ops, self.undo = graph.ops, []

    def __enter__(self):
        self.rng = torch.get_rng_state()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for tensor, before in reversed(self.undo):
            tensor.copy_(before)
        torch.set_rng_state(self.rng)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        for x, argument in zip(args, op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.undo.append((x, x.clone()))
        out = op(*args, **kwargs or {})
        self.ops.append((op, args, kwargs or {}, out))
        return out

@pytest.mark.upkeep
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replayed_graphs_write_what_single_calls_do(family, temperature, monkeypatch):
    """Each width and each dropping of rows is recorded once: Python runs twice for each, not per token."""

    class Wide(common.Sampler):
        """As on a GPU, where the width grows in steps."""
        def __init__(self, *given):
            super().__init__(*given)
            self.width_step, self.cache.width = 16, common.round_up(self.S, 16)
            self.cache.length = common.round_up(self.cache.length, 16)
            self.ids = torch.nn.functional.pad(self.ids, (0, self.cache.length - self.ids.shape[1]))
    model, rollouts = tiny_model(family, dtype=torch.float64, seed=3), []
    model.generation_config.eos_token_id = [1, 7, 30]
    calls, graphs = spy(monkeypatch, common.Sampler, "read"), []
    for gpu in (False, True):
        calls.clear()
        torch.manual_seed(5)
        rollouts.append(common.generate(model, tiny_tokenizer(), PROMPTS, 2, 60, temperature))
        monkeypatch.setattr(common, "Sampler", Wide)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(Graph()) or graphs[-1])
        monkeypatch.setattr(torch.cuda, "graph", Recording)
    for name in ("ids", "attention", "mask", "finished"):
        assert torch.equal(rollouts[0][name], rollouts[1][name]), name
    assert len(calls) <= 1 + 2 * len(graphs) and sum(g.replays for g in graphs) > 25 and len(graphs) > 4
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)  # --no-cuda_graphs makes none
    common.generate(model, tiny_tokenizer(), PROMPTS, 2, 9, temperature, cuda_graphs=False)

# --- evaluation

@pytest.mark.parametrize("n, rows", [(8, 1024), (8, 12), (1, 3)])
def test_evaluate_counts_every_problem_once(monkeypatch, n, rows):
    """Against counts over all k-subsets, ragged last batches included; 1 and more is right. A completion is
    graded against its own problem, and no more are sampled at a time than in a rollout."""
    rewards = [[0] * 8, [1] * 8, [0, 0.5, 1.5] + [0] * 5, [0, 1] * 4, [0.5] * 8, [1] + [0] * 7, [0] + [1] * 7]
    problems = [{"question": "", "answer": str(i), "prompt": [i] * (1 + i * 3 % 5)} for i in range(7)]

    def generate(model, tokenizer, prompts, group_size, max_new_tokens, temperature, cuda_graphs):
        texts = [f"{p[0]} {j if temperature else 1}" for p in prompts for j in range(group_size)]
        lengths = torch.tensor([len(p) for p in prompts]).repeat_interleave(group_size)
        return {"texts": texts, "ids": lengths, "mask": (torch.arange(6) < lengths[:, None]).float()}

    def reward(asked, texts):
        assert [p["answer"] for p in asked] == [text.split()[0] for text in texts]
        return [rewards[int(i)][int(j)] for i, j in map(str.split, texts)]
    monkeypatch.setattr(common, "generate", generate)
    calls = spy(monkeypatch, common, "generate")
    args = settings(grpo, eval_samples=n, max_new_tokens=5, temperature=0.6, prompts=rows, group_size=1)
    result = common.evaluate(None, None, problems, reward, args)
    expected = {"eval_accuracy": statistics.fmean(row[1] >= 1 for row in rewards),
                "eval_sampled_accuracy": statistics.fmean(r >= 1 for row in rewards for r in row[:n]),
                "eval_reward": statistics.fmean(r for row in rewards for r in row[:n]),
                "eval_completion_length": statistics.fmean(len(p["prompt"]) for p in problems)}
    for k in (2, 4, 8) if n == 8 else ():
        best = [max(subset) for row in rewards for subset in itertools.combinations(row, k)]
        expected[f"eval_pass@{k}"] = sum(x >= 1 for x in best) / len(best)
    assert result == pytest.approx(expected)
    assert {(c.temperature, c.max_new_tokens) for c in calls} == {(0.0, 5), (0.6, 5)}
    assert all(len(c.prompts) * c.group_size <= max(rows, c.group_size) for c in calls)

def test_evaluate_draws_the_same_numbers_every_time():
    """Two evaluations of one policy agree, whatever was drawn before."""
    model, problems = tiny_model(), [{"question": "q", "answer": "a", "prompt": p} for p in PROMPTS]
    args, results = settings(grpo, eval_samples=3, max_new_tokens=6, prompts=3, group_size=4), []
    lengths = lambda problems, completions: list(map(len, completions))  # noqa: E731
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(common.evaluate(model, tiny_tokenizer(), problems, lengths, args))
    assert results[0] == results[1]

def test_no_two_batches_of_an_evaluation_share_their_noise():
    """Twelve times the same question, four at a time: batches that begin with one seed answer alike."""
    problems = [{"question": "q", "answer": "a", "prompt": [5, 6]}] * 12
    args, texts = settings(grpo, eval_samples=1, max_new_tokens=6, prompts=4, group_size=1), []
    reward = lambda problems, completions: texts.append(completions) or [0] * 4  # noqa: E731
    common.evaluate(tiny_model(), tiny_tokenizer(), problems, reward, args)
    greedy, sampled = texts[:3], texts[3:]
    assert greedy[0] == greedy[1] == greedy[2] and len(set(map(tuple, sampled))) == 3

# --- the check of a model

@pytest.mark.parametrize("original", [32, 200])
def test_the_check_reads_a_short_prompt_beside_a_long_one(original):
    """Phi-3's rotary factors change at its original length, for all rows of a batch. Where a run may write
    beyond it, a short row read beside a long one has other logits than alone, and the model was once accepted
    and wrong."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 2, "long_factor": [9.0] * 2}
    rope = {"original_max_position_embeddings": original, "rope_parameters": rope}
    model = tiny_model("phi3", pad_token_id=0, **rope)
    args = settings(grpo, max_prompt_tokens=90, max_new_tokens=30)
    try:
        common.check_model(model, args)
        accepted = not model.sampled_by_transformers
    except SystemExit:
        accepted = False
    assert accepted == (original == 200)
