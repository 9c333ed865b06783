"""All that Coterie uses of Flower beyond its public API; any version of Flower may change it.

Other files import these names from here, and from Flower itself only what is public. For another
version of Flower, tests/network/test_flower_private.py says name by name what is gone or different.
"""

from typing import TYPE_CHECKING

# parcel: a message's content travels apart from it.
from flwr.app.message import remove_content_from_message

# link: the bundle of code that a run must have, though ours is empty.
from flwr.cli.build import build_fab_from_files

# link: the control API, by which runs are started and clients' keys are registered.
from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor

# parcel, link: bytes of a chunk, into which Flower cuts an array.
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as CHUNK

# link, simulation: the server's number among the nodes.
from flwr.common.constant import SUPERLINK_NODE_ID

# parcel: messages in protobuf.
from flwr.common.serde import message_to_proto

# fleet, link, parcel: what the three APIs are asked, and parts of it.
from flwr.proto.control_pb2 import ListFederationsRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
)

# link: the kind of task that the server's process takes on.
from flwr.supercore.constant import TaskType

# link: the control API's client.
from flwr.supercore.control import ControlHttpClient

# link: without its heartbeat, the SuperLink gives the task up.
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http

# parcel: a message is a tree of objects ...
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)

# fleet, link: ... each of which is pushed and pulled by itself.
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPushError,
    ObjectUnavailableError,
    pull_and_inflate_object_from_tree,
    push_objects,
)

# fleet, link: who calls, and with which version of Flower.
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)

# link: the runtime API's client; this API is for the server's task.
from flwr.supercore.runtime import RuntimeHttpClient

# link, simulation: the sender of the messages that this process makes.
from flwr.supercore.task_identity import TaskIdentity

# fleet: the fleet API's client, and a signature with the client's key.
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

if TYPE_CHECKING:
    from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
else:

    def __getattr__(name: str) -> object:
        """RayBackend, for simulation; imported when asked for, as a deployment has no Ray."""
        if name != "RayBackend":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend

        return RayBackend


SUPERLINK = "from flwr.superlink.cli import flower_superlink; flower_superlink()"
"""link: the Python that is Flower's server, and its command `flower-superlink`."""

__all__ = [
    "CHUNK",
    "SUPERLINK",
    "SUPERLINK_NODE_ID",
    "AcquireTaskRequest",
    "ActivateNodeRequest",
    "CliClientHttpInterceptor",
    "ControlHttpClient",
    "DeactivateNodeRequest",
    "Fab",
    "FleetHttpClient",
    "GetNodesRequest",
    "HeartbeatSender",
    "InflatableObject",
    "ListFederationsRequest",
    "Node",
    "NodeAuthHttpInterceptor",
    "ObjectPushError",
    "ObjectTree",
    "ObjectUnavailableError",
    "ProtoMessage",
    "PullAppMessagesRequest",
    "PullMessagesRequest",
    "PullTaskInputRequest",
    "PushAppMessagesRequest",
    "PushMessagesRequest",
    "RayBackend",
    "RegisterNodeRequest",
    "RuntimeHttpClient",
    "RuntimeTokenHttpInterceptor",
    "RuntimeVersionHttpInterceptor",
    "SendNodeHeartbeatRequest",
    "StartRunRequest",
    "SuperExecAuthHttpInterceptor",
    "TaskIdentity",
    "TaskType",
    "build_fab_from_files",
    "get_all_nested_objects",
    "get_object_tree",
    "iterate_object_tree",
    "make_confirm_message_received_fn_protobuf",
    "make_pull_object_fn_protobuf",
    "make_push_object_fn_protobuf",
    "make_task_heartbeat_fn_http",
    "message_to_proto",
    "no_object_id_recompute",
    "pull_and_inflate_object_from_tree",
    "push_objects",
    "remove_content_from_message",
]
