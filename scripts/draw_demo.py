"""Draw the README's picture from the run folder of `make assistants`.

python scripts/draw_demo.py runs/assistants docs/images/assistants.svg
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "demo", "svg.fonttype": "none", "font.size": 11})

from matplotlib import pyplot  # noqa: E402

RUNS = {
    "pretrained": ("baselines/pretrained", "untrained base", "#b9bec6"),
    "fedavg": ("baselines/fedavg", "one averaged model (FedAvg)", "#d55e00"),
    "local": ("baselines/local", "each person alone", "#0072b2"),
    "comigs-1g1s": (".", "together (CoMiGS)", "#00805a"),
}


def shares(folder: Path) -> dict[str, float]:
    """Return the percentage of each client's test messages with a right reply."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    scores = result[result["reports"]]
    return {name: 100 * score["right_reply"] for name, score in scores.items()}


if __name__ == "__main__":
    run, picture = Path(sys.argv[1]), Path(sys.argv[2])
    figure, axis = pyplot.subplots(figsize=(8, 3))
    for place, (folder, label, colour) in enumerate(RUNS.values()):
        scores = shares(run / folder)
        xs = [client + 0.21 * (place - 1.5) for client in range(len(scores))]
        bars = axis.bar(xs, [*scores.values()], 0.19, label=label, color=colour)
        axis.bar_label(bars, fmt="%.0f", fontsize=9)
        axis.set_xticks(range(len(scores)), scores)
    axis.set_ylabel("right team in the\nright manner (%)")
    axis.set_yticks([])
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    figure.savefig(picture, facecolor="white", bbox_inches="tight", metadata={"Date": None})
