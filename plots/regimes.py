#!/usr/bin/python3
"""Speedups under each variant of the regimes, a row a variant, with the paper's range as a band.

usage: regimes.py [--published FILE] OUTPUT REGIMES.csv    writes OUTPUT.png and OUTPUT.svg
"""
import argparse

from common import BLACK, COLUMN_WIDTH, ORANGE, plt, published_range, read_records, save, sequence_text, values_of

ROW = 0.135  # inches
MARKERS = "osD^vP"
LARGEST = 3.2  # beyond it a speedup is drawn at the edge
PANELS = [("one factor at a time", ("table", "factor")), ("together, and the NIC's rate", ("combination", "sensitivity")),
          ("product of the strongest", ("product",))]


def shade(k, count):
    """Light for the shortest sequences, black for the longest: told apart in grey as well."""
    return str(0.82 * (1 - k / max(count - 1, 1)))


def draw_row(axes, y, records, sequences, edge):
    for record in records:
        k = sequences.index(record["seq_len"])
        offset = 0.26 - 0.52 * k / max(len(sequences) - 1, 1)
        speedup = record["speedup"]
        if speedup is None:
            continue
        beyond = speedup > edge[1]
        axes.plot(min(speedup, edge[1]), y + offset, marker=">" if beyond else MARKERS[k % len(MARKERS)], markersize=2.7,
                  markerfacecolor=shade(k, len(sequences)), markeredgecolor=BLACK, markeredgewidth=0.35, linestyle="",
                  clip_on=False, zorder=3)
    missing = sum(record["speedup"] is None for record in records)
    if missing:
        axes.text(edge[1], y, f"{missing} without a plan", fontsize=4.5, ha="right", va="center", zorder=4)


def draw_panel(axes, title, variants, sequences, band, edge):
    for row, (name, records) in enumerate(variants):
        y = -row
        if row % 2:
            axes.axhspan(y - 0.5, y + 0.5, color="#F2F2F2", linewidth=0, zorder=0)
        draw_row(axes, y, records, sequences, edge)
    axes.set_yticks([-row for row in range(len(variants))], [name for name, _ in variants], fontsize=5.5)
    axes.set_ylim(0.5 - len(variants), 0.5)
    axes.tick_params(axis="y", length=0, pad=2)
    axes.axvline(1, color=BLACK, linewidth=0.7, linestyle=(0, (3, 2)), zorder=1)
    if band:
        axes.axvspan(band["low"], band["high"], color=ORANGE, alpha=0.45, linewidth=0, zorder=1)
    axes.set_title(title, pad=2, loc="left", fontsize=6.5)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--published", help="the paper's figures, experiments/published.json")
    parser.add_argument("output")
    parser.add_argument("records", nargs="+")
    options = parser.parse_args()
    records = read_records(options.records)
    sequences = sorted(values_of(records, "seq_len"))
    band = published_range(options.published)
    found = [r["speedup"] for r in records if r["speedup"] is not None]
    edge = (0.9 * min(found + [1]), min(LARGEST, 1.04 * max(found + [band["high"] if band else 1])))
    panels = []
    for title, kinds in PANELS:
        chosen = [r for r in records if r["kind"] in kinds]
        variants = [(name, [r for r in chosen if r["variant"] == name]) for name in values_of(chosen, "variant")]
        if kinds == ("product",):
            variants = [(rows[0]["levels"] + (", all lengths" if "all" in name else ""), rows) for name, rows in variants]
        if kinds == ("combination", "sensitivity"):
            variants = [(rows[0]["levels"], rows) for name, rows in variants]
        if variants:
            panels.append((title, variants))
    heights = [len(variants) for _, variants in panels]
    height = ROW * sum(heights) + 0.2 * len(panels) + 0.6
    figure, axes = plt.subplots(len(panels), 1, sharex=True, squeeze=False, figsize=(2 * COLUMN_WIDTH, height),
                                gridspec_kw={"height_ratios": heights})
    for panel, (title, variants) in zip(axes[:, 0], panels):
        draw_panel(panel, title, variants, sequences, band, edge)
    axes[-1][0].set_xlim(*edge)
    axes[-1][0].set_xlabel("Speedup of DisagMoE over Megatron, a mark a model", labelpad=2)
    handles = [plt.Line2D([], [], linestyle="", marker=MARKERS[k % len(MARKERS)], markersize=3.5,
                          markerfacecolor=shade(k, len(sequences)), markeredgecolor=BLACK, markeredgewidth=0.35)
               for k in range(len(sequences))]
    labels = [sequence_text(seq_len) for seq_len in sequences]
    if band:
        handles.append(plt.Rectangle((0, 0), 1, 1, color=ORANGE, alpha=0.45, linewidth=0))
        labels.append(f"the paper's range: {band['low']:.2f}–{band['high']:.2f}")
    handles.append(plt.Line2D([], [], color=BLACK, linewidth=0.7, linestyle=(0, (3, 2))))
    labels.append("Megatron = 1")
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False, handlelength=1.4,
                  columnspacing=1.2, handletextpad=0.4, borderaxespad=0.1)
    gap = 0.2 * len(panels) / (ROW * sum(heights))  # of a mean panel's height
    figure.subplots_adjust(left=0.39, right=0.985, top=1 - 0.3 / height, bottom=0.36 / height, hspace=gap)
    save(figure, options.output)


main()
