"""Sampling: what is drawn, from which distribution, how it is laid out, and that nothing else is touched."""
import copy
import json
import math

import pytest
import torch
from conftest import (CHATML, char_tokenizer, full_logprobs, make_batch, refused, save_tiny, settings, spy,
                      tiny_model, tiny_tokenizer)
from torch.utils._python_dispatch import TorchDispatchMode

import common
import grpo

PROMPTS = [[5, 6, 7], [9], [1, 0, 8, 3, 3, 2], [4, 1], [60, 61, 62, 63], [10], [20, 21], [0]]  # 1 is eos

def generate(model, prompts, group_size, T, temperature=1.0, **flags):
    args = settings(grpo, max_new_tokens=T, **flags)
    return common.generate(model, tiny_tokenizer(), prompts, group_size, temperature, args)

def completions_of(rollout, prompts):
    """The completions as lists. The rollout must be prompts, then completions, padded on the right up to the
    longest, its attention and mask ones and then zeros, its texts the completions without a stop token."""
    ends = rollout["attention"].sum(1).tolist()
    completions = [ids[len(p):end] for ids, p, end in zip(rollout["ids"].tolist(), prompts, ends)]
    for name, expected in make_batch(prompts, completions).items():
        assert torch.equal(rollout[name], expected), name
    written = [c[:-1] if ended else c for c, ended in zip(completions, rollout["finished"])]
    assert rollout["texts"] == ["".join(f"t{i}" for i in c) for c in written]
    logp = rollout["sampled_logp"]
    assert logp.dtype == torch.float32 and not logp[rollout["mask"] == 0].any()
    return completions

# --- layout

@pytest.mark.parametrize("pad", [None, "t1", "t0"])
def test_completions_end_with_their_first_stop_token(pad, monkeypatch):
    """Also where padding = eos: the first stop token has mask 1, what follows has none. One in the prompt is
    prompt; a second kind stops too. A row without one is not finished, one with it in the last place is."""
    prompts = [[7], [5, 1, 1], [1, 0], [8, 9, 9], [4]]
    written = [[3, 4, 1, 1, 6], [3, 4, 5, 6, 7], [1, 1, 1, 1, 1], [3, 3, 2, 1, 5], [3, 3, 3, 3, 1]]
    logp = -torch.arange(1.0, 26).view(5, 5)
    monkeypatch.setattr(common, "sample", lambda *_: (torch.tensor(written), logp))
    model, args = tiny_model(), settings(grpo)
    model.generation_config.eos_token_id = 2
    rollout = common.generate(model, tiny_tokenizer(pad=pad), prompts, 1, 0.0, args)
    assert completions_of(rollout, prompts) == [[3, 4, 1], [3, 4, 5, 6, 7], [1], [3, 3, 2], [3, 3, 3, 3, 1]]
    assert rollout["finished"].tolist() == [True, False, True, True, True]
    assert rollout["sampled_logp"][0].tolist() == [-1, -2, -3, 0, 0]

def test_tokens_that_stop():
    """Those of generation_config, one or several, and the tokenizer's; neither need have any. And what ends a
    turn in the chat template, if that is a special token: in Qwen2.5's base models it is not eos."""
    model = tiny_model()
    for listed, expected in [(7, [1, 7]), ([9, 7], [1, 7, 9]), (None, [1])]:
        model.generation_config.eos_token_id = listed
        assert common.stop_ids(model, tiny_tokenizer()) == expected
    assert common.stop_ids(model, tiny_tokenizer(eos=None)) == []
    plain = CHATML.replace("<|im_start|>", "[").replace("<|im_end|>", "]")
    for chat, expected in [(CHATML, ["<eos>", "<|im_end|>"]), (plain, ["<eos>"])]:
        tokenizer = char_tokenizer(chat)
        assert tokenizer.convert_ids_to_tokens(common.stop_ids(model, tokenizer)) == expected

def test_special_tokens_that_mark_the_answer_stay_in_the_text(monkeypatch):
    """Without them no completion of such a model would ever be paid."""
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    ids = tokenizer("4? <answer>5</answer>")["input_ids"] + [1]
    monkeypatch.setattr(common, "sample", lambda *_: (torch.tensor([ids]), torch.zeros(1, len(ids))))
    rollout = common.generate(tiny_model(), tokenizer, [[7]], 1, 1.0, settings(grpo))
    assert rollout["texts"] == ["4? <answer>5</answer>"] and rollout["finished"].all()
    assert common.rewards_of(common.answer_reward, [{"answer": "5"}], rollout).tolist() == [1]

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
    stops = [1] + [free[i][t] for i, t in [(0, 0), (1, 2), (2, 1), (3, 5), (4, 9), (5, 3)]]
    expected = alone(stops)
    assert len(set(map(len, expected))) > 2
    model.generation_config.eos_token_id = [i for i in stops if i != 1]  # the tokenizer names 1
    model.activation_checkpointing_enable()
    calls = spy(monkeypatch, common.Reader, "read")
    rollout = generate(model.train(), PROMPTS, 1, T, 0.0)
    assert completions_of(rollout, PROMPTS) == expected and model.training
    shapes = [tuple(call.ids.shape) for call in calls]
    assert {S for _, S in shapes[1:]} == {1}
    assert shapes[-1][0] < 8 or len(shapes) < T  # rows were dropped, or all were done

@pytest.mark.parametrize("temperature", [0.6, 1.5])
@pytest.mark.parametrize("family, config", FAMILIES + MORE)
@torch.no_grad()
def test_the_samplers_log_probs_are_those_of_the_tokens(family, config, temperature, monkeypatch):
    """In float64, of each row alone and unpadded, also after rows were dropped: log softmax(logits / T). The
    three completions of a prompt lie side by side."""
    torch.manual_seed(0)
    model, calls = tiny_model(family, seed=3, **config), spy(monkeypatch, common.Reader, "read")
    model.generation_config.eos_token_id = [7, 30, 50]
    rollout = generate(model, PROMPTS, 3, 20, temperature)
    completions = completions_of(rollout, [prompt for prompt in PROMPTS for _ in range(3)])
    assert rollout["finished"].tolist() == [c[-1] in (1, 7, 30, 50) for c in completions]
    assert len(set(map(len, completions))) > 5 and rollout["mask"].shape[1] == 20
    assert [tuple(call.ids.shape) for call in calls[:2]] == [(8, 6), (24, 1)]  # a prompt is read once
    exact = full_logprobs(copy.deepcopy(model).double().eval(), rollout, temperature)
    torch.testing.assert_close(rollout["sampled_logp"].double(), exact, rtol=0, atol=2e-5)

def test_draw_never_takes_what_has_no_chance(monkeypatch):
    """A uniform number of almost 0 or 1, or sums that fall short of 1, do not reach an id with pi = 0, or one
    beyond the last. Sums are in float64: in float32 those of a GPU, which adds in parallel, may fall."""
    torch.manual_seed(1)
    logits, many = torch.full((4, 7), -math.inf), torch.randn(64, 1000) * 3
    seen, real = [], torch.searchsorted
    logits[:, [2, 4]] = 1.0
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
    written = completions_of(rollout, [prompt for prompt in prompts for _ in range(N)])
    for i, prompt in enumerate(prompts):
        logp = full_logprobs(model.eval(), make_batch([prompt] * 31, possible), temperature).sum(1)
        seen = torch.tensor([written[i * N:(i + 1) * N].count(c) for c in possible])
        expected = N * logp.exp()
        assert expected.sum() == pytest.approx(N, rel=1e-4) and seen.sum() == N
        common_ones = expected > 2
        chi_square = ((seen - expected) ** 2 / expected)[common_ones].sum()
        df = common_ones.sum() - 1
        assert (chi_square - df) / (2 * df).sqrt() < 5

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

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family, config", [one for one in FAMILIES if "sliding_window" not in one[1]])
def test_replayed_graphs_write_what_single_calls_do(family, config, dtype, monkeypatch):
    """A graph for each dropping of rows: Python runs twice for each. The cache is in --dtype."""
    model, rollouts, graphs = tiny_model(family, seed=3, **config), [], []
    model.generation_config.eos_token_id = [1, 7, 30]
    calls = spy(monkeypatch, common.Reader, "read")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(Graph()) or graphs[-1])
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    for model.reader in (common.Reader, common.RecordedReader):
        calls.clear()
        torch.manual_seed(5)
        rollouts.append(generate(model, PROMPTS, 2, 60, 0.8, dtype=dtype))
        layers = calls[0].self.cache.layers
        assert {x.dtype for layer in layers for x in (layer.keys, layer.values)} == {getattr(torch, dtype)}
    assert 2 < len(graphs) < 12 and len(calls) == 1 + 2 * len(graphs)
    for name in ("ids", "attention", "mask", "finished") if dtype == "float32" else ():
        assert torch.equal(rollouts[0][name], rollouts[1][name]), name
    for rollout in rollouts:
        own = common.token_logprobs(model, rollout, settings(grpo, dtype=dtype, temperature=0.8))
        gap = (rollout["sampled_logp"] - own).abs().sum() / rollout["mask"].sum()
        assert gap < {"float32": 1e-5, "bfloat16": 5e-3}[dtype]

@pytest.mark.parametrize("S, group_size", [(1, 1), (1, 2), (3, 1)])
def test_short_prompts_are_read_and_not_recorded(S, group_size, monkeypatch):
    """A prompt of one token looks like a token, and as many rows as prompts like a whole group."""
    model, rollouts, graphs = tiny_model(seed=3), [], []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(Graph()) or graphs[-1])
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    for model.reader in (common.Reader, common.RecordedReader):
        torch.manual_seed(5)
        rollouts.append(generate(model, [list(range(3, 3 + S))] * 4, group_size, 6, 0.8))
        assert bool(graphs) == (model.reader is common.RecordedReader)
    assert torch.equal(rollouts[0]["ids"], rollouts[1]["ids"])

def test_a_model_that_fails_with_cuda_graphs_is_sampled_without(monkeypatch, capsys):
    """One line says why. Too little memory is another matter, and sliding windows are never recorded."""
    def check(model, tokenizer, args):
        assert model.reader is common.RecordedReader
        raise error
    monkeypatch.setattr(common, "check_model", check)
    for error in (RuntimeError("capturing"), SystemExit("are off")):
        for model in (tiny_model(), tiny_model("mistral", **WINDOW)):
            common.use_graphs(model, None, None)
            assert not hasattr(model, "reader")
        assert capsys.readouterr().out.count(f"this model fails: {error}") == 1
    error = torch.OutOfMemoryError()
    with pytest.raises(torch.OutOfMemoryError):
        common.use_graphs(tiny_model(), None, None)

# --- evaluation

@pytest.mark.parametrize("column", ["answer", ""])
@pytest.mark.parametrize("rows", [1024, 3])
def test_evaluate_counts_every_problem_once(rows, column, monkeypatch, tmp_path):
    """A completion is graded against its own problem, and no more are sampled at a time than in a rollout.
    The reward is right - 0.3, so that accuracy is not to be had from it; without gold answers there is none.
    The greedy completions are not for the reward function, which may cost money."""
    sampled, greedy = [0, 1, 0, 1, 0, 1, 1], [1, 0, 0, 0, 0, 1, 0]  # 1 is a right answer
    problems = [{"question": f"{i}?", "answer": str(i), "prompt": [i] * (1 + i * 3 % 5)} for i in range(7)]

    def stand_in(model, tokenizer, prompts, group_size, temperature, args):
        asked, lengths = [p[0] for p in prompts], torch.tensor([len(p) for p in prompts])
        texts = [f"#### {i if (sampled if temperature else greedy)[i] else 99}" for i in asked]
        lengths += (temperature == 0)  # the length that counts is that of the samples
        return {"texts": texts, "ids": lengths, "mask": (torch.arange(6) < lengths[:, None]).float(),
                "finished": lengths < 5}

    def reward(asked, texts):
        paid.extend(texts)
        return [float(text == f"#### {p['answer']}") - 0.3 for p, text in zip(asked, texts, strict=True)]
    monkeypatch.setattr(common, "generate", stand_in)
    calls, paid = spy(monkeypatch, common, "generate"), []
    args = settings(grpo, temperature=0.6, prompts=rows, group_size=1, answer_column=column, out=tmp_path)
    result = common.evaluate(None, None, problems, reward, args, 20)
    expected = {"eval_reward": 4 / 7 - 0.3, "eval_completion_length": 20 / 7}
    if column:
        expected |= {"eval_accuracy": 2 / 7, "eval_sampled_accuracy": 4 / 7}
    assert result == pytest.approx(expected) and len(paid) == 7
    assert {c.temperature for c in calls} == ({0.0, 0.6} if column else {0.6})
    assert all(len(c.prompts) * c.group_size <= rows for c in calls)
    lines = (tmp_path / "completions" / "held-out-20.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        i, length = int(record["answer"]), record["tokens"]
        assert (record["question"], record["right"], record["reward"], length, record["cut_off"]) == (
            f"{i}?", sampled[i] == 1, pytest.approx(sampled[i] - 0.3), 1 + i * 3 % 5, length == 5)
    assert len(lines) == 7
    unknown = stand_in(None, None, [[0]], 1, 0.6, args) | {"rewards": torch.ones(1)}
    assert common.records_of([{"question": "?", "answer": ""}], unknown)[0]["right"] is None  # no gold answer

def test_evaluations_are_alike_and_their_batches_are_not(monkeypatch, tmp_path):
    """Two draw with the same numbers, so that they differ by the model alone; two batches of one do not."""
    model, args = tiny_model(), settings(grpo, prompts=2, group_size=1, max_new_tokens=9, out=tmp_path)
    problems = [{"prompt": [5, 6], "question": "", "answer": "5"}] * 8
    calls = spy(monkeypatch, common, "generate")
    for seed in (1, 2):
        torch.manual_seed(seed)
        common.evaluate(model, tiny_tokenizer(), problems, common.answer_reward, args, 1)
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
