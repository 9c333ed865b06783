"""The fixtures of the package's tests that the tests of the papers use."""

from tests.conftest import (  # noqa: F401
    _ctrl_c,
    _one_thread,
    _one_thread_again,
    _own_plugins,
    bases,
    config,
    texts,
    values,
)
