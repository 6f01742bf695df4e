"""tests/manual/elsewhere.md: where TRL or verl is installed, it still computes what the page says. A release
that changes a default, or a loss, fails here."""
import pytest

pytestmark = pytest.mark.slow

@pytest.fixture(scope="module")
def page():
    pytest.importorskip("trl")
    import elsewhere
    return elsewhere

@pytest.mark.parametrize("engine", ["trl", "verl"])
def test_an_engine_computes_the_losses_of_the_page(engine, page):
    if engine == "verl":
        pytest.importorskip("verl.workers.utils.losses", exc_type=ImportError)
    for function, name, settings, expected in page.ROWS:
        if function.__name__ == f"{engine}_loss":
            near = pytest.approx(expected, abs=6e-5 if any(expected) else 1e-8)
            assert page.off(function, name, **settings) == near, (name, settings)

def test_the_engines_have_the_defaults_of_the_page(page, tmp_path):
    """verl's dual clip is checked if verl is installed."""
    config = page.trl.GRPOConfig(output_dir=tmp_path, use_cpu=True, bf16=False)
    expected = {
        "loss_type": "dapo", "beta": 0.0, "use_bias_correction_kl": True, "scale_rewards": "group",
        "epsilon": 0.2, "epsilon_high": None, "delta": None, "importance_sampling_level": "token",
        "vllm_importance_sampling_correction": True, "top_k": 0, "adam_beta2": 0.999, "weight_decay": 0.0,
        "lr_scheduler_type": "linear", "max_grad_norm": 1.0, "num_iterations": 1}
    assert {name: getattr(config, name) for name in expected} == expected
    assert page.cispo_weights() == pytest.approx((0.2, 0.2))
    config = pytest.importorskip("verl.workers.config", exc_type=ImportError)
    assert config.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True).clip_ratio_c == 3.0
    assert page.dual_clip(3.0) == pytest.approx((.0895, 0), abs=6e-5)
    assert page.dual_clip(1e9) == pytest.approx((.1256, .1082), abs=6e-5)

def test_trl_trains_as_our_scripts_do(page):
    """Four optimiser steps of each method; the defaults of both are far apart."""
    for name in page.RUNS:
        gradients, weight, moved = page.race(name)
        if name == "the defaults of both":
            assert max(gradients) > 0.2
        else:
            assert max(gradients) < 1e-4 and weight < 1e-6 < 1e-3 < moved, name
