"""What a client's work is given: its own data and the run's settings."""

from collections.abc import Callable
from dataclasses import dataclass, field

from coterie.bases import Base
from coterie.data.split import Split
from coterie.data.tokens import ClientData
from coterie.messages import Json
from coterie.privacy.ledger import Ledger
from coterie.training.spec import TrainingSpec

ClientId = str
Log = Callable[[str, Json], None]


@dataclass(frozen=True)
class ClientContext:
    """One client's own data, and the run's settings as they are for it."""

    name: ClientId
    seed: int
    base: Base
    data: ClientData
    window: int
    """Tokens that a training sample predicts."""
    training: TrainingSpec
    rounds: int
    log: Log
    """Records a figure for reports: `log("loss", 4.2)`. It stays on the client's machine."""
    public: Split | None = None
    """The public text, where the run has one."""
    ledger: Ledger = field(default_factory=Ledger)
    """What may be told of its records under noise."""
