"""No command opens a file of a run folder through a symbolic link."""

import logging
import shutil
from pathlib import Path

import pytest
from every_method import some
from typer.testing import CliRunner
from written_runs import COMMANDS

from coterie import api
from coterie.cli import app
from coterie.config.run import parse
from coterie.errors import CoterieError
from coterie.files import LogFile
from coterie.privacy.ledger import Ledger
from coterie.runs.progress import logged
from coterie.testing.loop import Loop, server, workers

SECRET = "the root-only secret of poet"
"""With a client's name: `forget` removes lines that name one."""

OF_SERVERS = ("expel", "forget")
"""Commands for the folder of a deployed run's server."""


@pytest.fixture(scope="module")
def finished(values, tmp_path_factory) -> dict[str, Path]:
    """Return folders of a run on one machine, and of a deployed run's server, with their logs."""
    folder = tmp_path_factory.mktemp("finished")
    config = parse(values(rounds=2, method="fedavg", evaluation={"every": 1}))
    api.run(config, out=folder / "local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coterie.deployment.seats.RETRY", 0.0)
        server(config, folder / "server", Loop(workers(config, folder / "clients"))).rounds()
    for run in (folder / "local", folder / "server"):
        for log in ("server.log", "server.log.1"):
            (run / log).write_text("poet is here\n")
        (run / "without.json").write_text('{"clients": ["whaler"]}')
        (run / "table.md").write_text("poet\n")
        (run / "report" / "figures").mkdir(parents=True)
        (run / "report" / "report.html").write_text("poet\n")
        (run / ".lock").touch()
    return {"local": folder / "local", "server": folder / "server"}


def contents(secret: Path) -> dict[str, tuple[bytes, int, int, int]]:
    stats = {p: p.stat() for p in sorted(p for p in [secret, *secret.rglob("*")] if p.is_file())}
    return {str(p): (p.read_bytes(), s.st_mode, s.st_uid, s.st_nlink) for p, s in stats.items()}


@pytest.mark.parametrize("command", some({*COMMANDS} - {"report", "compare"}, COMMANDS, ()))
def test_no_link_in_a_run_folder_is_followed(command, finished, tmp_path) -> None:
    check(command, finished, tmp_path, every=1 if command in OF_SERVERS else 5)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_link_at_any_file_of_a_run_folder_is_followed(command, finished, tmp_path) -> None:
    check(command, finished, tmp_path, every=1)


def check(command: str, finished: dict[str, Path], tmp_path: Path, every: int) -> None:
    """Replace each file and folder of a run, or one of every few, by a link to a secret."""
    kind = "server" if command in OF_SERVERS else "local"
    within = sorted(p.relative_to(finished[kind]) for p in finished[kind].rglob("*"))
    for number, name in enumerate(within[[*COMMANDS].index(command) % every :: every]):
        run, secret = tmp_path / f"run-{number}", tmp_path / f"secret-{number}"
        shutil.copytree(finished[kind], run)
        linked = run / name
        if linked.is_dir():  # the link is to a folder like it
            shutil.move(linked, secret)
            (secret / "figures").mkdir(exist_ok=True)
            (secret / "figures" / "mine-light.svg").write_text(SECRET)
            (secret / "kept.txt").write_text(SECRET)
        else:
            linked.unlink()
            secret.write_text(SECRET)
            secret.chmod(0o600)
        linked.symlink_to(secret)
        before = contents(secret)
        result = CliRunner().invoke(app, COMMANDS[command].format(run), input="")
        where = f"{command} with a link at {name}: {result.exception!r}"
        assert contents(secret) == before, where
        assert SECRET not in result.output + str(result.exception), where
        files = [p for p in run.rglob("*") if p.is_file() and not p.is_symlink()]
        files = [p for p in files if not p.parent.resolve().is_relative_to(secret)]
        assert not any(SECRET.encode() in p.read_bytes() for p in files), where
        assert isinstance(result.exception, CoterieError | SystemExit | None), where
        if isinstance(result.exception, CoterieError):
            assert "\n" not in str(result.exception), where
        shutil.rmtree(run)


@pytest.mark.parametrize("name", ["server.log", "client-poet.log", "ray.log"])
@pytest.mark.parametrize("exists", [True, False])
def test_no_log_is_written_through_a_link(name, exists, tmp_path) -> None:
    secret, log = tmp_path / "secret", tmp_path / name
    if exists:
        secret.write_text(SECRET)
    log.symlink_to(secret)
    with pytest.raises(CoterieError, match="symbolic link"), logged(log, "coterie"):
        pass
    assert secret.exists() == exists
    assert not exists or secret.read_text() == SECRET


def test_a_large_log_is_rotated_and_keeps_one_earlier_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.files.LOG_BYTES", 2000)
    log = LogFile(tmp_path / "client.log")
    for number in range(200):
        log.handle(logging.makeLogRecord({"msg": f"line {number}"}))
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["client.log", "client.log.1"]
    assert all(file.stat().st_size <= 2000 for file in files)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert "line 199" in files[0].read_text()


@pytest.mark.parametrize("name", ["privacy-poet.json", ".privacy-poet.json.lock"])
def test_no_account_is_read_or_locked_through_a_link(name, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"run": {"1": 1.0}}')
    (tmp_path / name).symlink_to(secret)
    with pytest.raises(CoterieError, match="symbolic link"):
        Ledger(tmp_path / "privacy-poet.json", "f" * 16).spend("1", 1.0, 2)
    assert secret.read_text() == '{"run": {"1": 1.0}}'
