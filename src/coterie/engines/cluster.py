"""Connections to Ray, and the resources of the engine `ray` in a cluster."""

import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import ceil
from tempfile import TemporaryDirectory
from typing import Any

from coterie.bases.devices import Device
from coterie.errors import CoterieError

TOKEN = secrets.token_hex(32)
"""The authentication token of the Ray instances that this process starts.

Ray's processes inherit the token.
"""
STORE = 2**27
"""The size in bytes of the shared memory for messages, if this process starts Ray.

Ray moves messages that do not fit into this memory to disk.
"""
RAY_FOLDER = os.environ.get("RAY_TMPDIR", "/tmp")
"""The folder of Ray's logs and sockets.

Its path must be short, because a socket's path has at most 107 bytes on Linux.
"""


def set_variables(address: str | None) -> None:
    """Set the environment variables that Ray reads when it is imported.

    If this process starts an instance of Ray, the variables make the instance listen only on the
    loopback interface and accept only connections that present `TOKEN`. If the user has set
    RAY_AUTH_MODE, `TOKEN` is not used, and Ray follows the user's own settings for authentication.

    Args:
        address: The address of the cluster to use; None: this process starts Ray.

    Raises:
        CoterieError: Ray was already imported with other values of these variables.
    """
    imported, mode = sys.modules.get("ray") is not None, os.environ.get("RAY_AUTH_MODE")
    started = os.environ.get("RAY_AUTH_TOKEN") == TOKEN
    if imported and (mode is None or started) and started == (address is not None):
        reason = "started Ray itself" if started else "imported Ray before"
        raise CoterieError(f"This process has {reason}; use the engine `ray` in a new process.")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # otherwise, Ray prints a warning
    if address is None:
        # Despite its name, this variable also makes Ray on Linux bind to the loopback interface.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if mode is None:
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


@contextmanager
def connected(address: str | None, cpus: int) -> Iterator[None]:
    """Return a context manager that connects to a Ray cluster or starts Ray on this machine.

    At the end of the `with` block, the connection is closed. If this function started Ray, Ray also
    stops. On Linux, the Ray processes that this function starts also end if the thread that entered
    the block ends.

    Args:
        address: The HOST:PORT of the cluster; None: start Ray on this machine.
        cpus: The number of CPUs of a Ray instance that this function starts.
    """
    import ray
    from ray.exceptions import RayError

    options: dict[str, Any] = {"address": address}
    with ExitStack() as stack:
        if address is None:
            folder = TemporaryDirectory("", "coterie-", RAY_FOLDER, ignore_cleanup_errors=True)
            options = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
            options |= {"object_store_memory": STORE, "_temp_dir": stack.enter_context(folder)}
        else:
            check_address(address)
        try:
            ray.init(**options, log_to_driver=False, configure_logging=False)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            action = "start here" if address is None else f"connect to the cluster at {address}"
            reason = str(error).splitlines()[0].rstrip(".")
            raise CoterieError(f"Ray cannot {action}: {reason}.") from error
        stack.callback(ray.shutdown)
        yield


def check_address(address: str) -> None:
    """Raise CoterieError if no server answers at HOST:PORT within 10 seconds.

    Without this check, Ray would try to connect for minutes before it raised an error.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise CoterieError(f"The address of a Ray cluster is HOST:PORT, not {address!r}.")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CoterieError(
            f"The Ray cluster at {address} does not answer ({reason}); check the address, or "
            "continue the run later with --resume."
        ) from None


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def places(threads: int, gpus: float) -> int:
    """Return the number of workers that fit on the cluster's machines.

    Args:
        threads: The number of CPUs per worker.
        gpus: The number of GPUs per worker. If it is a fraction, several workers share a GPU.
    """
    import ray

    def fitting(resources: Mapping[str, float]) -> int:
        cpus, have = int(resources.get("CPU", 0)) // threads, int(resources.get("GPU", 0))
        if not gpus:
            return cpus
        return min(cpus, int(have // gpus) if gpus >= 1 else have * int(1 / gpus + 1e-6))

    return sum(fitting(node["Resources"]) for node in ray.nodes() if node["Alive"])


def share(device: Device, asked: float | None) -> tuple[float, Device]:
    """Return the number of GPUs of each worker, and the device that a worker uses.

    A worker sees only its own GPUs. In the worker's process, they are numbered from cuda:0.

    Args:
        device: The run's `device`.
        asked: The number of GPUs that the user asks for. None: the number of GPUs that `device`
            names. If `device` is `auto`, None means one GPU, or no GPU if the cluster has none.

    Raises:
        CoterieError: The number is invalid, or the run's device is not a GPU.
    """
    import ray

    if asked is None:
        if device == "auto":
            asked = min(1.0, ray.cluster_resources().get("GPU", 0))
        else:
            asked = 1.0 if isinstance(device, str) else float(len(device))
        if not asked or device in ("cpu", "mps"):
            return 0, "cpu" if device == "auto" else device
    if asked <= 0 or (asked > 1 and asked % 1):
        raise CoterieError(f"--gpus must be a whole number or a fraction below 1, not {asked:g}.")
    if device in ("cpu", "mps"):
        raise CoterieError(
            f"--gpus needs GPUs, but the run's `device` is {device}; set `device` to auto, or omit "
            "--gpus."
        )
    return asked, "cuda" if asked <= 1 else tuple(f"cuda:{n}" for n in range(ceil(asked)))
