"""The pipeline of a run's transforms, and the privacy budgets that the run spends."""

from coterie.config.run import RunConfig
from coterie.exchanges.pipeline import Pipeline
from coterie.privacy.ledger import Budget
from coterie.transforms.hooks import run_hook


def pipeline_of(config: RunConfig) -> Pipeline:
    """Create the pipeline of a run's transforms.

    Args:
        config: The run.

    Returns:
        The pipeline. Its attribute `schema` contains the fields that may be sent.
    """
    schema = config.method.schema()
    weighted = config.aggregation.weights == "tokens" and bool(schema.averaged)
    return Pipeline(config.transforms, schema, config.exchanges, weighted=weighted)


def budgets_of(config: RunConfig) -> list[Budget]:
    """Return a list with one privacy budget for each noise mechanism of a run.

    The noise mechanisms are those of the transforms and, if the method itself adds noise, the
    method's noise mechanism. The run spends all of these budgets on every client.

    Args:
        config: The run.
    """
    transforms = config.transforms
    budgets = (run_hook(transform, "budget", config.exchanges) for transform in transforms)
    return [budget for budget in (config.method.budget, *budgets) if budget is not None]
