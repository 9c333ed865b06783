"""Messages, their bytes, the checks on what arrives, and the account of what leaves a device."""

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
