"""What the figures share: reading records, the style, writing the same bytes on every run.

A record is a dictionary of flat keys as in the CSV ("breakdown.ffn_s"), whether it was read from CSV or from JSON lines.
"""
import csv
import json
import os
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLUMN_WIDTH = 3.5  # inches, of a two-column paper

# Okabe and Ito's palette, which the usual kinds of colour blindness tell apart.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
GREY = "#B8B8B8"

plt.rcParams.update({
    "font.family": "DejaVu Sans", "font.size": 7, "axes.titlesize": 7, "axes.labelsize": 7,
    "xtick.labelsize": 6.5, "ytick.labelsize": 6.5, "legend.fontsize": 6.5,
    "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "lines.linewidth": 1.2,
    "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.5,
    "svg.hashsalt": "disagmoe", "svg.fonttype": "path", "savefig.dpi": 300,
})


def flatten(record, before=""):
    flat = {}
    for key, value in record.items():
        if isinstance(value, dict) and before != "swept.":
            flat.update(flatten(value, before + key + "."))
        elif isinstance(value, (dict, list)):  # a swept value is one column, whatever it is
            flat[before + key] = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        else:
            flat[before + key] = value
    return flat


def number_or_text(text):
    if text == "":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def read_records(files):
    """All records of the files: CSV where the name ends in .csv, else JSON lines."""
    records = []
    for file in files:
        with open(file, encoding="utf-8", newline="") as stream:
            if file.endswith(".csv"):
                records += [{key: number_or_text(text) for key, text in row.items()} for row in csv.DictReader(stream)]
            else:
                records += [flatten(json.loads(line)) for line in stream if line.strip()]
    if not records:
        sys.exit(f"{sys.argv[0]}: no records in {', '.join(files)}")
    return records


def values_of(records, key):
    """Distinct values in the order of their first appearance."""
    return list(dict.fromkeys(record[key] for record in records if record[key] is not None))


def sequence_text(seq_len):
    return f"{int(seq_len) // 1024}K" if seq_len % 1024 == 0 else f"{int(seq_len)}"


def model_text(name):
    known = {"deepseek-moe-16b": "DeepSeek-MoE 16B", "gpt-oss-120b": "GPT-OSS 120B", "qwen3-235b": "Qwen3 235B"}
    return known.get(name.removesuffix("-paper"), name)


def published_range(file):
    """The paper's range of speedups, as {"low", "high"}; None without a file."""
    if not file:
        return None
    with open(file, encoding="utf-8") as stream:
        return json.load(stream)["speedup_vs_megatron"]


def save(figure, output):
    """Writes OUTPUT.png and OUTPUT.svg, each whole or not at all."""
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        temporary = f"{output}.tmp.{kind}"
        try:
            figure.savefig(temporary, format=kind, metadata=metadata)
            os.replace(temporary, f"{output}.{kind}")
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)
