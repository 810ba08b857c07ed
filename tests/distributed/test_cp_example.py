"""examples/long_context.py trains, sharded like unsharded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import softcap_ops

ROOT = Path(__file__).parents[2]


def test_a_sharded_sequence_trains() -> None:
    paths = (str(Path(softcap_ops.__file__).parents[1]), os.environ.get("PYTHONPATH"))
    result = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(ROOT / "examples" / "long_context.py"), "--seqlen", "128", "--window", "16", "--steps", "16", "--check",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "check: loss off by" in result.stdout
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", result.stdout)]
    assert losses[-1] < 0.5 * losses[0], result.stdout
