"""On a GPU: a decoding step in a CUDA graph equals the eager step, through cache growth and eviction."""

import threading

import pytest
import torch
from model_helpers import SMALL, relative_error, with_strong_gates

from acp_repro.model import FoXCache, FoXConfig, FoXForCausalLM, generation
from acp_repro.model.decode_step import DecodeStep

pytestmark = pytest.mark.gpu


@pytest.fixture
def model():
    return with_strong_gates(FoXForCausalLM(FoXConfig.pro(**SMALL))).cuda()


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["pro", "llama", "rope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_cuda_graph_equals_eager_steps(monkeypatch, architecture, dtype, padded):
    """Covers a prompt whose rows were processed in chunks."""
    model = with_strong_gates(FoXForCausalLM(getattr(FoXConfig, architecture)(**SMALL))).cuda().to(dtype)
    ids = torch.randint(0, SMALL["vocab_size"], (3, 600), device="cuda")
    seq_start = torch.tensor([0, 90, 1], device="cuda") if padded else None
    found = []
    for graph in (False, True):
        cache = FoXCache(2, max_length=700)
        monkeypatch.setattr(generation, "PREFILL_TOKENS", 600 if graph else 1000)
        generation.prefill(model, ids[:, :300], cache, seq_start)
        step, logits = DecodeStep(model, cache), []
        for t in range(300, 600):
            logits.append((step(ids[:, t]) if graph else step._run(ids[:, t])).clone())
        found.append(torch.stack(logits, 1))
    assert 1 <= step.captures <= 4
    # Matrix products in a graph may use another workspace and summation order.
    assert relative_error(found[1], found[0]) < (1e-5 if dtype == torch.float32 else 0.02)
    whole = model(ids, seq_start=seq_start)[:, 300:].float()
    # Two correct implementations in this dtype: products of one and many rows differ in summation order.
    assert relative_error(found[1], whole) < (2e-4 if dtype == torch.float32 else 0.05)


@torch.no_grad()
@pytest.mark.parametrize("late", [False, True])
def test_recording_cache_is_stepped_without_a_graph(late, model):
    """The record grows with every token, which a graph cannot replay."""
    ids = torch.randint(0, SMALL["vocab_size"], (2, 60), device="cuda")
    cache = FoXCache(2, max_length=100)
    if not late:
        cache.record_past()
    model(ids[:, :20], cache=cache)
    step, logits = DecodeStep(model, cache), []
    for t in range(20, 60):
        if late and t == 40:
            cache.record_past()
        logits.append(step(ids[:, t]).clone())
    assert step.captures == late
    cache.crop(5)
    logits += [step(ids[:, t]).clone() for t in range(55, 60)]
    whole = model(ids).float()
    found, right = torch.stack(logits, 1), torch.cat((whole[:, 20:], whole[:, 55:]), 1)
    assert relative_error(found, right) < 2e-4


@torch.no_grad()
def test_hooks_are_called_at_every_step(model):
    ids = torch.randint(0, SMALL["vocab_size"], (2, 20), device="cuda")
    attention = model.model.layers[0].attn
    watched, called = (attention.fgate_proj, attention.k_proj, attention.q_norm), []
    for module in watched:
        module.register_forward_hook(lambda module, *_: called.append(module))
    cache = FoXCache(2, max_length=20)
    model(ids[:, :10], cache=cache)
    step = DecodeStep(model, cache)
    found = torch.stack([step(ids[:, t]).clone() for t in range(10, 20)], 1)
    assert step.captures == 0 and all(called.count(module) == 11 for module in watched)
    assert relative_error(found, model(ids)[:, 10:].float()) < 2e-4


@torch.no_grad()
def test_generation_under_autocast_is_greedy(model):
    prompt = torch.randint(0, SMALL["vocab_size"], (2, 100), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        ids = model.generate(prompt, 200)
        logits = model(ids)[:, 99:-1].float()
    best = logits.amax(-1)
    chosen = logits.gather(-1, ids[:, 100:, None])[..., 0]
    assert (best - chosen).max() < 0.1 * logits.std()  # equal except for near-ties


@torch.no_grad()
def test_sampling_in_a_graph_follows_its_generator(model):
    prompt = torch.randint(0, SMALL["vocab_size"], (2, 10), device="cuda")
    draws = [
        model.generate(prompt, 100, 1.0, torch.Generator("cuda").manual_seed(seed), top_p=0.9)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def in_threads(*calls):
    """Returns the results of concurrent calls; raises the first error."""
    results, errors = {}, []

    def work(n, call):
        try:
            results[n] = call()
            torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=one) for one in enumerate(calls)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    if errors:
        raise errors[0]
    return [results[n] for n in range(len(calls))]


def assert_greedy(model, ids, prompt):
    """Asserts that every token is the most likely, except for near-ties."""
    logits = model(ids)[:, prompt - 1 : -1].float()
    chosen = logits.gather(-1, ids[:, prompt:, None])[..., 0]
    assert (logits.amax(-1) - chosen).max() < 1e-2 * logits.std()


@torch.no_grad()
def test_another_thread_allocates_during_graph_capture(monkeypatch, model):
    prompt = torch.randint(0, SMALL["vocab_size"], (2, 50), device="cuda")
    run, met = DecodeStep._run, []

    def prefill_elsewhere():
        with torch.no_grad():
            held = torch.empty(2**28, device="cuda")  # new memory: a capture empties the allocator
            return model(prompt, cache=FoXCache(2, max_length=60))[:, -1].sum().item() + len(held)

    def run_beside_another(self, tokens):
        logits = run(self, tokens)
        if torch.cuda.is_current_stream_capturing():
            met.extend(in_threads(prefill_elsewhere))
        return logits

    monkeypatch.setattr(DecodeStep, "_run", run_beside_another)
    ids = model.generate(prompt, 10)
    assert met
    assert_greedy(model, ids, 50)


@torch.no_grad()
def test_concurrent_threads_generate_correctly(model):
    prompts = [torch.randint(0, SMALL["vocab_size"], (2, 50 + n), device="cuda") for n in range(4)]
    model.generate(prompts[0], 3)  # compiles first, so that the threads overlap
    calls = [lambda prompt=prompt: model.generate(prompt, 40) for prompt in prompts]
    calls.append(lambda: model.generate(prompts[0], 40, 1.0, top_p=0.9))  # PyTorch's global generator
    for _ in range(3):
        *found, drawn = in_threads(*calls)
        assert drawn.shape == (2, 90)
        for ids, prompt in zip(found, prompts, strict=True):
            assert_greedy(model, ids, prompt.shape[1])
