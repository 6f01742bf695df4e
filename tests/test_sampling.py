"""Sampling: which tokens, from which distribution, in which layout, and where a completion ends."""
import copy
import math

import pytest
import tokenizers
import torch
from conftest import (CHATML, char_tokenizer, full_logprobs, make_batch, save_tiny, settings, spy, tiny_model,
                      tiny_tokenizer)

import common
import grpo

PROMPTS = [[5, 6, 7], [9], [1, 0, 8, 3, 3, 2], [4, 1], [60, 61, 62, 63], [10], [20, 21], [0]]  # 1 is eos

def generate(model, prompts, group_size, T, temperature=1.0, tokenizer=None, **flags):
    problems, tokenizer = [{"prompt": prompt} for prompt in prompts], tokenizer or tiny_tokenizer()
    args = settings(grpo, max_new_tokens=T, temperature=temperature, **flags)
    model.generation_config.eos_token_id = common.stop_ids(model, tokenizer)  # as load_policy does
    return common.generate(model, tokenizer, problems, group_size, args)

def completions_of(rollout, prompts, group_size=1):
    """The completions of a rollout as lists. Its other parts must follow from them."""
    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    assert [problem["prompt"] for problem in rollout["problems"]] == prompts
    ends = (rollout["prompt_length"] + rollout["completion_length"]).tolist()
    completions = [ids[len(p):end] for ids, p, end in zip(rollout["ids"].tolist(), prompts, ends)]
    made = make_batch(prompts, completions)
    del made["row"]
    for name, expected in made.items():
        assert torch.equal(rollout[name], expected), name
    written = [c[:-1] if ended else c for c, ended in zip(completions, rollout["finished"])]
    assert rollout["texts"] == ["".join(f"t{i}" for i in c) for c in written]
    assert not rollout["sampled_logp"][rollout["mask"] == 0].any()
    return completions

# --- layout

@pytest.mark.parametrize("pad", [None, "t1", "t0"])
def test_completions_end_with_their_first_stop_token(pad, monkeypatch):
    """Not with one in the prompt. Other special tokens, such as <answer>, stay in the text."""
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

GEMMA = ("{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}"
         "\n<end_of_turn>\n{% endfor %}")
MISTRAL = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}"
           " [/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}")

@pytest.mark.parametrize("chat, added, end", [
    (CHATML, "", "<|im_end|>"), (GEMMA, "<start_of_turn> <end_of_turn>", "<end_of_turn>"),
    (MISTRAL, "[INST] [/INST]", None),
    (CHATML.replace("<|im_end|>\n", "<|im_end|><sep>"), "<sep>", "<|im_end|>"),
    ("The ANSWER.<sep>" + CHATML, "<sep>", "<|im_end|>"),
    (CHATML.replace("<|im_start|>", "[").replace("<|im_end|>", "]"), "", None)])
@pytest.mark.parametrize("special", [True, False])
def test_the_end_of_a_turn_stops_in_the_templates_of_many_models(chat, added, end, special):
    """The first added token after the answer, special or not, but no newline, which Gemma adds."""
    tokenizer, kind = char_tokenizer(chat), tokenizers.AddedToken
    tokenizer.backend_tokenizer.add_tokens(
        [kind("\n", normalized=False)] + [kind(x, special=special) for x in added.split()])
    stops = common.stop_ids(tiny_model(), tokenizer)
    assert sorted(tokenizer.convert_ids_to_tokens(stops)) == sorted({"<eos>", end or "<eos>"})

def test_stop_tokens_of_model_and_tokenizer_end_up_in_the_generation_config(tmp_path):
    model, chat = tiny_model(), char_tokenizer(CHATML)
    for listed, expected in ((7, [1, 7]), ([9, 7], [1, 7, 9]), (None, [1])):
        model.generation_config.eos_token_id = listed
        assert common.stop_ids(model, tiny_tokenizer()) == expected
    policy, _ = common.load_policy(settings(grpo, model=save_tiny(tmp_path, "qwen2", chat)))
    assert policy.generation_config.eos_token_id == [1, chat.convert_tokens_to_ids("<|im_end|>")]
    assert policy.generation_config.do_sample  # or a config with a temperature could not be saved

# --- which tokens

WINDOW = {"sliding_window": 4}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}

@pytest.mark.parametrize("family, config", [
    ("qwen3", {}), ("gpt2", {}),  # positions by rotation, or learned
    ("qwen2", MIXED), ("mistral", WINDOW),  # one layer, or both, see only the last four positions
    ("olmo_hybrid", {}),  # a layer of linear attention, whose cache is of another kind
    # In these two, the scale of attention is not 1 / sqrt(head width).
    ("gemma3_text", MIXED | {"query_pre_attn_scalar": 2, "head_dim": 8}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True})])
@torch.no_grad()
def test_the_samplers_log_probs_are_those_of_the_tokens(family, config, monkeypatch):
    """Ragged prompts are read once for three completions, by a model that is trained with checkpointing."""
    torch.manual_seed(0)
    model = tiny_model(family, seed=3, **config)
    exact, calls = copy.deepcopy(model).double().eval(), spy(monkeypatch, model.base_model, "forward")
    stops = model.generation_config.eos_token_id = [*range(2, 62, 5)]  # the tokenizer names 1
    model.activation_checkpointing_enable()
    recorded = []
    monkeypatch.setattr(common, "Recorded", lambda read, cache: recorded.append(cache) or read)
    rollout = generate(model.train(), PROMPTS, 3, 20, 0.6, cuda_graphs=True)
    assert bool(recorded) == (family in ("qwen3", "gpt2")), "graphs are for layers that see all tokens"
    completions = completions_of(rollout, PROMPTS, 3)
    assert model.training and rollout["finished"].tolist() == [c[-1] in (1, *stops) for c in completions]
    shapes = [tuple(call.input_ids.shape) for call in calls]
    assert shapes[:2] == [(8, 6), (24, 1)] and shapes[-1][0] < 24 and shapes[-1][1] == 1
    gap = rollout["sampled_logp"] - full_logprobs(exact, rollout, 0.6)
    assert rollout["sampled_logp"].dtype == torch.float32 and gap.abs().max() < 2e-5

def test_draw_never_takes_what_has_no_chance(monkeypatch):
    """Nor an id beyond the last. In float32, a GPU, which adds in parallel, may let the sums decrease."""
    logits, many = torch.full((4, 7), -math.inf), torch.linspace(-9, 9, 64_000).sin().view(64, 1000) * 9
    logits[:, [2, 4]], seen, real = 1.0, [], torch.searchsorted
    monkeypatch.setattr(torch, "searchsorted", lambda *given: seen.extend(given) or real(*given))
    for u, expected in [(0.0, 4), (1 - 2 ** -24, 2)]:
        monkeypatch.setattr(torch, "rand", lambda *shape, device: torch.full(shape, u))
        token, logp = common.draw(logits, 0.7)
        assert token.tolist() == [expected] * 4 and logp.tolist() == pytest.approx([math.log(0.5)] * 4)
        assert common.draw(many, 1.0)[0].max() < 1000 and {x.dtype for x in seen} == {torch.float64}

@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_draw_samples_from_the_whole_softmax(temperature):
    """Chi-square: a top_k of 3 would stand out, and so would a temperature that is off by 10%."""
    torch.manual_seed(0)
    logits, N = torch.tensor([0.5, -1.0, 0.0, 1.5, -0.3, 0.8]), 20_000
    pi = (logits / temperature).softmax(0)
    token, logp = common.draw(logits.expand(N, 6), temperature)
    torch.testing.assert_close(logp, pi[token].log())
    seen = token.bincount(minlength=6)
    assert ((seen - N * pi) ** 2 / (N * pi)).sum() < 21, "5 degrees of freedom: one in a thousand"

@pytest.mark.parametrize("groups", [99, 1])
def test_evaluate_counts_every_problem_once(groups, monkeypatch, capsys):
    """No more are sampled at a time than in a rollout. The reward is 0.3 lower than the accuracy."""
    right = [0, 1, 0, 1, 0, 1, 1]
    problems = [{"question": f"{i}", "answer": f"{i}", "prompt": [i] * (1 + i * 3 % 5)} for i in range(7)]

    def generate(model, tokenizer, problems, group_size, args):
        assert len(problems) * group_size <= 3 * groups
        texts = [f"#### {p['prompt'][0] if right[p['prompt'][0]] else 99}" for p in problems]
        lengths = torch.tensor([len(p["prompt"]) for p in problems])
        return {"problems": problems, "texts": texts, "completion_length": lengths}

    def reward(problems, texts):
        return [(text == f"#### {p['question']}") - 0.3 for p, text in zip(problems, texts, strict=True)]
    monkeypatch.setattr(common, "generate", generate)
    args = settings(grpo, temperature=0.6, prompts=groups, group_size=3)
    expected = {"eval_reward": 4 / 7 - 0.3, "eval_completion_length": 20 / 7, "eval_accuracy": 4 / 7}
    assert common.evaluate(None, None, problems, reward, args) == pytest.approx(expected)
    assert capsys.readouterr().out == "    | 0\n    | #### 99\n    | (reward -0.3, answer 0)\n"
    pytest.raises(AssertionError, common.evaluate, None, None, problems, lambda *x: reward(*x)[1:], args)
