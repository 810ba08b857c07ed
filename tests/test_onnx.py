"""ONNX export: refused on every route with one message while the cap is on, plain attention while it is off.

CASES rows 73, 75, 76. Not here, since nothing of ours runs: torch itself refuses a ScriptModule given to dynamo=True
and a traced module called inside the module that dynamo=False traces, whatever they hold.
"""

import re
import subprocess
import sys
import time

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import softcap_ops
from softcap_ops import _onnx

pytestmark = pytest.mark.filterwarnings("ignore")

FALLTHROUGH = torch.onnx.OperatorExportTypes.ONNX_FALLTHROUGH
EXPORTERS = {
    "dynamo": {"dynamo": True},
    "torchscript": {"dynamo": False},
    "fallthrough": {"dynamo": False, "operator_export_type": FALLTHROUGH},
}
exporters = pytest.mark.parametrize("options", EXPORTERS.values(), ids=EXPORTERS.keys())


class Dense(torch.nn.Module):
    op = "attention_fwd"

    def __init__(self, softcap, **kwargs):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.options = {"softcap": softcap, "causal": True, **kwargs}

    @staticmethod
    def inputs(seqlen_q=6, seqlen_k=6):
        g = torch.Generator().manual_seed(0)
        shapes = ((2, seqlen_q, 4, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 8))
        return tuple(torch.randn(shape, generator=g) * 6 for shape in shapes)

    def forward(self, q, k, v):
        return softcap_ops.softcap_attention(self.linear(q), k, v, **self.options)


class DenseBare(Dense):
    def forward(self, q, k, v):
        left, right = self.options.get("window", (-1, -1))
        return torch.ops.softcap_ops.attention_fwd(
            self.linear(q), k, v, self.options["softcap"], None, True, left, right
        )[0]


class Packed(Dense):
    op = "varlen_attention_fwd"

    @staticmethod
    def inputs():
        return (*(t[0] for t in Dense.inputs()), torch.tensor([0, 2, 6], dtype=torch.int32))

    def forward(self, q, k, v, cu):
        return softcap_ops.softcap_attention_varlen(
            self.linear(q), k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4, **self.options
        )


class PackedBare(Packed):
    def forward(self, q, k, v, cu):
        return torch.ops.softcap_ops.varlen_attention_fwd(
            self.linear(q), k, v, cu, cu, 4, 4, self.options["softcap"], None, True
        )[0]


models = pytest.mark.parametrize("model", [Dense, DenseBare, Packed, PackedBare], ids=lambda m: m.__name__)


def assert_refused(op, tmp_path, model, args, *, capped=True, **options):
    """The exception says our message, names the op and the remedy, and no file is left behind."""
    message = _onnx.message(op, capped)
    assert message.startswith(f"softcap_ops: torch.ops.softcap_ops.{op} cannot be exported to ONNX")
    assert 'attn_implementation="eager"' in message
    with pytest.raises(Exception, match=re.escape(message)):
        torch.onnx.export(model, args, str(tmp_path / "model.onnx"), **options)
    assert list(tmp_path.iterdir()) == []


@exporters
@models
def test_refused(model, options, tmp_path):
    assert_refused(model.op, tmp_path, model(50.0).eval(), model.inputs(), **options)


@exporters
def test_refused_under_no_grad(options, tmp_path):
    with torch.no_grad():
        assert_refused("attention_fwd", tmp_path, DenseBare(50.0).eval(), Dense.inputs(), **options)


@models
@pytest.mark.parametrize("decomposed", [False, True], ids=["training_ir", "core_aten"])
def test_refused_in_an_exported_program(model, decomposed, tmp_path):
    program = torch.export.export(model(50.0).eval(), model.inputs())
    if decomposed:
        program = program.run_decompositions()
    assert_refused(model.op, tmp_path, program, (), dynamo=True)


@models
@pytest.mark.parametrize("opset", [7, 9, 17, 20])
def test_refused_in_a_traced_module(model, opset, tmp_path):
    traced = torch.jit.trace(model(50.0).eval(), model.inputs(), check_trace=False)
    assert_refused(model.op, tmp_path, traced, model.inputs(), dynamo=False, opset_version=opset)
    assert_refused(
        model.op, tmp_path, traced, model.inputs(), dynamo=False, opset_version=opset, operator_export_type=FALLTHROUGH
    )


@exporters
def test_refused_in_a_traced_function_inside_the_model(options, tmp_path):
    inner = DenseBare(50.0).eval().requires_grad_(False)
    traced = torch.jit.trace(lambda q, k, v: inner(q, k, v), Dense.inputs(), check_trace=False)

    class Parent(torch.nn.Module):
        def forward(self, q, k, v):
            return traced(q, k, v) * 2

    assert_refused("attention_fwd", tmp_path, Parent().eval(), Dense.inputs(), **options)


@pytest.mark.parametrize("options", [EXPORTERS["torchscript"], EXPORTERS["fallthrough"]], ids=["plain", "fallthrough"])
def test_refused_in_a_scripted_module_behind_a_branch(options, tmp_path):
    class Scripted(torch.nn.Module):
        def forward(self, q, k, v):
            if q.sum() > 0:
                q = torch.ops.softcap_ops.attention_fwd(q, k, v, 50.0)[0]
            return q

    assert_refused("attention_fwd", tmp_path, torch.jit.script(Scripted()), Dense.inputs(), **options)


@pytest.mark.parametrize("options", [EXPORTERS["dynamo"], EXPORTERS["fallthrough"]], ids=["dynamo", "fallthrough"])
def test_backward_op_is_refused(options, tmp_path):
    class Backward(torch.nn.Module):
        def forward(self, q, k, v, out, lse):
            return torch.ops.softcap_ops.attention_bwd(out, None, q, k, v, out, lse, 50.0)[0]

    q, k, v = Dense.inputs()
    args = (q, k, v, q, torch.zeros(2, 4, 6))
    # TorchScript cannot trace output_mask, a list of bools, and without fall-through torch itself refuses one.
    module = Backward() if options["dynamo"] else torch.jit.script(Backward())
    assert_refused("attention_bwd", tmp_path, module, args, **options)


def run(path, inputs):
    """The model's first output, by onnxruntime where it is installed, else by ONNX's reference evaluator."""
    feeds = {i.name: t.numpy() for i, t in zip(onnx.load(path).graph.input, inputs, strict=True)}
    try:
        import onnxruntime
    except ImportError:
        return torch.from_numpy(ReferenceEvaluator(path).run(None, feeds)[0])
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, feeds)[0])


@pytest.mark.parametrize("softcap", [None, 0.0], ids=["None", "0.0"])
@pytest.mark.parametrize("model", [Dense, DenseBare], ids=lambda m: m.__name__)
def test_cap_off_exports_plain_attention(model, softcap, tmp_path):
    path, inputs = str(tmp_path / "model.onnx"), Dense.inputs(seqlen_q=5, seqlen_k=7)
    module = model(softcap, window=(3, 0)).eval()
    torch.onnx.export(module, inputs, path, dynamo=True)
    onnx.checker.check_model(path)
    assert {node.domain for node in onnx.load(path).graph.node} == {""}
    torch.testing.assert_close(run(path, inputs), module(*inputs).detach(), atol=1e-4, rtol=1e-4)


def test_cap_off_exports_an_exported_program_with_free_lengths(tmp_path):
    path, module = str(tmp_path / "model.onnx"), Dense(None, window=(3, 0)).eval()
    length_q, length_k = torch.export.Dim("seqlen_q", min=2), torch.export.Dim("seqlen_k", min=2)
    shapes = {"q": {1: length_q}, "k": {1: length_k}, "v": {1: length_k}}
    program = torch.export.export(module, Dense.inputs(5, 7), dynamic_shapes=shapes)
    torch.onnx.export(program, (), path, dynamo=True)
    for lengths in ((5, 7), (9, 9), (2, 12)):
        inputs = Dense.inputs(*lengths)
        torch.testing.assert_close(run(path, inputs), module(*inputs).detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [EXPORTERS["torchscript"], EXPORTERS["fallthrough"]], ids=["plain", "fallthrough"])
def test_cap_off_exports_through_torchscript(options, tmp_path):
    path, inputs, module = str(tmp_path / "model.onnx"), Dense.inputs(), Dense(None).eval()
    torch.onnx.export(module, inputs, path, **options)
    assert {node.domain for node in onnx.load(path).graph.node} == {""}
    torch.testing.assert_close(run(path, inputs), module(*inputs).detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", [DenseBare, PackedBare], ids=lambda m: m.__name__)
def test_cap_off_in_a_form_that_cannot_be_rewritten_is_refused(model, tmp_path):
    traced = torch.jit.trace(model(None).eval(), model.inputs(), check_trace=False)
    assert_refused(model.op, tmp_path, traced, model.inputs(), capped=False, dynamo=False)


def test_no_translation_to_onnx_attention_is_registered():
    """Row 76: Attention-23's softcap masks before it caps, so no op of ours may be mapped to it."""
    from torch.onnx._internal.exporter import _registration

    registered = {str(target) for target in _registration.ONNXRegistry.from_torchlib().functions}
    assert not {name for name in registered if "softcap_ops" in name}


def test_an_unrelated_export_still_works_and_leaves_the_ops_working(tmp_path):
    torch.onnx.export(torch.nn.Linear(2, 2), (torch.randn(1, 2),), str(tmp_path / "linear.onnx"), dynamo=True)
    assert Dense(50.0)(*Dense.inputs()).isfinite().all()


def test_importing_leaves_onnx_alone(tmp_path):
    code = (
        "import sys, softcap_ops; loaded = [m for m in ('torch.onnx', 'onnx', 'onnxscript') if m in sys.modules];"
        "assert not loaded, loaded; finders = len(sys.meta_path);"
        "import torch.onnx; assert len(sys.meta_path) == finders - 1; assert 'onnxscript' not in sys.modules;"
        "from torch.onnx._internal.torchscript_exporter.registration import registry;"
        "assert registry.is_registered_op('softcap_ops::attention_fwd', 17)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path)  # away from the source tree


def test_the_check_costs_little():
    """Well under a microsecond a call; the bound is loose for a busy machine."""
    calls = 20_000
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            _onnx.exporting_torchscript()
        best = min(best, (time.perf_counter() - start) / calls)
    assert best < 1e-6
