"""A client that a server refuses for a time: its key, its second process, or its reply."""

import time
from pathlib import Path

import mail
import pytest
from mail import Idle, Post, running, wait

from coterie.network import client as client_module
from coterie.network import faults, order_files
from coterie.network import server as server_module


def test_a_renewed_key_file_is_used_without_a_restart(
    post: Post, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.3)
    anna = post.credentials()
    with running(post.address, anna) as events:
        wait(lambda: "anna" in post.mailbox.present())
        new = post.keys.renew("anna", tmp_path / "new.key")
        wait(
            lambda: any(
                "closed the connection; if this repeats" in str(value) for _, value in events
            )
        )
        new.replace(anna.path)
        wait(lambda: events[-1] == ("connected", post.address) and len(events) > 2)


@pytest.mark.parametrize("again", [False, True])
def test_a_client_that_is_refused_for_long_ends_with_an_error(
    again: bool, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REFUSED_SECONDS", 4.0)
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.3)
    with running(post.address, post.credentials()) as events:
        wait(lambda: "anna" in post.mailbox.present())
        certificate = post.folder / "keys" / "clients" / "anna.pem"
        key = certificate.read_bytes()
        post.keys.remove("anna")
        wait(lambda: any("removed or renewed this key" in str(value) for _, value in events))
        if again:  # it is accepted again before the time is over
            certificate.write_bytes(key)
            wait(lambda: events[-1] == ("connected", post.address))
            time.sleep(5)
            assert events[-1] == ("connected", post.address)
        else:
            wait(lambda: str(events[-1][1]).endswith("ask for a new key file."), 20)


class Replying(Idle):
    """A worker that has a reply to each order."""

    def answer(self, data: bytes) -> bytes:
        return mail.REPLY


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_reply_that_cannot_be_stored_is_reported_once(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.3)
    connected = ("connected", post.address)
    full = f"{post.address} could not store this client's reply; its disk may be full"
    with running(post.address, post.credentials(), Replying()) as events:
        wait(lambda: events == [connected])
        monkeypatch.setattr(order_files.secrets, "token_hex", lambda _: "0" * 32)
        file = post.mailbox.files.folder / f"{'0' * 32}.reply"
        file.symlink_to("/dev/full")
        ticket = mail.send(post)
        wait(lambda: len(events) == 2)
        time.sleep(3)
        assert events == [connected, ("away", full)]
        file.unlink()
        wait(lambda: events[2:] == [connected])
    assert mail.replies(post, ticket) == [(ticket, mail.REPLY)]


def test_a_second_process_with_a_key_waits_for_the_first(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.3)
    monkeypatch.setattr(client_module, "REFUSED_SECONDS", 0.1)
    with running(post.address, post.credentials()):
        wait(lambda: "anna" in post.mailbox.present())
        session = post.mailbox.present()
        with running(post.address, post.credentials()) as second:
            sentence = f"{post.address} {faults.STATUS[409]}"
            wait(lambda: ("away", sentence) in second)
            time.sleep(2)
            assert second == [("away", sentence)]
            assert post.mailbox.present() == session
