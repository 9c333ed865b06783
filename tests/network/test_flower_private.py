"""What Coterie uses of Flower beyond its public API: each failure names what a version lacks.

Names and calls are read from our sources and not imported, so one that is gone hides no other.
"""

import ast
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import pytest

from coterie.errors import CoterieError
from coterie.network import door
from coterie.network.flower import FLOWER, imports_for

pytest.importorskip("flwr", reason="Flower is not installed")
import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict
from google.protobuf.message import Message as Protobuf

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src/coterie/network/flower"
PRIVATE = "coterie.network.flower.private"
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation")
FILES = [*sorted(FOLDER.glob("*.py")), ROOT / "src/coterie/engines/simulation.py"]
TREES = {path.name: ast.parse(path.read_text()) for path in FILES}


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.alias]]:
    """Module and name of what a source imports by `from`; of `import`, the module twice."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, alias) for alias in node.names)


def calls(tree: ast.AST) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """The calls of private names and of their class methods: which, and with what arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.split(".")[0] in NAMES:
                yield called, len(node.args), tuple(key.arg or "**" for key in node.keywords)


NAMES = {
    alias.asname or alias.name: (module, alias.name)
    for module, alias in imports(TREES["private.py"])
    if module.split(".")[0] == "flwr"
} | {"SUPERLINK": ("flwr.superlink.cli", "flower_superlink")}
USES = {
    (alias.name, file)
    for file, tree in TREES.items()
    for module, alias in imports(tree)
    if module == PRIVATE
}
CALLS = sorted({(file, *call) for file, tree in TREES.items() for call in calls(tree)})

API = """
FleetHttpClient ActivateNode ActivateNodeRequest node_id
FleetHttpClient DeactivateNode DeactivateNodeRequest
FleetHttpClient SendNodeHeartbeat SendNodeHeartbeatRequest
FleetHttpClient PullMessages PullMessagesRequest messages_list.metadata.run_id message_object_trees
FleetHttpClient PushMessages PushMessagesRequest session_id objects_to_push
FleetHttpClient PullObject
FleetHttpClient PushObject
FleetHttpClient ConfirmMessageReceived
ControlHttpClient ListFederations ListFederationsRequest
ControlHttpClient RegisterNode RegisterNodeRequest
ControlHttpClient StartRun StartRunRequest
RuntimeHttpClient AcquireTask AcquireTaskRequest token
RuntimeHttpClient PullTaskInput PullTaskInputRequest task_id context.node_id run.run_id
RuntimeHttpClient GetNodes GetNodesRequest nodes.node_id nodes.public_key nodes.last_activated_at
RuntimeHttpClient PushMessages PushAppMessagesRequest session_id objects_to_push message_ids
RuntimeHttpClient PullMessages PullAppMessagesRequest messages_list.metadata.reply_to_message_id
RuntimeHttpClient PullMessages PullAppMessagesRequest message_object_trees.object_id
RuntimeHttpClient PullObject
RuntimeHttpClient PushObject
RuntimeHttpClient ConfirmMessageReceived
"""
# A client, its method, our request and what we read of the reply. Where there is no request, one of
# Flower's own functions makes it.
ROWS = [line.split() for line in API.strip().splitlines()]
METHODS = [  # of objects, and how many arguments we give
    ("FleetHttpClient", "close", 0),
    ("RuntimeHttpClient", "close", 0),
    ("HeartbeatSender", "start", 0),
    ("RayBackend", "build", 1),
    ("RayBackend", "process_message", 2),
]


def assigned(name: str) -> Any:
    """What private.py assigns to a name."""
    for node in TREES["private.py"].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)


def fail(name: str, what: str) -> NoReturn:
    module, original = NAMES[name]
    users = " and ".join(sorted(file for used, file in USES if used == name))
    pytest.fail(
        f"{module}.{original}, used by {users}, {what}. Flower {version('flwr')} is installed, "
        f"and Coterie is written for {FLOWER}.",
        pytrace=False,
    )


def find(name: str) -> Any:
    """The object that private.py knows by a name."""
    module, original = NAMES[name]
    if name == "RayBackend":
        if find_spec("ray") is None:
            pytest.skip("Ray is not installed")
        with suppress(ImportError):  # which sets what Ray reads when it is imported
            import_module("coterie.engines.simulation")
    try:
        return getattr(import_module(module), original)
    except ImportError as error:
        fail(name, f"cannot be imported: {error}")
    except AttributeError:
        fail(name, "is gone")


def check_call(file: str, called: str, positional: int, keywords: tuple[str, ...]) -> None:
    """Fail if a function cannot be called, or a message not be made, as one of our files does."""
    name, _, method = called.partition(".")
    found = find(name)
    if isinstance(found, type) and issubclass(found, Protobuf):
        for keyword in keywords:
            if keyword not in found.DESCRIPTOR.fields_by_name:
                fail(name, f"has no field {keyword} any more")
        return
    try:
        function = getattr(found, method) if method else found
        inspect.signature(function).bind(*[None] * positional, **dict.fromkeys(keywords))
    except (AttributeError, TypeError) as error:
        fail(name, f"cannot be called as {file} calls {called}: {error}")


def check_api(client: str, method: str, request: str = "", *reads: str) -> None:
    """Fail if an API's client has no such method, or asks or answers something else."""
    function = getattr(find(client), method, None)
    if function is None:
        fail(client, f"has no method {method} any more")
    hints = get_type_hints(function)
    if request and hints["request"] is not find(request):
        fail(client, f"takes {hints['request'].__name__} for {method}, not {request}")
    for path in reads:
        message = hints["return"].DESCRIPTOR
        for field in path.split("."):
            if message is None or field not in message.fields_by_name:
                fail(client, f"has no {path} in its reply to {method} any more")
            message = message.fields_by_name[field].message_type


@pytest.mark.parametrize("name", sorted(NAMES))
def test_names(name) -> None:
    find(name)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}-{call[1]}")
def test_calls(call) -> None:
    check_call(*call)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}.{row[1]}")
def test_apis(row) -> None:
    check_api(*row)


@pytest.mark.parametrize(("name", "method", "arguments"), METHODS)
def test_methods(name, method, arguments) -> None:
    check_call("Coterie", f"{name}.{method}", 1 + arguments, ())


def asked(name: str, method: str, *before: Any) -> Any:
    """What an interceptor sees of an API's call; nothing is sent."""
    contexts = []

    class Last:
        def intercept(self, context: Any, call_next: Callable[..., httpx.Response]) -> Any:
            contexts.append(context)
            return httpx.Response(200, request=context.request)

    client = find(name).from_server_address(
        "localhost", insecure=True, root_certificates=None, interceptors=[*before, Last()]
    )
    function = getattr(client, method)
    function(get_type_hints(function)["request"]())
    return contexts[0]


@pytest.mark.parametrize("method", [row[1] for row in ROWS if row[0] == "FleetHttpClient"])
def test_what_the_door_lets_pass(method) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    request = asked(
        *("FleetHttpClient", method),
        find("RuntimeVersionHttpInterceptor")(component_name="SuperNode"),
        find("NodeAuthHttpInterceptor")(key, key.public_key()),
    ).request
    if request.url.path not in door.CALLS:
        fail("FleetHttpClient", f"calls {request.url.path} for {method}, which door.py refuses")
    sent = {header for header in request.headers if header.startswith("flwr-")}
    passed = {header for header in door.PASSED if header.startswith("flwr-")}
    if other := sent ^ passed ^ {"flwr-public-key"}:
        fail("FleetHttpClient", f"and door.py, which passes headers on, differ in {other}")


def test_the_call_that_takes_on_the_servers_task() -> None:
    called = asked("RuntimeHttpClient", "AcquireTask").rpc_method
    if f'"{called}"' not in (FOLDER / "link.py").read_text():
        fail("RuntimeHttpClient", f"names its method AcquireTask {called}")


def test_the_superlinks_options() -> None:
    command = [sys.executable, "-c", assigned("SUPERLINK"), "--help"]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        fail("SUPERLINK", f"does not start: {ran.stderr.splitlines()[-1]}")
    known = ran.stdout.replace("[", " ").replace("]", " ").split()
    [start] = (
        node
        for node in ast.walk(TREES["link.py"])
        if isinstance(node, ast.FunctionDef) and node.name == "_start"
    )
    options = {node.value for node in ast.walk(start) if isinstance(node, ast.Constant)}
    options = {text for text in options if isinstance(text, str) and text.startswith("--")}
    assert len(options) == 9
    for option in sorted(options):
        if option not in known:
            fail("SUPERLINK", f"knows no option {option} any more")


def test_the_kind_of_task() -> None:
    if not hasattr(find("TaskType"), "SERVER_APP"):
        fail("TaskType", "has no SERVER_APP any more")


def test_a_message_there_and_back(monkeypatch) -> None:
    identity = find("TaskIdentity")
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(identity, f"_{name}", None, raising=False)  # is put back afterwards
    identity.task_id, identity.run_id, identity.node_id = 7, 8, 9
    metadata = Message(RecordDict(), 1, "train").metadata
    if (metadata.src_task_id, metadata.run_id, metadata.src_node_id) != (7, 8, 9):
        fail("TaskIdentity", "is not what Flower puts into messages any more")
    parcel = import_module("coterie.network.flower.parcel")
    proto, tree, objects = parcel.prepare(Message(parcel.content(b"data"), 1, "train"))
    stored = {number: one.deflate() for number, one in objects.items()}
    confirmed: list[str] = []
    message = parcel.fetch(tree, stored.__getitem__, confirmed.append, 4)
    assert parcel.unpack(message) == b"data"
    assert {message.metadata.message_id, proto.metadata.message_id, *confirmed} == {tree.object_id}


def test_the_pool_of_actors() -> None:
    backend = find("RayBackend")
    pool = getattr(sys.modules[backend.__module__], "BasicActorPool", None)
    for one in (backend, pool):  # __init__ sets `pool` in both
        if one is None or "pool" not in one.__init__.__code__.co_names:
            fail("RayBackend", "has no pool.pool of actors any more")


def hidden(text: str) -> list[str]:
    """What a source imports of Flower that is not public."""
    found = []
    for module, alias in imports(ast.parse(text)):
        if module.split(".")[0] == "flwr":
            public = module in PUBLIC and alias.name in import_module(module).__all__
            found += [] if public else [f"{module} {alias.name}"]
    return found


def test_other_files_import_only_what_is_public() -> None:
    found = {
        str(path.relative_to(ROOT)): hidden(path.read_text())
        for path in (ROOT / "src").rglob("*.py")
        if path != FOLDER / "private.py"
    }
    assert not {path: names for path, names in found.items() if names}, "belongs in private.py"


def test_private_py_holds_no_more_than_is_used() -> None:
    assert {name for name, _ in USES} == NAMES.keys()
    assert set(assigned("__all__")) == NAMES.keys()


def test_a_deployment_needs_no_ray() -> None:
    code = f"import sys; sys.modules['ray'] = None; import {PRIVATE}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_extras_install_the_version_that_is_named() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    assert f"flwr=={FLOWER}" in extras["flower"]
    assert f"flwr[simulation]=={FLOWER}" in extras["simulation"]


UTILS = "flwr.supercore.inflatable.inflatable_utils"
OURS = pytest.mark.skipif(version("flwr") != FLOWER, reason="this Flower is another one already")


def another_flower(change: str, patch: pytest.MonkeyPatch) -> None:
    """Act as if another version of Flower were installed."""
    if change == "module":
        patch.setitem(sys.modules, UTILS, None)
    elif change == "name":
        patch.delattr(f"{UTILS}.push_objects")
    elif change == "arguments":
        patch.setattr(f"{UTILS}.push_objects", lambda objects, push: None)
    elif change == "field":
        fleet = import_module("flwr.proto.fleet_pb2")
        patch.setattr(fleet, "PushMessagesRequest", fleet.PullMessagesRequest)
    else:
        patch.delattr("flwr.supernode.fleet_http_client.FleetHttpClient.PushMessages")


@OURS
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("module", rf"^{UTILS}.ObjectPushError, used by fleet.py, cannot be imported"),
        ("name", rf"^{UTILS}.push_objects, used by fleet.py and link.py, is gone\."),
        ("arguments", "as fleet.py calls push_objects: .* unexpected .* 'object_ids_to_push'"),
        ("field", r"PushMessagesRequest, used by fleet.py, has no field \w+ any more"),
        ("method", "FleetHttpClient, used by fleet.py, has no method PushMessages"),
    ],
)
def test_another_flower_is_told_apart(change, sentence, monkeypatch) -> None:
    another_flower(change, monkeypatch)
    with pytest.raises(pytest.fail.Exception, match=sentence):
        check_all("fleet.py")


def check_all(file: str) -> None:
    for name, user in sorted(USES):
        if user == file:
            find(name)
    for call in CALLS:
        if call[0] == file:
            check_call(*call)
    for row in ROWS:
        check_api(*row)


def test_an_import_in_another_file_is_found() -> None:
    text = "import flwr\nfrom flwr.app import Message, message\nfrom flwr.common import serde"
    assert hidden(text) == ["flwr flwr", "flwr.app message", "flwr.common serde"]


@OURS
@pytest.mark.parametrize("change", ["module", "name"])
def test_a_user_with_another_flower_learns_which_to_install(change, monkeypatch) -> None:
    another_flower(change, monkeypatch)
    monkeypatch.delitem(sys.modules, PRIVATE, raising=False)
    with pytest.raises(CoterieError) as error, imports_for("A deployment", "flower"):
        import_module(PRIVATE)
    assert str(error.value) == (
        f"A deployment needs Flower {FLOWER}, but Flower {version('flwr')} is installed and its "
        f"{UTILS} is missing or different; install the extra: pip install 'coterie[flower]'."
    )


def test_an_error_of_our_own_is_not_taken_for_flowers() -> None:
    with pytest.raises(ModuleNotFoundError), imports_for("A deployment", "flower"):
        import_module("coterie.nowhere")
