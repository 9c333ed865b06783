"""Contract tests for your own methods and transforms, and the round loop; requires pytest.

    from coterie.testing import MethodContract
    from my_method import MyMethod

    class TestMyMethod(MethodContract):
        method = MyMethod()

`pytest` then runs every test of `MethodContract` on a small run of the method, in seconds.
`TransformContract` contains the tests of a transform, which a subclass names in `transform`.

`joined` and `one_round` execute rounds one at a time; see `coterie.testing.rounds`. `small_run`
creates a run that takes a few seconds.
"""

import pytest

pytest.register_assert_rewrite("coterie.testing.contract", "coterie.testing.loop")
pytest.register_assert_rewrite("coterie.testing.transforms")

from coterie.testing.contract import MethodContract  # noqa: E402  (after the rewrite)
from coterie.testing.rounds import joined, one_round  # noqa: E402
from coterie.testing.small import small_run  # noqa: E402
from coterie.testing.transforms import TransformContract  # noqa: E402

__all__ = ["MethodContract", "TransformContract", "joined", "one_round", "small_run"]
