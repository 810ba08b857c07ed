"""Checks builds of the Hopper backward kernel through its C interface.

usage: hopper_backward_check.py --lib NAME=PATH[:head_dim,...] [--lib ...] [--cases a,b] [--packed] [--fp16]

Compares dq, dk, dv of a loss on out and lse with float64 autograd on fresh random data of every kind of
hopper_check.py, and with same-dtype eager; in any order and in turns (twice the same bits). Gradients and workspace
are poisoned before each call and guarded by elements behind them.
"""

import argparse
import ctypes
import math
import sys
import time
from typing import Any, ClassVar

import torch
from hopper_check import (
    CASES,
    INTEGERS,
    KINDS,
    SOFTCAPS,
    Library,
    describe,
    draw,
    guarded,
    libraries,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", default=[], help="NAME=PATH[:head_dim,...]")
    parser.add_argument("--cases", default="", help="of the dense check; all unless given")
    parser.add_argument("--fp16", action="store_true", help="also float16")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(), "seed", args.seed)
    libs = libraries(args.lib, BackwardLibrary)
    failures: list[Any] = []
    cases = tuple(filter(None, args.cases.split(",")))
    for name, (lib, dims) in libs.items():
        check_dense(name, lib, dims, args.seed, failures, torch.bfloat16, (*SOFTCAPS, 200.0), cases)
        if args.fp16:
            check_dense(name, lib, dims, args.seed + 1, failures, torch.float16, (5.0, 50.0, 100.0))
        if args.packed:
            check_packed(name, lib, dims, args.seed + 2, failures)
    print("FAILURES" if failures else "all right", len(failures), flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
