"""Messages of torch that the pages quote, for those who search for them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("page", ["errors.md", "from-torch-distributed.md"])
def test_the_pages_quote_what_torch_says(page):
    text = " ".join((DOCS / page).read_text().split())
    with pytest.raises(ValueError, match="process group") as without_a_world:
        dist.all_reduce(torch.ones(1))
    assert f'"{without_a_world.value}"' in text
    twice = "trying to initialize the default process group twice!"
    assert twice in inspect.getsource(dist.init_process_group)
    assert f'"{twice}"' in text
