"""The sizes of messages in an audit."""

import pytest

from coterie.analysis.audit import WHOLE, audit_run


def per_sample(tables, way: str) -> dict[str, int]:
    """Return the sizes per public sample in the audit of one client, by name."""
    (rows,) = (table.rows for table in tables if table.title == f"poet: {way}")
    sizes = {row[0]: int(row[-1].replace(",", "").strip("≤")) for row in rows}
    each = {name: size for name, size in sizes.items() if "per public sample" in name}
    counts = [int(row[2][3:-1]) for row in rows if row[:2] == ("knowledge", "samples")]  # 1 (N)
    assert each == {f"average per public sample (of {n})": round(sizes[WHOLE] / n) for n in counts}
    return each


@pytest.mark.parametrize(("method", "teaches"), [("fedmkt", True), ("llm2slm", False)])
def test_an_audit_says_what_a_public_sample_costs(method, teaches, teachers) -> None:
    tables = list(audit_run(teachers(method={"name": method})))
    assert per_sample(tables, "from the server to the client, in one exchange")
    assert bool(per_sample(tables, "from the client to the server, in one exchange")) is teaches
    assert not per_sample(tables, "from the client to the server, once")
