"""Messages between clients and the server: schemas, serialisation and checks on both sides."""

from coterie.messages.message import Groups, Json, Message, MessageError, State, Tensors, without
from coterie.messages.schema import Field, Schema, Shapes, check_shapes

__all__ = [
    "Field",
    "Groups",
    "Json",
    "Message",
    "MessageError",
    "Schema",
    "Shapes",
    "State",
    "Tensors",
    "check_shapes",
    "without",
]
