"""Hit rate by pool size, drawn: SVG, PNG or PDF by the name of the file. Needs the extra `pictures`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kvatlas.cli.palette import GROUND_LIGHT

INK, MUTED = "#20242c", "#596270"
RESULTS = {
    "hit_tokens": ("found", "#0a6b2f", ""),
    "miss_cold_tokens": ("never seen", "#76838d", ""),
    "miss_evicted_tokens": ("evicted", "#e2771b", "///"),
    "unaligned_tokens": ("less than a page", "#853885", ".."),
}
LINES = ("#1f63c4", "#e67405", "#0a6b2f", "#853885", "#943f2b", "#596270", "#b98a2c", "#341529")
MARKS = "osD^vPX*"
Result = Mapping[str, Any]


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Left: hit rate of each page size and policy. Right: where prompt tokens go, by pool size."""
    figure = Figure(figsize=(10.5, 4.4), facecolor=GROUND_LIGHT, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    trace, results = document["trace"], document["results"]
    groups = _groups(results)
    unit = trace["num_pages"] * trace["page_size"]
    for number, ((size, policy), members) in enumerate(groups.items()):
        _line(left, members, unit, f"pages of {size}, {policy}", number)
    if document["observed"]:
        ratio = document["observed"]["hit_ratio"]
        left.plot([1], [ratio], "o", ms=13, mfc="none", mec=INK, mew=1.4, label=f"observed {ratio:.1%}")
    _dress(left, trace)
    today = (trace["page_size"], trace["policy"])
    _bars(right, groups.get(today) or next(iter(groups.values())), unit)
    # Text as text, a quarter of the size; without a salt ids in it would differ each time.
    with rc_context({"svg.hashsalt": "kvatlas", "svg.fonttype": "none"}):
        figure.savefig(path, format=path.suffix[1:], dpi=160, metadata=_undated(path))


def _undated(path: Path) -> dict[str, None]:
    """The same figures make the same bytes."""
    return {"Date": None} if path.suffix == ".svg" else {}


def _groups(results: Sequence[Result]) -> dict[tuple[int, str], list[Result]]:
    found: dict[tuple[int, str], list[Result]] = {}
    for result in results:
        found.setdefault((result["page_size"], result["policy"]), []).append(result)
    return {key: sorted(members, key=lambda each: each["pool_slots"]) for key, members in found.items()}


def _line(axes: Axes, members: Sequence[Result], unit: int, label: str, number: int) -> None:
    axes.errorbar(
        [result["pool_slots"] / unit for result in members],
        [result["hit_ratio"] for result in members],
        yerr=[2 * result["hit_ratio_error"] for result in members],
        color=LINES[number % len(LINES)],
        marker=MARKS[number % len(MARKS)],
        ms=5,
        lw=1.6,
        capsize=2,
        label=label,
    )


def _dress(axes: Axes, trace: Mapping[str, Any]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.axvline(1, color=MUTED, lw=0.8, ls=":")
    axes.set_ylim(bottom=0)
    slots = trace["num_pages"] * trace["page_size"]
    axes.set_xlabel(f"pool size; 1x is {slots:,} slots", color=INK)
    axes.set_ylabel("prompt tokens found in the cache", color=INK)
    axes.set_title(trace["name"], color=INK, fontsize=10, loc="left", parse_math=False)
    axes.grid(visible=True, color="#e6e9ef", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _bars(axes: Axes, members: Sequence[Result], unit: int) -> None:
    names = [f"{result['pool_slots'] / unit:g}x" for result in members]
    bottoms = [0.0] * len(members)
    for field, (label, colour, hatch) in RESULTS.items():
        totals = [max(1, sum(result[name] for name in RESULTS)) for result in members]
        shares = [result[field] / total for result, total in zip(members, totals, strict=True)]
        axes.bar(
            names,
            shares,
            bottom=bottoms,
            color=colour,
            label=label,
            width=0.72,
            hatch=hatch,
            edgecolor="white",
        )
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1)
    size, policy = members[0]["page_size"], members[0]["policy"]
    axes.set_title(f"where prompt tokens go · pages of {size}, {policy}", color=INK, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.08))
