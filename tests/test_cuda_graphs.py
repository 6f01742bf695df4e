"""CUDA graphs, on a CPU that acts as a GPU. On a GPU: tests/test_gpu.py."""
import math

import pytest
import torch
from conftest import settings, spy, tiny_model, tiny_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

import common
import grpo

class Graph(list):
    """Stands in for torch.cuda.CUDAGraph: a replay runs the recorded operations on the very same tensors."""
    def replay(self):
        for op, args, kwargs, out in self:
            new = op(*args, **kwargs)
            if not isinstance(new, int) and all(x.alias_info is None for x in op._schema.returns):  # no view
                for old, value in zip(out, new) if isinstance(out, tuple) else [(out, new)]:
                    old.copy_(value)

class Recording(TorchDispatchMode):
    """Stands in for torch.cuda.graph: records operations and undoes what they wrote; what they return becomes
    NaN. To read a value while recording is an error."""
    def __init__(self, graph):
        super().__init__()
        self.graph, self.undo = graph, []

    def __exit__(self, *error):
        super().__exit__(*error)
        for tensor, before in reversed(self.undo):
            tensor.copy_(before)
        for op, _, _, out in self.graph:  # a GPU computes nothing while it records
            made = out if isinstance(out, tuple) else [out]
            if all(x.alias_info is None for x in op._schema.returns) and all(map(torch.is_tensor, made)):
                [x.fill_(math.nan) for x in made if x.is_floating_point()]

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        for x, argument in zip(args, op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.undo.append((x, x.clone()))
        self.graph.append((op, args, kwargs or {}, op(*args, **kwargs or {})))
        return self.graph[-1][-1]

@pytest.mark.parametrize("dtype, vocab_size, lengths, T, expected", [
    ("float32", 64, [3, 1, 6, 2, 4, 1, 2, 1], 60, None),  # rows are dropped several times
    ("bfloat16", 64, [3, 1, 6, 2, 4, 1, 2, 1], 60, None),
    ("float32", 512, [1] * 4, 6, [(8, 256)]),  # a prompt of one token looks like a drawn one
    ("float32", 512, [1] * 2, 300, [(4, 256), (4, 512), (1, 512)]),  # full, then rows dropped
    ("float32", 512, [300, 7], 220, [(4, 512), (4, 768)])])  # longer than what a recording adds
def test_replayed_graphs_write_what_single_calls_do(dtype, vocab_size, lengths, T, expected, monkeypatch):
    """Graphs are recorded for the first token, for fewer rows and for a full cache: `expected` has their rows
    and columns. The model runs on the prompts, and twice per recording."""
    model = tiny_model("qwen2", vocab_size, seed=2, num_hidden_layers=1)
    model.generation_config.eos_token_id = [1, 7, 30] if vocab_size == 64 else 1
    calls = spy(monkeypatch, model.base_model, "forward")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    torch.manual_seed(5)
    prompts = [[0 if j == 1 else 3 + (i + j) % 50 for j in range(n)] for i, n in enumerate(lengths)]
    args = settings(grpo, max_new_tokens=T, dtype=dtype, temperature=0.8, cuda_graphs=True)
    problems = [{"prompt": prompt} for prompt in prompts]
    rollout = common.generate(model, tiny_tokenizer(vocab_size), problems, 2, args)
    recorded = [tuple(call.attention_mask.shape) for call in calls[1::2]]
    assert recorded == expected or not expected and 2 < len(recorded) < 12 and len(calls) % 2 == 1
    assert calls[0].cache.layers[0].keys.dtype == getattr(torch, dtype)
    own = common.token_logprobs(model, rollout, args)
    gap = (rollout["sampled_logp"] - own).abs().sum() / rollout["mask"].sum()
    assert gap < (1e-5 if dtype == "float32" else 5e-3)
