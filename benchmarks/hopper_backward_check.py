"""Checks and times builds of the Hopper backward kernel through its C interface.

usage: hopper_backward_check.py --lib NAME=PATH[:head_dim,...] [--lib ...] [--check] [--time] [--shapes a,b]

--check compares dq, dk, dv of a loss on out and lse with float64 autograd on fresh random data of every kind of
hopper_check.py, and with same-dtype eager; in any order and in turns (twice the same bits). Gradients and workspace
are poisoned before each call and guarded by elements behind them.
--time interleaves every build with the peers that import (cuDNN, FlashAttention-2 and -3) and prints the median
TFLOP/s of the rounds.
"""

import argparse
import ctypes
import functools
import json
import math
import statistics
import sys
import time
from typing import Any, ClassVar

import torch
from hopper_check import (
    CASES,
    INTEGERS,
    KINDS,
    SHAPES,
    SOFTCAPS,
    Library,
    describe,
    draw,
    flops,
    guarded,
    libraries,
    measure,
    relative,
)

from softcap_ops import reference

NAMES = ("dq", "dk", "dv")
INPUTS = ("q", "k", "v", "out", "dout")


class BwdArgs(ctypes.Structure):
    """softcap_hopper_bwd_args of csrc/cuda/softcap_hopper.h, field by field."""

    _fields_: ClassVar[Any] = (
        [("struct_size", ctypes.c_uint64)]
        + [(n, ctypes.c_void_p) for n in ("q", "k", "v", "out", "dout", "lse", "dlse", *NAMES, "workspace")]
        + [(n, ctypes.c_void_p) for n in ("cu_seqlens_q", "cu_seqlens_k")]
        + [(f"{t}_stride_{d}", ctypes.c_int64) for t in INPUTS for d in ("batch", "token", "head")]
        + [(n, ctypes.c_int64) for n in ("total_q", "total_k")]
        + [(n, ctypes.c_int32) for n in (*INTEGERS, "deterministic", "reserved")]
        + [("softcap", ctypes.c_float), ("scale", ctypes.c_float), ("stream", ctypes.c_void_p)]
    )


class BackwardLibrary(Library):
    """One build: fill_backward(), then run_backward() as often as wanted."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.c.softcap_hopper_bwd_workspace.restype = ctypes.c_int64

    def fill_backward(
        self,
        tensors: dict[str, Any],
        grads: Any,
        softcap: Any,
        scale: Any,
        causal: Any = False,
        window: Any = (-1, -1),
        cu: Any = (None, None),
        longest: Any = (0, 0),
        deterministic: Any = False,
    ) -> Any:
        """`tensors` holds q, k, v, out, dout, lse and dlse or None."""
        a = BwdArgs(struct_size=ctypes.sizeof(BwdArgs))
        everything = tensors | dict(zip(NAMES, grads, strict=True))
        describe(a, everything, INPUTS, softcap, scale, causal, window, cu, longest)
        a.deterministic = int(deterministic)
        size = self.c.softcap_hopper_bwd_workspace(ctypes.byref(a))
        workspace = torch.full((size // 4 + 64,), math.nan, device="cuda")
        a.workspace = workspace.data_ptr()
        a.keep = (tensors, grads, cu, workspace, workspace[size // 4 :])
        return a

    def run_backward(self, a: Any) -> None:
        self.call(self.c.softcap_hopper_bwd, a)


def gradients(x: Any, dout: Any, dlse: Any, options: Any, dtype: Any) -> Any:
    """dq, dk, dv by autograd through the formula; dtype bf16 is the eager formula of that dtype."""
    softcap, scale, causal, window = options
    leaves = [t.detach().to(dtype).requires_grad_() for t in x]
    out, lse = reference.attention(*leaves, softcap=softcap, scale=scale, causal=causal, window=window)
    outputs, given = [out], [dout.to(dtype)]
    if dlse is not None:
        outputs.append(lse)
        given.append(dlse.to(lse.dtype))
    return torch.autograd.grad(outputs, leaves, given)


def rounding(x: Any, out: Any, lse: Any, dout: Any, options: Any) -> Any:
    """Norms of what rounding `out` to its dtype does to dq, dk and dv: the kernel is given it so, autograd is not."""
    q, k, _ = (t.double() for t in x)
    softcap, scale, causal, window = options
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    t = torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) * (scale / softcap))
    w = torch.exp(softcap * t - lse.double()[..., None]).nan_to_num(0.0, 0.0, 0.0) * (1 - t * t)
    seen = reference.visible(q.shape[1], k.shape[1], causal, window, q.device)
    w = w if seen is None else w.masked_fill(~seen, 0.0)
    delta = (dout.double() * out.double()).norm(dim=-1).transpose(1, 2)[..., None] * torch.finfo(out.dtype).eps / 2
    dq = torch.einsum("bhij,bjhd->bihd", w * delta, k.abs()) * scale
    dk = torch.einsum("bhij,bihd->bjhd", w * delta, q.abs()) * scale
    return dq.norm().item(), dk.norm().item(), 0.0


def check_dense(
    name: Any, lib: Any, head_dims: Any, seed: Any, failures: Any, dtype: Any, softcaps: Any, cases: Any = ()
) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for d in head_dims:
        worst: dict[Any, Any] = {}
        for index, (label, shape, causal, window) in enumerate(CASES):
            if cases and label not in cases:
                continue
            for turn, kind in enumerate(KINDS):
                softcap, scale = softcaps[(index + turn) % len(softcaps)], d**-0.5
                q, k, v = draw((*shape, d), kind, softcap, generator, dtype)
                dout = torch.randn(q.shape, device="cuda", generator=generator).to(dtype)
                if index % 3 == 1:  # strided inputs
                    q, k, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, dout))
                    v = torch.cat((v, v), -1)[..., d:]
                lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")
                dlse = torch.randn(lse.shape, device="cuda", generator=generator) if turn % 2 else None
                out = torch.empty_like(q, memory_format=torch.contiguous_format)
                lib.run(lib.fill(q, k, v, out, lse, softcap, scale, causal, window))
                options = (softcap, scale, causal, window)
                ref = gradients((q, k, v), dout, dlse, options, torch.float64)
                same = gradients((q, k, v), dout, dlse, options, dtype)
                tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": dlse}
                floors = rounding((q, k, v), out, lse, dout, options)
                problems: list[str] = []
                results: dict[str, Any] = {}
                for deterministic in (False, True, True):
                    grads, guards = zip(*(guarded(x.shape, dtype, math.nan) for x in (q, k, v)), strict=True)
                    a = lib.fill_backward(tensors, grads, *options, deterministic=deterministic)
                    lib.run_backward(a)
                    torch.cuda.synchronize()
                    if not all(g.isnan().all() for g in (*guards, a.keep[-1])):
                        problems.append("wrote past the end")
                    for n, g, r, e, floor in zip(NAMES, grads, ref, same, floors, strict=True):
                        err, bound = relative(g, r), relative(e, r)
                        if not (g.double() - r).norm() <= 2 * (e.double() - r).norm() + floor + 1e-5 * r.norm():
                            problems.append(f"{n} {err:.1e} eager {bound:.1e} turns {deterministic}")
                        if deterministic and n in results and not torch.equal(g, results[n]):
                            problems.append(f"{n} not the same twice")
                        results[n] = g if deterministic else None
                        old = worst.get((kind, n), (0.0, 0.0))
                        if r.norm() > 1e-3 * dout.double().norm():
                            new = (err, err / max(bound, 1e-4))
                            worst[kind, n] = tuple(max(x, y) if x == x else x for x, y in zip(new, old, strict=True))
                    results = {n: g for n, g in results.items() if g is not None}
                if problems:
                    failures.append((name, d, label, kind, softcap))
                    if len(failures) < 30:
                        print(f"FAIL {name} d{d} {label} {kind} cap {softcap:g}: {'; '.join(problems)}", flush=True)
        for kind in KINDS:
            line = " ".join(
                "{} {:.2e} ({:.2f} x eager)".format(n, *worst[kind, n]) for n in NAMES if (kind, n) in worst
            )
            print(f"check {name:12s} {str(dtype)[6:]:8s} d{d:<3d} {kind:9s} {line}", flush=True)


def check_packed(name: Any, lib: Any, head_dims: Any, seed: Any, failures: Any) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for d in head_dims:
        for label, lq, lk, spare, causal, window in (
            ("self", [300, 1, 0, 517, 128], None, 0, True, (-1, -1)),
            ("cross, spare rows", [100, 0, 257, 64], [200, 50, 0, 333], 700, False, (-1, -1)),
            ("window, spare rows", [640, 77], [500, 300], 9, True, (99, -1)),
        ):
            lk = lk or lq
            options = (30.0, d**-0.5, causal, window)
            cu_q, cu_k = (
                torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device="cuda") for x in (lq, lk)
            )
            mk = lambda t, h, d=d: torch.randn(t, h, d, device="cuda", generator=generator)  # noqa: E731
            q = (mk(sum(lq) + spare, 6) * 8).to(torch.bfloat16)
            k, v = (mk(sum(lk) + spare, 2).to(torch.bfloat16) for _ in range(2))
            dout = mk(sum(lq) + spare, 6).to(torch.bfloat16)
            out, lse = torch.empty_like(q), torch.empty(6, q.shape[0], device="cuda")
            dlse = torch.randn(lse.shape, device="cuda", generator=generator)
            lib.run(lib.fill(q, k, v, out, lse, *options, cu_q, cu_k, max(lq), max(lk)))
            ref = [torch.zeros(x.shape, device="cuda", dtype=torch.float64) for x in (q, k, v)]
            same = [torch.zeros_like(x) for x in (q, k, v)]
            for i in range(len(lq)):
                rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
                for dtype, to in ((torch.float64, ref), (torch.bfloat16, same)):
                    if lq[i] and lk[i]:
                        x = (q[None, rows], k[None, keys], v[None, keys])
                        grads = gradients(x, dout[None, rows], dlse[None, :, rows], options, dtype)
                        for t, g, s in zip(to, grads, (rows, keys, keys), strict=True):
                            t[s] = g[0]
            tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": dlse}
            for deterministic in (False, True):
                grads, guards = zip(*(guarded(x.shape, torch.bfloat16, math.nan) for x in (q, k, v)), strict=True)
                longest = (max(lq), max(lk))
                a = lib.fill_backward(tensors, grads, *options, (cu_q, cu_k), longest, deterministic)
                lib.run_backward(a)
                torch.cuda.synchronize()
                errors = [(relative(g, r), relative(e, r)) for g, r, e in zip(grads, ref, same, strict=True)]
                good = all(err <= 2 * bound for err, bound in errors)
                good = good and all(g.isnan().all() for g in (*guards, a.keep[-1]))
                if not good:
                    failures.append((name, d, "packed " + label, deterministic))
                line = " ".join(f"{n} {err:.2e} ({err / b:.2f})" for n, (err, b) in zip(NAMES, errors, strict=True))
                print(f"{'check' if good else 'FAIL'} {name:12s} d{d:<3d} packed {label} {deterministic}: {line}")


def peers(names: Any, q: Any, k: Any, v: Any, dout: Any, softcap: Any, causal: Any, window: Any) -> Any:
    """name -> (forward, backward), functions without arguments that run a peer on these inputs; those that import."""
    found: dict[str, Any] = {}
    sides = (window - 1, 0) if window else (-1, -1)
    scale = q.shape[-1] ** -0.5
    if "cudnn" in names and not window:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]

        def cudnn() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    leaves[0], leaves[1], leaves[2], is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
                )

        out, g = cudnn(), dout.transpose(1, 2)
        found["cudnn nocap"] = (cudnn, lambda: torch.autograd.grad(out, leaves, g, retain_graph=True))
    grads = [torch.empty_like(x) for x in (q, k, v)]
    if "fa3" in names:
        try:
            import flash_attn_3._C  # noqa: F401

            for label, cap in (("fa3 nocap", 0.0), ("fa3 cap", softcap)):
                options = {
                    "softmax_scale": scale,
                    "is_causal": causal,
                    "window_size_left": sides[0],
                    "window_size_right": sides[1],
                    "softcap": cap,
                }
                forward = functools.partial(torch.ops.flash_attn_3.fwd, q, k, v, **options)
                o, lse, *_ = forward()
                backward = functools.partial(
                    torch.ops.flash_attn_3.bwd, dout, q, k, v, o, lse, *grads, **options, deterministic=False
                )
                found[label] = (forward, backward)
        except Exception as error:
            print("no fa3:", repr(error)[:300])
    if "fa2" in names:
        try:
            from flash_attn import flash_attn_interface as fa2

            for label, cap in (("fa2 nocap", 0.0), ("fa2 cap", softcap)):
                common = {"softmax_scale": scale, "causal": causal, "softcap": cap, "alibi_slopes": None}
                common |= {"window_size_left": sides[0], "window_size_right": sides[1], "dropout_p": 0.0}
                forward = functools.partial(fa2._flash_attn_forward, q, k, v, return_softmax=False, **common)
                o, lse, *_ = forward()
                backward = functools.partial(
                    fa2._flash_attn_backward, dout, q, k, v, o, lse, *grads, deterministic=False, **common
                )
                found[label] = (forward, backward)
        except Exception as error:
            print("no fa2:", repr(error)[:300])
    return found


def time_all(libs: Any, shapes: Any, names: Any, rounds: Any, softcap: Any, kinds: Any, in_turns: Any) -> Any:
    rows = []
    for shape in shapes:
        b, s, hq, hk, d, causal, window = SHAPES[shape]
        for kind in kinds:
            generator = torch.Generator("cuda").manual_seed(1)
            mk = lambda h: torch.randn(b, s, h, d, device="cuda", generator=generator)  # noqa: B023, E731
            q, k, v, dout = mk(hq), mk(hk), mk(hk), mk(hq)
            if kind == "anchor":  # scores of deviation 16, as the peers were measured
                q, k = q * 4, k * 4
            q, k, v, dout = (x.to(torch.bfloat16) for x in (q, k, v, dout))
            win = (window - 1, -1) if window else (-1, -1)
            runs: dict[str, Any] = {}
            for name, (lib, dims) in libs.items():
                if d not in dims:
                    continue
                out, lse = torch.empty_like(q), torch.empty(b, hq, s, device="cuda")
                lib.run(lib.fill(q, k, v, out, lse, softcap, None, causal, win))
                tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": None}
                for deterministic in (False, True) if in_turns else (False,):
                    grads = [torch.empty_like(x) for x in (q, k, v)]
                    a = lib.fill_backward(tensors, grads, softcap, d**-0.5, causal, win, deterministic=deterministic)
                    label = f"{name} in turns" if deterministic else name
                    runs[label] = functools.partial(lib.run_backward, a)
            others = peers(names, q, k, v, dout, softcap, causal, window)
            runs |= {name: backward for name, (_, backward) in others.items()}
            times: dict[str, Any] = {name: [] for name in runs}
            for r in range(rounds):
                order = list(runs)
                for name in order[r % len(order) :] + order[: r % len(order)]:
                    times[name].append(measure(lambda i, name=name: runs[name](), 8.0))  # noqa: B023
            work = 2.5 * flops(b, s, hq, d, causal, window)
            line = []
            for name, t in times.items():
                rates = sorted(work / x / 1e9 for x in t)
                line.append(f"{name} {statistics.median(rates):.0f} ({rates[0]:.0f}-{rates[-1]:.0f})")
                rows.append({"shape": shape, "inputs": kind, "softcap": softcap, "name": name, "tflops": rates})
            print(f"time {shape} {kind}: " + " | ".join(line), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", default=[], help="NAME=PATH[:head_dim,...]")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cases", default="", help="of the dense check; all unless given")
    parser.add_argument("--fp16", action="store_true", help="also float16")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--turns", action="store_true", help="also time the deterministic kernel")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--peers", default="cudnn,fa3,fa2")
    parser.add_argument("--inputs", default="anchor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--softcap", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(), "seed", args.seed)
    libs = libraries(args.lib, BackwardLibrary)
    failures: list[Any] = []
    cases = tuple(filter(None, args.cases.split(",")))
    for name, (lib, dims) in libs.items():
        if args.check:
            check_dense(name, lib, dims, args.seed, failures, torch.bfloat16, (*SOFTCAPS, 200.0), cases)
            if args.fp16:
                check_dense(name, lib, dims, args.seed + 1, failures, torch.float16, (5.0, 50.0, 100.0))
        if args.packed:
            check_packed(name, lib, dims, args.seed + 2, failures)
    if args.check or args.packed:
        print("FAILURES" if failures else "all right", len(failures), flush=True)
    if args.time:
        shapes, names, kinds = (x.split(",") for x in (args.shapes, args.peers, args.inputs))
        rows = time_all(libs, shapes, names, args.rounds, args.softcap, kinds, args.turns)
        if args.out:
            with open(args.out, "w") as f:
                json.dump(rows, f)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
