"""A large order and its reply over a link that regularly drops all its connections."""

from pathlib import Path

import pytest
from transfer import Transfer, transfer

pytestmark = pytest.mark.slow
MB = 1_000_000


def check(done: Transfer, drops: int) -> None:
    """Check that a transfer was correct, that it was interrupted, and that little was repeated."""
    assert (done.server.order, done.server.reply) == (done.client.order, done.client.reply)
    assert done.client.orders == 1  # it is executed once
    assert done.interruptions >= drops
    assert 1 <= done.repeated < 1.5
    print(
        f"\n{done.size / MB:.0f} MB down and up in {done.seconds:.0f} s, "
        f"{done.interruptions} drops, {done.carried / MB:.0f} MB sent (x {done.repeated:.3f})"
    )
    for name, end in (("server", done.server), ("client", done.client)):
        rise = end.peak - end.before
        print(
            f"{name}: {end.before / MB:.0f} MB before, {end.peak / MB:.0f} MB at most, "
            f"+ {rise / done.size:.2f} x the order's size"
        )


def test_a_transfer_continues_after_each_drop(tmp_path: Path) -> None:
    check(transfer(tmp_path, 20 * MB, rate=10 * MB, every=1.5), drops=2)


@pytest.mark.thorough
def test_758_megabytes_arrive_over_a_link_that_drops_every_30_seconds(tmp_path: Path) -> None:
    done = transfer(tmp_path, 758 * MB, rate=10 * MB, every=30)
    check(done, drops=4)
    assert done.repeated < 1.1
    assert done.server.peak - done.server.before < 1.2 * done.size
    assert done.client.peak - done.client.before < 2.2 * done.size  # two copies of the order
