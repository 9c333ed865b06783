"""Parts of methods' settings; a part is a section with several keys, such as `lora`.

A method has only those parts that affect it. A part has the same meaning in every method, so a
comparison of methods can copy a part's values from one method to another.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from coterie.adapters import Adapter, Trainable, of_roles
from coterie.errors import CoterieError
from coterie.registry import Section
from coterie.training.context import ClientId
from coterie.training.schedule import Level, Penalty

EXPERTS = of_roles("dense", "generalist", "specialist")
ROUTERS = of_roles("router")

PerClient = int | dict[ClientId, int]
"""One number for all clients, or a mapping from client names to numbers.

In a mapping, the key `others` gives the number of all clients that are not named.
"""


class Settings(Section):
    """A part of a method's settings."""


class Mlp(Settings):
    """Sets of LoRA pairs on all linear layers of all MLPs."""

    rank: PerClient = 8
    """LoRA rank on MLP layers (r)"""
    placement: Literal["auto", "inside", "beside"] = "auto"
    """inside: on the linear layers of MLPs; beside: next to each feed-forward block (one pair from
    hidden states to hidden states); auto: inside where the base has MLPs of a known form, else
    beside"""

    counted: ClassVar[tuple[str, str]] = ("generalists", "specialists")
    """The settings for the numbers of averaged and of private sets; "" if there is no setting."""

    def counts(self, client: ClientId) -> tuple[int, int]:
        """Return how many averaged sets and how many private sets a client has.

        Args:
            client: The client's name.

        Returns:
            The number of averaged sets and the number of private sets. If the part has no setting
            for averaged sets or no setting for private sets, the client has 0 sets of this kind.

        Raises:
            CoterieError: A setting with one number per client has no number for this client.
        """
        averaged, private = (
            for_client(getattr(self, key, 0), client, f"mlp.{key}") for key in self.counted
        )
        return averaged, private


class SharedSets(Mlp):
    """Sets of LoRA pairs on all linear layers of all MLPs.

    The server averages the LoRA pairs over the clients.
    """

    counted: ClassVar[tuple[str, str]] = ("sets", "")

    sets: PerClient = 2
    """number of LoRA sets, whose outputs are averaged"""


class OwnSets(Mlp):
    """Sets of LoRA pairs on all linear layers of all MLPs.

    Each client has its own LoRA pairs, which never leave the client.
    """

    counted: ClassVar[tuple[str, str]] = ("", "sets")

    sets: PerClient = 2
    """number of LoRA sets, whose outputs are averaged"""


class Generalists(Mlp):
    """Routed experts on every MLP, all averaged over clients."""

    generalists: PerClient = 2
    """number of generalists (experts averaged over clients)"""


class Specialists(Mlp):
    """Routed experts on every MLP, all private to their client."""

    specialists: PerClient = 2
    """number of specialists (experts that stay on the client)"""


class Experts(Mlp):
    """Routed experts on every MLP, averaged (generalists) and private (specialists)."""

    generalists: PerClient = 1
    """number of generalists (experts averaged over clients)"""
    specialists: PerClient = 1
    """number of specialists (experts that stay on the client)"""


class Attention(Settings):
    """One LoRA pair on each linear layer that the setting `targets` selects.

    By default, these are all linear layers of attention.
    """

    rank: int = Field(default=8, ge=1)
    """LoRA rank (r)"""
    targets: str | None = None
    """regular expression that matches names of linear layers, such as q_proj, or their places, such
    as attention.q; null: all linear layers of attention"""


class LoraAlpha(Settings):
    """Scale (alpha / r) and dropout of LoRA pairs."""

    alpha: float = Field(default=16.0, gt=0)
    """LoRA alpha"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """dropout rate of each LoRA pair's input during training"""


class Lora(LoraAlpha):
    """Scale and dropout of LoRA pairs."""

    scale: Literal["sqrt", "rank"] = "sqrt"
    """scale of a LoRA pair: alpha / sqrt(r), or alpha / r"""


class Router(Settings):
    """Routing of tokens to experts; the router is trained with the experts."""

    top_k: int | None = Field(default=None, ge=1)
    """experts per token (k); null: min(2, number of experts)"""
    load_balance: Literal["none", "uniform", "generalist"] = "generalist"
    """load-balancing loss; generalist: half of the load goes to the first expert"""
    load_balance_weight: float = Field(default=0.01, ge=0)
    """weight of the load-balancing loss (lambda)"""

    def penalty(self, adapter: Trainable) -> Penalty | None:
        """Return a function that computes the weighted load-balancing loss of an adapter's routers.

        Returns:
            The function, or None if the loss would be constant: every expert is chosen for every
            token, or `load_balance` is none.
        """
        if (form := self.load_balance) == "none" or not adapter.balances:
            return None
        assert isinstance(adapter, Adapter), "only an Adapter has the part `router`"
        return lambda: self.load_balance_weight * adapter.load_balance(form)


class PhasedRouter(Router):
    """Routing of tokens to experts; the router is trained in separate phases."""

    every: int = Field(default=30, ge=1)
    """steps between router phases (tau)"""
    steps: int = Field(default=10, ge=1)
    """router updates per phase (s)"""
    learning_rate: float = Field(default=2e-3, gt=0)
    """learning rate of router updates (constant)"""
    leftover_gradients: bool = False
    """true: gradients that a router phase computes for the experts are added to the gradients
    of the experts' next step, and vice versa, as in the released code; experts then also learn from
    validation text"""

    def levels(
        self,
        rate: Callable[[int], float],
        split: Literal["train", "validation"],
        penalty: Penalty | None,
    ) -> list[Level]:
        """Return the two levels of training: experts and routers (arXiv 2409.13931, equation 1).

        Both levels have the load-balancing loss (equation 2).

        Args:
            rate: The learning rate of the experts at each step.
            split: The text on which routers are trained.
            penalty: The penalty that is added to the loss; see `Level`.
        """
        experts = Level("experts", EXPERTS, "train", rate, penalty=penalty)
        routers = Level(
            "routers",
            ROUTERS,
            split,
            lambda step: self.learning_rate,
            every=self.every,
            steps=self.steps,
            penalty=penalty,
        )
        if self.leftover_gradients:
            return [replace(experts, leaves=ROUTERS), replace(routers, leaves=EXPERTS)]
        return [experts, routers]


def refuse_unused(settings: BaseModel, beside: str, *keys: str) -> None:
    """Raise ValueError if a setting that has no effect differs from its default.

    Args:
        settings: The settings to check.
        beside: The setting that makes the settings in `keys` ineffective, written as `KEY: VALUE`.
        *keys: The names of the settings that have no effect.
    """
    for key in keys:
        if getattr(settings, key) != type(settings).model_fields[key].get_default():
            raise ValueError(f"{key} has no effect with `{beside}`; remove it")


def for_client(counts: PerClient, client: ClientId, key: str) -> int:
    """Return one client's number from a setting that may have a different number per client.

    Args:
        counts: The value of the setting.
        client: The client's name.
        key: The name of the setting, such as `mlp.rank`, for error messages.

    Returns:
        The number.

    Raises:
        CoterieError: The setting has no number for the client, or the number is negative.
    """
    count = counts if isinstance(counts, int) else counts.get(client, counts.get("others"))
    if count is None:
        raise CoterieError(
            f"The method's setting {key} has no value for the client {client!r}; add the client's "
            "name or `others` to the setting."
        )
    if count < 0:
        raise CoterieError(
            f"The method's setting {key} is {count} for the client {client!r}; set a number of at "
            "least 0."
        )
    return count


def check_names(part: Settings | None, where: str, clients: tuple[ClientId, ...]) -> None:
    """Raise CoterieError if a setting that maps clients to numbers contains an unknown client.

    Args:
        part: The part of the settings; None if the part is null or the method lacks the part.
        where: The name of the part, for the error message.
        clients: The names of the run's clients.
    """
    for key in () if part is None else type(part).model_fields:
        counts = getattr(part, key)
        for name in set(counts) - {*clients, "others"} if isinstance(counts, dict) else ():
            raise CoterieError(
                f"The method's setting {where}.{key} names {name!r}, which is not a client "
                f"(clients: {', '.join(clients)}); correct or remove the name."
            )
