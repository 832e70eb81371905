#!/usr/bin/python3
"""Parts of the step time of the busiest worker, stacked: each sequence length has a bar for each system.

The step time is divided by the step's tokens, so that sequence lengths stand on one scale.
usage: breakdown.py [--nodes N] OUTPUT RECORDS...    writes OUTPUT.png and OUTPUT.svg
"""
import argparse

from common import BLUE, COLUMN_WIDTH, GREEN, GREY, ORANGE, PURPLE, SKY, model_text, plt, read_records, save
from common import sequence_text, values_of

PARTS = [("attention_s", "attention", BLUE, None), ("ffn_s", "FFN", SKY, None),
         ("other_compute_s", "other compute", GREEN, None), ("exposed_comm_s", "exposed communication", ORANGE, "////"),
         ("bubble_s", "bubble", GREY, "...."), ("optimizer_s", "optimizer", PURPLE, None)]
BAR = 0.40


def draw_bar(axes, x, record):
    tokens, below = record["global_batch"] * record["seq_len"], 0
    for key, _, colour, hatch in PARTS:
        height = 1e6 * record["breakdown." + key] / tokens
        axes.bar(x, height, BAR * 0.92, bottom=below, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        below += height
    return below


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, help="records of this many nodes alone; needed where there are several")
    parser.add_argument("output")
    parser.add_argument("records", nargs="+")
    options = parser.parse_args()
    records = [r for r in read_records(options.records) if options.nodes in (None, r["nodes"])]
    if len(values_of(records, "nodes")) != 1:
        parser.error(f"records of one number of nodes are needed, found {values_of(records, 'nodes')}: use --nodes")
    models, sequences, systems = (values_of(records, key) for key in ("model", "seq_len", "system"))
    letters = {system: system[0].upper() for system in systems}
    figure, panels = plt.subplots(1, len(models), squeeze=False, figsize=(COLUMN_WIDTH, 2.4))
    for axes, model in zip(panels[0], models):
        ticks, highest = [], 0
        for x, seq_len in enumerate(sequences):
            for k, system in enumerate(systems):
                at = x + (k - (len(systems) - 1) / 2) * BAR
                ticks.append((at, letters[system]))
                for record in records:
                    if (record["model"], record["seq_len"], record["system"]) != (model, seq_len, system):
                        continue
                    if record["step_time_s"] is None:
                        axes.text(at, 0, "no fit", rotation=90, fontsize=5, ha="center", va="bottom")
                    else:
                        highest = max(highest, draw_bar(axes, at, record))
            axes.text(x, -0.085, sequence_text(seq_len), ha="center", va="top", transform=axes.get_xaxis_transform())
        axes.set_xticks([at for at, _ in ticks], [letter for _, letter in ticks], fontsize=5.5)
        axes.tick_params(axis="x", length=0, pad=1.5)
        axes.tick_params(axis="y", pad=1.5, length=2)
        axes.set_ylim(0, highest * 1.04)
        axes.yaxis.set_major_locator(plt.MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.set_title(model_text(model), pad=3)
    panels[0][0].set_ylabel("Step time per token (µs)", labelpad=2)
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0)
               for _, _, colour, hatch in PARTS]
    figure.legend(handles, [label for _, label, _, _ in PARTS], loc="upper center", ncols=3, frameon=False,
                  handlelength=1.4, columnspacing=1.2, handletextpad=0.4, borderaxespad=0.1, labelspacing=0.25)
    named = ", ".join(f"{letters[system]}: {system}" for system in systems)
    figure.supxlabel(f"Sequence length ({named}; {int(records[0]['nodes'])} nodes)", fontsize=7, y=0.012)
    figure.subplots_adjust(left=0.1, right=0.995, top=0.8, bottom=0.185, wspace=0.27)
    save(figure, options.output)


main()
