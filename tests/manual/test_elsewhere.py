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

def test_trl_trains_as_our_scripts_do(page):
    """Four optimiser steps of each method; the defaults of both are far apart."""
    for name in page.RUNS:
        gradients, weight, moved = page.race(name)
        if name == "the defaults of both":
            assert max(gradients) > 0.2
        else:
            assert max(gradients) < 1e-4 and weight < 1e-6 < 1e-3 < moved, name
