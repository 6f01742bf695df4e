"""Tiny random models of each family: trained rightly, or refused in one line when they are loaded."""
import dataclasses

import pytest
import torch
import transformers

import common
import ppo
from conftest import flat_gradient, tiny_tokenizer

pytestmark = pytest.mark.upkeep
transformers.logging.disable_progress_bar()

RIGHT = """afmoe, apertus, arcee, aria_text, biogpt, bitnet, cwm, deepseek_v2,
    deepseek_v3, diffllama, doge, dots1, ernie4_5, ernie4_5_moe, exaone4, falcon, flex_olmo, gemma, gemma3,
    gemma3_text, glm, glm4, glm4_moe, gpt-sw3, gpt2, gpt_bigcode, gpt_neox, gpt_oss,
    helium, hunyuan_v1_dense, jais2, jetmoe, llama, llama with dynamic rope, minimax_m2,
    ministral, ministral3, mistral, mistral without window, mixtral, mpt, nemotron, olmo, olmo2, olmo3,
    olmoe, opt, opt with narrow ends, persimmon, phi3, phi3 with longrope, qwen2, qwen2 with window,
    qwen2_moe, qwen3, qwen3_moe, seed_oss, smollm3, stablelm, starcoder2, xglm"""
REFUSED = {
    "changes its logits after the head":  # by a factor, a bias, a cap or a layer
        "cohere, cohere2, cohere2_moe, granite, granitemoe, minicpm3, "
        "bert, codegen, electra, gemma2, gptj, nanochat, phi, rembert, roberta, roformer, vaultgemma",
    "has other logits token by token":
        "bart, gpt_neo beyond its window, marian, mbart, pegasus, phi3 beyond its longrope",
    "in training mode": "phimoe, mixtral with noise",
    "cannot be sampled from":  # it has another cache, or masks of another kind
        """bailing_hybrid, bloom, deepseek_v32, gpt_neox_japanese, hrm_text, kimi_linear, lfm3, llama4_text,
        minimax, openai-gpt, prophetnet, qwen3_5, xmod""",
    "not finite": "llama with a broken weight"}
RIGHT = [" ".join(name.split()) for name in RIGHT.split(",")]
REFUSED = {" ".join(name.split()): reason for reason, names in REFUSED.items() for name in names.split(",")}

SIZES = {  # of the settings of any family; one that has no such setting is not given it
    64: """vocab_size intermediate_size intermediate_size_mlp ffn_dim decoder_ffn_dim n_positions
        max_position_embeddings""",
    32: """hidden_size d_model n_embd embed_dim embedding_size word_embed_proj_dim input_embedding_size
        output_embedding_size moe_intermediate_size shared_intermediate_size
        shared_expert_intermediate_size""",
    16: "q_lora_rank kv_lora_rank",
    8: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim sliding_window window_size",
    4: """num_attention_heads num_heads n_head n_heads attention_heads decoder_attention_heads
        num_decoder_attention_heads num_key_value_heads num_experts num_local_experts n_routed_experts
        moe_num_experts""",
    2: """num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers num_experts_per_tok
        moe_k n_shared_experts""",
    1: "n_group topk_group first_k_dense_replace num_dense_layers is_decoder eos_token_id bos_token_id",
    0: "pad_token_id"}
SIZES = {name: size for size, names in SIZES.items() for name in names.split()} | {"is_decoder": True}
OTHER = {
    "granite": {"logits_scaling": 8.0}, "granitemoe": {"logits_scaling": 6.0},
    "gpt_neo beyond its window": {"attention_types": [[["global", "local"], 1]]},
    "llama": {"num_key_value_heads": 2}, "minicpm3": {"dim_model_base": 16},
    "llama with dynamic rope": {"max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    "mistral without window": {"sliding_window": None},
    "mixtral with noise": {"router_jitter_noise": 0.1}, "phimoe": {"router_jitter_noise": 0.3},
    "opt with narrow ends": {"hidden_size": 64},
    **{name: {"original_max_position_embeddings": length, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 4, "long_factor": [9.0] * 4}}
       for name, length in (("phi3 with longrope", 36), ("phi3 beyond its longrope", 32))},
    "qwen2 with window": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}}
PROMPTS = [[5, 9, 11, 3, 7, 60, 33, 12, 13, 17, 2, 0], [8, 4, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]]

def sized(kind, **settings):
    """A config of that class with our sizes, those it has; layers of each kind that its defaults have."""
    kinds = sorted(set(getattr(kind(), "layer_types", None) or []))
    if len(kinds) == 2 and "layer_types" in fields_of(kind):
        settings = {"layer_types": kinds} | settings
    return kind(**{name: size for name, size in SIZES.items() if name in fields_of(kind)} | settings)

def fields_of(kind):
    return {field.name for field in dataclasses.fields(kind)}

def load(name, path):
    """Save a random model, its weights large enough that mistakes show, and load it as a script does."""
    torch.manual_seed(0)
    kind, settings = transformers.CONFIG_MAPPING[name.split()[0]], OTHER.get(name, {})
    parts = {part: sized(type(getattr(kind(), part))).to_dict() for part in ("text_config", "vision_config")
             if part in fields_of(kind)}
    config = kind(**parts) if parts else sized(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data = 5 * weight if weight.dim() == 2 else weight + 0.1 * torch.randn_like(weight)
    if "broken" in name:
        weight.data[0] = torch.nan
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    args = ppo.parse_args(["--model", str(path), "--out", str(path), "--device", "cpu", "--dtype", "float32",
                           "--max_prompt_tokens", "24", "--max_new_tokens", "12"])
    policy, tokenizer = common.load_policy(args)
    common.settle(args, policy)
    return policy, tokenizer

def plain_logits(model, rollout):
    """The model's own logits of each row alone, without padding: a list of (length, V)."""
    return [model(input_ids=row[None, :attention.sum()], use_cache=False).logits[0]
            for row, attention in zip(rollout["ids"], rollout["attention"])]

@pytest.mark.parametrize("name", RIGHT)
def test_right(name, tmp_path, monkeypatch):
    """What the sampler drew from, the log-probs that are trained and their gradient are the model's own; its
    value model has the policy's body, trains, and is saved whole."""
    policy, tokenizer = load(name, tmp_path)
    drawn, append = [], common.Rows.append
    monkeypatch.setattr(common.Rows, "append", lambda rows, logits: drawn.append(
        (rows.kept, rows.position[rows.kept], logits.clone())) or append(rows, logits))
    rollout = common.generate(policy, tokenizer, PROMPTS, 2, 12)
    own = plain_logits(policy.eval(), rollout)
    for rows, positions, logits in drawn:
        for i, position, row in zip(rows, positions, logits):
            if position < len(own[i]) - 1:  # else the row had ended
                difference = row.log_softmax(-1) - own[i][position].log_softmax(-1)
                assert difference.abs().max() < 2e-5

    factors, loss = torch.randn(rollout["mask"].shape), 0
    logp = common.token_logprobs(policy.train(), rollout, 0.7)
    (logp * factors).sum().backward()
    ours = flat_gradient(policy)
    policy.zero_grad()
    for i, logits in enumerate(plain_logits(policy.eval(), rollout)):
        n, T = len(logits), int(rollout["mask"][i].sum())
        row = (logits[n - T - 1:n - 1] / 0.7).log_softmax(-1)[torch.arange(T), rollout["ids"][i, n - T:n]]
        torch.testing.assert_close(logp[i, :T], row, rtol=0, atol=2e-5)
        loss += (row * factors[i, :T]).sum()
    loss.backward()
    wanted = flat_gradient(policy)
    assert (ours - wanted).norm() < 1e-5 * wanted.norm()

    value = common.load_value(policy)
    assert not common.token_values(value, rollout).any()
    torch.nn.init.normal_(value.score.weight)
    common.token_values(value, rollout).sum().backward()
    assert flat_gradient(value).norm() > 0
    value.save_pretrained(tmp_path / "value")
    saved = transformers.AutoModel.from_pretrained(tmp_path / "value").state_dict()
    body = policy.base_model.state_dict()
    assert saved.keys() == body.keys() and all(torch.equal(saved[key], body[key]) for key in body)

@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        load(name, tmp_path)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and REFUSED[name] in said and said.count("\n") == 1
