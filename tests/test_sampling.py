"""Sampling: what is drawn, from which distribution, how it is laid out, and that nothing else is touched."""
import copy
import json
import math
from unittest import mock

import pytest
import torch
from conftest import (CHATML, char_tokenizer, full_logprobs, make_batch, refused, save_tiny, settings, spy,
                      tiny_model, tiny_tokenizer)
from torch.utils._python_dispatch import TorchDispatchMode

import common
import grpo

PROMPTS = [[5, 6, 7], [9], [1, 0, 8, 3, 3, 2], [4, 1], [60, 61, 62, 63], [10], [20, 21], [0]]  # 1 is eos

def generate(model, prompts, group_size, T, temperature=1.0, tokenizer=None, **flags):
    problems, args = [{"prompt": prompt} for prompt in prompts], settings(grpo, max_new_tokens=T, **flags)
    return common.generate(model, tokenizer or tiny_tokenizer(), problems, group_size, temperature, args)

def completions_of(rollout, prompts, group_size=1):
    """The completions as lists. The rollout must be prompts, then completions, padded on the right up to the
    longest, its texts the completions without a stop token, its problems each group_size times in order."""
    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    assert [problem["prompt"] for problem in rollout["problems"]] == prompts
    ends = rollout["attention"].sum(1).tolist()
    completions = [ids[len(p):end] for ids, p, end in zip(rollout["ids"].tolist(), prompts, ends)]
    for name, expected in make_batch(prompts, completions).items():
        assert torch.equal(rollout[name], expected), name
    written = [c[:-1] if ended else c for c, ended in zip(completions, rollout["finished"])]
    assert rollout["texts"] == ["".join(f"t{i}" for i in c) for c in written]
    assert not rollout["sampled_logp"][rollout["mask"] == 0].any()
    return completions

# --- layout

@pytest.mark.parametrize("pad", [None, "t1", "t0"])
def test_completions_end_with_their_first_stop_token(pad, monkeypatch):
    """Also where padding = eos: the first stop token has mask 1, what follows has none. One in the prompt is
    prompt; a second kind stops too. A row without one is not finished, one with it in the last place is.
    Another special token, as <answer> may be, stays in the text: without it no completion would be paid."""
    prompts, model = [[7], [5, 1, 1], [1, 0], [8, 9, 9], [4]], tiny_model()
    written = [[3, 4, 1, 1, 6], [3, 4, 5, 6, 7], [1, 1, 1, 1, 1], [3, 3, 2, 1, 5], [3, 3, 3, 3, 1]]
    sampled = torch.tensor(written), -torch.arange(1.0, 26).view(5, 5)
    monkeypatch.setattr(common, "sample", lambda *_: sampled)
    model.generation_config.eos_token_id, tokenizer = 2, tiny_tokenizer(pad=pad)
    tokenizer.add_special_tokens({"additional_special_tokens": ["t3"]})
    rollout = generate(model, prompts, 1, 5, tokenizer=tokenizer)
    assert completions_of(rollout, prompts) == [[3, 4, 1], [3, 4, 5, 6, 7], [1], [3, 3, 2], [3, 3, 3, 3, 1]]
    assert rollout["finished"].tolist() == [True, False, True, True, True]
    assert rollout["sampled_logp"][0].tolist() == [-1, -2, -3, 0, 0]

def test_tokens_that_stop():
    """Those of generation_config, one or several, and the tokenizer's; neither need have any. And what ends a
    turn in the chat template, if that is a special token: in Qwen2.5's base models it is not eos, 1."""
    model, no_mark = tiny_model(), CHATML.replace("<|im_start|>", "[").replace("<|im_end|>", "]")
    tiny, end = tiny_tokenizer(), char_tokenizer().convert_tokens_to_ids("<|im_end|>")
    for listed, tokenizer, expected in [
            (7, tiny, [1, 7]), ([9, 7], tiny, [1, 7, 9]), (None, tiny, [1]),
            (None, tiny_tokenizer(eos=None), []), (None, char_tokenizer(no_mark), [1]),
            (None, char_tokenizer(CHATML), [1, end])]:
        model.generation_config.eos_token_id = listed
        assert common.stop_ids(model, tokenizer) == expected

# --- which tokens

WINDOW = {"sliding_window": 4}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
FAMILIES = [("qwen2", {}), ("qwen3", {}), ("llama", {}), ("gpt2", {}), ("phi3", {"pad_token_id": 0}),
            ("qwen2", MIXED), ("mistral", WINDOW),  # one layer sees the last four positions only, or both do
            # In these two attention's scale is not 1 / sqrt(head width).
            ("gemma3_text", MIXED | {"query_pre_attn_scalar": 2, "head_dim": 8}),
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True})]
MORE = [(name, {}) for name in "gemma granite cohere olmo2 glm stablelm gpt_neox starcoder2 nemotron".split()]
MORE += [("granite", {"logits_scaling": 8.0}), ("cohere", {"logit_scale": 0.5}), ("gemma2", {"head_dim": 8})]

@pytest.mark.parametrize("family, config", FAMILIES)
@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(family, config, monkeypatch):
    """Of each row alone, by transformers' generate; here with ragged prompts, rows that stop early and are
    dropped, in training mode with gradient checkpointing, one new position at a time."""
    model, T = tiny_model(family, seed=3, **config).eval(), 14

    def alone(stops):
        options = {"do_sample": False, "max_new_tokens": T, "eos_token_id": stops, "pad_token_id": 0}
        return [model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)).long(), **options)[
            0, len(p):].tolist() for p in PROMPTS]
    free = alone([99])
    stops = [free[i][t] for i, t in [(0, 0), (1, 2), (2, 1), (3, 5), (4, 9), (5, 3)]]
    expected = alone([1, *stops])
    assert len(set(map(len, expected))) > 2
    model.generation_config.eos_token_id = stops  # the tokenizer names 1
    model.activation_checkpointing_enable()
    calls = spy(monkeypatch, model.base_model, "forward")
    rollout = generate(model.train(), PROMPTS, 1, T, 0.0)
    assert completions_of(rollout, PROMPTS) == expected and model.training
    assert {call.input_ids.shape[1] for call in calls[1:]} == {1}
    assert len(calls[-1].input_ids) < 8 or len(calls) < T  # rows were dropped, or all were done

@pytest.mark.parametrize("temperature", [0.6, 1.5])
@pytest.mark.parametrize("family, config", FAMILIES + MORE)
@torch.no_grad()
def test_the_samplers_log_probs_are_those_of_the_tokens(family, config, temperature, monkeypatch):
    """In float64, of each row alone and unpadded, also after rows were dropped: log softmax(logits / T). The
    three completions of a prompt lie side by side."""
    torch.manual_seed(0)
    model = tiny_model(family, seed=3, **config)
    exact, calls = copy.deepcopy(model).double(), spy(monkeypatch, model.base_model, "forward")
    model.generation_config.eos_token_id = [7, 30, 50]
    rollout = generate(model, PROMPTS, 3, 20, temperature)
    completions = completions_of(rollout, PROMPTS, 3)
    assert rollout["finished"].tolist() == [c[-1] in (1, 7, 30, 50) for c in completions]
    assert len(set(map(len, completions))) > 5 and rollout["mask"].shape[1] == 20
    assert [tuple(call.input_ids.shape) for call in calls[:2]] == [(8, 6), (24, 1)]  # a prompt is read once
    gap = rollout["sampled_logp"] - full_logprobs(exact.eval(), rollout, temperature)
    assert rollout["sampled_logp"].dtype == torch.float32 and gap.abs().max() < 2e-5

def test_draw_never_takes_what_has_no_chance(monkeypatch):
    """A uniform number of almost 0 or 1, or sums that fall short of 1, do not reach an id with pi = 0, or one
    beyond the last. Sums are in float64: in float32 those of a GPU, which adds in parallel, may fall."""
    logits, many = torch.full((4, 7), -math.inf), torch.linspace(-9, 9, 64_000).sin().view(64, 1000) * 9
    logits[:, [2, 4]], seen, real = 1.0, [], torch.searchsorted
    monkeypatch.setattr(torch, "searchsorted", lambda *given: seen.extend(given) or real(*given))
    for u, expected in [(0.0, 4), (1 - 2 ** -24, 2)]:
        monkeypatch.setattr(torch, "rand", lambda *shape, device: torch.full(shape, u))
        token, logp = common.draw(logits, 0.7)
        assert token.tolist() == [expected] * 4 and logp.tolist() == pytest.approx([math.log(0.5)] * 4)
        assert common.draw(many, 1.0)[0].max() < 1000 and {x.dtype for x in seen} == {torch.float64}

@pytest.mark.parametrize("temperature", [0.6, 1.5])
@torch.no_grad()
def test_samples_come_from_the_softmax_of_whole_logits(family, temperature):
    """Chi-square over all completions of two tokens: a top_k of 3 or a temperature 10 % off would stand out,
    and so would a temperature above 1 that samples and log-probs ignore alike."""
    model = tiny_model(family, vocab_size=6, seed=1, tie_word_embeddings=False)
    N, prompts = 8000, [[3, 4, 2], [5]]
    model.get_output_embeddings().weight.div_(model(torch.tensor([[3, 4, 2]])).logits[0, -1].std())
    possible = [[1]] + [[a, b] for a in (0, 2, 3, 4, 5) for b in range(6)]
    torch.manual_seed(0)
    rollout = generate(model, prompts, N, 2, temperature)
    written = completions_of(rollout, prompts, N)
    for i, prompt in enumerate(prompts):
        logp = full_logprobs(model.eval(), make_batch([prompt] * 31, possible), temperature).sum(1)
        seen, expected = torch.tensor([written[i * N:(i + 1) * N].count(c) for c in possible]), N * logp.exp()
        assert expected.sum() == pytest.approx(N, rel=1e-4) and seen.sum() == N
        terms = ((seen - expected) ** 2 / expected)[expected > 2]
        df = torch.tensor(len(terms) - 1)
        assert (terms.sum() - df) / (2 * df).sqrt() < 5

# --- CUDA graphs, acted out on a CPU

class Graph(list):
    """Stands in for torch.cuda.CUDAGraph: a replay runs the recorded operations on the very same tensors."""
    def replay(self):
        for op, args, kwargs, out in self:
            new = op(*args, **kwargs)
            if not isinstance(new, int) and all(x.alias_info is None for x in op._schema.returns):  # no view
                for old, value in zip(out, new) if isinstance(out, tuple) else [(out, new)]:
                    old.copy_(value)

class Recording(TorchDispatchMode):
    """Stands in for torch.cuda.graph: notes down operations, and takes back what they wrote. To look at a
    value while recording is an error."""
    def __init__(self, graph):
        super().__init__()
        self.graph, self.undo = graph, []

    def __exit__(self, *error):
        super().__exit__(*error)
        for tensor, before in reversed(self.undo):
            tensor.copy_(before)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        for x, argument in zip(args, op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.undo.append((x, x.clone()))
        self.graph.append((op, args, kwargs or {}, op(*args, **kwargs or {})))
        return self.graph[-1][-1]

def with_and_without_graphs(monkeypatch, model, *given, dtype="float32"):
    """Generate twice with the same random numbers. Returns both rollouts, and the shape of attention in each
    recording. In float32 the tokens are equal. Python runs for prompts, and twice for each recording."""
    calls, graphs, rollouts = spy(monkeypatch, model.base_model, "forward"), [], []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(Graph()) or graphs[-1])
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    for model.reader in (common.Reader, common.RecordedReader):
        calls.clear()
        torch.manual_seed(5)
        rollouts.append(generate(model, *given, dtype=dtype))
        for layer in calls[0].cache.layers:
            assert layer.keys.dtype == layer.values.dtype == getattr(torch, dtype)
        assert bool(graphs) == (model.reader is common.RecordedReader)
    for name in ("ids", "attention", "mask", "finished") if dtype == "float32" else ():
        assert torch.equal(rollouts[0][name], rollouts[1][name]), name
    assert len(calls) == 1 + 2 * len(graphs) and calls[0].input_ids.shape[0] == len(given[0])
    return rollouts, [tuple(call.attention_mask.shape) for call in calls[1::2]]

@pytest.mark.parametrize("dtype, close", [("float32", 1e-5), ("bfloat16", 5e-3)])
@pytest.mark.parametrize("family, config", [one for one in FAMILIES if "sliding_window" not in one[1]])
def test_replayed_graphs_write_what_single_calls_do(family, config, dtype, close, monkeypatch):
    """A graph for each dropping of rows. The log-probs of both are those of the training pass."""
    model = tiny_model(family, seed=3, **config)
    model.generation_config.eos_token_id = [1, 7, 30]
    rollouts, recorded = with_and_without_graphs(monkeypatch, model, PROMPTS, 2, 60, 0.8, dtype=dtype)
    assert 2 < len(recorded) < 12
    for rollout in rollouts:
        own = common.token_logprobs(model, rollout, settings(grpo, dtype=dtype, temperature=0.8))
        assert (rollout["sampled_logp"] - own).abs().sum() / rollout["mask"].sum() < close

@pytest.mark.parametrize("lengths, group_size, T, expected", [
    ([1] * 4, 1, 6, [(4, 256)]), ([1] * 4, 2, 6, [(8, 256)]), ([3] * 4, 1, 6, [(4, 256)]),
    ([1] * 2, 2, 300, [(4, 256), (4, 512), (1, 512)]),  # full after 256 tokens, rows dropped after 281
    ([300, 7], 2, 220, [(4, 512), (4, 768)])])  # a prompt longer than the columns that a recording adds
def test_a_new_graph_for_fewer_rows_or_a_full_cache(lengths, group_size, T, expected, monkeypatch):
    """And one for the first token: each with as many rows, and columns in the cache, as listed. A prompt of
    one token looks like a token, and as many rows as prompts like a whole group."""
    model = tiny_model(vocab_size=512, seed=2, num_hidden_layers=1)  # which seldom draws end-of-sequence
    given = [[3 + (i + j) % 50 for j in range(n)] for i, n in enumerate(lengths)], group_size, T, 1.0
    _, recorded = with_and_without_graphs(monkeypatch, model, *given, tiny_tokenizer(512))
    assert recorded == expected

def test_a_model_that_fails_with_cuda_graphs_is_sampled_without(monkeypatch, capsys):
    """One line says why. Sliding windows are never recorded."""
    for error in (RuntimeError("capturing"), SystemExit("are off"), torch.OutOfMemoryError("so little")):
        monkeypatch.setattr(common, "check_model", mock.Mock(side_effect=error))
        for model in (tiny_model(), tiny_model("mistral", **WINDOW)):
            common.use_graphs(model, None, None)
            assert not hasattr(model, "reader")
        assert capsys.readouterr().out.count(f"this model fails: {error}") == 1

# --- evaluation

@pytest.mark.parametrize("rows, column", [(1024, "answer"), (3, "answer"), (3, "")])
def test_evaluate_counts_every_problem_once(rows, column, monkeypatch, tmp_path, capsys):
    """A completion is graded against its own problem, and no more are sampled at a time than in a rollout.
    The reward is right - 0.3, so that accuracy is not to be had from it; without gold answers there is none.
    The greedy completions are not for the reward function, which may cost money."""
    right, paid = {0.6: [0, 1, 0, 1, 0, 1, 1], 0.0: [1, 0, 0, 0, 0, 1, 0]}, []  # sampled and greedy
    problems = [{"question": f"{i}", "answer": f"{i}" if column else "", "prompt": [i] * (1 + i * 3 % 5)}
                for i in range(7)]

    def generate(model, tokenizer, problems, group_size, temperature, args):
        assert len(problems) * group_size <= rows
        texts = [f"#### {p['prompt'][0] if right[temperature][p['prompt'][0]] else 99}" for p in problems]
        lengths = torch.tensor([len(p["prompt"]) + (temperature == 0) for p in problems])
        return {"problems": problems, "texts": texts, "ids": lengths, "finished": lengths < 5,
                "mask": (torch.arange(6) < lengths[:, None]).float()}

    def reward(problems, texts):
        paid.extend(texts)
        return [(text == f"#### {p['question']}") - 0.3 for p, text in zip(problems, texts, strict=True)]
    monkeypatch.setattr(common, "generate", generate)
    args = settings(grpo, temperature=0.6, prompts=rows, group_size=1, answer_column=column, out=tmp_path)
    expected = {"eval_reward": 4 / 7 - 0.3, "eval_completion_length": 20 / 7}
    expected |= {"eval_accuracy": 2 / 7, "eval_sampled_accuracy": 4 / 7} if column else {}
    assert common.evaluate(None, None, problems, reward, args, 20) == pytest.approx(expected)
    records = map(json.loads, (tmp_path / "completions" / "held-out-20.jsonl").read_text().splitlines())
    for record, problem, one, text in zip(records, problems, right[0.6], paid, strict=True):
        tokens, is_right = len(problem.pop("prompt")), bool(one) if column else None
        assert record == problem | {"completion": text, "right": is_right, "reward": pytest.approx(one - 0.3),
                                    "tokens": tokens, "cut_off": tokens == 5}
    assert capsys.readouterr().out.startswith("    | 0\n    | #### 99\n")

def test_evaluations_are_alike_and_their_batches_are_not(monkeypatch, tmp_path):
    """Two draw with the same numbers, so that they differ by the model alone; two batches of one do not."""
    args, calls = settings(grpo, prompts=2, group_size=1, out=tmp_path), spy(monkeypatch, common, "generate")
    problems = [{"prompt": [5, 6], "question": "", "answer": "5"}] * 8
    for seed in (1, 2):
        torch.manual_seed(seed)
        common.evaluate(tiny_model(), tiny_tokenizer(), problems, common.answer_reward, args, 1)
    drawn = [call.result["texts"] for call in calls if call.temperature > 0]
    assert drawn[:4] == drawn[4:] and len({*map(tuple, drawn[:4])}) == 4

# --- the check of a model

def test_the_check_sees_a_difference_of_the_training_pass(tmp_path, monkeypatch, capsys):
    """Of 1 % of the log-probs. It leaves a good model in training mode."""
    args, real = settings(grpo, model=save_tiny(tmp_path)), common.token_logprobs
    assert common.load_policy(args)[0].training
    monkeypatch.setattr(common, "token_logprobs", lambda *given: 1.01 * real(*given))
    with refused(capsys, "--model", "Qwen2ForCausalLM is not supported", "training pass are off"):
        common.load_policy(args)
