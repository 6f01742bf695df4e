"""Sampling: what is drawn, from which distribution, how it is laid out as a rollout, and that nothing else is touched."""
import argparse
import collections
import itertools
import math

import pytest
import torch
import transformers
from conftest import make_batch, random_batch, save_tiny, tiny_model, tiny_tokenizer

import common

PROMPTS = [[5, 6, 7], [9], [1, 0, 8, 3, 3, 2], [4, 1], [60, 61, 62, 63], [10], [20, 21], [0]]  # eos and padding ids among them
ARGS = argparse.Namespace(dtype="float32", device="cpu", compile=False)


def as_lists(rollout):
    """Prompt plus completion, and completion, of every row, as lists of token ids."""
    rows = [ids[:n] for ids, n in zip(rollout["ids"].tolist(), rollout["attention"].sum(1).tolist())]
    return rows, [row[len(row) - n:] for row, n in zip(rows, rollout["mask"].sum(1).int().tolist())]


def check_layout(rollout, prompts):
    """ids are prompt then completion, padded on the right; attention and mask are ones, then zeros; nothing is trimmed or
    padded too much; texts are the decoded completions."""
    rows, completions = as_lists(rollout)
    assert [row[:len(row) - len(c)] for row, c in zip(rows, completions)] == prompts
    expected = make_batch(prompts, completions)
    for name in ("attention", "mask"):
        assert rollout[name].tolist() == expected[name].tolist(), name
    assert rollout["ids"].shape == expected["ids"].shape and rollout["ids"].dtype == torch.int64
    assert rollout["texts"] == ["".join(f"t{i}" for i in c if i not in (1, 2)) for c in completions]  # t1, t2 are special
    return completions


# --- layout

@pytest.mark.parametrize("pad", [None, "t1", "t0"])
def test_completions_are_cut_after_their_first_stop_token(pad):
    """Traps 1, 2, 3: with padding = eos too, the first eos has mask 1, what follows has none; an eos id in the prompt is
    prompt; a second stop id ends a completion as well; a truncated one is not finished."""
    ids = torch.tensor([[7, 3, 4, 1, 1, 6, 0, 0, 9], [5, 1, 1, 3, 4, 5, 6, 7, 1], [1, 0, 1, 1, 1, 1, 1, 0, 0], [8, 9, 9, 0, 3, 2, 1, 5, 0]])
    rollout = common.as_rollout(ids, torch.tensor([1, 3, 2, 3]), 5, torch.tensor([1, 2]), tiny_tokenizer(pad=pad))
    assert as_lists(rollout) == ([[7, 3, 4, 1], [5, 1, 1, 3, 4, 5, 6, 7], [1, 0, 1], [8, 9, 9, 0, 3, 2]],
                                 [[3, 4, 1], [3, 4, 5, 6, 7], [1], [0, 3, 2]])
    assert rollout["mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert rollout["attention"].tolist() == [[1] * n + [0] * (8 - n) for n in (4, 8, 3, 6)]
    assert rollout["finished"].tolist() == [True, False, True, True] and rollout["mask"].dtype == torch.float32
    assert rollout["texts"] == ["t3t4", "t3t4t5t6t7", "", "t3" if pad == "t0" else "t0t3"]


def test_a_stop_in_the_last_place_counts_as_finished():
    """Trap 40: a completion that ends on its last allowed token is not truncated; columns nobody uses are cut off."""
    ids = torch.tensor([[4, 6, 7, 1, 0, 0, 0], [5, 5, 1, 0, 0, 0, 0]])
    rollout = common.as_rollout(ids, torch.tensor([1, 2]), 5, torch.tensor([1]), tiny_tokenizer())
    assert rollout["ids"].shape == (2, 4) and rollout["mask"].shape == (2, 3) and rollout["finished"].all()


@pytest.mark.parametrize("prompts, G, T", [(PROMPTS, 1, 9), (PROMPTS[:3], 4, 7), ([[5, 6], [7, 8]], 3, 1)])
def test_rows_of_a_prompt_lie_side_by_side(prompts, G, T):
    """P prompts, G completions each: row i answers prompt i // G; every row has between 1 and T tokens."""
    torch.manual_seed(0)
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(1, 64, 6))
    rollout = common.generate(model, tiny_tokenizer(), prompts, G, T)
    rows, completions = as_lists(rollout)
    assert [row[:len(row) - len(c)] for row, c in zip(rows, completions)] == [p for p in prompts for _ in range(G)]
    stops = [[i % 6 == 1 for i in c] for c in completions]
    assert all(1 <= len(c) <= T and not any(s[:-1]) and (s[-1] or len(c) == T) for c, s in zip(completions, stops))
    assert rollout["finished"].tolist() == [s[-1] for s in stops] and (T == 1 or 0 < sum(map(sum, stops)) < len(rows))


# --- which distribution

def greedy_loop(model, prompt, stops, T):
    """Argmax token by token, one row, no cache, no padding."""
    row = list(prompt)
    while len(row) < len(prompt) + T and (len(row) == len(prompt) or row[-1] not in stops):
        row.append(model(torch.tensor([row])).logits[0, -1].argmax().item())
    return row[len(prompt):]


@pytest.mark.parametrize("checkpointing", [False, True])
@torch.no_grad()
def test_greedy_equals_a_loop_without_cache_and_padding(family, checkpointing):
    """Traps 3, 4, 5, 12: ragged prompts, rows that stop early and are dropped, in training mode with
    gradient checkpointing: the ids are those of each row alone (GPT-2 needs its position ids for that)."""
    model, T = tiny_model(family, dtype=torch.float64, seed=3).eval(), 14
    free = [greedy_loop(model, p, [], T) for p in PROMPTS]
    stops = {1} | {free[i][t] for i, t in [(0, 0), (1, 2), (2, 1), (3, 5), (4, 9)]}
    model.generation_config.eos_token_id = sorted(stops - {1})  # the tokenizer names 1
    expected = [greedy_loop(model, p, stops, T) for p in PROMPTS]
    assert len(set(map(len, expected))) > 2  # rows stop at several times
    model.train()
    if checkpointing:
        common.checkpoint_activations(model)
    widths = []
    model.base_model.register_forward_pre_hook(lambda _, args, kw: widths.append(list(kw["input_ids"].shape)), with_kwargs=True)
    rollout = common.generate(model, tiny_tokenizer(), PROMPTS, 1, T, 0.0)
    assert check_layout(rollout, PROMPTS) == expected
    assert rollout["finished"].tolist() == [c[-1] in stops for c in expected]
    assert widths[0] == [8, 6] and all(w == 1 for _, w in widths[1:])  # the cache is used: one new position at a time
    assert model.training and widths[-1][0] < 8  # and finished rows were dropped on the way


def test_sampling_stops_when_all_rows_have():
    """No forward passes for rows that are all done."""
    model, calls = tiny_model(), []
    model.generation_config.eos_token_id = list(range(64))
    model.base_model.register_forward_hook(lambda *_: calls.append(1))
    rollout = common.generate(model, tiny_tokenizer(), PROMPTS, 2, 100)
    assert len(calls) <= 8 and rollout["mask"].tolist() == [[1]] * 16


def outcomes(vocab, T, stop=1):
    """Every completion of at most T tokens."""
    return [c for n in range(1, T + 1) for c in itertools.product(range(vocab), repeat=n)
            if stop not in c[:-1] and (n == T or c[-1] == stop)]


def chi_square(model, prompts, T, temperature, draws=8000, vocab=6):
    """Per prompt: sum (seen - expected)^2 / expected in standard deviations from its mean, the expectation being the
    product of token_logprobs over every possible completion."""
    torch.manual_seed(0)
    rows, completions = as_lists(common.generate(model, tiny_tokenizer(), prompts, draws, T, temperature))
    possible, results = outcomes(vocab, T), []
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            logp = common.token_logprobs(model, make_batch([prompt] * len(possible), list(map(list, possible))), temperature)
        expected = dict(zip(possible, (logp.double().sum(1).exp() * draws).tolist()))
        assert sum(expected.values()) == pytest.approx(draws, rel=1e-4)
        seen = collections.Counter(map(tuple, completions[i * draws:(i + 1) * draws]))
        rare = [c for c, e in expected.items() if e < 5]  # counted together
        cells = [(seen[c], e) for c, e in expected.items() if e >= 5]
        cells += [(sum(seen[c] for c in rare), sum(expected[c] for c in rare))] * bool(rare)
        df = len(cells) - 1
        results.append((sum((n - e) ** 2 / e for n, e in cells) - df) / math.sqrt(2 * df))
    return results


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_samples_come_from_the_distribution_of_token_logprobs(family, temperature):
    """Trap 8: over all completions of two tokens, of a padded and an unpadded prompt, frequencies match exp(sum of
    token_logprobs) at the same temperature; a top_k of 3 or a temperature 10 % off would stand out."""
    model = tiny_model(family, vocab_size=6, seed=1, tie_word_embeddings=False)
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 2]])).logits[0, -1]
        model.get_output_embeddings().weight.mul_(1.0 / logits.std())
    assert max(chi_square(model, [[3, 4, 2], [5]], 2, temperature)) < 5


@pytest.mark.parametrize("setting", [
    dict(do_sample=True, top_p=0.8, top_k=20, repetition_penalty=1.05, temperature=0.7),  # as Qwen ships it
    dict(do_sample=True, min_p=0.5), dict(do_sample=True, top_k=3), dict(max_new_tokens=1, repetition_penalty=3.0)])
def test_generation_config_is_ignored(tmp_path, setting):
    """Trap 9: whatever a model directory sets, samples come from the plain softmax, and the limit is the caller's."""
    path = save_tiny(tmp_path, generation=setting, vocab_size=48)
    model = common.load_model(common.AutoModelForCausalLM, path, ARGS, "--model")
    assert all(getattr(model.generation_config, name) == value for name, value in setting.items())
    assert max(chi_square(model, [[3, 4, 4, 5, 6, 7, 8, 9]], 1, 1.0, draws=8000, vocab=48)) < 5
    assert common.generate(model, tiny_tokenizer(), [[3]] * 4, 4, 6)["mask"].shape[1] > 1


def test_sampling_depends_on_the_seed_alone():
    """The same seed draws the same rollout, another seed another one: what resuming rests on."""
    model, drawn = tiny_model(), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(common.generate(model, tiny_tokenizer(), PROMPTS, 2, 8)["ids"].tolist())
    assert drawn[0] == drawn[1] != drawn[2]


# --- the GPU's way: recorded, replayed, compiled

class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """What recording a CUDA graph does, on a CPU: operations are noted down and nothing has happened afterwards; a replay
    runs them again on the very same tensors, without Python; to look at a value while recording is an error."""
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
        if op in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        written = [x for x, a in zip(args, op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.undo += [(x, x.clone()) for x in written]
        out = op(*args, **kwargs or {})
        self.ops.append((op, args, kwargs or {}, out))
        return out


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""
    made = []

    def __init__(self):
        self.ops, self.replays = [], 0
        Graph.made.append(self)

    def replay(self):
        self.replays += 1
        for op, args, kwargs, out in self.ops:
            new = op(*args, **kwargs)
            if all(r.alias_info is None for r in op._schema.returns):  # neither a view nor in place
                for a, b in zip(out, new) if isinstance(out, tuple) else [(out, new)]:
                    if torch.is_tensor(a):
                        a.copy_(b)


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Recorder)
    monkeypatch.setitem(common.GRAIN, "cpu", 16)
    return Graph.made


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replayed_graphs_write_what_single_calls_do(family, temperature, grouped, recorded, monkeypatch):
    """Every width and every closing up of the rows is recorded once, and Python runs twice for each, not once a token."""
    model, T = tiny_model(family, dtype=torch.float64, seed=3), 40
    if grouped:
        model.set_attn_implementation("sdpa_grouped")
    model.generation_config.eos_token_id = [1, 7, 30]
    model.cuda_graphs, calls = True, []
    model.base_model.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(5)
    ours = common.generate(model, tiny_tokenizer(), PROMPTS, 2, T, temperature)
    assert len(calls) <= 1 + 2 * len(recorded) + 4 and sum(g.replays for g in recorded) > 10 and len(recorded) > 2
    model.cuda_graphs = False
    monkeypatch.setitem(common.GRAIN, "cpu", 1)
    model.set_attn_implementation("sdpa")
    torch.manual_seed(5)
    plain = common.generate(model, tiny_tokenizer(), PROMPTS, 2, T, temperature)
    assert len(set(plain["mask"].sum(1).tolist())) > (2 if temperature else 0)
    for name in ("ids", "attention", "mask", "finished"):
        assert torch.equal(ours[name], plain[name]), name


def test_what_cannot_be_recorded_names_the_flag_and_the_cause(recorded, capsys, monkeypatch):
    """A model that looks at a value while it decodes; CUDA then complains of the broken recording as well."""
    def leave(self, *error):
        Recorder.__exit__(self, *error)
        raise RuntimeError("a previous error")
    monkeypatch.setattr(torch.cuda, "graph", type("Broken", (Recorder,), {"__exit__": leave}))
    model = tiny_model()
    model.generation_config.eos_token_id = [1]
    model.base_model.register_forward_pre_hook(lambda _, args, kw: kw["input_ids"].sum().item() and None, with_kwargs=True)
    model.cuda_graphs = True
    with pytest.raises(SystemExit) as stop:
        common.generate(model, tiny_tokenizer(), PROMPTS, 1, 20)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "--no-cuda_graphs" in said and "not permitted" in said


def test_prompts_may_be_read_a_few_at_a_time(family, monkeypatch):
    """For memory's sake; what is written stays the same, groups included."""
    model, ids = tiny_model(family, dtype=torch.float64, seed=3), []
    for positions in (16384, 1, 2 * max(map(len, PROMPTS))):
        monkeypatch.setattr(common.Decoding, "PREFILL", positions)
        torch.manual_seed(5)
        ids.append(common.generate(model, tiny_tokenizer(), PROMPTS, 3, 12)["ids"])
    assert torch.equal(ids[0], ids[1]) and torch.equal(ids[0], ids[2])


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (6, 1), (4, 4)])
def test_grouped_queries_attend_as_repeated_keys_do(heads, kv_heads):
    """A masked single query against softmax(q k / sqrt(D)) v by hand, keys and values repeated for each query head."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, s, 8, generator=g, dtype=torch.float64) for n, s in [(heads, 1), (kv_heads, 9), (kv_heads, 9)])
    mask = torch.arange(9) <= torch.tensor([0, 4, 8])[:, None, None, None]
    module = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads
    ours, _ = common.grouped_attention(module, q, k, v, mask, scaling=8 ** -0.5)
    for row, head in itertools.product(range(3), range(heads)):
        seen = [0, 4, 8][row] + 1
        keys, values = (x[row, head * kv_heads // heads, :seen] for x in (k, v))
        expected = (keys @ q[row, head, 0] / 8 ** 0.5).softmax(0) @ values
        torch.testing.assert_close(ours[row, 0, head], expected)


MIXED = dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=4)


@pytest.mark.parametrize("settings", [MIXED, None])
@torch.no_grad()
def test_layers_with_a_sliding_window_see_no_further(settings):
    """Cached decoding equals whole forward passes where a layer sees the last four positions only (Qwen2 mixed, Mistral all)."""
    if settings is None:
        model = transformers.MistralForCausalLM(transformers.MistralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            sliding_window=4, eos_token_id=1, bos_token_id=None)).double().eval()
        for p in model.parameters():
            p.mul_(5 if p.dim() == 2 else 1)
    else:
        model = tiny_model(dtype=torch.float64, seed=3, **settings).eval()
    rollout = common.generate(model, tiny_tokenizer(), PROMPTS, 1, 12, 0.0)
    assert check_layout(rollout, PROMPTS) == [greedy_loop(model, p, [1], 12) for p in PROMPTS]


SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             eos_token_id=1, bos_token_id=None, pad_token_id=0)


@pytest.mark.parametrize("name, settings, refusal", [
    ("Granite", dict(logits_scaling=8.0), "changes its logits"), ("Gemma2", dict(head_dim=8), "changes its logits"),
    ("Mamba", {}, "not of keys and values"), ("Mistral", {}, None), ("Phi3", {}, None), ("Gemma", dict(head_dim=8), None),
    ("OPT", dict(ffn_dim=64, word_embed_proj_dim=32), None), ("Llama", {}, "token by token")])
def test_a_model_that_cannot_be_sampled_or_scored_is_refused(monkeypatch, capsys, name, settings, refusal):
    """Of other families, some scale or cap their logits, some keep no keys and values; Llama is made to lose a layer's."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**SIZES | settings))
    for p in model.parameters():
        p.data.mul_(5 if p.dim() == 2 else 1)
    if name == "Llama":
        monkeypatch.setattr(common.Decoding, "update", lambda self, keys, values, *_: (keys, values))
        monkeypatch.setattr(common.Decoding, "forward", lambda self, model, ids, positions, width: model.base_model(
            input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state)
    if refusal is None:
        common.check_model(model, "path")
        assert model.training and common.generate(model, tiny_tokenizer(), PROMPTS, 1, 5)["mask"].shape[1] > 1
    else:
        with pytest.raises(SystemExit) as stop:
            common.check_model(model, "path")
        assert stop.value.code == 2 and refusal in capsys.readouterr().err


@pytest.mark.upkeep
@pytest.mark.parametrize("what", ["decode", "layers"])
def test_compiled_models_say_the_same(what):
    """The real compiler: greedy ids, log-probs and gradients are those of the plain model, for several shapes."""
    plain, fast = (tiny_model(num_hidden_layers=1, seed=3) for _ in range(2))
    common.checkpoint_activations(plain), common.checkpoint_activations(fast)
    if what == "decode":
        fast.decode = torch.compile(common.decode, dynamic=True)
    else:
        common.compile_layers(fast)
    for seed, model in itertools.product(range(2), (plain, fast)):
        model.rollout = common.generate(model, tiny_tokenizer(), PROMPTS[:4 + seed], 2, 12 + seed, 0.0)["ids"]
        model.zero_grad()
        for part in common.micro_batches(random_batch(9, seed), 80):
            common.token_logprobs(model, part, 0.7).sum().backward()
        assert torch.equal(plain.rollout, model.rollout)
        for a, b in zip(plain.parameters(), model.parameters()):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.upkeep
def test_every_layer_of_every_model_is_compiled_and_stays_so(monkeypatch):
    """Ten layers and a value model of the same class, after the check at load and a rollout: no limit has been reached."""
    ran = []

    def backend(graph, _):
        return lambda *inputs: ran.append(1) or graph.forward(*inputs)
    monkeypatch.setattr(common.GradientCheckpointingLayer, "compile", lambda layer, **settings: torch.nn.Module.compile(
        layer, backend=backend, **settings))
    torch._dynamo.reset()
    policy = tiny_model(num_hidden_layers=10).train()
    config = transformers.Qwen2Config(**policy.config.to_dict() | {"num_labels": 1})
    value = transformers.AutoModelForTokenClassification.from_config(config, dtype=torch.float32).train()
    for model in (policy, value):
        common.compile_layers(model)
    for seed in range(3):
        common.generate(policy, tiny_tokenizer(), PROMPTS[:3 + seed], 2, 12)
        for part in common.micro_batches(random_batch(9, seed), 80):
            for model, grad in itertools.product((policy, value), (False, True)):
                ran.clear()
                with torch.set_grad_enabled(grad):
                    common.token_logprobs(model, part, 0.7) if model is policy else common.token_values(model, part)
                assert len(ran) == 10
    torch._dynamo.reset()


# --- nothing else is touched

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_a_rollout_leaves_the_model_as_it_was(family, dtype, training):
    """Traps 12, 13: every weight keeps its bits and its dtype, the mode is restored, nothing requires or has a gradient."""
    model = tiny_model(family, dtype=dtype).train(training)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    rollout = common.generate(model, tiny_tokenizer(), PROMPTS, 2, 6)
    assert model.training is training and all(m.training is training for m in model.modules())
    after = model.state_dict()
    assert all(torch.equal(w, after[name]) and w.dtype == after[name].dtype for name, w in before.items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(x.requires_grad for x in rollout.values() if torch.is_tensor(x))


# --- evaluation

def test_pass_at_k():
    """EQUATIONS.md: n=8, c=2 -> .25, .46429, .78571; and the share of all k-subsets that hold a right sample."""
    assert [common.pass_at_k(8, 2, k) for k in (1, 2, 4)] == pytest.approx([0.25, 0.46429, 0.78571], abs=1e-5)
    for n, c, k in itertools.product([1, 4, 6], range(7), range(1, 7)):
        if max(c, k) <= n:
            subsets = list(itertools.combinations(range(n), k))
            assert common.pass_at_k(n, c, k) == pytest.approx(sum(min(s) < c for s in subsets) / len(subsets))


@pytest.mark.parametrize("n, rows", [(4, 1024), (4, 12), (1, 3), (0, 2)])
def test_evaluate_counts_every_problem_once(monkeypatch, n, rows):
    """Ragged last batches included: greedy accuracy, mean over samples and pass@k against a count by hand; each completion
    is graded against its own problem, and no more are sampled at a time than in a rollout."""
    problems = [{"question": str(i), "answer": str(i), "prompt": [i] * (1 + i * 3 % 5)} for i in range(7)]
    right = [0, 4, 1, 2, 0, 3, 4]  # of 4 samples of problem i, the first so many are right; greedy where it is odd
    calls = []

    def generate(model, tokenizer, prompts, group_size, max_new_tokens, temperature):
        calls.append((len(prompts), group_size, max_new_tokens, temperature))
        texts = [f"{p[0]}:{right[p[0]] % 2 if temperature == 0 else int(j < right[p[0]])}" for p in prompts for j in range(group_size)]
        lengths = torch.tensor([len(p) for p in prompts for _ in range(group_size)])
        return {"texts": texts, "mask": (torch.arange(6) < lengths[:, None]).float()}

    def reward(asked, texts):
        assert [p["answer"] for p in asked] == [text.split(":")[0] for text in texts]
        return torch.tensor([float(text.split(":")[1]) for text in texts])
    monkeypatch.setattr(common, "generate", generate)
    args = argparse.Namespace(reward_model=None, seed=0, eval_samples=n, max_new_tokens=5, temperature=0.6, prompts=rows, group_size=1)
    result = common.evaluate(None, None, problems, reward, args)
    assert result["eval_accuracy"] == pytest.approx(2 / 7)
    assert {(t, T) for _, _, T, t in calls} == {(0.0, 5), (0.6, 5)} - ({(0.6, 5)} if n == 0 else set())
    assert all(p * g <= max(rows, g) for p, g, _, _ in calls)
    if n == 4:
        assert result["eval_sampled_accuracy"] == pytest.approx(sum(right) / 28)
        for k in (2, 4):
            assert result[f"eval_pass@{k}"] == pytest.approx(sum(1 - math.comb(4 - c, k) / math.comb(4, k) for c in right) / 7)
        assert result["eval_completion_length"] == pytest.approx(sum(len(p["prompt"]) for p in problems) / 7)
    elif n == 1:
        assert result["eval_sampled_accuracy"] == pytest.approx(5 / 7)
    assert not any("pass@" in name for name in result) or n > 1


def test_evaluate_draws_the_same_numbers_every_time():
    """Two evaluations of one policy agree, whatever was drawn before, and greedy decoding draws nothing."""
    model, problems = tiny_model(), [{"question": "q", "answer": "a", "prompt": p} for p in PROMPTS]
    args = argparse.Namespace(reward_model=None, seed=0, eval_samples=3, max_new_tokens=6, temperature=1.0, prompts=3, group_size=4)
    reward = lambda asked, texts: torch.tensor([len(t) / 7 + hash(t) % 97 for t in texts])  # noqa: E731
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(common.evaluate(model, tiny_tokenizer(), problems, reward, args))
    assert results[0] == results[1]
