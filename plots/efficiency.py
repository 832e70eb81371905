#!/usr/bin/python3
"""Schedule efficiency against micro-batches in flight, a line for each sequence length and number of waves.

usage: efficiency.py OUTPUT RECORDS...    writes OUTPUT.png and OUTPUT.svg
"""
import argparse

from common import BLUE, COLUMN_WIDTH, GREEN, ORANGE, PURPLE, VERMILION, plt, read_records, save, sequence_text
from common import values_of

COLOURS, MARKERS = [BLUE, VERMILION, GREEN, ORANGE, PURPLE], "osD^v"
STYLES = ["-", (0, (4, 1.5)), (0, (1, 1))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("records", nargs="+")
    options = parser.parse_args()
    records = [r for r in read_records(options.records) if r.get("order.wave") and r["schedule_efficiency"]]
    sequences, waves = values_of(records, "seq_len"), sorted(values_of(records, "order.waves_in_flight"))
    figure, axes = plt.subplots(figsize=(COLUMN_WIDTH, 2.2))
    ticks = set()
    for k, seq_len in enumerate(sequences):
        for style, in_flight in enumerate(waves):
            points = sorted((r["order.wave"] * in_flight, r["schedule_efficiency"]) for r in records
                            if r["seq_len"] == seq_len and r["order.waves_in_flight"] == in_flight)
            ticks |= {x for x, _ in points}
            label = sequence_text(seq_len)
            if len(waves) > 1:
                label += f", {int(in_flight)} wave{'s' if in_flight > 1 else ''}"
            axes.plot([x for x, _ in points], [y for _, y in points], label=label, color=COLOURS[k % len(COLOURS)],
                      marker=MARKERS[k % len(MARKERS)], markersize=3.5, linestyle=STYLES[style % len(STYLES)],
                      markerfacecolor=None if style == 0 else "white", clip_on=False)
    axes.set_xticks(sorted(ticks), [f"{int(x)}" for x in sorted(ticks)])
    lowest = min(r["schedule_efficiency"] for r in records)
    axes.set_ylim(int(lowest * 20) / 20, 1)
    axes.set_xlabel("Micro-batches in flight")
    axes.set_ylabel("Schedule efficiency")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False, ncols=max(1, len(sequences) if len(waves) > 1 else 1),
                handlelength=2.4, columnspacing=1.0, labelspacing=0.3)
    figure.subplots_adjust(left=0.135, right=0.975, top=0.97, bottom=0.165)
    save(figure, options.output)


main()
