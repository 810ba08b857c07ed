"""Checks builds of the Hopper forward kernel through its C interface.

usage: hopper_check.py --lib NAME=PATH[:head_dim,...] [--lib ...] [--cases a,b] [--packed] [--running-max]

Compares out and lse with float64 eager on fresh random data: scores in the polynomial's range, mixed,
hot (2.5 times the cap), saturated throughout, all very negative, outliers; causal, windows, GQA, ragged
lengths, packed sequences (--packed), rows that see nothing, float16 and large caps (--running-max). Outputs
are poisoned before each call and guarded by elements behind them.
"""

import argparse
import ctypes
import math
import sys
import time
from typing import Any, ClassVar

import torch

KINDS = ("cold", "range", "mixed", "hot", "saturated", "sunk", "outliers")
SOFTCAPS = (5.0, 30.0, 50.0, 64.0)


INTEGERS = (
    "batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "dtype", "causal", "window_left", "window_right",
)  # fmt: skip


class FwdArgs(ctypes.Structure):
    """softcap_hopper_fwd_args of csrc/cuda/softcap_hopper.h, field by field."""

    _fields_: ClassVar[Any] = (
        [("struct_size", ctypes.c_uint64)]
        + [(n, ctypes.c_void_p) for n in ("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k")]
        + [(f"{t}_stride_{d}", ctypes.c_int64) for t in ["q", "k", "v", "out"] for d in ["batch", "token", "head"]]
        + [(n, ctypes.c_int64) for n in ("total_q", "total_k")]
        + [(n, ctypes.c_int32) for n in INTEGERS]
        + [("softcap", ctypes.c_float), ("scale", ctypes.c_float), ("stream", ctypes.c_void_p)]
    )


def describe(
    a: Any, tensors: dict[str, Any], strided: Any, softcap: Any, scale: Any, causal: Any, window: Any, cu: Any,
    longest: Any,
) -> None:  # fmt: skip
    """Fill in the fields that both directions' arguments have; `strided` names the tensors whose strides they take."""
    for name, x in tensors.items():
        setattr(a, name, None if x is None else x.data_ptr())
    for name in strided:
        s = (0, *tensors[name].stride())[-4:-1]
        for d, stride in zip(("batch", "token", "head"), s, strict=True):
            setattr(a, f"{name}_stride_{d}", stride)
    q, k = tensors["q"], tensors["k"]
    if cu[0] is not None:
        a.cu_seqlens_q, a.cu_seqlens_k = (x.data_ptr() for x in cu)
        a.total_q, a.total_k, a.batch = q.shape[0], k.shape[0], cu[0].numel() - 1
        a.seqlen_q, a.seqlen_k = longest
    else:
        a.batch, a.seqlen_q, a.seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    a.heads_q, a.heads_k, a.head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
    a.dtype = {torch.bfloat16: 0, torch.float16: 1}[q.dtype]
    a.causal, (a.window_left, a.window_right) = int(causal), window
    a.softcap, a.scale = softcap, scale
    a.stream = torch.cuda.current_stream().cuda_stream


class Library:
    """One build: fill(), then run() as often as wanted."""

    def __init__(self, path: Any) -> None:
        self.c = ctypes.CDLL(path)
        self.c.softcap_hopper_error_string.restype = ctypes.c_char_p

    def fill(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        softcap: Any,
        scale: Any = None,
        causal: Any = False,
        window: Any = (-1, -1),
        cu_q: Any = None,
        cu_k: Any = None,
        max_q: Any = 0,
        max_k: Any = 0,
    ) -> Any:
        a = FwdArgs(struct_size=ctypes.sizeof(FwdArgs))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        describe(a, tensors, ("q", "k", "v", "out"), softcap, scale, causal, window, (cu_q, cu_k), (max_q, max_k))
        a.keep = (q, k, v, out, lse, cu_q, cu_k)
        return a

    def run(self, a: Any) -> None:
        self.call(self.c.softcap_hopper_fwd, a)

    def call(self, function: Any, a: Any) -> None:
        code = function(ctypes.byref(a))
        if code:
            raise RuntimeError(f"{code}: {self.c.softcap_hopper_error_string(code).decode()}")


def libraries(texts: list[str], kind: Any) -> dict[str, tuple[Any, list[int]]]:
    """NAME=PATH[:head_dim,...] each: by name, kind(path) and the head_dims to run it at."""
    libs = {}
    for text in texts:
        name, path = text.split("=", 1)
        path, _, dims = path.partition(":")
        libs[name] = (kind(path), [int(x) for x in (dims or "64,128,256").split(",")])
    return libs


def visible(sq: Any, sk: Any, causal: Any, window: Any, device: Any) -> Any:
    i = torch.arange(sq, device=device)[:, None] + sk - sq
    j = torch.arange(sk, device=device)[None]
    see = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if causal:
        see &= j <= i
    if window[0] >= 0:
        see &= j >= i - window[0]
    if window[1] >= 0:
        see &= j <= i + window[1]
    return see


def eager(q: Any, k: Any, v: Any, softcap: Any, scale: Any, causal: Any, window: Any, dtype: Any) -> Any:
    """Reference out and lse for (B, S, H, D) inputs; dtype bf16 is the eager formula of that dtype."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    s = (q @ k.transpose(-1, -2)).to(wide) * scale
    peak = s.abs().max().item() if s.numel() else 0.0
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~visible(q.shape[2], k.shape[2], causal, window, q.device), -math.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]).to(dtype)
    return (p @ v).transpose(1, 2), lse, peak


def relative(x: Any, ref: Any) -> Any:
    """norm(x - ref) / norm(ref), infinities required to agree; NaN when they do not."""
    x, ref = x.double(), ref.double()
    both = torch.isinf(ref)
    if not torch.equal(both, torch.isinf(x) & (x == ref)):
        return math.nan
    x, ref = x.masked_fill(both, 0.0), ref.masked_fill(both, 0.0)
    return ((x - ref).norm() / ref.norm().clamp_min(1e-30)).item()


def draw(case: Any, kind: Any, softcap: Any, generator: Any, dtype: Any = torch.bfloat16) -> Any:
    b, sq, sk, hq, hk, d = case
    mk = lambda s, h: torch.randn(b, s, h, d, device="cuda", generator=generator)  # noqa: E731
    q, k, v = mk(sq, hq), mk(sk, hk), mk(sk, hk)
    if kind == "saturated":  # every |score| at least 3 caps, signs mixed
        axis = torch.randn(d, device="cuda", generator=generator).sign()
        q = 0.2 * q + axis * 2
        k = 0.2 * k + axis * torch.randn(b, sk, hk, 1, device="cuda", generator=generator).sign()
        q *= 3.5 * softcap / (2 * math.sqrt(d) * 0.8)
    elif kind == "sunk":  # every score far below the polynomial's range
        axis = torch.randn(d, device="cuda", generator=generator).sign()
        q = 0.1 * q + axis
        k = (0.1 * k - axis) * softcap * d**-0.5
    elif kind == "outliers":  # in range but for a few keys
        outlier = torch.rand(b, sk, hk, 1, device="cuda", generator=generator) < 0.01
        q = q * softcap / 40
        k = torch.where(outlier, k * 20, k)
    elif kind != "cold":
        group = hq // hk
        peak = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)).abs().max().item() * d**-0.5
        q *= {"range": 0.5, "mixed": 1.3, "hot": 2.5}[kind] * softcap / max(peak, 1e-6)
    return [x.to(dtype) for x in (q, k, v)]


CASES = [  # name, (B, Sq, Skv, Hq, Hkv), causal, window
    ("square", (2, 512, 512, 4, 4), False, (-1, -1)),
    ("square causal", (2, 512, 512, 4, 4), True, (-1, -1)),
    ("gqa long causal", (1, 1500, 1500, 8, 2), True, (-1, -1)),
    ("ragged", (2, 333, 777, 6, 2), False, (-1, -1)),
    ("ragged causal", (2, 333, 777, 6, 2), True, (-1, -1)),
    ("blind rows", (1, 777, 333, 2, 1), True, (-1, -1)),
    ("window", (1, 1111, 1111, 4, 4), False, (100, 37)),
    ("causal window", (1, 1111, 1111, 4, 2), True, (255, -1)),
    ("window off the end", (1, 700, 150, 2, 2), False, (20, 10)),
    ("one query", (3, 1, 999, 8, 8), True, (-1, -1)),
    ("tiny", (1, 3, 5, 1, 1), False, (-1, -1)),
    ("many tiles", (5, 1024, 640, 16, 4), True, (-1, -1)),
    ("one key", (1, 200, 1, 2, 2), False, (-1, -1)),
]


def guarded(shape: Any, dtype: Any, poison: Any) -> Any:
    """A poisoned tensor of the shape with 64 poisoned elements behind it."""
    n = math.prod(shape)
    whole = torch.full((n + 64,), poison, device="cuda", dtype=dtype)
    return whole[:n].view(shape), whole[n:]


def check_dense(
    name: Any,
    lib: Any,
    head_dims: Any,
    seed: Any,
    failures: Any,
    dtype: Any = torch.bfloat16,
    softcaps: Any = SOFTCAPS,
    cases: Any = (),
) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    worst: dict[Any, Any] = {}
    for d in head_dims:
        for index, (label, shape, causal, window) in enumerate(CASES):
            if cases and label not in cases:
                continue
            for turn, kind in enumerate(KINDS):
                softcap = softcaps[(index + turn) % len(softcaps)]
                q, k, v = draw((*shape, d), kind, softcap, generator, dtype)
                if index % 3 == 1:  # strided inputs: heads before tokens, and a slice of a wider last dimension
                    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
                    v = torch.cat((v, v), -1)[..., d:]
                scale = d**-0.5
                out, guard = guarded(q.shape, dtype, math.nan)
                lse, lse_guard = guarded((q.shape[0], q.shape[2], q.shape[1]), torch.float32, 12345.0)
                lib.run(lib.fill(q, k, v, out, lse, softcap, scale, causal, window))
                torch.cuda.synchronize()
                ref, ref_lse, _ = eager(q, k, v, softcap, scale, causal, window, torch.float64)
                same, same_lse, _ = eager(q, k, v, softcap, scale, causal, window, dtype)
                err, err_lse = relative(out, ref), relative(lse, ref_lse)
                bound, bound_lse = relative(same, ref), relative(same_lse, ref_lse)
                again = torch.full_like(out, math.nan)
                lib.run(lib.fill(q, k, v, again, lse, softcap, scale, causal, window))
                problems = []
                if not err <= 2 * bound + 1e-5:
                    problems.append(f"out {err:.1e} eager {bound:.1e}")
                # tanh.approx is off by up to 8e-6, the polynomials by 1.9e-5: of a logit, that times the cap.
                if not err_lse <= max(2 * bound_lse, 2e-5):
                    problems.append(f"lse {err_lse:.1e} eager {bound_lse:.1e}")
                if not (guard.isnan().all() and (lse_guard == 12345.0).all()):
                    problems.append("wrote past the end")
                if not torch.equal(out, again):
                    problems.append("not the same twice")
                if kind in ("hot", "saturated") and label not in ("one key", "tiny"):
                    plain = eager(q, k, v, 0.0, scale, causal, window, torch.float64)[0]
                    if not relative(plain, ref) > 10 * err:
                        problems.append(f"blind to the cap {relative(plain, ref):.1e}")
                key = (d, kind)
                old = worst.get(key, (0.0, 0.0, 0.0, 0.0))
                worst[key] = tuple(
                    max(x, y) if x == x else x
                    for x, y in zip(
                        (
                            err,
                            err / max(bound, 1e-4),
                            err_lse,
                            (lse - ref_lse).abs().nan_to_num().max().item(),
                        ),
                        old,
                        strict=True,
                    )
                )
                if problems:
                    failures.append((name, d, label, kind, softcap))
                    if len(failures) < 30:
                        print(
                            f"FAIL {name} d{d} {label} {kind} cap {softcap:g}: {'; '.join(problems)}",
                            flush=True,
                        )
        for kind in KINDS:
            e, ratio, el, ea = worst[d, kind]
            print(
                f"check {name:12s} {str(dtype)[6:]:8s} d{d:<3d} {kind:9s} "
                f"out {e:.2e} ({ratio:.2f} x eager) lse {el:.1e} abs {ea:.1e}",
                flush=True,
            )


def check_packed(name: Any, lib: Any, head_dims: Any, seed: Any, failures: Any) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for d in head_dims:
        for label, lq, lk, spare, causal, window in (
            ("self", [300, 1, 0, 517, 128], None, 0, True, (-1, -1)),
            ("cross, spare rows", [100, 0, 257, 64], [200, 50, 0, 333], 700, False, (-1, -1)),
            ("window, spare rows", [640, 77], [500, 300], 9, True, (99, -1)),
        ):
            lk = lk or lq
            softcap, scale = 30.0, d**-0.5
            cu_q, cu_k = (
                torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device="cuda") for x in (lq, lk)
            )
            mk = lambda t, h, d=d: torch.randn(t, h, d, device="cuda", generator=generator)  # noqa: E731
            q = (mk(sum(lq) + spare, 6) * 8).to(torch.bfloat16)
            k, v = (mk(sum(lk) + spare, 2).to(torch.bfloat16) for _ in range(2))
            out, guard = guarded(q.shape, torch.bfloat16, math.nan)
            lse, lse_guard = guarded((6, q.shape[0]), torch.float32, 12345.0)
            lib.run(lib.fill(q, k, v, out, lse, softcap, scale, causal, window, cu_q, cu_k, max(lq), max(lk)))
            torch.cuda.synchronize()
            ref, ref_lse = (
                torch.zeros_like(q, dtype=torch.float64),
                torch.full_like(lse, -math.inf, dtype=torch.float64),
            )
            same = torch.zeros_like(q)
            for i in range(len(lq)):
                rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
                x = (q[None, rows], k[None, keys], v[None, keys], softcap, scale, causal, window)
                o, e, _ = eager(*x, torch.float64)
                ref[rows], ref_lse[:, rows] = o[0], e[0]
                same[rows] = eager(*x, torch.bfloat16)[0][0]
            err, err_lse, bound = relative(out, ref), relative(lse, ref_lse), relative(same, ref)
            good = err <= 2 * bound and err_lse < 1e-4 and guard.isnan().all() and (lse_guard == 12345.0).all()
            if not good:
                failures.append((name, d, "packed " + label, "", softcap))
            print(
                f"{'check' if good else 'FAIL'} {name:12s} d{d:<3d} packed {label}: "
                f"out {err:.2e} ({err / bound:.2f} x eager) lse {err_lse:.1e}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", default=[], help="NAME=PATH[:head_dim,...]")
    parser.add_argument("--cases", default="", help="of the dense check; all unless given")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--running-max", action="store_true", help="also float16 and caps above 75")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(), "seed", args.seed)
    libs = libraries(args.lib, Library)
    failures: list[Any] = []
    cases = tuple(filter(None, args.cases.split(",")))
    for name, (lib, dims) in libs.items():
        try:
            check_dense(name, lib, dims, args.seed, failures, cases=cases)
            if args.running_max:
                check_dense(name, lib, dims, args.seed + 2, failures, softcaps=(75.0, 80.0, 200.0))
                check_dense(name, lib, dims, args.seed + 3, failures, torch.float16, (5.0, 50.0, 100.0))
            if args.packed:
                check_packed(name, lib, dims, args.seed + 1, failures)
        except RuntimeError as error:
            failures.append((name, str(error)[:300]))
            print(name, str(error)[:300], flush=True)
    print("FAILURES" if failures else "all right", len(failures), flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
