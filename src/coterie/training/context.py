"""The context of a client: its data and the settings of the run."""

from collections.abc import Callable
from dataclasses import dataclass, field

from coterie.bases import Base
from coterie.data.split import Split
from coterie.data.tokens import ClientData
from coterie.messages import Json
from coterie.privacy.ledger import Ledger
from coterie.training.general import Replay
from coterie.training.spec import TrainingSpec

ClientId = str
Log = Callable[[str, Json], None]


@dataclass(frozen=True)
class ClientContext:
    """One client's data, and the settings of the run that apply to this client."""

    name: ClientId
    seed: int
    base: Base
    data: ClientData
    window: int
    """The number of predicted tokens in a training sample."""
    training: TrainingSpec
    rounds: int
    log: Log
    """Function that records a metric: `log("loss", 4.2)`. Metrics stay on the client's machine."""
    public: Split | None = None
    """The public text; None if the run has no public text."""
    ledger: Ledger = field(default_factory=Ledger)
    """The ledger of the client's privacy budget."""
    least_others: int = 1
    """The smallest number of other clients whose uploads a client receives in a mean
    (`aggregation.least_others`)."""
    replay: Replay | None = None
    """General samples that keep the model close to its base; None if there are none."""
