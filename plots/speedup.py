#!/usr/bin/python3
"""Speedup over Megatron by model, sequence length and nodes, with the range the paper gives as a band.

usage: speedup.py [--published FILE] OUTPUT RECORDS...    writes OUTPUT.png and OUTPUT.svg
"""
import argparse

from common import BLACK, BLUE, COLUMN_WIDTH, ORANGE, SKY, VERMILION, model_text, plt, published_range
from common import read_records, save, sequence_text, values_of

BAR = 0.40
COLOURS = [SKY, BLUE, VERMILION]


def draw_model(axes, records, nodes, sequences):
    for k, count in enumerate(nodes):
        offset = (k - (len(nodes) - 1) / 2) * BAR
        for x, seq_len in enumerate(sequences):
            for record in records:
                if record["nodes"] != count or record["seq_len"] != seq_len:
                    continue
                speedup = record["speedup_vs_megatron"]
                if speedup is None:
                    axes.text(x + offset, 0.04, "no figure", rotation=90, fontsize=5, ha="center", va="bottom")
                    continue
                axes.bar(x + offset, speedup, BAR * 0.94, color=COLOURS[k % len(COLOURS)], zorder=2)
                axes.text(x + offset, 0.06, f"{speedup:.2f}", rotation=90, fontsize=5.5, ha="center", va="bottom",
                          color="white" if k else BLACK, zorder=3)
    axes.set_xticks(range(len(sequences)), [sequence_text(seq_len) for seq_len in sequences])
    axes.tick_params(axis="x", length=0, pad=2)
    axes.tick_params(axis="y", pad=2, length=2.5)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--published", help="the paper's figures, experiments/published.json")
    parser.add_argument("--system", default="disagmoe")
    parser.add_argument("output")
    parser.add_argument("records", nargs="+")
    options = parser.parse_args()
    records = [r for r in read_records(options.records) if r["system"] == options.system]
    models, nodes, sequences = (values_of(records, key) for key in ("model", "nodes", "seq_len"))
    figure, panels = plt.subplots(1, len(models), sharey=True, squeeze=False, figsize=(COLUMN_WIDTH, 2.15))
    highest = max([r["speedup_vs_megatron"] or 0 for r in records] + [1])
    band = published_range(options.published)
    if band:
        highest = max(highest, band["high"])
    for axes, model in zip(panels[0], models):
        draw_model(axes, [r for r in records if r["model"] == model], nodes, sequences)
        axes.set_title(model_text(model), pad=3)
        if axes is not panels[0][0]:
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", left=False)
        axes.axhline(1, color=BLACK, linewidth=0.8, linestyle=(0, (3, 2)), zorder=4)
        if band:
            axes.axhspan(band["low"], band["high"], color=ORANGE, alpha=0.45, linewidth=0, zorder=1)
    panels[0][0].set_ylim(0, highest * 1.05)
    panels[0][0].yaxis.set_major_locator(plt.MultipleLocator(0.5))
    panels[0][0].set_ylabel("Speedup over Megatron", labelpad=2)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[k % len(COLOURS)]) for k in range(len(nodes))]
    labels = [f"{int(count)} nodes" for count in nodes]
    if band:
        handles.append(plt.Rectangle((0, 0), 1, 1, color=ORANGE, alpha=0.45, linewidth=0))
        labels.append(f"paper: {band['low']:.2f}–{band['high']:.2f}")
    handles.append(plt.Line2D([], [], color=BLACK, linewidth=0.8, linestyle=(0, (3, 2))))
    labels.append("Megatron = 1")
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False, handlelength=1.4,
                  columnspacing=1.0, handletextpad=0.4, borderaxespad=0.1)
    figure.supxlabel("Sequence length", fontsize=7, y=0.01)
    figure.subplots_adjust(left=0.105, right=0.995, top=0.83, bottom=0.165, wspace=0.05)
    save(figure, options.output)


main()
