"""What all tests share."""

from collections.abc import Iterator

import pytest

from megatron_splitkv.testing import close_gloo_pools


@pytest.fixture(autouse=True, scope="module")
def ranks_end_with_their_file() -> Iterator[None]:
    """Threads of groups that a file has made shall not slow the next one down."""
    yield
    close_gloo_pools()
