"""Work that methods do once for each exchange, however often models are evaluated."""

from functools import partial
from operator import attrgetter

import pytest
from every_method import METHODS, run_of

from coterie.methods.fdlora import FDLoraClient
from coterie.methods.fedmkt.distillation import Distiller
from coterie.testing.work import Work, worked

ROUNDS = 3


distilled = partial(Work.count, owner=Distiller, name="distil", label=attrgetter("context.name"))
fused = partial(Work.count, owner=FDLoraClient, name="_fuse", label=attrgetter("context.name"))


@pytest.mark.slow
def test_clients_distil_once_for_each_word_of_the_server(teachers, tmp_path, monkeypatch) -> None:
    for name in ("fedmkt", "fedmkt-fedavg", "llm2slm"):
        run = teachers(method={"name": name}, rounds=3)
        done = worked(run, 1, tmp_path / name, monkeypatch, distilled).done
        # Before the first round the server tells nothing: the takes of rounds 2, 3 and the last.
        assert [done[f"distil {client}"] for client in ("diarist", "poet")] == [3, 3]
        assert done["distil server"] == (0 if name == "llm2slm" else 3)


def test_weights_are_searched_once_a_round_and_once_at_the_end(config, tmp_path, monkeypatch):
    clients = [{"name": name, "path": f"{name}.txt"} for name in ("diarist", "poet")]
    run = config(method="fdlora", rounds=3, clients=clients)
    done = worked(run, 1, tmp_path / "run", monkeypatch, fused).done
    assert [done[f"_fuse {client}"] for client in ("diarist", "poet")] == [5, 5]


@pytest.mark.slow
def test_trust_is_measured_once_for_each_exchange(values, teachers, tmp_path, monkeypatch) -> None:
    for name in ("pcl-1", "pcl-2", "pcl-3", "pcl-uniform", "pcl-theoretical"):
        run = run_of(METHODS[name], values, teachers, rounds=3)
        mixed = partial(Work.count, owner=type(run.method), name="row")
        done = worked(run, 1, tmp_path / name, monkeypatch, mixed).done
        assert done["row"] == 3 * 3  # three exchanges of three clients
