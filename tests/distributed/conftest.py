from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from cp_ranks import Ranks

if not dist.is_available() or not dist.is_gloo_available():
    collect_ignore_glob = ["test_*"]


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.kill()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.kill()
