"""Settings of every test: no variable of the caller's environment, a seed, and unwritten memory that shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dlinfer_ext import envs


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for var in envs.ALL:
        monkeypatch.delenv(var.name, raising=False)
    torch.manual_seed(0)
    # torch.empty is filled with NaN, so an output that is not written fails (an idea of flash-linear-attention).
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
