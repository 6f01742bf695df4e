"""Tiny random models of each family: trained rightly, or refused in one line when they are loaded.

They are held to the model's own logits of each row alone: the log-probs of the sampler and those that are
trained, their gradient, and the value model. All are trained in bfloat16, too."""
import dataclasses

import pytest
import torch
import transformers

import common
import ppo
from conftest import flat_gradient, tiny_tokenizer

pytestmark = pytest.mark.slow
transformers.logging.disable_progress_bar()

RIGHT = """afmoe, apertus, arcee, aria_text, bailing_hybrid, bamba, bert-generation, biogpt, bitnet, bloom,
    codegen, cohere, cohere2, cohere2_moe, cwm, deepseek_v2, deepseek_v3, deepseek_v32, diffllama, doge,
    dots1, ernie4_5, ernie4_5_moe, exaone4, exaone_moe, falcon, falcon with alibi, falcon with dropout,
    falcon_h1, flex_olmo, gemma, gemma2, gemma3, gemma3_text, gemma3n_text, gemma4_text, glm, glm4, glm4_moe,
    glm4_moe_lite, glm_moe_dsa, gpt-sw3, gpt2, gpt_bigcode, gpt_neo, gpt_neo beyond its window, gpt_neox,
    gpt_neox_japanese, gpt_oss, gptj, granite, granitemoe, granitemoehybrid, granitemoeshared, helium,
    hunyuan_v1_dense, hunyuan_v1_moe, jais2, jamba, jetmoe, lfm2, lfm2_moe, llama, llama with dynamic rope,
    mamba2, minicpm3, minimax_m2, ministral, ministral3, mistral, mistral without window, mixtral,
    mixtral with noise, mpt, nanochat, nemotron, nemotron_h, olmo, olmo2, olmo3,
    olmo_hybrid, olmoe, opt, opt with narrow ends, persimmon, persimmon with dropout, phi, phi3,
    phi3 with longrope, phimoe, qwen2, qwen2 with window, qwen2_moe, qwen3, qwen3_5, qwen3_5_moe_text,
    qwen3_5_text, qwen3_moe, qwen3_next, seed_oss, smollm3, stablelm, starcoder2, vaultgemma, xglm"""
REFUSED = """bart, bert, cpmant, deepseek_v4, electra, falcon_mamba, llama with a broken weight, llama4,
    llama4_text, mamba, marian, mbart, minimax, modernbert-decoder, mpt with few positions,
    openai-gpt, pegasus, phi3 beyond its longrope, prophetnet, recurrent_gemma, rembert, roberta, roformer,
    rwkv, trocr, xlm, xmod"""
RIGHT, REFUSED = ([" ".join(name.split()) for name in names.split(",")] for names in (RIGHT, REFUSED))

SIZES = {  # of the settings of any family; one that has no such setting is not given it
    64: """vocab_size intermediate_size intermediate_size_mlp ffn_dim decoder_ffn_dim n_positions
        max_position_embeddings max_seq_len""",
    32: """hidden_size d_model n_embd embed_dim embedding_size word_embed_proj_dim input_embedding_size
        output_embedding_size moe_intermediate_size shared_intermediate_size
        shared_expert_intermediate_size""",
    16: "q_lora_rank kv_lora_rank",
    8: """head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim sliding_window window_size
        linear_key_head_dim linear_value_head_dim attention_chunk_size""",
    4: """num_attention_heads num_heads n_head n_heads attention_heads decoder_attention_heads
        num_decoder_attention_heads num_key_value_heads num_experts num_local_experts n_routed_experts
        moe_num_experts linear_num_key_heads linear_num_value_heads""",
    2: """num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers num_experts_per_tok
        moe_k n_shared_experts""",
    1: "n_group topk_group first_k_dense_replace num_dense_layers is_decoder eos_token_id bos_token_id",
    0: "pad_token_id"}
SIZES = {name: size for size, names in SIZES.items() for name in names.split()} | {"is_decoder": True}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
OTHER = {
    "bamba": MAMBA2 | {"mamba_expand": 2, "attn_layer_indices": [1]},
    "falcon with alibi": {"alibi": True},
    "falcon with dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 64},
    "gemma3n_text": {"activation_sparsity_pattern": [0.0, 0.0], "hidden_size_per_layer_input": 8,
                     "laurel_rank": 4, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64},
    "gemma4_text": {"global_head_dim": 8, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
                    "vocab_size_per_layer_input": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 256},
    "gpt_neo beyond its window": {"attention_types": [[["global", "local"], 1]]},
    "granite": {"logits_scaling": 8.0}, "granitemoe": {"logits_scaling": 6.0},
    "granitemoehybrid": MAMBA2 | {"mamba_expand": 2, "layer_types": ["mamba", "attention"],
                                  "logits_scaling": 6.0},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
              "expert_layer_period": 2, "mamba_d_state": 4, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama": {"num_key_value_heads": 2},
    "llama with dynamic rope": {"max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "minicpm3": {"dim_model_base": 16},
    "mistral without window": {"sliding_window": None},
    "mixtral with noise": {"router_jitter_noise": 0.1},
    "mpt with few positions": {"max_seq_len": 30},  # fewer than a run asks for
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8},
    "opt with narrow ends": {"hidden_size": 64},
    "persimmon with dropout": {"hidden_dropout": 0.1},
    **{name: {"original_max_position_embeddings": length, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 4, "long_factor": [9.0] * 4}}
       for name, length in (("phi3 with longrope", 36), ("phi3 beyond its longrope", 32))},
    "phimoe": {"router_jitter_noise": 0.3},
    "qwen2 with window": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    "rwkv": {"attention_hidden_size": 32}}
PROMPTS = [[5, 9, 11, 3, 7, 60, 33, 12, 13, 17, 2, 0], [8, 4, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]]

def sized(kind, **settings):
    """A config of that class with our sizes, those it has; layers of each kind that its defaults have."""
    kinds = sorted(set(getattr(kind(), "layer_types", None) or []))
    if len(kinds) == 2 and "layer_types" in fields_of(kind):
        settings = {"layer_types": kinds} | settings
    return kind(**{name: size for name, size in SIZES.items() if name in fields_of(kind)} | settings)

def fields_of(kind):
    return {field.name for field in dataclasses.fields(kind)}

def make(name):
    """A random model, its weights large enough that mistakes show."""
    torch.manual_seed(0)
    if name.split()[0] not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know it")
    kind, settings = transformers.CONFIG_MAPPING[name.split()[0]], OTHER.get(name, {})
    parts = {part: sized(type(getattr(kind(), part))).to_dict() for part in ("text_config", "vision_config")
             if part in fields_of(kind)}
    config = kind(**parts) if parts else sized(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data = 5 * weight if weight.dim() == 2 else weight + 0.1 * torch.randn_like(weight)
    if "broken" in name:
        weight.data[0] = torch.nan
    return model

def load(name, path, dtype="float32"):
    """Save such a model, and load it as a script does."""
    make(name).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    args = ppo.parse_args([
        "--model", str(path), "--device", "cpu", "--dtype", dtype, "--temperature", "0.7",
        "--max_prompt_tokens", "24", "--max_new_tokens", "12", "--no-gradient_checkpointing"])
    return *common.load_policy(args), args

def own_logprobs(model, rollout):
    """(N, T) by the model's own logits of each row alone, without padding."""
    logp = torch.zeros_like(rollout["mask"])
    for i, (row, attention, mask) in enumerate(zip(rollout["ids"], rollout["attention"], rollout["mask"])):
        row, T = row[:attention.sum()], int(mask.sum())
        logits = model(input_ids=row[None], use_cache=False).logits[0, -T - 1:-1]
        logp[i, :T] = (logits / 0.7).log_softmax(-1)[torch.arange(T), row[-T:]]
    return logp

@pytest.mark.parametrize("name", RIGHT)
def test_right(name, tmp_path):
    policy, tokenizer, args = load(name, tmp_path)
    rollout = common.generate(policy, tokenizer, PROMPTS, 2, 0.7, args)
    logp, own = common.token_logprobs(policy, rollout, args), own_logprobs(policy.eval(), rollout)
    torch.testing.assert_close(logp, own, rtol=0, atol=2e-5)
    torch.testing.assert_close(rollout["sampled_logp"], own, rtol=0, atol=2e-4)  # a state sums otherwise
    factors, weights = torch.randn(own.shape), list(policy.parameters())
    ours, wanted = (torch.autograd.grad((x * factors).sum(), weights, allow_unused=True) for x in (logp, own))
    pairs = [(a, b) for a, b in zip(ours, wanted) if a is not None or b is not None]
    off, whole = sum((a - b).square().sum() for a, b in pairs), sum(b.square().sum() for _, b in pairs)
    assert off.sqrt() < 1e-5 * whole.sqrt()

    value = common.load_value(policy)
    torch.nn.init.normal_(value.score.weight)
    common.token_values(value, rollout, args).sum().backward()
    assert flat_gradient(value).norm() > 0
    args.dtype = "bfloat16"
    rollout = common.generate(policy, tokenizer, PROMPTS, 2, 0.7, args)
    logp = common.token_logprobs(policy.train(), rollout, args)
    assert (logp - rollout["sampled_logp"]).abs().sum() / rollout["mask"].sum() < 0.3
    logp.sum().backward()
    assert flat_gradient(policy).isfinite().all() and flat_gradient(policy).norm() > 0

@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        load(name, tmp_path)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith("error: --model ") and said.count("\n") == 1
    assert "KeyError" not in said
