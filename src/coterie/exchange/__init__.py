"""Messages, their bytes, the checks on what arrives, and the account of what leaves a device."""

from coterie.exchange.message import Json, Message, MessageError, State
from coterie.exchange.schema import Field, Schema, Shapes, check_shapes

__all__ = ["Field", "Json", "Message", "MessageError", "Schema", "Shapes", "State", "check_shapes"]
