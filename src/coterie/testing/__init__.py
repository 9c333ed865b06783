"""The contract's tests, for a method of one's own; needs pytest.

    from coterie.testing import MethodContract
    from my_method import MyMethod

    class TestMyMethod(MethodContract):
        method = MyMethod()

`pytest` then runs every test of `MethodContract` on a small run of the method, in seconds.

`joined` and `one_round` are the round loop as functions; see `coterie.testing.rounds`.
"""

import pytest

pytest.register_assert_rewrite("coterie.testing.contract", "coterie.testing.loop")

from coterie.testing.contract import MethodContract  # noqa: E402  (after what it needs)
from coterie.testing.rounds import joined, one_round  # noqa: E402
from coterie.testing.small import small_run  # noqa: E402

__all__ = ["MethodContract", "joined", "one_round", "small_run"]
