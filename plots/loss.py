#!/usr/bin/python3
"""Loss of real training runs step by step: each system's curve, and how far it is from the first one's.

usage: loss.py OUTPUT LINES...    LINES: what `disagmoe train --jsonl` wrote; writes OUTPUT.png and OUTPUT.svg
"""
import argparse
import sys

from common import BLACK, BLUE, COLUMN_WIDTH, GREY, VERMILION, plt, read_records, save

STYLES = {"reference": (GREY, "-", 3), "megatron": (BLUE, "-", 1.2), "disagmoe": (VERMILION, (0, (4, 3)), 1.2)}
OTHER = (BLACK, ":", 1.2)


def curves(records):
    """Cross-entropy by step of each system, in the order of the files."""
    found = {}
    for record in records:
        if "step" in record and record.get("cross_entropy") is not None:
            found.setdefault(record["system"], {})[record["step"]] = record["cross_entropy"]
    if not found:
        sys.exit(f"{sys.argv[0]}: no steps in these lines")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("lines", nargs="+")
    options = parser.parse_args()
    records = read_records(options.lines)
    found = curves(records)
    entropy = next((r["entropy"] for r in records if r.get("entropy")), None)
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(COLUMN_WIDTH, 2.9),
                                          gridspec_kw={"height_ratios": [2, 1]})
    for system, curve in found.items():
        colour, line, width = STYLES.get(system, OTHER)
        upper.plot(list(curve), list(curve.values()), color=colour, linestyle=line, linewidth=width, label=system)
    if entropy is not None:
        upper.axhline(entropy, color=BLACK, linewidth=0.6, linestyle=(0, (1, 1.5)), label="entropy of the data")
    upper.set_ylabel("Cross-entropy (nats)")
    upper.legend(frameon=False)
    base, *others = found
    for system in others:
        steps = [step for step in found[system] if step in found[base]]
        apart = [abs(found[system][step] - found[base][step]) / found[base][step] for step in steps]
        colour, _, _ = STYLES.get(system, OTHER)
        lower.plot(steps, [max(value, 1e-12) for value in apart], color=colour, linewidth=0.8, label=system)
    lower.set_yscale("log")
    lower.set_ylim(1e-12, 1)
    lower.set_yticks([1e-12, 1e-8, 1e-4, 1])
    lower.set_ylabel("Relative\ndifference")
    lower.text(0.5, 0.93, f"of each loss to the {base}'s", transform=lower.transAxes, ha="center", va="top")
    lower.set_xlabel("Step")
    lower.grid(axis="y", color="#DDDDDD", linewidth=0.5)
    figure.subplots_adjust(left=0.2, right=0.975, top=0.98, bottom=0.125, hspace=0.12)
    figure.align_ylabels()
    save(figure, options.output)


main()
