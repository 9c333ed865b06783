"""Reading a data set of the Hugging Face hub, from its cache or over the network."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from coterie.data.files import SUFFIXES, Record
from coterie.errors import CoterieError


def read_hub(name: str, subset: str | None, split: str, root: Path) -> list[Record]:
    """The records of one split; numbers in class labels' fields become the classes' names."""
    missing = (
        f"divide: {name} is neither a file or folder under {root} nor an available data set "
        "on the hub"
    )
    remedy = (
        "set data_root to the folder of your data, or correct divide.source, subset or split; when "
        "offline, download the records and set divide.source to the file"
    )
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.endswith(SUFFIXES):
        raise CoterieError(f"{missing}; {remedy}.")
    import datasets  # seconds to import, and only needed here

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        table = cast("datasets.Dataset", datasets.load_dataset(name, subset, split=split))
    except Exception as error:  # the kinds depend on the hub's client, the network and the format
        raise CoterieError(f"{missing} ({error}); {remedy}.") from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    classes = {
        field: dict(enumerate(feature.names))
        for field, feature in table.features.items()
        if isinstance(feature, datasets.ClassLabel)
    }
    records: list[Record] = []
    for number, row in enumerate(cast("Iterable[dict[str, Any]]", table), start=1):
        if any(row[field] == -1 for field in classes):
            continue  # the data set's way to say that a record has no label
        named = {field: names.get(row[field]) for field, names in classes.items()}
        records.append(Record(f"divide: record {number} of {name}", row | named))
    return records
