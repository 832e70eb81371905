#!/usr/bin/python3
"""Schedule efficiency against micro-batches in flight: a point for each order, a line through the best of each number.

usage: efficiency.py OUTPUT RECORDS...    writes OUTPUT.png and OUTPUT.svg
"""
import argparse

from common import BLUE, COLUMN_WIDTH, GREEN, ORANGE, PURPLE, VERMILION, plt, read_records, save, sequence_text
from common import values_of

COLOURS, MARKERS = [VERMILION, GREEN, BLUE, ORANGE, PURPLE], "osD^v"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("records", nargs="+")
    options = parser.parse_args()
    records = [r for r in read_records(options.records) if r.get("order.wave") and r["schedule_efficiency"]]
    sequences = values_of(records, "seq_len")
    figure, axes = plt.subplots(figsize=(COLUMN_WIDTH, 2.2))
    in_flight = sorted({r["order.wave"] * r["order.waves_in_flight"] for r in records})
    step = min([b - a for a, b in zip(in_flight, in_flight[1:])] or [1])
    for k, seq_len in enumerate(sequences):
        colour, shift = COLOURS[k % len(COLOURS)], (k - (len(sequences) - 1) / 2) * step * 0.13
        best = {}
        for record in records:
            if record["seq_len"] == seq_len:
                x, y = record["order.wave"] * record["order.waves_in_flight"], record["schedule_efficiency"]
                best[x] = max(best.get(x, 0), y)
                axes.plot(x + shift, y, color=colour, marker=MARKERS[k % len(MARKERS)], markersize=1.8, alpha=0.45,
                          markeredgewidth=0, zorder=2)
        axes.plot([x + shift for x in sorted(best)], [best[x] for x in sorted(best)], color=colour, markersize=3.8,
                  marker=MARKERS[k % len(MARKERS)], label=sequence_text(seq_len), zorder=3)
    axes.set_xticks(in_flight, [f"{int(x)}" for x in in_flight])
    lowest = min(r["schedule_efficiency"] for r in records)
    axes.set_ylim(int(lowest * 10) / 10, 1)
    axes.set_xlabel("Micro-batches in flight")
    axes.set_ylabel("Schedule efficiency")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.5)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    handles.append(plt.Line2D([], [], linestyle="", marker="o", markersize=1.8, color="#777777"))
    axes.legend(handles, [label + ", best order" for label in labels] + ["other orders"], loc="lower right",
                frameon=True, framealpha=1, edgecolor="none", borderpad=0.2, handlelength=2, labelspacing=0.25)
    figure.subplots_adjust(left=0.135, right=0.975, top=0.97, bottom=0.165)
    save(figure, options.output)


main()
