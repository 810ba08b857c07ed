"""Hugging Face transformers: a tiny random Gemma-2 through softcap_ops equals transformers' eager attention.

CASES rows 23, 24, 77, 84. The weights are hot enough for the cap of 50 to bite, the window of 8 is shorter than the
text, the scale is not head_dim ** -0.5, and heads are grouped.
"""

import inspect
import types

import pytest
import torch

pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompileConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    T5GemmaModuleConfig,
    Trainer,
    TrainingArguments,
)
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

import softcap_ops
from softcap_ops.integrations import transformers as integration

pytestmark = pytest.mark.filterwarnings("ignore")

NAME = integration.register()
SEQLEN, WINDOW, CAP, SCALAR = 32, 8, 50.0, 8


def make_model(dtype=torch.float32, **overrides):
    options = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": SCALAR,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": CAP,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        **overrides,
    }
    torch.manual_seed(0)
    model = Gemma2ForCausalLM._from_config(Gemma2Config(**options), attn_implementation="eager").eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 30
            layer.self_attn.k_proj.weight *= 30
            layer.self_attn.v_proj.weight *= 10
    return model.to(dtype)


@pytest.fixture
def ids():
    return torch.randint(1, 64, (2, SEQLEN), generator=torch.Generator().manual_seed(1))


def run(model, implementation, input_ids, **kwargs):
    model.set_attn_implementation(implementation)
    return model(input_ids=input_ids, output_hidden_states=True, **kwargs)


def both(model, input_ids, **kwargs):
    return run(model, "eager", input_ids, **kwargs), run(model, NAME, input_ids, **kwargs)


def error(x, reference):
    return ((x.double() - reference).norm() / reference.norm()).item()


def mask_of(padding):
    mask = torch.ones(2, SEQLEN, dtype=torch.long)
    if padding == "left":
        mask[1, :11] = 0
    else:
        mask[1, -11:] = 0
    return mask


@torch.no_grad()
def test_the_cap_bites_and_the_window_cuts(ids):
    """Else the comparisons below would pass without either."""
    model, scores = make_model(), []
    hook = integration.softcap_attention

    def record(q, k, v, **options):
        scores.append((q[:, :, :2].transpose(1, 2) @ k[:, :, :1].transpose(1, 2).mT).abs().max() * options["scale"])
        return hook(q, k, v, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "softcap_attention", record)
        capped = run(model, NAME, ids).logits
    assert max(scores) > 2 * CAP
    for overrides in ({"attn_logit_softcapping": None}, {"sliding_window": 100}):
        assert error(run(make_model(**overrides), NAME, ids).logits, capped.double()) > 1e-2


@torch.no_grad()
def test_every_layer_equals_eager(ids):
    eager, ours = both(make_model(), ids)
    for layer, (a, b) in enumerate(zip(eager.hidden_states, ours.hidden_states, strict=True)):
        torch.testing.assert_close(b, a, atol=1e-4, rtol=1e-4, msg=lambda m, layer=layer: f"layer {layer}: {m}")
    torch.testing.assert_close(ours.logits, eager.logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_every_layer_is_as_near_float64_as_eager(ids, dtype):
    model = make_model(dtype)
    eager, ours = both(model, ids)
    reference = run(model.double(), "eager", ids)
    for r, a, b in zip(reference.hidden_states[1:], eager.hidden_states[1:], ours.hidden_states[1:], strict=True):
        assert error(b, r) <= 2 * error(a, r)


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_gradients_equal_eager(ids, padding):
    model, gradients = make_model(), []
    mask = None if padding is None else mask_of(padding)
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    if padding == "left":
        labels[1, 11] = -100  # the first real token is predicted at a padding one, whose output is nobody's
    for implementation in ("eager", NAME):
        model.zero_grad()
        run(model, implementation, ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert error(gradients[1][name], expected.double()) < 2e-4, name


@torch.no_grad()
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding(ids, padding):
    mask = mask_of(padding)
    eager, ours = both(make_model(), ids, attention_mask=mask)
    real = mask.bool()
    torch.testing.assert_close(ours.logits[real], eager.logits[real], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_padding_between_tokens(ids):
    """Full layers skip it; a sliding window counts columns in transformers and tokens in the packed op: refused."""
    mask = torch.ones(2, SEQLEN, dtype=torch.long)
    mask[1, 6:14] = 0
    with pytest.raises(softcap_ops.UnsupportedError, match="a sliding window over padding between tokens"):
        run(make_model(), NAME, ids, attention_mask=mask)
    eager, ours = both(make_model(layer_types=["full_attention"] * 4), ids, attention_mask=mask)
    real = mask.bool()
    torch.testing.assert_close(ours.logits[real], eager.logits[real], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_row_of_nothing_but_padding(ids):
    mask = mask_of("left")
    mask[0] = 0
    ours = run(make_model(), NAME, ids, attention_mask=mask)
    assert ours.logits.isfinite().all()


def prompt_of(ids, padding):
    """12 tokens: longer than the window, so that sliding layers drop keys from their caches."""
    prompt = ids[:, :12]
    mask = torch.ones_like(prompt)
    if padding == "left":
        mask[1, :5] = 0
    elif padding == "right":
        mask[1, -5:] = 0
    elif padding == "long":  # beyond the window: sliding layers see no padding after the first steps
        mask[1, :10] = 0
    return prompt, mask


def generate(model, implementation, prompt, mask, **options):
    model.set_attn_implementation(implementation)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "disable_compile": True, **options}
    return model.generate(prompt, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)


def assert_same_text(a, b):
    assert torch.equal(a.sequences, b.sequences)
    for x, y in zip(a.logits, b.logits, strict=True):
        torch.testing.assert_close(y, x, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("padding", [None, "left", "right", "long"])
def test_generation_equals_eager(ids, padding, cache):
    model = make_model()
    texts = [generate(model, name, *prompt_of(ids, padding), cache_implementation=cache) for name in ("eager", NAME)]
    assert_same_text(*texts)


@pytest.fixture
def op_calls():
    """Name, rows of q and length of k of every call of an op, in order."""
    calls = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.name() if isinstance(func, torch._ops.OpOverload) else ""
            if name.startswith("softcap_ops::") and "_cpu" not in name:
                calls.append((name.removeprefix("softcap_ops::"), args[0].shape[1], args[1].shape[1]))
            return func(*args, **(kwargs or {}))

    with Spy():
        yield calls


@torch.no_grad()
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("padding", [None, "left"])
def test_generation_decodes_on_the_cache(ids, padding, cache, op_calls):
    """Every step reads the cache in place; a static one is handed over whole."""
    generate(make_model(), NAME, *prompt_of(ids, padding), cache_implementation=cache)
    steps = op_calls[4:]
    assert len(steps) == 4 * 7
    assert {(name, rows) for name, rows, _ in steps} == {("decode_attention_fwd", 1)}
    capacity = 12 + 8
    for i in range(7):
        sliding, full = (steps[4 * i + layer][2] for layer in (0, 1))
        assert (sliding, full) == (WINDOW, 13 + i if cache is None else capacity - 1)


@torch.no_grad()
@pytest.mark.parametrize("padding", [None, "left", "long"])
def test_compiled_generation_equals_eager(ids, padding):
    """generate() compiles its steps with a static cache. In one graph, and a few of them for all steps: the sliding
    caches fill up on the way."""
    model, (prompt, mask) = make_model(), prompt_of(ids, padding)
    prompt, mask = prompt[:, 6:], mask[:, 6:]
    expected = generate(model, "eager", prompt, mask, max_new_tokens=16)
    counter = CompileCounterWithBackend("aot_eager")

    def backend(*args):  # generate() copies its options: a function is still the same one then
        return counter(*args)

    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config, "disable_compile": False}
    assert_same_text(expected, generate(model, NAME, prompt, mask, max_new_tokens=16, **options))
    assert 1 <= counter.frame_count <= 4


@torch.no_grad()
def test_speculative_generation_equals_eager(ids):
    """Several queries a step, and caches that are cut back."""
    model, prompt = make_model(), ids[:1, :6].repeat(1, 2)
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12, "eos_token_id": 64}  # a token that never comes
    texts = [generate(model, name, prompt, torch.ones_like(prompt), **options) for name in ("eager", NAME)]
    assert torch.equal(texts[0].sequences, texts[1].sequences)


@torch.no_grad()
def test_masks_in_a_compiled_model(ids):
    """Left padding needs no look at the data; other padding stops the graph."""
    model, mask = make_model(num_hidden_layers=2), mask_of("left")
    expected = run(model, "eager", ids, attention_mask=mask).logits
    model.set_attn_implementation(NAME)
    f = torch.compile(lambda m: model(input_ids=ids, attention_mask=m, use_cache=False).logits, fullgraph=True,
                      backend="aot_eager")  # fmt: skip
    real = mask.bool()
    torch.testing.assert_close(f(mask)[real], expected[real], atol=1e-4, rtol=1e-4)
    with pytest.raises(RuntimeError, match="padding elsewhere than on the left"):
        f(mask_of("right"))


@torch.no_grad()
def test_without_a_decode_kernel(ids, monkeypatch):
    """Where no backend reads caches, the packed op serves, on the keys gathered."""

    def refuse(*args, **kwargs):
        raise softcap_ops.UnsupportedError("no backend")

    model = make_model()
    expected = generate(model, "eager", *prompt_of(ids, "left"), cache_implementation="static")
    monkeypatch.setattr(integration, "softcap_attention_decode", refuse)
    assert_same_text(expected, generate(model, NAME, *prompt_of(ids, "left"), cache_implementation="static"))


@torch.no_grad()
def test_prefill_in_chunks(ids):
    """Several queries against a longer cache: causal is aligned bottom right."""
    model = make_model()
    whole, cache, chunks = run(model, "eager", ids).logits, None, []
    model.set_attn_implementation(NAME)
    for chunk in ids.split([10, 1, 15, 6], dim=1):
        past = {} if cache is None else {cache_argument(Gemma2ForCausalLM.forward): cache}
        out = model(input_ids=chunk, use_cache=True, **past)
        cache = out[cache_argument(Gemma2ForCausalLM.forward)]
        chunks.append(out.logits)
    torch.testing.assert_close(torch.cat(chunks, 1), whole, atol=1e-4, rtol=1e-4)


def cache_argument(function):
    """`cache` from transformers 5.20 or so on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(inspect.unwrap(function)).parameters else "past_key_values"


@torch.no_grad()
def test_packed_sequences(ids):
    """By position_ids and by cu_seq_lens, both equal to the sequences on their own."""
    model, row = make_model(), ids[:1]
    model.set_attn_implementation(NAME)
    apart = torch.cat([model(input_ids=part).logits for part in row.split([10, 17, 5], dim=1)], dim=1)
    position_ids = torch.cat([torch.arange(n) for n in (10, 17, 5)]).unsqueeze(0)
    for options in ({"use_cache": False}, {}):
        together = model(input_ids=row, position_ids=position_ids, **options).logits
        torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)
    cu = torch.tensor([0, 10, 27, 32], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 17, "max_length_k": 17}
    together = model(input_ids=row, position_ids=position_ids, use_cache=False, **lengths).logits
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"):
        model(input_ids=row, use_cache=False, cu_seq_lens_q=cu)


@torch.no_grad()
def test_packed_rows_that_differ(ids):
    position_ids = torch.stack([torch.cat([torch.arange(n), torch.arange(SEQLEN - n)]) for n in (10, 20)])
    eager, ours = both(make_model(), ids, position_ids=position_ids, use_cache=False)
    torch.testing.assert_close(ours.logits, eager.logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_what_reaches_the_op(ids):
    calls = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.softcap_ops.attention_fwd.default:
                calls.append((*args, *(-1, -1)[len(args) - 6 :]))  # the dispatcher drops trailing defaults
            return func(*args, **(kwargs or {}))

    model = make_model()
    model.set_attn_implementation(NAME)
    with Spy():
        model(input_ids=ids)
    assert len(calls) == 4
    for layer, (q, k, v, softcap, scale, causal, left, right, *_) in enumerate(calls):
        assert (q.shape, k.shape, v.shape) == ((2, SEQLEN, 4, 16), (2, SEQLEN, 2, 16), (2, SEQLEN, 2, 16))
        assert (softcap, scale, causal) == (CAP, SCALAR**-0.5, True)
        assert (left, right) == ((WINDOW - 1, 0) if layer % 2 == 0 else (-1, -1))


def layer(**config):
    module = torch.nn.Module()
    module.is_causal = True
    module.config = types.SimpleNamespace(attn_logit_softcapping=CAP, **config)
    return module


def test_window_counts_the_token_itself():
    """Row 23: sliding_window=5 lets the last of 10 tokens see 5 keys; NaN in the sixth must not reach it."""
    q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
    v[:, :, 4] = float("nan")
    out, weights = integration.attention(layer(), q, k, v, None, sliding_window=5, softcap=CAP)
    assert weights is None
    assert out[:, 9].isfinite().all()
    assert out[:, 8].isnan().all()


@pytest.mark.parametrize(
    ("named", "kwargs"),
    [
        ("dropout", {"dropout": 0.1}),
        ("is_causal=False", {"is_causal": False}),
        ("block_table", {"block_table": torch.zeros(1, 1)}),
        ("k_cache", {"k_cache": torch.zeros(1, 1)}),
        ("s_aux", {"s_aux": torch.zeros(2)}),
        ("position_bias", {"position_bias": torch.zeros(1, 2, 4, 4)}),
        ("sinks", {"sinks": torch.zeros(2)}),
        ("block_indices", {"block_indices": torch.zeros(1, 2, dtype=torch.int64)}),
        ("unheard_of", {"unheard_of": torch.zeros(2)}),
        ("output_attentions", {"output_attentions": True}),
        ("attn_logit_softcapping", {"softcap": None}),
        ("attention_mask of 4 dimensions", {"attention_mask": torch.ones(1, 1, 4, 4)}),
        ("position_ids of 3 dimensions", {"position_ids": torch.zeros(3, 1, 4)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_offered_is_refused_by_name(named, kwargs):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(softcap_ops.UnsupportedError, match=named):
        integration.attention(layer(), q, q, q, **{"attention_mask": None, "softcap": CAP, **kwargs})


def test_a_window_of_no_token_is_refused():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="sliding_window must be at least 1 token or None, got 0"):
        integration.attention(layer(), q, q, q, None, softcap=CAP, sliding_window=0)


def test_a_mask_of_integers_is_a_mask():
    """As many tokens as sequences: nothing in its shape tells such a mask from another pair of rows."""
    q, mask = torch.randn(2, 2, 2, 8), torch.tensor([[0, 1], [1, 1]])
    expected, _ = integration.attention(layer(), q, q, q, mask.bool(), softcap=CAP)
    for dtype in (torch.int32, torch.int64):
        actual, _ = integration.attention(layer(), q, q, q, mask.to(dtype), softcap=CAP)
        assert torch.equal(actual, expected)


def test_dropout_in_training_is_refused(ids):
    model = make_model(attention_dropout=0.1)
    model.set_attn_implementation(NAME)
    model(input_ids=ids)
    with pytest.raises(softcap_ops.UnsupportedError, match=r"attention_dropout=0\.1"):
        model.train()(input_ids=ids)


def test_output_attentions_of_a_model_is_refused(ids):
    model = make_model()
    model.set_attn_implementation(NAME)
    with pytest.raises(softcap_ops.UnsupportedError, match="output_attentions"):
        model(input_ids=ids, output_attentions=True)


def test_other_masks_are_refused(ids):
    model = make_model()
    model.set_attn_implementation(NAME)
    with pytest.raises(softcap_ops.UnsupportedError, match="attention_mask of 4 dimensions"):
        model(input_ids=ids, attention_mask=torch.zeros(2, 1, SEQLEN, SEQLEN))
    arguments = {"config": model.config, "inputs_embeds": torch.zeros(2, SEQLEN, 64), "attention_mask": None}
    arguments[cache_argument(create_causal_mask)] = None
    with pytest.raises(softcap_ops.UnsupportedError, match="or_mask_function"):
        create_causal_mask(**arguments, or_mask_function=lambda b, h, q, k: k < 4)
    blocks = torch.full((2, SEQLEN), -1)
    blocks[:, 3:7] = 0
    if "block_sequence_ids" in inspect.signature(inspect.unwrap(create_causal_mask)).parameters:
        with pytest.raises(softcap_ops.UnsupportedError, match="sees a later one"):
            create_causal_mask(**arguments, block_sequence_ids=blocks)
    model.config.attention_chunk_size = 8
    with pytest.raises(softcap_ops.UnsupportedError, match="attention_chunk_size"):
        create_chunked_causal_mask(**arguments)


@pytest.mark.parametrize("name", ["", "eager", "sdpa", "flex_attention", "my_flash", "owner/kernel", "paged|x"])
def test_names_that_transformers_takes_for_others(name):
    with pytest.raises(ValueError, match="name must differ"):
        integration.register(name)


@torch.no_grad()
def test_every_way_to_choose_an_implementation(ids, tmp_path):
    assert integration.register() == "softcap_ops"
    assert integration.register("my_attention") == "my_attention"
    model = make_model()
    expected = run(model, NAME, ids).logits
    model.save_pretrained(tmp_path)
    for name in (NAME, "my_attention"):
        for load in (
            lambda: Gemma2ForCausalLM.from_pretrained(tmp_path, attn_implementation=name),  # noqa: B023
            lambda: AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name),  # noqa: B023
            lambda: AutoModelForCausalLM.from_pretrained(
                tmp_path,
                config=AutoConfig.from_pretrained(tmp_path, attn_implementation=name),  # noqa: B023
            ),
        ):
            loaded = load().eval()
            assert loaded.config._attn_implementation == name
            assert torch.equal(loaded(input_ids=ids).logits, expected)
        weights = model.state_dict()
        config = AutoConfig.from_pretrained(tmp_path)
        for make in (
            lambda: Gemma2ForCausalLM._from_config(config, attn_implementation=name),  # noqa: B023
            lambda: AutoModelForCausalLM.from_config(config, attn_implementation=name),  # noqa: B023
            lambda: Gemma2ForCausalLM(Gemma2Config.from_pretrained(tmp_path, attn_implementation=name)),  # noqa: B023
        ):
            made = make().eval()
            made.load_state_dict(weights)
            assert made.config._attn_implementation == name
            assert torch.equal(made(input_ids=ids).logits, expected)
        for change in (name, {"": name}):
            model.set_attn_implementation("eager")
            model.set_attn_implementation(change)
            assert model.config._attn_implementation == name
            assert torch.equal(model(input_ids=ids).logits, expected)


def test_compiled_in_one_graph(ids):
    """Loss and gradients, fullgraph; packed sequences, which such a graph cannot see, stop it."""
    model = make_model(num_hidden_layers=2)
    model.set_attn_implementation(NAME)
    step = torch.compile(
        lambda tokens, positions: model(input_ids=tokens, position_ids=positions, labels=tokens, use_cache=False).loss,
        fullgraph=True,
        backend="aot_eager",
    )
    positions = torch.arange(SEQLEN).unsqueeze(0)
    step(ids, positions).backward()
    compiled = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, p in model.named_parameters():
        assert error(compiled[name], p.grad.double()) < 2e-4, name
    with pytest.raises(RuntimeError, match="position_ids of packed sequences in a compiled model"):
        step(ids, positions % 10)


def test_a_model_that_does_not_pass_its_cap_is_named(ids):
    """Gemma-3 keeps the cap in its config and forgets it: it runs uncapped elsewhere, and is refused here."""
    options = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    options |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "sliding_window": WINDOW}
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**options, attn_logit_softcapping=CAP)).eval()
    model.set_attn_implementation(NAME)
    with pytest.raises(
        softcap_ops.UnsupportedError,
        match=r"Gemma3Attention with config\.attn_logit_softcapping=50\.0: it does not pass its cap",
    ):
        model(input_ids=ids)
    model.config.attn_logit_softcapping = None
    with torch.no_grad():
        eager, ours = both(model, ids)
    torch.testing.assert_close(ours.logits, eager.logits, atol=1e-4, rtol=1e-4)


def make_encoder_decoder(cap=CAP, **overrides):
    """T5Gemma: bidirectional layers with and without a window, and cross attention, all of them capped."""
    options = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": SCALAR, "pad_token_id": 0}
    options |= {"sliding_window": WINDOW, "attn_logit_softcapping": cap, "max_position_embeddings": 128, **overrides}
    torch.manual_seed(0)
    sides = {side: T5GemmaModuleConfig(**options) for side in ("encoder", "decoder")}
    config = T5GemmaConfig(**sides, vocab_size=64, dropout_rate=0.0, attention_dropout=0.0)
    model = T5GemmaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p *= 30 if "q_proj" in name or "k_proj" in name else 10 if "v_proj" in name else 1
    return model


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_encoder_decoder_equals_eager(ids, padding):
    """A cross attention of 20 queries on 32 keys, of which padding hides some."""
    mask = None if padding is None else mask_of(padding)
    results = []
    for model, name in (
        (make_encoder_decoder(), "eager"),
        (make_encoder_decoder(), NAME),
        (make_encoder_decoder(None), NAME),
    ):
        model.set_attn_implementation(name)
        out = model(input_ids=ids, attention_mask=mask, labels=ids[:, :20].contiguous())
        out.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((out.logits.detach(), gradients))
    (expected, gradients), (logits, mine), (uncapped, _) = results
    assert error(uncapped, expected.double()) > 1e-2
    assert error(logits, expected.double()) < 1e-4
    for name, gradient in gradients.items():
        assert error(mine[name], gradient.double()) < 1e-3, name


@torch.no_grad()
def test_encoder_decoder_generation_equals_eager(ids):
    """With a cache, where transformers makes a mask of the right size for it: 5.4 does not."""
    model, texts = make_encoder_decoder(), []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        options = {"max_new_tokens": 12, "num_beams": 2, "do_sample": False, "eos_token_id": None}
        options["use_cache"] = cache_argument(Gemma2ForCausalLM.forward) == "cache"
        texts.append(model.generate(ids, attention_mask=mask_of("left"), disable_compile=True, **options))
    assert torch.equal(*texts)


@torch.no_grad()
def test_encoder_decoder_compiled_in_one_graph(ids):
    model, mask = make_encoder_decoder(), mask_of("right")
    model.set_attn_implementation(NAME)

    def encode(mask):
        return model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state

    compiled = torch.compile(encode, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(mask), encode(mask), atol=1e-4, rtol=1e-4)
    mask[0, 6:14] = 0
    with pytest.raises(RuntimeError, match="a sliding window over padding between tokens"):
        compiled(mask)


@torch.no_grad()
def test_what_bidirectional_attention_does_not_offer(ids):
    model, mask = make_encoder_decoder(), mask_of("right")
    model.set_attn_implementation(NAME)
    mask[0, 6:14] = 0
    with pytest.raises(softcap_ops.UnsupportedError, match="a sliding window over padding between tokens"):
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    q, k, both_ways = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8), torch.ones(1, 1, 0, dtype=torch.bool)
    cu = torch.tensor([0, 2, 4], dtype=torch.int32)
    with pytest.raises(softcap_ops.UnsupportedError, match="cu_seq_lens"):
        integration.attention(layer(), q, q, q, both_ways, softcap=CAP, cu_seq_lens_q=cu)
    with pytest.raises(ValueError, match="attention_mask must have a column for each of the 6 keys, got 4"):
        integration.attention(layer(), q, k, k, torch.ones(1, 1, 4, dtype=torch.bool), softcap=CAP)
    with pytest.raises(softcap_ops.UnsupportedError, match="a sliding window in cross attention"):
        integration.attention(layer(sliding_window=2), q, k, k, both_ways, softcap=CAP, sliding_window=2)
    with pytest.raises(softcap_ops.UnsupportedError, match="bidirectional attention on a KV cache"):
        integration.attention_mask(1, 4, 6, q_offset=2, allow_is_bidirectional_skip=True)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_trainer_with_gradient_checkpointing(use_reentrant, tmp_path):
    """The losses of a few steps on batches that are padded on the right are those of eager attention; and with a
    cap of twice the size they are not."""
    pytest.importorskip("accelerate")
    texts = [torch.randint(1, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(12, 24)]
    data = [{"input_ids": text, "labels": text} for text in texts]

    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    def losses(implementation, **config):
        model = make_model(num_hidden_layers=2, **config)
        model.set_attn_implementation(implementation)
        arguments = TrainingArguments(
            tmp_path, max_steps=3, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, seed=0,
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate)
        trainer.train()
        return torch.tensor([row["loss"] for row in trainer.state.log_history if "loss" in row])

    eager, ours = losses("eager"), losses(NAME)
    assert len(ours) == 3
    difference = (losses(NAME, attn_logit_softcapping=2 * CAP) - eager).abs().max()
    assert (ours - eager).abs().max() < 0.1 * difference
