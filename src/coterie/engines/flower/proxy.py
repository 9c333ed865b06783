"""The door to the network: nginx, started beside the SuperLink, lets clients' calls in alone.

A SuperLink serves three interfaces on one port, and two of them let whoever reaches them start
code. It therefore listens on loopback, and nginx.conf says what is passed on to it.
"""

import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Self

from coterie.errors import CoterieError
from coterie.files import write_text, writing

TEMPLATE = Path(__file__).with_name("nginx.conf")
PLACES = os.pathsep.join(["/usr/sbin", "/usr/local/sbin", "/usr/local/nginx/sbin"])
"""Where nginx lies on systems that keep it off a plain user's path."""
OPEN_FILES = 20_000
"""Two for each of nginx.conf's connections, and some; fewer where the system allows fewer."""
START_SECONDS = 15
STOP_SECONDS = 5
SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


@dataclass(frozen=True)
class ProxyFiles:
    """What TLS needs: the deployment's authority, and the server's certificate and key, in PEM."""

    ca: Path
    certificate: Path
    key: Path


def write_proxy_config(
    folder: Path, address: str, superlink: int, keys: ProxyFiles, largest: int
) -> Path:
    """Write nginx's configuration into a folder, which also takes its logs and what it spools.

    It listens on `address` (`0.0.0.0:9092`, `[::]:9092`), passes calls of at most `largest` bytes
    on to 127.0.0.1:`superlink`, and accepts that server only with a certificate of `keys.ca` for
    localhost. Raises CoterieError for an address or a path that nginx cannot take.
    """
    _check_address(address)
    words = {
        # Started by root, nginx would hand its workers to a user who may not enter the folder.
        "USER": "user root;" if os.geteuid() == 0 else "",
        "FILES": _open_files(),
        "ADDRESS": address,
        "SUPERLINK": str(superlink),
        "CA": _quoted(keys.ca),
        "CERTIFICATE": _quoted(keys.certificate),
        "KEY": _quoted(keys.key),
        "LARGEST": str(largest),
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    text = re.sub(r"@([A-Z]+)@", lambda word: words[word[1]], template)
    path = folder / "nginx.conf"
    with writing(folder):
        (folder / "spool").mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


class Proxy:
    """nginx as a child of this process, from `with` to the end of its block.

    It ends with this process even if that is killed, on Linux; enter it from a thread that lives
    as long as it should.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        superlink_port: int,
        ca: Path,
        certificate: Path,
        key: Path,
        largest: int,
    ) -> None:
        self.folder = folder.resolve()
        self.address = address
        self.superlink_port = superlink_port
        self.keys = ProxyFiles(ca, certificate, key)
        self.largest = largest
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start nginx and wait until it listens; raises CoterieError, with its reason, if not."""
        program = _find_nginx()
        config = write_proxy_config(
            self.folder, self.address, self.superlink_port, self.keys, self.largest
        )
        command = [program, "-p", str(self.folder), "-c", str(config)]
        test = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
        if test.returncode:
            raise CoterieError(_complaint(test.stderr))
        (self.folder / "nginx.pid").unlink(missing_ok=True)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,  # only until it has started; then it writes to its error.log
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then stops nginx in order
            preexec_fn=die_with_parent(),
        )
        try:
            self._wait_until_it_listens(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let nginx finish what it is passing on, for a few seconds, then end it."""
        self._stop()

    @property
    def alive(self) -> bool:
        """Whether nginx runs."""
        return self._process is not None and self._process.poll() is None

    def _wait_until_it_listens(self, process: subprocess.Popen[str]) -> None:
        # nginx writes its number once its sockets listen. To connect would prove less: another
        # server may hold the address.
        pid = self.folder / "nginx.pid"
        deadline = time.monotonic() + START_SECONDS
        while not (pid.exists() and pid.read_text().strip() == str(process.pid)):
            if process.poll() is not None:
                raise CoterieError(_complaint(process.communicate()[1]))
            if time.monotonic() > deadline:
                raise CoterieError(f"nginx did not start listening on {self.address} in time.")
            time.sleep(0.02)

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        for number in (signal.SIGQUIT, signal.SIGTERM):  # nginx: quit gracefully; at once
            if process.poll() is None:
                process.send_signal(number)
            try:
                process.wait(STOP_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            os.killpg(process.pid, signal.SIGKILL)  # its workers are in its group
            process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _find_nginx() -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path=PLACES)
    if found is None:
        raise CoterieError(
            "Listening on a network address requires nginx; install it, e.g. with `apt "
            "install nginx-light`."
        )
    return found


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    inner = host.removeprefix("[").removesuffix("]")
    try:
        version = ip_address(inner).version
        valid = host == (inner if version == 4 else f"[{inner}]")
    except ValueError:
        valid = False
    if not valid or "%" in host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise CoterieError(
            "--address takes an IP address and a port, such as 0.0.0.0:9092 or [::]:9092, "
            f"not {address!r}."
        )


def _quoted(path: Path) -> str:
    text = str(path.resolve())
    if re.search(r'["$\\\x00-\x1f]', text):
        raise CoterieError(
            f"nginx cannot use the path {text!r}; move the folder to a path of plain characters."
        )
    return f'"{text}"'


def _open_files() -> str:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return str(OPEN_FILES if allowed == resource.RLIM_INFINITY else min(allowed, OPEN_FILES))


def _complaint(stderr: str) -> str:
    lines = re.findall(r"\[emerg\] (?:\d+#\d+: )?(.+)", stderr) or stderr.splitlines()[-1:]
    # The last of them often is no more than "still could not bind()".
    telling = [line for line in lines if not line.startswith("still could not")] or ["no reason"]
    return f"nginx did not start: {telling[-1].strip()}."


def die_with_parent() -> Callable[[], None] | None:
    """What nginx's process does first: ask Linux for SIGTERM when the process that made it ends.

    The request holds for nginx's master alone; on SIGTERM it ends its workers.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here, because little is safe between fork and exec
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request
            os._exit(1)

    return ask
