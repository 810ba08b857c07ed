"""Selection: the facts that a backend decides on, the order, what forcing does, and how refusals read.

The backends here are made up, and serve on the CPU: those of real machines have test_fa_selection.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import evaluate
from samples import Sample, each_sample, named
from torch import Tensor

import softcap_ops
from softcap_ops import UnsupportedError, _impl, backends, explain, softcap_attention
from softcap_ops.backends import Problem, cpu

BOTH_LAYOUTS = named("gqa", "packed_gqa")
Support = Callable[[Problem], str | None]


@pytest.fixture(autouse=True)
def _no_memory() -> Iterator[None]:
    """Decisions are cached; none may outlive a test that changed the table."""
    _impl.forget()
    yield
    _impl.forget()


class Table:
    """The table of backends, to be filled; `ran` says which kernels were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.ran: list[str] = []
        self.modules: list[ModuleType] = []

    def add(
        self,
        name: str,
        support: Support = lambda p: None,
        *,
        install: str | None = None,
        probe: str | None = None,
        opt_in: str | None = None,
    ) -> None:
        def forward(*args: Any) -> Any:
            self.ran.append(f"{name} forward")
            return cpu.forward(*args)

        def backward(*args: Any) -> Any:
            self.ran.append(f"{name} backward")
            return cpu.backward(*args)

        module = ModuleType(name)
        module.__dict__.update(
            NAME=name, forward=forward, backward=backward, support_error=support, install_error=lambda: install,
            probe_error=lambda p: probe, opt_in_error=lambda: opt_in,
        )  # fmt: skip
        self.modules.append(module)
        self.monkeypatch.setattr(backends, "_TABLE", tuple(self.modules))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(monkeypatch)


def run(sample: Sample = BOTH_LAYOUTS[0], **overrides: Any) -> None:
    evaluate(sample.bind(**overrides), sample.inputs())


def forward_only(sample: Sample = BOTH_LAYOUTS[0], **overrides: Any) -> None:
    sample.attention(*sample.inputs().qkv, **overrides)


# ---- order -------------------------------------------------------------------------------------------------------


def test_the_first_that_can_serves(table: Table) -> None:
    table.add("absent", install="not installed")
    table.add("cuda_only", lambda p: "CUDA only" if p.device_type != "cuda" else None)
    table.add("shy", opt_in="set SHY=1")
    table.add("broken", probe="built without softcap")
    table.add("good")
    table.add("better_late")
    run()
    assert table.ran == ["good forward", "good backward"]


def test_a_missing_backward_is_noticed_before_the_forward(table: Table) -> None:
    """case 7: a kernel without a capped backward serves inference only; training goes elsewhere from the start."""
    table.add("half", lambda p: "no backward with softcap" if p.needs_backward and p.softcap else None)
    table.add("whole")
    run()
    assert table.ran == ["whole forward", "whole backward"]
    table.ran.clear()
    forward_only()
    with torch.no_grad():
        q, k, v = (t.requires_grad_() for t in BOTH_LAYOUTS[0].inputs().qkv)
        BOTH_LAYOUTS[0].attention(q, k, v)
    run(softcap=None)
    assert table.ran == ["half forward"] * 3 + ["half backward"]


@pytest.mark.parametrize("call", ["public", "op"])
def test_a_missing_backward_is_refused_when_forced(table: Table, call: str) -> None:
    """case 7: not hours later, in the backward."""
    table.add("half", lambda p: "no backward with softcap" if p.needs_backward else None)
    sample = BOTH_LAYOUTS[0]
    q, k, v = sample.inputs().qkv
    q.requires_grad_()
    function = softcap_attention if call == "public" else torch.ops.softcap_ops.attention_fwd
    with pytest.raises(UnsupportedError) as caught:
        function(q, k, v, softcap=5.0, backend="half")
    assert str(caught.value) == "softcap_ops: backend 'half' cannot serve this call: no backward with softcap"
    assert not table.ran


def test_deterministic_goes_on_to_the_next(table: Table) -> None:
    table.add("atomic", lambda p: "its backward is not deterministic" if p.deterministic else None)
    table.add("steady")
    run(deterministic=True)
    assert table.ran == ["steady forward", "steady backward"]
    table.ran.clear()
    run(deterministic=False)
    run()
    assert table.ran == ["atomic forward", "atomic backward"] * 2
    table.ran.clear()
    torch.use_deterministic_algorithms(True)
    try:
        run()
        run(deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert table.ran == ["steady forward", "steady backward", "atomic forward", "atomic backward"]
    with pytest.raises(UnsupportedError, match="backend 'atomic' cannot serve this call: its backward is not determin"):
        run(deterministic=True, backend="atomic")


@each_sample(BOTH_LAYOUTS)
def test_forced(table: Table, sample: Sample) -> None:
    """A name is obeyed, for the backward too, whatever is preferred and without asking to be asked."""
    table.add("preferred")
    table.add("forced", opt_in="set FORCED=1")
    run(sample, backend="forced")
    assert table.ran == ["forced forward", "forced backward"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_graph_does_not_fix_the_backend(table: Table, compiled: bool) -> None:
    """What is chosen is decided when the kernel runs, on real tensors."""
    table.add("first", lambda p: "heads" if p.heads_q > 4 else None)
    table.add("second")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softcap_attention(q, k, v, softcap=5.0)

    f = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else attention
    for heads in (2, 8):
        q = torch.randn(1, 9, heads, 8)
        f(q, q, q)
    assert table.ran == ["first forward", "second forward"]


# ---- what is said when nothing serves ------------------------------------------------------------------------------


def test_nothing_serves(table: Table) -> None:
    table.add("absent", install="pip install absent")
    table.add("picky", lambda p: f"head_dim at most 16, got {p.head_dim}")
    table.add("shy", opt_in="set SHY=1")
    with pytest.raises(UnsupportedError) as caught:
        forward_only()
    assert isinstance(caught.value, NotImplementedError)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("softcap_ops: no backend can serve this call (Problem(device_type='cpu', ")
    assert lines[1:] == ["  absent: pip install absent", "  picky: head_dim at most 16, got 32", "  shy: set SHY=1"]


def test_the_cause_is_chained(table: Table) -> None:
    from softcap_ops.backends.problem import Refusal

    cause = OSError("undefined symbol: _ZN3c105Error")
    table.add("broken", lambda p: Refusal("cannot be loaded", cause))
    for call in ({}, {"backend": "broken"}):
        with pytest.raises(UnsupportedError, match="cannot be loaded") as caught:
            forward_only(**call)
        assert caught.value.__cause__ is cause


def test_unknown_name(table: Table) -> None:
    table.add("one")
    table.add("two")
    for function in (softcap_attention, explain):
        q, k, v = BOTH_LAYOUTS[0].inputs().qkv
        with pytest.raises(ValueError, match=r"backend must be None or one of \['one', 'two'\], got 'three'"):
            function(q, k, v, softcap=5.0, backend="three")


def test_the_missing_extension_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softcap_ops._extension, "LOAD_ERROR", "_C.so was not built for this installation")
    with pytest.raises(UnsupportedError, match=r"\n  cpu: _C\.so was not built for this installation"):
        forward_only()
    with pytest.raises(UnsupportedError, match=r"backend 'cpu' cannot serve this call: _C\.so was not built"):
        forward_only(backend="cpu")
    assert softcap_ops.available_backends()["cpu"] == "_C.so was not built for this installation"


# ---- facts ---------------------------------------------------------------------------------------------------------


PROBLEMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"device_type": "cpu", "device_index": None, "capability": None}),
    ({}, {"dtype": torch.float32, "head_dim": 32, "heads_q": 6, "heads_kv": 2}),
    ({"softcap": 7}, {"softcap": 7.0}),
    ({"softcap": None}, {"softcap": 0.0}),
    ({"causal": False}, {"causal": False, "window": (-1, -1)}),
    ({"causal": True}, {"causal": True, "window": (-1, -1)}),
    ({"causal": False, "window": (3, 4)}, {"causal": False, "window": (3, 4)}),
    ({"causal": True, "window": (3, 4)}, {"causal": True, "window": (3, -1)}),
    ({"causal": False, "window": (3, 0)}, {"causal": True, "window": (3, -1)}),  # the same mask by another name
    ({"causal": False, "window": (500, 500)}, {"causal": False, "window": (-1, -1)}),  # a window that hides nothing
    ({"deterministic": True}, {"deterministic": True}),
    ({"deterministic": False}, {"deterministic": False}),
    ({"deterministic": None}, {"deterministic": False}),
]


@pytest.mark.parametrize(("call", "facts"), PROBLEMS, ids=str)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@each_sample(BOTH_LAYOUTS)
def test_facts(table: Table, sample: Sample, requires_grad: bool, call: dict[str, Any], facts: dict[str, Any]) -> None:
    """Every argument reaches the question, for the forward and for the backward."""
    asked: list[Problem] = []
    table.add("spy", lambda p: asked.append(p))  # type: ignore[func-returns-value]
    if requires_grad:
        run(sample, **call)
    else:
        forward_only(sample, **call)
    assert len(asked) == 1  # the decision on the forward is the one on the backward, and is remembered
    for name, value in {**facts, "packed": sample.packed, "needs_backward": requires_grad}.items():
        assert getattr(asked[0], name) == value, name


def test_problem_is_a_value() -> None:
    fields = {f.name: None for f in dataclasses.fields(Problem)}
    assert hash(Problem(**fields)) == hash(Problem(**fields))  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Problem(**fields).softcap = 1.0  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("call", ["public", "op"])
@each_sample(BOTH_LAYOUTS)
def test_kernels_get_the_parameters(sample: Sample, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """case 4: nothing is dropped on the way to the kernel, forward and backward, on either route."""
    seen: list[Any] = []

    def spy(kernel: Callable[..., Any], at: int) -> Callable[..., Any]:
        return lambda *args: (seen.append(args[at]), kernel(*args))[1]

    monkeypatch.setattr(cpu, "forward", spy(cpu.forward, 4))
    monkeypatch.setattr(cpu, "backward", spy(cpu.backward, 8))
    options = {"softcap": 7, "scale": 0.3, "causal": True, "window": (11, 5), "deterministic": True}
    x = sample.inputs()
    if call == "public":
        evaluate(sample.bind(**options), x)
    else:
        packing = tuple(sample.packing().values()) if sample.packed else ()
        evaluate(lambda *qkv: sample.op(*qkv, *packing, 7, 0.3, True, 11, 5, True), x)
    for parameters in seen:
        assert parameters == (7.0, 0.3, True, (11, 5), True)
    assert len(seen) == 2
    seen.clear()
    evaluate(sample.bind(softcap=None, causal=False), x)
    assert seen == [(0.0, pytest.approx(32**-0.5), False, (-1, -1), False)] * 2


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_explain(table: Table) -> None:
    table.add("absent", install="pip install absent")
    table.add("training", lambda p: None if p.needs_backward else "training only")
    table.add("any")
    q, k, v = BOTH_LAYOUTS[0].inputs().qkv
    assert_expected_inline(
        explain(q, k, v, softcap=5.0),
        """\
would run on: any
  absent    pip install absent
  training  training only
  any       supported""",
    )
    assert_expected_inline(
        explain(q.requires_grad_(), k, v, softcap=5.0),
        """\
would run on: training
  absent    pip install absent
  training  supported
  any       supported""",
    )
    assert_expected_inline(
        explain(q, k, v, softcap=5.0, backend="absent"),
        """\
softcap_ops: backend 'absent' cannot serve this call: pip install absent
  absent    pip install absent
  training  supported
  any       supported""",
    )
    assert not table.ran


def test_explain_says_what_could_be_installed(table: Table) -> None:
    """Of what is preferred to the choice, would serve the call, and is absent; whether it must be asked for or not."""
    table.add("shy", install="no module named shy", opt_in="set SHY=1")
    table.add("picky", lambda p: "another device", install="no module named picky")
    table.add("broken", probe="built without softcap")
    table.add("any")
    table.add("later", install="no module named later")
    for module in table.modules:
        module.INSTALL = f"pip install {module.NAME}"  # type: ignore[attr-defined]
    q, k, v = BOTH_LAYOUTS[0].inputs().qkv
    assert_expected_inline(
        explain(q, k, v, softcap=5.0),
        """\
would run on: any
  shy     set SHY=1
  picky   another device
  broken  built without softcap
  any     supported
  later   no module named later
preferred where installed: shy (pip install shy)""",
    )


def test_explain_nothing(table: Table) -> None:
    table.add("absent", install="pip install absent")
    q, k, v = BOTH_LAYOUTS[0].inputs().qkv
    decision, *verdicts = explain(q, k, v, softcap=5.0).splitlines()
    assert decision.startswith("softcap_ops: no backend can serve this call (Problem(")
    assert verdicts == ["  absent  pip install absent"]


def test_explain_packed(table: Table) -> None:
    asked: list[Problem] = []
    table.add("spy", lambda p: asked.append(p))  # type: ignore[func-returns-value]
    sample = BOTH_LAYOUTS[1]
    explain(*sample.inputs().qkv, softcap=5.0, window=(7, 3), **sample.packing())
    assert (asked[0].packed, asked[0].window, asked[0].softcap) == (True, (7, 3), 5.0)


@pytest.mark.parametrize("missing", ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"])
def test_explain_takes_all_lengths_or_none(missing: str) -> None:
    """A packed call with a length left out is not explained as another call."""
    sample = BOTH_LAYOUTS[1]
    with pytest.raises(TypeError, match=f"{missing} must be"):
        explain(*sample.inputs().qkv, softcap=5.0, **{**sample.packing(), missing: None})


def test_explain_checks_its_arguments() -> None:
    q, k, v = BOTH_LAYOUTS[0].inputs().qkv
    with pytest.raises(ValueError, match="softcap must be finite"):
        explain(q, k, v, softcap=-1.0)
    with pytest.raises(TypeError, match="k must have the dtype of q"):
        explain(q, k.double(), v, softcap=5.0)


def test_explain_on_this_machine() -> None:
    q, k, v = BOTH_LAYOUTS[0].inputs().qkv
    lines = explain(q, k, v, softcap=5.0).splitlines()
    assert lines[0] == "would run on: cpu"
    assert [line.split()[0] for line in lines[1:]] == list(softcap_ops.available_backends())


def test_explain_of_a_call_on_a_cache() -> None:
    q, lengths = torch.randn(1, 4, 2, 8), torch.tensor([3], dtype=torch.int32)
    assert explain(q, q, q, softcap=5.0, cache_seqlens=lengths).startswith("would run on: cpu")
    refused = explain(q.requires_grad_(), q, q, softcap=5.0, cache_seqlens=lengths)
    assert refused.startswith("would be refused: attention on a KV cache has no gradient")
    with pytest.raises(ValueError, match="cache_seqlens must be given with cache_leftpad"):
        explain(q, q, q, softcap=5.0, cache_leftpad=lengths)
    with pytest.raises(ValueError, match="not both"):
        explain(q, q, q, softcap=5.0, cache_seqlens=lengths, max_seqlen_q=4)
